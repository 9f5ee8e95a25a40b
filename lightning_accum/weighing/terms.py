"""The totals that the terms of a loss are weighed by, each by its own, where they are known before a window's first backward.

A loss is often a sum of means over different counts: a cross entropy over tokens and an error over samples. Of the full batch,
term ``t`` has the gradient ``sum_i d_ti g_ti / sum_i d_ti``, where ``d_ti`` is what it was divided by in micro-batch ``i``. One
backward a micro-batch adds up all terms, so that each has to be scaled before it, and what the window is multiplied by at its end
is the same for all. So the scale of a term needs the ratio of two totals, ``N / D_t``, before the first backward. Where they are
not known then, only another backward or the graphs of a whole window in memory would do. Where they are, a hook on the node of each
term makes all of them exact:

- a window of one micro-batch on every rank: each rank reads its own from the graph, and they are summed before the backward
  (:class:`TermsAtOnce`);
- explicit weights count the loader batches of a window before the first of them runs (:class:`TermsCountedAhead`): they are drawn
  ahead (``loops/ahead.py``).

Elsewhere all terms take the weight of the main one. What that costs in the gradient of ``cross_entropy + c * mse``, for a window of
64 sentences in micro-batches of 4 (``tests/benchmarks/terms.py``, mean of 5 windows): 9 to 11 % where they come in any order, 31 to
35 % sorted by length. A mean of means is 2 to 4 % off for ``c = 1`` (the per-sample term, which it has right, is the larger one)
and 16 to 38 % for ``c = 0.1``. Each by its own weight: 2e-15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_accum.weighing.denominator import Denominator
from lightning_accum.weighing.term_nodes import MOST_OTHERS

HOW_TO_WEIGH_EACH = (
    "Each is weighed by itself with a weight for each, which count a window before it runs:"
    " GradientAccumulation(..., weight=[TokenCount(), SampleCount()])."
)
HOW_TO_SEE_ALL = (
    "Where a term is no mean over rows or tokens, have the loss see the whole batch, with a window of one loader batch:"
    ' GradientAccumulation(1, micro_batch=..., row_wise="encoder") with the names of the submodules that run in micro-batches, or'
    ' micro_batch="offload".'
)


def unless_rounded(count: Denominator, weight: Denominator | None) -> Denominator:
    """A count, or the weight where only the rounding of half precision makes a difference: bfloat16 has 3612 as 3616.

    Example:
        >>> unless_rounded(3612, torch.tensor(3616.0, dtype=torch.bfloat16)), unless_rounded(3612, torch.tensor(3616.0))
        (tensor(3616., dtype=torch.bfloat16), 3612)
    """
    half = next((d for d in (count, weight) if isinstance(d, Tensor) and d.dtype in (torch.bfloat16, torch.float16)), None)
    if half is None or weight is None:
        return count
    first, second = (torch.as_tensor(d, device=half.device) for d in (count, weight))
    return torch.where(first.to(half.dtype) == second.to(half.dtype), second, first)


class Counts(Protocol):
    """What one micro-batch brings in: see :class:`lightning_accum.weighing.contribution.Contribution`."""

    @property
    def weight(self) -> Denominator | None:
        """What the main term was divided by."""

    @property
    def others(self) -> tuple[Denominator, ...]:
        """What the other terms were divided by."""

    @property
    def signature(self) -> int:
        """A number that tells which terms these are, 0 without any."""


class TermsAtOnce:
    """Windows of one micro-batch on every rank: its terms are read, and summed over the ranks with the weights."""

    size = MOST_OTHERS + 3

    def agree(self) -> None:
        """The sums of the window tell all."""

    def discard(self) -> None:
        """Nothing is kept."""

    def numbers(self, contributions: Sequence[Counts]) -> list[Denominator]:
        """What this rank adds to the sums of the window: the denominators, and whose they are."""
        others: Sequence[Denominator] = contributions[0].others if contributions else ()
        signature = float(contributions[0].signature) if others else 0.0
        of_terms = [*others[:MOST_OTHERS], *[0.0] * (MOST_OTHERS - len(others))]
        return [*of_terms, signature, signature**2, float(signature > 0)]

    def factors(
        self, contribution: Counts, weight_scale: float, total: Denominator, sums: Sequence[float] | Tensor
    ) -> list[Denominator]:
        """What the terms of this rank's micro-batch are multiplied by; the main weight for all where ranks have other terms.

        Args:
            contribution: of the micro-batch.
            weight_scale: of the window.
            total: the weight of the window.
            sums: :meth:`numbers`, summed over the ranks.
        """
        n, others = contribution.weight, contribution.others
        assert n is not None
        is_exact = self.are_exact(sums)
        shares: list[Denominator]
        if isinstance(sums, Tensor):
            shares = [torch.where(is_exact & (d_sum > 0), d * total / d_sum, n) for d, d_sum in zip(others, sums, strict=False)]
        else:
            shares = [d * total / d_sum if is_exact and d_sum > 0 else n for d, d_sum in zip(others, sums, strict=False)]
        return [n / weight_scale, *[share / weight_scale for share in shares]]

    def are_exact(self, sums: Sequence[float] | Tensor, total: float = 0.0) -> Any:
        """Whether there are such terms, and all ranks that have some have the same: all their signatures are one."""
        signature, square, ranks = sums[-3], sums[-2], sums[-1]
        return (signature * signature == square * ranks) & (signature > ranks)


class TermsCountedAhead:
    """What each term is divided by is counted in all loader batches of a window before the first of them runs.

    Args:
        weights: one for each term, in their order.
        device: where they are summed.
        dtype: the type of their sums.
        world_size: the ranks whose gradients are averaged.
        group: their process group; None for the default one.
    """

    def __init__(
        self,
        weights: Sequence[Callable[[Any], Denominator]],
        device: torch.device,
        dtype: torch.dtype,
        world_size: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._weights = weights
        self._device, self._dtype = device, dtype
        self._world_size, self._group = world_size, group
        self.discard()

    def discard(self) -> None:
        """The window has ended."""
        self._own: list[Denominator] = [0.0] * len(self._weights)
        self._totals: list[float] | Tensor | None = None

    def add(self, batch: Any) -> list[Denominator]:
        """Count a loader batch of the window. Returns the counts of this rank so far."""
        self._own = [own + weight(batch) for own, weight in zip(self._own, self._weights, strict=True)]
        return self._own

    @property
    def is_agreed(self) -> bool:
        """The window is counted, over the ranks too."""
        return self._totals is not None

    @property
    def totals(self) -> list[float] | None:
        """What was counted over window and ranks; None before the first micro-batch."""
        return self._totals.tolist() if isinstance(self._totals, Tensor) else self._totals

    def restore(self, totals: Sequence[float]) -> None:
        """Go on inside a window with these :attr:`totals`."""
        self._totals = list(totals) if self._device.type == "cpu" else torch.tensor(totals, dtype=self._dtype, device=self._device)

    def agree(self) -> None:
        """Sum over the ranks, the first time in a window. Called on all of them, before the first backward."""
        if self._totals is not None:
            return
        if self._world_size == 1 and not any(isinstance(count, Tensor) for count in self._own):
            self._totals = [float(count) for count in self._own]
            return
        totals = torch.stack([torch.as_tensor(count, dtype=self._dtype, device=self._device) for count in self._own])
        if self._world_size > 1:
            dist.all_reduce(totals, group=self._group)
        self._totals = totals.tolist() if self._device.type == "cpu" else totals

    def numbers(self, contributions: Sequence[Counts]) -> list[Denominator]:
        """What this rank adds to the sums of the window: by how much its micro-batches miss its share of what was counted."""
        missed: list[Denominator] = [0.0] * len(self._weights)
        if self._totals is not None:
            missed = [-total / self._world_size for total in self._totals]
        for c in contributions:
            if c.others:
                missed = [so_far + d for so_far, d in zip(missed, (0.0 if c.weight is None else c.weight, *c.others), strict=True)]
        return missed

    def factors(
        self, contribution: Counts, weight_scale: float, total: Denominator, sums: Sequence[float] | Tensor
    ) -> list[Denominator]:
        """What the terms of a micro-batch are multiplied by. Takes what :meth:`TermsAtOnce.factors` does."""
        assert self._totals is not None
        n_sum, *d_sums = self._totals
        factors: list[Denominator] = []
        for d, d_sum in zip((contribution.weight, *contribution.others), (n_sum, *d_sums), strict=True):
            assert d is not None
            if isinstance(d_sum, Tensor):
                factors.append(torch.where(d_sum > 0, d * n_sum / d_sum, torch.zeros_like(d_sum)) / weight_scale)
            else:
                factors.append(d * n_sum / d_sum / weight_scale if d_sum > 0 else 0.0)
        return factors

    def are_exact(self, sums: Sequence[float] | Tensor, total: float = 0.0) -> Any:
        """Whether the micro-batches of a window with the weight ``total`` had what was counted in their batches."""
        return all(abs(float(missed)) <= 1e-6 * max(1.0, total) for missed in sums)
