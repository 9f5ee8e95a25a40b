"""Modules that are refused, warned of or verified wrongly, each with what should happen. An open one names the issue that mends it.

Issue 31 lists them: 17 to 23 are here, 24 to 29 in ``test_known_differences.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import SaveAfter, Toy, fit, labelled, warned
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

from lightning_accum import AccumulationError, GradientAccumulation, GradientNoiseScale, SampleCount, TokenCount, Tokens, verify
from lightning_accum.testing import EXACT, assert_window_equals_batch, compare_window_with_batch


def until(issue: int, why: str, raises: type[BaseException] = AssertionError) -> pytest.MarkDecorator:
    """What is wrong today, and the issue that mends it."""
    return pytest.mark.xfail(strict=True, raises=raises, reason=f"issue {issue}: {why}")


def rows_of(batches: list[list[Tensor]]) -> list[list[tuple[Tensor, ...]]]:
    return [list(zip(*batch, strict=True)) for batch in batches]


def assert_exact(loss: Callable[[nn.Module, Any], Tensor], batches: list[list[Tensor]], policy: GradientAccumulation) -> None:
    """Windows take the steps of their full batches, and nothing is said against it."""
    with warned() as messages:
        found = compare_window_with_batch(Toy(loss), rows_of(batches), policy).parameters
    assert found <= EXACT
    assert not messages


def cross_entropy(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


# --- 17: verify -----------------------------------------------------------------------------------------------------------


def sixteenth_of_a_sum(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1], reduction="sum") / 16


@until(22, "verify takes what training adds up for a mean: Not equal")
@pytest.mark.parametrize(("rows", "how"), [([16], {"micro_batch": 4}), ([8, 8], {"window": 2})], ids=["split", "window"])
def test_verify_and_training_agree_on_a_sum_that_is_divided_by_a_constant(rows: list[int], how: dict[str, int]) -> None:
    report = verify(Toy(sixteenth_of_a_sum), labelled(*rows), **how)
    assert report, str(report)


@pytest.mark.parametrize(("rows", "policy"), [([16, 16], {"window": 1, "micro_batch": 4}), ([16] * 4, {"window": 2})], ids=str)
def test_training_is_exact_for_a_sum_that_is_divided_by_a_constant(rows: list[int], policy: dict[str, int]) -> None:
    assert_window_equals_batch(Toy(sixteenth_of_a_sum), rows_of(labelled(*rows)), GradientAccumulation(**policy))


@pytest.mark.parametrize("size", [1e-13, 1e-12, 3e-12, 1e-11, 1e-10])
def test_verify_tells_noise_of_float64_from_a_difference(size: float) -> None:
    def noisy(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]) * (1 + size * torch.randn(4, dtype=torch.float64)), batch[1])

    report = verify(Toy(noisy), labelled(16)[0], micro_batch=4)
    assert report, str(report)


class Inherits(Toy):
    """Writes down on each rank whether its process began as a copy of the one that verifies."""

    is_inherited = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if torch.distributed.is_initialized():
            Path(f"rank{self.global_rank}").write_text(str(Inherits.is_inherited))
        return super().training_step(batch, batch_idx)


@until(24, "ranks of verify are forked: where torch has used its threads, which do not survive a fork, they hang")
def test_verify_starts_its_ranks_in_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inherits, "is_inherited", True)
    assert verify(Inherits(cross_entropy), labelled(4, 4), window=1, devices=2)
    assert {path.read_text() for path in Path().glob("rank*")} == {"False"}


# --- 18: schedules over windows of tokens ---------------------------------------------------------------------------------


class OneCycle(Toy):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = OneCycleLR(optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@until(23, "near the end of training the schedule raises: Tried to step 17 times", ValueError)
def test_a_schedule_over_the_estimated_steps_of_windows_of_tokens_lasts_until_training_ends() -> None:
    run = fit(OneCycle(cross_entropy), labelled(*[2] * 8, *[6] * 24), GradientAccumulation(Tokens(8)), max_epochs=2)
    assert run.global_step == 28  # four batches of 2 rows or two of 6 make a window


# --- 19: a list that all rows share ---------------------------------------------------------------------------------------


@until(22, "the list of names is split with the rows, and the step fails on it", RuntimeError)
def test_a_list_of_names_as_long_as_the_batch_is_shared_by_its_rows() -> None:
    names = [f"variable {number}" for number in range(4)]

    def collate(rows: list[Any]) -> list[Any]:
        return [*torch.utils.data.default_collate(rows), names]

    def by_name(net: nn.Module, batch: Any) -> Tensor:
        features, labels, variables = batch
        columns = torch.stack([net.weight[:, names.index(name)] for name in variables], 1)
        return F.cross_entropy(features @ columns.T, labels)

    batches = rows_of(labelled(4, 4))
    assert_window_equals_batch(Toy(by_name), batches, GradientAccumulation(1, micro_batch=2), collate=collate)


# --- 20, 21: the weight that is advised, found or given -------------------------------------------------------------------


def tokens_and_mask(net: nn.Module, batch: Any) -> Tensor:
    outputs = net(batch[0])
    return F.cross_entropy(outputs, batch[1], ignore_index=-100) + (outputs - batch[0]).square()[batch[0] > 0].mean()


@until(22, "[TokenCount(), SampleCount()] is advised for terms over tokens and over a mask")
def test_terms_are_not_advised_counts_that_they_do_not_have() -> None:
    with warned() as messages:
        fit(Toy(tokens_and_mask), labelled(6, 4, 2, 8, ignored=0.4), GradientAccumulation(2))
    assert not any("SampleCount" in message for message in messages)


def vilt(net: nn.Module, batch: Any) -> Tensor:
    """Masked tokens, whether image and text match, and the distances of those that do less the distances of the others."""
    outputs, matches = net(batch[0]), batch[0][:, 0] > 0
    distances = (outputs - batch[0]).square().sum(-1)
    aligned = (distances[matches].sum() - distances[~matches].sum()) / (len(distances[matches]) + len(distances[~matches]))
    matching = F.binary_cross_entropy_with_logits(outputs[:, 0], matches.double())
    return F.cross_entropy(outputs, batch[1], ignore_index=-100) + matching + 0.1 * aligned


@until(22, "0.07 off: a warning advises two weights, an error with these asks for four")
def test_a_sum_of_means_over_tokens_and_samples_is_exact_without_an_argument() -> None:
    assert_exact(vilt, labelled(6, 4, 2, 8, ignored=0.4), GradientAccumulation(2))


@until(22, "the error asks for four weights, where the loss has three terms", AccumulationError)
def test_a_term_that_adds_two_sums_over_one_count_takes_one_weight() -> None:
    weight = [TokenCount(1, shift=False), SampleCount(1), SampleCount(1)]
    assert_exact(vilt, labelled(6, 4, 2, 8, ignored=0.4), GradientAccumulation(2, weight=weight))


class Fused(torch.autograd.Function):
    """A mean cross entropy that keeps nothing but its gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            loss = F.cross_entropy(logits, labels)
            ctx.save_for_backward(*torch.autograd.grad(loss, logits))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.saved_tensors[0] * gradient, None


