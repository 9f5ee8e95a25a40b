"""The rows that the check runs: some rows of the first loader batches, together and in parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_accum.errors import is_out_of_memory
from lightning_accum.prove import Look, Measured
from lightning_accum.splitting.few_rows import FewRows, SplitRows, are_counted, split_lists, split_sources
from lightning_accum.step import Trained
from lightning_accum.sync.base import GradientSync
from lightning_accum.trial import Trial
from lightning_accum.verdict import MOST_ROWS, CannotCheckError, UnsuitableRowsError
from lightning_accum.weighing.known import Known
from lightning_accum.weighing.terms import Term

if TYPE_CHECKING:
    from lightning_accum.accumulation import Accumulation


@dataclass(frozen=True)
class Checked:
    """The module and step to check."""

    trained: Trained  # the module, its snapshots and its gradients
    step: Callable[[Any], Any]  # runs a batch, and logs nothing
    accumulation: Accumulation  # takes the verdict
    samples: Collection[int]  # the sizes of the loader's batches, in samples; empty if unknown
    is_window_long: bool  # a window may have several loader batches
    inform: Callable[[str], None]
    may_count_first: bool = False  # the terms of a window can be counted before it runs
    is_manual: bool = False  # the module uses manual optimization; the loss belongs to one backward call
    next_step: Callable[[Any], Any] | None = None  # runs a batch with the batch_idx of a later loader batch
    of_dataset: Callable[[], FewRows] | None = None  # draws rows of the dataset, if a loader batch shows none

    @property
    def module(self) -> nn.Module:
        """The module in training."""
        return self.trained.module

    @property
    def sync(self) -> GradientSync:
        """Decides when its gradients are reduced over the ranks."""
        return self.trained.sync

    @property
    def is_one_micro_batch(self) -> bool:
        """Whether a window is one micro-batch on each rank, so that ranks exchange the weights of its terms."""
        return not (self.is_manual or self.is_window_long or self.accumulation.splitting is not None)

    @property
    def may_count_terms(self) -> bool:
        """Each term of a loss can have its own weight."""
        return self.may_count_first or self.is_one_micro_batch

    def samples_of(self, batch: Any) -> Collection[int]:
        """The sizes that a batch of the loader may have, in samples; empty for rows of several that were checked."""
        return () if batch is self.accumulation.check.rows else self.samples

    def trial(self) -> Trial:
        """A trial of the step, which restores everything."""
        row_wise = self.accumulation.row_wise

        def step(batch: Any) -> Any:  # calls of submodules are nodes, as in training
            with nullcontext() if row_wise is None else replace(row_wise, size=None, proofs_left=0).step():
                return self.step(batch)

        return Trial(self.trained, step, self.sync, self.largest)

    def largest(self, number: float) -> float:
        """The largest of a number of each rank. Called on all ranks."""
        return self.accumulation.ranks.largest(number)[0]

    def on_any(self, claim: bool) -> bool:
        """Whether the claim holds on any rank. Called on all ranks."""
        return self.largest(float(claim)) > 0

    def of_all(self, value: Any) -> list[Any]:
        """The value of each rank. Called on all ranks."""
        return self.accumulation.ranks.gather(value)


class Rows(NamedTuple):
    """The rows of this rank. All ranks check equally many rows, since they may wait for each other in each step."""

    found: FewRows | SplitRows  # the rows of this rank, after the rows of the loader batch before
    fewest: int  # rows of the loader batch, on the rank that has the fewest
    number: int  # rows that are checked, on the rank that has the most
    size: int  # rows of a micro-batch, which may be a whole loader batch
    are_single: bool  # each loader batch is one row


def agree_on_rows(checked: Checked, batches: Sequence[Any], shared: Sequence[str] = (), of_dataset: bool = False) -> Rows:
    """The rows that are checked, of the loader batch (empty if this rank has none) or ``of_dataset``. Called on all ranks.

    ``shared`` are paths of shared parts that have one entry a row by chance.
    """
    accumulation, sync = checked.accumulation, checked.sync
    policy = accumulation.policy
    size = policy.micro_batch if isinstance(policy.micro_batch, int) else None
    if size is None and (plan := accumulation.plan) is not None and plan.layout is not None:
        size = plan.pieces[0].size  # the micro-batch of the longest rows
    found: FewRows | SplitRows | None = None
    reason: CannotCheckError = UnsuitableRowsError("a rank has no batch with enough rows")
    try:
        found = _rows_of(checked, batches, size, shared, of_dataset)
    except CannotCheckError as error:
        reason = error
    of_batch, number, at_once = (0, 0, 0) if found is None else (found.of_batch, found.number, found.at_once)
    numbers = accumulation.ranks.largest(-of_batch, number, -(size or math.inf), at_once)
    fewest, number, at_once = -int(numbers[0]), int(numbers[1]), int(numbers[3])
    # a step on single rows is tried only if it can be undone
    if found is None or fewest < (1 if sync.can_forget_forward else 2):
        raise reason
    sync.reshard()
    is_whole = policy.micro_batch is None
    size = at_once if is_whole or numbers[2] == -math.inf else -int(numbers[2])
    return Rows(found, fewest, number, size, is_whole and at_once == 1)


def _rows_of(
    checked: Checked, batches: Sequence[Any], size: int | None, shared: Sequence[str], of_dataset: bool
) -> FewRows | SplitRows | None:
    """The rows of a loader batch; None if there is no batch."""
    accumulation, module = checked.accumulation, checked.module
    if any(map(is_lazy, chain(module.parameters(), module.buffers()))):
        raise UnsuitableRowsError("the first batch initialises lazy layers")
    if not batches or accumulation.is_shadow_batch:
        return None
    if held := checked.trained.snapshotter.iterators():
        names = " and ".join(map(repr, held))
        raise CannotCheckError(f"the module holds an iterator ({names}), whose items cannot be put back")
    if of_dataset and checked.of_dataset is not None:
        return checked.of_dataset()
    if (cut := split_rows(checked, batches[0], size)) is not None:
        return cut
    known = None if accumulation.splitting is None else accumulation.splitting.kinds
    kinds, samples = {**(known or {}), **dict.fromkeys(shared, "shared")}, checked.samples_of(batches[0])
    try:
        found = FewRows(batches, samples, accumulation.check.rows, kinds)
    except CannotCheckError:
        if len(batches) > 1:  # each is checked alone
            raise
        with suppress(CannotCheckError):  # as lists of images and of their targets
            return SplitRows(batches[0], split_lists, size)
        if checked.of_dataset is not None and accumulation.splitting is None:
            with suppress(CannotCheckError):
                return checked.of_dataset()
        with suppress(CannotCheckError):  # as batches of labeled and of unlabeled samples
            return SplitRows(batches[0], split_sources, size)
        raise
    if accumulation.row_wise is not None and found.of_batch < 2:
        raise UnsuitableRowsError("the first batch has 1 row")
    drawn = _drawn_if_misread(checked, found) if found.may_be_misread(samples) else None
    if drawn is not None and accumulation.splitting is not None:
        raise CannotCheckError("a loader batch is not split by its samples")
    return drawn or found


def split_rows(checked: Checked, batch: Any, size: int | None = None) -> SplitRows | None:
    """The rows of a batch from the user's ``split``; None without it."""
    split = checked.accumulation.policy.split
    return None if split is None else SplitRows(batch, split, size)


