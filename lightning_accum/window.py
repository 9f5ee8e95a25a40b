"""The state of a window since the last optimizer step, and its close, which computes the full batch's gradient.

A micro-batch with mean loss ``l`` and weight ``n`` contributes the gradient of ``l * n``. At the boundary the weights are summed
over the window and the ranks, in one all-reduce of 112 bytes, and the gradients are divided once by that sum. Later batches need
not be known. fairseq, torchtune and Megatron-LM normalise this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_accum.errors import ArgumentError, UsageError
from lightning_accum.exact import exact_dtype
from lightning_accum.main_gradients import GradientSums
from lightning_accum.ranks import Ranks
from lightning_accum.weighing.counted import Counted
from lightning_accum.weighing.functions import FunctionOfMean
from lightning_accum.weighing.terms import Denominator
from lightning_accum.weighing.weight import Contribution, Weigher
from lightning_accum.window_totals import ClosedWindow, Entry, ReducedTotals, tensor_of


class Window:
    """Accumulates weights and losses, and closes.

    During the window the gradients are divided by the weight scale, a power of two near the mean weight and the same on all ranks:
    weights of thousands of tokens would overflow float16 gradients. Dividing by a power of two is exact.

    Args:
        ranks: the ranks of the window.
        weigher: finds the weights of its loss.
        sums: hold the summed gradients, if ``parameter.grad`` does not.
        weight_scale: the scale of the first window; None to compute it from the first weights of all ranks.
    """

    def __init__(self, ranks: Ranks, weigher: Weigher, sums: GradientSums | None, weight_scale: float | None) -> None:
        self.weigher, self.sums, self.device = weigher, sums, ranks.device
        self._ranks, self._world_size, self._group = ranks, ranks.size, ranks.group
        self.dtype = exact_dtype(self.device)
        """The type of weights and totals. MPS has no float64; float32 counts are exact up to 2**24."""
        self._tensor_of = partial(tensor_of, device=self.device, dtype=self.dtype)
        self.flag = False
        """A flag that all ranks receive with the weights at the end of the window."""
        self.is_last = False
        """Whether a signal has asked this rank to end; all ranks receive this, too."""
        self.counted: Counted | None = None
        """Weights each term of the loss separately, if terms are counted; the same on all ranks."""
        self.constant: float | None = None
        """The constant in each weight, such as the 1e-8 of ``sum / (count + 1e-8)``, which the full batch has once. The same on all
        ranks; None if unknown.
        """
        self.weight_scale = weight_scale
        """The divisor of weights during the window; None before the first."""
        self.discard()

    def discard(self) -> None:
        """Drop the accumulated state."""
        self.entries: list[Entry] = []  # the micro-batches with a loss so far, on this rank
        self._function: FunctionOfMean | None = None
        self.left_out = 0
        """The number of non-finite micro-batches on this rank, see :meth:`skip_nonfinite`."""
        self.has_doubts: Denominator = False
        """Whether the weight of a micro-batch of this rank was read in a way that the check has not seen, or may not be a
        weight."""
        self._totals: ReducedTotals | None = None
        if self.counted is not None:
            self.counted.discard()

    @property
    def has_weight(self) -> bool:
        """Whether a micro-batch of this rank has weight so far."""
        return any(entry.has_weight for entry in self.entries)

    def add(self, loss: Tensor, contribution: Contribution, shares: Tensor | None = None) -> Tensor | None:
        """Add a micro-batch before its backward, or the ``shares`` of its terms in the loss of the window.

        Returns:
            The ``gradient`` of the backward, with the loss's type and shape; None for 1, as for a loss that is a sum.
        """
        own = _number(loss)
        added = own if contribution.of_mean is None else contribution.of_mean.mean
        self._take_in(Entry(own, added if shares is None else _number(shares), contribution))
        weight = contribution.weight
        weight_scale = self._agreed_weight_scale(0.0 if weight is None else weight)
        if weight is None or (not isinstance(weight, Tensor) and weight == weight_scale):
            return None
        if isinstance(weight, Tensor):
            return (weight / weight_scale).to(loss.dtype).reshape(loss.shape)
        return torch.full(loss.shape, weight / weight_scale, dtype=loss.dtype, device=loss.device)

    def _take_in(self, entry: Entry) -> None:
        of_mean = entry.contribution.of_mean
        function = None if of_mean is None else of_mean.function
        if function is not self._function and function != self._function and entry.has_weight:
            if self.has_weight:
                raise ArgumentError(
                    f"The loss is {function or 'a mean'} in a micro-batch, and was {self._function or 'a mean'} in earlier ones of "
                    "the window: the loss of the window is not a function of a single mean. Have training_step compute the same "
                    'function in all micro-batches of a window, or take the mean of their losses: weight="equal".'
                )
            self._function = function
        self.entries.append(entry)

    def weight_so_far(self) -> float:
        """The sum of the weights of this rank; waits for the device that they are on."""
        weights = [entry.contribution.weight for entry in self.entries]
        if any(weight is None for weight in weights):
            raise ArgumentError(
                "A window of Tokens ends when the weights of its micro-batches reach its size, but the loss is a sum, which "
                "has no weight. Return a mean from training_step, or give the window in loader batches."
            )
        if any(isinstance(weight, Tensor) for weight in weights):
            return float(self._tensor_of(weights).sum())  # type: ignore[arg-type]
        return float(sum(weights))  # type: ignore[arg-type]

    def restore(self, weight_scale: float | None, weighed: Sequence[Mapping[str, Any]]) -> None:
        """Continue with an earlier :attr:`weight_scale` and the states of earlier :attr:`entries`."""
        self.weight_scale, self.entries = weight_scale, []
        for state in weighed:
            self._take_in(Entry.from_state_dict(state))

    def note_doubt(self, doubt: Denominator) -> None:
        """Set :attr:`has_doubts` when the next micro-batch runs, if ``doubt`` is not 0."""
        self.has_doubts = self.has_doubts + doubt != 0

    def rewind(self, micro_batches: int) -> None:
        """Forget all but the first ``micro_batches`` with a loss."""
        del self.entries[micro_batches:]

    def skip_nonfinite(self) -> None:
        """Remove the last micro-batch, which was not finite, and count it."""
        self.rewind(len(self.entries) - 1)
        self.left_out += 1

    def add_empty(self) -> None:
        """Add a micro-batch that has no loss on this rank."""
        self._agreed_weight_scale(0.0)

    def _agreed_weight_scale(self, weight: Denominator) -> float:
        """The scale of this window: from the first weights of all ranks, later from the last window."""
        if self.weight_scale is None:
            first = self._tensor_of([weight, 1.0])
            if self._world_size > 1:
                dist.all_reduce(first, group=self._group)
            total, count = first.tolist()
            self.weight_scale = _power_of_two_near(total / count)
        return self.weight_scale

    def reduce(self) -> None:
        """Start to sum the weights over the ranks.

        Called once the last weight is known, before its backward, so that it does not queue behind the gradients.
        """
        counted = [] if self.counted is None else self.counted.compared([entry.contribution for entry in self.entries])
        self._totals = ReducedTotals(
            self.entries,
            self._ranks,
            counted,
            left_out=self.left_out,
            flagged=self.flag,
            last=self.is_last,
            doubtful=self.has_doubts,
            functions=self._world_size > 1 and self._function is not None,
        )

    def close(self, gradients: Callable[[], Sequence[Tensor]]) -> ClosedWindow:
        """End the window: scale its gradients in place to the gradients of the full batch.

        Args:
            gradients: returns the accumulated gradients, averaged over the ranks. Not called if they need no scale.

        Raises:
            ValueError: a weight is negative or NaN, or micro-batches have different kinds of loss: a mean, a sum, functions of a
            mean. Raised on all ranks, before gradients are scaled.
        """
        if self._totals is None:
            self.reduce()
        assert self._totals is not None
        totals, counted = self._totals.read()
        function, entries, of_terms = self._function, self.entries, None if self.counted is None else self.counted.totals
        self.discard()
        totals.check()
        missed, is_sum = counted[0] if counted else 0.0, bool(totals.sums)
        is_counted_empty = not any(of_terms or ()) and not any(None in (e.contribution.of_terms or {}).values() for e in entries)
        weight = totals.weight - (totals.weighted - 1) * self.constant if self.constant else totals.weight
        is_function = function is not None if self._world_size == 1 else totals.functions > 0
        is_listed = self.counted is not None and self.counted.is_listed
        if missed > 1e-6 and not is_listed:
            raise UsageError(
                "The weights of the loss's terms differ from the counts taken before the window: training_step draws random "
                "numbers that cannot be repeated, depends on changing state, or has two similar terms, one of which may be absent. "
                "Divide the sum of a term that may be absent by max(count, 1), so that all micro-batches have it. For terms that "
                "are random or change, pass one weight for each term, weight=[...], which counts the batch."
            )
        disagree = totals.do_terms_disagree(1e-10 if self.dtype == torch.float64 else 1e-6)
        if (totals.weight == 0 and not is_sum) or (of_terms is not None and is_sum and is_counted_empty):
            return totals.closed_without_weight() if self.weigher.is_auto else totals.closed()
        mean, slope = totals.loss if is_sum else totals.loss / weight, 1.0
        loss: Denominator = mean
        if is_function:
            size = totals.micro_batches if is_sum else weight
            loss, slope = self._of_function(function, entries, mean, size)
        if is_sum:
            _scale(gradients, self._world_size * slope)
            shown = next((total for total in of_terms or () if total), 1.0)
            do_factors_differ = any(
                number * squares - total * total > 1e-6 * total * total
                for number, total, squares in zip(counted[1::3], counted[2::3], counted[3::3], strict=True)
            )
            doubts = {"is_miscounted": is_listed and missed > 1e-6, "do_factors_differ": do_factors_differ}
            return totals.closed(loss, shown, slope=slope, **doubts)
        assert self.weight_scale is not None
        _scale(gradients, self._world_size * self.weight_scale / weight * slope)
        self.weight_scale = _power_of_two_near(weight / totals.micro_batches)
        has_others = disagree and any(entry.contribution.others for entry in entries)
        doubts = {"do_terms_disagree": has_others, "do_factors_differ": disagree and not has_others}
        return totals.closed(loss, weight, slope=slope, **doubts)

    def warn_of(self, closed: ClosedWindow, warn: Callable[[str], None]) -> None:
        """Warn if a window that has ended may differ from its full batch."""
        if closed.do_terms_disagree:
            warn(
                "The ratio of the terms' weights varies between micro-batches, but all terms had the weight of the first "
                f"({self.weigher.criterion}): this window differs from its full batch. Pass one weight for each term, weight=[...]."
            )
        if closed.do_factors_differ:
            warn(
                "A factor of the loss changes inside a window, or differs between ranks (such as the slope of relu(mean - c) on "
                "either side of c), or some micro-batches lack a penalty on parameters. Factors and penalties are treated as "
                "constants; if this one is not constant, the window differs from its full batch. Anneal a factor by global_step, "
                "which is constant within a window, not by batch_idx; if a factor depends on the batch, pass an explicit weight."
            )
        if closed.is_miscounted:
            warn(
                "The weights of the terms, counted in micro-batches, do not add up to the counts of the whole batch: a micro-batch "
                "had no loss, or a weight is not a count that adds up. In this window the ratio of the terms differs from the full "
                "batch."
            )

    def _of_function(
        self, function: FunctionOfMean | None, entries: Sequence[Entry], mean: float, size: float
    ) -> tuple[Denominator, float]:
        """The loss of a window as a function of its ``mean``, and its derivative. Called on all ranks; each sends 32 bytes.

        Args:
            function: the function on this rank; None if no micro-batch has a weight.
            entries: its micro-batches.
            mean: of the window.
            size: its weight, or its number of micro-batches if the loss is a function of a sum.

        Raises:
            ValueError: the function differs between ranks.
        """
        value, slope = (mean, 1.0) if function is None else function.at(mean)
        constants: Denominator = 0.0
        for c in (entry.contribution for entry in entries):
            constants = constants + (0.0 if c.of_mean is None else c.of_mean.constant * (1.0 if c.weight is None else c.weight))
        if self._world_size == 1:
            return value + constants / size, slope
        own = self._tensor_of([float(any(entry.has_weight for entry in entries)), value, slope, constants])
        of_ranks = [torch.empty_like(own) for _ in range(self._world_size)]
        dist.all_gather(of_ranks, own, group=self._group)
        numbers = torch.stack(of_ranks).tolist()
        (value, slope), *others = [(value, slope) for is_known, value, slope, _ in numbers if is_known]
        if any(other != slope and not (math.isnan(other) and math.isnan(slope)) for _, other in others):
            raise ArgumentError(
                "The ranks compute different functions of the means of their losses, so the loss of the window is not a function of"
                " a single mean. Have training_step compute the same function on all ranks."
            )
        return value + sum(constant for *_, constant in numbers) / size, slope


def _number(loss: Tensor) -> Denominator:
    return loss.item() if loss.is_cpu else loss.detach().reshape(()).clone()  # a CUDA graph writes its next loss over it


def _power_of_two_near(mean: float) -> float:
    if not (mean > 0 and math.isfinite(mean)):
        return 1.0
    return 2.0 ** round(math.log2(mean))


def _scale(find: Callable[[], Sequence[Tensor]], factor: float) -> None:
    if factor == 1.0:
        return
    gradients = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in find()]
    dense = [gradient for gradient in gradients if gradient.layout == torch.strided]
    with torch.no_grad():
        if dense:
            torch._foreach_mul_(dense, factor)
        for gradient in gradients:
            if gradient.layout != torch.strided:
                gradient.mul_(factor)
