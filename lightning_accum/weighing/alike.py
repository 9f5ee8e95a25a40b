"""Micro-batches that are looked at later: what was the same in all rows that were checked may be other in them."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_accum.weighing.counts import tensors_of
from lightning_accum.weighing.terms import Denominator, on_host

_IGNORED = -100


Reason: TypeAlias = Literal["new terms", "other numbers", "time"]


class Doubt(NamedTuple):
    """A micro-batch that is to be looked at before the step of its window.

    Attributes:
        size: how much it differs from those that were checked; it is not looked at if that is 0.
        batch: what ``training_step`` got.
        reason: terms that the check has not seen; numbers in the batch, or a weight, that it has not; or that it is time.
    """

    size: Denominator
    batch: Any
    reason: Reason


class Alike:
    """Tensors that were one number in all rows, such as weights of 1, a mask without padding, one task; labels without -100.

    A loss may divide by what is only then the same for all rows. So a micro-batch in which it is other is looked at, too.

    Example:
        >>> alike = Alike()
        >>> alike.learn({"x": torch.tensor([1.0, 2.0]), "mask": torch.ones(2, 3), "labels": torch.tensor([[3, 4], [5, 6]])})
        False
        >>> alike.numbers
        {('mask',): 1.0, ('labels',): nan}
        >>> alike.unlike({"x": torch.tensor([3.0]), "mask": torch.tensor([[1.0, 1.0, 0.0, 0.0]])})
        0.5
    """

    def __init__(self) -> None:
        self.numbers: dict[tuple[Any, ...], float] | None = None
        """Each by where it is in a batch; NaN for labels of which none is ignored. None before anything was learned."""

    def learn(self, rows: Any) -> bool:
        """Rows were checked. Returns whether something in them is other than in those before."""
        before, tensors = self.numbers, dict(tensors_of(rows))
        if before is None:
            found = {path: number for path, tensor in tensors.items() if (number := _number_of(tensor)) is not None}
        else:
            found = {path: n for path, n in before.items() if path not in tensors or not float(_unlike(tensors[path], n))}
        self.numbers = found
        return before is not None and len(found) < len(before)

    def unlike(self, batch: Any) -> Denominator:
        """How much of a micro-batch is other, as a sum of parts: 0 if nothing is. What a device holds stays there."""
        found: Denominator = 0.0
        for path, tensor in tensors_of(batch) if self.numbers else ():
            if self.numbers and path in self.numbers:
                found = found + on_host(_unlike(tensor, self.numbers[path]))
        return found


def _number_of(tensor: Tensor) -> float | None:
    """The one number that it is; NaN where labels are others, of which none is ignored; None for all else."""
    if tensor.numel() == 0 or tensor.is_complex():
        return None
    if bool((tensor == tensor.flatten()[0]).all()):
        return float(tensor.flatten()[0])
    is_labels = tensor.dim() > 1 and tensor.dtype == torch.int64  # those of single rows are read in the loss
    return math.nan if is_labels and not bool((tensor == _IGNORED).any()) else None


def _unlike(tensor: Tensor, number: float) -> Tensor:
    """The part of its entries that are others."""
    is_other = (tensor == _IGNORED) if math.isnan(number) else (tensor.detach() != number)
    return is_other.sum() / max(1, tensor.numel())