def _drawn_if_misread(checked: Checked, found: FewRows | SplitRows) -> FewRows | None:
    """Rows drawn from the dataset, if its samples show that the rows of a batch were misread, or that the batch holds their number,
    which parts of one batch would share."""
    with suppress(CannotCheckError):
        is_seen = checked.accumulation.splitting is not None and not checked.is_window_long  # with shared parts of the batch itself
        if not is_seen and checked.of_dataset is not None and isinstance(found, FewRows):
            two, four = (drawn := checked.of_dataset()).take([0, 1]), drawn.take([0, 1, 2, 3])
            return drawn if found.misread(two) or are_counted(two, four) else None
    return None


def may_be_misread(checked: Checked, rows: Rows, error: Exception) -> bool:
    """Whether the rows of a window's batch may be misread: a step fails on them, or they do not add up. Called on all ranks."""
    can_draw = checked.accumulation.splitting is None and checked.of_dataset is not None and rows.found.kept is not None
    is_shown = can_draw and (type(error) is CannotCheckError or _drawn_if_misread(checked, rows.found) is not None)
    return not checked.on_any(not is_shown)


def parts_to_share(checked: Checked, rows: Rows, error: Exception) -> list[list[str]]:
    """Parts of a split batch that all rows may share, if they did not add up as rows: all, then each. Called on all ranks."""
    accumulation = checked.accumulation
    is_split = accumulation.splitting is not None and not checked.is_window_long
    if not is_split or checked.on_any(isinstance(error, UnsuitableRowsError)):
        return []
    two: Any = None
    with suppress(CannotCheckError):
        two = None if checked.of_dataset is None else checked.of_dataset().take([0, 1])
    first, *others = checked.of_all(rows.found.may_be_shared(two))
    found = [path for path, value in first.items() if all(path in other and _are_equal(other[path], value) for other in others)]
    return [found, *([path] for path in found)] if len(found) != 1 else [found]


