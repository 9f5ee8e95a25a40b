"""The totals of a window: numbers of micro-batches, summed over the ranks at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_accum.errors import ArgumentError
from lightning_accum.exact import exact_dtype
from lightning_accum.exact import tensor_of as as_tensor
from lightning_accum.ranks import Ranks
from lightning_accum.weighing.functions import FunctionOfMean, OfMean
from lightning_accum.weighing.terms import Denominator
from lightning_accum.weighing.weight import Contribution


class ClosedWindow(NamedTuple):
    """A window that has ended, over all ranks. ``on_window_end`` gets it after the optimizer step.

    Numbers may be tensors on a device, which are copied to the host only when they are read, as by ``float(window.loss)``.

    Attributes:
        loss: the loss of the full batch: the weighted mean, or the sum for a sum; nan if it had none.
        weight: the sum of the weights; 1 for a loss that is a sum.
        micro_batches: micro-batches with a loss.
        loader_batches: loader batches of each rank. This field and the next two are set after the step.
        gradient_norm: norm of the full batch's gradient before clipping, if the Trainer clips by norm; else None.
        has_stepped: the optimizer has changed the parameters. False if a GradScaler skipped the step, or ``training_step`` always
            returned None: ``trainer.global_step`` counts these, too, as in plain Lightning.
        left_out: micro-batches that were not finite, and are not counted above.
        slope: the derivative of the loss by its mean, if it is a function of a mean.
        is_flagged: a rank had raised its :attr:`Window.flag`.
        is_last: a rank had raised its :attr:`Window.is_last`.
        is_empty: no micro-batch had weight, or a loss of 0 without it, so there is no gradient.
        do_terms_disagree: the terms of the loss have denominators that are not proportional.
        do_factors_differ: a constant that the loss is multiplied or divided by differs between micro-batches.
        is_miscounted: the listed weights of loader batches differ from the sums over their micro-batches.
        has_doubts: a micro-batch was read in a way that the check has not seen.
    """

    loss: Tensor | float
    weight: Tensor | float
    micro_batches: int
    loader_batches: int = 0
    gradient_norm: Tensor | None = None
    has_stepped: bool = False
    left_out: int = 0
    slope: float = 1.0
    is_flagged: bool = False
    is_last: bool = False
    is_empty: bool = False
    do_terms_disagree: bool = False
    do_factors_differ: bool = False
    has_doubts: bool = False
    is_miscounted: bool = False

    @classmethod
    def alone(cls, loss: Denominator, weight: Denominator) -> ClosedWindow:
        """A window of one micro-batch, which is the full batch."""
        return cls(loss, weight, 1)

    @classmethod
    def empty(cls) -> ClosedWindow:
        """A window without weight."""
        return cls(math.nan, 0.0, 0, is_empty=True)


class Entry(NamedTuple):
    """One micro-batch of a window."""

    loss: Denominator  # the module's own
    added: Denominator  # the summand of the window's loss: the loss, the mean that it is a function of, or the shares of its terms
    contribution: Contribution  # its weight and other numbers

    @property
    def has_weight(self) -> bool:
        """Whether it may have weight; a weight on a device may still be 0."""
        return isinstance(self.contribution.weight, Tensor) or self.contribution.weight != 0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint; the weight of a sum is None."""
        own, of_mean = self.contribution, self.contribution.of_mean
        return {
            "loss": float(self.loss),
            "added": float(self.added),
            "weight": None if own.weight is None else float(own.weight),
            "others": [float(other) for other in own.others],
            "factors": float(own.factors),
            "function": None if of_mean is None else [of_mean.function.steps, float(of_mean.constant)],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Entry:
        """The micro-batch of a :meth:`state_dict`."""
        steps, constant = state["function"] or (None, 0.0)
        of_mean = None if steps is None else OfMean(FunctionOfMean(steps), state["added"], constant)
        return cls(state["loss"], state["added"], Contribution(state["weight"], tuple(state["others"]), state["factors"], of_mean))


class Totals(NamedTuple):
    """The numbers of a window, summed over its micro-batches and ranks. For a new number, add a field here and its value for a
    micro-batch in :func:`_summands`. A maximum takes an entry for each rank in :class:`ReducedTotals`, which has the ranks.
    """

    weight: float  # of n
    loss: float  # of l * n, or of l for losses that are sums
    negative: float  # weights below 0
    terms: float  # of d, the denominators of other terms and n times a number that stands for constant factors
    spread: float  # of d^2 / n, where n is 1 for a sum
    sums: float  # of micro-batches, those whose loss is a sum
    weighted: float  # those whose weight is not 0
    zeros: float  # those whose loss is 0; inf if another loss is finite
    micro_batches: float  # those with a loss
    left_out: float  # those that were not finite, and are in none of the above
    flagged: float  # ranks with Window.flag
    last: float  # with Window.is_last
    doubtful: float  # with Window.has_doubts
    functions: float  # whose losses are functions of a mean

    def closed(self, loss: Denominator = math.nan, weight: float = 0.0, **others: Any) -> ClosedWindow:
        """The closed window, empty if it had no weight; ``others`` are further fields."""
        window = ClosedWindow(loss, weight, int(self.micro_batches), left_out=int(self.left_out), is_empty=weight == 0, **others)
        return window._replace(is_flagged=self.flagged > 0, is_last=self.last > 0, has_doubts=self.doubtful > 0)

    def closed_without_weight(self) -> ClosedWindow:
        """The closed window, if ``"auto"`` has found no weight.

        Losses of 0 have a factor of 0: the optimizer steps with gradients of 0, as on the full batch. Other losses have a term that
        lacks its weight.
        """
        is_zero = 0 < self.zeros < math.inf
        closed = self.closed(0.0 if is_zero else math.nan, do_terms_disagree=self.zeros == math.inf)
        return closed._replace(is_empty=not is_zero)

    def check(self) -> None:
        """Refuse totals that do not add up to a full batch."""
        if self.weight == math.inf:
            raise ArgumentError(
                "A loss is infinite, and its weight is 0 or infinite: a micro-batch divides a nonzero sum by a count of 0. The "
                "window cannot equal its full batch without this micro-batch. Mask the sum as the count is masked, (loss * "
                "mask).sum() / mask.sum(); or divide by a count that is never 0."
            )
        if self.negative or not math.isfinite(self.weight):
            raise ArgumentError(
                f"Some weights of the window's {self.micro_batches:.0f} micro-batches are negative, infinite or NaN (their sum is "
                f"{self.weight:g}). A weight is the denominator of a mean loss; see the `weight` argument of GradientAccumulation."
            )
        if self.sums and self.weight:
            raise ArgumentError(
                f"In {self.sums:.0f} of the window's {self.micro_batches:.0f} micro-batches the loss is a sum, in the others a "
                "mean: the two cannot be combined. Return one kind of loss from training_step."
            )

    def do_terms_disagree(self, rounding: float) -> bool:
        """Whether d is not proportional to n, up to a relative error of ``rounding``; an error if the loss is a sum."""
        if not self.terms:
            return False
        # Cauchy-Schwarz: sum d^2/n >= (sum d)^2 / sum n, with equality only if all d are proportional to n
        disagree = self.spread * (self.sums or self.weight) / self.terms**2 - 1 > rounding
        if self.sums and disagree:
            raise ArgumentError(
                "The loss is a sum that is multiplied by another factor in each micro-batch of the window, such as 1 / count: sums "
                "are added up without a weight. Divide the sum by its count, which makes the count visible, or pass the weight. "
                "Anneal a factor by global_step, and not by batch_idx."
            )
        return disagree


class ReducedTotals:
    """The totals of a window, from their sum over the micro-batches of a rank to their sum over the ranks.

    Numbers that are all on the host stay there; else they are summed on their device, and the host does not wait for it.

    Args:
        entries: the micro-batches.
        ranks: the ranks of the window.
        counted: further numbers, of terms that are counted first.
        of_rank: the last fields of :class:`Totals`, by name.
    """

    def __init__(self, entries: Sequence[Entry], ranks: Ranks, counted: Sequence[Denominator], **of_rank: Denominator) -> None:
        self._numbers = _summed(entries, [*(of_rank[name] for name in Totals._fields[-len(of_rank) :]), *counted], ranks.device)
        self._reduction: dist.Work | None = None
        self._copy: torch.cuda.Event | None = None  # to the host
        if ranks.size > 1:
            if not isinstance(self._numbers, Tensor):
                self._numbers = tensor_of(self._numbers, ranks.device, exact_dtype(ranks.device))
            self._reduction = dist.all_reduce(self._numbers, group=ranks.group, async_op=True)
        elif isinstance(self._numbers, Tensor) and self._numbers.is_cuda:  # so its end does not wait for the backward
            stream = torch.cuda.current_stream(self._numbers.device)
            self._numbers, self._copy = self._numbers.to("cpu", non_blocking=True), stream.record_event()

    def read(self) -> tuple[Totals, list[float]]:
        """The totals and the further numbers, in one copy to the host."""
        if self._reduction is not None:
            self._reduction.wait()
        if self._copy is not None:
            self._copy.synchronize()
        numbers = self._numbers.tolist() if isinstance(self._numbers, Tensor) else self._numbers
        number = len(Totals._fields)
        return Totals(*numbers[:number]), numbers[number:]


_NUMBERS = {float, int, bool}


def _summed(entries: Sequence[Entry], others: Sequence[Denominator], device: torch.device) -> list[float] | Tensor:
    """The sums over the micro-batches of this rank, and other numbers."""
    contributions, others = [entry.contribution for entry in entries], [float(len(entries)), *others]
    is_read = bool(contributions) and contributions[0].is_read and all(c.weight is not None for c in contributions)
    rows: list[tuple[Any, ...]] = [
        (0.0 if c.weight is None else c.weight, float(c.weight is None), entry.added, c.factors, _of_other_terms(c), entry.loss)
        for entry, c in zip(entries, contributions, strict=True)
    ] or [(*(0.0,) * 5, math.nan)]
    if not _NUMBERS.issuperset(map(type, chain(*rows, others))):
        exact = partial(tensor_of, device=device, dtype=exact_dtype(device))
        summands = _summands(*map(exact, zip(*rows, strict=True)), is_read=is_read, where=torch.where)
        of_rows = torch.stack([own.to(summands[0].dtype) for own in summands]).sum(1)
        return torch.cat((of_rows, exact(others)))
    of_each = [_summands(*row, is_read=is_read, where=lambda condition, one, other: one if condition else other) for row in rows]
    return [*(float(sum(column)) for column in zip(*of_each, strict=True)), *others]  # type: ignore[list-item]


def _summands(
    n: Any, is_sum: Any, added: Any, factors: Any, others: Any, loss: Any, *, is_read: bool, where: Callable[..., Any]
) -> tuple[Any, ...]:
    """The first fields of :class:`Totals` of one micro-batch, as numbers, or of each, as tensors."""
    if is_read:
        n = where((n == 0) & (abs(added) == math.inf), math.inf, n)
    times = n + is_sum  # a sum has the factor 1
    is_nothing = times == 0
    d = times * factors + others
    spread = where(is_nothing, where(d == 0, 0.0, math.inf), d**2 / where(is_nothing, 1.0, times))
    zeros = where(abs(loss) < math.inf, where(loss == 0, 1.0, math.inf), 0.0)
    return n, where(is_nothing, 0.0, added * times), n < 0, d, spread, is_sum, n != 0, zeros


def _of_other_terms(contribution: Contribution) -> Denominator:
    """The denominators of a loss's other terms, with unequal factors, so that terms cannot cancel."""
    others = contribution.others
    return sum(((1.0 + index / len(others)) * denominator for index, denominator in enumerate(others)), 0.0)


def tensor_of(values: Sequence[Denominator], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers, some of which may be on the device, as one tensor there."""
    if values and all(isinstance(value, Tensor) for value in values):
        return torch.stack([value.detach() for value in values]).to(device, dtype)  # type: ignore[union-attr]
    if any(isinstance(value, Tensor) for value in values):
        return torch.stack([as_tensor(value, device, dtype).detach() for value in values])
    is_pinned = device.type == "cuda"  # then nobody waits for the device
    return torch.tensor(values, dtype=dtype, pin_memory=is_pinned).to(device, non_blocking=is_pinned)
