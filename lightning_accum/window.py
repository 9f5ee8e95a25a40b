"""What has been accumulated since the last optimizer step, and how it becomes the full batch's gradient.

A micro-batch with mean loss ``l`` and weight ``n`` contributes the gradient of ``l * n``. At the boundary the weights are summed
over the window and the ranks, in one all-reduce of 64 bytes, and the gradients are divided once by that sum. Nothing needs to
be known about the batches to come. fairseq, torchtune and Megatron-LM normalise this way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_accum.graph import Denominator
from lightning_accum.weight import Contribution


@dataclass(frozen=True, slots=True)
class ClosedWindow:
    """A window that has ended, over all ranks.

    Attributes:
        loss: the loss that the full batch would have had: the weighted mean, or the sum for a loss that is a sum.
        weight: the sum of the weights; the number of micro-batches for a loss that is a sum.
        micro_batches: micro-batches with a loss.
        is_empty: nothing had any weight, so there is no gradient to step on.
        do_terms_disagree: the terms of the loss have denominators that are not proportional.
    """

    loss: Tensor | float
    weight: Tensor | float
    micro_batches: int
    is_empty: bool = False
    do_terms_disagree: bool = False


class Window:
    """Accumulates weights and losses, and closes.

    During the window the gradients are scaled by ``1 / reference``, a power of two near the mean weight and the same on all ranks:
    weights can be thousands of tokens, which float16 gradients have no room for. A power of two costs no rounding.

    Args:
        device: where the weights are summed.
        world_size: the ranks whose gradients the reduction averages.
        group: their process group; None for the default one.
    """

    def __init__(self, device: torch.device, world_size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self._device = device
        self._world_size = world_size
        self._group = group
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        """The type of weights and totals. MPS has no float64; float32 counts are exact up to 2**24."""
        self._reference: float | None = None
        self.discard()

    def discard(self) -> None:
        """Forget what has been accumulated so far."""
        self._losses: list[Tensor] = []
        self._contributions: list[Contribution] = []
        self._totals: Tensor | None = None
        self._reduction: dist.Work | None = None

    @property
    def micro_batches(self) -> int:
        """Micro-batches with a loss so far, on this rank."""
        return len(self._contributions)

    def add(self, loss: Tensor, contribution: Contribution) -> Tensor | None:
        """Take in a micro-batch before its backward.

        Args:
            loss: its loss, a scalar.
            contribution: its weight.

        Returns:
            The scalar that backward takes as ``gradient``, of the loss's type; None for a loss that is a sum.
        """
        self._losses.append(loss.detach())
        self._contributions.append(contribution)
        weight = contribution.weight
        reference = self._agreed_reference(0.0 if weight is None else weight)
        if weight is None:
            return None
        if isinstance(weight, Tensor):
            return (weight.detach() / reference).to(loss.dtype)
        return torch.full((), weight / reference, dtype=loss.dtype, device=loss.device)

    def skip(self) -> None:
        """Take in a micro-batch that has no loss on this rank."""
        self._agreed_reference(0.0)

    def _agreed_reference(self, weight: Denominator) -> float:
        """The scale of this window: from the first weights of all ranks, later from the mean weight of the last window."""
        if self._reference is None:
            first = self._tensor_of([weight, 1.0])
            if self._world_size > 1:
                dist.all_reduce(first, group=self._group)
            total, count = first.tolist()
            self._reference = _power_of_two_near(total / count)
        return self._reference

    def reduce(self) -> None:
        """Start to sum the weights over the ranks.

        Called once the last weight is known, before its backward: so it does not wait in line behind the gradients.
        """
        self._totals = self._sum_up()
        if self._world_size > 1:
            self._reduction = dist.all_reduce(self._totals, group=self._group, async_op=True)

    def close(self, gradients: Sequence[Tensor]) -> ClosedWindow:
        """End the window: scale its gradients in place to those of the full batch.

        Args:
            gradients: what was accumulated, averaged over the ranks.

        Raises:
            ValueError: a weight is negative or NaN, or the loss is a mean in one micro-batch and a sum in another. On all ranks,
                and before anything is scaled.
        """
        if self._totals is None:
            self.reduce()
        assert self._totals is not None
        if self._reduction is not None:
            self._reduction.wait()
        # the one copy to the host
        weight, loss, micro_batches, invalid, sums, terms, spread, _ = self._totals.tolist()
        self.discard()
        if invalid:
            raise ValueError(
                f"{invalid:.0f} of the window's {micro_batches:.0f} micro-batches have a weight that is negative, infinite or NaN."
                " A weight is the denominator of a mean loss; see the `weight` argument of GradientAccumulation."
            )
        if 0 < sums < micro_batches:
            raise ValueError(
                f"In {sums:.0f} of the window's {micro_batches:.0f} micro-batches the loss is a sum, in the others it is a mean:"
                " they cannot be added up. Return one kind of loss from training_step."
            )
        if sums:
            _scale(gradients, float(self._world_size))
            return ClosedWindow(loss, micro_batches, int(micro_batches))
        if weight == 0:
            return ClosedWindow(math.nan, 0.0, int(micro_batches), is_empty=True)
        assert self._reference is not None
        _scale(gradients, self._world_size * self._reference / weight)
        self._reference = _power_of_two_near(weight / micro_batches)
        # Cauchy-Schwarz: sum d^2/n >= (sum d)^2 / sum n, and equal only where all d are proportional to n
        disagree = terms > 0 and spread * weight / terms**2 - 1 > 1e-6
        return ClosedWindow(loss / weight, weight, int(micro_batches), do_terms_disagree=disagree)

    def _sum_up(self) -> Tensor:
        """Eight numbers of this rank, to be summed over the ranks: 64 bytes in float64."""
        totals = torch.zeros(8, dtype=self.dtype, device=self._device)
        if not self._contributions:
            return totals
        losses = torch.stack([loss.to(self._device, self.dtype) for loss in self._losses])
        known = [contribution.weight for contribution in self._contributions if contribution.weight is not None]
        totals[2] = len(self._contributions)
        totals[4] = len(self._contributions) - len(known)
        if len(known) < len(self._contributions):
            totals[1] = losses.sum()
            return totals
        weights = self._tensor_of(known)
        totals[0] = weights.sum()
        totals[1] = torch.where(weights == 0, 0.0, losses * weights).sum()
        totals[3] = (~torch.isfinite(weights) | (weights < 0)).sum()
        if any(contribution.others for contribution in self._contributions):
            others = self._denominators_of_other_terms()
            totals[5] = others.sum()
            totals[6] = torch.where(weights == 0, others, others**2 / weights).sum()
        return totals

    def _denominators_of_other_terms(self) -> Tensor:
        """One number a micro-batch that is proportional to its weight only if the denominators of all other terms are."""
        rows = []
        for contribution in self._contributions:
            row = [term.denominator for term in contribution.others if term.denominator is not None]
            # unequal factors, so that no term makes up for another
            factors = torch.linspace(1.0, 2.0, len(row), dtype=self.dtype, device=self._device)
            rows.append((self._tensor_of(row) * factors).sum())
        return torch.stack(rows)

    def _tensor_of(self, values: Sequence[Denominator]) -> Tensor:
        if any(isinstance(value, Tensor) for value in values):
            tensors = [value if isinstance(value, Tensor) else torch.full((), value, device=self._device) for value in values]
            return torch.stack([tensor.detach().to(self._device, self.dtype) for tensor in tensors])
        return torch.tensor(values, dtype=self.dtype, device=self._device)


def _power_of_two_near(mean: float) -> float:
    if not (mean > 0 and math.isfinite(mean)):
        return 1.0
    return 2.0 ** round(math.log2(mean))


@torch.no_grad()
def _scale(gradients: Sequence[Tensor], factor: float) -> None:
    if factor == 1.0 or not gradients:
        return
    dense = [gradient for gradient in gradients if gradient.layout == torch.strided]
    torch._foreach_mul_(dense, factor)
    for gradient in gradients:
        if gradient.layout != torch.strided:
            gradient.mul_(factor)
