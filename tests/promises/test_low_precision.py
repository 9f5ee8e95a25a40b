"""The check where rounding is large: what it makes of a loss is no break, and no break is hidden by it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import ddp, loader, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import AccumulationWarning, DoesNotAddUpError, GradientAccumulation, RowWiseError, verify
from lightning_accum.weighing import trial

WAYS = pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 3}], ids=["windows", "split"])
Loss = Callable[[Tensor], Tensor]


class Rounded(nn.Module):
    """As a device that takes another kernel for few rows, which rounds more. Its outputs are ``off`` from what they should be."""

    def __init__(self, off: float, lost: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.rand(4) + 1)
        self.register_buffer("trained", self.weight.detach() * (1 + off))
        self.lost = lost

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * self.weight
        if len(x) < 4:
            hidden = (hidden + self.lost) - self.lost
        return hidden - x * self.trained


class Module(pl.LightningModule):
    """Any network, and any loss of its outputs. Ranks take its batches in turns."""

    def __init__(self, net: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.net, self.loss, self.batches = net, loss, rows()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0]), *batch[1:])

    def train_dataloader(self) -> Any:
        return loader(self.batches[self.trainer.global_rank :: self.trainer.world_size])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def rows(rows: int = 8, number: int = 4) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(rows, 4, generator=generator), torch.randint(0, 4, (rows,), generator=generator)] for _ in range(number)]


def of_outputs(function: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, labels: function(outputs)


def below_rounding(precision: str) -> Rounded:
    """A network whose loss is off by more than half of its size where it is computed from few rows, and has that precision."""
    return Rounded(1e-4, lost=2.0**11) if precision == "32-true" else Rounded(2.0**-4, lost=2.0**6)


PRECISIONS = pytest.mark.parametrize("precision", ["32-true", "bf16-true"])


@WAYS
@PRECISIONS
def test_what_rounding_makes_of_a_loss_that_cancels_is_no_break(precision: str, policy: dict[str, Any]) -> None:
    module = Module(below_rounding(precision), of_outputs(lambda o: o.square().mean()))
    run = trainer(callbacks=[GradientAccumulation(**policy)], precision=precision)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AccumulationWarning)
        run.fit(module)
    assert run.global_step == (2 if "window" in policy else 4)


@PRECISIONS
def test_a_module_whose_copy_would_be_large_is_looked_at_in_its_own_precision(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_MOST_BYTES", 15)  # less than four numbers in single precision
    with pytest.raises(DoesNotAddUpError):
        trainer(callbacks=[GradientAccumulation(2)], precision=precision).fit(
            Module(below_rounding(precision), of_outputs(lambda o: o.square().mean()))
        )


@PRECISIONS
def test_nor_of_rows_of_two_loader_batches_of_which_each_alone_is_not_rounded(precision: str) -> None:
    net = below_rounding(precision)
    module = Module(net, of_outputs(lambda o: o.square().mean()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", AccumulationWarning)
        trainer(callbacks=[GradientAccumulation(4)], precision=precision).fit(module, loader(rows(2, 4)))
    assert module.global_step == 1


@WAYS
@PRECISIONS
def test_a_break_beside_such_rounding_is_one(precision: str, policy: dict[str, Any]) -> None:
    module = Module(below_rounding(precision), of_outputs(lambda o: (o - o.mean(0).detach()).square().mean()))
    with pytest.raises(DoesNotAddUpError):
        trainer(callbacks=[GradientAccumulation(**policy)], precision=precision).fit(module)
    assert module.global_step == 0


def _with_a_small_break(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels) + 0.02 * F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


@WAYS
def test_a_break_that_is_smaller_than_what_half_precision_rounds_is_one(policy: dict[str, Any]) -> None:
    """In bfloat16 the tolerance is 5 %."""
    torch.manual_seed(0)
    module = Module(nn.Linear(4, 4), _with_a_small_break)
    with pytest.raises(DoesNotAddUpError):
        trainer(callbacks=[GradientAccumulation(**policy)], precision="bf16-true").fit(module)


def test_nor_does_a_buffer_of_eight_bits_hide_one() -> None:
    torch.manual_seed(0)
    module = Module(nn.Linear(4, 4).bfloat16(), _with_a_small_break)
    module.register_buffer("scale", torch.ones(1, dtype=torch.float8_e4m3fn))
    with pytest.raises(DoesNotAddUpError):
        trainer(callbacks=[GradientAccumulation(2)]).fit(module, loader([[x.bfloat16(), labels] for x, labels in module.batches]))


def test_verify_in_half_precision_says_that_double_precision_shows_more() -> None:
    torch.manual_seed(0)
    module = Module(nn.Linear(4, 4), _with_a_small_break)
    in_half, in_double = (
        verify(module, loader(module.batches), micro_batch=3, precision=precision) for precision in ("bf16-mixed", "64-true")
    )
    assert in_half
    assert not in_double
    assert 'precision="64-true" shows smaller differences' in " ".join(str(in_half).split())


def test_a_module_that_runs_in_half_precision_only_is_checked_in_it(caplog: Any) -> None:
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs @ torch.eye(4, dtype=torch.bfloat16), labels)

    torch.manual_seed(0)
    module = Module(nn.Linear(4, 4), loss)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        trainer(callbacks=[GradientAccumulation(2)], precision="bf16-true").fit(module)
    assert module.global_step == 2
    assert any("checked: adds up" in record.message for record in caplog.records)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("has_break", [False, True], ids=["rounding", "a break"])
def test_ranks_look_in_another_precision_together(has_break: bool) -> None:
    """The rows of one of them alone show any rounding, or a break."""

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        if labels[0] >= 0:
            return outputs.exp().mean()
        return (outputs - outputs.mean(0).detach() * has_break).square().mean()

    module = Module(below_rounding("32-true"), loss)
    for batch in module.batches[1::2]:
        batch[1] -= 8
    before = module.net.weight.detach().clone()
    fit = partial(trainer(ddp(), devices=2, callbacks=[GradientAccumulation(2)]).fit, module)
    if has_break:
        with pytest.raises(Exception, match="do not add up"):
            fit()
    else:
        fit()
        assert not torch.equal(module.net.weight, before)


def _cross_entropy_and_mean(outputs: Tensor, labels: Tensor) -> Tensor:
    words = (torch.arange(outputs.shape[1]) % 4).repeat(len(outputs), 1)
    each = outputs[..., None].expand(-1, -1, 4) * torch.tensor([1.0, 0.5, -0.5, 0.25]).to(outputs)
    return (
        F.cross_entropy(each.flatten(0, 1), words.masked_fill(labels[:, None] < 0, -100).flatten())
        + 0.1 * each.logsumexp(-1).square().mean()
    )


@pytest.mark.parametrize("are_ignored", [False, True], ids=["the same count", "counts of their own"])
def test_counts_that_half_precision_rounds_are_the_same(are_ignored: bool) -> None:
    """Of cross entropy and of a mean over the same tokens: bfloat16 has 5 * 301 as 1504. A row of ignored labels is no rounding."""
    torch.manual_seed(0)
    module = Module(nn.Linear(4, 301), _cross_entropy_and_mean)
    module.batches = [batch for size in (2, 5, 1, 4) for batch in rows(size, 1)]
    for batch in module.batches:
        batch[1][:1] -= 8 * are_ignored
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AccumulationWarning)
        trainer(callbacks=[GradientAccumulation(4)], precision="bf16-true").fit(module)
    found = [str(each.message) for each in caught if issubclass(each.category, AccumulationWarning)]
    assert ["terms of the loss" in message for message in found] == [True] * are_ignored


class _Beside(nn.Module):
    """Adds a part of the mean of all rows to each."""

    def __init__(self, part: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.part = nn.Linear(4, 4), part

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x)
        return outputs + self.part * outputs.mean(0)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("part", [0.0, 0.02])
def test_rows_that_depend_on_each_other_by_less_than_half_precision_rounds_are_not_run_apart(precision: str, part: float) -> None:
    module = Module(_Beside(part), F.cross_entropy)
    fit = partial(trainer(callbacks=[GradientAccumulation(micro_batch=3, row_wise="net")], precision=precision).fit, module)
    if part:
        with pytest.raises(RowWiseError, match="gives some rows together other outputs than alone"):
            fit()
    else:
        fit()
    assert module.global_step == (0 if part else 4)
