"""The check of the first batches: before the first step, whether what a window does adds up on the user's own module."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_accum.accumulation import Accumulation
from lightning_accum.errors import DoesNotAddUpError, JointLossError
from lightning_accum.splitting.few_rows import FewRows, SplitRows
from lightning_accum.sync import GradientSync
from lightning_accum.undo import Undo
from lightning_accum.weighing import advice
from lightning_accum.weighing.check import Check, Earlier
from lightning_accum.weighing.in_types import look_in_types
from lightning_accum.weighing.proven import Proven
from lightning_accum.weighing.trial import Trial
from lightning_accum.weighing.verdict import MOST_ROWS, CannotCheckError, Rows, UnsuitableRowsError, Verdict

MOST_BATCHES = 8
"""Loader batches that are looked at until there were enough rows."""


@dataclass(frozen=True)
class Checked:
    """What is checked.

    Attributes:
        module: that is trained.
        step: runs it on a batch, and logs nothing.
        accumulation: takes the verdict.
        sync: gives out gradients.
        snapshotter: keeps what a step changes, to restore it.
        samples: how many of them the loader puts into a batch; empty where it does not say so.
        is_window_long: a window may have several loader batches.
        inform: prints what it takes, on rank zero.
    """

    module: nn.Module
    step: Callable[[Any], Any]
    accumulation: Accumulation
    sync: GradientSync
    snapshotter: Undo
    samples: Collection[int]
    is_window_long: bool
    inform: Callable[[str], None]

    def trial(self) -> Trial:
        """Runs it on some rows, and leaves everything as it was."""
        take_snapshot = partial(self.snapshotter.take, watches_parameters=False)
        return Trial(self.module, self.step, take_snapshot, self.sync, self.largest)

    def largest(self, number: float) -> float:
        """Of the numbers of all ranks. Called on all of them."""
        return self.accumulation.ranks.largest(number)[0]

    def on_any(self, claim: bool) -> bool:
        """Whether it is so on any rank. Called on all of them."""
        return self.largest(float(claim)) > 0


def check_first_batch(checked: Checked, batches: Sequence[Any]) -> None:
    """Check a loader batch. Called on all ranks at each loader batch, until enough rows were looked at on all.

    Loader batches of few rows show little, so of a window that has several, others are looked at too, before its step: each
    together with the rows of the one before it.

    Args:
        checked: what is checked.
        batches: the loader batch; empty where this rank has none.

    Raises:
        DoesNotAddUpError: the parts of the batch, weighed, are not the batch. On all ranks.
        JointLossError: the loss takes the rows of all ranks, in a window of several loader batches.
    """
    accumulation, before = checked.accumulation, checked.accumulation.verdict
    if accumulation.was_checked:
        accumulation.checks_left = 0
        return
    if before is not None and before.looked_at > 1 and not accumulation.position:
        _end(checked)  # the window of the rows that were looked at has taken its step
        return
    if checked.sync.is_waited_for_in_forward and accumulation.position:
        return  # the engine has gradients of its own, until the window ends
    accumulation.checks_left -= 1
    accumulation.is_just_checked = accumulation.ranks.world_size > 1
    try:
        _Looks(checked, _agree_on_rows(checked, batches)).take()
    except CannotCheckError as reason:
        accumulation.verdict = Verdict.unknown(reason).after(before)
        if accumulation.verdict.deviation is None and not (accumulation.checks_left and accumulation.verdict.may_try_again):
            _warn_that_it_is_unchecked(accumulation)


def _warn_that_it_is_unchecked(accumulation: Accumulation) -> None:
    """Whatever windows add up to, nobody knows."""
    assert accumulation.verdict is not None
    accumulation.warn_once(
        f"It could not be checked that micro-batches add up to their batch: {accumulation.verdict.seen}. Compare a step with that"
        " of its full batch by verify(module, data), or pass check=False if you know that it is right."
    )


def _end(checked: Checked) -> None:
    """Enough was looked at. What is known now, and was not when training began, is said."""
    accumulation = checked.accumulation
    if accumulation.checks_left < MOST_BATCHES - 1 and accumulation.verdict is not None:
        checked.inform(f"GradientAccumulation: {accumulation.verdict}.")
    accumulation.checks_left = 0
    accumulation.kept.clear()


# --- which rows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RowsOfRanks:
    """The rows of this rank, of which all ranks look at as many, in as many ways: they may wait for each other in each.

    Attributes:
        found: those of this rank, with those of the loader batch before.
        fewest: of the loader batch, on the rank that has the fewest.
        most: of the loader batch, on the rank that has the most.
        number: of all that are looked at, on the rank that has the most.
        size: of a micro-batch; of the larger loader batch where each is one.
        are_single: each loader batch is one row.
        attempt: see :meth:`FewRows.ways`.
    """

    found: FewRows | SplitRows
    fewest: int
    most: int
    number: int
    size: int
    are_single: bool
    attempt: int

    def alone(self) -> _RowsOfRanks:
        """Those of the loader batch alone."""
        return replace(self, found=self.found.alone(), number=self.most)


def _agree_on_rows(checked: Checked, batches: Sequence[Any]) -> _RowsOfRanks:
    """The rows that are looked at. Called on all ranks.

    Raises:
        CannotCheckError: a rank has none. On all ranks.
    """
    accumulation, sync = checked.accumulation, checked.sync
    policy = accumulation.policy
    size = policy.micro_batch if isinstance(policy.micro_batch, int) else None
    if size is None and (plan := accumulation.plan) is not None and plan.is_read:
        size = plan.pieces[0].count  # of the longest rows
    found: FewRows | SplitRows | None = None
    reason: CannotCheckError = UnsuitableRowsError("a rank has no batch of enough rows")
    try:
        found = _rows_of(checked, batches, size)
    except CannotCheckError as error:
        reason = error
    of_batch, number, at_once = (0, 0, 0) if found is None else (found.of_batch, found.number, found.at_once)
    numbers = accumulation.ranks.largest(-of_batch, of_batch, number, -(size or MOST_ROWS), at_once)
    fewest, most, number, smallest, at_once = map(int, numbers)
    # where a step that was written for single rows can be taken back
    if found is None or -fewest < (1 if sync.can_forget_forward else 2):
        raise reason
    sync.reshard()
    is_whole = policy.micro_batch is None
    return _RowsOfRanks(
        found,
        -fewest,
        most,
        number,
        size=at_once if is_whole else -smallest,
        are_single=is_whole and at_once == 1,
        attempt=0 if number < MOST_ROWS else MOST_BATCHES - 1 - accumulation.checks_left,
    )


def _rows_of(checked: Checked, batches: Sequence[Any], size: int | None) -> FewRows | SplitRows | None:
    """The rows of a loader batch; None where there is no batch.

    Raises:
        CannotCheckError: there are none that can be looked at.
    """
    accumulation, module = checked.accumulation, checked.module
    if any(map(is_lazy, chain(module.parameters(), module.buffers()))):
        raise UnsuitableRowsError("lazy layers are made by the first batch")
    if not batches or accumulation.is_shadow_batch:
        return None
    if accumulation.policy.split is not None:
        return SplitRows(batches[0], accumulation.policy.split, size)
    before = [rows for rows in accumulation.kept[-1:] if rows is not None]
    found = FewRows(batches[0], checked.samples, before)
    if accumulation.row_wise is not None and found.of_batch < 2:
        raise UnsuitableRowsError("the first batch has 1 row")
    return found


# --- what is looked at --------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """What ``check`` found in some ``ways`` on this rank, and whether it ``adds_up`` on all."""

    verdict: Verdict
    adds_up: bool
    check: Check
    ways: list[Rows]


class _Looks:
    """The looks at one loader batch, each taken by all ranks together. Each leaves the module as it was (``Trial.held``)."""

    def __init__(self, checked: Checked, rows: _RowsOfRanks) -> None:
        self._checked, self._accumulation = checked, checked.accumulation
        self._rows = rows
        self._trial = checked.trial()
        verdict = self._accumulation.verdict
        self._before = None if verdict is None or verdict.deviation is None else verdict
        """What was found in the loader batches before."""

    def take(self) -> None:
        """Take them, in this order.

        Raises:
            CannotCheckError: there is nothing to look at. On all ranks.
        """
        accumulation, rows = self._accumulation, self._rows
        if accumulation.row_wise is not None and self._before is None:
            self._look_at_other_ranks()
            if accumulation.has_joint_loss:
                return  # parts of a batch say nothing
        found = self._look_at(rows)
        if not found.adds_up and rows.are_single:
            self._warn_of_single_rows(found.verdict)
            return
        if not found.adds_up and rows.number > rows.most:
            # of batches that go together as they are, such as those of several tasks, each alone may add up
            joined, found = found, self._look_at(rows.alone())
            if found.adds_up:
                accumulation.warn_once(advice.of_joined(joined.verdict))
        accumulation.verdict = self._conclude(found)
        self._keep_for_later(found.check, accumulation.verdict)
        is_cut = accumulation.splitting is not None or self._checked.is_window_long
        if is_cut and self._before is None and accumulation.verdict.deviation is not None:
            self._warn_of_buffers(found.ways[0])

    def _look_at_other_ranks(self) -> None:
        """Find out whether the loss takes the rows of all ranks together."""
        accumulation, rows = self._accumulation, self._rows.found
        if accumulation.ranks.world_size == 1:
            return
        assert isinstance(rows, FewRows)
        try:
            is_joint = self._trial.takes_rows_of_other_ranks(rows.two(self._rows.number), accumulation.ranks.rank)
        except CannotCheckError as problem:
            if not self._checked.on_any(isinstance(problem, UnsuitableRowsError)):  # other rows may show it
                accumulation.checks_left = 0
            raise
        if is_joint:
            accumulation.verdict = Verdict(None, seen="the loss takes the rows of all ranks together")
            accumulation.has_joint_loss, accumulation.checks_left = True, 0
            if accumulation.boundary.size != 1:
                raise JointLossError(advice.OF_SEVERAL_BATCHES)

    def _look_at(self, rows: _RowsOfRanks) -> _Found:
        """Compare rows with their parts."""
        checked = self._checked
        # some need a backward after each forward
        losses_of = None if checked.sync.is_waited_for_in_forward else self._trial.losses_of
        ways = rows.found.ways(rows.number, rows.size, rows.attempt, losses_of)
        if not (ways := ways[: int(-checked.largest(-len(ways)))]):
            raise CannotCheckError("split= cuts the batches of the ranks into different numbers of parts")

        def look(trial: Trial) -> tuple[Verdict, Check]:
            check = check_of(checked, trial, self._before)
            return check(ways, may_leave_functions=self._before is None, earlier=self._window_so_far()), check

        verdict, check = look_in_types(self._trial, look)
        return _Found(verdict, not checked.on_any(not verdict.adds_up), check, ways)

    def _window_so_far(self) -> list[Earlier] | None:
        """Its micro-batches, from its first; None where they were not all kept, on all ranks."""
        accumulation = self._accumulation
        weights = [weight for _, weight, *_ in accumulation.window.weighed()]
        is_kept = len(weights) == len(accumulation.kept) == accumulation.position and accumulation.splitting is None
        if self._checked.on_any(accumulation.position > 0 and (not is_kept or None in accumulation.kept)):
            return None
        batches = accumulation.kept if accumulation.position else []
        return [(partial(deepcopy, batch), weight) for batch, weight in zip(batches, weights, strict=False)]

    def _warn_of_single_rows(self, verdict: Verdict) -> None:
        """Two single rows together do not add up, but training_step may be written for one."""
        accumulation = self._accumulation
        if accumulation.verdict is None or accumulation.verdict.seen != advice.OF_ONE_ROW:
            accumulation.warn_once(advice.of_one_row(verdict, accumulation.policy.weight))
        accumulation.verdict = Verdict(None, seen=advice.OF_ONE_ROW)

    def _conclude(self, found: _Found) -> Verdict:
        """Have windows weigh as the parts were found to add up. Returns the verdict of all ranks.

        Raises:
            DoesNotAddUpError: they do not add up, on any rank.
        """
        checked, accumulation, check = self._checked, self._accumulation, found.check
        weigher, window = accumulation.weigher, accumulation.window
        if check.shares is not weigher.shares:
            window.forget_readings()
        weigher.takes_functions, weigher.shares, window.constant = check.takes_functions, check.shares, check.constant
        weigher.fixed_counts = check.fixed_counts if found.adds_up else ()
        looked_at = MOST_ROWS if accumulation.policy.split is not None else min(self._rows.fewest, MOST_ROWS)
        looked_at = 0 if found.verdict.deviation is None else looked_at
        verdict = replace(found.verdict, looked_at=looked_at, loss=check.loss).after(self._before)
        weigher.takes_numbers = not checked.on_any(verdict.deviation is None and verdict.is_unread)
        if not found.adds_up:
            self._refuse(found, verdict)
        elif checked.on_any(verdict.deviation is None):
            return verdict if verdict.deviation is None else Verdict(None, seen="another rank could not be")
        elif not check.proportion.looks_left:
            weigher.proportion.looks_left = 0
        deviation, tolerance = checked.largest(verdict.deviation or 0.0), checked.largest(verdict.tolerance)
        if not found.adds_up:
            tolerance = -checked.largest(-verdict.tolerance)
        return replace(verdict, deviation=deviation, tolerance=tolerance)

    def _refuse(self, found: _Found, verdict: Verdict) -> None:
        """Raise what does not add up, with the weight that mends it. Terms that share one weight are a warning."""
        checked, accumulation = self._checked, self._accumulation
        policy, mend = accumulation.policy, found.check.weight_that_adds_up(found.ways)
        if accumulation.row_wise is None and not checked.on_any(not (verdict.adds_up or verdict.has_terms)):
            accumulation.checks_left = 0
            accumulation.warn_once(advice.of_terms(verdict, mend))
            return
        weight = accumulation.weigher.criterion or policy.weight
        message = advice.of_losses(verdict, weight, mend, policy.row_wise, accumulation.is_step)
        ranks, deviation = accumulation.ranks, 0.0 if verdict.adds_up else verdict.deviation or 0.0
        if ranks.world_size > 1:  # that of the rank whose parts are farthest from their whole
            rank = int(-checked.largest(-ranks.rank if deviation == checked.largest(deviation) else -math.inf))
            message = str(ranks.share(message, rank))
        raise DoesNotAddUpError(message)

    def _keep_for_later(self, check: Check, verdict: Verdict) -> None:
        """Keep what batches to come are joined and compared with, and end the check where enough was looked at."""
        checked, accumulation, rows = self._checked, self._accumulation, self._rows.found
        policy = accumulation.policy
        # rows of several batches go together, their weights are read, and the engine leaves the gradients where they are
        is_comparable = accumulation.row_wise is None and policy.split is None and policy.weight == "auto"
        if verdict.deviation is not None and verdict.adds_up and is_comparable and not checked.sync.is_waited_for_in_forward:
            accumulation.proven = accumulation.proven or Proven(())
            accumulation.proven.add(check.ways, check.kinds, rows.kept)
        accumulation.kept.append(rows.kept if rows.of_batch < MOST_ROWS else None)
        if not accumulation.checks_left or not checked.on_any(verdict.may_try_again):
            is_whole = accumulation.boundary.size == 1 and accumulation.splitting is None
            if verdict.deviation is None and not (is_whole and self._trial.has_waited):  # a loss of all rows of the window
                _warn_that_it_is_unchecked(accumulation)
            _end(checked)

    def _warn_of_buffers(self, rows: Rows) -> None:
        """Buffers and attributes that change with each micro-batch, such as running statistics, change the loss of the next."""
        with suppress(CannotCheckError):
            if changed := self._trial.changed_buffers(rows.whole):
                self._accumulation.warn_once(advice.of_buffers(changed))
            if difference := self._trial.change_by_attributes(rows.whole):
                self._accumulation.warn_once(advice.of_attributes(difference))


def check_of(checked: Checked, trial: Trial, before: Verdict | None) -> Check:
    """What compares rows, and knows what was found ``before`` in this window."""
    accumulation = checked.accumulation
    policy = accumulation.policy
    is_split = policy.micro_batch is not None
    check = Check(trial, policy.weight, accumulation.weighs_terms, not is_split and not checked.is_window_long, is_split)
    if before is not None:
        check.takes_functions, check.loss = accumulation.weigher.takes_functions, before.loss
        check.constant = accumulation.window.constant
    check.shares, check.is_begun = accumulation.weigher.shares, accumulation.proven is not None
    return check
