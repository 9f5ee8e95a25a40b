"""Modules that depend on padding in ways that are easily missed: none is trimmed to other gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support import Scalar, ddp, loader, relative_error, trainer, x
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation
from lightning_accum.splitting import snapshot

Loss = Callable[["Reader", dict[str, Tensor]], Tensor]


def padded(lengths: list[int], width: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, 9, mask.shape, generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "y": torch.randint(0, 3, (len(lengths),), generator=generator)}


class Reader(pl.LightningModule):
    """Embeds tokens; the loss is told from outside."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.token, self.target, self.head = nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Linear(4, 3)
        self.double()
        self.loss = loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def of_tokens(module: Reader, batch: dict[str, Tensor]) -> Tensor:
    """The loss of each token, none of padding."""
    logits = module.head(module.token(batch["input_ids"]))
    return F.cross_entropy(logits.flatten(0, 1), (batch["input_ids"] % 3).flatten(), reduction="none").reshape(logits.shape[:2])


def mean_of_tokens(module: Reader, batch: dict[str, Tensor]) -> Tensor:
    return (of_tokens(module, batch) * batch["attention_mask"]).sum() / batch["attention_mask"].sum()


def mean_over_padding(module: Reader, batch: dict[str, Tensor]) -> Tensor:
    return (of_tokens(module, batch) * batch["attention_mask"]).mean()


