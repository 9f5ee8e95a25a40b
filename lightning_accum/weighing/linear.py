"""What goes on below a node of an autograd graph that is linear: its share in the loss, and what is known of it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_accum.exact import exact
from lightning_accum.weighing.nodes import (
    CONTRACTIONS,
    CRITERIA,
    MEAN_REDUCTION,
    PRODUCTS_ADDED,
    SOMETIMES,
    SUMS,
    THROUGH,
    Node,
    is_first_layer,
    kind_of,
    number_of,
    reduced_numel,
)
from lightning_accum.weighing.terms import Denominator, on_host, quotient, tensor_of

ADDITIONS, STACKS, CROSS_ENTROPIES = {"Add", "Sub", "Rsub"}, {"Stack", "Cat"}, {"NllLoss", "NllLoss2D"}
_PRODUCTS, _LAYERS = {"Div", "Dot", "Lerp", "Mul", *CONTRACTIONS}, {*CONTRACTIONS, *PRODUCTS_ADDED}
_NOT_LINEAR_IN = {"Addcdiv": 2, "Div": 1, "Lerp": 2}
_CHANGES_SOME = {"MaskedFill", "NanToNum", "Where"}


class Summand(NamedTuple):
    """What the loss adds up last.

    Attributes:
        edge: the addition, and the place of the summand there; None for all of a node.
        place: in the sum.
        above: what it is multiplied by on the way to the loss.
        top: its node.
    """

    edge: tuple[Node, int | None]
    place: tuple[int, ...]
    above: Denominator
    top: Node


class Arrived(NamedTuple):
    """What arrives at a node, from one summand; see :class:`Term`.

    Attributes:
        share: one number if all numbers of the gradient are the same, else the gradient.
        path: the kinds of nodes above, below the addition.
    """

    share: Denominator
    summand: Summand
    total: Denominator | None = None
    number: Denominator = 1.0
    kink: Denominator = 1.0
    is_mean: bool = False
    is_divided: bool = False
    path: tuple[str, ...] = ()
    divisions: tuple[Node, ...] = ()

    @property
    def is_one(self) -> bool:
        """One number for all."""
        return not isinstance(self.share, Tensor) or not self.share.dim()

    def through(self, kind: str, **changes: Any) -> Arrived:
        """What goes on below a node of that kind."""
        if kind not in THROUGH and kind not in SOMETIMES and self.path[-1:] != (kind,):
            changes["path"] = (*self.path, kind)
        return self._replace(**changes)


Input: TypeAlias = tuple[int, Node, int]
"""The place of an operand, its node, and the place among the outputs of that."""


def is_loss(node: Node, kind: str, of_batch: Sequence[Input], inputs: int, arrived: Arrived) -> bool:
    """A node of a kind that can be linear is not, in these of its operands, or it is a layer of the network."""
    places = [place for place, *_ in of_batch]
    is_product = kind in _PRODUCTS or (kind in PRODUCTS_ADDED and all(places))
    return (
        not places
        or (arrived.total is not None and (kind == "Mul" or kind in _LAYERS) and is_first_layer(node))
        or (len(places) > 1 and is_product)
        or (len(places) < inputs and kind in _LAYERS)
        or _NOT_LINEAR_IN.get(kind) in places
        or (kind == "Where" and len(places) > 1 and node._saved_condition.numel() == 1)
    )


def beside_a_kink(node: Node, kind: str, place: int, child: Node, at: int, arrived: Arrived) -> tuple[Node, int, Arrived]:
    """Go on as if it was straight, and note its slope."""
    result = node(spread(1.0, node, 0))
    slope = _wide(result[place] if isinstance(result, tuple) else result)
    return child, at, arrived.through(kind, kink=arrived.kink * on_host(2.0 - slope))


def of_criterion(node: Node, kind: str, arrived: Arrived) -> Arrived:
    """At the losses that a fused criterion has reduced."""
    if node._saved_reduction == MEAN_REDUCTION:
        count = CRITERIA[kind][1](node)
        share = on_host(quotient(arrived.share, _wide(count) if isinstance(count, Tensor) else count))
        return arrived.through(kind, share=share, total=share if arrived.total is None else arrived.total, is_mean=True)
    share = arrived.share if node._saved_self.numel() else 0.0
    if kind in CROSS_ENTROPIES:  # a sum over labels that are all ignored
        total_weight = _wide(node._saved_total_weight)
        share = on_host(torch.where(total_weight == 0, torch.zeros_like(total_weight), share))
    return arrived.through(kind, share=share, total=arrived.share if arrived.total is None else arrived.total)


def of_all_alike(node: Node, kind: str, own: int, place: int, child: Node, at: int, arrived: Arrived) -> Arrived | None:
    """Go on with one number; None if what arrives below is not all the same."""
    numel, share = numel_of(child, at), arrived.share
    total = share if arrived.total is None else arrived.total
    if kind in ("Mean", "Sum"):
        if not len(child._input_metadata[at].shape):
            return arrived
        if kind_of(child) in STACKS and all(below is None or numel_of(below, n) == 1 for below, n in child.next_functions):
            number = 1 / numel if kind == "Mean" else 1.0  # a sum or mean of terms
            return arrived._replace(share=share * number, number=arrived.number * number)
        if kind == "Sum":
            return arrived.through(kind, total=total)
        share = quotient(share, reduced_numel(node))
        return arrived.through(kind, share=share, total=share if arrived.total is None else total, is_mean=True)
    if kind == "Neg":
        return arrived.through(kind, share=-share)
    if kind == "Expand" and own >= numel > 0:
        return arrived.through(kind, share=share * (own // numel))
    if kind in THROUGH and kind not in _CHANGES_SOME and numel == own:
        return arrived.through(kind)
    if kind not in ("Mul", "Div") or numel not in (own, 1):
        return None
    operand = node._saved_other if place == 0 else node._saved_self
    if operand is None or (isinstance(operand, Tensor) and operand.numel() != 1):
        return None
    times, share = operator.mul if kind == "Mul" else quotient, share * (own // numel)
    if (factor := number_of(operand)) is not None:
        changes = {"share": times(share, factor), "number": times(arrived.number, factor)}
    else:
        changes = {"share": times(share, _wide(operand)), "total": total if operand.dim() else arrived.total}
        if kind == "Div":
            changes["divisions"] = (*arrived.divisions, node)
        elif not operand.dim():
            changes["number"] = on_host(arrived.number * _wide(operand))
    return arrived.through(kind, **changes, is_divided=arrived.is_divided or kind == "Div")


def run(
    node: Node, kind: str, index: int, inputs: Sequence[Input], arrived: Arrived, is_scalar: bool
) -> list[tuple[Node, int, Arrived]]:
    """Run the backward of ``node`` itself."""
    total = arrived.total
    if total is None and arrived.is_one and (kind in SUMS or kind in CONTRACTIONS or kind == "Trace"):
        total = arrived.share
    result = node(*(spread(arrived.share, node, at) if at == index else None for at in range(len(node._input_metadata))))
    gradients = result if isinstance(result, tuple) else (result,)
    divisor = getattr(node, "_saved_other", None) if kind == "Div" else None
    arrived = arrived._replace(is_mean=arrived.is_mean or kind == "Mean", is_divided=arrived.is_divided or kind == "Div")
    if isinstance(divisor, Tensor) and divisor.numel() == 1:
        arrived = arrived._replace(divisions=(*arrived.divisions, node))
    found = []
    for place, child, at in inputs:
        gradient = gradients[place]
        if gradient is None:
            continue
        shape = tuple(map(int, child._input_metadata[at].shape))
        gradient = gradient if gradient.shape == shape else gradient.sum_to_size(shape)
        if isinstance(divisor, Tensor):
            gradient = torch.where(divisor == 0, torch.zeros_like(gradient), gradient)
        own = arrived.share if total is None and arrived.is_one and not is_scalar and gradient.numel() != 1 else total
        below = arrived.through(kind, share=_wide(gradient) if gradient.numel() == 1 else gradient, total=own)
        found.append((child, at, below))
    return found


def numel_of(node: Node, index: int) -> int:
    """The numbers of an output; 2 for those of a nested tensor, whose sizes are no numbers."""
    try:
        return math.prod(map(int, node._input_metadata[index].shape))
    except AttributeError:
        return 2


def is_number_alone(node: Node, index: int) -> bool:
    """Without dimensions: a row has one."""
    return numel_of(node, index) == 1 and not len(node._input_metadata[index].shape)


def spread(share: Denominator, node: Node, index: int) -> Tensor:
    """One number as a gradient of what an output is."""
    if isinstance(share, Tensor) and share.dim():
        return share
    metadata = node._input_metadata[index]
    return tensor_of(share, metadata.device, metadata.dtype).expand(tuple(map(int, metadata.shape)))


def _wide(tensor: Tensor) -> Tensor:
    """One number in the widest type that its device has."""
    return exact(tensor.real if tensor.is_complex() else tensor).reshape(())
