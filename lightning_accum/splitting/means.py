"""The mean, the sum, or a function of one of these, of the whole of several parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_accum.exact import exact_dtype, moved
from lightning_accum.weighing.functions import OfMean
from lightning_accum.weighing.terms import Denominator


def loss_of_parts(values: Tensor, weights: Sequence[Denominator | None], of_means: Sequence[OfMean | None]) -> Tensor:
    """What is a mean, a sum, or a function of one of these, of the whole of several parts."""
    counts = [weight for weight in weights if weight is not None]
    counted = [of_mean for of_mean in of_means if of_mean is not None]
    are_sums = len(counts) < len(weights)
    if len(counted) < len(of_means) or len({of_mean.function for of_mean in counted}) > 1:
        return values.sum(0) if are_sums else weighted_mean(values, counts)
    means, constants = (
        torch.stack([torch.as_tensor(getattr(of_mean, name), device=values.device) for of_mean in counted])
        for name in ("mean", "constant")
    )
    if are_sums:
        return (counted[0].function(means.sum()) + constants.mean()).to(values.dtype)
    return (counted[0].function(weighted_mean(means, counts)) + weighted_mean(constants, counts)).to(values.dtype)


def weighted_mean(values: Tensor, weights: Sequence[Denominator]) -> Tensor:
    """The mean of ``values`` (along dimension 0), each with its weight; values without weight may be NaN.

    Example:
        >>> weighted_mean(torch.tensor([1.0, 4.0, float("nan")]), [1.0, 2.0, 0.0])
        tensor(3.)
    """
    for weight in weights:  # to where they are: from the host to a device nobody waits
        if isinstance(weight, Tensor) and weight.device.type != "cpu":
            values = moved(values, weight.device)
    exact = exact_dtype(values.device)
    if any(isinstance(weight, Tensor) for weight in weights):
        n = torch.stack([torch.as_tensor(weight, device=values.device).detach().to(exact) for weight in weights])
    else:
        n = torch.tensor(weights, dtype=exact, device=values.device)
    n = n.reshape(-1, *[1] * (values.dim() - 1))
    n = torch.where(n.sum(0) == 0, torch.ones_like(n), n)
    parts = torch.where(n == 0, torch.zeros_like(n), values.to(exact) * n)
    return (parts.sum(0) / n.sum(0)).to(values.dtype if values.is_floating_point() else torch.get_default_dtype())
