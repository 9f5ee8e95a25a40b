"""What a loss is made of: its terms, and the share that each of the losses they add up has in it.

A loss ``(l_1 + ... + l_k) / n`` has the gradient ``1 / n`` by each ``l_i``, however it was computed. So the backward runs from the
loss down through what is linear, and no further, and what arrives there is ``1 / n``, or 0 for what a mask leaves out. Nothing is
copied to the host, and a gradient whose numbers are all the same is one number.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_accum.errors import UnreadableLossError
from lightning_accum.weighing.linear import (
    ADDITIONS,
    CROSS_ENTROPIES,
    STACKS,
    Arrived,
    Input,
    Summand,
    beside_a_kink,
    is_loss,
    is_number_alone,
    numel_of,
    of_all_alike,
    of_criterion,
    run,
    spread,
)
from lightning_accum.weighing.nodes import (
    CRITERIA,
    KINKS,
    LINEAR,
    Node,
    factor_in_sum,
    head_of,
    ignored_of,
    is_of_parameters_only,
    kind_of,
    kinds_below,
)
from lightning_accum.weighing.terms import PENALTY, Denominator, Term, on_host, one_of, same, size_of

NOWHERE: Mapping[int, int] = MappingProxyType({})


_Found: TypeAlias = dict[tuple[Node, int | None], list[tuple[Node, Arrived]]]
"""The losses that are reached, by the edge of their summand."""


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
    found: _Found = {}
    try:
        _walk(root, place, Arrived(1.0, Summand((root, None), (), 1.0, root)), found)
        terms = [_term(losses, places) for losses in sorted(found.values(), key=lambda losses: losses[0][1].summand.place)]
    except (RuntimeError, AttributeError, TypeError) as error:
        raise UnreadableLossError(f"a node that cannot be run ({error})") from error
    seen: dict[int, int] = {}
    for at, term in enumerate(terms):
        seen[term.key] = number = seen.get(term.key, -1) + 1
        terms[at] = term._replace(key=term.key + min(number, 255))
    return terms


def _walk(root: Node, place: int, arrived: Arrived, found: _Found) -> None:
    """Each node before those below it: what arrives at it on several ways is added up, for each summand by itself."""
    given: dict[Node, dict[Any, tuple[int, Arrived]]] = {root: {(place, None): (place, arrived)}}
    for node in _in_order(root):
        for index, one in given.pop(node, {}).values():
            for child, at, below in _below(node, index, one, found):
                of_child, key = given.setdefault(child, {}), (at, below.summand.edge)
                of_child[key] = (at, _together(of_child[key][1], below, child, at) if key in of_child else below)


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


def _together(first: Arrived, other: Arrived, node: Node, index: int) -> Arrived:
    """What arrives at an output on two ways."""
    shares = [first.share, other.share]
    if not (first.is_one and other.is_one):
        shares = [spread(share, node, index) for share in shares]
    return first._replace(
        share=shares[0] + shares[1],
        total=first.total if first.total is other.total or first.total == other.total else float("nan"),
        number=same([first.number, other.number]),
        kink=first.kink * other.kink,
        divisions=tuple(dict.fromkeys((*first.divisions, *other.divisions))),
    )


def _below(node: Node, index: int, arrived: Arrived, found: _Found) -> list[tuple[Node, int, Arrived]]:
    """Where to go on from ``node``; nothing if it is a loss, which is noted."""
    kind, own = kind_of(node), numel_of(node, index)
    inputs = [(place, child, at) for place, (child, at) in enumerate(node.next_functions) if child is not None]
    if own == 0:  # nothing is chosen: there are no losses, whatever divides them
        arrived = arrived._replace(share=0.0)
    elif kind == "_DDPSink":  # every tensor goes in and out of that at the same place
        return [(*node.next_functions[index], arrived)]
    elif kind in CRITERIA and arrived.is_one and node._saved_reduction != 0:
        arrived = of_criterion(node, kind, arrived)
    elif kind in KINKS and arrived.is_one and len(inputs) == 1 and is_number_alone(node, index) and is_number_alone(*inputs[0][1:]):
        return [beside_a_kink(node, kind, *inputs[0], arrived)]
    elif kind in LINEAR and inputs:
        sizes = [numel_of(child, at) for _, child, at in inputs] if kind in ADDITIONS or kind in STACKS else []
        is_addition = kind in ADDITIONS or (kind in STACKS and max(sizes) == min(sizes) == 1)
        if is_addition and arrived.is_one and own <= max(sizes) * len(inputs):
            return _summands(node, kind, inputs, arrived, own == 1 or kind in STACKS)
        of_batch = [one for one in inputs if not is_of_parameters_only(one[1])] if len(inputs) > 1 else inputs
        if not is_loss(node, kind, of_batch, len(inputs), arrived):
            if len(of_batch) == 1 and arrived.is_one and (below := of_all_alike(node, kind, own, *of_batch[0], arrived)):
                return [(*of_batch[0][1:], below)]
            if all(isinstance(size, int) for size in node._input_metadata[index].shape):  # not so of a nested tensor
                return run(node, kind, index, of_batch, arrived, own == 1)
    found.setdefault(arrived.summand.edge, []).append((node, arrived))
    return []


def _summands(node: Node, kind: str, inputs: Sequence[Input], arrived: Arrived, is_scalar: bool) -> list[tuple[Node, int, Arrived]]:
    """The operands of an addition."""
    result = []
    is_own = is_scalar and len(inputs) > 1 and arrived.total is None
    for place, child, at in inputs:
        share = arrived.share
        if kind in ADDITIONS:
            numel = numel_of(child, at)
            times = numel_of(node, 0) // numel if numel else 1  # what is small is added to each number
            factor = factor_in_sum(node, kind, place) * max(1, times)
            share = share if factor == 1.0 else factor * share
        below = arrived._replace(share=share)
        if is_own:
            below = below._replace(path=(), summand=Summand((node, place), (*arrived.summand.place, place), share, child))
        result.append((child, at, below))
    return result


def _term(losses: Sequence[tuple[Node, Arrived]], places: Mapping[int, int]) -> Term:
    """The losses of one summand."""
    (node, first), *others = losses
    kind, summand, ways = kind_of(node), first.summand, [arrived for _, arrived in losses]
    is_penalty = summand.edge[1] is not None and is_of_parameters_only(summand.top)
    path = (*first.path, *kinds_below(node), *("penalty",) * is_penalty)
    key, head = zlib.crc32("/".join(path).encode()), head_of(node, places) if places else ()
    words = CRITERIA[kind][0] if kind in CRITERIA else "mean" if first.is_mean else "sum" if first.total is not None else ""
    shares = [_share_of(node, arrived) for node, arrived in losses]
    totals = [one.total for one in ways if one.total is not None]
    total = (totals[0] if len(totals) == 1 else one_of(totals)) if len(totals) == len(ways) else float("nan")
    is_alone = not others and first.is_one
    return Term(
        (zlib.crc32(repr(head).encode(), key) if head else key) << 8,
        PENALTY if is_penalty else words,
        size_of(shares[0] if is_alone else one_of(shares)),
        size_of(total),
        number=on_host(same([one.number for one in ways])),
        kink=math.prod(one.kink for one in ways),
        is_mean=all(one.is_mean for one in ways),
        is_divided=any(one.is_divided for one in ways),
        is_penalty=is_penalty,
        is_learned=kind_of(summand.top) in ("Mul", "Div")
        and any(child is not None and is_of_parameters_only(child) for child, _ in summand.top.next_functions),
        leaf=node if is_alone and kind in CROSS_ENTROPIES else None,
        edges=(summand.edge,),
        above=(summand.above,),
        divisions=tuple(dict.fromkeys(division for one in ways for division in one.divisions)),
        shares=tuple(shares),
    )


def _share_of(node: Node, arrived: Arrived) -> Denominator:
    if arrived.is_one or kind_of(node) not in CROSS_ENTROPIES:
        return arrived.share
    assert isinstance(arrived.share, Tensor)
    return torch.where(node._saved_target == ignored_of(node), torch.zeros_like(arrived.share), arrived.share)
