"""The check: on a few rows of the first batch, the losses of parts, weighed, must add up to that of the whole.

What the reader knows of a loss is a list of graph nodes, and right until somebody writes what is not on it. So what a window does
is tried out before the first step: the weight, the loss times the weight, and its gradient, of a few rows together and in parts.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_accum.dispatch import in_eager_mode
from lightning_accum.randomness import SameForEveryRow, dropout_switched_off
from lightning_accum.weighing.counts import SampleCount, TokenCount
from lightning_accum.weighing.denominator import UnreadableLossError
from lightning_accum.weighing.functions import FunctionOfMean
from lightning_accum.weighing.safeguards import freeze_batch_norm
from lightning_accum.weighing.shares import ShareWeight, candidates, together
from lightning_accum.weighing.term_nodes import scale_terms
from lightning_accum.weighing.weight import Contribution, Weigher

_T = TypeVar("_T")

MOST_ROWS = 8
_SAMPLED, _SAMPLED_OF_ALL = 2**14, 2**22
"""Elements of a gradient that are compared, spread over all of it; and of all gradients about."""
_SMALL = 1e-3
_OF_A_PARAMETER = 1e-2
"""A gradient smaller than this part of the whole one is compared with this part: what it is beside is rounding."""


class Restores(Protocol):
    """How everything was, see :class:`lightning_accum.splitting.snapshot.Snapshot`."""

    def restore(self) -> None:
        """Put everything back."""


class Backward(Protocol):
    """How an engine gives out gradients, see :class:`lightning_accum.sync.Sync`."""

    def gradients_of(self, loss: Tensor, share: float, parameters: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
        """The gradients of ``share`` times a loss, which are left nowhere."""

    def forget_forward(self) -> None:
        """There is no backward for what ran forward."""


class DoesNotAddUpError(ValueError):
    """The weighed losses of parts of a batch are not those of the batch."""


class CannotCheckError(Exception):
    """What keeps the check from an answer."""


class NoDenominatorError(CannotCheckError):
    """The graph of the loss shows none."""


class UnsuitableRowsError(CannotCheckError):
    """These rows show nothing; others may."""


class Rows(NamedTuple):
    """A few rows of a batch, together and in parts, each made anew when it is asked for: a step may take its batch apart."""

    whole: Callable[[], Any]
    parts: Sequence[Callable[[], Any]]
    sizes: Sequence[int]


@dataclass(frozen=True)
class Verdict:
    """What the check found.

    Attributes:
        deviation: how far the parts are from the whole, as part of its size; None where that could not be found out.
        tolerance: what rounding makes of it.
        seen: what deviates by that much, or why nothing could be found out.
        rows: the sizes of the parts.
        has_terms: the loss has terms that are divided by something else than the main one, and share its weight.
        is_suitable: False where these rows show nothing, and others may.
        looked_at: how many rows were looked at until now, of this batch and those before.
        loss: the largest that was seen in them.
        is_unread: the graph of the loss of all rows shows no denominator.
    """

    deviation: float | None
    tolerance: float = 0.0
    seen: str = ""
    rows: tuple[int, ...] = ()
    has_terms: bool = False
    is_suitable: bool = True
    looked_at: int = 0
    loss: float = 0.0
    is_unread: bool = False

    @classmethod
    def unknown(cls, reason: CannotCheckError) -> Verdict:
        """That of what could not be found out."""
        is_suitable, is_unread = not isinstance(reason, UnsuitableRowsError), isinstance(reason, NoDenominatorError)
        return cls(None, seen=str(reason), is_suitable=is_suitable, is_unread=is_unread)

    def after(self, before: Verdict | None) -> Verdict:
        """The worst of both, where rows of another batch were looked at before."""
        if before is None or before.deviation is None:
            return self
        worst = before if self.deviation is None or self.deviation < before.deviation else self
        return replace(worst, looked_at=self.looked_at + before.looked_at, loss=max(self.loss, before.loss))

    @property
    def may_try_again(self) -> bool:
        """Another batch may show more."""
        return not self.is_suitable if self.deviation is None else self.looked_at < MOST_ROWS

    @property
    def in_words(self) -> str:
        """What deviates, and by how much."""
        return self.seen if self.deviation == math.inf else f"{self.seen} is {self.deviation:.2g} of its size off"

    @property
    def adds_up(self) -> bool:
        """Nothing was seen that rounding does not explain."""
        return self.deviation is None or self.deviation <= self.tolerance

    def __str__(self) -> str:
        if self.deviation is None:
            return f"not checked: {self.seen}"
        words = "adds up to" if self.adds_up else "does not add up, by"
        rows = f" on {self.looked_at} rows" if self.looked_at < MOST_ROWS else ""
        return f"checked: {words} {self.deviation:.1g}{rows}"


class _Measured(NamedTuple):
    loss: float
    """Times its share: what the weight is of the whole one's."""
    weight: float | None
    """None for a sum, which is added as it is."""
    gradient: dict[int, Tensor]
    """Of that, by parameter: some of its elements, in double precision. Those without a gradient are missing."""
    counts: tuple[float, ...]
    """What the other terms were divided by, where each is weighed by itself."""
    has_terms: bool
    function: FunctionOfMean | None = None
    """What makes the loss of a mean. That of a part is the mean itself here, and its gradient is multiplied by the"""
    slope: float = 1.0
    """of the whole; and"""
    constant: float = 0.0
    """was added to it, times its share."""
    is_read: bool = True
    """The weight is known; that of the whole may be not, which no window needs."""