def error_over_padding(module: Reader, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["attention_mask"][..., None]
    return F.mse_loss(module.head(module.token(batch["input_ids"])) * mask, mask.expand(-1, -1, 3).double())


def pool(embedded: Tensor) -> Tensor:
    return embedded.mean(1)  # over padding too


def untrained_head(module: Reader, batch: dict[str, Tensor]) -> Tensor:
    if not module.trainer.global_step:
        with torch.no_grad():
            module.head.weight.data.zero_()  # the loss does not depend on anything yet, its gradient does
            module.head.bias.data.zero_()
    return F.cross_entropy(module.head(pool(module.token(batch["input_ids"]))), batch["y"])


def in_training_only(module: Reader, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["attention_mask"][..., None]
    embedded = module.token(batch["input_ids"])
    loss = F.cross_entropy(module.head((embedded * mask).sum(1) / mask.sum(1)), batch["y"])
    return loss + pool(embedded).square().mean() if module.training else loss


def from_the_second_epoch(module: Reader, batch: dict[str, Tensor]) -> Tensor:
    if module.current_epoch:
        return F.cross_entropy(module.head(pool(module.token(batch["input_ids"]))), batch["y"])
    return (of_tokens(module, batch) * batch["attention_mask"]).sum() / batch["attention_mask"].sum()


def of_targets_over_padding(module: Reader, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["attention_mask"][..., None]
    source = (module.token(batch["input_ids"]) * mask).sum(1) / mask.sum(1)
    return F.cross_entropy(module.head(source + pool(module.target(batch["decoder_input_ids"]))), batch["y"])


def with_targets(source: list[int], target: list[int], width: int, seed: int = 0) -> dict[str, Tensor]:
    batch, other = padded(source, 8, seed), padded(target, width, seed + 1)
    return {**batch, "decoder_input_ids": other["input_ids"], "decoder_attention_mask": other["attention_mask"]}


LENGTHS = [8, 3, 5, 1, 2, 4]


@pytest.mark.parametrize(
    ("loss", "batches"),
    [
        (mean_over_padding, [padded(LENGTHS, 8)] * 2),
        (error_over_padding, [padded(LENGTHS, 8)] * 2),
        (untrained_head, [padded(LENGTHS, 8)] * 2),
        (in_training_only, [padded(LENGTHS, 8)] * 2),
        (from_the_second_epoch, [padded(LENGTHS, 8)] * 2),
        (of_targets_over_padding, [with_targets(LENGTHS, [6] * 6, 6), with_targets(LENGTHS, [1, 2, 3, 4, 5, 6], 6)]),
        (of_targets_over_padding, [with_targets(LENGTHS, [1, 2, 1, 6, 5, 2], 6)]),
    ],
)
def test_module_equals_itself_unsplit_and_a_warning_says_why(loss: Loss, batches: list[dict[str, Tensor]]) -> None:
    whole, split = Reader(loss), Reader(loss)
    trainer("auto", max_epochs=2).fit(whole, loader(batches))
    run = trainer(callbacks=[GradientAccumulation(micro_batch=2)], max_epochs=2)
    with pytest.warns(UserWarning, match="is not trimmed: the loss of this module depends on it"):
        run.fit(split, loader(batches))
    assert relative_error(split.parameters(), whole.parameters()) < 1e-12


@pytest.mark.parametrize("is_counted", [True, False], ids=["no_grad", "data"])
def test_what_a_step_writes_into_parameters_is_not_written_by_the_trial(is_counted: bool) -> None:
    """torch counts the changes of a parameter, and not those through its ``.data``."""
    widths = []

    @torch.no_grad()
    def update(target: Tensor, source: Tensor) -> None:
        target.mul_(0.5).add_(source, alpha=0.5)

    def with_momentum(module: Reader, batch: dict[str, Tensor]) -> Tensor:
        widths.append(batch["input_ids"].shape[1])
        update(module.target.weight if is_counted else module.target.weight.data, module.token.weight)
        return mean_of_tokens(module, batch)

    module = Reader(with_momentum)
    module.target.requires_grad_(False)
    first, momentum = module.token.weight.detach().clone(), module.target.weight.detach().clone()
    trainer(callbacks=[GradientAccumulation(micro_batch=2, check=False)]).fit(module, loader([padded([1, 2, 2, 6, 5, 1, 2, 3], 9)]))
    assert widths[-4:] == [6, 3, 2, 1]
    assert relative_error([module.target.weight], [first + (momentum - first) / 2**4]) < 1e-12  # of four micro-batches


@pytest.mark.parametrize("is_buffer", [True, False], ids=["buffer", "attribute"])
def test_a_large_tensor_that_a_step_changes_has_to_be_a_buffer(is_buffer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_bank(module: Reader, batch: dict[str, Tensor]) -> Tensor:
        module.bank += len(batch["input_ids"])
        return mean_of_tokens(module, batch)

    monkeypatch.setattr(snapshot, "_MOST_ELEMENTS", 10)
    module, bank = Reader(with_bank), torch.zeros(11)
    if is_buffer:
        module.register_buffer("bank", bank)
    else:
        module.bank = bank
    with nullcontext() if is_buffer else pytest.raises(RuntimeError, match="'bank' in place, .* Make it a buffer of the module"):
        trainer(callbacks=[GradientAccumulation(micro_batch=2)]).fit(module, loader([padded([1, 2, 2, 6, 5, 1, 2, 3], 9)]))
    assert module.global_step == int(is_buffer)
    assert not is_buffer or module.bank.tolist() == [8.0] * 11


def test_trying_does_not_wait_for_a_rank_that_has_nothing_to_try() -> None:
    class Gathers(Reader):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            self.all_gather(torch.ones(()))
            return super().training_step(batch, batch_idx)

        def train_dataloader(self) -> Any:  # no padding on the second rank
            return loader([padded([8, 3, 5, 1] if self.trainer.global_rank == 0 else [8, 8, 8, 8], 8)])

    def masked(module: Reader, batch: dict[str, Tensor]) -> Tensor:
        return (of_tokens(module, batch) * batch["attention_mask"]).sum() / batch["attention_mask"].sum()

    module = Gathers(masked)
    trainer(ddp(find_unused_parameters=True), devices=2, callbacks=[GradientAccumulation(micro_batch=2)]).fit(module)
    assert not torch.equal(module.head.weight, Reader(masked).head.weight)


# --- what is no dependence on padding ---------------------------------------------------------------------------------


class Widths(Reader):
    """Notes the columns that it sees. The loss is of tokens, and of none that is padding."""

    widths: list[int]

    def __init__(self) -> None:
        super().__init__(masked_mean)
        type(self).widths = []  # of the class: what a trial does to attributes of the module is taken back

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.widths.append(batch["input_ids"].shape[1])
        return super().training_step(batch, batch_idx)


def masked_mean(module: Reader, batch: dict[str, Tensor]) -> Tensor:
    return (of_tokens(module, batch) * batch["attention_mask"]).sum() / batch["attention_mask"].sum()


PROOF, WHOLE, TRIMMED = [8, 2], [8, 8, 8], [8, 4, 2]


def warnings_of(recwarn: pytest.WarningsRecorder) -> list[str]:
    return [str(warning.message) for warning in recwarn if "is not trimmed" in str(warning.message)]


def test_memory_that_runs_out_in_the_trial_is_no_dependence_and_it_is_tried_again(recwarn: pytest.WarningsRecorder) -> None:
    class Crowded(Widths):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if len(self.widths) in (1, 5):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
            return loss

    module = Crowded()
    batches = [padded(LENGTHS, 8, seed) for seed in range(4)]
    trainer(callbacks=[GradientAccumulation(micro_batch=2, check=False)]).fit(module, loader(batches))
    # refused in the trials of the first two batches, not asked with the third, then found right
    assert module.widths == [8, *WHOLE, 8, *WHOLE, *WHOLE, *PROOF, *TRIMMED]
    (warning,) = warnings_of(recwarn)
    assert "could not be found out (memory ran out)" in warning


def test_a_loss_that_is_not_finite_is_no_dependence_and_it_is_tried_again(recwarn: pytest.WarningsRecorder) -> None:
    class Spoilt(Widths):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * batch["scale"].mean()

    batches = [{**padded(LENGTHS, 8, seed), "scale": torch.ones(6).double()} for seed in range(2)]
    batches[0]["scale"][3] = float("nan")  # the shortest row
    module = Spoilt()
    trainer(callbacks=[GradientAccumulation(micro_batch=2, check=False, on_nonfinite="skip")]).fit(module, loader(batches))
    assert module.widths == [*PROOF, *WHOLE, *PROOF, *TRIMMED]
    (warning,) = warnings_of(recwarn)
    assert "could not be found out (its loss or gradient is not finite)" in warning


class NearlyTrained(Widths):
    """Predicts what is all but right already: rounding is large beside the loss, and differs with the number of columns."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.widths.append(batch["input_ids"].shape[1])
        found = self.pooled(batch)
        return F.mse_loss(found, 1.01 * found.detach().double().round(decimals=1).to(found.dtype))

    def pooled(self, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"]
        embedded = self.head(self.token(batch["input_ids"])) * mask[..., None]
        return embedded.mean(1) * (mask.shape[1] / mask.sum(1, keepdim=True))


def long(seed: int) -> dict[str, Tensor]:
    return padded([97, 41, 60, 13, 26, 53], 97, seed)


def test_rounding_in_bfloat16_is_no_dependence(recwarn: pytest.WarningsRecorder) -> None:
    module = NearlyTrained()
    before = list(module.parameters())
    run = trainer(callbacks=[GradientAccumulation(micro_batch=2, check=False)], precision="bf16-true")
    run.fit(module, loader([long(0), long(1)]))
    assert not warnings_of(recwarn)
    assert module.widths == [97, 26, 97, 53, 26, 97, 53, 26]
    assert all(now is then and now.dtype == torch.bfloat16 for now, then in zip(module.parameters(), before, strict=True))


def test_rounding_in_an_autocast_of_the_modules_own_is_not_called_dependence(recwarn: pytest.WarningsRecorder) -> None:
    class Autocast(NearlyTrained):
        def pooled(self, batch: dict[str, Tensor]) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().pooled(batch)

    trainer(callbacks=[GradientAccumulation(micro_batch=2)]).fit(Autocast().float(), loader([long(0)]))
    (warning,) = warnings_of(recwarn)
    assert "which may be rounding in lower precision" in warning


def test_a_module_that_depends_on_padding_is_found_out_in_bfloat16_too() -> None:
    run = trainer(callbacks=[GradientAccumulation(micro_batch=2)], precision="bf16-true")
    with pytest.warns(UserWarning, match="is not trimmed: the loss of this module depends on it"):
        run.fit(Reader(mean_over_padding), loader([padded(LENGTHS, 8)]))


def test_ddp_reduces_the_gradients_of_a_module_that_was_tried_in_single_precision() -> None:
    class Ranked(Widths):
        def train_dataloader(self) -> Any:
            return loader([padded(LENGTHS, 8, self.trainer.global_rank)])

    module, alone = Ranked(), Reader(masked_mean)
    callback = GradientAccumulation(micro_batch=2, accumulate_dtype=torch.float32)
    trainer(ddp(find_unused_parameters=True), devices=2, callbacks=[callback], precision="bf16-true").fit(module)
    both = {key: torch.cat([padded(LENGTHS, 8, rank)[key] for rank in (0, 1)]) for key in padded(LENGTHS, 8)}
    trainer("auto").fit(alone, loader([both]))
    start = Reader(masked_mean)
    moved = [(now.double() - then.bfloat16().double()) for now, then in zip(module.parameters(), start.parameters(), strict=True)]
    expected = [now - then for now, then in zip(alone.parameters(), start.parameters(), strict=True)]
    assert relative_error(moved, expected) < 0.1  # bfloat16; with the gradients of one rank it is 0.7


def test_a_resumed_training_proves_anew_that_padding_is_harmless(tmp_path: Any) -> None:
    batches = [padded(LENGTHS, 8, seed) for seed in range(3)]
    path = str(tmp_path / "inside_epoch.ckpt")

    class Saves(Callback):
        def on_train_batch_end(self, run: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                run.save_checkpoint(path)

    module = Widths()
    trainer(callbacks=[GradientAccumulation(micro_batch=2, check=False), Saves()]).fit(module, loader(batches))
    assert module.widths == [*PROOF, *TRIMMED, *TRIMMED, *TRIMMED]
    resumed = Widths()
    trainer(callbacks=[GradientAccumulation(micro_batch=2, check=False)]).fit(resumed, loader(batches), ckpt_path=path)
    assert resumed.widths == [*PROOF, *TRIMMED, *TRIMMED]


# --- a module that takes the longest of its rows for the number of columns -----------------------------------------------


class Forecaster(pl.LightningModule):
    """Encoder and decoder have the columns that the longest of their rows needs, as in a temporal fusion transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.encode, self.decode = nn.Linear(2, 3, dtype=torch.float64), nn.Linear(5, 1, dtype=torch.float64)
        self.rows: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, (target, _) = batch
        self.rows.append(len(target))
        past, future = (self.mask(x[f"{side}_lengths"])[..., None] for side in ("encoder", "decoder"))
        context = (self.encode(x["encoder_cont"]) * past).sum(1) / past.sum(1)  # of other sizes: an error of torch
        joined = torch.cat((x["decoder_cont"], context[:, None].expand(-1, future.shape[1], -1)), 2)
        return ((self.decode(joined)[..., 0] - target).abs() * future[..., 0]).sum() / future.sum()

    def mask(self, lengths: Tensor) -> Tensor:
        return torch.arange(int(lengths.max())) < lengths[:, None]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def forecasts(encoder: list[int], decoder: list[int], seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"encoder": (len(encoder), max(encoder), 2), "decoder": (len(decoder), max(decoder), 2)}
    x = {f"{side}_cont": torch.rand(shape, generator=generator, dtype=torch.float64) for side, shape in shapes.items()}
    x |= {"encoder_lengths": torch.tensor(encoder), "decoder_lengths": torch.tensor(decoder)}
    return x, (torch.rand(shapes["decoder"][:2], generator=generator, dtype=torch.float64), None)


FORECASTS = [forecasts([9, 4, 7, 5, 9, 6], [3, 6, 1, 2, 6, 4], 0), forecasts([5, 8, 5, 7, 4, 4], [3, 3, 5, 1, 2, 2], 1)]


def test_lengths_trim_every_tensor_that_they_are_of(recwarn: pytest.WarningsRecorder) -> None:
    whole, split = Forecaster(), Forecaster()
    trainer("auto").fit(whole, loader(FORECASTS))
    trainer(callbacks=[GradientAccumulation(micro_batch=2, trim_padding="lengths")]).fit(split, loader(FORECASTS))
    assert split.rows == [2, 2, 2] * 2
    assert relative_error(split.parameters(), whole.parameters()) < 1e-12
    assert not warnings_of(recwarn)


def test_one_key_of_lengths_is_enough_where_only_those_differ() -> None:
    batches = [forecasts([9] * 6, [3, 6, 1, 2, 6, 4], 0), forecasts([8] * 4, [2, 2, 3, 1], 1)]
    whole, split = Forecaster(), Forecaster()
    trainer("auto").fit(whole, loader(batches))
    trainer(callbacks=[GradientAccumulation(micro_batch=2, trim_padding="decoder_lengths")]).fit(split, loader(batches))
    assert relative_error(split.parameters(), whole.parameters()) < 1e-12


def test_an_error_of_a_micro_batch_names_it_and_keeps_its_type() -> None:
    with pytest.raises(RuntimeError, match="must match the size") as raised:
        trainer(callbacks=[GradientAccumulation(micro_batch=2, trim_padding=False)]).fit(Forecaster(), loader(FORECASTS))
    if hasattr(raised.value, "__notes__"):  # Python 3.10 has none
        (note,) = raised.value.__notes__
        assert "micro-batch 1 of 3, rows 2, 3 of the loader batch, with all columns" in note
        assert "trim_padding=<their key>" in note


# --- what a batch is to a module --------------------------------------------------------------------------------------


def test_auto_does_not_retry_a_batch_that_was_changed_in_place() -> None:
    class InPlace(Scalar):
        def loss(self, x: Tensor) -> Tensor:
            x.sub_(1.0)
            if len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return (self.w * x).mean()

    with pytest.raises(RuntimeError, match="changed its batch in place"):
        trainer(callbacks=[GradientAccumulation(micro_batch="auto")]).fit(InPlace([x(1, 2, 3, 4)]))


@pytest.mark.parametrize("size", [2, "auto"])
def test_containers_that_a_micro_batch_takes_apart_are_its_own(size: Any) -> None:
    class Pops(Scalar):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
            values = batch.pop("x")
            batch["meta"].pop("name")
            if len(values) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return (self.w * values).mean()

    batch = {"x": x(1, 2, 3, 4, 5), "y": torch.zeros(5), "meta": {"name": "a"}}
    module = Pops([batch])
    trainer(callbacks=[GradientAccumulation(micro_batch=size)]).fit(module)
    assert module.total == pytest.approx(3.0, rel=1e-12)
    assert set(batch) == {"x", "y", "meta"}


def test_names_that_are_no_identifiers_are_found_in_every_batch() -> None:
    class Named(Scalar):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return (self.w * batch["my-x"]).mean()

    module = Named([{"my-x": x(1, 2, 3), "class 1": x(0, 0, 0)}] * 3)
    trainer(callbacks=[GradientAccumulation(micro_batch=2)]).fit(module)
    assert module.total == pytest.approx(6.0, rel=1e-12)


def test_callbacks_and_clipping_that_come_later_are_heard() -> None:
    class Heard(Callback):
        steps = 0

        def on_before_optimizer_step(self, *_: Any) -> None:
            self.steps += 1

    class Changing(Scalar):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.trainer.gradient_clip_val = 0.5
            if batch_idx == 2:
                self.trainer.callbacks.append(heard)

    heard = Heard()
    Changing.on_before_optimizer_step = pl.LightningModule.on_before_optimizer_step
    module = Changing([x(1, 1, 1)] * 4)
    trainer(callbacks=[GradientAccumulation(micro_batch=2)]).fit(module)
    assert module.total == pytest.approx(1.0 + 3 * 0.5 / (1 + 1e-6), rel=1e-12)  # torch adds 1e-6 to a norm
    assert heard.steps == 2


def test_what_a_strategy_of_several_ranks_does_after_a_step_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    original = pl.strategies.DDPStrategy.optimizer_step
    monkeypatch.setattr(pl.strategies.DDPStrategy, "optimizer_step", lambda *args, **kwargs: done.append(original(*args, **kwargs)))
    module = Scalar([x(1, 2, 3)] * 2)
    trainer(ddp(), devices=1, callbacks=[GradientAccumulation(micro_batch=2)]).fit(module)
    assert module.total == pytest.approx(4.0, rel=1e-12)

    class Seen(Scalar):
        def on_train_end(self) -> None:
            assert len(done) == 2

    trainer(ddp(), devices=2, callbacks=[GradientAccumulation(micro_batch=2)]).fit(Seen([x(1, 2, 3)] * 2))
