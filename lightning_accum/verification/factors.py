"""By what factors sums of gradients differ from what they should be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_accum.verification.measure import Difference, weights_that_fit

Named = Mapping[str, Tensor]
"""Gradients, or parameters, by name."""


def flat(gradients: Named) -> Tensor:
    """All of it, in one vector."""
    return torch.cat([gradient.to(torch.float64).flatten() for gradient in gradients.values()])


def only(gradients: Named, names: Sequence[str]) -> dict[str, Tensor]:
    """Those of these names."""
    return {name: gradients[name] for name in names}


def sum_of(shares: Sequence[Named]) -> dict[str, Tensor]:
    """What all ranks add up to."""
    return {name: torch.stack([share[name] for share in shares]).sum(0) for name in shares[0]}


def factors_that_fit(shares: Sequence[Named], found: Named, tolerance: float) -> list[float] | None:
    """How often each share counts; one number for all where they cannot be distinguished, None where they do not fit."""
    most = max(100 * tolerance, 1e-9)
    target = flat(found)
    fit = weights_that_fit(torch.stack([flat(share) for share in shares], 1), target)
    if float(target.norm()) == 0:
        return [0.0] * len(shares)
    if not fit.left <= most:
        return None
    if len(fit.weights):
        return [float(weight) for weight in fit.weights]
    factor = common_factor(found, sum_of(shares))
    return None if factor is None else [factor]


def is_rounding(found: Named, shares: Sequence[Named], eps: float) -> bool:
    """Whether each number is off by no more than rounding what was added up to it can do."""
    if not shares:
        return False
    size = flat(sum_of([{name: share.abs() for name, share in of_rank.items()} for of_rank in shares]))
    return bool(((flat(found) - flat(sum_of(shares))).abs() <= 4 * eps * size + 1e-6 * size.max()).all())


def common_factor(found: Named, expected: Named) -> float | None:
    """By how much all of it is multiplied; None where it is not."""
    a, b = flat(found), flat(expected)
    size = float(b @ b)
    factor = float(a @ b) / size if size else 0.0
    return factor if float((a - factor * b).norm()) <= 1e-9 * float(b.norm()) * max(1.0, abs(factor)) else None


def factor_of_numbers(found: Sequence[float], expected: Sequence[float]) -> float | None:
    """By how much all numbers are multiplied; None where each by another, or there is one number, and the factor is not round."""
    if not expected or any(value == 0 for value in expected):
        return None
    factors = [a / b for a, b in zip(found, expected, strict=True)]
    factor = factors[0]
    if any(not math.isclose(other, factor, rel_tol=1e-9) for other in factors):
        return None
    is_round = factor != 0 and any(math.isclose(f, round(f), rel_tol=1e-9) for f in (factor, 1 / factor))
    return factor if is_round or factor == 0 or len(factors) > 1 else None


def are_close(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the factors are the same, to rounding."""
    return len(one) == len(other) and all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(one, other, strict=True))


def is_near(found: Named, expected: Named, tolerance: float) -> bool:
    """Whether nothing is off by more than the tolerance."""
    return Difference.between(found, expected).largest <= tolerance


def is_close(found: Tensor, expected: Tensor | None, tolerance: float = 1e-9) -> bool:
    """Whether a tensor is another, to rounding."""
    if expected is None or found.shape != expected.shape:
        return False
    return torch.equal(found, expected) or is_near({"": found.double()}, {"": expected.double()}, tolerance)


def is_same_number(found: float, expected: float, tolerance: float) -> bool:
    """Whether a loss is another, to rounding; NaN is NaN."""
    return math.isclose(found, expected, rel_tol=16 * tolerance, abs_tol=1e-300) or (found != found and expected != expected)


def orderable(value: float) -> float:
    """A difference, infinite where it is NaN."""
    return math.inf if math.isnan(value) else value


def times(factor: float) -> str:
    """A factor in words."""
    return f"{factor:.6g} times"


def in_a_list(factors: Sequence[float]) -> str:
    """Factors in words."""
    return ", ".join(f"{factor:.6g}" for factor in factors)
