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

from torch import Tensor

from lightning_accum.weighing.denominator import (
    CRITERIA,
    NO_REDUCTION,
    Denominator,
    Operation,
    Term,
    UnreadableLossError,
    criterion_of,
    operation,
    refuse_normalised,
)
from lightning_accum.weighing.nodes import (
    SUMS,
    THROUGH,
    Node,
    constant_operand,
    inputs_of,
    is_of_parameters_only,
    kind_of,
    reduced_dims,
    reduced_numel,
)


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
    try:
        return _read(terms)
    except _ERRORS_OF_TORCH as error:
        raise UnreadableLossError(_in_words(error)) from error


def _read(terms: Sequence[Term]) -> Reading:
    if not terms:
        raise UnreadableLossError("a loss without a graph (no `grad_fn`)")
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
    return Reading(main.criterion, main.denominator, tuple(others))


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


def terms_of(loss: Tensor, may_wait: bool = False, below: tuple[Node, int] | None = None) -> list[Term]:
    """The summands of a loss, left to right.

    Args:
        loss: one number, with its graph.
        may_wait: whether tensors may be looked into, which waits for their device.
        below: where to begin, a node and the place among its outputs, if not at the loss.

    Raises:
        UnreadableLossError: torch raised an error. After a backward the graph has freed what it had saved.
    """
    root, index = (loss.grad_fn, loss.output_nr) if below is None else below
    if root is None:
        return []
    kind = kind_of(root)
    try:
        return [criterion_of(root, kind, ())] if kind in CRITERIA else list(_walk(root, index, may_wait))
    except _ERRORS_OF_TORCH as error:
        raise UnreadableLossError(_in_words(error)) from error


# saved tensors that were freed; saved attributes that another release of torch names otherwise
_ERRORS_OF_TORCH = (RuntimeError, AttributeError)


def _in_words(error: Exception) -> str:
    return f"a node that cannot be read ({type(error).__name__}: {str(error).partition('. ')[0]})"


def _walk(root: Node, output_index: int, may_wait: bool) -> Iterator[Term]:
    """Walk from the loss down to its criteria, taking along what multiplies and divides them on the way."""
    stack: list[tuple[Node, int, tuple[Operation, ...]]] = [(root, output_index, ())]

    def descend(pairs: list[tuple[Node, int]], scale: tuple[Operation, ...]) -> None:
        stack.extend((node, index, scale) for node, index in reversed(pairs))

    while stack:
        node, index, scale = stack.pop()
        kind = kind_of(node)
        if kind in CRITERIA:
            yield criterion_of(node, kind, scale)
        elif kind == "_DDPSink":  # every tensor that DistributedDataParallel returns goes in and out at the same place
            descend([node.next_functions[index]], scale)
        elif kind in ("Add", "Sub", "Rsub") or kind in THROUGH:
            descend(inputs_of(node), scale)
        elif kind == "Mul":
            inputs = inputs_of(node)
            if len(inputs) == 1:
                descend(inputs, (*scale, operation("times", constant_operand(node), node)))
            elif len(losses := [pair for pair in inputs if not is_of_parameters_only(pair[0])]) == 1:
                descend(losses, scale)
            else:
                yield Term(f"{node.name()} (a product of losses)", node, None, is_readable=False)
        elif kind == "Div":
            if node.next_functions[0][0] is None or len(inputs_of(node)) != 1:
                yield Term(f"{node.name()} (a quotient of losses)", node, None, is_readable=False)
            else:
                descend(inputs_of(node), (*scale, operation("over", node._saved_other, node)))
        elif kind in ("Mean", *SUMS):
            if scalars := _stacked_scalars(node):
                is_mean = kind == "Mean" and len(scalars) > 1
                descend(scalars, (*scale, operation("mean of losses", len(scalars), node)) if is_mean else scale)
                continue
            try:
                inner, below = _reduction_below(node, scale, may_wait)
            except UnreadableLossError as unreadable:
                yield Term(unreadable.found, node, None, is_readable=False)
                continue
            if inner is None:
                yield criterion_of(node, kind, (*scale, *below))
            else:
                outer = (operation("count", reduced_numel(node), node),) if kind == "Mean" else ()
                stack.append((inner, 0, (*scale, *outer, *below)))
        else:
            yield criterion_of(node, kind, scale)


