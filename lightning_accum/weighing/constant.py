"""What weights have in them beside what adds up, as in ``sum / (count + 1e-8)``: learned from the parts of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

_SMALL = 1e-3


class _Excess(NamedTuple):
    """By how much the weights of parts come to more than that of the whole.

    Attributes:
        excess: that.
        others: how many parts have a weight, beside one.
        size: of their sum, or of the weight of the whole.
        smallest: of their weights.
        rows: the sizes of the parts.
    """

    excess: float
    others: int
    size: float
    smallest: float
    rows: tuple[int, ...]

    def deviation(self, constant: float) -> float:
        """How far it is from a constant that each part has."""
        return abs(self.excess - self.others * constant) / self.size


class Excesses:
    """Collects by how much the weights of parts are off, and learns the constant that each of them has.

    Args:
        largest: of the numbers of all ranks.
    """

    def __init__(self, largest: Callable[[float], float]) -> None:
        self._largest = largest
        self._seen: list[_Excess] = []
        self.eps = torch.finfo(torch.float64).eps
        """Of the coarsest type that a weight had."""

    def add(self, whole: float, weights: Sequence[float], rows: tuple[int, ...]) -> None:
        """The weights of the parts of a batch, which has the weight ``whole``."""
        if len(weights) > 1:
            total = sum(weights)
            self._seen.append(_Excess(total - whole, len(weights) - 1, max(total, whole), min(weights), rows))

    def worst(self, constant: float) -> tuple[float, tuple[int, ...]]:
        """How far weights are at most from that constant, and the sizes of these parts."""
        return max(((one.deviation(constant), one.rows) for one in self._seen), default=(0.0, ()))

    def clear(self) -> None:
        """Forget what was seen."""
        self._seen.clear()

    def constant(self, tolerance: float) -> float | None:
        """What weights have in them beside what adds up, by all that was seen on all ranks.

        0 where it is not the same in all that was seen, and None where nothing was.

        One that is small beside the weight is learned from any two parts. A larger one, of at most 1, only from numbers of parts
        that differ, and where something is counted beside it in each part: else it may be what goes with the rows in another way,
        such as a root of their number, or the largest of some.
        """
        if not self._largest(float(bool(self._seen))):
            return None
        least, most = self._span([seen.excess / seen.others for seen in self._seen])
        fewest, largest = self._span([float(seen.others) for seen in self._seen])
        smallest, _ = self._span([seen.smallest for seen in self._seen])
        _, share = self._span([abs(seen.excess) / seen.size for seen in self._seen])
        _, rounding = self._span([tolerance * seen.size for seen in self._seen])
        is_proven = (fewest != largest and abs(most) <= 1 and most < smallest) or share <= _SMALL
        is_seen = share > 64 * self._largest(self.eps)
        return most if is_seen and is_proven and most - least <= rounding else 0.0

    def _span(self, numbers: Sequence[float]) -> tuple[float, float]:
        """The smallest and the largest, over all ranks."""
        return -self._largest(-min(numbers, default=math.inf)), self._largest(max(numbers, default=-math.inf))
