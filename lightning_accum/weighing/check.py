"""The check: on a few rows of the first batch, the losses of parts, weighed, must add up to that of the whole.

What the reader knows of a loss is a list of graph nodes, and right until somebody writes what is not on it. So what a window does
is tried out before the first step: the weight, the loss times the weight, and its gradient, of a few rows together and in parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_accum.errors import UnreadableLossError
from lightning_accum.exact import rounding_of_gradients
from lightning_accum.weighing.constant import Excesses
from lightning_accum.weighing.contribution import COUNTS_NOTHING, Contribution, Kind, Way
from lightning_accum.weighing.counts import SampleCount, TokenCount
from lightning_accum.weighing.measured import OF_GRADIENT, Measured, deviations, has_fixed_counts, has_raised_count, relative
from lightning_accum.weighing.shares import ShareWeight, candidates, together
from lightning_accum.weighing.term_nodes import Proportion, scale_terms
from lightning_accum.weighing.trial import Trial
from lightning_accum.weighing.verdict import MOST_ROWS, CannotCheckError, Rows, UnsuitableRowsError, Verdict
from lightning_accum.weighing.weight import Weigher

Earlier: TypeAlias = "tuple[Callable[[], Any], float | None]"
"""A micro-batch and its weight, None for a sum."""


class Check:
    """Looks whether the parts of a batch add up to it.

    Args:
        trial: runs the module.
        weight: how micro-batches are weighed.
        weighs_terms: each term of a loss is weighed by itself.
        may_gather: a window is one batch of each rank, which a loss may gather from all.
        knows_rows: how many samples a micro-batch has is known where it is weighed.
    """

    def __init__(
        self, trial: Trial, weight: Any, weighs_terms: bool = False, may_gather: bool = False, knows_rows: bool = False
    ) -> None:
        self._trial = trial
        self._largest = trial.largest
        self._weight = weight
        self._weighs_terms = weighs_terms or isinstance(weight, tuple)
        self._may_gather = may_gather
        self._knows_rows = knows_rows
        self._has_drawn = False
        self.loss = 0.0
        """The largest so far. What is nothing beside it may be rounding."""
        self.constant: float | None = None
        """What weights have in them beside what adds up, as in ``sum / (count + 1e-8)``; None before parts have shown it."""
        self._excesses = Excesses(trial.largest)
        self.takes_functions = True
        """See :class:`~lightning_accum.weighing.weight.Weigher`: False where only so the parts were found to add up."""
        self.proportion = Proportion("", lambda message: None, looks=math.inf)
        """Of an explicit weight and what the graph shows. Where there is none, and parts add up, the graph shows something else."""
        self.shares: ShareWeight | None = None
        """As there: not None where only so the parts were found to add up. Other batches may show it more."""
        self._counts: set[tuple[float, ...]] = set()
        self.ways: set[Way] = set()
        """How weights were read."""
        self.kinds: set[Kind] = set()
        """What they counted."""
        self.asks_for_counts = False
        """Whether parts in which there is nothing to count are to add up, too. Else later micro-batches like them are looked at."""
        self.is_begun = False
        """Earlier batches were found to add up, and later micro-batches that may have nothing to count are looked at."""
        self._passes_over_counts = self._has_seen_no_count = False

    def __call__(
        self, batches: Sequence[Rows], may_leave_functions: bool = True, earlier: Sequence[Earlier] | None = None
    ) -> Verdict:
        """Look at some rows. Called on all ranks, with equally many parts.

        Args:
            batches: some rows, in several ways. A way that a module cannot take, such as a part of one row, is passed over.
            may_leave_functions: whether :attr:`takes_functions` is still to be found out.
            earlier: what is in the window so far. Where parts do not add up by the weight that is read, or none is, it is measured,
                if that gives these the weights that they have; None where it cannot be.

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
        is_measured = self._weight == "auto" and earlier is not None and self.shares is None
        if is_measured and self._largest(float(verdict.is_unread or not verdict.adds_up)):
            measured = self._measured_by_shares(batches, earlier or ())
            if measured is not None:
                return measured
        if self._largest(float(self._has_seen_no_count and not verdict.adds_up)) and not self.asks_for_counts:
            return self._where_something_is_counted(batches) or verdict
        return verdict

    def _where_something_is_counted(self, batches: Sequence[Rows]) -> Verdict | None:
        """Pass over parts in which there is nothing to count, and the count is 1: what the others say; None if they do not add up.

        Rows may have no others, once it is known that those of earlier batches add up.
        """
        constant, self.constant, self._passes_over_counts = self.constant, None, True
        verdict = self._worst(batches, is_one_of_several=True)
        self._passes_over_counts = False
        is_known = self.is_begun or verdict.deviation is not None
        if self.constant is None:
            self.constant = constant
        if self._largest(float(not (is_known and verdict.adds_up))) == 0:
            return verdict
        self.constant = constant
        return None

    @property
    def fixed_counts(self) -> tuple[float, ...]:
        """See :class:`~lightning_accum.weighing.weight.Weigher`: the only ones that were seen."""
        return next(iter(self._counts)) if len(self._counts) == 1 else ()

    def _measured_by_shares(self, batches: Sequence[Rows], earlier: Sequence[Earlier]) -> Verdict | None:
        """Find out whether a measured weight adds up; None where none does."""
        found: list[tuple[ShareWeight, Verdict]] = []
        constant, self.constant = self.constant, 0.0  # what is measured adds up as it is
        for self.shares in candidates():
            verdict = self._worst(batches, is_one_of_several=True)
            if self._do_all_add_up(verdict) and self._are_weights_of(earlier):
                found.append((self.shares, verdict))
        self.shares = None
        if not found:
            self.constant = constant
            return None
        has_seen_empty = self._largest(float(any(shares.has_seen_empty for shares, _ in found))) > 0
        self.shares = together([shares for shares, _ in found], has_seen_empty)
        return Verdict.worst(verdict for _, verdict in found)

    def _are_weights_of(self, earlier: Sequence[Earlier]) -> bool:
        """Whether the micro-batches of the window so far have the weights that they would have now, on all ranks."""
        is_other = False
        try:
            with self._trial.held():
                for batch, weight in earlier:
                    now = self._measure(batch, self._weight).weight
                    is_same = now is weight is None
                    if now is not None and weight is not None:
                        is_same = relative([now], weight) <= self._trial.tolerance
                    is_other |= not is_same
        except CannotCheckError:  # on all ranks
            return False
        return self._largest(float(is_other)) == 0

    def _do_all_add_up(self, verdict: Verdict) -> bool:
        """Whether they do on all ranks but those whose rows show nothing."""
        is_open = verdict.deviation is None
        return self._largest(2.0 if (is_open and verdict.is_suitable) or not verdict.adds_up else float(not is_open)) == 1

    def _worst(self, batches: Sequence[Rows], is_one_of_several: bool = False) -> Verdict:
        with self._trial.held():
            found = self._found(batches, self._weight, is_one_of_several)
            if self.shares is not None and (unread := [verdict for verdict in found if verdict.is_unread]):
                return unread[0]  # what is measured is so in every part
            return self._worst_of(found)

    def _worst_of(self, found: Sequence[Verdict]) -> Verdict:
        seen = [verdict for verdict in found if verdict.deviation is not None]
        if self.constant is None:
            self.constant = self._excesses.constant(self._trial.tolerance)
        excess, rows = self._excesses.worst(self.constant or 0.0)
        self._excesses.clear()
        if not seen:
            return found[0]
        worst = replace(Verdict.worst(seen), is_unread=any(verdict.is_unread for verdict in found))
        of_weights = replace(worst, deviation=excess, tolerance=self._trial.tolerance, seen="the weight", rows=rows)
        return Verdict.worst([worst, of_weights])

    def weight_that_adds_up(self, batches: Sequence[Rows]) -> str | None:
        """An argument ``weight`` with which the parts add up, in words; None where none of the usual ones does."""
        candidates: dict[str, Any] = {
            'weight="auto"': "auto",
            "weight=SampleCount()": SampleCount(),
            "weight=TokenCount()": TokenCount(),
            "weight=TokenCount(shift=False)": TokenCount(shift=False),
        }
        with suppress(CannotCheckError), self._trial.held():
            for words, weight in candidates.items():
                self.constant = None
                found = self._found(batches, weight, is_one_of_several=True)
                fits = self._worst_of(found).adds_up and found[0].deviation is not None
                if weight != self._weight and not self._largest(float(not fits)):
                    return words
        return None

    def _found(self, batches: Sequence[Rows], weight: Any, is_one_of_several: bool) -> list[Verdict]:
        """In each way of looking; where other weights are tried too, up to the first in which parts do not add up on some rank."""
        found: list[Verdict] = []
        for rows in batches:
            found.append(self._look(rows, weight))
            if is_one_of_several and self._largest(float(not found[-1].adds_up)):
                break
        return found

    def _look(self, rows: Rows, weight: Any) -> Verdict:
        """Compare some rows with their parts."""
        total = sum(rows.sizes) if self._knows_rows and rows.sizes else None
        drawn_for = sum(rows.sizes) if rows.are_counted else 0
        try:
            whole, parts = self._measure_all(rows, weight, total, drawn_for)
            if self._largest(float(self._trial.draws_unlike_numbers)):  # not for each row: then all rows draw the same
                drawn_for = 0
                whole, parts = self._measure_all(rows, weight, total, drawn_for)
            if abs(whole.loss) < self._trial.tolerance * self.loss:
                raise UnsuitableRowsError("the loss of the first rows is 0 but for rounding")
            has_no_count = has_raised_count(whole, parts)
            self._has_seen_no_count |= has_no_count
            if self._passes_over_counts and has_no_count:
                raise UnsuitableRowsError("in a part of the first rows there is nothing to count, and its count is 1")
            found = [*deviations(whole, parts), (self._compare_weights(whole, parts, tuple(rows.sizes)), "the weight")]
            self.loss = max(self.loss, abs(whole.loss))
            has_terms = any(one.has_terms for one in (whole, *parts)) and not whole.counts
            self._counts.add(whole.others if has_fixed_counts(whole, parts, rows.sizes) else ())
            verdict = Verdict.worst(
                Verdict(distance, self._tolerance(seen), seen, tuple(rows.sizes), has_terms, is_unread=not whole.is_read)
                for distance, seen in found
            )
        except CannotCheckError as reason:
            verdict = Verdict.unknown(reason)
        if self._largest(float(not verdict.adds_up)) == 0:
            return verdict
        try:
            # as a part that has all rows, where the parts have the mean that the whole has a function of
            place = (0, drawn_for, drawn_for) if drawn_for else None
            again = self._measure(rows.whole, weight, None if whole.function is None else whole, total, place)
            if not verdict.adds_up:
                if self._may_gather and self._trial.has_waited:
                    raise CannotCheckError("training_step gathers from other ranks")
                if self._has_drawn:
                    raise CannotCheckError("training_step draws random numbers that are others for each batch")
                if max(deviations(whole, [again]))[0] > verdict.tolerance:
                    raise CannotCheckError("training_step gives the same rows another loss each time")
        except CannotCheckError as reason:
            verdict = Verdict.unknown(reason)
        return verdict

    def _measure_all(self, rows: Rows, weight: Any, total: int | None, drawn_for: int) -> tuple[Measured, list[Measured]]:
        """The whole and its parts; ``drawn_for`` is how many rows random numbers belong to, 0 where all rows have the same."""
        whole = self._measure(rows.whole, weight, rows=total, place=(0, drawn_for, drawn_for) if drawn_for else None)
        starts = accumulate((0, *rows.sizes))
        return whole, [
            self._measure(part, weight, whole, total and number, (start, number, drawn_for) if drawn_for else None)
            for part, number, start in zip_longest(rows.parts, rows.sizes, starts)
            if part is not None
        ]

    def _tolerance(self, seen: str) -> float:
        return rounding_of_gradients(self._trial.eps) if seen == OF_GRADIENT else self._trial.tolerance

    def _compare_weights(self, whole: Measured, parts: Sequence[Measured], rows: tuple[int, ...]) -> float:
        """How far what other terms were divided by is from that of the whole. What weights are off is collected."""
        if whole.counts:
            of_terms = zip(*((part.weight or 0.0, *part.counts) for part in parts), strict=False)
            totals = (whole.weight or 0.0, *whole.counts)
            return max(relative(of_parts, total) for of_parts, total in zip(of_terms, totals, strict=False))
        if whole.is_read and whole.weight:
            self._excesses.add(whole.weight, [part.weight for part in parts if part.weight], rows)
        return 0.0

    def _measure(
        self,
        batch: Callable[[], Any],
        weight: Any,
        whole: Measured | None = None,
        rows: int | None = None,
        place: tuple[int, int, int] | None = None,
    ) -> Measured:
        """What a batch of so many rows contributes: all that is to be compared is in parts of ``whole``, where there is one.

        ``place`` says which rows they are, see :meth:`NoiseOfRows.restart`.
        """
        self._trial.restore(place)
        before = self._trial.random_state()
        weigher = Weigher(weight, lambda message: None, hands_out_terms=self._weighs_terms and weight == "auto")
        weigher.takes_functions, weigher.shares, weigher.proportion = self.takes_functions, self.shares, self.proportion
        try:
            try:
                loss, read = self._trial.together(lambda: self._run(batch(), weigher, rows, is_part=whole is not None))
            except CannotCheckError:
                self._trial.backward.forget_forward()
                raise
            contribution = Contribution(1.0) if read is None else read
            n = None if contribution.weight is None else float(contribution.weight)
            if isinstance(contribution.weight, Tensor) and contribution.weight.is_floating_point():
                self._excesses.eps = max(self._excesses.eps, torch.finfo(contribution.weight.dtype).eps)
            if n != 0:
                self.ways |= contribution.ways
                if contribution.kind is not None:
                    self.kinds.add(contribution.kind)
            nodes = weigher.take_terms()
            counts = tuple(float(count) for count in contribution.others) if nodes else ()
            share = 1.0
            if whole is not None and counts and len(counts) == len(whole.counts):  # else they share one weight, as in a window
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
            share_of_loss, scale = (share, 1.0) if whole is None else (share * slope, 1.0 if n is None else float(MOST_ROWS))
            gradient = self._trial.together(lambda: self._trial.gradients(loss, share_of_loss, scale))
        finally:
            self._has_drawn |= before.torch_has_drawn() or before.others_have_drawn()
        has_terms = bool(weigher.unweighed_terms) or any(float(other) != n for other in contribution.others)
        value = share * float(loss.detach()) if share else 0.0
        may_count_nothing = COUNTS_NOTHING in contribution.ways
        measured = Measured(value, n, gradient, counts, has_terms, is_read=read is not None, may_count_nothing=may_count_nothing)
        if not nodes:
            is_of_samples = contribution.kind is not None and contribution.kind.is_of_samples
            measured = measured._replace(others=tuple(map(float, contribution.others)), is_of_samples=is_of_samples)
        if of_mean is None:
            return measured
        value = measured.loss if whole is None else share * float(of_mean.mean) if share else 0.0
        constant = share * float(of_mean.constant) if share else 0.0
        return measured._replace(loss=value, function=of_mean.function, slope=slope, constant=constant)

    def _run(self, batch: Any, weigher: Weigher, rows: int | None, is_part: bool) -> tuple[Tensor, Contribution | None]:
        loss = self._trial.step(batch)
        if not loss.requires_grad:
            raise CannotCheckError("the loss of the first rows needs no gradient")
        try:
            contribution = weigher(loss, batch, rows)
        except UnreadableLossError:
            if is_part or self.shares is not None:
                raise
            return loss, None
        is_empty = contribution.weight is not None and float(contribution.weight) == 0 and not contribution.others
        value = float(loss.detach())
        if math.isinf(value) or not (is_empty or math.isfinite(value)):
            raise UnsuitableRowsError("the loss of the first rows is not finite")
        return loss, contribution
