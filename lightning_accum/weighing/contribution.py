"""What one micro-batch brings into its window, as values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lightning_accum.weighing.functions import OfMean
from lightning_accum.weighing.terms import Denominator


class Contribution(NamedTuple):
    """What one micro-batch brings into its window.

    Attributes:
        weight: what its mean loss was divided by; None if the loss is a sum, so that it is added as it is.
        others: the weights of the other terms, which share its weight. Not the terms: their nodes would keep the graph alive.
        factors: a number that is another one where a constant factor of the loss is; 0 where that is not known.
        of_mean: what makes the loss of the mean, or of the sum, that was weighed; None where it is that.
        structure: the keys of its terms; empty where they are not looked at.
        of_terms: the weight of each term by itself, by its key, where they are counted first.
        of_factors: the ``factors`` of each of them.
        doubt: not 0 where its weight may be none: see :func:`lightning_accum.weighing.modes.may_be_raised`.
    """

    weight: Denominator | None
    others: tuple[Denominator, ...] = ()
    factors: Denominator = 0.0
    of_mean: OfMean | None = None
    structure: frozenset[int] = frozenset()
    of_terms: Mapping[int, Denominator | None] | None = None
    of_factors: Mapping[int, Denominator] | None = None
    doubt: Denominator = 0.0