def _are_equal(one: Any, other: Any) -> bool:
    is_tensor = isinstance(one, Tensor) and isinstance(other, Tensor)
    return torch.equal(one, other) if is_tensor else type(one) is type(other) and bool(one == other)


def looks_at(checked: Checked, trial: Trial, rows: Rows, known: Known) -> list[Look]:
    """Run the rows together and in parts. Called on all ranks."""
    found = rows.found
    if isinstance(found, SplitRows):
        whole = trial.measure(found.whole, known, range(found.number))
        return [Look(whole, [trial.measure(part, known, [place], is_part=True) for place, part in enumerate(found.parts)])]
    in_parts = _InParts(checked, trial, found, known)
    number = max(2, min(rows.number, MOST_ROWS, max(4, rows.size)))
    looks = _as_memory_allows(checked, number, 2, partial(in_parts.few, most=min(rows.number, MOST_ROWS)))
    of_training = int(-checked.largest(-min(found.of_batch, rows.size)))  # few rows may hide a dependence on the batch size
    looks += _as_memory_allows(checked, of_training, 1, lambda size: in_parts.halves(size) if size > number else [])
    looks += in_parts.of_other_draws(looks[0].whole)
    # in training, a micro-batch with an infinite loss is an error
    return [look for look in looks if not checked.on_any(any(math.isinf(part.loss) for part in look.parts))] or looks


