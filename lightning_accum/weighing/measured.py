"""What a few rows contribute to a window, measured; and how far parts are from their whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_accum.weighing.functions import FunctionOfMean
from lightning_accum.weighing.verdict import UnsuitableRowsError

_OF_A_PARAMETER = 1e-2
"""A gradient smaller than this part of the whole one is compared with this part: what it is beside is rounding."""
OF_GRADIENT = "the gradient"


class Measured(NamedTuple):
    """What some rows contribute: in parts of their whole, where they are a part."""

    loss: float
    """Times its share: what the weight is of the whole one's."""
    weight: float | None
    """None for a sum, which is added as it is."""
    gradient: dict[int, Tensor]
    """Of that, by parameter: some of its elements, in double precision. Those without a gradient are missing."""
    counts: tuple[float, ...]
    """What the other terms were divided by, where each is weighed by itself."""
    has_terms: bool
    function: FunctionOfMean | None = None
    """What makes the loss of a mean. That of a part is the mean itself here, and its gradient is multiplied by the"""
    slope: float = 1.0
    """of the whole; and"""
    constant: float = 0.0
    """was added to it, times its share."""
    is_read: bool = True
    """The weight is known; that of the whole may be not, which no window needs."""
    others: tuple[float, ...] = ()
    """What the other terms were divided by, where they share one weight."""
    is_of_samples: bool = False
    """The weight is the number of samples."""
    may_count_nothing: bool = False
    """The weight is a count of at most 1, which may have been raised to that."""


def deviations(whole: Measured, parts: Sequence[Measured]) -> list[tuple[float, str]]:
    """How far the parts are from the whole, and in what.

    Raises:
        UnsuitableRowsError: nothing has any weight.
    """
    if whole.weight == 0 and not whole.counts:
        raise UnsuitableRowsError("the first rows have no weight")
    every = parts  # of sharded modules a rank has gradients of the others' losses too
    if not whole.counts:
        parts = [part for part in parts if part.weight != 0]
    if len({part.weight is None for part in ((whole, *parts) if whole.is_read else parts)}) > 1:
        return [(math.inf, "the loss is a sum in some parts, and a mean in others")]
    if len({part.function for part in (whole, *parts)}) > 1:
        return [(math.inf, "the loss is a function of a mean in some parts, and another or none in all of them together")]
    weights = [part.weight or 0.0 for part in parts]
    scale = 1.0 if whole.is_read else 1 / (sum(weights) or 1.0)
    losses = [scale * part.loss for part in parts]
    if whole.function is not None:
        value, slope = whole.function.at(mean := sum(losses))
        value += sum(part.constant for part in parts) / (len(parts) if whole.weight is None else 1)
        losses = [value - slope * mean, slope * mean]
    found = [(_deviation_of_gradients(whole, every, scale), OF_GRADIENT)]
    if not whole.counts:  # else each term has its own share, and in its gradient only
        found.append((relative(losses, whole.loss), "the loss"))
    return found


def relative(parts: Sequence[float], whole: float) -> float:
    """How far a sum of numbers is from what it should be, as part of the size of both."""
    size = max(abs(whole), sum(map(abs, parts)))
    return abs(sum(parts) - whole) / size if size else 0.0


def _deviation_of_gradients(whole: Measured, parts: Sequence[Measured], scale: float) -> float:
    differences: list[tuple[float, float]] = []
    for index in sorted({index for measured in (whole, *parts) for index in measured.gradient}):
        given = [scale * part.gradient[index] for part in parts if index in part.gradient]
        expected = whole.gradient.get(index)
        difference = torch.as_tensor(sum(given) - (0 if expected is None else expected))
        seen = difference.isfinite()  # elements that are not, as those of a distance of 0, cannot be compared
        size = max(0.0 if expected is None else float(expected[seen].norm()), sum(float(own[seen].norm()) for own in given))
        differences.append((float(difference[seen].norm()), size))
    overall = math.sqrt(sum(size**2 for _, size in differences))
    return max((difference / max(size, _OF_A_PARAMETER * overall) for difference, size in differences if difference), default=0.0)


def has_raised_count(whole: Measured, parts: Sequence[Measured]) -> bool:
    """Whether parts weigh more than their whole by 1 for some whose count is 1: there is nothing to count in these."""
    if not whole.weight or whole.counts:
        return False
    raised = round(excess := sum(part.weight or 0.0 for part in parts) - whole.weight)
    return math.isclose(raised, excess, rel_tol=1e-6) and 0 < raised <= sum(part.may_count_nothing for part in parts)


def has_fixed_counts(whole: Measured, parts: Sequence[Measured], sizes: Sequence[int]) -> bool:
    """Whether other terms are divided by the same in parts of any size, and would not add up if they depended on the rows.

    Such a term is a penalty on parameters, the same in each part: parts that add up show so, if what they weigh is the rows
    themselves, or does not go with these.
    """
    if not whole.others or any(part.others != whole.others for part in parts):
        return False
    shares = {round((part.weight or 0.0) / size, 9) for part, size in zip(parts, sizes, strict=True)}
    return whole.is_of_samples or len(shares) > 1
