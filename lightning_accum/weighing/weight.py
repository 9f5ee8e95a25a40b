"""The weight of a micro-batch: the denominator of its mean loss.

``"auto"`` reads it from the loss itself (see :mod:`lightning_accum.weighing.shares`), in the mode that the check has found;
explicit weights count it from the batch (see :mod:`lightning_accum.weighing.counts`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_accum.errors import ArgumentError, UnreadableLossError, WrongTypeError
from lightning_accum.exact import on_host
from lightning_accum.weighing.advice import OF_COMPILED, how_to_mend
from lightning_accum.weighing.counts import Weight, count_by, count_by_all, count_samples, name_of
from lightning_accum.weighing.functions import OfMean
from lightning_accum.weighing.known import Known, Reading
from lightning_accum.weighing.nodes import CRITERIA, MEAN_REDUCTION, Node, is_compiled, kind_of
from lightning_accum.weighing.safeguards import guard_against_zero
from lightning_accum.weighing.terms import COUNT, MEAN, ONCE, SUM, TOTAL, Denominator, Mode, Term


class Contribution(NamedTuple):
    """The contribution of a micro-batch to its window."""

    weight: Denominator | None  # the denominator of its mean loss; None if the loss is a sum
    # the weights of the other terms, which are proportional. Not the terms, whose nodes would keep the graph alive
    others: tuple[Denominator, ...] = ()
    factors: Denominator = 0.0  # a number that depends on the constant factors of the loss; 0 if unknown
    of_mean: OfMean | None = None  # the function from the mean or sum to the loss; None if the loss is the mean or sum
    is_read: bool = False  # its terms are known
    is_new: Denominator = 0.0  # not 0 if some terms are unchecked
    of_terms: Mapping[int, Denominator | None] | None = None  # the weight of each term, by key, if terms are counted first
    of_factors: Mapping[int, Denominator] | None = None  # the ``factors`` of each term
    is_off: bool = False  # its terms have a factor of 0
    doubt: Denominator = 0.0  # not 0 if its weight may be a raised count of 0: see :meth:`Term.may_be_raised`


_UNREAD = Reading()


class _Weighed(NamedTuple):
    """A term of a micro-batch: its mode, its unit, and its weight in units."""

    term: Term
    mode: Mode
    unit: float
    weight: Denominator | None


class Weigher:
    """Finds the weight of each micro-batch, by the user's ``weight``.

    Args:
        weight: ``"auto"``, ``"equal"``, a callable of the batch, or one for each term of the loss.

    Attributes:
        known: the check's knowledge about the terms of the loss.
        criterion: the loss in words; None before the first micro-batch.
    """

    def __init__(self, weight: Literal["auto", "equal"] | Weight | tuple[Weight, ...]) -> None:
        self._weight, self.is_auto = weight, weight == "auto"
        self.known = Known(takes_functions=weight != "equal")
        self.criterion: str | None = None
        self._plain: tuple[type, Any, Contribution] | None = None

    def learn(self, known: Known) -> None:
        """Use this knowledge from now on."""
        self.known, self._plain = known, None  # its terms may be new

    def __call__(self, loss: Tensor, batch: Any, rows: int | None = None) -> tuple[Contribution, Reading]:
        """Find the weight of one micro-batch. The terms of its loss have the keys of ``Contribution.of_terms``.

        Args:
            loss: the scalar loss of the micro-batch, with its graph.
            batch: the micro-batch passed to ``training_step``.
            rows: the number of its samples, if its batch was split into rows.

        Raises:
            UnreadableLossError: with ``"auto"``, if the graph shows no weight.
            TypeError, ValueError: an explicit weight returned an invalid value; or the loss is not a scalar.
        """
        if loss.shape and loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}"
            raise ArgumentError(f"training_step must return a loss of one number, its mean or its sum, but returned {found}")
        node: Node = loss.grad_fn
        if node is None:  # `torch.zeros((), requires_grad=True)`: nothing to train on. Without a graph, backward raises an error
            return Contribution(0.0 if loss.requires_grad else 1.0), _UNREAD
        is_plain = self._plain is not None and type(node) is self._plain[0]
        if is_plain and node._saved_reduction == MEAN_REDUCTION:
            return self._read_plain(node), _UNREAD
        reading = self._read(loss)
        guard_against_zero(reading.terms)
        if self._weight == "equal":
            self.criterion = "mean of the micro-batches' means"
            return Contribution(1.0), reading
        if self.is_auto:
            return self._weigh(reading, loss, batch, rows), reading
        if isinstance(batch, Iterator):
            raise WrongTypeError(
                "An explicit weight counts entries of the batch, but training_step draws its own batches (`dataloader_iter`). "
                'Use weight="auto".'
            )
        if isinstance(self._weight, tuple):
            return self._listed(reading, batch, rows)
        weight = count_by(self._weight, batch, rows)
        self.criterion = self.criterion or f"weighted by {name_of(self._weight)}"
        return Contribution(weight, of_mean=reading.of_mean, doubt=is_lost(loss, weight, reading.terms)), reading

    def units_to_keep(self) -> dict[int, dict[str, float]]:
        """The units for a checkpoint, without counts of the batch."""
        kept = {key: {mode: unit for mode, unit in units.items() if not callable(mode)} for key, units in self.known.units.items()}
        return {key: units for key, units in kept.items() if units}

    def _is_new(self, terms: Sequence[Term]) -> Denominator:
        """Not 0 if terms without a factor of 0 are unchecked, or some of several similar terms are absent."""
        known, keys = self.known.units.keys(), {term.key for term in terms}
        kinds = {key >> 8 for key in keys}
        if any(key >> 8 in kinds and key not in keys for key in known):
            return 1.0
        return sum(on_host(term.number != 0) for term in terms if term.key not in known) if known else 0.0

    def _read(self, loss: Tensor) -> Reading:
        reading, words = self.known.read(loss), self.known.words
        new = [term for term in reading.terms if term.key not in words and any(map(is_compiled, term.edges))] if words else []
        if new:
            self._know_compiled(new, {term.key for term in reading.terms})
        return self.known.read(loss) if new else reading

    def _know_compiled(self, new: Sequence[Term], keys: set[int]) -> None:
        """Whether the terms of a compiled loss differ from the checked ones, which ran eagerly."""
        for words in {term.words for term in new if not term.is_penalty}:
            known = [key for key, own in self.known.words.items() if own == words and key not in keys]
            own = [term.key for term in new if term.words == words]
            if not words and self.known.counts_first:
                raise UnreadableLossError(OF_COMPILED)
            if len(own) == len(known):
                self.learn(self.known._replace(aliases={**self.known.aliases, **dict(zip(own, known, strict=True))}))

    def _read_plain(self, node: Node) -> Contribution:
        """The contribution of a plain mean criterion, like the first loss."""
        assert self._plain is not None
        _, count_of, first = self._plain
        weight = on_host(count_of(node))
        return first if not isinstance(weight, Tensor) and weight == first.weight else first._replace(weight=weight)

    def _weigh(self, reading: Reading, loss: Tensor, batch: Any, rows: int | None) -> Contribution:
        terms = [self._weighed(term, batch) for term in reading.terms]
        doubt = self._doubt(terms, batch, rows)
        if len(terms) == 1 and callable(terms[0].mode) and terms[0].weight is not None:
            doubt = doubt + is_lost(loss, terms[0].weight, reading.terms)
        keys = {term.key for term in reading.terms}
        of_mean, is_read, is_new = reading.of_mean, True, self._is_new(reading.terms)
        adopted = [(key, units) for key, units in self.known.units.items() if key not in keys and callable(next(iter(units)))]
        of_absent = {key: count_by_all(units, batch) for key, units in adopted}  # a count holds for a term that is absent, too
        if self.known.counts_first:
            if of_mean is not None:
                raise UnreadableLossError(how_to_mend("a function of means with different weights"))
            if self.criterion is None or not self.criterion.startswith("each"):
                names = ", ".join(term.words or "a term" for term in reading.terms if not term.is_penalty)
                self.criterion = f"each term by its own count ({names}), with one more forward, which weight=[...] saves"
            of_terms = {term.key: weight for term, *_, weight in terms} | of_absent
            of_factors = {term.key: self.known.factor_of(term, mode) for term, mode, *_ in terms}
            return Contribution(None, (), 0.0, None, True, is_new, of_terms, of_factors, doubt)
        of_batch, known = [one for one in terms if one.mode != ONCE], self.known.units
        # the term whose weight is logged: a cross entropy if there is one, but none that is new or has a factor of 0
        rank = lambda own: (own.term.is_off or own.term.key not in known, own.term.words != "cross entropy")  # noqa: E731
        main = min(of_batch, key=rank, default=None)
        if main is None and terms and not self.known.of_samples:
            main = terms[0]._replace(weight=1.0)  # the mean of equal penalties
        if main is None:
            found = reading.terms[0].words or "a node" if terms else "nothing that depends on the batch"
            raise UnreadableLossError(how_to_mend(found))
        if not main.term.words and main.term.key not in self.known.units:
            if not self.known.hidden or len(terms) > 1:
                raise UnreadableLossError(how_to_mend("a node that hides its sum"))
            is_read, is_new = False, 0.0
        weight, others = self._of_all(terms, main)
        others += tuple(count / self.known.ratios.get(key, 1.0) for key, count in of_absent.items())
        if isinstance(weight, float) and math.isnan(weight):
            if loss.isfinite():
                raise UnreadableLossError(how_to_mend("a sum of losses with several factors"))
            weight = 1.0  # its gradient is not finite for any weight
        if len(of_batch) < len(terms) and all(one.term.is_off for one in of_batch):
            weight = 1.0  # beside a factor of 0, which all micro-batches have, a penalty keeps its gradient
        factors, kinks = self.known.factor_of(main.term, main.mode), math.prod(one.term.kink for one in terms if one is not main)
        factors = factors * kinks if isinstance(factors, Tensor) or factors else kinks - 1.0
        self.criterion = self.criterion or words_of(main.term, main.mode)
        contribution = Contribution(weight, others, factors, of_mean, is_read, is_new, is_off=main.term.is_off, doubt=doubt)
        root: Node = loss.grad_fn
        kind = kind_of(root)
        is_criterion = len(terms) == 1 and not others and main.mode in (COUNT, MEAN) and kind in CRITERIA and of_mean is None
        if is_criterion and root._saved_reduction == MEAN_REDUCTION:
            self._plain = (type(root), CRITERIA[kind][1], contribution)
        return contribution

    def _of_all(self, terms: Sequence[_Weighed], main: _Weighed) -> tuple[Denominator | None, tuple[Denominator, ...]]:
        """The common weight of all terms, and the weights of the other terms in its unit."""
        weight, others = main.weight, list[Denominator]()
        for term, mode, _, own in terms:
            if term is main.term or mode == ONCE or own is None:
                continue
            others.append(own / self.known.ratios.get(term.key, 1.0))
            if not isinstance(own, Tensor) and not isinstance(weight, Tensor) and weight == 0:
                weight = others[-1]
        if weight is not None and any(ONCE in units for units in self.known.units.values()):
            # penalties join the weights only if all micro-batches have them
            others.append(weight * sum(one.term.penalties for one in terms if one.mode == ONCE))
        return weight, tuple(others)

    def _doubt(self, terms: Sequence[_Weighed], batch: Any, rows: int | None) -> Any:
        """Not 0 if a weight may be a raised count of 0."""
        doubts: list[Denominator] = []
        for term, mode, unit, weight in terms:
            if term.key in self.known.units and mode != ONCE:
                doubts += [doubt for name, doubt in term.oddities(mode).items() if (term.key, name) not in self.known.seen]
            doubt = term.may_be_raised(mode, weight, unit)
            if term.key in self.known.raised and weight is not None:
                doubts.append(term.counts_one(weight * unit))
            goes_by_samples = term.key in self.known.of_samples
            if isinstance(doubt, Tensor) or (doubt and not (goes_by_samples and (rows or count_samples(batch)) in (1, None))):
                doubts.append(doubt)
        return sum(doubts)

    def _weighed(self, term: Term, batch: Any) -> _Weighed:
        units = self.known.units_of(term)
        (mode, unit), *others = units.items()
        if callable(mode):
            return _Weighed(term, mode, unit, count_by_all(units, batch))
        weight = term.weight(mode)
        if weight is not None and (unit != 1.0 or others):
            weight = weight / unit
            more: Any = next((one for one in (TOTAL, COUNT, MEAN) if one in units and one != mode), None)
            if more is not None and (isinstance(weight, Tensor) or math.isnan(weight)):  # the first mode cannot be read
                other: Any = term.weight(more)
                other = other / units[more]
                weight = torch.where(weight.isnan(), other, weight) if isinstance(weight, Tensor) else other
        return _Weighed(term, mode, unit, weight)

    def _listed(self, reading: Reading, batch: Any, rows: int | None) -> tuple[Contribution, Reading]:
        """A weight for each term."""
        assert isinstance(self._weight, tuple)
        names = ", ".join(map(name_of, self._weight))
        if reading.function is not None:
            raise UnreadableLossError(f"weight=[{names}] has a weight for each term, but the loss is a function of a mean.")
        varying = [term for term in reading.terms if not term.is_penalty]
        if len(varying) != len(self._weight):
            found = ", ".join(term.words or "one that is not known" for term in varying) or "its graph shows none"
            raise UnreadableLossError(
                f"weight=[{names}] has {len(self._weight)} weights, one for each term of the loss, but the loss of this "
                f"micro-batch has {len(varying)} terms that depend on the batch ({found}). Pass one weight for each, in the order "
                "in which the loss adds them up."
            )
        counts = [count_by(weight, batch, rows) for weight in self._weight]
        penalties = [term._replace(key=0) for term in reading.terms if term.is_penalty]  # which use the first weight
        terms = [*(term._replace(key=place) for place, term in enumerate(varying)), *penalties]
        self.criterion = "each term weighted by its own count, " + ", ".join(
            f"{term.words or 'a term'} by {name_of(weight)}" for term, weight in zip(varying, self._weight, strict=True)
        )
        of_factors = {0: 1.0 + sum(term.penalties for term in penalties)}
        return Contribution(None, of_terms=dict(enumerate(counts)), of_factors=of_factors), Reading(terms)


def words_of(term: Term, mode: Mode) -> str:
    """The weight of a term in words."""
    if mode == SUM:
        return f"{term.words or 'loss'}, summed, not averaged" if term.words != "sum" else "summed, not averaged"
    if callable(mode):
        return f"weighted by the {name_of(mode)}, as found by the check"
    return term.words if term.words.startswith("mean") else f"mean {term.words}".rstrip()


def is_lost(loss: Tensor, weight: Denominator, terms: Sequence[Term]) -> Denominator:
    """1 if the weight is 0 and the loss is not, so that the gradient is lost; else 0."""
    if any(term.is_penalty for term in terms) or (not isinstance(weight, Tensor) and weight):
        return 0.0
    loss = loss.detach()
    return on_host(loss.isfinite() & (loss != 0) & (weight == 0))


def weight_alone(loss: Tensor) -> tuple[Denominator | None, OfMean | None]:
    """The weight of a single value, such as a logged one, and its function of a mean.

    Raises:
        UnreadableLossError: the value shows no weight.
    """
    reading = Known().read(loss)
    term = next((term for term in reading.terms if not term.is_penalty), None)
    if term is None or not term.words:
        raise UnreadableLossError("no sum")
    weight = term.weight(term.default_mode)
    if isinstance(weight, float) and math.isnan(weight):
        raise UnreadableLossError("a sum of losses with several factors")
    return weight, reading.of_mean
