"""Knowledge about the terms of a loss, which decides how a loss is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from lightning_accum.errors import DoesNotAddUpError
from lightning_accum.weighing.advice import OF_ANOTHER_MODE
from lightning_accum.weighing.functions import OfMean, function_of_mean
from lightning_accum.weighing.shares import terms_of
from lightning_accum.weighing.terms import NOWHERE, Denominator, Mode, Term, alike, by_place


class Reading(NamedTuple):
    """The reading of a loss. It must not be stored: its nodes would keep the graph alive."""

    terms: Sequence[Term] = ()  # its summands; empty for a single mean criterion
    function: OfMean | None = None  # its function of a mean; None if it is a mean or a sum

    @property
    def of_mean(self) -> OfMean | None:
        """The function, without the graph."""
        return None if self.function is None else self.function._replace(below=None)


VARIES = "varies"
"""The constant factor of a sum differs between parts, and yet the parts add up."""
APART = "apart"
"""The weight of a term is not in proportion to the weight of the first."""


class Known(NamedTuple):
    """Knowledge about the terms of a loss."""

    # indices of parameters, by id, which distinguish the losses of several heads; empty if not needed
    places: Mapping[int, int] = NOWHERE
    looped: frozenset[int] = frozenset()  # see :func:`lightning_accum.weighing.terms.alike`
    aliases: Mapping[int, int] = NOWHERE  # keys that are replaced by others
    takes_functions: bool = True  # whether a loss may be a function of a mean
    order: tuple[int, ...] = ()  # the keys of all terms in their order in the sum, see :func:`by_place`; empty if it varies
    # for each term, by key, the modes in which it added up in the check, and their weights relative to the first mode, which is
    # used; counts of the batch must all agree
    units: Mapping[int, Mapping[Mode, float]] = MappingProxyType({})
    # counts with which the loss adds up, for a graph that is hidden in training, as by compilation
    hidden: Mapping[Mode, float] = MappingProxyType({})
    # the weight of each term divided by the weight of the first, if they are in proportion
    ratios: Mapping[int, float] = MappingProxyType({})
    words: Mapping[int, str] = MappingProxyType({})  # each checked term in words, by key
    of_samples: frozenset[int] = frozenset()  # terms whose weight was always the number of rows
    # the oddities of checked terms, by key, see :func:`lightning_accum.weighing.terms.Term.oddities`
    seen: frozenset[tuple[int, str]] = frozenset()
    raised: frozenset[int] = frozenset()  # terms whose count is below 1 for a single row, and is raised to 1
    counts_first: bool = False  # whether terms have different weights, which are counted before a window runs

    @property
    def names(self) -> Known:
        """A copy that only distinguishes terms, without knowledge about each."""
        return Known(*self[:5])

    def telling_heads(self, parameters: Iterable[Tensor]) -> Known:
        """Distinguish the losses of several heads by these parameters."""
        return self._replace(places={id(parameter): place for place, parameter in enumerate(parameters, 1)})

    @property
    def modes(self) -> dict[int, Mode]:
        """The mode of each checked term."""
        return {key: next(iter(units)) for key, units in self.units.items()}

    def units_of(self, term: Term) -> Mapping[Mode, float]:
        """The mode of a term, and its units."""
        return self.units.get(term.key) or ({} if term.words else self.hidden) or {term.default_mode: 1.0}

    def factor_of(self, term: Term, mode: Mode) -> Denominator:
        """The constant factors of a term, if they are to be the same in a window; 0 if that is unknown."""
        return 0.0 if (term.key, VARIES) in self.seen else term.factor(mode)

    def read(self, loss: Tensor) -> Reading:
        """The terms of a loss."""
        assert loss.grad_fn is not None
        found = function_of_mean(loss) if self.takes_functions else None
        terms = alike(terms_of(loss, None if found is None else found.below, self.places), self.looped)
        for names in (self.aliases, by_place({self.aliases.get(term.key, term.key): term for term in terms}, self.order)):
            terms = [term._replace(key=names.get(term.key, term.key)) for term in terms] if names else terms
        return Reading(terms, found)

    def joined(self, other: Known, begun: Mapping[int, Mode]) -> Known:
        """The union with ``other``, whose terms were found to add up.

        Args:
            other: the knowledge from some rows.
            begun: the modes of terms that are in a window already.

        Raises:
            DoesNotAddUpError: a term has another mode in them, and its unit is unknown.
        """
        unit, units = 1.0, {**self.units}
        for key, found in other.units.items():
            mode, known = next(iter(found)), units.get(key) or ({begun[key]: 1.0} if key in begun else {})
            if begun and known and mode not in known:
                raise DoesNotAddUpError(OF_ANOTHER_MODE)
            unit = known.get(mode, 1.0) / found[mode]
            units[key] = {one: unit * weight for one, weight in found.items()}
        return other._replace(
            units=units,
            hidden={one: unit * weight for one, weight in other.hidden.items()},  # of the only term
            ratios={**self.ratios, **other.ratios},
            words={**self.words, **other.words},
            seen=self.seen | other.seen,
            raised=self.raised | other.raised,
            counts_first=self.counts_first,
        )
