"""How much two optimizer steps differ, how much of that is rounding, and by what factors sums of gradients differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
        """The largest of all; infinite where any is NaN."""
        return max(math.inf if math.isnan(value) else value for value in (self.overall, *self.by_name.values()))

    @classmethod
    def between(cls, found: Tensors, expected: Tensors) -> Difference:
        """Measure.

        Example:
            >>> Difference.between({"w": torch.tensor([3.0, -3.0])}, {"w": torch.tensor([3.0, -4.0])}).overall
            0.2
        """
        distances = {name: _distance(found[name], tensor) for name, tensor in expected.items()}
        sizes = {name: _norm(tensor) for name, tensor in expected.items()}
        size = math.hypot(*sizes.values())
        numbers = {name: tensor.numel() for name, tensor in expected.items()}
        typical = SMALLEST_SHARE * size / math.sqrt(max(1, sum(numbers.values())))
        by_name = {n: _ratio(distances[n], max(sizes[n], typical * math.sqrt(numbers[n]))) for n in expected}
        return cls(_ratio(math.hypot(*distances.values()), size), by_name)


def is_same_step(found: Tensors, expected: Tensors, before: Tensors) -> bool:
    """Whether parameters are where the same gradient has taken others, to the rounding of the optimizer's own arithmetic."""
    for name, tensor in expected.items():
        if not tensor.is_floating_point():
            continue
        eps = torch.finfo(tensor.dtype).eps
        if not _distance(found[name], tensor) <= 1024 * eps * _distance(tensor, before[name]) + 4 * eps * _norm(tensor):
            return False
    return True


def tolerance(dtype: torch.dtype, noise: float) -> float:
    """How much the gradients of equal steps may differ.

    Sixteen roundings (1e-12 in float64, which is what this package promises), or four times what was measured to be rounding.

    Args:
        dtype: the narrowest that the loss is computed in.
        noise: the largest difference between two runs that differ in the order of additions alone.

    Example:
        >>> tolerance(torch.float64, 1e-15), round(tolerance(torch.float32, 1e-6), 7)
        (1e-12, 4e-06)
    """
    least = 1e-12 if dtype == torch.float64 else 16 * torch.finfo(dtype).eps
    return max(least, min(4 * noise, most_noise(dtype)))


def most_noise(dtype: torch.dtype) -> float:
    """A larger difference between two runs of one batch is no rounding."""
    return min((2**16 if dtype == torch.float64 else 2**12) * torch.finfo(dtype).eps, 0.25)


@dataclass(frozen=True)
class Fit:
    """The weights with which gradients of micro-batches come nearest to that of their batch.

    Attributes:
        weights: none where several would do.
        left: how far from the batch's they leave it, relative to it: not 0 where no weights are right.
    """

    weights: Tensor
    left: float


def weights_that_fit(pieces: Tensor, full: Tensor) -> Fit:
    """The weights with which gradients of micro-batches come nearest to that of their batch, and how near.

    Args:
        pieces: the gradients of the micro-batches. Shape (parameters, micro-batches), float64.
        full: that of the batch. Shape (parameters,).

    Example:
        >>> fit = weights_that_fit(torch.tensor([[1.0, 0], [0, 1], [0, 0]]).double(), torch.tensor([0.25, 0.75, 0]).double())
        >>> fit.weights.tolist(), fit.left
        ([0.25, 0.75], 0.0)
    """
    found = torch.linalg.lstsq(pieces, full[:, None], driver="gelsd")
    left = full - (pieces @ found.solution)[:, 0]
    is_unique = int(found.rank) == int(pieces.any(0).sum())  # one without a gradient may have any weight, such as 0
    size = float(full.norm())
    weights = found.solution[:, 0] if is_unique else full[:0]
    return Fit(weights, _ratio(float(left.norm()), size))


# --- factors of sums ---------------------------------------------------------------------------------------------------


def flat(gradients: Tensors) -> Tensor:
    """All of it, in one vector."""
    return torch.cat([gradient.to(torch.float64).flatten() for gradient in gradients.values()])


def factors_that_fit(shares: Tensor, found: Tensor, tolerance: float) -> Tensor | None:
    """How often each share, a column, counts; one number where they cannot be distinguished, None where they do not fit."""
    if not found.any():
        return torch.zeros(shares.shape[1], dtype=shares.dtype)
    fit = weights_that_fit(shares, found)
    if not fit.left <= max(100 * tolerance, 1e-9):
        return None
    if len(fit.weights):
        return fit.weights
    factor = common_factor(found, shares.sum(1))
    return None if factor is None else torch.tensor([factor], dtype=shares.dtype)


def common_factor(found: Tensor, expected: Tensor) -> float | None:
    """By how much all of it is multiplied; None where it is not."""
    size = float(expected @ expected)
    factor = float(found @ expected) / size if size else 0.0
    return factor if float((found - factor * expected).norm()) <= 1e-9 * size**0.5 * max(1.0, abs(factor)) else None


def is_rounding(found: Tensor, shares: Tensor, eps: float) -> bool:
    """Whether each number is off by no more than rounding what was added up to it, the columns, can do."""
    size = shares.abs().sum(1)
    return bool(((found - shares.sum(1)).abs() <= 4 * eps * size + 1e-6 * size.max()).all())


def difference(found: Tensor | None, expected: Tensor | None) -> float:
    """How far a tensor is from another, relative to it; infinite where one is missing or of another shape."""
    if found is None or expected is None or found.shape != expected.shape:
        return math.inf
    return 0.0 if torch.equal(found, expected) else Difference.between({"": found}, {"": expected}).largest


def _distance(a: Tensor, b: Tensor) -> float:
    return _norm(a.to(torch.float64) - b.to(torch.float64))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.to(torch.float64)))


def _ratio(part: float, whole: float) -> float:
    if whole == 0:
        return 0.0 if part == 0 else math.inf
    return part / whole