def fused_and_margin(net: nn.Module, batch: Any) -> Tensor:
    """The margin, a mean over a part of the features, is kept by all rows, so that it has no gradient."""
    logits = net(batch[0])
    return Fused.apply(logits, batch[1]) + F.relu(logits.abs() - 50)[batch[0] > -0.3].mean()


def fused_and_z_loss(net: nn.Module, batch: Any) -> Tensor:
    logits = net(batch[0])
    return Fused.apply(logits, batch[1]) + 0.1 * logits.logsumexp(-1).square().mean()


@until(22, '0.04 off: the check says "pass SampleCount()", and training goes on with another weight')
def test_a_weight_that_the_check_finds_to_add_up_is_taken() -> None:
    assert_exact(fused_and_margin, labelled(6, 4, 2, 8), GradientAccumulation(2))


@until(22, "0.17 off, with two warnings: the weight of the z-loss is taken for both")
def test_a_fused_loss_does_not_take_the_weight_of_a_readable_loss_beside_it() -> None:
    assert_exact(fused_and_z_loss, labelled(6, 4, 2, 8, ignored=0.4), GradientAccumulation(2))


@until(22, "a weight that is exact is warned of: not proportional to what the graph shows")
def test_a_weight_of_ones_own_that_is_exact_is_not_warned_of() -> None:
    def over_all_rows(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1]) * (batch[1] != -100).sum() / len(batch[0])

    policy = GradientAccumulation(2, weight=lambda batch: len(batch[0]), check=False)
    assert_exact(over_all_rows, labelled(6, 4, 2, 8, ignored=0.4), policy)


# --- 22: masks that are added, terms after a resume -----------------------------------------------------------------------


