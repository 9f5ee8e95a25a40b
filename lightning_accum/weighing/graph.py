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
from typing import NamedTuple

from torch import Tensor

from lightning_accum.errors import UnreadableLossError
from lightning_accum.weighing.denominator import CRITERIA, Denominator, Operation, Term, criterion_of, operation
from lightning_accum.weighing.nodes import (
    CONTRACTIONS,
    SELECTIONS,
    SUMS,
    THROUGH,
    Node,
    constant_operand,
    inputs_of,
    is_choice,
    is_of_parameters_only,
    kind_of,
    reduced_numel,
    sizes_of,
)
from lightning_accum.weighing.reductions import (
    LINEAR_IN_EACH,
    Rows,
    hides_a_reduction,
    is_whole_loss,
    reduction_below,
    without_parameters,
)


def _unknown() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Reading:
    """What the graph of a loss says about its weight.

    Attributes:
        criterion: the main criterion, in words.
        weight: the denominator of its mean; None if it is a sum.
        others: the other terms that depend on the batch and may need another weight than the main one.
        penalties: terms that depend on parameters only, in words.
    """

    criterion: str
    weight: Denominator | None
    others: tuple[Term, ...] = ()
    penalties: tuple[str, ...] = ()


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
    try:
        return _read(terms)
    except _ERRORS_OF_TORCH as error:
        raise UnreadableLossError(_in_words(error)) from error


def _read(terms: Sequence[Term]) -> Reading:
    if not terms:
        raise UnreadableLossError("a loss without a graph (no `grad_fn`)")
    elements = sum(term.elements for term in terms)
    terms = [term.unless_larger_than(elements) for term in terms]
    if len(terms) == 1:
        main = terms[0]
        if not main.is_readable:
            raise UnreadableLossError(main.criterion)
        return Reading(main.criterion, main.denominator)

    trained = [term for term in terms if not _is_nothing(term)] or list(terms)[:1]
    if len(trained) == 1:
        return _read(trained)
    terms = trained
    varying = [term for term in terms if not is_of_parameters_only(term.node)]
    main = _main_term(varying or terms)
    if main.denominator is not None:
        others = [term for term in varying if term is not main]
    else:  # sums add up to the batch's sum; what is not such a sum would be added once a micro-batch
        others = [t for t in terms if t is not main and (t.denominator is not None or not t.is_readable or t not in varying)]
    return Reading(main.criterion, main.denominator, tuple(others), tuple(_in_full(t) for t in terms if t not in varying))


def _in_full(term: Term) -> str:
    return f"{term.criterion} {sizes_of(term.node)}"


def _main_term(terms: Sequence[Term]) -> Term:
    readable = [term for term in terms if term.is_readable]
    if not readable:
        raise UnreadableLossError(" + ".join(dict.fromkeys(term.criterion for term in terms)))
    means = [term for term in readable if term.denominator is not None]
    cross_entropies = [term for term in means if term.criterion == "cross entropy"]
    return (cross_entropies or means or readable)[0]


def _is_nothing(term: Term) -> bool:
    """``0.0 * unused.sum()``"""
    return not isinstance(term.denominator, Tensor) and term.denominator == 0 and term.factor == 0


def terms_of(loss: Tensor, rows: Rows = _unknown, below: tuple[Node, int] | None = None) -> list[Term]:
    """The summands of a loss, left to right.

    Args:
        loss: one number, with its graph.
        rows: counts the samples of the micro-batch.
        below: where to begin, a node and the place among its outputs, if not at the loss.

    Raises:
        UnreadableLossError: torch raised an error. After a backward the graph has freed what it had saved.
    """
    root, index = (loss.grad_fn, loss.output_nr) if below is None else below
    if root is None:
        return []
    kind = kind_of(root)
    try:
        return [criterion_of(root, kind, ())] if kind in CRITERIA else list(_walk(root, index, rows))
    except _ERRORS_OF_TORCH as error:
        raise UnreadableLossError(_in_words(error)) from error


# saved tensors that were freed; saved attributes that another release of torch names otherwise
_ERRORS_OF_TORCH = (RuntimeError, AttributeError)


def _in_words(error: Exception) -> str:
    return f"a node that cannot be read ({type(error).__name__}: {str(error).partition('. ')[0]})"


class _Way(NamedTuple):
    """From the loss to a node.

    Attributes:
        scale: what multiplies and divides.
        edge: the last addition, and the place of the summand in it; None where nothing is added.
        is_learned: a parameter multiplies below that addition.
        is_shared: a parameter multiplies above it, and so the sum.
    """

    scale: tuple[Operation, ...] = ()
    edge: tuple[Node, int] | None = None
    is_learned: bool = False
    is_shared: bool = False


