"""The terms of a loss, and the share of each loss that they sum.

A loss ``(l_1 + ... + l_k) / n`` has the gradient ``1 / n`` with respect to each ``l_i``, however it was computed. So a backward
from the loss through its linear nodes gives ``1 / n``, or 0 for losses that a mask leaves out. Nothing is copied to the host, and a
gradient with equal elements is stored as one number.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_accum.errors import UnreadableLossError
from lightning_accum.exact import exact, on_host, tensor_of
from lightning_accum.weighing import nodes
from lightning_accum.weighing.nodes import Node, kind_of, numel_of
from lightning_accum.weighing.terms import NOWHERE, PENALTY, Arrived, Denominator, Edge, Term, joined, one_of, quotient, same

_CROSS_ENTROPIES = {"NllLoss", "NllLoss2D"}
_PRODUCTS, _LAYERS = {"Div", "Dot", "Lerp", "Mul", *nodes.CONTRACTIONS}, {*nodes.CONTRACTIONS, *nodes.PRODUCTS_ADDED}
_NOT_LINEAR_IN = {"Addcdiv": 2, "Div": 1, "Lerp": 2}
_CHANGES_SOME = {"MaskedFill", "NanToNum", "Where"}


_Input: TypeAlias = tuple[int, Node, int]
"""The index of an operand, its node, and the index of the node's output."""
_Below: TypeAlias = list[tuple[Node, int, Arrived]]
"""The next visits: a node, the index of its output, and the arrival there."""
_Found: TypeAlias = dict[Edge, list[tuple[Node, Arrived]]]
"""The losses reached, by the edge of their summand."""


@torch.no_grad()
def terms_of(loss: Tensor, below: tuple[Node, int] | None = None, places: Mapping[int, int] = NOWHERE) -> list[Term]:
    """Run the backward of ``loss`` down to its summands. No hook is called, and the graph is kept.

    Args:
        loss: a scalar with its graph.
        below: the node to start from, and the index of its output; None for the loss itself.
        places: indices of parameters, by id, which distinguish the terms of several heads.

    Raises:
        UnreadableLossError: a node cannot run, as after a backward.

    Example:
        >>> x, mask = torch.arange(4.0, requires_grad=True), torch.tensor([True, False, True, False])
        >>> (term,) = terms_of((x.square() * mask).sum() * (1 / mask.sum()))
        >>> float(term.losses), float(term.total)
        (0.5, 0.5)
        >>> [term.words for term in terms_of(torch.nn.functional.mse_loss(x, x + 1) + 0.1 * (x * mask).exp().sum())]
        ['mean squared error', 'sum']
    """
    root, place = (loss.grad_fn, loss.output_nr) if below is None else below
    found: _Found = {}
    try:
        _walk(root, place, Arrived(1.0, Edge(root), places=places), found)
        terms = [_term(losses, places) for losses in sorted(found.values(), key=lambda losses: losses[0][1].place)]
    except (RuntimeError, AttributeError, TypeError) as error:
        raise UnreadableLossError(f"a node that cannot be run ({error})") from error
    seen: dict[int, int] = {}
    for at, term in enumerate(terms):
        seen[term.key] = number = seen.get(term.key, -1) + 1
        terms[at] = term._replace(key=term.key + min(number, 255))
    return terms


def _walk(root: Node, place: int, arrived: Arrived, found: _Found) -> None:
    """Visit nodes in topological order. Arrivals on several paths are added up, separately for each summand."""
    given: dict[Node, dict[Any, tuple[int, Arrived]]] = {root: {(place, None): (place, arrived)}}
    for node in nodes.in_order(root):
        for index, one in given.pop(node, {}).values():
            for child, at, below in _below(node, index, one, found):
                of_child, key = given.setdefault(child, {}), (at, below.edge)
                of_child[key] = (at, _together(of_child[key][1], below, child, at) if key in of_child else below)


def _together(first: Arrived, other: Arrived, node: Node, index: int) -> Arrived:
    """The sum of two arrivals at an output."""
    shares = [first.share, other.share]
    if not (first.is_one and other.is_one):
        shares = [_spread(share, node, index) for share in shares]
    return first._replace(
        share=shares[0] + shares[1],
        total=first.total if first.total is other.total or first.total == other.total else float("nan"),
        number=same([first.number, other.number]),
        kink=first.kink * other.kink,
        divisions=tuple(dict.fromkeys((*first.divisions, *other.divisions))),
    )


