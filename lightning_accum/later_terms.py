"""Later checks: of terms and numbers that the checked batches did not have, and of one micro-batch in some windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from lightning_accum.check import Check, check_batch, check_first_batch
from lightning_accum.errors import DoesNotAddUpError
from lightning_accum.looks import Checked, Rows, agree_on_rows, split_rows
from lightning_accum.splitting.few_rows import FewRows, SplitRows, join
from lightning_accum.trial import Trial
from lightning_accum.verdict import CannotCheckError
from lightning_accum.weighing.advice import OF_COUNTS_OF_ONE, OF_LENGTHS, OF_NO_LOSS
from lightning_accum.weighing.known import Known
from lightning_accum.weighing.later import Reason


def check_loader_batch(checked: Checked, batch: Any, transferred: Callable[[Any], Any], is_again: bool) -> None:
    """Check a loader batch, if it is one of the first, or one that begins a later window. Called on all ranks."""
    if is_again:
        _check_again(checked, [] if batch is None else [batch])
    else:
        check_first_batch(checked, batch, transferred)
    checked.accumulation.look_at_doubted = partial(_check_doubted, checked)


def _check_again(checked: Checked, batches: Sequence[Any]) -> None:
    """Check the loader batch that begins a later window, or earlier rows if it gives no answer. Called on all ranks."""
    kept = [[checked.accumulation.check.rows]]  # a rank may have no loss in a later batch, and others would wait for it
    for rows in kept if checked.sync.is_waited_for_in_forward else [batches, *kept]:
        with suppress(CannotCheckError):
            return check_batch(checked, rows, is_later=True)


def _check_doubted(checked: Checked) -> bool:
    """Before the step of a window, or before it begins, check the micro-batch that differs most from the checked ones.

    Called on all ranks. Returns whether the terms of the loss are weighted differently than before.
    """
    later, weigher = checked.accumulation.later, checked.accumulation.weigher
    before, rows, longer = weigher.known, checked.accumulation.check.rows, later.take_lengths()
    if has_lengths := checked.on_any(longer is not None):
        _look_at(checked, rows, "other lengths", rows if longer is None else longer)
    looks = later.telling(rows) if not has_lengths or checked.on_any(later.is_doubtful()) else []
    later.doubted.clear()
    for place in range(int(checked.largest(len(looks)))):
        _look_at(checked, *looks[min(place, len(looks) - 1)])
    now = weigher.known
    is_other = any(now.modes[key] != mode and not callable(mode) for key, mode in before.modes.items())
    return is_other or (_others(now) != _others(before) if before.counts_first else now.counts_first)


def _look_at(checked: Checked, rows: Any, reason: Reason, other: Any = None) -> None:
    accumulation, later = checked.accumulation, checked.accumulation.later
    is_count = not later.learn(rows) and reason == "other numbers"
    later.counts_left -= is_count
    if is_count and not later.counts_left:
        accumulation.warn_once(OF_COUNTS_OF_ONE)
    if checked.on_any(rows is None):
        return
    checked.sync.reshard()
    trial = checked.trial()
    try:
        if reason == "other lengths":  # the padding of a sample depends on its batch
            drawn: Rows | None = None
            with suppress(CannotCheckError):  # of a stream
                drawn = None if checked.of_dataset is None else agree_on_rows(checked, [rows], of_dataset=True)
            looked_at = drawn or Rows(trial.together(lambda: _joined(checked, [rows, other])), 2, 2, 2, False)
        else:
            own = trial.together(lambda: split_rows(checked, rows)) or _beside_others(checked, trial, rows)
            numbers = accumulation.ranks.largest(-own.of_batch, own.number, -own.at_once)
            looked_at = Rows(own, -int(numbers[0]), int(numbers[1]), -int(numbers[2]), False)
        check = Check(checked, looked_at, is_later=True)
        if reason != "other lengths" or not check.find().adds_up:  # a few padded rows change no weight
            check.run()
    except DoesNotAddUpError as error:
        raise DoesNotAddUpError(f"{error} {OF_LENGTHS}" if reason == "other lengths" else str(error)) from None
    except CannotCheckError as problem:
        if checked.on_any(reason == "no loss"):
            accumulation.warn_once(f"{OF_NO_LOSS} ({problem}).")
        elif checked.on_any(is_count or reason == "new terms"):  # else it is weighted as before, and nothing contradicts that
            accumulation.warn_once(
                "The loss of a micro-batch has terms that the checked batches did not have, and the new terms could not be checked:"
                f" {problem}."
            )


def _joined(checked: Checked, batches: Sequence[Any]) -> SplitRows:
    """A few rows of each batch, and all of them padded to one length."""
    found = [FewRows([batch], checked.samples_of(batch)) for batch in batches]
    take: Callable[[], list[Any]] = lambda: [own.take(range(min(4, own.number))) for own in found]  # noqa: E731
    return SplitRows(None, lambda _, size: take() if size == 2 else [join(take())[0]], 4)


def _others(known: Known) -> tuple[Any, ...]:
    """The known names of terms; if they change, other terms are counted."""
    return {key: name for key, name in known.aliases.items() if key != name}, known.looped, known.order, bool(known.places)


def _beside_others(checked: Checked, trial: Trial, rows: Any) -> FewRows:
    """Rows that alternate with the checked ones, if both are of the same kind."""
    accumulation, splitting = checked.accumulation, checked.accumulation.splitting
    known = None if splitting is None else splitting.kinds

    def read(batch: Any) -> FewRows:
        return FewRows([batch], checked.samples_of(batch), known=known)

    own, others = trial.together(lambda: (read(rows), read(accumulation.check.rows)))
    with suppress(CannotCheckError):
        joined, turned = trial.together(lambda: (own.by_turns(others), others.by_turns(own)))
        waits, both = checked.sync.is_waited_for_in_forward, range(min(joined.number, turned.number))
        # rows of different kinds depend on which come first
        if waits or not checked.on_any(trial.differ(partial(joined.take, both), partial(turned.take, both))):
            return joined
        if not checked.is_window_long and not checked.on_any((plan := accumulation.plan) is None or plan.layout is None):
            assert plan is not None  # it may differ in kind from other rows of its own loader batch, too
            return trial.together(lambda: own.by_turns(read(plan.batch)))
    return own
