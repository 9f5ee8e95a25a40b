"""The check of the first batches: before the first step, whether what a window does adds up on the user's own module."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_accum.accumulation import Accumulation
from lightning_accum.splitting.few_rows import FewRows, SplitRows
from lightning_accum.splitting.snapshot import StateSnapshotter
from lightning_accum.sync import GradientSync
from lightning_accum.weighing import advice
from lightning_accum.weighing.check import Check, Earlier
from lightning_accum.weighing.in_types import look_in_types
from lightning_accum.weighing.proven import Proven
from lightning_accum.weighing.trial import Trial
from lightning_accum.weighing.verdict import MOST_ROWS, CannotCheckError, DoesNotAddUpError, Rows, Verdict

MOST_BATCHES = 8
"""Loader batches that are looked at until there were enough rows."""


class JointLossError(ValueError):
    """A window of several loader batches has a loss that takes the rows of all ranks together."""


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
    snapshotter: StateSnapshotter
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
        rows = _agree_on_rows(checked, batches)
        trial = checked.trial()
        ways = rows.ways(checked, trial)
    except CannotCheckError as reason:
        accumulation.verdict = Verdict(None, seen=str(reason)).after(before)
        return
    is_begun = before is not None and before.deviation is not None
    if accumulation.row_wise is not None and not is_begun and _is_settled_by_other_ranks(checked, trial, rows):
        return
    with ExitStack() as stack:
        look = partial(_look, checked, before if is_begun else None)
        verdict, check = look_in_types(trial, partial(look, ways), stack)
        if rows.number > rows.most and not rows.are_single and checked.largest(float(not verdict.adds_up)):
            # of batches that go together as they are, such as those of several tasks, each alone may add up
            stack.close()
            joined, ways = verdict, rows.ways(checked, trial, alone=True)
            verdict, check = look_in_types(trial, partial(look, ways), stack)
            if checked.largest(float(not verdict.adds_up)) == 0:
                accumulation.warn_once(advice.of_joined(joined))
        if rows.are_single and checked.largest(float(not verdict.adds_up)):
            if before is None or before.seen != advice.OF_ONE_ROW:
                accumulation.warn_once(advice.of_one_row(verdict, accumulation.policy.weight))
            accumulation.verdict = Verdict(None, seen=advice.OF_ONE_ROW)
            return
        looked_at = MOST_ROWS if accumulation.policy.split is not None else min(rows.fewest, MOST_ROWS)
        verdict = replace(verdict, looked_at=looked_at if verdict.deviation is not None else 0, loss=check.loss).after(before)
        accumulation.verdict = _conclude(checked, check, verdict, ways)
    if accumulation.verdict.deviation is not None and accumulation.verdict.adds_up and not _is_apart(checked):
        accumulation.proven = accumulation.proven or Proven(())
        accumulation.proven.add(check.ways, check.kinds, rows.found.kept)
    accumulation.kept.append(rows.found.kept if rows.found.of_batch < MOST_ROWS else None)
    if not accumulation.checks_left or not checked.largest(float(accumulation.verdict.may_try_again)):
        _end(checked)
    is_cut = accumulation.splitting is not None or checked.is_window_long
    if is_cut and not is_begun and checked.largest(float(accumulation.verdict.deviation is None)) == 0:
        with suppress(CannotCheckError):
            if changed := trial.changed_buffers(ways[0].whole):
                accumulation.warn_once(advice.of_buffers(changed))


def _is_apart(checked: Checked) -> bool:
    """Rows of several loader batches do not go together, their weights are not read, or the engine has the gradients."""
    policy = checked.accumulation.policy
    is_joined = checked.accumulation.row_wise is None and policy.split is None and policy.weight == "auto"
    return checked.sync.is_waited_for_in_forward or not is_joined


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

    def ways(self, checked: Checked, trial: Trial, alone: bool = False) -> list[Rows]:
        """The ways to look at them, or at those of the loader batch alone. Called on all ranks.

        Raises:
            CannotCheckError: there is none. On all ranks.
        """
        found, number = (self.found.alone(), self.most) if alone else (self.found, self.number)
        # some need a backward after each forward
        losses_of = None if checked.sync.is_waited_for_in_forward else trial.losses_of
        ways = found.ways(number, self.size, self.attempt, losses_of)
        if not (ways := ways[: int(-checked.largest(-len(ways)))]):
            raise CannotCheckError("split= cuts the batches of the ranks into different numbers of parts")
        return ways


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
    reason = CannotCheckError("a rank has no batch of enough rows")
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
    size = at_once if policy.micro_batch is None else -smallest
    return _RowsOfRanks(
        found,
        -fewest,
        most,
        number,
        size,
        size == 1 and policy.micro_batch is None,
        0 if number < MOST_ROWS else MOST_BATCHES - 1 - accumulation.checks_left,
    )


def _rows_of(checked: Checked, batches: Sequence[Any], size: int | None) -> FewRows | SplitRows | None:
    """The rows of a loader batch; None where there is no batch.

    Raises:
        CannotCheckError: there are none that can be looked at.
    """
    accumulation, module = checked.accumulation, checked.module
    if any(map(is_lazy, chain(module.parameters(), module.buffers()))):
        raise CannotCheckError("lazy layers are made by the first batch")
    if not batches or accumulation.is_shadow_batch:
        return None
    if accumulation.policy.split is not None:
        return SplitRows(batches[0], accumulation.policy.split, size)
    before = [rows for rows in accumulation.kept[-1:] if rows is not None]
    found = FewRows(batches[0], checked.samples, before)
    if accumulation.row_wise is not None and found.of_batch < 2:
        raise CannotCheckError("the first batch has 1 row")
    return found


def _is_settled_by_other_ranks(checked: Checked, trial: Trial, rows: _RowsOfRanks) -> bool:
    """Whether the loss takes the rows of all ranks together, or that cannot be told: no parts are compared. Called on all ranks."""
    accumulation = checked.accumulation
    if accumulation.ranks.world_size == 1:
        return False
    assert isinstance(rows.found, FewRows)
    try:
        is_joint = trial.takes_rows_of_other_ranks(rows.found.two(rows.number), accumulation.ranks.rank)
    except CannotCheckError as problem:
        accumulation.verdict = Verdict.unknown(problem)
        if not checked.largest(float(accumulation.verdict.may_try_again)):
            accumulation.checks_left = 0
        return True
    if is_joint:
        accumulation.verdict = Verdict(None, seen="the loss takes the rows of all ranks together")
        accumulation.has_joint_loss, accumulation.checks_left = True, 0
        if accumulation.boundary.size != 1:
            raise JointLossError(advice.OF_SEVERAL_BATCHES)
    return is_joint


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


def _look(checked: Checked, before: Verdict | None, ways: list[Rows], trial: Trial) -> tuple[Verdict, Check]:
    """What is found in rows, and what compared them. Called on all ranks."""
    check = check_of(checked, trial, before)
    return check(ways, may_leave_functions=before is None, earlier=_window_so_far(checked)), check


def _conclude(checked: Checked, check: Check, verdict: Verdict, ways: Sequence[Rows]) -> Verdict:
    """Have windows weigh as the parts were found to add up. Called on all ranks.

    Returns:
        The verdict, which is one for all ranks.

    Raises:
        DoesNotAddUpError: they do not add up, on any rank.
    """
    accumulation, weigher = checked.accumulation, checked.accumulation.weigher
    do_add_up = checked.largest(float(not verdict.adds_up)) == 0
    if check.shares is not weigher.shares:
        accumulation.window.forget_readings()
    weigher.takes_functions, weigher.shares = check.takes_functions, check.shares
    weigher.fixed_counts = check.fixed_counts if do_add_up else ()
    weigher.takes_numbers = checked.largest(float(verdict.deviation is None and verdict.is_unread)) == 0
    accumulation.window.constant = check.constant
    if do_add_up:
        is_unchecked = checked.largest(float(verdict.deviation is None))
        worst, tolerance = checked.largest(verdict.deviation or 0.0), checked.largest(verdict.tolerance)
        if is_unchecked:
            return verdict if verdict.deviation is None else Verdict(None, seen="another rank could not be")
        if not check.proportion.looks_left:
            weigher.proportion.looks_left = 0
        return replace(verdict, deviation=worst, tolerance=tolerance)
    policy, mend = accumulation.policy, check.weight_that_adds_up(ways)
    if accumulation.row_wise is not None or checked.largest(float(not (verdict.adds_up or verdict.has_terms))):
        weight = weigher.criterion or policy.weight
        message = advice.of_losses(verdict, weight, mend, policy.row_wise, accumulation.is_step)
        raise DoesNotAddUpError(_of_worst_rank(checked, message, verdict))
    accumulation.checks_left = 0
    accumulation.warn_once(advice.of_terms(verdict, mend))
    worst, tolerance = checked.largest(verdict.deviation or 0.0), -checked.largest(-verdict.tolerance)
    return replace(verdict, deviation=worst, tolerance=tolerance)


def _of_worst_rank(checked: Checked, message: str, verdict: Verdict) -> str:
    """What the rank says whose parts are farthest from their whole. Called on all ranks."""
    ranks, deviation = checked.accumulation.ranks, 0.0 if verdict.adds_up else verdict.deviation or 0.0
    rank = int(-checked.largest(-ranks.rank if deviation == checked.largest(deviation) else -math.inf))
    return message if ranks.world_size == 1 else str(ranks.share(message, rank))


def _window_so_far(checked: Checked) -> list[Earlier] | None:
    """Its micro-batches, from its first; None where they were not all kept, on all ranks."""
    accumulation = checked.accumulation
    weights = [weight for _, weight, *_ in accumulation.window.weighed()]
    is_kept = len(weights) == len(accumulation.kept) == accumulation.position and accumulation.splitting is None
    if checked.largest(float(accumulation.position and (not is_kept or None in accumulation.kept))):
        return None
    batches = accumulation.kept if accumulation.position else []
    return [(partial(deepcopy, batch), weight) for batch, weight in zip(batches, weights, strict=False)]


def _end(checked: Checked) -> None:
    """Enough was looked at. What is known now, and was not when training began, is said."""
    accumulation = checked.accumulation
    if accumulation.checks_left < MOST_BATCHES - 1 and accumulation.verdict is not None:
        checked.inform(f"GradientAccumulation: {accumulation.verdict}.")
    accumulation.checks_left = 0
    accumulation.kept.clear()
