"""The gradients of the micro-batches of one window, measured for the noise scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_accum.noise.watch import sum_of_squares
from lightning_accum.weighing.denominator import Denominator
from lightning_accum.window_totals import tensor_of


@dataclass(eq=False, slots=True)
class MeasuredMicroBatch:
    """A micro-batch of the window that is running.

    Attributes:
        weight: None where its loss is a sum.
        samples: how many it has; nan where the batch does not show it.
        weight_scale: what its gradients are divided by, of the window.
        norms: of its gradients, by parameter; None once they are added up.
        square: the sum of their squares.
    """

    weight: Denominator | None
    samples: float
    weight_scale: float
    norms: dict[int, Tensor] | None
    square: Tensor | None = None

    def add_up(self, device: torch.device, dtype: torch.dtype) -> None:
        """Its backward is over."""
        if self.norms is not None:
            self.square, self.norms = sum_of_squares(self.norms.values(), device, dtype), None


def totals(
    micro_batches: Sequence[MeasuredMicroBatch], scale: float, is_weighed: bool, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """What is to be summed over the ranks.

    Over the micro-batches of this rank: of n_i |g_i|^2, of n_i, of those that have a weight, of the weights as the window counts
    them (1 for a sum), of samples, and of those whose loss is a sum.

    Args:
        micro_batches: of the window, on this rank.
        scale: of the loss, which the gradients are multiplied by.
        is_weighed: their gradients are multiplied by their weight; with accumulate_dtype that comes later, when they are summed.
        device: where the sums are.
        dtype: float64 where the device has it.
    """
    if not micro_batches:
        return torch.zeros(6, dtype=dtype, device=device)
    micro_batches[-1].add_up(device, dtype)

    def column(values: Iterable[Denominator]) -> Tensor:
        return tensor_of(list(values), device, dtype)

    # what a loss that is a sum would be divided by, if it were a mean, is its samples
    weights = column(m.samples if m.weight is None else m.weight for m in micro_batches)
    weight_scales = column(1.0 if m.weight is None else m.weight_scale if is_weighed else m.weight for m in micro_batches)
    squares = torch.stack([m.square for m in micro_batches if m.square is not None]) * (weight_scales / scale) ** 2 / weights
    counted = column(1.0 if m.weight is None else m.weight for m in micro_batches)
    samples, sums = column(m.samples for m in micro_batches), column(m.weight is None for m in micro_batches)
    has_weight = weights != 0
    squares = torch.where(has_weight, squares, 0.0)
    return torch.stack((squares, weights, has_weight.to(dtype), counted, samples, sums)).sum(1)