def _walk(root: Node, output_index: int, rows: Rows) -> Iterator[Term]:
    """Walk from the loss down to its criteria, taking along what multiplies and divides them on the way."""
    stack: list[tuple[Node, int, _Way]] = [(root, output_index, _Way())]

    def descend(pairs: list[tuple[Node, int]], way: _Way, *operations: Operation) -> None:
        way = way._replace(scale=(*way.scale, *operations)) if operations else way
        stack.extend((node, index, way) for node, index in reversed(pairs))

    def descend_into_summands(addition: Node, way: _Way, *operations: Operation) -> None:
        if len(inputs_of(addition)) > 1:
            way = way._replace(is_learned=False, is_shared=way.is_shared or way.is_learned)
        for place, (child, index) in reversed(list(enumerate(addition.next_functions))):
            if child is not None:
                edge = (addition, place) if len(inputs_of(addition)) > 1 else way.edge
                descend([(child, index)], way._replace(edge=edge), *operations, *_times_in_sum(addition, place))

    while stack:
        node, index, way = stack.pop()
        kind = kind_of(node)
        term: Term | None = None
        if kind in CRITERIA:
            term = criterion_of(node, kind, way.scale)
        elif kind == "_DDPSink":  # every tensor that DistributedDataParallel returns goes in and out at the same place
            descend([node.next_functions[index]], way)
        elif kind in ("Add", "Sub", "Rsub") or (kind in ("Addcmul", "Lerp") and _is_sum(node)):
            descend_into_summands(node, way)
        elif kind == "Neg":
            descend(inputs_of(node), way, operation("times", -1.0, node))
        elif kind in THROUGH and not is_choice(node):
            descend(inputs_of(node), way)
        elif kind in ("Mul", "Div"):
            inputs = inputs_of(node)
            losses = without_parameters(node)
            if len(losses) != 1 or (kind == "Div" and losses[0] != node.next_functions[0]):
                words = "product" if kind == "Mul" else "quotient"
                term = Term(f"{node.name()} (a {words} of losses)", node, None, is_readable=False)
            elif len(inputs) > 1:
                descend(losses, way._replace(is_learned=True))
            elif kind == "Mul":
                descend(inputs, way, operation("times", constant_operand(node), node))
            else:
                descend(inputs, way, operation("over", node._saved_other, node))
        elif kind in ("Mean", *SUMS, *SELECTIONS):
            scalars, beside = _stacked_scalars(node)
            if scalars is not None:
                is_mean = kind == "Mean" and len(inputs_of(scalars)) > 1
                steps = [operation("mean of losses", len(inputs_of(scalars)), node)] if is_mean else []
                descend_into_summands(scalars, way._replace(is_learned=way.is_learned or bool(beside)), *steps)
                yield from (Term(other.name(), other, None, is_shared=True) for other in beside)
                continue
            try:
                inner, below, elements = reduction_below(node, rows)
            except UnreadableLossError as unreadable:
                term = Term(unreadable.found, node, None, is_readable=False)
            else:
                if inner is None:
                    # of a loop over samples, whose number it is divided by
                    is_pick = kind in ("Select", "Unbind") and any(step.kind == "over" and step.number for step in way.scale)
                    kind, elements = ("Sum", 1) if is_pick else (kind, elements)
                    term = criterion_of(node, kind, (*way.scale, *below), elements)
                else:
                    is_mean = kind == "Mean" and not any(step.kind == "mean of columns" for step in below)
                    outer = (operation("count", reduced_numel(node), node),) if is_mean else ()
                    descend([(inner, 0)], way, *outer, *below)
        elif kind in CONTRACTIONS and not any(hides_a_reduction(child, rows) for child, _ in inputs_of(node)):
            term = criterion_of(node, "Dot", way.scale, math.inf)  # the loss is one number, and so is this product
        else:
            term = criterion_of(node, kind, way.scale)
        if term is not None:
            yield term._replace(edge=way.edge, is_shared=way.is_shared)


def _is_sum(node: Node) -> bool:
    """Whether ``a + b * c`` or ``a + w * (b - a)`` is a sum of losses: only one factor of each is one."""
    *_, before, last = (child is not None for child, _ in node.next_functions)
    return not (before and last) if kind_of(node) == "Addcmul" else len(node.next_functions) == 2 or not last


def _times_in_sum(node: Node, place: int) -> list[Operation]:
    """What an addition multiplies a summand by."""
    kind, factors = kind_of(node), []
    if kind in ("Add", "Sub", "Rsub"):
        if place == (0 if kind == "Rsub" else 1):
            factors = [node._saved_alpha if kind == "Add" else -node._saved_alpha]
    elif kind == "Lerp":
        factors = [node._saved_weight if place else 1 - node._saved_weight]
    elif kind == "Addcmul" and place:
        factors = [node._saved_value, node._saved_tensor2 if place == 1 else node._saved_tensor1]
    return [operation("times", factor, node) for factor in factors if isinstance(factor, Tensor) or factor != 1]


def _stacked_scalars(node: Node) -> tuple[Node | None, list[Node]]:
    """What puts the losses of ``torch.stack([loss_1, loss_2]).sum()`` or ``.mean()`` together; of one loss, what is above it.

    And what of parameters multiplies them, or is added to them, on the way.
    """
    above, below = node, node.next_functions[0][0]
    sizes = (len(below.next_functions),) if kind_of(node) == "Dot" and below else getattr(node, "_saved_self_sym_sizes", None)
    beside: list[Node] = []
    if below is None or kind_of(node) in SELECTIONS or sizes is None:
        return None, beside
    while kind_of(below) in LINEAR_IN_EACH and len(losses := without_parameters(below)) == 1:
        beside += [child for child, _ in inputs_of(below) if child is not losses[0][0]]
        above, below = below, losses[0][0]
    if kind_of(below) in ("Stack", "Cat") and len(sizes) == 1 and len(below.next_functions) == sizes[0]:
        return (below if all(is_whole_loss(loss) for loss, _ in inputs_of(below)) else None), beside
    return (above if math.prod(sizes) == 1 and is_whole_loss(below) else None), beside
