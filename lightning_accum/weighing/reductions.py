"""Reductions below reductions: whether what is added up is a number of each sample, or made of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from lightning_accum.errors import UnreadableLossError
from lightning_accum.weighing.denominator import CRITERIA, NO_REDUCTION, Operation, operation
from lightning_accum.weighing.nodes import (
    ALONG_A_DIMENSION,
    SELECTIONS,
    SUMS,
    THROUGH,
    Node,
    constant_operand,
    inputs_of,
    is_of_parameters_only,
    kind_of,
    reduced_dims,
    reduced_numel,
    sizes_of,
)

Rows: TypeAlias = Callable[[], "int | None"]
"""Counts the samples of a micro-batch, None where that is not known; called only where the graph can be read in two ways."""


LINEAR_IN_EACH = ("Add", "Mul", "Rsub", "Sub")  # in each of its operands


def without_parameters(node: Node) -> list[tuple[Node, int]]:
    """The operands, without those that depend on parameters only; all, where there is one."""
    inputs = inputs_of(node)
    return inputs if len(inputs) == 1 else [pair for pair in inputs if not is_of_parameters_only(pair[0])]


def is_whole_loss(node: Node) -> bool:
    """Whether ``node`` is a loss already, reduced over all its dimensions, and not the loss of a single sample."""
    while (kind := kind_of(node)) in THROUGH or kind in ("Mul", "Div"):
        inputs = without_parameters(node)
        if len(inputs) != 1:
            break
        node = inputs[0][0]
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
_OF_SEVERAL = {"Add", "Sub", "Rsub", "Mul", "Div", "Where", "Maximum", "Minimum", *SELECTIONS}


def reduction_below(outer: Node, rows: Rows) -> tuple[Node | None, list[Operation], float]:
    """Look for a reduction over the batch below a sum, a mean or a selection, elementwise operations down.

    Args:
        outer: the sum or mean.
        rows: counts the samples of the micro-batch.

    Returns:
        That reduction (None if there is none, as it should be), what multiplies and divides on the way there, and how many
        elements were added up.

    Raises:
        UnreadableLossError: between the two is no linear way, so that no weight makes micro-batches equal to the batch.
    """
    scale: list[Operation] = []
    shape = sizes_of(outer)
    elements = math.inf if kind_of(outer) == "Dot" else math.prod(shape)
    is_linear, has_offset, node = True, False, outer.next_functions[0][0]
    for _ in range(40):
        kind = "" if node is None else kind_of(node)
        inputs = [] if node is None else without_parameters(node) if kind in LINEAR_IN_EACH else inputs_of(node)
        has_offset |= kind in ("Add", "Rsub", "Sub") and len(inputs) < len(inputs_of(node))
        if kind in ("Mean", *SUMS):
            if 0 in reduced_dims(node):
                flaw = _flaw_between(outer, node, scale, is_linear and not (has_offset and kind in SUMS))
                if flaw is None:
                    return node, scale, elements
                if not _is_of_rows_beside(node, sizes_of(node), rows):
                    if flaw != _SUM_UNDER_MEAN or sizes_of(node)[:1] != (rows(),):
                        raise UnreadableLossError(f"{outer.name()} of {flaw.format(node.name())}")
                    return node, [*scale, operation("mean of columns", 1 / reduced_numel(outer), outer)], elements
            shape = sizes_of(node)
            elements = max(elements, math.prod(shape))
            if scale and scale[-1].kind == "over" and scale[-1].number == reduced_numel(node):
                scale.pop()  # x.sum(1) / x.shape[1] is a mean over a row
        elif kind in CRITERIA and node._saved_reduction != NO_REDUCTION:
            raise UnreadableLossError(f"{outer.name()} of {node.name()}")
        elif kind in ALONG_A_DIMENSION:
            if _mixes_rows(node, shape, rows):
                raise UnreadableLossError(f"{outer.name()} of {node.name()}")
            is_linear = False
        elif kind in ("Stack", "Cat"):
            if any(is_whole_loss(child) for child, _ in inputs):
                raise UnreadableLossError(f"{outer.name()} of losses that were put together by {node.name()}")
            if hides_a_reduction(node, rows):
                raise UnreadableLossError(f"{outer.name()} of what is combined with a reduction over the batch by {node.name()}")
            break
        elif len(inputs) > 1 and kind in _OF_SEVERAL:
            elements = max(elements, *(math.prod(sizes_of(child)) for child, _ in inputs if kind_of(child) in SELECTIONS), 0)
            if any(hides_a_reduction(child, rows) for child, _ in inputs):
                raise UnreadableLossError(f"{outer.name()} of what is combined with a reduction over the batch by {node.name()}")
        elif len(inputs) == 1 and (kind == "Mul" or (kind == "Div" and node.next_functions[0][0] is not None)):
            step = operation("times" if kind == "Mul" else "over", constant_operand(node), node)
            is_vector = isinstance(step.operand, Tensor) and step.operand.dim() > 0
            # a zero here may stand beside what is not scaled: x - 0 * w
            if is_linear and step.number != 0 and (kind == "Div" or not is_vector):
                scale.append(step)
            elements = math.inf if is_vector else elements  # weighted, perhaps, and divided by the sum of its weights
        elif kind in _NONLINEAR or kind == "Div":
            is_linear = False
        elif kind in SELECTIONS:
            elements = max(elements, math.prod(sizes_of(node)))
        elif not (kind in THROUGH or kind in ("Add", "Sub", "Rsub")):
            break
        if len(inputs) != 1:
            break
        node = inputs[0][0]
    if kind in ("Bmm", "Mv", "CtcLoss"):
        elements = math.inf
    return None, [step for step in scale if not (isinstance(step.operand, Tensor) and step.operand.dim() > 0)], elements


_SUM_UNDER_MEAN = "a sum over dimension 0"


def _flaw_between(outer: Node, inner: Node, scale: Sequence[Operation], is_linear: bool) -> str | None:
    """Why a reduction over dimension 0 cannot be read through the one above it."""
    if not is_linear:
        return "a function of {} over the batch"
    divisors = [step.operand for step in scale if step.kind == "over"]
    if any(isinstance(divisor, Tensor) and divisor.dim() > 0 for divisor in divisors):
        return "{}, each divided by its own number"
    return _SUM_UNDER_MEAN if kind_of(inner) in SUMS and kind_of(outer) == "Mean" and not divisors else None


def _is_of_rows_beside(node: Node, sizes: tuple[int, ...], rows: Rows) -> bool:
    """Whether ``node``, which goes over the first dimension, leaves that of the samples alone: time comes first, or a list."""
    below = node.next_functions[0][0]
    if below is not None and kind_of(below) == "Stack" and below._saved_dim == 0:
        return True
    number = rows()
    return (
        number is not None and sizes[:1] != (number,) and number in sizes and sizes.index(number) not in reduced_dims(node, sizes)
    )


def _mixes_rows(node: Node, like: tuple[int, ...], rows: Rows) -> bool:
    """Whether a statistic goes over the dimension of samples.

    Args:
        node: the statistic.
        like: the shape that it has if it did not save that.
        rows: counts the samples of the micro-batch.
    """
    sizes = sizes_of(node) or like or None
    if 0 not in reduced_dims(node, sizes):
        return False
    if kind_of(node) in ("Softmax", "LogSoftmax") and sizes is not None and len(sizes) == 1 and rows() != sizes[0]:
        return False  # of a single sample
    return sizes is None or not _is_of_rows_beside(node, sizes, rows)


def hides_a_reduction(root: Node, rows: Rows) -> bool:
    """Whether a loss, losses put together, or a reduction over the batch is found elementwise operations down."""
    stack = [(root, False)]
    for _ in range(40):
        if not stack:
            return False
        node, is_put_together = stack.pop()
        kind = kind_of(node)
        is_found = is_whole_loss(node)
        if not is_found and (kind in ("Mean", *SUMS) or kind in ALONG_A_DIMENSION):
            is_found = _mixes_rows(node, (), rows)
        if is_found and is_put_together and (number := rows()) is not None:
            is_found = sizes_of(node)[:1] == (number,)  # else of a sample, each of which has sums of its own
        if is_found:
            return not is_of_parameters_only(node)
        if kind in THROUGH or kind in _OF_SEVERAL or kind in _NONLINEAR or kind in ("Mean", "Stack", "Cat", *SUMS):
            is_put_together = is_put_together or kind in ("Stack", "Cat")
            stack.extend((child, is_put_together) for child, _ in inputs_of(node))
    return False
