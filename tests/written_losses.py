"""Losses of one small net, a row each: what a window must do with them; ``loss_table`` has the usual ones."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D = torch.float64
CLASSES = torch.tensor([0.3, 1.7, 0.9], dtype=D)
Batch = dict[str, Tensor]


class Loss(NamedTuple):
    """A row.

    Attributes:
        name: is unique.
        of: the loss of the net and a batch.
        expected: ``"exact"``; ``"refused"``, an error before the first step; ``"told"``, a warning is enough.
        weight: of the policy.
    """

    name: str
    of: Callable[[Any, Batch], Tensor]
    expected: str = "exact"
    weight: Any = "auto"


class Net(nn.Module):
    """Three logits and a value of four inputs, and a learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.logits, self.value = nn.Linear(4, 3), nn.Linear(4, 1)
        self.log_scale = nn.Parameter(torch.tensor(0.3))


def make(rows: int, seed: int = 0, ignored: slice = slice(1, None, 3)) -> list[Batch]:
    """Rows of which some have an ignored label, where ``mask`` is False."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=g, dtype=D)
    p, y = (torch.rand(rows, *columns, generator=g, dtype=D) for columns in ((3,), ()))
    target = torch.randint(0, 3, (rows,), generator=g)
    target[ignored] = -100
    columns = {"x": x, "target": target, "p": p / p.sum(1, keepdim=True), "y": y, "mask": target != -100}
    return [{name: column[row] for name, column in columns.items()} for row in range(rows)]


# fmt: off
def ce(net: Any, b: Batch, **kwargs: Any) -> Tensor:
    return F.cross_entropy(net.logits(b["x"]), b["target"], **kwargs)

def bce(net: Any, b: Batch, **kwargs: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(net.value(b["x"])[:, 0], b["y"], **kwargs)

def each(net: Any, b: Batch) -> Tensor:
    return (net.value(b["x"])[:, 0] - b["y"]) ** 2

def log_p(net: Any, b: Batch) -> Tensor:
    return net.logits(b["x"]).log_softmax(1)

def of(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Batch], Tensor]:
    """A loss of logits and probabilities."""
    return lambda net, b: function(net.logits(b["x"]), b["p"])

def masked(errors: Tensor, p: Tensor) -> Tensor:
    mask = (p > 0.3).to(errors)
    return (errors * mask).sum() / mask.sum()

def beside(constant: float) -> Callable[[Any, Batch], Tensor]:
    return lambda net, b: (each(net, b) * b["mask"]).sum() / (b["mask"].to(D).sum() + constant)

WRITTEN: dict[str, Callable[[Any, Batch], Tensor]] = {
    "cross entropy": ce,
    "sum": lambda net, b: ce(net, b, reduction="sum"),
    "masked mean, clamped": lambda net, b: (each(net, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1),
    "two of the same count": lambda net, b: bce(net, b) + 0.3 * F.mse_loss(net.value(b["x"])[:, 0], b["y"]),
    "learnt weighting of tasks": lambda net, b: torch.exp(-net.log_scale) * ce(net, b) + net.log_scale,
    "1e-08 beside the count": beside(1e-8),
}
OF_A_MEAN: dict[str, Callable[[Any, Batch], Tensor]] = {
    "RMSE": of(lambda o, p: torch.sqrt(F.mse_loss(o, p))),
    "one minus RMSE": of(lambda o, p: -(1 - torch.sqrt(F.mse_loss(o, p)))),
    "masked RMSE": of(lambda o, p: torch.sqrt(masked((o - p).square(), p))),
    "logarithm with eps": of(lambda o, p: 10 * torch.log10(1e-3 + F.l1_loss(o, p)) + 7),
    "of two means over one count": of(lambda o, p: torch.sqrt(F.mse_loss(o, p) + 0.5 * (o - p).abs().mean())),
    "norm of all errors": of(lambda o, p: (o - p).square().sum().sqrt()),
}
REFUSED: dict[str, Callable[[Any, Batch], Tensor]] = {
    "a mean of the RMSE of columns": of(lambda o, p: (o - p).square().mean(0).sqrt().mean()),
    "means of columns, squared": of(lambda o, p: o.mean(0).square().sum()),
}
TOLD: dict[str, Callable[[Any, Batch], Tensor]] = {
    "tokens and samples": lambda net, b: ce(net, b) + each(net, b).mean(),
    "1.0 beside the count": beside(1.0),  # too few of the first rows have a label to tell it from another law
}
# fmt: on

LOSSES = [
    *(Loss(name, function) for name, function in (WRITTEN | OF_A_MEAN).items()),
    *(Loss(name, function, "refused") for name, function in REFUSED.items()),
    *(Loss(name, function, "told") for name, function in TOLD.items()),
    Loss("explicit: labels", ce, weight=lambda batch: (batch["target"] != -100).sum()),
]
BY_NAME = {loss.name: loss for loss in LOSSES}
