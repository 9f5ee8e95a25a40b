"""How the weight of a term is found from its share, or from its batch; and what a micro-batch brings into its window."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from lightning_accum.exact import exact_dtype
from lightning_accum.weighing.counts import name_of
from lightning_accum.weighing.functions import OfMean
from lightning_accum.weighing.terms import Denominator, Term, is_nan, on_host, quotient, size_of, tensor_of

Mode: TypeAlias = "str | Callable[[Any], Any]"
"""One of :data:`MODES`, or a count of the batch."""

COUNT, MEAN, LOSSES, TOTAL, NUMBER, SUM, ONCE = "count", "mean", "losses", "total", "number", "sum", "once"
MODES = (COUNT, MEAN, LOSSES, TOTAL, NUMBER, SUM)
"""One over the share of the sum, without the constant factors of a mean, and 0 if all losses are left out; the same by the share of
each loss; one over the latter; one over the former; one over the constant factor, as of a mean of means; added as it is.
"""


def weight_of(term: Term, mode: Mode) -> Denominator | None:
    """The weight of a term by its share: None for a sum, 0 where nothing is counted, nan where it cannot be read.

    Example:
        >>> term = Term(0, "mean", 0.125, 0.125, number=0.5, is_mean=True)
        >>> [weight_of(term, mode) for mode in MODES]
        [4.0, 4.0, 8.0, 8.0, 2.0, None]
    """
    if mode == SUM:
        return None if isinstance(term.total, Tensor) or term.total != 0 else 0.0  # nothing at all
    if mode == ONCE:
        return 1.0
    number = size_of(term.number) if term.is_mean else 1.0
    if mode == COUNT:
        weight = quotient(number, term.losses if isinstance(term.total, float) and math.isnan(term.total) else term.total)
        are_none = not term.is_mean and term.losses == 0  # a mean counts what a mask leaves out of it
        if isinstance(are_none, Tensor):
            return tensor_of(weight, are_none.device, exact_dtype(are_none.device)).masked_fill(are_none, 0.0)
        return 0.0 if are_none else weight
    if mode == NUMBER:
        is_nothing = not isinstance(term.total, Tensor) and term.total == 0
        return 0.0 if is_nothing else quotient(1.0, number if term.is_mean and not isinstance(number, Tensor) else math.nan)
    if mode == TOTAL:
        return quotient(1.0, term.total)
    return quotient(number if mode == MEAN else 1.0, term.losses)


def oddities(term: Term, mode: Mode) -> dict[str, Denominator]:
    """What a check must have seen of a term to trust its mode: not 0 where all its losses are masked, or have several weights."""
    losses, total = term.losses, term.total
    goes_by_losses = mode in (MEAN, LOSSES) or (mode == COUNT and not term.is_mean)
    is_masked: Any = (losses == 0) & (total != 0) & (total == total)  # and not nan
    are_several = len(term.shares) != 1 or (isinstance(term.shares[0], Tensor) and term.shares[0].numel() > 1)
    return {"masked": is_masked if goes_by_losses else 0.0, "uneven": is_nan(losses) if are_several else 0.0}


def may_be_raised(term: Term, mode: Mode, weight: Denominator | None) -> Denominator:
    """Not 0 where a count of 0 may have been raised to 1 to divide by it: no mask leaves out a loss of its sum."""
    if weight is None or not term.is_divided or mode not in (COUNT, MEAN, LOSSES, TOTAL):
        return 0.0
    is_one: Denominator = size_of(weight - 1) < _ROUNDING
    for share in term.shares:
        if not isinstance(share, Tensor):
            is_one = is_one if share else 0.0
        elif isinstance(is_one, Tensor) or is_one:
            is_one = on_host((share != 0).all() & (share.numel() > 1 or not share.dim()) & is_one)
    return is_one


_ROUNDING = 1e-6


def is_lost(loss: Tensor, weight: Denominator, terms: Sequence[Term]) -> Denominator:
    """Not 0 where a count is 0 of a loss that is not: its gradient is in no window."""
    if any(term.is_penalty for term in terms) or (not isinstance(weight, Tensor) and weight):
        return 0.0
    loss = loss.detach()
    return on_host(loss.isfinite() & (loss != 0) & (weight == 0))


def factor_of(term: Term, mode: Mode) -> Denominator:
    """What is the same in all micro-batches of a window."""
    if mode == ONCE:
        return float(len(term.edges))
    if mode in (SUM, COUNT, MEAN):
        own = term.total + 1.0 if mode == SUM else term.number if term.is_mean else 1.0
        is_unknown = not isinstance(own, Tensor) and math.isnan(own)
        return own * term.kink if not is_unknown else 0.0 if mode == SUM else term.kink
    return 0.0 if isinstance(term.kink, float) and term.kink == 1.0 else term.kink


def default_mode(term: Term) -> Mode:
    """What is not checked is taken for."""
    if term.is_penalty:
        return ONCE
    return COUNT if term.is_mean or term.is_divided else SUM


def words_of(term: Term, mode: Mode) -> str:
    """How a term is weighed, in words."""
    if mode == SUM:
        return f"{term.words or 'loss'}, summed, not averaged" if term.words != "sum" else "summed, not averaged"
    if callable(mode):
        return f"weighted by the {name_of(mode)}, which the check has found"
    return term.words if term.words.startswith("mean") else f"mean {term.words}".rstrip()


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
        doubt: not 0 where its weight may be none: see :func:`may_be_raised`.
    """

    weight: Denominator | None
    others: tuple[Denominator, ...] = ()
    factors: Denominator = 0.0
    of_mean: OfMean | None = None
    structure: frozenset[int] = frozenset()
    of_terms: Mapping[int, Denominator | None] | None = None
    of_factors: Mapping[int, Denominator] | None = None
    doubt: Denominator = 0.0
