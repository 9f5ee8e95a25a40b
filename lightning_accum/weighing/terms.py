"""The terms of a loss: its summands, and the weight of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_accum.exact import exact, exact_dtype, on_host, tensor_of
from lightning_accum.weighing.nodes import SOMETIMES, THROUGH, Node, is_multiplied_by_zero, kind_of

Denominator: TypeAlias = "Tensor | float"
PENALTY = "penalty on parameters"
NOWHERE: Mapping[int, int] = MappingProxyType({})
Mode: TypeAlias = "str | Callable[[Any], Any]"
"""One of :data:`MODES`, or a count of the batch."""

COUNT, MEAN, LOSSES, TOTAL, NUMBER, SUM, ONCE = "count", "mean", "losses", "total", "number", "sum", "once"
MODES = (COUNT, MEAN, LOSSES, TOTAL, NUMBER, SUM)
"""The weight of a term in each mode: 1 / share of the sum, without the constant factors of a mean, 0 if all losses are masked; the
same with the share of each loss; 1 / share of each loss; 1 / share of the sum; 1 / constant factor, as in a mean of means; summed
without a weight.
"""
_ROUNDING = 1e-6


class Edge(NamedTuple):
    """The place to scale the gradient of a summand."""

    node: Node  # the last addition above it
    place: int | None = None  # the index of its operand; None for the whole node
    element: int | None = None  # its index in a vector of summands; None for all


class Arrived(NamedTuple):
    """The gradient at a node from one summand of the loss; see :class:`Term`."""

    share: Denominator  # one number if all elements of the gradient are equal, else the gradient
    edge: Edge  # the addition and the position of the summand in it
    place: tuple[int, ...] = ()  # the index of the summand in the sum
    above: Denominator = 1.0  # the factors on the way to the loss
    total: Denominator | None = None
    number: Denominator = 1.0
    kink: Denominator = 1.0
    is_mean: bool = False
    divisor: float = 0.0
    path: tuple[str, ...] = ()  # the kinds of nodes between the addition and this node
    divisions: tuple[Node, ...] = ()
    is_vector: bool = False  # whether it is a vector of numbers, each a separate summand
    places: Mapping[int, int] = NOWHERE  # see :func:`terms_of`

    @property
    def is_one(self) -> bool:
        """Whether all elements are equal, and kept as one number."""
        return not isinstance(self.share, Tensor) or not self.share.dim()

    def summed(self, node: Node, place: int, share: Denominator, is_vector: bool = False) -> Arrived:
        """The arrival at an operand of an addition: a separate summand, or a vector of summands."""
        places = (*self.place, place)
        return self._replace(share=share, path=(), edge=Edge(node, place), place=places, above=share, is_vector=is_vector)

    def through(self, kind: str, **changes: Any) -> Arrived:
        """The arrival below a node of this kind."""
        if kind not in THROUGH and kind not in SOMETIMES and self.path[-1:] != (kind,):
            changes["path"] = (*self.path, kind)
        return self._replace(**changes)


class Term(NamedTuple):
    """One summand of a loss, or several similar ones."""

    key: int  # identifies it in all micro-batches: the kinds of nodes on the way to its losses
    words: str  # its name; empty if it is not a sum or mean
    losses: Denominator  # the share of each of its losses; 0 if all are masked, nan if the shares differ
    total: Denominator  # the share of their sum, above masks and weights; nan if there is none
    number: Denominator = 1.0  # the product of the Python numbers that a mean is multiplied by
    kink: Denominator = 1.0  # 1 if it is on the rising side of all kinks above it (``relu(mean - c)``), another number otherwise
    is_mean: bool = False  # a node divided its sum by its own count
    divisor: float = 0.0  # the product of the Python numbers that divide it; 0 if nothing but a mean does
    is_penalty: bool = False  # it depends on parameters only
    is_bent: bool = False  # a piecewise linear function of means or sums: no count adds up on both sides of the kink
    edges: Mapping[Edge, Denominator] = {}  # the places to scale its gradient, and the factors from there to the loss
    divisions: tuple[Node, ...] = ()  # the divisions by tensors, and the products with parameters, on the way to it
    shares: tuple[Denominator, ...] = ()  # the shares of its losses, one number each if all are equal

    def weight(self, mode: Mode) -> Denominator | None:
        """Its weight by mode: None for a sum, 0 for an empty count, nan if unknown.

        Example:
            >>> term = Term(0, "mean", 0.125, 0.125, number=0.5, is_mean=True)
            >>> [term.weight(mode) for mode in MODES]
            [4.0, 4.0, 8.0, 8.0, 2.0, None]
        """
        if mode == SUM:
            return None if isinstance(self.total, Tensor) or self.total != 0 else 0.0  # an empty sum
        if mode == ONCE:
            return 1.0
        number = size_of(self.number) if self.is_mean else 1.0
        if mode == COUNT:
            weight = quotient(number, self.losses if isinstance(self.total, float) and math.isnan(self.total) else self.total)
            are_none = not self.is_mean and self.losses == 0  # in a mean, masked elements count
            if isinstance(are_none, Tensor):
                return tensor_of(weight, are_none.device, exact_dtype(are_none.device)).masked_fill(are_none, 0.0)
            return 0.0 if are_none else weight
        if mode == NUMBER:
            is_nothing = not isinstance(self.total, Tensor) and self.total == 0
            return 0.0 if is_nothing else quotient(1.0, number if self.is_mean and not isinstance(number, Tensor) else math.nan)
        if mode == TOTAL:
            return quotient(1.0, self.total)
        return quotient(number if mode == MEAN else 1.0, self.losses)

    @property
    def is_off(self) -> bool:
        """Whether it has a factor of 0 that the host knows, as one that begins with a later step."""
        return not isinstance(self.number, Tensor) and self.number == 0

    def oddities(self, mode: Mode) -> dict[str, Denominator]:
        """Not 0 if it has the factor 0, or all its losses are masked or have several weights, which the check must have seen."""
        losses: Any = self.losses
        is_zero: Any = self.total == 0
        are_several = len(self.shares) != 1 or (isinstance(self.shares[0], Tensor) and self.shares[0].numel() > 1)
        return {
            "zero": is_zero & (not self.is_off),
            "masked": (losses == 0) & (is_zero == 0) & (mode != SUM),
            "uneven": losses != losses if are_several else 0.0,
        }

    def may_be_raised(self, mode: Mode, weight: Denominator | None, unit: float = 1.0) -> Denominator:
        """Not 0 if its divisor may be a count of 0 raised to 1: no mask leaves out a part of its losses.

        A mask that leaves out all of them counts only for a mean, whose weight does not depend on the mask.
        """
        if weight is None or not self.divisor or mode not in (COUNT, MEAN, LOSSES, TOTAL):
            return 0.0
        is_one = self.counts_one(weight * unit)
        for share in self.shares:
            if not isinstance(share, Tensor):
                is_one = is_one if share or self.is_mean else 0.0
            elif isinstance(is_one, Tensor) or is_one:
                are_alike = (share != 0).all() | (self.is_mean & (share == 0).all())
                is_one = on_host(are_alike & (share.numel() > 1 or not share.dim()) & is_one)
        return is_one

    def counts_one(self, weight: Denominator | None) -> Denominator:
        """Not 0 if its denominator is 1, whatever it is multiplied by."""
        if weight is None or not self.divisor:
            return 0.0
        return size_of(size_of(weight if self.is_mean else weight * self.number * self.divisor) - 1) < _ROUNDING

    def factor(self, mode: Mode) -> Denominator:
        """Its constant factors, which must be the same in all micro-batches of a window."""
        if mode == ONCE:
            return self.penalties
        if mode in (SUM, COUNT, MEAN):
            own = self.total + 1.0 if mode == SUM else self.number if self.is_mean else 1.0
            is_unknown = not isinstance(own, Tensor) and math.isnan(own)
            return own * self.kink if not is_unknown else 0.0 if mode == SUM else self.kink
        return 0.0 if isinstance(self.kink, float) and self.kink == 1.0 else self.kink

    @property
    def penalties(self) -> Denominator:
        """The number of its penalties that are not multiplied by 0."""
        tops = [node.next_functions[place][0] for node, place, _ in self.edges if place is not None]
        return len(self.edges) - sum(on_host(is_multiplied_by_zero(top)) for top in tops)

    @property
    def default_mode(self) -> Mode:
        """The mode of an unchecked term."""
        if self.is_penalty:
            return ONCE
        return COUNT if self.is_mean or self.divisor else SUM


def size_of(share: Denominator) -> Denominator:
    """The absolute value of a share."""
    return on_host(share.abs() if isinstance(share, Tensor) else abs(share))


def quotient(number: Denominator, divisor: Denominator) -> Denominator:
    """The quotient; 0 for a division by 0."""
    if isinstance(divisor, Tensor):
        return torch.where(divisor == 0, torch.zeros_like(divisor), number / divisor)
    return number / divisor if divisor else 0.0 * number


def same(numbers: Sequence[Denominator]) -> Denominator:
    """The common value; nan if they differ."""
    if any(isinstance(number, Tensor) for number in numbers):
        return numbers[0] if all(number is numbers[0] for number in numbers) else float("nan")
    return numbers[0] if len(set(numbers)) == 1 else float("nan")


def alike(terms: Sequence[Term], looped: Collection[int]) -> list[Term]:
    """Combine penalties into one term, and terms of one kind whose number varies between losses, as in a loop over rows.

    Args:
        terms: the terms of one loss.
        looped: the kinds of terms whose number varies. A kind is a key without its last 8 bits.
    """
    if all(term.is_penalty for term in terms):
        terms = [term._replace(is_penalty=False) for term in terms]
    groups: dict[int, list[Term]] = {}
    many = {term.key >> 8 for term in terms if term.key & 255 >= _MANY}
    for term in terms:
        key = 0 if term.is_penalty else term.key >> 8 << 8 if term.key >> 8 in looped or term.key >> 8 in many else term.key
        groups.setdefault(key, []).append(term)
    return [joined(key, group) for key, group in groups.items()]


_MANY = 16
"""Kinds of terms that are always combined."""


def by_place(terms: Mapping[int, Term], order: Sequence[int]) -> Mapping[int, int]:
    """Names of terms by their place, if some are multiplied by 0 as if absent (``logits.sum() * 0``); else empty."""
    pairs = [*zip(terms, order, strict=False)]
    are_known = len(terms) == len(order) and all(terms[own].is_off or own >> 8 == key >> 8 for own, key in pairs)
    return dict(pairs) if are_known and any(term.is_off for term in terms.values()) else NOWHERE


def joined(key: int, terms: Sequence[Term]) -> Term:
    """Combine similar terms, or all losses of one term, into one term with this key."""
    first = terms[0]
    if len(terms) == 1:
        return first._replace(key=key)
    return first._replace(
        key=key,
        losses=one_of([term.losses for term in terms]),
        total=one_of([term.total for term in terms]),
        number=same([term.number for term in terms]),
        kink=math.prod(term.kink for term in terms),
        is_mean=all(term.is_mean for term in terms),
        divisor=max(term.divisor for term in terms),
        is_bent=any(term.is_bent for term in terms),
        edges={edge: above for term in terms for edge, above in term.edges.items()},
        divisions=tuple(dict.fromkeys(division for term in terms for division in term.divisions)),
        shares=tuple(share for term in terms for share in term.shares),
    )


def one_of(shares: Sequence[Denominator]) -> Denominator:
    """The size of all shares that are not 0; 0 if all are 0, nan if there are several sizes.

    Example:
        >>> one_of([0.5, 0.0, -0.5]), one_of([0.5, 0.25]), one_of([0.5, float("nan")])
        (0.5, nan, nan)
    """
    if len(shares) == 1 and not (isinstance(shares[0], Tensor) and shares[0].dim()):
        return size_of(shares[0])
    tensors = [share.detach() for share in shares if isinstance(share, Tensor)]
    # one element of each expanded dimension
    tensors = [share[tuple(slice(None if stride else 1) for stride in share.stride())].abs() for share in tensors]
    if not tensors:
        sizes = {abs(float(share)) for share in shares if share} or {0.0}
        most, least = max(sizes), min(sizes)
        return most if most - least <= 1e-12 * most and not math.isnan(sum(sizes)) else float("nan")  # nan does not compare
    device, dtype = tensors[0].device, exact_dtype(tensors[0].device)
    eps = max(torch.finfo(share.dtype).eps for share in tensors if share.is_floating_point())
    tensors += [torch.tensor(abs(share), dtype=dtype, device=device) for share in shares if not isinstance(share, Tensor)]
    highest = [share.amax().to(device, dtype) for share in tensors if share.numel()]
    lowest = [share.masked_fill(share == 0, torch.inf).amin().to(device, dtype) for share in tensors if share.numel()]
    if not highest:
        return 0.0
    high, low = torch.stack(highest).amax(), torch.stack(lowest).amin()
    return on_host(torch.where((high - low <= 64 * eps * high) | (high == 0), high, torch.full_like(high, torch.nan)))


def keep_weight(loss: Tensor, weight: Denominator, rounded: Tensor) -> None:
    """Correct the gradient of a loss in a narrow type: multiply it by weight / ``rounded`` where types are wider."""
    lost = torch.where(rounded == 0, 1.0, weight / exact(rounded))

    def hook(gradients: tuple[Tensor | None, ...], _: Any) -> Any:
        return tuple(g if g is None or g.dtype == loss.dtype else (g * lost).to(g.dtype) for g in gradients)

    assert loss.grad_fn is not None
    loss.grad_fn.register_hook(hook)


def scale_terms(terms: Sequence[Term], factors: list[Denominator]) -> None:
    """Multiply the gradient of each term by its factor in the next backward.

    Example:
        >>> from lightning_accum.weighing.shares import terms_of
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> loss = x.square().mean() + x.sum()
        >>> scale_terms(terms_of(loss), [10.0, 3.0])
        >>> loss.backward()
        >>> x.grad
        tensor([13., 23.])
    """
    for number, term in enumerate(terms):
        for edge in term.edges:

            def hook(gradients: tuple[Tensor | None, ...], *_: Any, number: int = number, edge: Edge = edge) -> Any:
                return tuple(
                    _times_at(edge.element, g, factors[number])
                    if g is not None and (edge.place in (None, at) or kind_of(edge.node) == "Dot")
                    else g
                    for at, g in enumerate(gradients)
                )

            if edge.place is None:
                edge.node.register_prehook(hook)
            else:
                edge.node.register_hook(hook)


def _times_at(element: int | None, gradient: Tensor, factor: Denominator) -> Tensor:
    scaled = _times(gradient, factor)
    if element is None:
        return scaled
    is_it = torch.arange(gradient.numel(), device=gradient.device).view(gradient.shape) == element
    return torch.where(is_it, scaled, gradient)


def _times(gradient: Tensor, factor: Denominator) -> Tensor:
    if isinstance(factor, Tensor):
        return gradient * factor.to(gradient.dtype)
    return gradient * factor if factor else torch.zeros_like(gradient)
