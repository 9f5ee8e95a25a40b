"""What ranks exchange at the end of a window beside its totals, where any of them has reason to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_accum.errors import ArgumentError
from lightning_accum.weighing.functions import FunctionOfMean
from lightning_accum.weighing.modes import Contribution
from lightning_accum.weighing.terms import Denominator
from lightning_accum.window_totals import has_weight


def function_of_window(
    function: FunctionOfMean | None,
    contributions: Sequence[Contribution],
    mean: float,
    size: float,
    tensor_of: Callable[[Sequence[Denominator]], Tensor],
    ranks: int,
    group: dist.ProcessGroup | None,
) -> tuple[float, float]:
    """The loss of a window that is a function of its mean, and the slope of that. Called on all ranks: 32 bytes from each.

    Args:
        function: what the loss is on this rank; None where none has a weight.
        contributions: of its micro-batches.
        mean: of the window.
        size: its weight, or its micro-batches where the loss is a function of a sum.
        tensor_of: makes a tensor of numbers, where the ranks exchange them.
        ranks: how many there are.
        group: theirs.

    Raises:
        ValueError: it is another function on one rank than on another.
    """
    value, slope = (mean, 1.0) if function is None else function.at(mean)
    constants = _sum_of_constants(contributions)
    if ranks == 1:
        return value + float(constants) / size, slope
    own = tensor_of([float(any(map(has_weight, contributions))), value, slope, constants])
    of_ranks = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(of_ranks, own, group=group)
    numbers = torch.stack(of_ranks).tolist()
    (value, slope), *others = [(value, slope) for is_known, value, slope, _ in numbers if is_known]
    if any(other != slope and not (math.isnan(other) and math.isnan(slope)) for _, other in others):
        raise ArgumentError(
            "The loss is another function of its mean on one rank than on another, so that together they are no function of a"
            " mean over all of the window. Have training_step compute the same on all ranks."
        )
    return value + sum(constant for *_, constant in numbers) / size, slope


def _sum_of_constants(contributions: Sequence[Contribution]) -> Denominator:
    """Of what was added to functions of means, each with the weight of its micro-batch."""
    total: Denominator = 0.0
    for c in contributions:
        if c.of_mean is None:
            continue
        n = 1.0 if c.weight is None else c.weight
        if isinstance(n, Tensor):
            total = total + torch.where(n == 0, torch.zeros_like(n), n * c.of_mean.constant)
        elif n != 0:
            total = total + n * c.of_mean.constant
    return total
