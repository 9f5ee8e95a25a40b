"""What one micro-batch brings into its window, as values."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, TypeAlias

from lightning_accum.weighing.denominator import Denominator
from lightning_accum.weighing.functions import OfMean


class Kind(NamedTuple):
    """What a weight counts.

    Attributes:
        criterion: that was divided by it, in words.
        dims: of what the criterion was taken of.
        is_of_samples: it was the number of samples in the first micro-batch, and may be something else that came to as much.
    """

    criterion: str
    dims: int
    is_of_samples: bool

    def __str__(self) -> str:
        return "its samples" if self.is_of_samples else f"what its {self.criterion} counts"


def are_mixed(kinds: Collection[Kind]) -> bool:
    """Whether weights of these kinds count different things."""
    return len(set(map(str, kinds))) > 1 and len({kind[:2] for kind in kinds}) > 1


Way: TypeAlias = "tuple[str, ...]"
"""The first operations of a term, or that its count is at most 1."""
COUNTS_NOTHING: Way = ("a count of at most 1",)
"""It may have been raised to that where there was nothing to count."""


class Contribution(NamedTuple):
    """What one micro-batch brings into its window.

    Attributes:
        weight: what its mean loss was divided by; None if the loss is a sum, so that it is added as it is.
        others: the denominators of other terms of the loss. No terms: their nodes would keep the graph alive.
        signature: a number that tells which terms these are; 0 without any.
        factors: a number that is another one where a constant factor of the loss, or its kind, is; 0 where that is not known.
        kind: what the weight counts; None where it is explicit, and for a sum.
        of_mean: what makes the loss of the mean, or of the sum, that was weighed; None where it is that.
        ways: how each term was read. One that stands for a loss, where a batch has nothing, is read in another way.
        zeroed: those of terms that weigh nothing as they were multiplied by 0, and not what they are a mean of.
        is_one_sum: all terms are sums that were divided by as much.
    """

    weight: Denominator | None
    others: tuple[Denominator, ...] = ()
    signature: int = 0
    factors: Denominator = 0.0
    kind: Kind | None = None
    of_mean: OfMean | None = None
    ways: frozenset[Way] = frozenset()
    zeroed: frozenset[Way] = frozenset()
    is_one_sum: bool = False
