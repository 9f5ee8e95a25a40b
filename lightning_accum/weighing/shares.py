"""What a loss is made of: its terms, and the share that each of the losses they add up has in it.

A loss ``(l_1 + ... + l_k) / n`` has the gradient ``1 / n`` by each ``l_i``, however it was computed. So the backward runs from the
loss down through what is linear, and no further, and what arrives there is ``1 / n``, or 0 for what a mask leaves out. Nothing is
copied to the host, and a gradient whose numbers are all the same is one number.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lightning_accum.errors import UnreadableLossError
from lightning_accum.exact import exact_dtype
from lightning_accum.weighing.nodes import (
    CONTRACTIONS,
    CRITERIA,
    KINKS,
    LINEAR,
    MEAN_REDUCTION,
    PRODUCTS_ADDED,
    SOMETIMES,
    SUMS,
    THROUGH,
    Node,
    constant_operand,
    head_of,
    ignored_of,
    is_first_layer,
    is_number,
    is_of_parameters_only,
    kind_of,
    kinds_below,
    reduced_numel,
)
from lightning_accum.weighing.terms import PENALTY, Denominator, Term, on_host, one_of, same, size_of, tensor_of

_ADDITIONS = {"Add", "Sub", "Rsub"}
NOWHERE: Mapping[int, int] = MappingProxyType({})


@dataclass(slots=True)
class _Way:
    """What arrives at a node: all numbers are ``value``, or they are those of the tensor ``full``."""

    value: Denominator
    full: Tensor | None
    total: Denominator | None = None
    number: Denominator = 1.0
    kink: Denominator = 1.0
    is_mean: bool = False
    is_divided: bool = False
    edge: tuple[Node, int | None] = (None, None)
    path: tuple[str, ...] = ()
    divisions: tuple[Node, ...] = ()
    place: tuple[int, ...] = ()
    above: Denominator = 1.0
    top: Node = None

    def on(self, kind: str, **changes: Any) -> _Way:
        """What goes on below a node of that kind."""
        given = {name: getattr(self, name) for name in _Way.__slots__} | changes
        if kind not in (*THROUGH, *SOMETIMES) and self.path[-1:] != (kind,):
            given["path"] = (*self.path, kind)
        return _Way(**given)


@dataclass
class _Leaves:
    """Losses that are reached, by the summand that they are in."""

    key: int
    words: str
    place: tuple[int, ...]
    """In the sum."""
    node: Node
    leaf: Node = None
    ways: list[_Way] = field(default_factory=list)
    shares: list[Denominator] = field(default_factory=list)


@torch.no_grad()
def terms_of(loss: Tensor, below: tuple[Node, int] | None = None, places: Mapping[int, int] = NOWHERE) -> list[Term]:
    """Run the backward of ``loss`` down to what it adds up. No hook is called, and the graph stays as it is.

    Args:
        loss: one number, with its graph.
        below: the node to begin with, and the place of its output; that of the loss if None.
        places: of parameters, by their id: terms of other heads are others.

    Raises:
        UnreadableLossError: a node cannot be run, as after a backward.

    Example:
        >>> x, mask = torch.arange(4.0, requires_grad=True), torch.tensor([True, False, True, False])
        >>> (term,) = terms_of((x.square() * mask).sum() * (1 / mask.sum()))
        >>> float(term.losses), float(term.total)
        (0.5, 0.5)
        >>> [term.words for term in terms_of(torch.nn.functional.mse_loss(x, x + 1) + 0.1 * (x * mask).exp().sum())]
        ['mean squared error', 'sum']
    """
    root, place = (loss.grad_fn, loss.output_nr) if below is None else below
    found: dict[Any, _Leaves] = {}
    try:
        _walk(root, place, _Way(1.0, None, edge=(root, None), top=root), found)
    except (RuntimeError, AttributeError, TypeError) as error:
        raise UnreadableLossError(f"a node that cannot be run ({error})") from error
    seen: dict[int, int] = {}
    terms = []
    for leaves in sorted(found.values(), key=lambda leaves: leaves.place):
        head = head_of(leaves.node, places) if places else ()
        key = zlib.crc32(repr(head).encode(), leaves.key >> 8) << 8 if head else leaves.key
        seen[key] = number = seen.get(key, -1) + 1
        terms.append(_term(leaves, key + min(number, 255)))
    return terms


def _walk(root: Node, place: int, way: _Way, found: dict[Any, _Leaves]) -> None:
    """Each node before those below it: what arrives at it on several ways is added up, for each summand by itself."""
    given: dict[Node, dict[Any, tuple[int, _Way]]] = {root: {(place, None): (place, way)}}
    for node in _in_order(root):
        for index, arrived in given.pop(node, {}).values():
            for child, at, below in _below(node, index, arrived, found):
                ways = given.setdefault(child, {})
                key = (at, below.edge)
                ways[key] = (at, below if key not in ways else _together(ways[key][1], below, child, at))


def _in_order(root: Node) -> list[Node]:
    order, stack, seen = list[Node](), [(root, False)], {root}
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
            continue
        stack.append((node, True))
        if kind_of(node) in LINEAR or kind_of(node) in KINKS:
            for child, _ in node.next_functions:
                if child is not None and child not in seen:
                    seen.add(child)
                    stack.append((child, False))
    return order[::-1]


def _together(first: _Way, other: _Way, node: Node, index: int) -> _Way:
    """What arrives at an output on two ways."""
    divisions = tuple(dict.fromkeys((*first.divisions, *other.divisions)))
    total = first.total if first.total is other.total or first.total == other.total else float("nan")
    number, kink = same([first.number, other.number]), first.kink * other.kink
    changes: dict[str, Any] = {"divisions": divisions, "total": total, "number": number, "kink": kink}
    if first.full is None and other.full is None:
        return first.on("ToCopy", value=first.value + other.value, **changes)
    metadata = node._input_metadata[index]
    fulls = [_spread(one.value, metadata) if one.full is None else one.full for one in (first, other)]
    return first.on("ToCopy", full=fulls[0] + fulls[1], **changes)


def _below(node: Node, index: int, way: _Way, found: dict[Any, _Leaves]) -> list[tuple[Node, int, _Way]]:
    """Where to go on from ``node``; nothing where it is a loss, which is noted."""
    kind = kind_of(node)
    if _numel(node, index) == 0:  # nothing is chosen: there are no losses, whatever divides them
        return _note(found, node, kind, way.on("ToCopy", value=0.0, full=None))
    inputs = [(place, child, at) for place, (child, at) in enumerate(node.next_functions) if child is not None]
    if kind == "_DDPSink":  # every tensor goes in and out of that at the same place
        child, at = node.next_functions[index]
        return [(child, at, way.on("ToCopy"))]
    if kind in CRITERIA and way.full is None and node._saved_reduction != 0:
        return _note(found, node, kind, _of_criterion(node, kind, way))
    if kind in KINKS and way.full is None and len(inputs) == 1 and _is_number(node, index) and _is_number(*inputs[0][1:]):
        return [_beside_a_kink(node, kind, *inputs[0], way)]
    if kind not in LINEAR or not inputs:
        return _note(found, node, kind, way)
    of_batch = [one for one in inputs if not is_of_parameters_only(one[1])] if len(inputs) > 1 else inputs
    is_scalar = _numel(node, index) == 1
    sizes = [_numel(child, at) for _, child, at in inputs] if kind in (*_ADDITIONS, "Stack", "Cat") else []
    is_addition = kind in _ADDITIONS or (kind in ("Stack", "Cat") and max(sizes) == min(sizes) == 1)
    if is_addition and way.full is None and _numel(node, index) <= max(sizes) * len(inputs):
        return _summands(node, kind, inputs, way, is_scalar or kind in ("Stack", "Cat"))
    if not of_batch or (way.total is not None and kind in ("Mul", *_LAYERS) and is_first_layer(node)):
        return _note(found, node, kind, way)
    is_product = kind in (*_PRODUCTS, "Lerp") or (kind in PRODUCTS_ADDED and all(place for place, _, _ in of_batch))
    if len(of_batch) > 1 and is_product:
        return _note(found, node, kind, way)
    if len(of_batch) < len(inputs) and kind in _LAYERS:
        return _note(found, node, kind, way)
    if kind in _NOT_LINEAR_IN and any(place == _NOT_LINEAR_IN[kind] for place, _, _ in of_batch):
        return _note(found, node, kind, way)
    if kind == "Where" and len(of_batch) > 1 and node._saved_condition.numel() == 1:
        return _note(found, node, kind, way)
    if way.full is None and (uniform := _uniform(node, kind, index, of_batch, way)) is not None:
        return uniform
    if not all(isinstance(size, int) for size in node._input_metadata[index].shape):  # of a nested tensor
        return _note(found, node, kind, way)
    return _run(node, kind, index, of_batch, way, is_scalar)


def _beside_a_kink(node: Node, kind: str, place: int, child: Node, at: int, way: _Way) -> tuple[Node, int, _Way]:
    """Go on as if it was straight, and note its slope."""
    metadata = node._input_metadata[0]
    result = node(torch.ones(tuple(metadata.shape), dtype=metadata.dtype, device=metadata.device))
    slope = _wide(result[place] if isinstance(result, tuple) else result)
    return child, at, way.on(kind, kink=way.kink * on_host(2.0 - slope))


_PRODUCTS = {"Div", "Dot", "Mul", *CONTRACTIONS}
_LAYERS = {*CONTRACTIONS, *PRODUCTS_ADDED}
_NOT_LINEAR_IN = {"Addcdiv": 2, "Div": 1, "Lerp": 2}


def _numel(node: Node, index: int) -> int:
    numel = 1
    try:
        for size in node._input_metadata[index].shape:
            numel *= int(size)
    except AttributeError:  # of a nested tensor, whose sizes are no numbers
        return 2
    return numel


def _is_number(node: Node, index: int) -> bool:
    """Without dimensions: a row has one."""
    return _numel(node, index) == 1 and not len(node._input_metadata[index].shape)


def _summands(
    node: Node, kind: str, inputs: Sequence[tuple[int, Node, int]], way: _Way, is_scalar: bool
) -> list[tuple[Node, int, _Way]]:
    """The operands of an addition."""
    result = []
    is_own = is_scalar and len(inputs) > 1 and way.total is None
    for place, child, at in inputs:
        value = way.value
        if kind in _ADDITIONS:
            alpha = float(getattr(node, "_saved_alpha", 1.0))  # of a number there is none
            if kind == "Rsub":  # other - alpha * self
                value = -alpha * value if place == 0 else value
            elif place == 1:
                value = (alpha if kind == "Add" else -alpha) * value
            numel = _numel(child, at)
            if numel and (times := _numel(node, 0) // numel) > 1:  # what is small is added to each number
                value = value * times
        changes: dict[str, Any] = {"value": value}
        if is_own:
            changes |= {"edge": (node, place), "path": (), "place": (*way.place, place), "above": value, "top": child}
        result.append((child, at, way.on("ToCopy", **changes)))
    return result


def _uniform(
    node: Node, kind: str, index: int, inputs: Sequence[tuple[int, Node, int]], way: _Way
) -> list[tuple[Node, int, _Way]] | None:
    """Go on with one number; None if what arrives below is not all the same."""
    if len(inputs) != 1:
        return None
    place, child, at = inputs[0]
    numel, own = _numel(child, at), _numel(node, index)
    if kind in ("Mean", "Sum"):
        if not len(child._input_metadata[at].shape):
            return [(child, at, way.on("ToCopy"))]
        if kind_of(child) in ("Stack", "Cat") and all(below is None or _numel(below, n) == 1 for below, n in child.next_functions):
            number = 1 / numel if kind == "Mean" else 1.0  # a sum or mean of terms
            return [(child, at, way.on("ToCopy", value=way.value * number, number=way.number * number))]
        if kind == "Sum":
            return [(child, at, way.on(kind, total=way.value if way.total is None else way.total))]
        share = way.value / count if (count := reduced_numel(node)) else 0.0
        return [(child, at, way.on(kind, value=share, total=share if way.total is None else way.total, is_mean=True))]
    if kind == "Neg":
        return [(child, at, way.on(kind, value=-way.value))]
    if kind == "Expand" and own >= numel > 0:
        return [(child, at, way.on(kind, value=way.value * (own // numel)))]
    if kind in THROUGH and kind not in ("MaskedFill", "Where", "NanToNum", "Expand") and numel == own:
        return [(child, at, way.on(kind))]
    if kind in ("Mul", "Div"):
        operand = node._saved_other if kind == "Div" else constant_operand(node) if len(node.next_functions) < 2 or None in (
            node.next_functions[0][0], node.next_functions[1][0]
        ) else (node._saved_other if place == 0 else node._saved_self)  # fmt: skip
        if operand is None or (isinstance(operand, Tensor) and operand.numel() != 1):
            return None
        if numel != own and numel != 1:
            return None
        value = way.value * (own // numel if numel else 1)
        if not isinstance(operand, Tensor) or is_number(operand):
            number = float(operand)
            if kind == "Mul":
                changes = {"value": value * number, "number": way.number * number}
            else:
                changes = {"value": value / number if number else 0.0, "number": way.number / number if number else 0.0}
            return [(child, at, way.on(kind, **changes, is_divided=way.is_divided or kind == "Div"))]
        total = way.value if way.total is None and operand.dim() > 0 else way.total  # of a single row, as of several
        is_factor = operand.dim() == 0
        operand = _wide(operand)
        if kind == "Mul":
            times = on_host(way.number * operand) if is_factor else way.number
            return [(child, at, way.on(kind, value=value * operand, number=times, total=total))]
        share = torch.where(operand == 0, torch.zeros_like(operand), value / operand)
        return [(child, at, way.on(kind, value=share, total=total, divisions=(*way.divisions, node), is_divided=True))]
    return None


def _spread(value: Denominator, metadata: Any) -> Tensor:
    """One number as a gradient of what an output is."""
    number = tensor_of(value, metadata.device, metadata.dtype)
    return number.expand(tuple(map(int, metadata.shape)))


def _wide(tensor: Tensor) -> Tensor:
    """One number in the widest type that its device has."""
    tensor = tensor.detach().reshape(())
    if tensor.is_complex():
        tensor = tensor.real
    return tensor.to(exact_dtype(tensor.device))


def _run(
    node: Node, kind: str, index: int, inputs: Sequence[tuple[int, Node, int]], way: _Way, is_scalar: bool
) -> list[tuple[Node, int, _Way]]:
    """Run the backward of ``node`` itself."""
    if way.full is None:
        metadata = node._input_metadata[index]
        full = _spread(way.value, metadata)
    else:
        full = way.full
    total = way.total
    if kind in (*SUMS, *CONTRACTIONS, "Trace") and total is None and way.full is None:
        total = way.value
    places = len(node._input_metadata)
    result = node(*(full if at == index else None for at in range(places)))
    gradients = result if isinstance(result, tuple) else (result,)
    found = []
    for place, child, at in inputs:
        gradient = gradients[place]
        if gradient is None:
            continue
        shape = tuple(map(int, child._input_metadata[at].shape))
        gradient = gradient if gradient.shape == shape else gradient.sum_to_size(shape)
        if kind == "Div" and isinstance(divisor := getattr(node, "_saved_other", None), Tensor):
            gradient = torch.where(divisor == 0, torch.zeros_like(gradient), gradient)
        is_mean = way.is_mean or kind == "Mean"
        is_by_one = kind == "Div" and isinstance(divisor := getattr(node, "_saved_other", None), Tensor) and divisor.numel() == 1
        divisions = (*way.divisions, node) if is_by_one else way.divisions
        changes: dict[str, Any] = {"total": total, "is_mean": is_mean, "divisions": divisions}
        changes["is_divided"] = way.is_divided or kind == "Div"
        if gradient.numel() == 1:
            found.append((child, at, way.on(kind, value=_wide(gradient), full=None, **changes)))
        else:
            if total is None:
                changes["total"] = way.value if way.full is None and not is_scalar else None
            found.append((child, at, way.on(kind, full=gradient, **changes)))
    return found


def _of_criterion(node: Node, kind: str, way: _Way) -> _Way:
    """At the losses that a fused criterion has reduced."""
    if node._saved_reduction != MEAN_REDUCTION:
        value = way.value if node._saved_self.numel() else 0.0
        if kind in ("NllLoss", "NllLoss2D"):  # a sum over labels that are all ignored
            total_weight = _wide(node._saved_total_weight)
            value = on_host(torch.where(total_weight == 0, torch.zeros_like(total_weight), value))
        return way.on(kind, value=value, total=way.value if way.total is None else way.total)
    count = CRITERIA[kind][1](node)
    if isinstance(count, Tensor):
        count = _wide(count)
        value = on_host(torch.where(count == 0, torch.zeros_like(count), way.value / count))
    else:
        value = way.value / count if count else 0.0
    return way.on(kind, value=value, total=value if way.total is None else way.total, is_mean=True)


def _note(found: dict[Any, _Leaves], node: Node, kind: str, way: _Way) -> list[Any]:
    """A loss is reached."""
    is_penalty = way.edge[1] is not None and is_of_parameters_only(way.top)
    edge = (way.edge[0], way.edge[1])
    if edge not in found:
        path = (*way.path, *kinds_below(node), *("penalty",) * is_penalty)
        words = CRITERIA[kind][0] if kind in CRITERIA else "mean" if way.is_mean else "sum" if way.total is not None else ""
        words = PENALTY if is_penalty else words
        found[edge] = _Leaves(zlib.crc32("/".join(path).encode()) << 8, words, way.place, node)
    leaves = found[edge]
    leaves.ways.append(way)
    leaves.leaf = node if kind in ("NllLoss", "NllLoss2D") and way.full is None else None
    if way.full is None:
        leaves.shares.append(way.value)
    elif kind in ("NllLoss", "NllLoss2D"):
        leaves.shares.append(torch.where(node._saved_target == ignored_of(node), torch.zeros_like(way.full), way.full))
    else:
        leaves.shares.append(way.full)
    return []


def _term(leaves: _Leaves, key: int) -> Term:
    way = leaves.ways[0]
    losses = leaves.shares[0] if len(leaves.shares) == 1 and way.full is None else one_of(leaves.shares)
    totals = [one.total for one in leaves.ways if one.total is not None]
    total = (totals[0] if len(totals) == 1 else one_of(totals)) if len(totals) == len(leaves.ways) else float("nan")
    return Term(
        key,
        leaves.words,
        size_of(losses),
        size_of(total),
        number=on_host(same([one.number for one in leaves.ways])),
        kink=math.prod(one.kink for one in leaves.ways),
        is_mean=all(one.is_mean for one in leaves.ways),
        is_divided=any(one.is_divided for one in leaves.ways),
        is_penalty=leaves.words == PENALTY,
        is_learned=kind_of(way.top) in ("Mul", "Div")
        and any(child is not None and is_of_parameters_only(child) for child, _ in way.top.next_functions),
        leaf=leaves.leaf if len(leaves.ways) == 1 else None,
        edges=(way.edge,),
        above=(way.above,),
        divisions=tuple(dict.fromkeys(division for one in leaves.ways for division in one.divisions)),
        shares=tuple(leaves.shares),
    )
