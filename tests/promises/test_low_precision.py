"""The check where rounding is large: what it makes of a loss is no break, and no break is hidden by it."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from real_modules.table import Exact, Refused, happens
from support import Toy, fit, labelled, loader, refused, warned
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import DoesNotAddUpError, GradientAccumulation, RowWiseError, verify

WAYS = pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 3}], ids=["windows", "split"])
PRECISIONS = pytest.mark.parametrize("precision", ["32-true", "bf16-true"])


class Rounded(nn.Module):
    """As a device that takes another kernel for few rows, which rounds more: the loss of these is off by more than half of it."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        off, self.lost = (1e-4, 2.0**11) if precision == "32-true" else (2.0**-4, 2.0**6)
        self.weight = nn.Parameter(torch.rand(4) + 1)
        self.register_buffer("trained", self.weight.detach() * (1 + off))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * self.weight
        return ((hidden + self.lost) - self.lost if len(x) < 4 else hidden) - x * self.trained


def made(loss: Callable[..., Tensor], net: Callable[[], nn.Module] = lambda: nn.Linear(4, 4)) -> Toy:  # in single precision
    return Toy(lambda net, batch: loss(net(batch[0]), batch[1]), net=net).float()


def batches(*rows: int) -> list[list[Tensor]]:
    return [[x.float(), labels] for x, labels in labelled(*rows)]


def small_break(outputs: Tensor, labels: Tensor) -> Tensor:  # less than bfloat16 rounds
    return F.cross_entropy(outputs, labels) + 0.02 * F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


@pytest.mark.parametrize(
    ("policy", "rows"),
    [({"window": 2}, [8] * 4), ({"micro_batch": 3}, [8] * 2), ({"window": 4}, [2] * 8)],
    ids=["windows", "split", "few"],
)
@PRECISIONS
def test_what_rounding_makes_of_a_loss_that_cancels_is_no_break(precision: str, policy: dict[str, Any], rows: list[int]) -> None:
    module = made(lambda o, labels: o.square().mean(), lambda: Rounded(precision))
    with warned() as messages:
        fit(module, batches(*rows), GradientAccumulation(**policy), precision=precision)
    assert (messages, module.trainer.global_step) == ([], 2)


@WAYS
@PRECISIONS
def test_a_break_beside_such_rounding_is_one(precision: str, policy: dict[str, Any]) -> None:
    module = made(lambda o, labels: (o - o.mean(0).detach()).square().mean(), lambda: Rounded(precision))
    refused(module, batches(8, 8), GradientAccumulation(**policy), precision=precision, error=DoesNotAddUpError)


@WAYS
def test_a_break_that_is_smaller_than_what_half_precision_rounds_is_one(policy: dict[str, Any]) -> None:
    refused(made(small_break), batches(8, 8), GradientAccumulation(**policy), precision="bf16-true", error=DoesNotAddUpError)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_verify_finds_what_half_precision_hides(precision: str) -> None:
    """In the check of the first batch, which runs in double precision."""
    assert not verify(made(small_break), loader(batches(8, 8)), micro_batch=3, precision=precision)


@pytest.mark.parametrize("has_break", [False, True], ids=["rounding", "a break"])
def test_ranks_look_in_another_precision_together(has_break: bool) -> None:
    """The rows of one of them alone show any rounding, or a break."""

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.exp().mean() if labels[0] >= 0 else (outputs - outputs.mean(0).detach() * has_break).square().mean()

    module, data = made(loss, lambda: Rounded("32-true")), batches(8, 8, 8, 8)
    for batch in data[1::2]:
        batch[1] -= 8
    module.train_dataloader = lambda: loader(data[module.global_rank :: 2])
    before = module.net.weight.detach().clone()
    with pytest.raises(Exception, match="DoesNotAddUpError|add up") if has_break else nullcontext():
        fit(module, None, GradientAccumulation(2), ranks=2)
    assert torch.equal(module.net.weight, before) == has_break


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("part", [0.0, 0.02])
def test_rows_that_depend_on_each_other_by_less_than_half_precision_rounds_are_not_run_apart(precision: str, part: float) -> None:
    class Beside(nn.Linear):  # adds a part of the mean of all rows to each
        def forward(self, x: Tensor) -> Tensor:
            return (outputs := super().forward(x)) + part * outputs.mean(0)

    module, policy = made(F.cross_entropy, lambda: Beside(4, 4)), GradientAccumulation(micro_batch=3, row_wise="net")
    with pytest.raises(RowWiseError) if part else nullcontext():
        fit(module, batches(8, 8), policy, precision=precision)
    assert module.trainer.global_step == (0 if part else 2)


class InFloat32(Toy):
    """A list of its parameters, its type, and parameters of the optimizer alone: a copy in a wider type has none of them."""

    def __init__(self, kind: str) -> None:
        super().__init__(lambda net, batch: F.mse_loss(net(batch[0]), batch[1]), net=lambda: nn.Linear(4, 1))
        self.float().kind, self.kept, self.outside = kind, [self.net.weight], [nn.Parameter(torch.ones(4))]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, x = super().training_step(batch, batch_idx), batch[0]
        if self.kind == "list":
            loss = loss + (x @ self.kept[0].T).var(correction=0)
        if self.kind == "type" and x.dtype == torch.float32:
            loss = loss + self.net(x).var(correction=0)
        return loss + (x.mean(0) ** 2 * self.outside[0]).sum() if self.kind == "outside" else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.outside], lr=0.1)


@pytest.mark.parametrize("kind", ["plain", "list", "type", "outside"])
@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 2}], ids=str)
def test_a_module_of_float32_is_checked_as_it_is(kind: str, policy: dict[str, int]) -> None:
    rows = list(zip(torch.randn(32, 4), torch.randn(32, 1), strict=True))
    batches = [rows[start : start + 8] for start in range(0, 32, 8)]
    arguments = {"limit": 1e-5, "trainer": {"precision": "32-true"}}
    found = happens(partial(InFloat32, kind), batches, GradientAccumulation(**policy), [None], **arguments)
    assert isinstance(found, Exact if kind == "plain" else Refused), found
