"""Chooses the weight of each term of a loss: the first mode in which parts add up to the whole on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lightning_accum import prove
from lightning_accum.boundary import TAILS
from lightning_accum.exact import rounding_of_gradients
from lightning_accum.looks import Checked, Rows
from lightning_accum.prove import ALL, Fit, Look
from lightning_accum.trial import Trial
from lightning_accum.verdict import MOST_ROWS, CannotCheckError, UnsuitableRowsError, Verdict
from lightning_accum.weighing import advice
from lightning_accum.weighing.counts import counts_of, name_of
from lightning_accum.weighing.known import APART, VARIES, Known
from lightning_accum.weighing.terms import COUNT, ONCE, SUM, Mode, Term, by_place
from lightning_accum.weighing.weight import words_of


class Found(NamedTuple):
    """The result for some rows, on all ranks."""

    verdict: Verdict  # of this rank
    adds_up: bool  # the parts sum to the whole on all ranks
    known: Known  # the modes of the terms, if they add up
    constants: dict[int, float]  # by term, the constant in each of its weights that does not add up
    terms: dict[int, Term]
    mend: str | None = None  # an argument with which the parts add up, if one was found
    are_alike: bool = False  # all single rows have the same loss
    sizes: tuple[float, float] = (math.inf, math.inf)  # of the gradient and of the loss, on this rank
    is_loss_off: bool = False  # windows do not show the loss of the whole


@dataclass(frozen=True)
class Deciding:
    """Decides for some rows of a loader batch. All methods are called on all ranks."""

    checked: Checked
    rows: Rows

    @property
    def known(self) -> Known:
        """The modes found in earlier rows."""
        return self.checked.accumulation.weigher.known

    @property
    def weight(self) -> Any:
        """The weight that the user chose."""
        return self.checked.accumulation.policy.weight

    def _named(self, looks: Sequence[Look], names: Known) -> Known:
        """Give terms that are the same in all losses the same keys, on all ranks."""
        measured = prove.measured_of(looks)
        joined = names.looped.union(*self.checked.of_all(prove.looped(measured)))
        for one in measured:
            one.join(joined)
        renamed = prove.merged(names.aliases, self.checked.of_all(prove.aliases(measured)))
        for one in measured:
            one.rename(renamed)
        order = next(filter(None, self.checked.of_all(prove.order_of(measured))), names.order)
        for one in measured:
            one.rename(by_place(one.terms, order))
        return names._replace(looped=joined, aliases=renamed, order=order)

    def decide(self, looks: Sequence[Look], names: Known, trial: Trial) -> Found:
        """The mode of each term; the same on all ranks."""
        eps, checked, weight = trial.mode.eps, self.checked, self.weight
        known = self._named(looks, names)
        terms = prove.first_of(checked.of_all(prove.first_of(one.terms for one in prove.measured_of(looks))))
        if weight == "auto":
            chosen = {key: self._fit(looks, key, prove.modes_to_try(term), eps) for key, term in terms.items()}
            failed = {key >> 8 for key, fit in chosen.items() if fit.mode is None and not fit.is_open}
            if failed & {key >> 8 for key in terms if key & 255} - known.looped:  # treat them as one term
                return self.decide(looks, known._replace(looped=known.looped | failed), trial)
            for key, fit in chosen.items():
                fails = fit.mode is None and not fit.is_open
                if fails or callable(self.known.modes.get(key)):
                    once = self._fit(looks, key, (ONCE,), eps)  # a sum that is equal in all parts does not depend on rows
                    is_read = terms[key].is_bent or (once.mode is not None and terms[key].words)
                    adopted_fit = None if is_read else self._adopted(looks, key, eps)
                    chosen[key] = adopted_fit or (once if fails and once.mode is not None else fit)
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
            raise UnsuitableRowsError("the first rows have no gradient, or do not distinguish a mean from a sum")
        size, tolerance = worst.deviation.size, rounding_of_gradients(eps)
        verdict = Verdict(max(size, 2 * tolerance) if wrong else size, tolerance, worst.deviation.seen, tuple(worst.deviation.rows))
        mend = self._weight_that_adds_up(looks, terms, trial) if wrong else None
        if not wrong and weight == "auto":
            units = {key: self._units(looks, key, fit) for key, fit in chosen.items() if fit.mode is not None}
            (key, fit), *others = chosen.items()
            is_one_mean = not others and fit.mode != SUM and not checked.on_any(looks[0].whole.function is not None)
            if is_one_mean and not checked.sync.is_waited_for_in_forward and (adopted_fit := self._adopted(looks, key, eps)):
                hidden = self._units(looks, key, fit._replace(modes=adopted_fit.modes))  # fewer counts may fit other rows
                known = known._replace(hidden={mode: unit for mode, unit in hidden.items() if callable(mode)})
            known = known._replace(words={key: term.words for key, term in terms.items()}, units=units)
            odd = [
                (key, name)
                for one in prove.measured_of(looks)
                for key, term in one.terms.items()
                for name, is_so in term.oddities(next(iter(known.units_of(term)))).items()
                if is_so
            ]
            odd += [
                (key, VARIES) for key, mode in known.modes.items() if mode == SUM and checked.on_any(prove.has_factors(looks, key))
            ]
            is_one_row: dict[Mode, bool] = {ONCE: self.rows.number < 2}  # which has equal parts
            of_samples = {key for key, mode in known.modes.items() if is_one_row.get(mode, prove.goes_by_rows(looks, key, mode))}
            known, refused = self._combined(looks, known._replace(seen=frozenset(odd), of_samples=frozenset(of_samples)), terms)
            if refused is not None:
                return Found(replace(verdict, deviation=math.inf, seen=refused[1]), False, known, {}, terms, refused[0])
        constants = {key: fit.constant for key, fit in chosen.items() if fit.constant}
        losses = [part.loss for part in looks[0].parts]
        are_alike = checked.on_any(max(losses) - min(losses) <= trial.tolerance * abs(max(losses)))
        is_read = weight == "auto" and not (wrong or known.counts_first or looks[0].whole.function is not None)
        of_loss = _loss_of(looks[0], known, terms) - looks[0].whole.loss if is_read else 0.0
        largest = max(map(abs, filter(math.isfinite, losses)), default=0.0)
        is_loss_off = checked.on_any(abs(of_loss) > max(eps, trial.tolerance * largest))
        size = math.sqrt(sum(float(own.square().nansum()) for own in looks[0].whole.gradient(ALL).values()))
        unclear = [place for place, fit in chosen.items() if fit.is_open and place in terms and not terms[place].words]
        if checked.on_any(not wrong and any(g.nan_to_num().any() for n in unclear for g in looks[0].whole.gradient(n).values())):
            seen = "a term of the loss, which hides its sum, may be a mean or a sum"
            checked.accumulation.warn_once(advice.of_unchecked(Verdict(None, seen=seen), checked.is_manual))
        found = Found(verdict, not wrong, known, constants, terms, mend, are_alike, is_loss_off=is_loss_off)
        return found._replace(sizes=(size, abs(looks[0].whole.loss)))

    def _units(self, looks: Sequence[Look], key: int, fit: Fit) -> dict[Mode, float]:
        """The weight of a term in each mode that adds up, relative to its first mode; the known units if it is absent."""
        assert fit.mode is not None
        known = self.known.units.get(key, {})
        weights = {mode: looks[0].whole.weight(key, mode) or math.nan for mode in (fit.mode, *fit.modes)}
        in_units = {mode: weight / weights[fit.mode] for mode, weight in weights.items()}
        own = {mode: weight for mode, weight in in_units.items() if math.isfinite(weight)}  # empty if it is absent here
        found: dict[Mode, float] = max(self.checked.of_all(own), key=len)
        if fit.modes and found:
            return found
        return {fit.mode: 1.0} if fit.mode not in known else {fit.mode: known[fit.mode], **known}

    def _fit(self, looks: Sequence[Look], key: int, modes: Iterable[Mode], eps: float) -> Fit:
        """The first mode in which a term adds up on all ranks."""
        checked, found = self.checked, list[tuple[Mode, Fit, float]]()
        for mode in modes:
            own = prove.fit_of(looks, key, mode, eps)
            code = 2.0 if own.mode is None else float(own.deviation.has_evidence)
            found.append((mode, own, checked.largest(code)))
            if checked.sync.is_waited_for_in_forward and found[-1][2] == 1:
                break  # each other mode would run all rows again
        modes = tuple(mode for mode, _, code in found if code == 1)
        right = [own._replace(modes=modes) for _, own, code in found if code == 1]
        known = self.known.modes.get(key)
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
        """The fit of a term by counts of the batch; None if no count adds up."""
        checked, whole = self.checked, looks[0].whole.batch()
        known = [mode for mode in self.known.units.get(key, ()) if callable(mode)]
        fits = [self._fit(looks, key, (count,), eps) for count in known or checked.of_all(counts_of(whole))[0]]
        right = [fit for fit in fits if fit.mode is not None and not fit.is_open]
        if not right:
            return None
        # in half precision nearly right counts fit, too: leave out counts with several times the deviation of the best
        clear = _CLEARLY * checked.largest(max(min(fit.deviation.size for fit in right), min(_ROUNDINGS * eps, _OF_HALF)))
        first, *others = [fit for fit in right if checked.largest(fit.deviation.size) <= clear]
        for fit in others:  # if all rows have the same gradient, counts fit that are not proportional
            least, most = prove.ratios(looks, (key, first.mode), (key, fit.mode))  # type: ignore[arg-type]
            if checked.on_any(not most - least <= 1e-9 * most):
                return None
        of_whole = {fit.mode: looks[0].whole.weight(key, fit.mode) for fit in (first, *others) if fit.mode}
        counts = tuple(mode for mode, weight in of_whole.items() if checked.on_any(bool(known or weight)))
        return first._replace(mode=counts[0], modes=counts) if counts else None

    def _combined(self, looks: Sequence[Look], known: Known, terms: dict[int, Term]) -> tuple[Known, tuple[str, str] | None]:
        """Use one weight for all terms if their weights are proportional, else count them first. Also returns a fix if neither
        works."""
        checked, ratio_of, apart = self.checked, dict[int, float](), set[tuple[int, str]]()
        modes = {key: mode for key, mode in known.modes.items() if mode != ONCE}
        measured, mode_of, is_function = prove.measured_of(looks), known.modes, checked.on_any(looks[0].whole.function is not None)
        is_free = checked.may_count_terms and not is_function and not checked.on_any(checked.accumulation.window.has_weight)
        unseen = [key for key in terms if all(one.weight(key, mode_of.get(key, COUNT)) == 0 for one in measured)]
        # a term that has the weight 0, and not by a factor of 0, may have any weight later
        are_unseen = checked.on_any(is_free and any(terms[key].number for key in unseen))
        if len(modes) < 2 and not are_unseen and (len(known.modes) < 2 or SUM not in modes.values()):
            return known, None
        main = min(modes, key=lambda key: (terms[key].is_off, terms[key].words != "cross entropy"), default=None)
        has_sum = any(mode == SUM for mode in modes.values())
        is_one = main is not None and not (has_sum and (len(set(modes.values())) > 1 or len(known.modes) > len(modes)))
        for key, mode in modes.items() if is_one and not has_sum else ():
            assert main is not None
            least, most = prove.ratios(looks, (main, modes[main]), (key, mode))
            unit = self.known.ratios.get(main, 1.0)
            least, most = -checked.largest(-least * unit), checked.largest(most * unit)
            if 0 < most < math.inf:
                ratio_of[key] = most
            if not (least < math.inf and math.isfinite(most) and most - least <= 1e-9 * most):
                apart.add((key, APART))
            is_one &= not {(key, APART)} & (apart | self.known.seen)  # which other rows may hide
            is_few = self.rows.number < MOST_ROWS and self.checked.accumulation.policy.split is None
            is_known = not self.known.counts_first and abs(self.known.ratios.get(key, 0.0) - most) <= 1e-9 * most
            is_one &= is_known or not is_few or not is_free  # with few rows this may be chance
        is_one &= not are_unseen
        known = known._replace(ratios=ratio_of, seen=known.seen | apart)
        if is_one:
            return known, None
        if is_function:
            return known, (advice.of_argument('weight="equal"'), "it is a function of means with different weights")
        known = known._replace(counts_first=True)
        if checked.may_count_terms:
            return known, None
        names = ", ".join(words_of(terms[key], mode).partition(",")[0] for key, mode in modes.items())
        mend = advice.of_argument(f"weight=[...], with a weight for each of its terms ({names})")
        mend = advice.OF_CARRY if TAILS[checked.accumulation.policy.tail].goes_on else mend
        return known, (advice.of_calls(names) if checked.is_manual else mend, f"its terms ({names}) have different weights")

    def _weight_that_adds_up(self, looks: Sequence[Look], terms: dict[int, Term], trial: Trial) -> str | None:
        """An argument with which the parts add up, in words.

        Raises:
            CannotCheckError: a weight counts something that all rows of the batch share.
        """
        if self.weight == "auto":
            return None
        chosen = [self._fit(looks, key, prove.modes_to_try(term), trial.mode.eps) for key, term in terms.items()]
        adds_up = all(fit.mode is not None and not fit.is_open for fit in chosen)
        whole, parts = looks[0].whole, looks[0].parts
        weights = [weight for weight in (self.weight if isinstance(self.weight, tuple) else [self.weight]) if callable(weight)]
        is_shared = any({part.weight(ALL, weight) for part in parts} == {whole.weight(ALL, weight)} for weight in weights)
        if (not adds_up or any(fit.mode == SUM for fit in chosen)) and self.checked.on_any(is_shared):
            raise CannotCheckError(f"weight={name_of(self.weight)} returns the same count for some rows of the batch as for all")
        return advice.of_argument('weight="auto"') if adds_up and not isinstance(self.weight, tuple) else None


_CLEARLY = 4.0
"""A count fits clearly better than another if its deviation is smaller by this factor."""
_ROUNDINGS = 64
_OF_HALF = 1e-3
"""Deviations of this many roundings prove nothing, nor do deviations of this size in half precision, whose roundings even out."""


def _loss_of(look: Look, known: Known, terms: Mapping[int, Term]) -> float:
    """The loss that a window of these parts shows; nan if it is unknown, since a hook may change the gradient of a mean."""
    own = next((own for own in known.modes.items() if own[1] == terms[own[0]].default_mode != ONCE), None)
    if own is None:
        return math.nan
    parts = [(1.0 if own[1] == SUM else part.weight(*own), part.loss) for part in look.parts]
    shown = sum(weight * loss for weight, loss in parts if weight)
    return shown if own[1] == SUM else shown / (look.whole.weight(*own) or math.nan)
