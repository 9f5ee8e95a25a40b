"""The numbers of a rank's micro-batches that are summed over the ranks at the end of a window, in 64 bytes of float64.

There are eight: the sums of n, of l*n (of l, for losses that are sums), of n < 0, of d and d^2/n, where d are the denominators of
other terms and n times a number that stands for constant factors; micro-batches; those with a sum; the flags. And, where some may
be, the micro-batches that were left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_accum.weighing.denominator import Denominator
from lightning_accum.weighing.weight import Contribution, Kind

NUMBERS = 8


def has_weight(contribution: Contribution) -> bool:
    """As the host knows it: what a device holds may be 0."""
    return isinstance(contribution.weight, Tensor) or contribution.weight != 0


def kinds_of(contributions: Sequence[Contribution]) -> dict[Kind, None]:
    """What the losses with a weight were divided by."""
    return {c.kind: None for c in contributions if c.kind is not None and has_weight(c)}


def sum_on_host(losses: Sequence[Denominator], contributions: Sequence[Contribution], flags: Sequence[float]) -> list[float]:
    """The numbers of micro-batches, in Python's."""
    weight = loss = negative = terms = spread = sums = 0.0
    for value, contribution in zip(losses, contributions, strict=True):
        n, l = contribution.weight, float(value)  # noqa: E741
        factors = float(contribution.factors)
        if n is None:
            loss, sums, terms, spread = loss + l, sums + 1, terms + factors, spread + factors**2
            continue
        n = float(n)
        weight, negative = weight + n, negative + (n < 0)
        loss += l * n if n != 0 else 0.0
        if contribution.others or factors:
            d = n * factors
            if contribution.others:
                d += sum(factor * float(other) for factor, other in _factors_and_denominators(contribution))
            terms, spread = terms + d, spread + (d**2 / n if n != 0 else math.inf if d else 0.0)
    return [weight, loss, negative, terms, spread, float(len(losses)), sums, *flags]


def sum_on_device(
    losses: Sequence[Denominator],
    contributions: Sequence[Contribution],
    flags: Sequence[float],
    tensor_of: Callable[[Sequence[Denominator]], Tensor],
) -> Tensor:
    """The numbers of micro-batches, on the device that they are on: it is not waited for."""
    if not contributions:
        return tensor_of([0.0] * 7 + [*flags])
    values = tensor_of(losses)
    weights = [contribution.weight for contribution in contributions if contribution.weight is not None]
    counts = tensor_of([len(contributions), len(contributions) - len(weights), *flags])
    zero = torch.zeros_like(counts[0])
    factors = tensor_of([contribution.factors for contribution in contributions])
    if len(weights) < len(contributions):
        n = tensor_of(weights).sum() if weights else zero
        is_sum = tensor_of([float(contribution.weight is None) for contribution in contributions])
        loss, factors = torch.where(is_sum > 0, values, zero).sum(), factors * is_sum
        return torch.cat((torch.stack((n, loss, zero, factors.sum(), factors.square().sum())), counts))
    n = tensor_of(weights)
    terms = spread = zero
    if any(c.others or isinstance(c.factors, Tensor) or c.factors != 0 for c in contributions):
        d = torch.stack([_of_other_terms(contribution, tensor_of) for contribution in contributions]) + n * factors
        terms, spread = d.sum(), torch.where((n == 0) & (d == 0), zero, d**2 / n).sum()
    loss = torch.where(n == 0, zero, values * n).sum()
    return torch.cat((torch.stack((n.sum(), loss, (n < 0).sum().to(n.dtype), terms, spread)), counts))


def _of_other_terms(contribution: Contribution, tensor_of: Callable[[Sequence[Denominator]], Tensor]) -> Tensor:
    pairs = _factors_and_denominators(contribution)
    return tensor_of([factor * denominator for factor, denominator in pairs]).sum()


def _factors_and_denominators(contribution: Contribution) -> list[tuple[float, Denominator]]:
    """The denominators of a loss's other terms, with unequal factors, so that in their sum no term makes up for another."""
    number = len(contribution.others)
    return [(1.0 + index / number, denominator) for index, denominator in enumerate(contribution.others)]


def number_with_weight(
    contributions: Sequence[Contribution], tensor_of: Callable[[Sequence[Denominator]], Tensor], is_on_host: bool
) -> Denominator:
    """The micro-batches whose weight is not 0."""
    weights = [contribution.weight for contribution in contributions if contribution.weight is not None]
    if is_on_host:
        return float(sum(float(weight) != 0 for weight in weights))
    return tensor_of(weights).count_nonzero() if weights else 0.0


def sum_of_constants(contributions: Sequence[Contribution]) -> Denominator:
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


def tensor_of(values: Sequence[Denominator], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers, some of which may be on the device, as one tensor there."""
    if values and all(isinstance(value, Tensor) for value in values):
        return torch.stack([value.detach() for value in values]).to(device, dtype)  # type: ignore[union-attr]
    if any(isinstance(value, Tensor) for value in values):
        return torch.stack([torch.as_tensor(value, device=device).detach().to(dtype) for value in values])
    return torch.tensor(values, dtype=dtype, device=device)
