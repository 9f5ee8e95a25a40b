"""The check of the first batches: whether weighted parts add up on the user's own module, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_accum import mends
from lightning_accum.counting import copied
from lightning_accum.decide import Deciding, Found
from lightning_accum.errors import DoesNotAddUpError
from lightning_accum.left_behind import leaves_nothing, warn_of_state
from lightning_accum.looks import (
    Checked,
    Rows,
    agree_on_rows,
    has_several_terms,
    look_in_training,
    looks_at,
    may_be_misread,
    parts_to_share,
)
from lightning_accum.prove import measured_of, raised_in
from lightning_accum.splitting.few_rows import FewRows, SplitRows
from lightning_accum.trial import Trial
from lightning_accum.verdict import MOST_ROWS, CannotCheckError, GathersError, UnsuitableRowsError, Verdict
from lightning_accum.weighing import advice
from lightning_accum.weighing.counts import count_samples
from lightning_accum.weighing.terms import SUM
from lightning_accum.whole.row_proof import perturbed

MOST_BATCHES = 8  # the check ends after this many loader batches, even with few rows
_OF_ROUNDING = 1e-9  # the size of a gradient or loss that is 0 up to rounding, relative to its size with other parameters


def check_first_batch(checked: Checked, batch: Any, transferred: Callable[[Any], Any] | None = None) -> None:
    """Check a loader batch (None on a rank that has none), until enough rows were checked on all ranks.

    A batch with few rows is checked together with the next ones of its window, ``transferred`` to the device, and with rows of
    earlier windows; or alone, if they cannot be joined or do not add up together. Called on all ranks.

    Raises:
        DoesNotAddUpError: the weighted parts do not add up to the batch; or a loss gathers the rows of all ranks in a window of
            several loader batches.
    """
    accumulation, before = checked.accumulation, checked.accumulation.check.verdict
    accumulation.may_count_first = checked.may_count_first
    is_held, is_drawn = checked.sync.is_waited_for_in_forward, _rest_of_window(checked) is not None
    if accumulation.position and (is_held or (is_drawn and not checked.on_any(before is None or not before.is_suitable))):
        return  # checked with the first batch of the window, or the engine holds gradients until the window ends
    if is_held and before is not None and before.looked_at > 1:
        return _end(checked)  # later batches may have no loss on one rank, and the others would wait for it
    batches = [batch] if transferred is None else _with_the_next(checked, batch, transferred)
    accumulation.check.use(len(batches))
    try:
        check_batch(checked, [own for own in batches if own is not None])
    except (CannotCheckError, DoesNotAddUpError) as reason:
        is_unsuitable = checked.on_any(isinstance(reason, UnsuitableRowsError))  # on the other ranks the reason is another
        if len(batches) > 1 and not is_unsuitable:
            accumulation.check.use(-len(batches))
            for own in batches:
                if accumulation.check.batches_left:
                    check_first_batch(checked, own)
            return
        if isinstance(reason, DoesNotAddUpError):
            raise
        is_one = checked.is_one_micro_batch and accumulation.world_size > 1
        if accumulation.policy.weight == "auto" and is_one and accumulation.window.counted is None:
            accumulation.count_first()  # this costs nothing if a window is one micro-batch on each rank
        known = accumulation.check.is_checked
        accumulation.check.find(before if known else replace(Verdict.unknown(reason), is_suitable=not is_unsuitable))
        if not known and not (accumulation.check.batches_left and is_unsuitable):
            accumulation.check.end()
            if not isinstance(reason, GathersError):  # such a loss sees all rows of its window
                accumulation.warn_once(advice.of_unchecked(Verdict.unknown(reason), checked.is_manual))
            can_count = accumulation.policy.weight == "auto" and accumulation.window.counted is None and checked.may_count_first
            if can_count and has_several_terms(checked, batch):
                accumulation.count_first()


def _rest_of_window(checked: Checked) -> Callable[[], Iterator[tuple[Any, bool]]] | None:
    """Draws the other loader batches of the window; None for a window of tokens, which may end with any batch."""
    accumulation = checked.accumulation
    return None if accumulation.policy.ends_by_tokens else accumulation.rest_of_window


def _with_the_next(checked: Checked, batch: Any, transferred: Callable[[Any], Any]) -> list[Any]:
    """A loader batch and the next ones of its window, until they have enough rows on all ranks."""
    accumulation, batches = checked.accumulation, [batch]
    ahead = iter(()) if (draw := _rest_of_window(checked)) is None else draw()

    def rows() -> int:
        return sum(0 if own is None else count_samples(own) or 1 for own in batches)

    while len(batches) < accumulation.check.batches_left and checked.on_any(rows() < MOST_ROWS) and (drawn := next(ahead, None)):
        batches.append(None if drawn[1] else drawn[0])
    with checked.trained.snapshotter.take(watches_parameters=False):  # hooks of the transfer may draw random numbers
        return [batch, *(None if own is None else transferred(copied(own)) for own in batches[1:])]


def check_batch(checked: Checked, batches: Sequence[Any], is_later: bool = False) -> None:
    """Check a loader batch. A part that fails as rows is checked as shared; if rows may be misread, rows of the dataset are."""
    rows, splitting = agree_on_rows(checked, batches), checked.accumulation.splitting
    try:
        Check(checked, rows, is_later).run()
    except (CannotCheckError, DoesNotAddUpError) as error:
        for paths in parts_to_share(checked, rows, error):
            with suppress(CannotCheckError, DoesNotAddUpError):
                Check(checked, agree_on_rows(checked, batches, paths), is_later).run()
                if splitting is not None and checked.accumulation.check.is_checked:
                    return splitting.share(paths)
        with suppress(CannotCheckError):
            if may_be_misread(checked, rows, error):
                return Check(checked, agree_on_rows(checked, batches, of_dataset=True), is_later).run()
        raise


def does_dataset_add_up(checked: Checked, batches: Sequence[Any]) -> bool:
    """Whether separate batches that the loader makes of samples add up to a batch of all of them. Called on all ranks.

    Raises:
        CannotCheckError: the loader cannot make such batches, or they give no answer.
    """
    rows = agree_on_rows(checked, batches, of_dataset=True)
    return Check(checked, rows._replace(number=min(4, rows.number)), is_later=True).find().adds_up


def _end(checked: Checked) -> None:
    """End the check after enough rows, and report results found after training began."""
    accumulation = checked.accumulation
    if accumulation.position or accumulation.closed is not None:
        checked.inform(f"loss of the first loader batches: {accumulation.check.verdict}")
    accumulation.check.end()


def _has_layers_of_zeros(checked: Checked) -> bool:
    """Whether a layer has only zero weights, whose outputs hide dependences. Called on all ranks."""
    matrices = [parameter for parameter in checked.module.parameters() if parameter.dim() > 1 and parameter.requires_grad]
    return not checked.sync.is_waited_for_in_forward and checked.on_any(not all(bool(matrix.any()) for matrix in matrices))


def _takes_rows_of_other_ranks(checked: Checked, trial: Trial, rows: Rows) -> bool:
    """Find out whether the loss gathers the rows of all ranks, an error in windows of several loader batches. On all ranks."""
    accumulation = checked.accumulation
    if accumulation.ranks.world_size == 1:
        return False
    assert isinstance(rows.found, FewRows)
    try:
        own, other = rows.found.two(rows.number)
        parity = accumulation.ranks.rank % 2
        differs = [trial.differ(own, own if parity == still else other) and parity == still for still in (0, 1)]
        is_joint = checked.on_any(any(differs))
    except CannotCheckError as problem:
        if not checked.on_any(isinstance(problem, UnsuitableRowsError)):  # other rows may give an answer
            accumulation.check.end()
        raise
    if is_joint:
        accumulation.check.find(Verdict(None, seen="the loss gathers the rows of all ranks"))
        accumulation.check.end(has_joint_loss=True)
        if accumulation.boundary.size != 1:
            raise DoesNotAddUpError(advice.OF_SEVERAL_BATCHES)
    return is_joint


class Check:
    """Checks one loader batch, on all ranks together, and restores the module (``Trial.held``)."""

    def __init__(self, checked: Checked, rows: Rows, is_later: bool = False) -> None:
        self._checked, self._accumulation, self._rows, self._is_later = checked, checked.accumulation, rows, is_later
        self._trial, self._deciding, self._leaves_nothing = checked.trial(), Deciding(checked, rows), False
        self._before = self._accumulation.check.verdict if self._accumulation.check.is_checked else None  # in earlier rows

    def run(self) -> None:
        """Find the weights with which the parts add up, and have windows use them.

        Raises:
            CannotCheckError: the rows could not be checked. Raised on all ranks.
            DoesNotAddUpError: the parts do not add up on some rank.
        """
        checked, accumulation, rows, before = self._checked, self._accumulation, self._rows, self._before
        if accumulation.row_wise is not None and before is None and _takes_rows_of_other_ranks(checked, self._trial, rows):
            return  # parts of a batch prove nothing
        found = self.find()
        may_hide = before is None and (found.are_alike or _has_layers_of_zeros(checked))
        if may_hide if found.adds_up else not checked.sync.is_waited_for_in_forward:
            found = self._perturbed(found)
        if not found.adds_up and rows.are_single:
            if accumulation.check.verdict is None or accumulation.check.verdict.seen != advice.OF_ONE_ROW:
                accumulation.warn_once(advice.of_one_row(found.verdict, accumulation.policy.weight))
            accumulation.check.find(Verdict(None, seen=advice.OF_ONE_ROW))
            return
        first = rows.found if isinstance(rows.found, FewRows) and not self._is_later else None
        if not found.adds_up and first is not None and checked.on_any(rows.number > first.of_batch):
            # batches of different tasks may add up only separately
            alone = rows._replace(found=first.alone(), number=int(checked.largest(first.of_batch)))
            joined, found = found, self.find(alone)
            if found.adds_up:
                accumulation.warn_once(advice.of_joined(joined.verdict))
                self._rows = rows = alone
        if not found.adds_up and checked.on_any(rows.found.is_guess):
            raise CannotCheckError("its rows cannot be identified (split=function, which cuts a batch, shows them)")
        if not found.adds_up:
            raise DoesNotAddUpError(mends.of_losses(checked, rows, found.verdict, found.terms, found.mend))
        self._adopt(found)

    def _adopt(self, found: Found) -> None:
        checked, accumulation, rows, before = self._checked, self._accumulation, self._rows, self._before
        known, own = accumulation.weigher.known, found.known
        begun = {key: term.default_mode for key, term in found.terms.items() if accumulation.window.has_weight}
        now = known.joined(own, begun)
        now = now.telling_heads(checked.module.parameters()) if own.places else now  # a wider trial has its own parameters
        accumulation.weigher.learn(now)
        is_one, before_this = not own.counts_first and len(found.terms) == 1, accumulation.window.constant
        constants = {key: number / next(iter(now.units.get(key, {}).values()), 1.0) for key, number in found.constants.items()}
        accumulation.window.constant = next(iter(constants.values()), before_this) if is_one else None  # the rows may not show it
        if own.counts_first and not known.counts_first:
            if not self._is_later and checked.on_any(accumulation.window.has_weight):
                accumulation.counted_next = [*own.modes]  # this window has begun with one weight
            else:
                accumulation.count_first([*own.modes])
        if accumulation.window.counted is not None:
            accumulation.window.counted.constants |= constants
        # empty if only the weights show that there are several terms
        counted = set() if accumulation.window.counted is None else {*accumulation.window.counted.keys}
        accumulation.stops_counting = not own.counts_first and bool(counted) and counted <= own.modes.keys()
        is_open = checked.on_any(found.verdict.deviation is None)
        earlier, verdict = before or Verdict(0.0), found.verdict
        looked_at = earlier.looked_at + (MOST_ROWS if accumulation.policy.split is not None else min(rows.fewest, MOST_ROWS))
        deviation = max(checked.largest(verdict.deviation or 0.0), earlier.deviation or 0.0)
        of_all = verdict if verdict.deviation is None else Verdict(None, seen="another rank could not be")
        verdict = (before or of_all) if is_open else replace(verdict, looked_at=looked_at, deviation=deviation)
        accumulation.check.find(verdict, None if self._is_later else rows.found.kept)
        if found.is_loss_off and accumulation.policy.log and not checked.is_manual:
            accumulation.warn_once(advice.OF_LOGGED_LOSS)
        if (accumulation.splitting is not None or checked.is_window_long) and not (is_open or self._leaves_nothing):
            warn_of_state(checked, self._trial, rows.found)
        if self._is_later:
            if any({known.modes.get(key, mode), mode} > {SUM} for key, mode in own.modes.items()):
                accumulation.warn_once(advice.OF_ANOTHER_WEIGHT)
            return
        if rows.found.kept is not None and not is_open:
            accumulation.later.learn(rows.found.kept)
        lacks_terms = checked.is_manual and not own.words.keys() <= own.units.keys()  # nothing checks later windows
        if not accumulation.check.batches_left or not checked.on_any(verdict.may_try_again or lacks_terms):
            if verdict.deviation is None:
                accumulation.warn_once(advice.of_unchecked(verdict, checked.is_manual))
            _end(checked)

    # --- measuring ------------------------------------------------------------------------------------------------------

    def find(self, alone: Rows | None = None) -> Found:
        """Find the weights with which the parts of the rows, or of the rows ``alone``, add up to the whole."""
        rows = alone or self._rows
        return self._trial.in_widest_type(
            lambda trial: self._find_in(trial, rows),
            rows.found.whole if isinstance(rows.found, SplitRows) else partial(rows.found.take, range(min(rows.number, MOST_ROWS))),
            lambda found: not self._checked.on_any(found.verdict.deviation is None),
        )

    def _perturbed(self, found: Found) -> Found:
        """The result with other parameters, if zeros hide a dependence or all is 0 up to rounding; else ``found``."""
        with suppress(CannotCheckError), perturbed(self._checked.module):
            again = self.find()
            if found.adds_up:
                return again if not again.adds_up or found.verdict.deviation is None else found
            largest = self._checked.largest
            are_0 = [largest(then) <= _OF_ROUNDING * largest(now) for then, now in zip(found.sizes, again.sizes, strict=True)]
            if again.adds_up and any(are_0):
                return again
        return found

    def _find_in(self, trial: Trial, rows: Rows) -> Found:
        names, checked = self._accumulation.weigher.known.names, self._checked
        with trial.held():
            parameters = [*checked.module.parameters()]  # a wider trial has its own
            names = names.telling_heads(parameters) if names.places else names
            looks = looks_at(checked, trial, rows, names)
            if checked.on_any(len({measured.function for measured in measured_of(looks)}) > 1):  # a single row may look like one
                names = names._replace(takes_functions=False)
                looks = looks_at(checked, trial, rows, names)
            trial.refuse_random(looks[0].whole.batch)
            self._accumulation.written |= {name for name, own in checked.module.named_parameters() if own in trial.mode.written}
            self._leaves_nothing = leaves_nothing(checked, trial, looks[0].whole)
            found = self._deciding.decide(looks, names, trial)
            if found.adds_up and not checked.on_any(any(key & 255 for key in found.terms)):  # one term may be absent
                return found
            if not checked.sync.is_waited_for_in_forward and not names.places:  # FSDP replaces them in forward
                of_heads = found.known.names.telling_heads(parameters)
                if (own := self._deciding.decide(looks_at(checked, trial, rows, of_heads), of_heads, trial)).adds_up:
                    return own
            if found.adds_up:
                return found
            with suppress(CannotCheckError):
                look, in_training = look_in_training(checked, trial, rows, found.known.names)
                raisable = [one._replace(may_be_raised=True) for one in (*looks, look)]
                own = self._deciding.decide(raisable, found.known.names, trial)
                modes, parts = own.known.modes, [part for one in looks for part in one.parts]
                is_read = own.terms.keys() <= modes.keys() and not raised_in(in_training, modes)
                if own.adds_up and not checked.on_any(not is_read):
                    if raised := raised_in(parts, modes):  # else rows in the size of training show more
                        self._accumulation.warn_once(advice.OF_RAISED_COUNTS)
                    return own._replace(known=own.known._replace(raised=raised))
            if self._accumulation.closed is None and not self._accumulation.position:
                trial.keep_state(looks[0].whole.batch)  # a first forward may initialise the module from its rows
                begun = found.known.names._replace(aliases=names.aliases)
                looks = looks_at(checked, trial, rows, begun)
                if (again := self._deciding.decide(looks, begun, trial)).adds_up:
                    return again
            if not (self._accumulation.splitting or checked.is_window_long) and checked.on_any(trial.mode.has_waited):
                raise GathersError("training_step gathers from other ranks")
            first = looks[0].whole
            same = trial.measure(first.batch, names, first.rows, first.total)
            if checked.on_any(abs(same.loss - first.loss) > trial.tolerance * abs(first.loss)):
                raise CannotCheckError("training_step returns a different loss for the same rows each time")
            return found