def _below(node: Node, index: int, arrived: Arrived, found: _Found) -> _Below:
    """The next visits from ``node``; empty if it is a loss, which is recorded."""
    kind, own = kind_of(node), numel_of(node, index)
    inputs = [(place, child, at) for place, (child, at) in enumerate(node.next_functions) if child is not None]
    if own == 0:  # an empty selection has no losses, whatever divides them
        arrived = arrived._replace(share=0.0)
        if kind in nodes.SELECTIONS and len(inputs) == 1:  # it is the same term as a selection of some losses
            return [(*inputs[0][1:], arrived.through(kind))]
    elif arrived.is_vector and inputs and (numbers := _of_vector(node, kind, index, inputs, own, arrived)):
        return numbers
    elif kind == "Dot" and arrived.is_one and arrived.total is None and (of_numbers := _of_dot(node, inputs, arrived)):
        return [of_numbers]
    elif kind == "Where" and len(inputs) == 2 and arrived.is_one and (chosen := nodes.chosen_of(node, own)):
        return [(*chosen, arrived)]
    elif kind == "_DDPSink":  # its inputs and outputs have the same indices
        return [(*node.next_functions[index], arrived)]
    elif kind in nodes.BENT and arrived.is_one and nodes.bends_numbers(node, index):
        return _beside_a_kink(node, kind, inputs, arrived)
    elif kind in nodes.CRITERIA and arrived.is_one and node._saved_reduction != 0:
        arrived = _of_criterion(node, kind, arrived)
    elif kind in nodes.LINEAR and inputs:
        sizes = [numel_of(child, at) for _, child, at in inputs] if kind in nodes.ADDITIONS or kind in nodes.STACKS else []
        is_addition = kind in nodes.ADDITIONS or (kind in nodes.STACKS and max(sizes) == min(sizes) == 1)
        if is_addition and arrived.is_one and own <= max(sizes) * len(inputs):
            return _summands(node, kind, inputs, sizes, own, arrived)
        of_batch = [one for one in inputs if not nodes.is_of_parameters_only(one[1])] if len(inputs) > 1 else inputs
        if not _is_loss(node, kind, of_batch, len(inputs), arrived):
            if len(of_batch) == 1 and arrived.is_one and (below := _of_all_alike(node, kind, own, *of_batch[0], arrived)):
                return [(*of_batch[0][1:], below)]
            if all(isinstance(size, int) for size in node._input_metadata[index].shape):  # false for a nested tensor
                return _run(node, kind, index, of_batch, arrived, own == 1)
    found.setdefault(arrived.edge, []).append((node, arrived))
    return []


# --- below a node that is linear


def _of_vector(node: Node, kind: str, index: int, inputs: Sequence[_Input], own: int, arrived: Arrived) -> _Below:
    """The next visits for a vector of summands; empty if the node is a product of two."""
    if kind in nodes.STACKS:
        return [(child, at, _element(arrived.through(kind), place)) for place, child, at in inputs]
    if arrived.places and nodes.divides_each(node, index):
        return [(*inputs[0][1:], _column(node, index, arrived, place)) for place in range(own)]
    if kind in nodes.ADDITIONS:
        return _summands(node, kind, inputs, [own] * len(inputs), own, arrived)
    of_batch = [one for one in inputs if not nodes.is_of_parameters_only(one[1])]
    return [] if _is_loss(node, kind, of_batch, len(inputs), arrived) else _run(node, kind, index, of_batch, arrived, True)


def _of_dot(node: Node, inputs: Sequence[_Input], arrived: Arrived) -> tuple[Node, int, Arrived] | None:
    """A vector of summands times a vector of numbers or parameters."""
    of_batch = [one for one in inputs if not nodes.is_of_parameters_only(one[1])]
    if len(of_batch) != 1 or not nodes.is_of_numbers(*of_batch[0][1:], arrived.places, len(inputs) > 1):
        return None
    ((place, child, at),) = of_batch
    return child, at, arrived.summed(node, place, node(_spread(arrived.share, node, 0))[place], is_vector=True)


def _element(arrived: Arrived, element: int) -> Arrived:
    """One number of a vector."""

    def of(share: Denominator) -> Denominator:
        return _wide(share.reshape(-1)[element]) if isinstance(share, Tensor) and share.dim() else share

    edge, place = arrived.edge._replace(element=element), (*arrived.place, element)
    return arrived._replace(share=of(arrived.share), edge=edge, place=place, above=of(arrived.above), is_vector=False)


def _column(node: Node, index: int, arrived: Arrived, element: int) -> Arrived:
    """One element of a vector that is divided by another: the arrival is 0 at the other elements."""
    of_one, is_it = _element(arrived, element), torch.arange(numel_of(node, index), device=node._saved_other.device) == element
    shares = torch.where(is_it, quotient(_spread(of_one.share, node, index), node._saved_other), 0.0)
    divisions = (*arrived.divisions, node)
    return of_one.through("Div", share=shares, total=_wide(shares.sum()), divisor=1.0, divisions=divisions)


