"""Read the denominator of a mean loss from its autograd graph.

A loss that was reduced by a mean has, in its ``grad_fn``, a node that saved what the sum was divided by. Reading it there
needs no knowledge of the batch, makes no copy to the host, and counts exactly what the loss itself counted: tokens after the
model's own shift, ignored labels, class weights.

A node that is not known is never guessed at: see :class:`UnreadableLossError`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_accum.denominator import (
    CRITERIA,
    NO_REDUCTION,
    Denominator,
    Term,
    UnreadableLossError,
    count_of,
    criterion_of,
    mean_over_batch,
)
from lightning_accum.nodes import SUMS, THROUGH, Node, constant_operand, inputs_of, is_of_parameters_only, kind_of, reduced_dims


@dataclass(frozen=True, slots=True)
class Reading:
    """What the graph of a loss says about its weight.

    Attributes:
        criterion: the main criterion, in words.
        weight: the denominator of its mean; None if it is a sum.
        others: the other terms that depend on the batch and may need another weight than the main one.
    """

    criterion: str
    weight: Denominator | None
    others: tuple[Term, ...] = ()


def read_loss(loss: Tensor) -> Reading:
    """Read what ``loss`` was divided by.

    Constant factors, casts, views and sums of terms are walked through. Of several terms the cross entropy is the main one,
    else the first mean, else the first sum. Terms that depend on parameters only (a weight penalty) are the same in every
    micro-batch and exact under any weights, as long as the main term is a mean; they are left out.

    Args:
        loss: a scalar with a ``grad_fn``.

    Raises:
        UnreadableLossError: no term of the loss is a known criterion.

    Example:
        >>> import torch
        >>> logits, target = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 2, -100, 1])
        >>> reading = read_loss(torch.nn.functional.cross_entropy(logits, target))
        >>> reading.criterion, float(reading.weight)
        ('cross entropy', 3.0)
    """
    return read_terms(terms_of(loss))


def read_terms(terms: Sequence[Term]) -> Reading:
    """As :func:`read_loss`, for the terms that :func:`terms_of` found."""
    if not terms:
        raise UnreadableLossError("a loss without a graph (no `grad_fn`)")
    if len(terms) == 1:
        main = terms[0]
        if not main.is_readable:
            raise UnreadableLossError(main.criterion)
        return Reading(main.criterion, main.denominator)

    varying = [term for term in terms if not is_of_parameters_only(term.node)]
    main = _main_term(varying or terms)
    if main.denominator is not None:
        others = [term for term in varying if term is not main]
    else:  # sums add up to the batch's sum; what is not such a sum would be added once a micro-batch
        others = [t for t in terms if t is not main and (t.denominator is not None or not t.is_readable or t not in varying)]
    return Reading(main.criterion, main.denominator, tuple(others))


def _main_term(terms: Sequence[Term]) -> Term:
    readable = [term for term in terms if term.is_readable]
    if not readable:
        raise UnreadableLossError(" + ".join(dict.fromkeys(term.criterion for term in terms)))
    means = [term for term in readable if term.denominator is not None]
    cross_entropies = [term for term in means if term.criterion == "cross entropy"]
    return (cross_entropies or means or readable)[0]


def terms_of(loss: Tensor) -> list[Term]:
    """The summands of a loss, left to right."""
    root = loss.grad_fn
    if root is None:
        return []
    kind = kind_of(root)
    return [criterion_of(root, kind, ())] if kind in CRITERIA else list(_walk(root, loss.output_nr))


def _walk(root: Node, output_index: int) -> Iterator[Term]:
    """Walk from the loss down to its criteria, left to right."""
    stack: list[tuple[Node, int, tuple[Any, ...]]] = [(root, output_index, ())]

    def descend(pairs: list[tuple[Node, int]], factors: tuple[Any, ...]) -> None:
        stack.extend((node, index, factors) for node, index in reversed(pairs))

    while stack:
        node, index, factors = stack.pop()
        kind = kind_of(node)
        if kind in CRITERIA:
            yield criterion_of(node, kind, factors)
        elif kind == "_DDPSink":  # every tensor that DistributedDataParallel returns goes in and out at the same place
            descend([node.next_functions[index]], factors)
        elif kind in ("Add", "Sub", "Rsub") or kind in THROUGH:
            descend(inputs_of(node), factors)
        elif kind == "Mul":
            inputs = inputs_of(node)
            if len(inputs) == 1:
                descend(inputs, (*factors, constant_operand(node)))
            elif len(losses := [pair for pair in inputs if not is_of_parameters_only(pair[0])]) == 1:
                descend(losses, factors)
            else:
                yield Term(f"{node.name()} (a product of losses)", node, None, is_readable=False)
        elif kind == "Div":
            if node.next_functions[0][0] is None or len(inputs_of(node)) != 1:
                yield Term(f"{node.name()} (a quotient of losses)", node, None, is_readable=False)
            elif (summed := _sum_below(node)) is not None:
                yield Term("sum divided by a count", node, count_of(node, summed))
            else:
                descend(inputs_of(node), factors)
        elif kind in ("Mean", *SUMS) and (scalars := _stacked_scalars(node)):
            descend(scalars, factors)
        else:
            yield criterion_of(node, kind, factors)


def _sum_below(division: Node) -> Node | None:
    """The sum that is divided; None if what is divided is a criterion by itself, and the division a constant factor."""
    node = division.next_functions[0][0]
    while (kind := kind_of(node)) in THROUGH or kind == "Mul":
        inputs = inputs_of(node)
        if len(inputs) != 1:
            return None
        node = inputs[0][0]
    return node if kind in SUMS and not _stacked_scalars(node) and not mean_over_batch(node) else None


def _stacked_scalars(node: Node) -> list[tuple[Node, int]]:
    """The operands of ``torch.stack([loss_1, loss_2]).sum()`` or ``.mean()``, and of a ``.mean()`` of one loss."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    below, index = node.next_functions[0]
    if sizes is None or below is None:
        return []
    if kind_of(below) == "Mul" and len(inputs_of(below)) == 1:
        below, index = inputs_of(below)[0]
    if kind_of(below) in ("Stack", "Cat") and len(sizes) == 1 and len(below.next_functions) == sizes[0]:
        return inputs_of(below)
    return [(below, index)] if math.prod(sizes) == 1 and _is_whole_loss(below) else []


def _is_whole_loss(node: Node) -> bool:
    """Whether ``node`` is a loss already, reduced over all its dimensions, and not the loss of a single sample."""
    while ((kind := kind_of(node)) in THROUGH or kind in ("Mul", "Div")) and len(inputs_of(node)) == 1:
        node = inputs_of(node)[0][0]
    if kind in CRITERIA:
        return bool(node._saved_reduction != NO_REDUCTION)
    if kind in ("Mean", *SUMS) and (sizes := getattr(node, "_saved_self_sym_sizes", None)) is not None:
        return len(reduced_dims(node)) == len(sizes)
    return False