def look_in_training(checked: Checked, trial: Trial, rows: Rows, names: Known) -> tuple[Look, Sequence[Measured]]:
    """A look at two micro-batches of training size, or at one and its halves; and the micro-batches. Called on all ranks."""
    found, size = rows.found, min(rows.found.of_batch, 2 * rows.size)
    if isinstance(found, SplitRows):
        raise CannotCheckError("a function cuts micro-batches")
    in_parts = _InParts(checked, trial, found if found.kept is None else found.alone(), names)
    look = in_parts.look(range(size), [range(size // 2), range(size // 2, size)], size)
    return look, [look.whole] if size <= rows.size else look.parts


def _as_memory_allows(checked: Checked, size: int, least: int, look: Callable[[int], list[Look]]) -> list[Look]:
    """The result of ``look`` for ``number`` rows, or for half as many if memory runs out, since ``"auto"`` starts with a whole
    batch."""
    while True:
        try:
            return look(size)
        except CannotCheckError as error:
            if size // 2 < least or not checked.on_any(is_out_of_memory(error.__cause__)):
                raise
            size //= 2


@dataclass(frozen=True)
class _InParts:
    """Runs rows together and in parts. Called on all ranks. If a ``total`` is given, random numbers belong to rows."""

    checked: Checked
    trial: Trial
    found: FewRows
    known: Known

    def run(self, rows: Sequence[int], total: int = 0, is_part: bool = False) -> Measured:
        return self.trial.measure(partial(self.found.take, rows), self.known, rows, total, is_part)

    def look(self, whole: Measured | Sequence[int], parts: Sequence[Sequence[int]], total: int = 0) -> Look:
        measured = whole if isinstance(whole, Measured) else self.run(whole, total)
        return Look(measured, [self.run(part, total, is_part=True) for part in parts])

    def few(self, size: int, most: int) -> list[Look]:
        """Looks at the first rows in several partitions; then at the rows up to ``most``, in groups that overlap by a row."""
        looks = self.first(size, size)
        if self.checked.on_any(self.trial.mode.is_unlike):  # draws do not belong to rows: give all rows the same numbers
            looks = self.first(size)
        others = [range(begin, min(begin + size, most)) for begin in range(size - 1, most - 1, size - 1)]
        if len(looks[0].parts[0].rows) > 1:  # the step takes no single row
            return looks + [self.look(self.run(rows, is_part=True), [rows[:2], rows[2:]]) for rows in others if len(rows) > 3]
        alone = {row: self.run([row], is_part=True) for row in range(size - 1, most) if others}
        return looks + [Look(self.run(rows, is_part=True), [alone[row] for row in rows]) for rows in others]

    def halves(self, size: int) -> list[Look]:
        """A micro-batch of training size, and its halves."""
        looks = [self.look(range(size), [range(size // 2), range(size // 2, size)], size)]
        return [] if self.checked.on_any(self.trial.mode.is_unlike) else looks

    def of_other_draws(self, whole: Measured) -> list[Look]:
        """Looks at the rows with other numbers that all rows share, if the loss depends on these: a branch may depend on them."""
        checked, trial = self.checked, self.trial
        if not whole.total or checked.sync.is_waited_for_in_forward or not checked.on_any(trial.mode.draws_shared):
            return []
        begin, first, looks = 8 * checked.accumulation.clock.optimizer_steps + 1, trial.loss_of(whole.batch), list[Look]()
        for seed in range(begin, begin + 8):
            trial.draw_anew(seed)
            if checked.on_any(trial.loss_of(whole.batch, seed) != first):
                looks += self.halves(whole.total)
                trial.refuse_random(whole.batch)
            if len(looks) > 1:
                break
        trial.draw_anew(0)
        return looks

    def first(self, size: int, total: int = 0) -> list[Look]:
        """The first rows: one by one, by small and large losses, one row repeated, by loader batch, and some without labels."""
        checked, found, base = self.checked, self.found, [*range(size)]
        whole = self.run(base, total)
        if checked.sync.is_waited_for_in_forward:  # each mode runs the parts again
            return [self.look(whole, [[0], base[1:]], total)]
        try:
            looks = [self.look(whole, [[row] for row in base], total)]
            alone = looks[0].parts
            finite = [row for row, one in zip(base, alone, strict=True) if not math.isinf(one.loss)]
            if checked.on_any(len(finite) < size):  # a sum over some elements is divided by 0; a mean over none is NaN
                if checked.on_any(len(finite) < 2):
                    raise UnsuitableRowsError("single rows have an infinite loss")
                order = [*finite, *(row for row in base if row not in finite)]
                looks.append(self.look(whole, [sorted(order[::2]), sorted(order[1::2])], total))
            if checked.on_any(not any(one.terms for one in alone)):
                raise UnsuitableRowsError("single rows have no loss")
        except CannotCheckError:
            if size < 4:
                raise
            return [self.look(whole, [base[: size // 2], base[size // 2 :]], total)]  # a step may not take a single row
        if size > 2:  # detects losses that use a statistic of the batch
            few = sorted(sorted(base, key=lambda row: alone[row].loss)[: max(2, size // 2 - 1)])
            looks.append(self.look(whole, [few, [row for row in base if row not in few]], total))
        times = min(size, 4)  # detects losses that use frequencies in the batch
        # a row that has a loss, and as many of its terms as possible
        told = max(base, key=lambda row: (math.isfinite(alone[row].loss), sum(t.losses != 0 for t in alone[row].terms.values())))
        looks.append(Look(self.run([told] * times, total), [alone[told]] * times))
        if found.of_others:
            kinds = [[row for row in base if (row in found.of_others) == is_other] for is_other in (False, True)]
            looks.append(self.look(whole, [kind for kind in kinds if kind], total))
        if size > 2 and checked.on_any(found.emptied(base, (0, 1)) is not None):
            emptied, rest = (partial(self._emptied, rows) for rows in (base, [0, 1]))
            with suppress(CannotCheckError):  # a step may not take rows without labels
                of_all = self.trial.measure(emptied, self.known, base, total)
                looks.append(Look(of_all, [self.trial.measure(rest, self.known, [0, 1], total, is_part=True), *alone[2:]]))
        return looks

    def _emptied(self, rows: Sequence[int]) -> Any:
        emptied = self.found.emptied(rows, (0, 1))
        return self.found.take(rows) if emptied is None else emptied


def has_several_terms(checked: Checked, batch: Any) -> bool:
    """Whether the loss of a loader batch has several terms, if its rows cannot be checked. Called on all ranks."""
    if checked.on_any(batch is None or checked.accumulation.is_shadow_batch):
        return False
    trial, terms = checked.trial(), dict[int, Term]()
    with suppress(CannotCheckError), trial.held():
        terms = trial.measure(lambda: deepcopy(batch), Known(), ()).terms
    return checked.on_any(sum(not term.is_penalty for term in terms.values()) > 1)