def _summands(node: Node, kind: str, inputs: Sequence[_Input], sizes: Sequence[int], own: int, arrived: Arrived) -> _Below:
    """The arrivals at the operands of an addition with ``own`` elements; ``sizes`` are the operands' numbers of elements."""
    result = []
    is_own = arrived.is_vector or ((own == 1 or kind in nodes.STACKS) and len(inputs) > 1 and arrived.total is None)
    for (place, child, at), numel in zip(inputs, sizes, strict=True):
        share = arrived.share
        if kind in nodes.ADDITIONS:
            times = own // numel if numel else 1  # a smaller operand is broadcast
            factor = nodes.factor_in_sum(node, kind, place) * max(1, times)
            share = share if factor == 1.0 else factor * share
        is_vector = arrived.is_vector and not nodes.is_of_parameters_only(child)
        result.append((child, at, arrived.summed(node, place, share, is_vector) if is_own else arrived._replace(share=share)))
    return result


def _is_loss(node: Node, kind: str, of_batch: Sequence[_Input], inputs: int, arrived: Arrived) -> bool:
    """Whether a node of a linear kind is not linear in these operands, or is a layer of the network."""
    places = [place for place, *_ in of_batch]
    is_product = kind in _PRODUCTS or (kind in nodes.PRODUCTS_ADDED and all(places))
    return (
        not places
        or (arrived.total is not None and (kind == "Mul" or kind in _LAYERS) and nodes.is_first_layer(node))
        or (len(places) > 1 and is_product)
        or (len(places) < inputs and kind in _LAYERS)
        or _NOT_LINEAR_IN.get(kind) in places
        or (kind == "Where" and len(places) > 1 and node._saved_condition.numel() == 1)
    )


def _beside_a_kink(node: Node, kind: str, inputs: Sequence[_Input], arrived: Arrived) -> _Below:
    """Continue as if the node were linear, and record its slopes. Below a choice among numbers, continue at the chosen one."""
    result = node(_spread(1.0, node, 0))
    slopes = [own for own in (result if isinstance(result, tuple) else (result,)) if own is not None]
    of_all = torch.cat([slope.reshape(-1) for slope in slopes])
    places = torch.arange(len(of_all), device=of_all.device) + 1
    kink = arrived.kink * (2.0 - _wide((of_all * places).sum()))
    if len(of_all) == 1:
        return [(*inputs[0][1:], arrived.through(kind, kink=kink))]
    below = [arrived.through(kind, kink=kink, share=arrived.share * (own if own.dim() else _wide(own))) for own in slopes]
    return [(child, at, own) for (_, child, at), own in zip(inputs, below, strict=True)]


def _of_criterion(node: Node, kind: str, arrived: Arrived) -> Arrived:
    """Record the losses that a fused criterion has reduced."""
    if node._saved_reduction == nodes.MEAN_REDUCTION:
        count = nodes.CRITERIA[kind][1](node)
        share = quotient(arrived.share, _wide(count) if isinstance(count, Tensor) else count)
        return arrived.through(kind, share=share, total=share if arrived.total is None else arrived.total, is_mean=True)
    share = arrived.share if node._saved_self.numel() else 0.0
    if kind in _CROSS_ENTROPIES:  # a sum whose labels are all ignored
        total_weight = _wide(node._saved_total_weight)
        if isinstance(total_weight, Tensor):
            share = torch.where(total_weight == 0, torch.zeros_like(total_weight), share)
        elif total_weight == 0:
            share = 0.0
    return arrived.through(kind, share=share, total=arrived.share if arrived.total is None else arrived.total)


