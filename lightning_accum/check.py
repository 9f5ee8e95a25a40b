"""The check of the first batches: before the first step, whether what a window does adds up on the user's own module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from lightning_accum import mends
from lightning_accum.errors import DoesNotAddUpError
from lightning_accum.exact import rounding_of_gradients
from lightning_accum.left_behind import leaves_nothing, warn_of_state
from lightning_accum.looks import (
    Checked,
    Rows,
    agree_on_rows,
    has_layers_of_zeros,
    has_several_terms,
    looks_at,
    may_be_misread,
    parts_to_share,
    takes_rows_of_other_ranks,
)
from lightning_accum.prove import (
    ALL,
    Fit,
    Look,
    aliases,
    fit_of,
    goes_by_rows,
    keys_of,
    looped,
    measured_of,
    merged,
    modes_to_try,
    ratios,
)
from lightning_accum.splitting.few_rows import FewRows
from lightning_accum.trial import Trial
from lightning_accum.verdict import MOST_ROWS, CannotCheckError, GathersError, UnsuitableRowsError, Verdict
from lightning_accum.weighing import advice
from lightning_accum.weighing.counts import counts_of, name_of
from lightning_accum.weighing.terms import ONCE, SUM, Mode, Term
from lightning_accum.weighing.weight import Known, words_of
from lightning_accum.whole.row_proof import moved

MOST_BATCHES = 8  # loader batches that are looked at until there were enough rows


def check_first_batch(checked: Checked, batches: Sequence[Any]) -> None:
    """Check a loader batch. Called on all ranks at each loader batch, until enough rows were checked on all of them.

    If loader batches have few rows, several are checked, each together with the rows of the one before it.

    Args:
        checked: what is checked.
        batches: the loader batch; empty if this rank has none.

    Raises:
        DoesNotAddUpError: the weighted parts do not sum to the batch; or a loss takes rows of all ranks in a long window.
    """
    accumulation, before = checked.accumulation, checked.accumulation.verdict
    accumulation.may_count_first = checked.may_count_first
    if checked.sync.is_waited_for_in_forward and accumulation.position:
        return  # the engine keeps gradients of its own until the window ends
    if checked.sync.is_waited_for_in_forward and before is not None and before.looked_at > 1:
        return _end(checked)  # later batches may have no loss on one rank, and the others would wait for it
    accumulation.checks_left -= 1
    try:
        _check(checked, batches)
    except CannotCheckError as reason:
        known = before is not None and before.deviation is not None
        is_one = checked.is_one_micro_batch and accumulation.world_size > 1
        if accumulation.policy.weight == "auto" and is_one and accumulation.window.counted is None:
            accumulation.count_first()  # it costs nothing if a window is one micro-batch of each rank
        accumulation.verdict = before if known else Verdict.unknown(reason)
        if not known and not (accumulation.checks_left and checked.on_any(isinstance(reason, UnsuitableRowsError))):
            accumulation.checks_left = 0
            if not isinstance(reason, GathersError):  # a loss of all rows of its window, which it sees
                accumulation.warn_once(advice.of_unchecked(Verdict.unknown(reason), checked.is_manual))
            can_count = accumulation.policy.weight == "auto" and accumulation.window.counted is None and checked.may_count_first
            if can_count and has_several_terms(checked, batches):
                accumulation.count_first()


def _check(checked: Checked, batches: Sequence[Any]) -> None:
    """Check a loader batch. A part that breaks as rows is tried as shared; a step that fails, with rows of the dataset."""
    rows, splitting = agree_on_rows(checked, batches), checked.accumulation.splitting
    try:
        Check(checked, rows).run()
    except (CannotCheckError, DoesNotAddUpError) as error:
        for path in parts_to_share(checked, rows, error):
            with suppress(CannotCheckError, DoesNotAddUpError):
                Check(checked, agree_on_rows(checked, batches, [path])).run()
                if splitting is not None and (verdict := checked.accumulation.verdict) and verdict.deviation is not None:
                    return splitting.share(path)
        with suppress(CannotCheckError):
            if may_be_misread(checked, rows, error):
                return Check(checked, agree_on_rows(checked, batches, of_dataset=True)).run()
        raise


def _end(checked: Checked) -> None:
    """Enough rows were checked. Say what became known after training began."""
    if checked.accumulation.checks_left < MOST_BATCHES - 1:
        checked.inform(f"loss of the first loader batches: {checked.accumulation.verdict}")
    checked.accumulation.checks_left = 0


class _Found(NamedTuple):
    """What was found in some rows, on all ranks.

    Attributes:
        verdict: of this rank.
        adds_up: the parts sum to the whole on all ranks.
        known: of the terms, if it adds up.
        constants: by term, the constant in each of its weights that does not add up.
        mend: an argument with which the parts add up, if one was found.
        are_alike: all single rows have the same loss.
        leaves_something: a step changed the module, or the next step has another loss for the same rows.
    """

    verdict: Verdict
    adds_up: bool
    known: Known
    constants: dict[int, float]
    terms: dict[int, Term]
    mend: str | None = None
    are_alike: bool = False
    leaves_something: bool = True


class Check:
    """Checks one loader batch, on all ranks together. It leaves the module as it was (``Trial.held``)."""

    def __init__(self, checked: Checked, rows: Rows, is_later: bool = False) -> None:
        self._checked, self._accumulation, self._rows, self._is_later = checked, checked.accumulation, rows, is_later
        self._trial, self._weight = checked.trial(), checked.accumulation.policy.weight
        known = checked.accumulation.verdict
        self._before = None if known is None or known.deviation is None else known  # in earlier rows

    def run(self) -> None:
        """Find the weights with which the parts add up, and have windows use them.

        Raises:
            CannotCheckError: it could not be checked. On all ranks.
            DoesNotAddUpError: the parts do not add up on some rank.
        """
        checked, accumulation, rows, before = self._checked, self._accumulation, self._rows, self._before
        if accumulation.row_wise is not None and before is None and takes_rows_of_other_ranks(checked, self._trial, rows):
            return  # parts of a batch say nothing
        found = self._find(rows)
        if found.adds_up and before is None and (found.are_alike or has_layers_of_zeros(checked)):
            with suppress(CannotCheckError), moved(checked.module):  # outputs or statistics of 0 may hide a dependence
                again = self._find(rows)
                found = again if not again.adds_up or found.verdict.deviation is None else found
        if not found.adds_up and rows.are_single:
            if accumulation.verdict is None or accumulation.verdict.seen != advice.OF_ONE_ROW:
                accumulation.warn_once(advice.of_one_row(found.verdict, self._weight))
            accumulation.verdict = Verdict(None, seen=advice.OF_ONE_ROW)
            return
        is_first = isinstance(rows.found, FewRows) and not self._is_later
        if not found.adds_up and is_first and checked.on_any(rows.number > rows.found.of_batch):
            # batches of different tasks may add up only by themselves
            alone = rows._replace(found=rows.found.alone(), number=int(checked.largest(rows.found.of_batch)))
            joined, found = found, self._find(alone)
            if found.adds_up:
                accumulation.warn_once(advice.of_joined(joined.verdict))
        if not found.adds_up:
            raise DoesNotAddUpError(mends.of_losses(checked, rows, found.verdict, found.terms, found.mend))
        self._adopt(found)

    def _adopt(self, found: _Found) -> None:
        checked, accumulation, rows, before = self._checked, self._accumulation, self._rows, self._before
        known, own = accumulation.weigher.known, found.known
        begun = {key: term.default_mode for key, term in found.terms.items() if accumulation.window.has_weight}
        now = known.joined(own, begun)
        now = now.telling_heads(checked.module.parameters()) if own.places else now  # a wider trial has other parameters
        accumulation.weigher.learn(now)
        is_one, before_this = not own.counts_first and len(found.terms) == 1, accumulation.window.constant
        accumulation.window.constant = next(iter(found.constants.values()), before_this) if is_one else None  # not all rows show it
        if own.counts_first and not known.counts_first:
            if not self._is_later and checked.on_any(accumulation.window.has_weight):
                accumulation.counted_next = [*own.modes]  # this window has begun with one weight
            else:
                accumulation.count_first([*own.modes])
        if accumulation.window.counted is not None:
            accumulation.window.counted.constants |= found.constants
        counted = accumulation.window.counted_keys  # empty if only their weights showed that they are several
        accumulation.stops_counting = not own.counts_first and bool(counted) and counted <= own.modes.keys()
        is_open = checked.on_any(found.verdict.deviation is None)
        looked_at = MOST_ROWS if accumulation.policy.split is not None else min(rows.fewest, MOST_ROWS)
        looked_at = (0 if is_open else looked_at) + (0 if before is None else before.looked_at)
        deviation = max(checked.largest(found.verdict.deviation or 0.0), 0.0 if before is None else before.deviation or 0.0)
        verdict = replace(found.verdict, looked_at=looked_at, deviation=None if is_open else deviation)
        if is_open:
            is_own = found.verdict.deviation is None
            verdict = before or (found.verdict if is_own else Verdict(None, seen="another rank could not be"))
        accumulation.verdict = verdict
        if self._is_later:
            return
        if rows.found.kept is not None:
            accumulation.checked_rows = rows.found.kept
            if not is_open:
                accumulation.later.learn(rows.found.kept)
        is_cut = accumulation.splitting is not None or checked.is_window_long
        if is_cut and before is None and not is_open and found.leaves_something:
            warn_of_state(checked, self._trial, rows.found)
        if not accumulation.checks_left or not checked.on_any(verdict.may_try_again):
            if verdict.deviation is None:
                accumulation.warn_once(advice.of_unchecked(verdict, checked.is_manual))
            _end(checked)

    # --- measuring ------------------------------------------------------------------------------------------------------

    def _find(self, rows: Rows) -> _Found:
        return self._trial.in_widest_type(
            lambda trial: self._find_in(trial, rows),
            lambda found: not self._checked.on_any(found.verdict.deviation is None),
        )

    def _find_in(self, trial: Trial, rows: Rows) -> _Found:
        names, checked = self._accumulation.weigher.known.names, self._checked
        with trial.held():
            parameters = [*checked.module.parameters()]  # a wider trial has its own
            names = names.telling_heads(parameters) if names.places else names
            looks = looks_at(checked, trial, rows, names)
            functions = {measured.function for measured in measured_of(looks)}
            if checked.on_any(len(functions) > 1):  # a single row may look like one
                names = names._replace(takes_functions=False)
                looks = looks_at(checked, trial, rows, names)
            is_first = not self._is_later and self._before is None
            leaves_something = is_first and not leaves_nothing(checked, trial, looks[0].whole)
            found = self._decide(looks, names, trial)._replace(leaves_something=leaves_something)
            if found.adds_up and not checked.on_any(any(key & 255 for key in found.terms)):  # one of two may be absent
                return found
            if not checked.sync.is_waited_for_in_forward and not names.places:  # FSDP has other parameters in forward
                of_heads = found.known.names.telling_heads(parameters)
                if (own := self._decide(looks_at(checked, trial, rows, of_heads), of_heads, trial)).adds_up:
                    return own._replace(leaves_something=leaves_something)
            if found.adds_up:
                return found
            trial.keep_state(looks[0].whole.batch)  # a first forward may initialise the module from its rows
            begun = found.known.names._replace(aliases=names.aliases)
            if (again := self._decide(looks_at(checked, trial, rows, begun), begun, trial)).adds_up:
                return again
            if not (self._accumulation.splitting or self._checked.is_window_long) and self._checked.on_any(trial.mode.has_waited):
                raise GathersError("training_step gathers from other ranks")
            if self._checked.on_any(trial.draws_others):
                raise CannotCheckError("training_step draws random numbers that are others for each batch")
            first = looks[0].whole
            same = trial.measure(first.batch, names, first.rows, first.total)
            if self._checked.on_any(abs(same.loss - first.loss) > trial.tolerance * abs(first.loss)):
                raise CannotCheckError("training_step gives the same rows another loss each time")
            return found

    # --- deciding -------------------------------------------------------------------------------------------------------

    def _named(self, looks: Sequence[Look], names: Known) -> Known:
        """Give terms that are the same in all losses the same keys, on all ranks."""
        measured = measured_of(looks)
        joined = names.looped.union(*self._checked.of_all(looped(measured)))
        for one in measured:
            one.join(joined)
        renamed = merged(names.aliases, self._checked.of_all(aliases(measured)))
        for one in measured:
            one.rename(renamed)
        return names._replace(looped=joined, aliases=renamed)

    def _decide(self, looks: Sequence[Look], names: Known, trial: Trial) -> _Found:
        """How each term is weighed; the same on all ranks."""
        eps, checked, weight = trial.eps, self._checked, self._weight
        known = self._named(looks, names)
        terms: dict[int, Term] = {}
        for of_rank in checked.of_all(keys_of(looks)):
            for key, term in of_rank.items():
                terms.setdefault(key, term)
        if weight == "auto":
            chosen = {key: self._fit(looks, key, modes_to_try(term), eps) for key, term in terms.items()}
            failed = {key >> 8 for key, fit in chosen.items() if fit.mode is None and not fit.is_open}
            if failed & {key >> 8 for key in terms if key & 255} - known.looped:  # take them as one
                return self._decide(looks, known._replace(looped=known.looped | failed), trial)
            for key, fit in chosen.items():
                if fit.mode is None and not fit.is_open:  # a sum that is the same in each part depends on no rows
                    once = self._fit(looks, key, (ONCE,), eps)
                    is_read = terms[key].is_bent or (once.mode is not None and terms[key].words)
                    adopted_fit = None if is_read else self._adopted(looks, key, eps)
                    chosen[key] = adopted_fit or (fit if once.mode is None else once)
        elif isinstance(weight, tuple):
            of_batch = [key for key, term in terms.items() if not term.is_penalty]
            if len(of_batch) != len(weight):
                number = len(of_batch)
                raise CannotCheckError(f"the loss has {number} terms that depend on the batch, and there are {len(weight)} weights")
            chosen = {key: self._fit(looks, key, (mode,), eps) for key, mode in zip(of_batch, weight, strict=True)}
        else:
            chosen = {ALL: self._fit(looks, ALL, (weight,), eps)}
        wrong = [fit for fit in chosen.values() if fit.mode is None and not fit.is_open]
        worst = max(wrong or [fit for fit in chosen.values() if not fit.is_open], key=lambda fit: fit.deviation.size, default=None)
        is_shown = bool(wrong) or any(fit.deviation.has_evidence and not fit.is_open for fit in chosen.values())
        if not checked.on_any(is_shown) or worst is None:
            raise UnsuitableRowsError("the first rows have no gradient, or do not show whether the loss is a mean or a sum")
        size, tolerance = worst.deviation.size, rounding_of_gradients(eps)
        verdict = Verdict(max(size, 2 * tolerance) if wrong else size, tolerance, worst.deviation.seen, tuple(worst.deviation.rows))
        mend = self._weight_that_adds_up(looks, terms, trial) if wrong else None
        if not wrong and weight == "auto":
            units = {key: self._units(looks, key, fit) for key, fit in chosen.items() if fit.mode is not None}
            (key, fit), *others = chosen.items()
            is_one_mean = not others and fit.mode != SUM and not checked.on_any(looks[0].whole.function is not None)
            if is_one_mean and not checked.sync.is_waited_for_in_forward and (adopted_fit := self._adopted(looks, key, eps)):
                hidden = self._units(looks, key, fit._replace(modes=adopted_fit.modes))  # other rows may show fewer counts
                known = known._replace(hidden={mode: unit for mode, unit in hidden.items() if callable(mode)})
            known = known._replace(words={key: term.words for key, term in terms.items()}, units=units)
            odd = [
                (key, name)
                for one in measured_of(looks)
                for key, term in one.terms.items()
                for name, is_so in term.oddities(next(iter(known.units_of(term)))).items()
                if is_so
            ]
            of_samples = frozenset(key for key, mode in known.modes.items() if goes_by_rows(looks, key, mode))
            known, refused = self._combined(looks, known._replace(seen=frozenset(odd), of_samples=of_samples), terms)
            if refused is not None:
                return _Found(replace(verdict, deviation=math.inf, seen=refused[1]), False, known, {}, terms, refused[0])
        constants = {key: fit.constant for key, fit in chosen.items() if fit.constant}
        losses = [part.loss for part in looks[0].parts]
        are_alike = checked.on_any(max(losses) - min(losses) <= trial.tolerance * abs(max(losses)))
        return _Found(verdict, not wrong, known, constants, terms, mend, are_alike)

    def _units(self, looks: Sequence[Look], key: int, fit: Fit) -> dict[Mode, float]:
        """The weight of a term in each mode that adds up, relative to its first mode; the known units if it is absent."""
        assert fit.mode is not None
        known = self._accumulation.weigher.known.units.get(key, {})
        weights = {mode: looks[0].whole.weight(key, mode) or math.nan for mode in (fit.mode, *fit.modes)}
        in_units = {mode: weight / weights[fit.mode] for mode, weight in weights.items()}
        own = {mode: weight for mode, weight in in_units.items() if math.isfinite(weight)}  # empty if it is absent here
        found: dict[Mode, float] = max(self._checked.of_all(own), key=len)
        if fit.modes and found:
            return found
        return {fit.mode: 1.0} if fit.mode not in known else {fit.mode: known[fit.mode], **known}

    def _fit(self, looks: Sequence[Look], key: int, modes: Iterable[Mode], eps: float) -> Fit:
        """The first way in which a term adds up on all ranks."""
        checked, found = self._checked, list[tuple[Mode, Fit, float]]()
        for mode in modes:
            own = fit_of(looks, key, mode, eps)
            code = 2.0 if own.mode is None else float(own.deviation.has_evidence)
            found.append((mode, own, checked.largest(code)))
            if checked.sync.is_waited_for_in_forward and found[-1][2] == 1:
                break  # each other mode would run all rows again
        modes = tuple(mode for mode, _, code in found if code == 1)
        right = [own._replace(modes=modes) for _, own, code in found if code == 1]
        known = self._accumulation.weigher.known.modes.get(key)
        if len({own.mode == SUM for own in right}) > 1 and known is None:
            return right[0]._replace(is_open=True)
        for own in right:
            if known is None or own.mode == known:
                return own._replace(constant=checked.largest(own.constant))
        if any(code == 0 for *_, code in found):
            return found[0][1]._replace(mode=known, is_open=True)
        if right:
            return right[0]._replace(constant=checked.largest(right[0].constant))
        return min((own for _, own, _ in found), key=lambda own: (own.mode is not None, own.deviation.size))._replace(mode=None)

    def _adopted(self, looks: Sequence[Look], key: int, eps: float) -> Fit | None:
        """Counts of the batch with which a term adds up."""
        whole = looks[0].whole.batch()
        known = [mode for mode in self._accumulation.weigher.known.units.get(key, ()) if callable(mode)]
        fits = [self._fit(looks, key, (count,), eps) for count in known or self._checked.of_all(counts_of(whole))[0]]
        right = [fit for fit in fits if fit.mode is not None and not fit.is_open]
        if not right:
            return None
        first, *others = right
        for fit in others:  # if all rows have the same gradient, counts fit that are not in proportion
            least, most = ratios(looks, (key, first.mode), (key, fit.mode))  # type: ignore[arg-type]
            if self._checked.on_any(not most - least <= 1e-9 * most):
                return None
        of_whole = {fit.mode: looks[0].whole.weight(key, fit.mode) for fit in right if fit.mode}
        counts = tuple(mode for mode, weight in of_whole.items() if self._checked.on_any(bool(known or weight)))
        return first._replace(mode=counts[0], modes=counts) if counts else None

    def _combined(self, looks: Sequence[Look], known: Known, terms: dict[int, Term]) -> tuple[Known, tuple[str, str] | None]:
        """Use one weight for all terms if they are in proportion, else count them first. Returns a mend, too, if neither works."""
        checked, ratio_of = self._checked, dict[int, float]()
        modes = {key: mode for key, mode in known.modes.items() if mode != ONCE}
        if len(modes) < 2 and (len(known.modes) < 2 or SUM not in modes.values()):
            return known, None
        main = next((key for key in modes if terms[key].words == "cross entropy"), next(iter(modes), None))
        is_function = checked.on_any(looks[0].whole.function is not None)
        has_sum = any(mode == SUM for mode in modes.values())
        is_one = main is not None and not (has_sum and (len(set(modes.values())) > 1 or len(known.modes) > len(modes)))
        for key, mode in modes.items() if is_one and not has_sum else ():
            assert main is not None
            least, most = ratios(looks, (main, modes[main]), (key, mode))
            least, most = -checked.largest(-least), checked.largest(most)
            if math.isfinite(most) and least < math.inf:
                ratio_of[key] = most
            is_one &= least < math.inf and math.isfinite(most) and most - least <= 1e-9 * most
            is_few = self._rows.number < MOST_ROWS and self._accumulation.policy.split is None
            is_one &= is_function or not is_few or not checked.may_count_terms  # in few rows by chance
        known = known._replace(ratios=ratio_of)
        if is_one:
            return known, None
        if is_function:
            return known, (advice.of_argument('weight="equal"'), "it is a function of means with weights of their own")
        known = known._replace(counts_first=True)
        if checked.may_count_terms:
            return known, None
        names = ", ".join(words_of(terms[key], mode).partition(",")[0] for key, mode in modes.items())
        mend = advice.of_argument(f"weight=[...], with a weight for each of its terms ({names})")
        return known, (advice.of_calls(names) if checked.is_manual else mend, f"its terms ({names}) have weights of their own")

    def _weight_that_adds_up(self, looks: Sequence[Look], terms: dict[int, Term], trial: Trial) -> str | None:
        """An argument with which the parts add up, in words.

        Raises:
            CannotCheckError: a weight counts something that all rows of the batch share.
        """
        if self._weight == "auto":
            return None
        chosen = [self._fit(looks, key, modes_to_try(term), trial.eps) for key, term in terms.items()]
        adds_up = all(fit.mode is not None and not fit.is_open for fit in chosen)
        whole, parts = looks[0].whole, looks[0].parts
        weights = [weight for weight in (self._weight if isinstance(self._weight, tuple) else [self._weight]) if callable(weight)]
        is_shared = any({part.weight(ALL, weight) for part in parts} == {whole.weight(ALL, weight)} for weight in weights)
        if (not adds_up or any(fit.mode == SUM for fit in chosen)) and self._checked.on_any(is_shared):
            raise CannotCheckError(f"weight={name_of(self._weight)} counts as much in some rows of the batch as in all of them")
        return advice.of_argument('weight="auto"') if adds_up and not isinstance(self._weight, tuple) else None
