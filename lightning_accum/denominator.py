"""What the sum in a mean was divided by, as the node of the reduction has saved it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_accum.nodes import SUMS, Node, constant_operand, inputs_of, kind_of, reduced_dims, reduced_numel

Denominator: TypeAlias = "Tensor | float"


class UnreadableLossError(ValueError):
    """The graph of the loss shows no denominator."""

    def __init__(self, found: str) -> None:
        self.found = found
        super().__init__(found)


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a loss.

    Attributes:
        criterion: what it is, in words, e.g. ``"cross entropy"``.
        node: its node in the autograd graph.
        denominator: what its sum was divided by; None for a sum that was not divided, and where it cannot be read.
        is_readable: False where the node is not known.
    """

    criterion: str
    node: Node
    denominator: Denominator | None
    is_readable: bool = True


NO_REDUCTION, SUM_REDUCTION = 0, 2  # at::Reduction


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


def criterion_of(node: Node, kind: str, factors: tuple[Any, ...]) -> Term:
    """The term that ends in ``node``, of operation ``kind``, after being multiplied by ``factors``."""
    if kind in CRITERIA:
        words, denominator = CRITERIA[kind]
        if node._saved_reduction == SUM_REDUCTION:
            return Term(f"sum of {words}", node, None)
        return Term(words, node, denominator(node))
    if kind == "Mean":
        return Term("mean", node, _mean_count(node))
    if kind in SUMS:
        if (count := mean_over_batch(node)) is not None:
            return Term("mean over the batch", node, count)
        _refuse_hidden_mean(node, factors)
        return Term("sum", node, None)
    return Term(node.name(), node, None, is_readable=False)


def _refuse_hidden_mean(summed: Node, factors: tuple[Any, ...]) -> None:
    """``loss.sum() * (1 / batch_size)`` is a mean that looks like a scaled sum. A factor of 0.5 is taken for a constant."""
    sizes = tuple(getattr(summed, "_saved_self_sym_sizes", ()))
    sizes_of_batch = {math.prod(sizes[:end]) for end in range(1, len(sizes) + 1)} - {0, 1, 2}
    for factor in factors:
        if isinstance(factor, Tensor) and not _is_number(factor):
            raise UnreadableLossError("a sum times a tensor, which may be one over a count")
        value = None if factor is None else float(factor)
        if value and any(math.isclose(1 / value, size, rel_tol=1e-6) for size in sizes_of_batch):
            raise UnreadableLossError(f"a sum over {sizes} times {value:g}, which may be one over a count")


def _mean_count(node: Node) -> float:
    count = reduced_numel(node)
    below, _ = node.next_functions[0]
    # x.mean(0).mean(): the inner mean is over the batch too
    if below is not None and kind_of(below) == "Mean" and 0 in reduced_dims(below):
        count *= reduced_numel(below)
    return count


def mean_over_batch(node: Node) -> float | None:
    """The batch's size in ``x.mean(0).sum()``; None where the sum goes over the batch itself."""
    below, _ = node.next_functions[0]
    if below is not None and kind_of(below) == "Mean" and 0 in reduced_dims(below):
        return reduced_numel(below)
    return None


def count_of(division: Node, summed: Node) -> Denominator:
    """The denominator of a sum divided by a count: a tensor, or a number that can be one.

    ``denominator.clamp(min=1)`` hides that nothing was counted; the mask under the sum still shows it.
    """
    denominator = division._saved_other
    if not isinstance(denominator, Tensor) or _is_number(denominator):
        return _plausible_count(float(denominator), summed)
    if denominator.numel() != 1:
        raise UnreadableLossError(f"a sum divided by {denominator.numel()} numbers")
    below = summed.next_functions[0][0]
    while below is not None and kind_of(below) == "Mul" and len(inputs := inputs_of(below)) == 1:
        mask = constant_operand(below)
        if isinstance(mask, Tensor) and mask.dim() > 0:
            return torch.where(mask.any(), denominator, torch.zeros_like(denominator))
        below = inputs[0][0]
    return denominator


def _plausible_count(number: float, summed: Node) -> float:
    sizes = getattr(summed, "_saved_self_sym_sizes", None)
    if number != int(number) or number < 0 or (sizes is not None and number > math.prod(sizes)):
        raise UnreadableLossError(f"a sum divided by the number {number:g}, which cannot be a count of its {sizes} elements")
    return number


def _is_number(tensor: Tensor) -> bool:
    """Whether a saved operand was a Python number: unlike a tensor, it takes part in no type promotion."""
    narrow = torch.float16 if tensor.is_floating_point() else torch.int8
    return tensor.dim() == 0 and torch.result_type(tensor, torch.zeros((), dtype=narrow)) != tensor.dtype