class _Excess(NamedTuple):
    """By how much the weights of parts come to more than that of the whole.

    Attributes:
        excess: that.
        others: how many parts have a weight, beside one.
        size: of their sum, or of the weight of the whole.
        smallest: of their weights.
        rows: the sizes of the parts.
    """

    excess: float
    others: int
    size: float
    smallest: float
    rows: tuple[int, ...]

    def deviation(self, constant: float) -> float:
        """How far it is from a constant that each part has."""
        return abs(self.excess - self.others * constant) / self.size


class Check:
    """Looks once whether the parts of a batch add up to it, and leaves everything as it was.

    Dropout is off and BatchNorm in evaluation mode, so that other breaks are seen beside them; random numbers are the same for
    every row; nothing is compiled. Random state, buffers, attributes, metrics and parameters are put back. Ranks take every step
    together, since they may wait for each other in it.

    Args:
        module: that is trained.
        training_step: runs it on a batch, and logs nothing. Returns what ``training_step`` returned.
        take_snapshot: keeps what it changes; see :class:`lightning_accum.splitting.snapshot.StateSnapshotter`.
        weight: how micro-batches are weighed.
        backward: of the engine that runs the module.
        weighs_terms: each term of a loss is weighed by itself.
        may_gather: a window is one batch of each rank, which a loss may gather from all.
        knows_rows: how many samples a micro-batch has is known where it is weighed.
        largest: of the numbers of all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        training_step: Callable[[Any], Any],
        take_snapshot: Callable[[], Restores],
        weight: Any,
        backward: Backward,
        weighs_terms: bool = False,
        may_gather: bool = False,
        knows_rows: bool = False,
        largest: Callable[[float], float] = lambda number: number,
    ) -> None:
        self._module = module
        self._training_step = training_step
        self._take_snapshot = take_snapshot
        self._weight = weight
        self._backward = backward
        self._weighs_terms = weighs_terms or isinstance(weight, tuple)
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._may_gather = may_gather
        self._knows_rows = knows_rows
        self._largest = largest
        self._snapshot: Restores | None = None
        self._mode = _CheckMode(module.parameters())
        self._has_drawn = False
        self.loss = 0.0
        """The largest so far. What is nothing beside it may be rounding."""
        self.constant: float | None = None
        """What weights have in them beside what adds up, as in ``sum / (count + 1e-8)``; None before parts have shown it."""
        self._excesses: list[_Excess] = []
        self._eps_of_weights = torch.finfo(torch.float64).eps
        self.takes_functions = True
        """See :class:`~lightning_accum.weighing.weight.Weigher`: False where only so the parts were found to add up."""
        self.shares: ShareWeight | None = None
        """As there: not None where only so the parts were found to add up. Other batches may show it more."""

    def __call__(self, batches: Sequence[Rows], may_leave_functions: bool = True, may_measure: bool = False) -> Verdict:
        """Look at some rows. Called on all ranks, with equally many parts.

        Args:
            batches: some rows, in several ways. A way that a module cannot take, such as a part of one row, is passed over.
            may_leave_functions: whether :attr:`takes_functions` is still to be found out.
            may_measure: where parts do not add up by the weight that is read, or none is, try to measure it.

        Returns:
            The worst that was found on this rank.
        """
        if (shares := self.shares) is not None:
            shares.is_tried = True
        verdict = self._worst(batches)
        if shares is not None:
            shares.is_tried, shares.has_seen_empty = False, self._largest(float(shares.has_seen_empty)) > 0
        if may_leave_functions and callable(self._weight) and not self._do_all_add_up(verdict):
            constant, self.constant, self.takes_functions = self.constant, None, False
            as_it_is = self._worst(batches)
            if self._do_all_add_up(as_it_is):
                return as_it_is
            self.constant, self.takes_functions = constant, True
        if self._weight == "auto" and may_measure and self._largest(float(verdict.is_unread or not verdict.adds_up)):
            return self._measured_by_shares(batches) or verdict
        return verdict

    def _measured_by_shares(self, batches: Sequence[Rows]) -> Verdict | None:
        """Find out whether a measured weight adds up; None where none does."""
        found: list[tuple[ShareWeight, Verdict]] = []
        constant, self.constant = self.constant, 0.0  # what is measured adds up as it is
        for self.shares in candidates():
            verdict = self._worst(batches)
            if self._do_all_add_up(verdict):
                found.append((self.shares, verdict))
        self.shares = None
        if not found:
            self.constant = constant
            return None
        has_seen_empty = self._largest(float(any(shares.has_seen_empty for shares, _ in found))) > 0
        self.shares = together([shares for shares, _ in found], has_seen_empty)
        return max((verdict for _, verdict in found), key=lambda verdict: verdict.deviation or 0.0)

    def _do_all_add_up(self, verdict: Verdict) -> bool:
        return self._largest(float(verdict.deviation is None or not verdict.adds_up)) == 0

    def _worst(self, batches: Sequence[Rows]) -> Verdict:
        with self._held():
            found = [self._look(rows, self._weight) for rows in batches]
            if self.shares is not None and (unread := [verdict for verdict in found if verdict.is_unread]):
                return unread[0]  # what is measured is so in every part
            return self._worst_of(found)

    def _worst_of(self, found: Sequence[Verdict]) -> Verdict:
        seen = [verdict for verdict in found if verdict.deviation is not None]
        if self.constant is None and self._largest(float(bool(self._excesses))):
            self.constant = self._learn_constant()
        of_weights = max(((one.deviation(self.constant or 0.0), one.rows) for one in self._excesses), default=(0.0, ()))
        self._excesses.clear()
        if not seen:
            return found[0]
        worst = max(seen, key=lambda verdict: verdict.deviation or 0.0)
        if of_weights[0] <= (worst.deviation or 0.0):
            return worst
        return replace(worst, deviation=of_weights[0], seen="the weight", rows=of_weights[1])

    def weight_that_adds_up(self, batches: Sequence[Rows]) -> str | None:
        """An argument ``weight`` with which the parts add up, in words; None where none of the usual ones does."""
        candidates: dict[str, Any] = {
            'weight="auto"': "auto",
            "weight=SampleCount()": SampleCount(),
            "weight=TokenCount()": TokenCount(),
            "weight=TokenCount(shift=False)": TokenCount(shift=False),
        }
        with self._held():
            for words, weight in candidates.items():
                self.constant = None
                found = [self._look(rows, weight) for rows in batches]
                fits = self._worst_of(found).adds_up and found[0].deviation is not None
                if weight != self._weight and not self._largest(float(not fits)):
                    return words
        return None

    @property
    def tolerance(self) -> float:
        """What rounding makes of a number, in the coarsest type that anything was computed in so far."""
        return float(self._mode.eps**0.6)

    def losses_of(self, batches: Sequence[Callable[[], Any]]) -> list[float]:
        """The losses of some batches, each run as if it were the first. Called on all ranks, with equally many.

        Raises:
            CannotCheckError: one has none. On all ranks.
        """
        with self._held():
            return [self._together(partial(self._loss_of, batch)) for batch in batches]

    def changed_buffers(self, batch: Callable[[], Any]) -> dict[str, float]:
        """The buffers that a step changes and its loss depends on. Called on all ranks.

        Returns:
            How far the loss of the same rows is from what it was, as part of its size, where only that buffer has changed.

        Raises:
            CannotCheckError: the batch has no loss, or another one each time. On all ranks.
        """

        def loss(changed: Mapping[str, Tensor]) -> float:
            self._restore()
            buffers = dict(self._module.named_buffers())
            for name, value in changed.items():
                buffers[name].data.copy_(value)
            loss = self._step(batch())
            self._gradients(loss, 0.0)  # sharded modules have a backward for each forward
            return float(loss.detach())

        found: dict[str, float] = {}
        with self._held():
            before = self._together(partial(loss, {}))
            after = {name: buffer.detach().clone() for name, buffer in self._module.named_buffers()}
            self._restore()
            restored = {name: buffer for name, buffer in self._module.named_buffers() if name in after}
            changed = [name for name, old in restored.items() if old.shape == after[name].shape and not old.equal(after[name])]
            number = min(int(self._largest(len(changed))), MOST_ROWS)
            again = self._together(partial(loss, {})) if number else before
            if self._largest(abs(again - before)) > 0:
                raise CannotCheckError("training_step gives the same rows another loss each time")
            for index in range(number):  # as many steps on every rank
                names = changed[index : index + 1]
                now = self._together(partial(loss, {name: after[name] for name in names}))
                difference = abs(now - before) / (max(abs(now), abs(before)) or 1.0)
                if names and difference > self.tolerance:
                    found[names[0]] = difference
        return found

    def _loss_of(self, batch: Callable[[], Any]) -> float:
        self._restore()
        return float(self._step(batch()).detach())

    def _restore(self) -> None:
        """Have the next step begin as the first did."""
        assert self._snapshot is not None
        self._snapshot.restore()
        self._mode.restore()
        self._mode.restart()

    def _step(self, batch: Any) -> Tensor:
        with self._mode:
            output = self._training_step(batch)
        loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
        if loss is None:
            raise UnsuitableRowsError("training_step returns None for some of the first rows")
        return loss

    # --- one comparison ---------------------------------------------------------------------------------------------

    def _look(self, rows: Rows, weight: Any) -> Verdict:
        """Compare some rows with their parts."""
        is_known = self._knows_rows and bool(rows.sizes)
        total = sum(rows.sizes) if is_known else None
        sizes: Sequence[int | None] = rows.sizes if is_known else [None] * len(rows.parts)
        try:
            whole = self._measure(rows.whole, weight, rows=total)
            parts = [self._measure(part, weight, whole, size) for part, size in zip(rows.parts, sizes, strict=True)]
            if abs(whole.loss) < self.tolerance * self.loss:
                raise UnsuitableRowsError("the loss of the first rows is 0 but for rounding")
            deviation, seen = max(_deviation(whole, parts), (self._compare_weights(whole, parts, tuple(rows.sizes)), "the weight"))
            self.loss = max(self.loss, abs(whole.loss))
            has_terms = any(one.has_terms for one in (whole, *parts)) and not whole.counts
            verdict = Verdict(deviation, self.tolerance, seen, tuple(rows.sizes), has_terms, is_unread=not whole.is_read)
        except CannotCheckError as reason:
            verdict = Verdict.unknown(reason)
        if self._largest(float(not verdict.adds_up)) == 0:
            return verdict
        try:
            again = self._measure(rows.whole, weight, rows=total)
            if not verdict.adds_up:
                if self._may_gather and self._mode.has_waited:
                    raise CannotCheckError("training_step gathers from other ranks")
                if self._has_drawn:
                    raise CannotCheckError("training_step draws random numbers that are others for each batch")
                if _deviation(whole, [again])[0] > verdict.tolerance:
                    raise CannotCheckError("training_step gives the same rows another loss each time")
        except CannotCheckError as reason:
            verdict = Verdict.unknown(reason)
        return verdict

    def _learn_constant(self) -> float:
        """What weights have in them beside what adds up, by all that was seen on all ranks; 0 where it is not the same in all.

        One that is small beside the weight is learned from any two parts. A larger one, of at most 1, only from numbers of parts
        that differ, and where something is counted beside it in each part: else it may be what goes with the rows in another way,
        such as a root of their number, or the largest of some.
        """
        least, most = self._span([seen.excess / seen.others for seen in self._excesses])
        fewest, largest = self._span([float(seen.others) for seen in self._excesses])
        smallest, _ = self._span([seen.smallest for seen in self._excesses])
        _, share = self._span([abs(seen.excess) / seen.size for seen in self._excesses])
        _, rounding = self._span([self.tolerance * seen.size for seen in self._excesses])
        is_proven = (fewest != largest and abs(most) <= 1 and most < smallest) or share <= _SMALL
        is_seen = share > 64 * self._largest(self._eps_of_weights)
        return most if is_seen and is_proven and most - least <= rounding else 0.0

    def _span(self, numbers: Sequence[float]) -> tuple[float, float]:
        """The smallest and the largest, over all ranks."""
        return -self._largest(-min(numbers, default=math.inf)), self._largest(max(numbers, default=-math.inf))

    def _compare_weights(self, whole: _Measured, parts: Sequence[_Measured], rows: tuple[int, ...]) -> float:
        """How far what other terms were divided by is from that of the whole. What weights are off is collected."""
        if whole.counts:
            of_terms = zip(*((part.weight or 0.0, *part.counts) for part in parts), strict=False)
            totals = (whole.weight or 0.0, *whole.counts)
            return max(_relative(of_parts, total) for of_parts, total in zip(of_terms, totals, strict=False))
        weights = [part.weight for part in parts if part.weight]
        if whole.is_read and whole.weight and len(weights) > 1:
            total = sum(weights)
            self._excesses.append(_Excess(total - whole.weight, len(weights) - 1, max(total, whole.weight), min(weights), rows))
        return 0.0

    def _measure(self, batch: Callable[[], Any], weight: Any, whole: _Measured | None = None, rows: int | None = None) -> _Measured:
        """What a batch of so many rows contributes: all that is to be compared is in parts of ``whole``, where there is one."""
        self._restore()
        drawn_before = _random_state()
        weigher = Weigher(weight, lambda message: None, hands_out_terms=self._weighs_terms and weight == "auto")
        weigher.takes_functions, weigher.shares = self.takes_functions, self.shares
        try:
            try:
                loss, read = self._together(lambda: self._run(batch(), weigher, rows, is_part=whole is not None))
            except CannotCheckError:
                self._backward.forget_forward()
                raise
            contribution = Contribution(1.0) if read is None else read
            n = None if contribution.weight is None else float(contribution.weight)
            if isinstance(contribution.weight, Tensor) and contribution.weight.is_floating_point():
                self._eps_of_weights = max(self._eps_of_weights, torch.finfo(contribution.weight.dtype).eps)
            nodes = weigher.take_terms()
            counts = tuple(float(count) for count in contribution.others) if nodes else ()
            share = 1.0
            if whole is not None and counts and whole.counts:
                totals = zip((n or 0.0, *counts), (whole.weight, *whole.counts), strict=True)
                scale_terms(nodes, [count / total if total else 0.0 for count, total in totals])
            elif whole is not None and n is not None and whole.weight is not None:
                share = n / whole.weight if whole.weight else 0.0
            of_mean, slope = contribution.of_mean, 1.0
            if whole is None and of_mean is not None:
                _, slope = of_mean.function.at(float(of_mean.mean))
            elif whole is not None and of_mean is not None:
                weigher.leave_out_function(loss)
                slope = whole.slope
            gradient = self._together(lambda: self._gradients(loss, share if whole is None else share * slope))
        finally:
            self._has_drawn |= drawn_before != _random_state()
        has_terms = bool(weigher.unweighed_terms) or any(float(other) != n for other in contribution.others)
        measured = _Measured(
            share * float(loss.detach()) if share else 0.0, n, gradient, counts, has_terms, is_read=read is not None
        )
        if of_mean is None:
            return measured
        value = measured.loss if whole is None else share * float(of_mean.mean) if share else 0.0
        constant = share * float(of_mean.constant) if share else 0.0
        return measured._replace(loss=value, function=of_mean.function, slope=slope, constant=constant)

    def _run(self, batch: Any, weigher: Weigher, rows: int | None, is_part: bool) -> tuple[Tensor, Contribution | None]:
        loss = self._step(batch)
        if not loss.requires_grad:
            raise CannotCheckError("the loss of the first rows needs no gradient")
        try:
            contribution = weigher(loss, batch, rows)
        except UnreadableLossError:
            if is_part or self.shares is not None:
                raise
            return loss, None
        is_empty = contribution.weight is not None and float(contribution.weight) == 0 and not contribution.others
        if not is_empty and not math.isfinite(float(loss.detach())):
            raise UnsuitableRowsError("the loss of the first rows is not finite")
        return loss, contribution

    def _gradients(self, loss: Tensor, share: float) -> dict[int, Tensor]:
        if not self._trained:
            return {}
        try:
            with self._mode:
                gradients = self._backward.gradients_of(loss, share, self._trained)
        except RuntimeError as error:
            if "checkpoint" not in str(error).lower():
                raise
            self._trained = []  # reentrant checkpointing has no way to it; losses and weights are compared all the same
            return {}
        most = min(_SAMPLED, max(64, _SAMPLED_OF_ALL // len(self._trained)))
        return {index: _sample(gradient, most) for index, gradient in enumerate(gradients) if gradient is not None and share}

    def _together(self, function: Callable[[], _T]) -> _T:
        """Call a function on all ranks: where it fails on one, it has failed on all."""
        problem: CannotCheckError | None = None
        result: _T | None = None
        try:
            result = function()
        except CannotCheckError as error:
            problem = error
        except UnreadableLossError:
            problem = NoDenominatorError("the graph of the loss shows no denominator")  # the first micro-batch says more
        except Exception as error:
            problem = CannotCheckError(f"training_step raises {type(error).__name__} on a few rows of the batch: {error}")
        if self._largest(float(problem is not None)):
            raise problem or CannotCheckError("another rank cannot run a few rows of its batch")
        return cast("_T", result)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """In here the module is as the check wants it; after it as it was."""
        with ExitStack() as stack:
            stack.enter_context(dropout_switched_off(self._module))
            outer = self._take_snapshot()
            stack.callback(outer.restore)
            stack.callback(self._mode.restore)
            freeze_batch_norm(self._module)
            self._snapshot = self._take_snapshot()
            stack.enter_context(in_eager_mode())
            yield
        self._snapshot = None


def parts_of(rows: int, size: int | None) -> list[int]:
    """The sizes of the parts that a batch of so many rows is looked at in: unequal ones, one of a single row among them.

    Args:
        rows: of the batch.
        size: of a micro-batch, which has memory, and so have 4 rows (2 where a micro-batch is one); None for all of them.

    Example:
        >>> parts_of(64, None), parts_of(64, 6), parts_of(64, 2), parts_of(64, 1), parts_of(2, None)
        ([1, 2, 5], [1, 2, 3], [1, 2, 1], [1, 1], [1, 1])
    """
    looked_at = min(rows, MOST_ROWS, rows if size is None else 2 if size == 1 else max(4, size))
    if looked_at < 4:
        return [1, looked_at - 1]
    return [1, 2, looked_at - 3]


def _deviation(whole: _Measured, parts: Sequence[_Measured]) -> tuple[float, str]:
    """How far the parts are from the whole, and what is farthest."""
    if whole.weight == 0 and not whole.counts:
        raise UnsuitableRowsError("the first rows have no weight")
    if not whole.counts:
        parts = [part for part in parts if part.weight != 0]
    if len({part.weight is None for part in ((whole, *parts) if whole.is_read else parts)}) > 1:
        return math.inf, "the loss is a sum in some parts, and a mean in others"
    if len({part.function for part in (whole, *parts)}) > 1:
        return math.inf, "the loss is a function of a mean in some parts, and another or none in all of them together"
    weights = [part.weight or 0.0 for part in parts]
    scale = 1.0 if whole.is_read else 1 / (sum(weights) or 1.0)
    losses = [scale * part.loss for part in parts]
    if whole.function is not None:
        value, slope = whole.function.at(mean := sum(losses))
        value += sum(part.constant for part in parts) / (len(parts) if whole.weight is None else 1)
        losses = [value - slope * mean, slope * mean]
    found = [(_deviation_of_gradients(whole, parts, scale), "the gradient")]
    if not whole.counts:  # else each term has its own share, and in its gradient only
        found.append((_relative(losses, whole.loss), "the loss"))
    return max(found, key=lambda pair: pair[0])


def _relative(parts: Sequence[float], whole: float) -> float:
    size = max(abs(whole), sum(map(abs, parts)))
    return abs(sum(parts) - whole) / size if size else 0.0


def _deviation_of_gradients(whole: _Measured, parts: Sequence[_Measured], scale: float) -> float:
    differences: list[tuple[float, float]] = []
    for index in sorted({index for measured in (whole, *parts) for index in measured.gradient}):
        given = [scale * part.gradient[index] for part in parts if index in part.gradient]
        expected = whole.gradient.get(index)
        difference = sum(given) - (0 if expected is None else expected)
        size = max(0.0 if expected is None else float(expected.norm()), sum(float(gradient.norm()) for gradient in given))
        differences.append((float(torch.as_tensor(difference).norm()), size))
    if not all(math.isfinite(difference) for difference, _ in differences):
        return 0.0  # of a finite loss, as that of a distance of 0: only losses and weights can be compared
    overall = math.sqrt(sum(size**2 for _, size in differences))
    return max((difference / max(size, _OF_A_PARAMETER * overall) for difference, size in differences if difference), default=0.0)


def _sample(gradient: Tensor, most: int) -> Tensor:
    gradient = gradient.detach()
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()  # each rank compares its part
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    flat = gradient.reshape(-1)
    if flat.numel() > most:
        flat = flat[:: flat.numel() // most | 1]  # odd, so that it meets more than one column of a matrix
    return flat.cpu().double()


def _random_state() -> tuple[Any, ...]:
    """The state of the global random generators, to compare."""
    state: list[Any] = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *others = numpy.random.get_state()
        state += [name, keys.tobytes(), *others]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state.append(torch.cuda.get_rng_state().numpy().tobytes())
    return tuple(state)


class _CheckMode(SameForEveryRow):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """Random numbers are the same for every row, and parameters are copied before something is written into them.

    Args:
        parameters: of the module. A momentum encoder writes into its own, also through ``.data``, which counts no changes.

    Attributes:
        eps: of the coarsest type that anything was computed in.
        has_waited: something was sent to other ranks.
    """

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__()
        self._parameters: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.device.type != "meta":
                self._parameters.setdefault(_storage_of(parameter), []).append(parameter)
        self._written: list[tuple[Tensor, Tensor]] = []
        self.eps = torch.finfo(torch.float64).eps
        self.has_waited = False

    def restore(self) -> None:
        """Put back what was written into."""
        with torch.no_grad():
            for parameter, value in self._written:
                parameter.data.copy_(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_waited |= "c10d" in func.namespace
        if func._schema.is_mutable:
            self._keep_written(func._schema.arguments, args, kwargs or {})
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
                device_eps = 2**-10 if tensor.is_cuda and tensor.dtype == torch.float32 else 0.0  # TF32
                self.eps = max(self.eps, torch.finfo(tensor.dtype).eps, device_eps)
        return result

    def _keep_written(self, arguments: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for place, argument in enumerate(arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                    for parameter in self._parameters.pop(_storage_of(tensor), ()):
                        self._written.append((parameter, parameter.detach().clone()))


def _storage_of(tensor: Tensor) -> int:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.untyped_storage().data_ptr()
