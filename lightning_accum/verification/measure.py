"""How much two optimizer steps differ, how much of that is rounding, and by what factors sums of gradients differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]

SMALLEST_SHARE = 1e-2
"""Of the gradient's typical size: a parameter whose own gradient is smaller is measured by this.

The gradient of a key's bias in attention is 0 but for rounding, and would be a hundred percent off."""


@dataclass(frozen=True)
class Difference:
    """How much two sets of tensors differ, relative to the second.

    Attributes:
        overall: the norm of all differences over the norm of all that was expected.
        by_name: the same for each tensor; relative to a share of the typical size for a tensor that is much smaller.
    """

    overall: float
    by_name: Mapping[str, float]

    @property
    def largest(self) -> float:
        """The largest of all; NaN where any is."""
        values = [self.overall, *self.by_name.values()]
        return math.nan if any(map(math.isnan, values)) else max(values)

    @classmethod
    def between(cls, found: Tensors, expected: Tensors) -> Difference:
        """Measure.

        Example:
            >>> Difference.between({"w": torch.tensor([3.0, -3.0])}, {"w": torch.tensor([3.0, -4.0])}).overall
            0.2
        """
        distances = {name: _norm(_minus(found[name], tensor)) for name, tensor in expected.items()}
        sizes = {name: _norm(tensor) for name, tensor in expected.items()}
        size = math.hypot(*sizes.values())
        numbers = sum(tensor.numel() for tensor in expected.values())
        typical = SMALLEST_SHARE * size / math.sqrt(max(1, numbers))
        by_name = {
            name: _ratio(distances[name], max(sizes[name], typical * math.sqrt(tensor.numel())))
            for name, tensor in expected.items()
        }
        return cls(_ratio(math.hypot(*distances.values()), size), by_name)


def minus(after: Tensors, before: Tensors) -> dict[str, Tensor]:
    """The way that each tensor went."""
    return {name: _minus(tensor, before[name]) for name, tensor in after.items()}


def is_same_step(found: Tensors, expected: Tensors, before: Tensors) -> bool:
    """Whether parameters are where the same gradient has taken others, to the rounding of the optimizer's own arithmetic."""
    for name, tensor in expected.items():
        if not tensor.is_floating_point():
            continue
        eps = torch.finfo(tensor.dtype).eps
        way, size = _norm(_minus(tensor, before[name])), _norm(tensor)
        if not _norm(_minus(found[name], tensor)) <= 1024 * eps * way + 4 * eps * size:
            return False
    return True


def tolerance(dtype: torch.dtype, noise: float) -> float:
    """How much the gradients of equal steps may differ.

    Sixteen roundings, or four times what was measured to be rounding; 1e-12 in float64, which is what this package promises.

    Args:
        dtype: the narrowest that the loss is computed in.
        noise: the largest difference between two runs that differ in the order of additions alone.

    Example:
        >>> tolerance(torch.float64, 1e-15), round(tolerance(torch.float32, 1e-6), 7)
        (1e-12, 4e-06)
    """
    if dtype == torch.float64:
        return 1e-12
    return max(16 * torch.finfo(dtype).eps, min(4 * noise, most_noise(dtype)))


def most_noise(dtype: torch.dtype) -> float:
    """A larger difference between two runs of one batch is no rounding."""
    return min((2**16 if dtype == torch.float64 else 2**12) * torch.finfo(dtype).eps, 0.25)


@dataclass(frozen=True)
class Fit:
    """The weights with which gradients of micro-batches come nearest to that of their batch.

    Attributes:
        weights: none where several would do.
        left: how far from the batch's they leave it, relative to it: not 0 where no weights are right.
        left_of_means: the same of weights that add up to 1, as those of a window do.
    """

    weights: Tensor
    left: float
    left_of_means: float


def weights_that_fit(pieces: Tensor, full: Tensor) -> Fit:
    """The weights with which gradients of micro-batches come nearest to that of their batch, and how near.

    Args:
        pieces: the gradients of the micro-batches. Shape (parameters, micro-batches), float64.
        full: that of the batch. Shape (parameters,).

    Example:
        >>> fit = weights_that_fit(torch.tensor([[1.0, 0], [0, 1], [0, 0]]).double(), torch.tensor([0.25, 0.75, 0]).double())
        >>> fit.weights.tolist(), fit.left, fit.left_of_means < 1e-15
        ([0.25, 0.75], 0.0, True)
    """
    found = torch.linalg.lstsq(pieces, full[:, None], driver="gelsd")
    left = full - (pieces @ found.solution)[:, 0]
    # weights that add up to 1: the last is what the others leave
    others, last = pieces[:, :-1] - pieces[:, -1:], full - pieces[:, -1]
    rest = last - (others @ torch.linalg.lstsq(others, last[:, None], driver="gelsd").solution)[:, 0] if others.shape[1] else last
    is_unique = int(found.rank) == int(pieces.any(0).sum())  # one without a gradient may have any weight, such as 0
    size = float(full.norm())
    weights = found.solution[:, 0] if is_unique else full[:0]
    return Fit(weights, _ratio(float(left.norm()), size), _ratio(float(rest.norm()), size))


# --- factors of sums ---------------------------------------------------------------------------------------------------


def flat(gradients: Tensors) -> Tensor:
    """All of it, in one vector."""
    return torch.cat([gradient.to(torch.float64).flatten() for gradient in gradients.values()])


def only(gradients: Tensors, names: Sequence[str]) -> dict[str, Tensor]:
    """Those of these names."""
    return {name: gradients[name] for name in names}


def sum_of(shares: Sequence[Tensors]) -> dict[str, Tensor]:
    """What all ranks add up to."""
    return {name: torch.stack([share[name] for share in shares]).sum(0) for name in shares[0]}


def factors_that_fit(shares: Sequence[Tensors], found: Tensors, tolerance: float) -> list[float] | None:
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


def is_rounding(found: Tensors, shares: Sequence[Tensors], eps: float) -> bool:
    """Whether each number is off by no more than rounding what was added up to it can do."""
    if not shares:
        return False
    size = flat(sum_of([{name: share.abs() for name, share in of_rank.items()} for of_rank in shares]))
    return bool(((flat(found) - flat(sum_of(shares))).abs() <= 4 * eps * size + 1e-6 * size.max()).all())


def common_factor(found: Tensors, expected: Tensors) -> float | None:
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


def is_near(found: Tensors, expected: Tensors, tolerance: float) -> bool:
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


def _minus(a: Tensor, b: Tensor) -> Tensor:
    return a.to(torch.float64) - b.to(torch.float64)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.to(torch.float64)))


def _ratio(part: float, whole: float) -> float:
    if whole == 0:
        return 0.0 if part == 0 else math.inf
    return part / whole
