"""The check of the first batches: before the first step, whether what a window does adds up on the user's own module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
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
from lightning_accum.weighing.check import Check, Earlier
from lightning_accum.weighing.terms import HOW_TO_WEIGH_EACH
from lightning_accum.weighing.trial import Trial
from lightning_accum.weighing.verdict import MOST_ROWS, CannotCheckError, DoesNotAddUpError, Verdict

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
        snapshotter: puts back what a step changes.
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
    accumulation, sync = checked.accumulation, checked.sync
    policy, ranks = accumulation.policy, accumulation.ranks
    before = accumulation.verdict
    if before is not None and before.looked_at > 1 and not accumulation.position:
        _end(checked)  # the window of the rows that were looked at has taken its step
        return
    if sync.is_waited_for_in_forward and accumulation.position:
        return  # the engine has gradients of its own, until the window ends

    def largest(number: float) -> float:
        return ranks.largest(number)[0]

    accumulation.checks_left -= 1
    size = policy.micro_batch if isinstance(policy.micro_batch, int) else None
    if size is None and (plan := accumulation.plan) is not None and plan.is_read:
        size = plan.pieces[0].count  # of the longest rows
    found: FewRows | SplitRows | None = None
    reason = "a rank has no batch of enough rows"
    try:
        found = _rows_of(checked, batches, size)
    except CannotCheckError as error:
        reason = str(error)
    # as many forwards on every rank: they may wait for each other
    rows_of_batch, number, at_once = (0, 0, 0) if found is None else (found.of_batch, found.number, found.at_once)
    numbers = ranks.largest(-rows_of_batch, rows_of_batch, number, -(size or MOST_ROWS), at_once)
    fewest, most, number, smallest, at_once = map(int, numbers)
    fewest, size = -fewest, at_once if policy.micro_batch is None else -smallest
    if found is None or fewest < (2 if sync.is_waited_for_in_forward else 1):
        accumulation.verdict = Verdict(None, seen=reason).after(before)
        return
    sync.reshard()
    trial = Trial(
        checked.module,
        checked.step,
        partial(checked.snapshotter.take, watches_parameters=False),
        sync,
        largest,
    )
    check = Check(
        trial,
        policy.weight,
        accumulation.weighs_terms,
        policy.micro_batch is None and not checked.is_window_long,
        policy.micro_batch is not None,
    )
    losses_of = None if sync.is_waited_for_in_forward else trial.losses_of  # some of which need a backward after each forward
    attempt = 0 if number < MOST_ROWS else MOST_BATCHES - 1 - accumulation.checks_left
    rows = found.ways(number, size, attempt, losses_of)
    rows = rows[: int(-largest(-len(rows)))]
    if not rows:
        accumulation.verdict = Verdict(None, seen=reason).after(before)
        return
    is_begun = before is not None and before.deviation is not None
    if before is not None and is_begun:
        check.takes_functions, check.loss = accumulation.weigher.takes_functions, before.loss
        check.constant = accumulation.window.constant
    if accumulation.row_wise is not None and ranks.world_size > 1 and not is_begun:
        assert isinstance(found, FewRows)
        try:
            is_joint = takes_rows_of_other_ranks(trial, found.two(number), ranks.rank, largest)
        except CannotCheckError as problem:
            accumulation.verdict = Verdict.unknown(problem)
            if not largest(float(accumulation.verdict.may_try_again)):
                accumulation.checks_left = 0
            return
        if is_joint:
            accumulation.verdict = Verdict(None, seen="the loss takes the rows of all ranks together")
            accumulation.has_joint_loss, accumulation.checks_left = True, 0
            if accumulation.boundary.size != 1:
                raise JointLossError(_OF_SEVERAL_BATCHES)
            return
    check.shares = accumulation.weigher.shares
    look = partial(check, may_leave_functions=not is_begun, earlier=_window_so_far(accumulation, largest))
    constant, verdict = check.constant, look(rows)
    is_of_one_row = size == 1 and policy.micro_batch is None
    if number > most and not is_of_one_row and largest(float(not verdict.adds_up)):
        # of batches that go together as they are, such as those of several tasks, each alone may add up
        joined, check.constant = verdict, constant
        rows = found.alone().ways(most, size, attempt, losses_of)
        rows = rows[: int(-largest(-len(rows)))]
        verdict = look(rows)
        if largest(float(not verdict.adds_up)) == 0:
            accumulation.warn_once(_message_of_joined(_seen(joined)))
    looked_at = MOST_ROWS if policy.split is not None else min(fewest, MOST_ROWS)
    if is_of_one_row and largest(float(not verdict.adds_up)):
        if before is None or before.seen != _OF_ONE_ROW:
            accumulation.warn_once(_message_of_one_row(verdict, policy.weight))
        accumulation.verdict = Verdict(None, seen=_OF_ONE_ROW)
        return
    verdict = replace(verdict, looked_at=looked_at if verdict.deviation is not None else 0, loss=check.loss).after(before)
    do_add_up = largest(float(not verdict.adds_up)) == 0
    if check.shares is not accumulation.weigher.shares:
        accumulation.window.forget_readings()
    accumulation.weigher.takes_functions, accumulation.weigher.shares = check.takes_functions, check.shares
    accumulation.weigher.fixed_counts = check.fixed_counts if do_add_up else ()
    accumulation.window.constant = check.constant
    if do_add_up:
        is_unchecked = largest(float(verdict.deviation is None))
        worst = largest(verdict.deviation or 0.0)
        if verdict.deviation is not None:
            verdict = Verdict(None, seen="another rank could not be") if is_unchecked else replace(verdict, deviation=worst)
    else:
        mend, criterion = check.weight_that_adds_up(rows), accumulation.weigher.criterion or policy.weight
        if accumulation.row_wise is not None or largest(float(not (verdict.adds_up or verdict.has_terms))):
            message = _message(verdict, criterion, mend, policy.row_wise)
            raise DoesNotAddUpError(message + (_AFTER_STEPS if accumulation.is_step else ""))
        accumulation.checks_left = 0
        accumulation.warn_once(
            f"The terms of the loss do not add up by one weight: in parts of {_sizes(verdict)} rows of a batch,"
            f" {_seen(verdict)}. {HOW_TO_WEIGH_EACH if mend is None else _mend(mend)}"
        )
    accumulation.verdict = verdict
    accumulation.kept.append(found.kept if rows_of_batch < MOST_ROWS else None)
    if not accumulation.checks_left or not largest(float(verdict.may_try_again)):
        _end(checked)
    is_cut = accumulation.splitting is not None or checked.is_window_long
    if is_cut and not is_begun and largest(float(verdict.deviation is None)) == 0:
        with suppress(CannotCheckError):
            if changed := trial.changed_buffers(rows[0].whole):
                accumulation.warn_once(_of_buffers(changed))


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


def _window_so_far(accumulation: Accumulation, largest: Callable[[float], float]) -> list[Earlier] | None:
    """Its micro-batches, from its first; None where they were not all kept, on all ranks."""
    weights = [weight for _, weight, *_ in accumulation.window.weighed()]
    is_kept = len(weights) == len(accumulation.kept) == accumulation.position and accumulation.splitting is None
    if largest(float(accumulation.position and (not is_kept or None in accumulation.kept))):
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


def takes_rows_of_other_ranks(
    trial: Trial, pair: tuple[Callable[[], Any], Callable[[], Any]], rank: int, largest: Callable[[float], float]
) -> bool:
    """Whether the loss of a rank is another where other ranks have other rows: it gathers them. Called on all ranks."""
    has_changed = 0.0
    own, other = pair
    for still in (0, 1):
        before, after = trial.losses_of([own, own if rank % 2 == still else other])
        if rank % 2 == still:
            has_changed = max(has_changed, float(abs(after - before) > trial.tolerance * max(abs(before), abs(after))))
    return largest(has_changed) > 0


_OF_SEVERAL_BATCHES = (
    "The loss gathers the rows of all ranks, so it is one of all rows of its batch, and that of a window of several loader batches"
    " is not their mean. Have the loader yield the batch that is wanted (a window of 1), of which row_wise= takes as much as fits."
)


def _of_buffers(changed: Mapping[str, float]) -> str:
    names, size = " and ".join(map(repr, changed)), max(changed.values())
    return (
        f"training_step changes the buffer{'s' * (len(changed) > 1)} {names}, and its loss depends on that (the loss of the same"
        f" rows is {size:.1g} of its size off afterwards): micro-batches of a window see others than its full batch would."
        " Change it once a window: in the module's optimizer_step, after super().optimizer_step(...); or have training_step see the"
        ' full batch: micro_batch="offload", or micro_batch= with row_wise=, and a window of 1.'
    )


def _sizes(verdict: Verdict) -> str:
    *first, last = map(str, verdict.rows or ("some", "others"))
    return f"{', '.join(first)} and {last}"


def _seen(verdict: Verdict) -> str:
    return "it is so on another rank" if verdict.adds_up else verdict.in_words


_OF_ROW_WISE = (
    "With row_wise= the loss sees one loader batch of one rank as a whole: have the loader yield the batch that is wanted (a window"
    " of 1), and have training_step gather the rows of several ranks: self.all_gather(..., sync_grads=True)."
)
_OF_PAIRS = (
    "No weight that was tried makes them add up: such a loss compares the rows of its batch, or divides by what no count shows."
    " Have it see the whole batch, of which submodules run in micro-batches: GradientAccumulation(micro_batch=...,"
    ' row_wise="encoder") with their names and a window of 1; or pass the weight that its mean is divided by, as a function of the'
    " batch."
)


def _message_of_joined(seen: str) -> str:
    return (
        f"The rows of two loader batches together do not have the sum of their losses ({seen}), though those of each alone add up."
        " Where loader batches are of different kinds, such as tasks, nothing is wrong, and check=False leaves out the check."
        " Otherwise the loss compares the rows of its batch, and a window does not take the step of its full batch:"
        ' GradientAccumulation(micro_batch=..., row_wise="encoder") with a window of 1 does.'
    )


_AFTER_STEPS = " Optimizer steps were made before: the batches until then could not be checked."


def _mend(argument: str) -> str:
    return f"Pass GradientAccumulation({argument}): with it they add up."


def _message(verdict: Verdict, weight: Any, mend: str | None, row_wise: tuple[str, ...]) -> str:
    mends = (_OF_ROW_WISE if row_wise else _OF_PAIRS) if mend is None else _mend(mend)
    return (
        "The losses of micro-batches do not add up to that of their batch, so a window would not take the step of its full batch:"
        f" {sum(verdict.rows)} rows of a batch, in parts of {_sizes(verdict)} weighed by weight={weight!r}:"
        f" {_seen(verdict)}."
        f' {mends} weight="equal" takes the classic mean of means instead; check=False leaves out the check.'
    )


_OF_ONE_ROW = "the loader yields single rows, and the loss of two together is not the sum of theirs"


def _message_of_one_row(verdict: Verdict, weight: Any) -> str:
    return (
        f"{_OF_ONE_ROW.capitalize()}, weighed by weight={weight!r}: {_seen(verdict)}. Where training_step takes no more than one"
        " row, nothing is wrong, and check=False leaves out the check. Where it takes more, windows do not take the step of their"
        " full batch: have the loader yield batches of several rows, of which the check says more."
    )
