"""What the sum in a mean was divided by, as the node of the reduction has saved it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_accum.errors import UnreadableLossError
from lightning_accum.exact import moved
from lightning_accum.weighing.nodes import (
    CONTRACTIONS,
    SUMS,
    Node,
    constant_operand,
    inputs_of,
    kind_of,
    reduced_dims,
    reduced_numel,
    sizes_of,
)

Denominator: TypeAlias = "Tensor | float"


class Term(NamedTuple):
    """One summand of a loss.

    Attributes:
        criterion: what it is, in words, e.g. ``"cross entropy"``.
        node: its node in the autograd graph.
        denominator: what its sum was divided by; None for a sum that was not divided, and where it cannot be read.
        is_readable: False where the node is not known.
        factor: the constant that a mean is multiplied by.
        divisions: the nodes of the divisions on its way to the loss.
        is_divided_sum: it is a sum that was divided by what was counted elsewhere, rather than a mean.
        rows: entries in the first dimension of such a sum.
        elements: how many numbers such a sum adds up.
        number: the Python number that such a sum was divided by.
        constants: the tensors of one number that it is multiplied by.
        edge: the last addition on the way from the loss, and the place of the term in it; None where nothing is added.
        is_shared: a parameter multiplies it together with other terms.
    """

    criterion: str
    node: Node
    denominator: Denominator | None
    is_readable: bool = True
    factor: float = 1.0
    divisions: tuple[Node, ...] = ()
    is_divided_sum: bool = False
    rows: int = 0
    elements: float = 0
    number: float | None = None
    constants: tuple[Tensor, ...] = ()
    edge: tuple[Node, int] | None = None
    is_shared: bool = False

    def unless_larger_than(self, elements: float) -> Term:
        """The same, but not readable where its sum was divided by a number that cannot be a count of so many elements."""
        if self.number is None or 1 <= self.number <= elements or elements == math.inf:
            return self
        found = f"a sum divided by the number {self.number:g}, which cannot be a count of its {elements:g} elements"
        return self._replace(criterion=found, denominator=None, is_readable=False)


def on_host(number: Denominator) -> Denominator:
    """A number for what the host holds already; what a device holds stays there."""
    if not isinstance(number, Tensor):
        return number
    return number.item() if number.is_cpu else number.detach()


NO_REDUCTION, MEAN_REDUCTION, SUM_REDUCTION = 0, 1, 2  # at::Reduction


def _numel(node: Node) -> float:
    return int(node._saved_self.numel())


def _rows(node: Node) -> float:
    logits = node._saved_self
    return int(logits.shape[0]) if logits.dim() > 1 else 1


def _total_weight(node: Node) -> Tensor:
    weight: Tensor = node._saved_total_weight
    return weight


# criterion in words, and where its node keeps the denominator of its mean
CRITERIA: dict[str, tuple[str, Callable[[Node], Denominator]]] = {
    "NllLoss": ("cross entropy", _total_weight),
    "NllLoss2D": ("cross entropy", _total_weight),
    "MseLoss": ("mean squared error", _numel),
    "SmoothL1Loss": ("smooth L1 loss", _numel),
    "HuberLoss": ("Huber loss", _numel),
    "SoftMarginLoss": ("soft margin loss", _numel),
    "BinaryCrossEntropy": ("binary cross entropy", _numel),
    "BinaryCrossEntropyWithLogits": ("binary cross entropy", _numel),
    "MultiMarginLoss": ("multi margin loss", _rows),
    "MultilabelMarginLoss": ("multilabel margin loss", _rows),
}


class PlainMean:
    """Reads losses that are one of :data:`CRITERIA` themselves, as the first of them, which was read in all of its graph.

    Args:
        node: of the first.
    """

    def __init__(self, node: Node) -> None:
        below = node.next_functions[0][0]
        is_plain = below is not None and kind_of(below) != "Mean"  # else `criterion_of` knows more
        self._kind, self._below = type(node), type(below) if is_plain else None
        last = below.next_functions if is_plain else ()
        self._last = type(last[0][0] if last else None)
        self._denominator = CRITERIA[kind_of(node)][1]

    def read(self, node: Node) -> Denominator | None:
        """What a loss was divided by; None where it is not like the first."""
        if type(node) is not self._kind or node._saved_reduction != MEAN_REDUCTION:
            return None
        below = node.next_functions[0][0]
        if type(below) is not self._below:
            return None
        last = below.next_functions
        if type(last[0][0] if last else None) is not self._last:
            return None
        count = self._denominator(node)
        return count.item() if isinstance(count, Tensor) and count.is_cpu else count


class Operation(NamedTuple):
    """What happens to a criterion on its way to the loss.

    Attributes:
        kind: ``"times"``, ``"over"``, ``"count"`` (of an outer mean over other dimensions), ``"mean of columns"`` (one over such
            a count, of a sum) or ``"mean of losses"``.
        operand: a tensor, a number, or None if it was not saved.
        node: its node.
        number: the operand, if it is a Python number.
    """

    kind: str
    operand: Any
    node: Node
    number: float | None


def operation(kind: str, operand: Any, node: Node) -> Operation:
    """What ``node`` does to a criterion."""
    return Operation(kind, operand, node, _number_of(operand))


def criterion_of(node: Node, kind: str, scale: Sequence[Operation], elements: float = 0) -> Term:
    """The term that ends in ``node``, of operation ``kind``, after what ``scale`` does to it.

    Args:
        node: the last one that is looked at.
        kind: its operation.
        scale: what multiplies and divides on the way to it.
        elements: of a sum, how many numbers it adds up.
    """
    if kind in CRITERIA:
        words, denominator = CRITERIA[kind]
        reduction = node._saved_reduction
        if reduction == NO_REDUCTION:
            return Term(f"{node.name()} without a reduction", node, None, is_readable=False)
        below = node.next_functions[0][0]
        if below is not None and kind_of(below) == "Mean" and 0 in reduced_dims(below):
            return Term(f"{node.name()} of {below.name()} over the batch", node, None, is_readable=False)
        count = denominator(node) if reduction != SUM_REDUCTION else None
        words = words if count is not None else f"sum of {words}"
    elif kind == "Mean":
        words, count = "mean", reduced_numel(node)
    elif kind in SUMS:
        words, count = "sum", None
    else:
        return Term(node.name(), node, None, is_readable=False)
    factor = 1.0
    numbers = [step.number for step in scale if step.kind == "over" and step.number is not None]
    for step in scale:
        if step.number is not None and step.kind in ("times", "mean of columns"):
            factor *= step.number
    if factor == 0 or is_of_zeros(node):
        return Term(words, node, 0.0, factor=0.0)  # `0.0 * ...` trains nothing
    divisions = tuple(step.node for step in scale if step.kind == "over" and step.number is None)
    constants = tuple(step.operand for step in scale if step.kind == "times" and step.number is None and _is_one(step.operand))
    try:
        divided = _divided_sum(node, scale) if count is None else _times_divisors(count, scale)
    except UnreadableLossError as unreadable:
        return Term(unreadable.found, node, None, is_readable=False)
    if count is not None:
        for number in numbers:
            factor /= number or 1.0
        return Term(words, node, divided, factor=factor, divisions=divisions, constants=constants)
    if divided is None:
        return Term(words, node, None, factor=factor, divisions=divisions, constants=constants)
    sizes = sizes_of(node)
    return Term(
        f"{words} divided by a count",
        node,
        divided,
        factor=factor,
        divisions=divisions,
        is_divided_sum=True,
        rows=next(iter(sizes), 0),
        elements=elements or math.prod(sizes),
        number=math.prod(numbers) if numbers and not divisions and divided != 0 else None,
        constants=constants,
    )


def is_of_zeros(node: Node) -> bool:
    """What is reduced was multiplied by the number 0, as in ``(logits * 0).mean()`` where a batch has nothing else."""
    below = node.next_functions[0][0] if node.next_functions else None
    return below is not None and kind_of(below) == "Mul" and _number_of(constant_operand(below)) == 0


def _number_of(operand: Any) -> float | None:
    """A Python number that was multiplied or divided by; None for a tensor."""
    if isinstance(operand, Tensor):
        return float(operand) if _is_number(operand) else None
    return None if operand is None else float(operand)


def _times_divisors(count: Denominator, scale: Sequence[Operation]) -> Denominator:
    """``mean / mask.mean()`` is a mean over ``count * mask.mean()``; numbers are constant factors."""
    for step in scale:
        if step.kind == "count":
            count = count * step.operand
        elif step.kind == "over" and step.number is None:
            count = count * _one_number(step.operand)
    return count


def _divided_sum(summed: Node, scale: Sequence[Operation]) -> Denominator | None:
    """What a sum is divided by; None if by nothing."""
    sizes = sizes_of(summed)
    outer: float = math.prod(step.operand for step in scale if step.kind == "count")
    if any(step.kind == "mean of losses" for step in scale):
        raise UnreadableLossError("a mean of sums")
    numbers = [step.number for step in scale if step.kind == "over" and step.number is not None]
    tensors = [_one_number(step.operand) for step in scale if step.kind == "over" and step.number is None]
    is_empty = bool(sizes) and math.prod(sizes) == 0  # `loss[mask].sum() / max(n, 1)` of a mask without a row
    if tensors:
        count = tensors[0] * (math.prod(numbers) * outer)
        for tensor in tensors[1:]:
            count = count * tensor
        return torch.where(count <= 1, 0, count) if is_empty else _zero_where_masked(summed, count)
    if numbers:
        number = math.prod(numbers) * outer
        if is_empty and number <= 1:
            return 0.0
        return number if number > 1 else _zero_where_masked(summed, torch.tensor(number, dtype=torch.float64))
    for step in scale:
        if step.kind == "times":
            _refuse_hidden_mean(step, sizes)
    return None


def _one_number(divisor: Any) -> Tensor:
    if not isinstance(divisor, Tensor) or divisor.numel() != 1:
        raise UnreadableLossError(f"a division by {divisor.numel() if isinstance(divisor, Tensor) else 'unknown'} numbers")
    return divisor.detach().reshape(())


def _zero_where_masked(summed: Node, count: Tensor) -> Tensor:
    """``mask.sum().clamp(min=1)`` hides that nothing was counted; the mask under the sum still shows it.

    Where all factors are 0 and more was counted, they are no mask: advantages, say, that happen to be 0.
    """
    if kind_of(summed) in ("Dot", *CONTRACTIONS) and len(inputs_of(summed)) == 1:
        names = ("_saved_tensor", "_saved_mat2", "_saved_vec", "_saved_self")
        saved = (getattr(summed, name, None) for name in names)
        mask = next(operand for operand in saved if operand is not None)
        return torch.where(mask.any() | (moved(count, mask.device) > 1), moved(count, mask.device), 0)
    below = summed.next_functions[0][0]
    while below is not None and kind_of(below) in ("Mul", "Where", "MaskedFill") and len(inputs := inputs_of(below)) == 1:
        mask = constant_operand(below)
        if kind_of(below) == "MaskedFill":
            mask = ~below._saved_mask
        elif kind_of(below) == "Where":
            mask = below._saved_condition if below.next_functions[0][0] is not None else ~below._saved_condition
        if isinstance(mask, Tensor) and mask.dim() > 0:
            return torch.where(mask.any() | (moved(count, mask.device) > 1), moved(count, mask.device), 0)
        below = inputs[0][0]
    return count


def _refuse_hidden_mean(step: Operation, sizes: tuple[int, ...]) -> None:
    """``loss.sum() * (1 / batch_size)`` is a mean that looks like a scaled sum. A factor of 0.5 is taken for a constant."""
    value = step.number
    sizes_of_batch = {math.prod(sizes[:end]) for end in range(1, len(sizes) + 1)} - {0, 1, 2}
    if value and any(math.isclose(1 / value, size, rel_tol=1e-6) for size in sizes_of_batch):
        raise UnreadableLossError(f"a sum over {sizes} times {value:g}, which may be one over a count")


def _is_one(operand: Any) -> bool:
    """Whether it is a tensor of one number."""
    return isinstance(operand, Tensor) and operand.numel() == 1


def _is_number(tensor: Tensor) -> bool:
    """Whether a saved operand was an int or a float of Python's: unlike a tensor, it takes part in no type promotion."""
    if tensor.dim() != 0 or tensor.dtype in (torch.bool, torch.uint8):
        return False
    return torch.result_type(tensor, _NARROW_FLOAT if tensor.is_floating_point() else _NARROW_INTEGER) != tensor.dtype


_NARROW_FLOAT, _NARROW_INTEGER = torch.zeros((), dtype=torch.float16), torch.zeros((), dtype=torch.int8)
