"""What is known of the terms of a loss, and how a loss is read by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from lightning_accum.errors import DoesNotAddUpError
from lightning_accum.weighing.advice import OF_ANOTHER_MODE
from lightning_accum.weighing.functions import OfMean, function_of_mean
from lightning_accum.weighing.shares import NOWHERE, terms_of
from lightning_accum.weighing.terms import Mode, Term, alike


class Reading(NamedTuple):
    """A loss, read. Nobody keeps it: its nodes would keep the graph alive.

    Attributes:
        terms: what it adds up; none of a mean criterion alone.
        function: that it is of a mean; None where it is a mean or a sum.
    """

    terms: Sequence[Term] = ()
    function: OfMean | None = None

    @property
    def of_mean(self) -> OfMean | None:
        """The function, without the graph."""
        return None if self.function is None else self.function._replace(below=None)


class Known(NamedTuple):
    """What is known of the terms of a loss.

    Attributes:
        places: of parameters, by their id: the losses of several heads are terms of their own. Empty if heads are not told apart.
        looped: see :func:`lightning_accum.weighing.terms.alike`.
        aliases: keys that are taken for others.
        takes_functions: a loss may be a function of a mean.
        units: of each term, by its key, the modes by which it adds up, as the check has found, and what they weigh for one of what
            it was weighed by first. It is weighed by the first of them, by a count of the batch as all of them say.
        hidden: counts by which the loss adds up, if its graph is hidden in training, as where it is compiled.
        ratios: the weight of each term divided by the weight of the first, if they are in proportion.
        words: what each term that the check has seen is, by its key.
        of_samples: terms that weigh as many as there are rows, in all that was checked.
        seen: what the check has seen of terms, by key, see :func:`lightning_accum.weighing.terms.Term.oddities`.
        counts_first: terms have weights of their own, which are counted before a window runs.
    """

    places: Mapping[int, int] = NOWHERE
    looped: frozenset[int] = frozenset()
    aliases: Mapping[int, int] = NOWHERE
    takes_functions: bool = True
    units: Mapping[int, Mapping[Mode, float]] = MappingProxyType({})
    hidden: Mapping[Mode, float] = MappingProxyType({})
    ratios: Mapping[int, float] = MappingProxyType({})
    words: Mapping[int, str] = MappingProxyType({})
    of_samples: frozenset[int] = frozenset()
    seen: frozenset[tuple[int, str]] = frozenset()
    counts_first: bool = False

    @property
    def names(self) -> Known:
        """How terms are told from others, without what is known of each."""
        return Known(*self[:4])

    def telling_heads(self, parameters: Iterable[Tensor]) -> Known:
        """Take the losses of several heads, which have these parameters, for terms of their own."""
        return self._replace(places={id(parameter): place for place, parameter in enumerate(parameters, 1)})

    @property
    def modes(self) -> dict[int, Mode]:
        """How each term that the check has seen is weighed."""
        return {key: next(iter(units)) for key, units in self.units.items()}

    def units_of(self, term: Term) -> Mapping[Mode, float]:
        """By what a term is weighed, and the units."""
        return self.units.get(term.key) or ({} if term.words else self.hidden) or {term.default_mode: 1.0}

    def read(self, loss: Tensor) -> Reading:
        """The terms of a loss."""
        assert loss.grad_fn is not None
        found = function_of_mean(loss) if self.takes_functions else None
        terms = alike(terms_of(loss, None if found is None else found.below, self.places), self.looped)
        return Reading(
            [term._replace(key=self.aliases.get(term.key, term.key)) for term in terms] if self.aliases else terms, found
        )

    def joined(self, other: Known, begun: Mapping[int, Mode]) -> Known:
        """Both together, if ``other`` was found to add up.

        Args:
            other: what some rows have shown.
            begun: by what its terms were weighed that are in a window already.

        Raises:
            DoesNotAddUpError: a term goes by another mode in them, and nobody knows its unit.
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
            counts_first=self.counts_first,
        )
