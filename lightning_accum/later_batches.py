"""The check of later micro-batches: of those whose loss is read in another way than that of the batches that were checked.

They are looked at when their window has ended, before its step, together with rows of a checked batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning_accum.errors import ArgumentError
from lightning_accum.first_batch import Checked, check_of
from lightning_accum.splitting.few_rows import FewRows
from lightning_accum.weighing import advice
from lightning_accum.weighing.check import Check
from lightning_accum.weighing.in_types import look_in_types
from lightning_accum.weighing.measured import relative
from lightning_accum.weighing.proven import Proven
from lightning_accum.weighing.trial import Trial
from lightning_accum.weighing.verdict import CannotCheckError, Verdict


def check_doubted(checked: Checked) -> None:
    """Look at the micro-batches of a window that are doubted. Called on all ranks. What does not add up is a warning.

    Raises:
        ValueError: some losses of the window are divided by their samples, and others are not. On all ranks.
    """
    accumulation = checked.accumulation
    proven, closed = accumulation.proven, accumulation.closed
    if proven is None or closed is None:
        return
    is_mixed = accumulation.ranks.sum(proven.number_doubted) < closed.micro_batches
    doubted, left_out = proven.take_doubted()
    if closed.is_doubtful:  # there was a warning
        return
    has_looked_at_count = False
    for place in range(int(checked.largest(len(doubted)))):  # as many on every rank
        batch, is_of_count = doubted[place] if place < len(doubted) else (None, True)
        later = _Later(checked, proven, batch)
        is_of_count = not checked.on_any(not is_of_count)
        if is_of_count and (later.has_its_count() if proven.do_counts_matter else has_looked_at_count):
            continue
        has_looked_at_count |= is_of_count
        later.look(is_mixed)
    if proven.do_counts_matter and checked.on_any(left_out > 0):
        accumulation.warn_once(advice.OF_MANY_COUNTS)
        proven.trust_counts()


class _Later:
    """Looks at one batch; or at rows of the one that was checked, where only another rank has one.

    Args:
        checked: what is checked.
        proven: what is known.
        batch: a micro-batch that is doubted; None where this rank has none.
    """

    def __init__(self, checked: Checked, proven: Proven, batch: Any) -> None:
        self._checked = checked
        self._proven = proven
        self._batch = batch
        self._trial = checked.trial()

    def look(self, is_mixed: bool) -> None:
        """Warn of what does not add up. Called on all ranks.

        Args:
            is_mixed: its window has others, which are not doubted.
        """
        self._checked.sync.reshard()
        try:
            own = self._trial.together(self._own)
        except CannotCheckError:  # on all ranks
            return
        try:
            joined = self._trial.together(lambda: self._joined(own))
        except CannotCheckError:
            joined = None
        if joined is not None:
            verdict, _ = self._look_at(joined)
            if verdict.deviation is not None and (self._do_add_up(verdict) or not self._goes_by_order(own)):
                if not self._do_add_up(verdict) and self._do_add_up_where_counted(joined):
                    self._proven.do_counts_matter = True
                    if self.has_its_count():
                        return
                    self._proven.trust_counts()
                self._warn(verdict)
                return
        verdict, check = self._look_at(own)
        if not self._warn(verdict) and joined is None and is_mixed:
            self._refuse_other_kinds(check)

    def _own(self) -> FewRows:
        return FewRows(self._proven.rows if self._batch is None else self._batch, self._checked.samples)

    def _joined(self, own: FewRows, is_turned: bool = False) -> FewRows:
        """With rows of a checked batch."""
        others = own if self._batch is None else FewRows(self._proven.rows, self._checked.samples)
        return others.by_turns(own) if is_turned else own.by_turns(others)

    def has_its_count(self) -> bool:
        """Whether the batch has what it counts: then rows beside it add to that. Called on all ranks."""
        checked = self._checked
        checked.sync.reshard()
        try:
            own = self._trial.together(self._own)
            rows = self._trial.together(lambda: own.beside(FewRows(self._proven.rows, checked.samples)))
        except CannotCheckError:
            return False
        check = check_of(checked, self._trial, checked.accumulation.verdict)
        check.asks_for_counts = True
        verdict = check([rows], may_leave_functions=False)
        return not checked.on_any(verdict.deviation is None) and self._do_add_up(verdict)

    def _do_add_up_where_counted(self, rows: FewRows) -> bool:
        """Whether they add up but for parts that have nothing to count, and count 1."""
        verdict, _ = self._look_at(rows, asks_for_counts=False)
        return verdict.deviation is not None and self._do_add_up(verdict)

    def _look_at(self, rows: FewRows, asks_for_counts: bool = True) -> tuple[Verdict, Check]:
        """What is found in them, the worst of all ranks."""
        return look_in_types(self._trial, partial(self._look_in, rows, asks_for_counts))

    def _look_in(self, rows: FewRows, asks_for_counts: bool, trial: Trial) -> tuple[Verdict, Check]:
        checked, accumulation = self._checked, self._checked.accumulation
        check = check_of(checked, trial, accumulation.verdict)
        check.asks_for_counts = asks_for_counts
        losses_of = None if checked.sync.is_waited_for_in_forward else trial.losses_of
        number, at_once = accumulation.ranks.largest(rows.number, -rows.at_once)
        ways = rows.ways(int(number), int(-at_once), 0, losses_of)
        verdict = check(ways[: int(-checked.largest(-len(ways)))], may_leave_functions=False)
        if checked.on_any(verdict.deviation is None):
            return Verdict(None), check
        return verdict, check

    def _goes_by_order(self, own: FewRows) -> bool:
        """Whether the loss of both batches is another one where the rows of the other come first: they are of different kinds."""
        if self._checked.sync.is_waited_for_in_forward:
            return False
        try:
            turned = self._trial.together(lambda: self._joined(own, is_turned=True))
            one, other = self._trial.losses_of([self._joined(own).together, turned.together])
        except CannotCheckError:
            return True
        return self._checked.largest(relative([one], other)) > self._trial.tolerance

    def _do_add_up(self, verdict: Verdict) -> bool:
        return not self._checked.on_any(not verdict.adds_up)

    def _warn(self, verdict: Verdict) -> bool:
        """Warn, if it does not add up on any rank. Returns whether."""
        is_off = not self._do_add_up(verdict)
        if is_off:
            self._checked.accumulation.warn_once(advice.of_later(verdict))
        return is_off

    def _refuse_other_kinds(self, check: Check) -> None:
        """Tasks whose rows cannot be joined: a window has no full batch that says which count is meant."""
        known, now = self._proven.kinds, check.kinds if self._batch is not None else self._proven.kinds
        is_other = bool(known and now) and all(kind.is_of_samples for kind in known) != all(kind.is_of_samples for kind in now)
        if self._checked.on_any(is_other):
            raise ArgumentError(advice.of_kinds([*known, *now]))
