"""Modules that depend on padding in ways that are easily missed: none is trimmed to other gradients."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import SaveAfter, Scalar, ddp, error_of_updates, fit, loader, relative_error, warned, x
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from lightning_accum import GradientAccumulation

Row = dict[str, Tensor]
LENGTHS = [8, 3, 5, 1, 2, 4]


def padded(lengths: list[int], width: int = 8, seed: int = 0, prefix: str = "") -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids, y = torch.randint(1, 9, mask.shape, generator=generator) * mask, torch.randint(0, 3, (len(lengths),), generator=generator)
    return [{f"{prefix}input_ids": i, f"{prefix}attention_mask": m, f"{prefix}y": t} for i, m, t in zip(ids, mask, y, strict=True)]


def with_targets(target: list[int]) -> list[Row]:
    return [{**row, **other} for row, other in zip(padded(LENGTHS), padded(target, 6, 1, "decoder_"), strict=True)]


UNLABELLED = padded(LENGTHS)  # the shortest rows have no label, and so no loss with or without padding
for place in (3, 4):
    UNLABELLED[place]["y"] = torch.tensor(-100)


class Reader(pl.LightningModule):  # embeds tokens; the loss is told from outside
    widths: list[int]

    def __init__(self, loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.token, self.target, self.head = nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Linear(4, 3)
        self.double()
        self.loss = loss
        type(self).widths = []  # of the class: what a trial does to attributes of the module is taken back

    def training_step(self, batch: Row, batch_idx: int) -> Tensor:
        self.widths.append(batch["input_ids"].shape[1])
        return self.loss(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


# fmt: off
def of_tokens(module: Reader, batch: Row) -> Tensor:  # the loss of each token, none of padding
    logits = module.head(module.token(batch["input_ids"]))
    losses = F.cross_entropy(logits.flatten(0, 1), (batch["input_ids"] % 3).flatten(), reduction="none").reshape(logits.shape[:2])
    return losses * batch["attention_mask"]

def mean_of_tokens(module: Reader, batch: Row) -> Tensor:
    return of_tokens(module, batch).sum() / batch["attention_mask"].sum()

def error_over_padding(module: Reader, batch: Row) -> Tensor:
    mask = batch["attention_mask"][..., None]
    return F.mse_loss(module.head(module.token(batch["input_ids"])) * mask, mask.expand(-1, -1, 3).to(module.head.weight))

def pooled_over_padding(module: Reader, batch: Row) -> Tensor:
    return F.cross_entropy(module.head(module.token(batch["input_ids"]).mean(1)), batch["y"])

def pooled_over_labelled(module: Reader, batch: Row) -> Tensor:
    logits = module.head(module.token(batch["input_ids"]).mean(1))
    return F.cross_entropy(logits, batch["y"], reduction="sum") / (batch["y"] >= 0).sum().clamp(min=1)

def untrained_head(module: Reader, batch: Row) -> Tensor:
    if not module.trainer.global_step:
        module.head.weight.data.zero_()  # the loss does not depend on anything yet, its gradient does
        module.head.bias.data.zero_()
    return pooled_over_padding(module, batch)

def source_of(module: Reader, batch: Row) -> Tensor:
    mask = batch["attention_mask"][..., None]
    return (module.token(batch["input_ids"]) * mask).sum(1) / mask.sum(1)

def in_training_only(module: Reader, batch: Row) -> Tensor:
    loss = F.cross_entropy(module.head(source_of(module, batch)), batch["y"])
    return loss + module.token(batch["input_ids"]).mean(1).square().mean() if module.training else loss



def of_targets_over_padding(module: Reader, batch: Row) -> Tensor:
    pooled = module.target(batch["decoder_input_ids"]).mean(1)
    return F.cross_entropy(module.head(source_of(module, batch) + pooled), batch["y"])
# fmt: on


@pytest.mark.parametrize(
    ("loss", "batches"),
    [
        (lambda module, batch: of_tokens(module, batch).mean(), [padded(LENGTHS)] * 2),
        (error_over_padding, [padded(LENGTHS)] * 2),
        (pooled_over_labelled, [UNLABELLED] * 2),
        (lambda module, batch: None if (batch["y"] < 0).all() else pooled_over_labelled(module, batch), [UNLABELLED] * 2),
        (untrained_head, [padded(LENGTHS)] * 2),
        (in_training_only, [padded(LENGTHS)] * 2),
        (lambda module, batch: [mean_of_tokens, pooled_over_padding][module.current_epoch](module, batch), [padded(LENGTHS)] * 2),
        (of_targets_over_padding, [with_targets([6] * 6), with_targets([1, 2, 3, 4, 5, 6])]),
        (of_targets_over_padding, [with_targets([1, 2, 1, 6, 5, 2])]),
    ],
)
def test_a_module_that_depends_on_padding_is_not_trimmed_and_a_warning_says_why(loss: Any, batches: list[list[Row]]) -> None:
    whole, split, data = Reader(loss), Reader(loss), [default_collate(rows) for rows in batches]
    fit(whole, data, strategy="auto", max_epochs=2)
    with warned() as messages:
        fit(split, data, GradientAccumulation(micro_batch=2), max_epochs=2)
    assert error_of_updates(split, whole, Reader(loss)) < 1e-12
    assert any("trim" in message for message in messages)
    with warned() as messages:
        fit(Reader(loss), data, GradientAccumulation(micro_batch=2), max_epochs=2, precision="bf16-true")
    assert any("trim" in message for message in messages)


def test_a_resumed_training_trims_only_what_its_own_module_shows_to_be_harmless() -> None:  # 0.5 before
    batches, saves = [default_collate(padded(LENGTHS, seed=seed)) for seed in range(4)], SaveAfter(2)
    fit(Reader(mean_of_tokens), batches, GradientAccumulation(micro_batch=2), saves)
    found, expected, start = (Reader(pooled_over_padding) for _ in range(3))
    fit(found, batches, GradientAccumulation(micro_batch=2), ckpt_path="inside.ckpt")
    fit(expected, batches, GradientAccumulation(micro_batch=2, trim_padding=False), ckpt_path="inside.ckpt")
    start.load_state_dict(torch.load("inside.ckpt", weights_only=False)["state_dict"])
    assert error_of_updates(found, expected, start) < 1e-12


@pytest.mark.parametrize("is_counted", [True, False], ids=["no_grad", "data"])
def test_what_a_step_writes_into_parameters_is_not_written_by_the_trial(is_counted: bool) -> None:
    """torch counts the changes of a parameter, and not those through its ``.data``."""

    def with_momentum(module: Reader, batch: Row) -> Tensor:
        with torch.no_grad():
            target = module.target.weight if is_counted else module.target.weight.data
            target.mul_(0.5).add_(module.token.weight, alpha=0.5)
        return mean_of_tokens(module, batch)

    module = Reader(with_momentum)
    module.target.requires_grad_(False)
    first, momentum = module.token.weight.detach().clone(), module.target.weight.detach().clone()
    data = [default_collate(padded([1, 2, 2, 6, 5, 1, 2, 3], 9))]
    fit(module, data, GradientAccumulation(micro_batch=2, check=False))
    assert module.widths[-4:] == [6, 3, 2, 1]
    assert relative_error([module.target.weight], [first + (momentum - first) / 2**4]) < 1e-12  # of four micro-batches


def test_what_cannot_be_found_out_in_one_batch_is_tried_again() -> None:
    batches = [default_collate([{**row, "scale": torch.ones(()).double()} for row in padded(LENGTHS, 8, s)]) for s in range(3)]
    batches[0]["scale"][3] = torch.nan  # the shortest row
    module = Reader(lambda module, batch: mean_of_tokens(module, batch) * batch["scale"].mean())
    with warned():
        fit(module, batches, GradientAccumulation(micro_batch=2, check=False, on_nonfinite="skip"))
    assert module.widths[-3:] == [8, 4, 2]


def test_ranks_reduce_the_gradients_of_a_module_that_was_tried_in_single_precision_and_wait_for_nobody() -> None:
    """One of them has no padding, and so nothing to try."""

    def gathers(module: Reader, batch: Row) -> Tensor:
        module.all_gather(torch.ones(()))
        return mean_of_tokens(module, batch)

    rows = [padded([8, 3, 5, 1]), padded([8] * 4)]
    module, alone = Reader(gathers), Reader(mean_of_tokens)
    module.train_dataloader = lambda: loader([default_collate(rows[module.trainer.global_rank])])
    policy = GradientAccumulation(micro_batch=2, accumulate_dtype=torch.float32)
    fit(module, None, policy, strategy=ddp(find_unused_parameters=True), devices=2, precision="bf16-true")
    fit(alone, [default_collate(rows[0] + rows[1])], strategy="auto")
    assert error_of_updates(module, alone, Reader(mean_of_tokens).bfloat16()) < 0.2  # with the gradients of one rank it is 0.7


@pytest.mark.parametrize("size", [2, "auto"])
def test_containers_that_a_micro_batch_takes_apart_are_its_own_and_any_name_is_one(size: Any) -> None:
    class Pops(Scalar):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
            values = batch.pop("my-x")
            batch["meta"].pop("name")
            if len(values) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return (self.w * values).mean()

    batches = [{"my-x": x(1, 2, 3, 4, 5), "class 1": torch.zeros(5), "meta": {"name": "a"}} for _ in range(3)]
    fit(module := Pops(batches), None, GradientAccumulation(micro_batch=size))
    assert module.total == pytest.approx(9.0, rel=1e-12)
    assert [set(batch) for batch in batches] == [{"my-x", "class 1", "meta"}] * 3
