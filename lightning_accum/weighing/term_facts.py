"""What is to be known of the terms of a loss that was read, beside its weight."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_accum.exact import exact
from lightning_accum.weighing.contribution import COUNTS_NOTHING, Way
from lightning_accum.weighing.denominator import Denominator, Term, is_of_zeros
from lightning_accum.weighing.nodes import path_of


def are_same(one: Denominator | None, other: Denominator | None) -> bool:
    """Whether two denominators are known on the host to be the same, but for the order in which they were added up."""
    if one is None or other is None or any(isinstance(d, Tensor) and d.device.type != "cpu" for d in (one, other)):
        return one is other
    types = [d.dtype for d in (one, other) if isinstance(d, Tensor) and d.is_floating_point()]
    rounding = 16 * max((torch.finfo(dtype).eps for dtype in types), default=0.0)
    first, second = float(one), float(other)
    return math.isclose(first, second, rel_tol=0.0 if first.is_integer() and second.is_integer() else rounding)


def number_for(terms: Sequence[Term], penalties: Sequence[str]) -> Denominator:
    """A number from 1 to 2 that is another one where a factor of a term is, or a penalty; in double precision."""
    number: Denominator = sum(zlib.crc32(penalty.encode()) for penalty in penalties) / 2**32
    for place, term in enumerate(terms, start=1):
        if term.factor not in (0.0, 1.0):
            number = number + (math.log(abs(term.factor)) + (term.factor < 0)) * (0.4 + place / math.pi)
        for constant in term.constants:
            if constant.device.type == "cpu":
                value = abs(constant.item()) or 1e-300
                number = number + (math.log(value) + (constant.item() < 0)) * (0.4 + place / math.pi)
            else:
                constant = exact(constant).reshape(())
                number = number + ((constant.abs() + 1e-300).log() + (constant < 0)) * (0.4 + place / math.pi)
    return 1.0 + number % 1.0


def ways_of(terms: Sequence[Term], loss: Tensor) -> tuple[frozenset[Way], frozenset[Way]]:
    """How the terms of a loss were read; and those that were multiplied by 0."""
    ways: tuple[set[Way], set[Way]] = set(), set()
    for term in terms:
        node, index = (loss.grad_fn, loss.output_nr) if term.edge is None else term.edge[0].next_functions[term.edge[1]]
        if term.factor != 0 or not is_of_zeros(term.node):
            ways[term.factor == 0].add(path_of(node, index))
        if term.is_divided_sum and _is_at_most_one(term.denominator):
            ways[0].add(COUNTS_NOTHING)
    return frozenset(ways[0]), frozenset(ways[1])


def raised_together(terms: list[Term]) -> list[Term]:
    """A masked sum of nothing weighs nothing, but what else is divided by its count, which was raised to 1, does."""
    counts = {
        term.divisions: term.denominator
        for term in terms
        if term.divisions and term.is_divided_sum and _is_at_most_one(term.denominator)
    }
    return [
        term._replace(denominator=counts[term.divisions])
        if term.is_divided_sum and term.divisions in counts and _known(term.denominator) == 0
        else term
        for term in terms
    ]


def zero_where_empty(weight: Denominator | None, value: Denominator, term: Term) -> Denominator | None:
    """A loss of 0 that was divided by a count of at most 1 is that of no label: ``loss.sum() / max(int(mask.sum()), 1)``.

    But for one row, whose own loss may be 0, as that of a margin that is kept.
    """
    if weight is None or not term.is_divided_sum or term.rows == 1:
        return weight
    if isinstance(weight, Tensor):
        value = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
        return torch.where((value == 0) & (weight <= 1), torch.zeros_like(weight), weight)
    return 0.0 if weight <= 1 and bool(value == 0) else weight


def _is_at_most_one(count: Denominator | None) -> bool:
    """And not 0."""
    known = _known(count)
    return known is not None and 0 < known <= 1


def _known(count: Denominator | None) -> float | None:
    """A count as the host knows it; None where there is none, or a device has it."""
    return None if count is None or (isinstance(count, Tensor) and not count.is_cpu) else float(count)