def _of_all_alike(node: Node, kind: str, own: int, place: int, child: Node, at: int, arrived: Arrived) -> Arrived | None:
    """Continue with one number; None if the arrivals below are not all equal."""
    numel, share = numel_of(child, at), arrived.share
    total = share if arrived.total is None else arrived.total
    if kind in ("Mean", "Sum"):
        if nodes.are_numbers((child, at)):
            return arrived
        if kind_of(child) in nodes.STACKS and all(below is None or numel_of(below, n) == 1 for below, n in child.next_functions):
            number = 1 / numel if kind == "Mean" else 1.0  # a sum or a mean of summands
            return arrived._replace(share=share * number, number=arrived.number * number)
        if own == 1 and arrived.total is None and nodes.is_of_numbers(child, at, arrived.places):
            return arrived.summed(node, place, share / numel if kind == "Mean" else share, is_vector=True)
        if kind == "Sum":
            return arrived.through(kind, total=total)
        # the number of elements in one result; a mean takes a nested tensor as a whole, whose sizes are symbolic
        share = quotient(share, numel // own if own > 1 else int(getattr(node, "_saved_self_sym_numel", numel)))
        return arrived.through(kind, share=share, total=share if arrived.total is None else total, is_mean=True)
    if kind == "Neg":
        return arrived.through(kind, share=-share)
    if kind == "Expand" and own >= numel > 0:
        return arrived.through(kind, share=share * (own // numel))
    if kind in nodes.THROUGH and kind not in _CHANGES_SOME and numel == own:
        return arrived.through(kind)
    if kind not in ("Mul", "Div") or numel not in (own, 1):
        return None
    operand = node._saved_other if place == 0 else node._saved_self
    if operand is None or (isinstance(operand, Tensor) and operand.numel() != 1):
        return None
    times, share = operator.mul if kind == "Mul" else quotient, share * (own // numel)
    factor = nodes.number_of(operand)
    by: Denominator = _wide(operand) if factor is None else factor
    is_scalar = factor is not None or not operand.dim()
    is_number = factor is not None or (is_scalar and kind == "Mul")
    changes = {"total": arrived.total if is_scalar else total, "number": times(arrived.number, by if is_number else 1.0)}
    divisor = (arrived.divisor or 1.0) * (factor or 1.0) if kind == "Div" else arrived.divisor
    divisions = (*arrived.divisions, *[node] * ((kind == "Div" and factor is None) or len(nodes.inputs_of(node)) > 1))
    return arrived.through(kind, **changes, share=times(share, by), divisor=divisor, divisions=divisions)


def _run(node: Node, kind: str, index: int, inputs: Sequence[_Input], arrived: Arrived, is_scalar: bool) -> _Below:
    """Run the backward of ``node`` itself."""
    total = arrived.total
    if total is None and arrived.is_one and (kind in nodes.SUMS or kind in nodes.CONTRACTIONS or kind == "Trace"):
        total = arrived.share
    result = node(*(_spread(arrived.share, node, at) if at == index else None for at in range(len(node._input_metadata))))
    gradients = result if isinstance(result, tuple) else (result,)
    divisor = getattr(node, "_saved_other", None) if kind == "Div" else None
    arrived = arrived._replace(is_mean=arrived.is_mean or kind == "Mean", divisor=arrived.divisor or float(kind == "Div"))
    if (isinstance(divisor, Tensor) and divisor.numel() == 1) or (is_scalar and len(nodes.inputs_of(node)) > len(inputs)):
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


def _spread(share: Denominator, node: Node, index: int) -> Tensor:
    """One number as a gradient of an output, with its shape and type."""
    if isinstance(share, Tensor) and share.dim():
        return share
    metadata = node._input_metadata[index]
    return tensor_of(share, metadata.device, metadata.dtype).expand(tuple(map(int, metadata.shape)))


def _wide(tensor: Tensor) -> Denominator:
    """One number on a device, in the device's widest type."""
    return on_host(exact(tensor.real if tensor.is_complex() else tensor).reshape(()))


# --- a term


def _term(losses: Sequence[tuple[Node, Arrived]], places: Mapping[int, int]) -> Term:
    """The losses of one summand."""
    node, first = losses[0]
    addition, place, element = first.edge
    top = nodes.below_constants(addition if place is None else addition.next_functions[place][0])
    is_penalty = place is not None and element is None and nodes.is_of_parameters_only(top)
    path = (*first.path, *nodes.kinds_below(node), *("penalty",) * is_penalty)
    key, head = zlib.crc32("/".join(path).encode()), nodes.head_of(node, places) if places else ()
    term = joined((zlib.crc32(repr(head).encode(), key) if head else key) << 8, [_of_loss(*loss) for loss in losses])
    return term._replace(words=PENALTY if is_penalty else term.words, is_penalty=is_penalty)


def _of_loss(node: Node, arrived: Arrived) -> Term:
    """A term with a single loss, without the fields that distinguish it."""
    kind, share = kind_of(node), arrived.share
    if kind in _CROSS_ENTROPIES and isinstance(share, Tensor) and share.dim():
        share = torch.where(node._saved_target == nodes.ignored_of(node), torch.zeros_like(share), share)
    of_sum = "mean" if arrived.is_mean else "sum" if arrived.total is not None else ""
    return Term(
        0,
        nodes.CRITERIA[kind][0] if kind in nodes.CRITERIA else of_sum,
        one_of([share]),
        float("nan") if arrived.total is None else one_of([arrived.total]),
        number=on_host(arrived.number),
        kink=arrived.kink,
        is_mean=arrived.is_mean,
        divisor=arrived.divisor,
        is_bent=kind in nodes.BENT and not {"Mean", "Sum"}.isdisjoint(nodes.kinds_below(node)),
        edges={arrived.edge: arrived.above},
        divisions=arrived.divisions,
        shares=(share,),
    )