def _stacked_scalars(node: Node) -> list[tuple[Node, int]]:
    """The operands of ``torch.stack([loss_1, loss_2]).sum()`` or ``.mean()``, and of a ``.mean()`` of one loss."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    below, index = node.next_functions[0]
    if sizes is None or below is None:
        return []
    if kind_of(below) == "Mul" and len(inputs_of(below)) == 1:
        below, index = inputs_of(below)[0]
    if kind_of(below) in ("Stack", "Cat") and len(sizes) == 1 and len(below.next_functions) == sizes[0]:
        losses = inputs_of(below)
        return losses if all(is_whole_loss(loss) for loss, _ in losses) else []
    return [(below, index)] if math.prod(sizes) == 1 and is_whole_loss(below) else []


def is_whole_loss(node: Node) -> bool:
    """Whether ``node`` is a loss already, reduced over all its dimensions, and not the loss of a single sample."""
    while ((kind := kind_of(node)) in THROUGH or kind in ("Mul", "Div")) and len(inputs_of(node)) == 1:
        node = inputs_of(node)[0][0]
    if kind in ("Add", "Sub"):
        return all(is_whole_loss(child) for child, _ in inputs_of(node))
    if kind in CRITERIA:
        return bool(node._saved_reduction != NO_REDUCTION)
    if kind in ("Mean", *SUMS) and (sizes := getattr(node, "_saved_self_sym_sizes", None)) is not None:
        return len(reduced_dims(node)) == len(sizes)
    return False


_NONLINEAR = {
    "Abs", "Clamp", "ClampMax", "ClampMin", "Exp", "Expm1", "Log", "Log1P", "Log2", "Pow", "Reciprocal", "Relu", "Rsqrt",
    "Sigmoid", "Softplus", "Sqrt", "Square", "Tanh",
}  # fmt: skip
_STATISTICS = {"Var", "Std", "VarMean", "StdMean", "Logsumexp", "Logcumsumexp", "Cumsum", "Topk", "Sort"}


def _reduction_below(outer: Node, above: Sequence[Operation], may_wait: bool) -> tuple[Node | None, list[Operation]]:
    """Look for a reduction over the batch (dimension 0) below a sum or a mean, elementwise operations down.

    Args:
        outer: the sum or mean.
        above: what multiplies and divides it on the way to the loss.
        may_wait: whether tensors may be looked into.

    Returns:
        That reduction (None if there is none, as it should be), and what multiplies and divides on the way there.

    Raises:
        UnreadableLossError: between the two is no linear way, so that no weight makes micro-batches equal to the batch.
    """
    scale: list[Operation] = []
    if may_wait and kind_of(outer) == "Dot":
        refuse_normalised(outer._saved_tensor if outer._saved_tensor is not None else outer._saved_self, is_mean=False)
    is_linear, node = True, outer.next_functions[0][0]
    for _ in range(40):
        kind = "" if node is None else kind_of(node)
        if kind in ("Mean", *SUMS) and 0 in reduced_dims(node):
            if not is_linear:
                raise UnreadableLossError(f"{outer.name()} of a function of {node.name()} over the batch")
            is_divided = any(step.kind == "over" for step in scale)
            if kind in SUMS and kind_of(outer) == "Mean" and not is_divided:
                raise UnreadableLossError(f"{outer.name()} of a sum over dimension 0")
            return node, scale
        if kind in CRITERIA and node._saved_reduction != NO_REDUCTION:
            raise UnreadableLossError(f"{outer.name()} of {node.name()}")
        if kind in _STATISTICS:
            raise UnreadableLossError(f"{outer.name()} of {node.name()}")
        inputs = [] if node is None else inputs_of(node)
        is_scaled = len(inputs) == 1 and (kind == "Mul" or (kind == "Div" and node.next_functions[0][0] is not None))
        if is_scaled and is_linear:
            operand = node._saved_other if kind == "Div" else constant_operand(node)
            if kind == "Mul" and may_wait and not _is_counted(outer, above) and not _is_of_one_distribution(node, operand):
                refuse_normalised(operand, is_mean=kind_of(outer) == "Mean")
            step = operation("times" if kind == "Mul" else "over", operand, node)
            # a zero here may stand beside what is not scaled: x - 0 * w
            if step.number != 0 and (kind == "Div" or not (isinstance(operand, Tensor) and operand.dim() > 0)):
                scale.append(step)
        elif kind in _NONLINEAR or kind == "Div":
            is_linear = False
        elif kind in ("Stack", "Cat") and inputs and all(is_whole_loss(child) for child, _ in inputs):
            raise UnreadableLossError(f"{outer.name()} of losses that were put together by {node.name()}")
        elif kind in ("Add", "Sub", "Mul") and len(inputs) == 2:
            if any(_hides_a_reduction(child) for child, _ in inputs):
                raise UnreadableLossError(f"{outer.name()} of what is combined with a reduction over the batch by {node.name()}")
            break
        elif not (kind in THROUGH or kind in ("Add", "Sub", "Rsub", "Mul", "Mean", *SUMS)):
            break
        if len(inputs) != 1:
            break
        node = inputs[0][0]
    return None, [step for step in scale if not (isinstance(step.operand, Tensor) and step.operand.dim() > 0)]


def _is_counted(outer: Node, above: Sequence[Operation]) -> bool:
    """Whether a sum is divided by what it counts, so that no weights in it need to do so: by a tensor, rows, or positions."""
    sizes = getattr(outer, "_saved_self_sym_sizes", None)
    if kind_of(outer) == "Mean" or not sizes:
        return False
    classes = sizes[1] if len(sizes) > 1 else 1  # of `cross_entropy(logits, probabilities)`, which divides by all the rest
    counts = {sizes[0], math.prod(sizes) / max(1, classes)}
    return any(step.kind == "over" and (step.number is None or step.number in counts) for step in above)


def _is_of_one_distribution(product: Node, weights: object) -> bool:
    """Whether ``weights`` are the probabilities of the classes of a single sample, which always add up to 1."""
    node = inputs_of(product)[0][0]
    while kind_of(node) in THROUGH and len(inputs_of(node)) == 1:
        node = inputs_of(node)[0][0]
    if kind_of(node) != "LogSoftmax" or not isinstance(weights, Tensor):
        return False
    log_probabilities = node._saved_result
    dim = node._saved_dim - 2**64 if node._saved_dim >= 2**63 else node._saved_dim
    return bool(weights.numel() == log_probabilities.numel() == log_probabilities.shape[dim])


def _hides_a_reduction(root: Node) -> bool:
    """Whether a loss, losses put together, or a reduction over the batch is found a few elementwise operations down."""
    stack = [root]
    for _ in range(12):
        if not stack:
            return False
        node = stack.pop()
        kind = kind_of(node)
        if is_whole_loss(node) or (kind in ("Mean", *SUMS) and 0 in reduced_dims(node)):
            return not is_of_parameters_only(node)
        if kind in ("Stack", "Cat"):
            return all(is_whole_loss(child) for child, _ in inputs_of(node))
        if kind in THROUGH or kind in ("Add", "Sub", "Rsub", "Mul", "Div"):
            stack.extend(child for child, _ in inputs_of(node))
    return False
