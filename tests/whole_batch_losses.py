"""Losses of two views of all rows, which the tests of several ranks and of the Accumulator train, too; ``loss_table`` has more."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of two views (rows, 6), classes (rows,) of 0 to 2, and a learned number


# fmt: off
def clip(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    logits = F.normalize(a) @ F.normalize(b).T * scale.exp()
    rows = torch.arange(len(a))
    return (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, rows)) / 2

def siglip(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    logits = F.normalize(a) @ F.normalize(b).T * scale.exp() - 1
    return -F.logsigmoid(logits * (2 * torch.eye(len(a)) - 1).to(a)).sum() / len(a)

def barlow_twins(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    c = ((a - a.mean(0)) / a.std(0)).T @ ((b - b.mean(0)) / b.std(0)) / len(a)
    return (c.diagonal() - 1).square().sum() + 0.05 * (c - c.diagonal().diag()).square().sum()

LOSSES: dict[str, Loss] = {"clip": clip, "siglip": siglip, "barlow twins": barlow_twins}