class Attends(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens, self.head = nn.Embedding(17, 8), nn.Linear(8, 3)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        tokens = self.tokens(batch["input_ids"])
        attention = (tokens.sum(-1) + batch["attention_mask"]).softmax(-1)
        return F.cross_entropy(self.head((attention[..., None] * tokens).sum(1)), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@until(22, "columns of an added mask are padded with 0, which attends: Not equal")
def test_where_batches_are_joined_an_added_attention_mask_hides_the_padding() -> None:
    batches = []
    for rows, columns in ((3, 4), (4, 7)):
        is_padding = torch.arange(columns) > torch.arange(rows)[:, None] + columns - rows
        ids = torch.randint(1, 17, (rows, columns), generator=torch.Generator().manual_seed(rows)).masked_fill(is_padding, 0)
        batches.append({"input_ids": ids, "attention_mask": is_padding * -1e4, "labels": torch.arange(rows) % 3})
    report = verify(Attends(), batches, window=2)
    assert report, str(report)


@until(22, "after a resume a term that the check had found to be constant is warned of")
def test_a_term_that_is_the_same_in_all_batches_is_not_warned_of_after_a_resume() -> None:
    def with_constant(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1]) + 0.1 * net(torch.eye(4, dtype=torch.float64)).square().mean()

    batches = labelled(*[8] * 6, ignored=0.4)
    with warned() as messages:
        fit(Toy(with_constant), batches, GradientAccumulation(2), SaveAfter(2))
        fit(Toy(with_constant), batches, GradientAccumulation(2), ckpt_path="inside.ckpt")
    assert not messages


# --- 23: what is wrong with a program is said in the package's words ------------------------------------------------------


class SumsInBackward(Toy):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.sum().backward()


POLICIES = [{"window": 1}, {"window": 2}, {"window": 1, "micro_batch": 2}, {"window": 2, "check": False}]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("kind", [Toy, SumsInBackward])
def test_a_loss_that_is_a_vector_is_named_with_its_shape(kind: type[Toy], policy: dict[str, Any]) -> None:
    module = kind(lambda net, batch: F.cross_entropy(net(batch[0]), batch[1], reduction="none"))
    with pytest.raises(AccumulationError, match=r"training_step .* shape \((6|2),\)"):
        fit(module, labelled(6, 4), GradientAccumulation(**policy))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_loss_without_a_graph_is_named(policy: dict[str, Any]) -> None:
    with pytest.raises(AccumulationError, match="training_step .* graph"):
        fit(Toy(lambda net, batch: cross_entropy(net, batch).detach()), labelled(6, 4), GradientAccumulation(**policy))


@pytest.mark.parametrize("kind", [GradientAccumulation, GradientNoiseScale])
def test_a_class_among_the_callbacks_is_named(kind: Any) -> None:
    with pytest.raises(AccumulationError, match=rf"callbacks=\[{kind.__name__}\]"):
        fit(Toy(cross_entropy), labelled(6, 4), kind)


class BringsCallbacks(Toy):
    def __init__(self, *callbacks: Any) -> None:
        super().__init__(cross_entropy)
        self.callbacks = callbacks

    def configure_callbacks(self) -> Any:
        return list(self.callbacks)


@until(23, "a TypeError of Python's, of on_exception", TypeError)
def test_a_class_from_configure_callbacks_is_named() -> None:
    with pytest.raises(AccumulationError, match="GradientAccumulation"):
        fit(BringsCallbacks(GradientAccumulation), labelled(6, 4))


def test_two_from_configure_callbacks_are_named() -> None:
    with pytest.raises(AccumulationError, match=r"2 GradientAccumulation .* configure_callbacks"):
        fit(BringsCallbacks(GradientAccumulation(2), GradientAccumulation(3)), labelled(6, 4))


@until(23, "an error of Lightning's about stateful callbacks", RuntimeError)
def test_two_in_the_trainer_are_named() -> None:
    with pytest.raises(AccumulationError, match="GradientAccumulation"):
        fit(Toy(cross_entropy), labelled(6, 4), GradientAccumulation(2), GradientAccumulation(3))


class Divides(Toy):
    """As a loop divided that accumulated by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / self.trainer.accumulate_grad_batches


@until(22, "a division by the number of micro-batches is left in training_step, and nothing is said")
@pytest.mark.parametrize("module", [Divides(cross_entropy), Toy(lambda *given: cross_entropy(*given) / 4)], ids=["Trainer's", "4"])
def test_a_leftover_division_by_the_size_of_the_window_is_warned_of(module: Toy) -> None:
    with warned() as messages:
        fit(module, labelled(6, 4, 2, 8), GradientAccumulation(4))
    assert messages
