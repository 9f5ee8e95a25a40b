"""Read the denominator of a mean loss from its autograd graph.

A loss that was reduced by a mean has, in its ``grad_fn``, a node that saved what the sum was divided by. Reading it there
needs no knowledge of the batch, makes no copy to the host, and counts exactly what the loss itself counted: tokens after the
model's own shift, ignored labels, class weights.

The names of nodes and of their saved attributes were read in torch 2.13 (``tools/autograd/derivatives.yaml`` is where they come
from). A node that is not known is never guessed at: see :class:`UnreadableLossError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Node: TypeAlias = Any  # torch.autograd.graph.Node: its saved attributes are not in the type stubs
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

    varying = [term for term in terms if not _is_of_parameters_only(term.node)]
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


# --- walking the graph ------------------------------------------------------------------------------------------------

# One operand goes through unchanged, or with its sign turned.
_THROUGH = {
    "Alias", "Clone", "Contiguous", "Copy", "Expand", "MaskedFill", "Neg", "Permute", "Reshape", "ReshapeAlias", "Squeeze", "T",
    "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View", "Where",
}  # fmt: skip
_SUMS = {"Sum", "Nansum", "Dot"}


def terms_of(loss: Tensor) -> list[Term]:
    """The summands of a loss, left to right."""
    root = loss.grad_fn
    if root is None:
        return []
    kind = kind_of(root)
    return [_criterion(root, kind, ())] if kind in _CRITERIA else list(_walk(root, loss.output_nr))


def kind_of(node: Node) -> str:
    """The operation of a node: 'NllLossBackward0' -> 'NllLoss', 'torch::autograd::CopyBackwards' -> 'Copy'."""
    kind = _KINDS.get(type(node))
    if kind is None:
        name: str = node.name().rpartition("::")[2]
        kind = name.partition("Backward")[0]
        if type(node).__name__ == name:  # not so for operations written in C++, which share one type
            _KINDS[type(node)] = kind
    return kind


_KINDS: dict[type, str] = {}


def _inputs(node: Node) -> list[tuple[Node, int]]:
    return [(child, index) for child, index in node.next_functions if child is not None]


def _walk(root: Node, output_index: int) -> Iterator[Term]:
    """Walk from the loss down to its criteria, left to right."""
    stack: list[tuple[Node, int, tuple[Any, ...]]] = [(root, output_index, ())]

    def descend(pairs: list[tuple[Node, int]], factors: tuple[Any, ...]) -> None:
        stack.extend((node, index, factors) for node, index in reversed(pairs))

    while stack:
        node, index, factors = stack.pop()
        kind = kind_of(node)
        if kind in _CRITERIA:
            yield _criterion(node, kind, factors)
        elif kind == "_DDPSink":  # every tensor that DistributedDataParallel returns goes in and out at the same place
            descend([node.next_functions[index]], factors)
        elif kind in ("Add", "Sub", "Rsub") or kind in _THROUGH:
            descend(_inputs(node), factors)
        elif kind == "Mul":
            inputs = _inputs(node)
            if len(inputs) == 1:
                descend(inputs, (*factors, _constant_operand(node)))
            elif len(losses := [pair for pair in inputs if not _is_of_parameters_only(pair[0])]) == 1:
                descend(losses, factors)
            else:
                yield Term(f"{node.name()} (a product of losses)", node, None, is_readable=False)
        elif kind == "Div":
            if node.next_functions[0][0] is None or len(_inputs(node)) != 1:
                yield Term(f"{node.name()} (a quotient of losses)", node, None, is_readable=False)
            elif (summed := _sum_below(node)) is not None:
                yield Term("sum divided by a count", node, _count_of(node, summed))
            else:
                descend(_inputs(node), factors)
        elif kind in ("Mean", *_SUMS) and (scalars := _stacked_scalars(node)):
            descend(scalars, factors)
        else:
            yield _criterion(node, kind, factors)


def _constant_operand(node: Node) -> Any:
    """The operand of a product that needs no gradient: a tensor, a number, or None if it was not saved."""
    operand = getattr(node, "_saved_other", None)
    return operand if operand is not None else getattr(node, "_saved_self", None)


def _sum_below(division: Node) -> Node | None:
    """The sum that is divided; None if what is divided is a criterion by itself, and the division a constant factor."""
    node = division.next_functions[0][0]
    while (kind := kind_of(node)) in _THROUGH or kind == "Mul":
        inputs = _inputs(node)
        if len(inputs) != 1:
            return None
        node = inputs[0][0]
    return node if kind in _SUMS and not _stacked_scalars(node) and not _mean_over_batch(node) else None


def _stacked_scalars(node: Node) -> list[tuple[Node, int]]:
    """The operands of ``torch.stack([loss_1, loss_2]).sum()`` or ``.mean()``, and of a ``.mean()`` of one loss."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    below, index = node.next_functions[0]
    if sizes is None or below is None:
        return []
    if kind_of(below) == "Mul" and len(_inputs(below)) == 1:
        below, index = _inputs(below)[0]
    if kind_of(below) in ("Stack", "Cat") and len(sizes) == 1 and len(below.next_functions) == sizes[0]:
        return _inputs(below)
    return [(below, index)] if math.prod(sizes) == 1 and _is_whole_loss(below) else []


def _is_whole_loss(node: Node) -> bool:
    """Whether ``node`` is a loss already, reduced over all its dimensions, and not the loss of a single sample."""
    while ((kind := kind_of(node)) in _THROUGH or kind in ("Mul", "Div")) and len(_inputs(node)) == 1:
        node = _inputs(node)[0][0]
    if kind in _CRITERIA:
        return bool(node._saved_reduction != NO_REDUCTION)
    if kind in ("Mean", *_SUMS) and (sizes := getattr(node, "_saved_self_sym_sizes", None)) is not None:
        return len(_reduced_dims(node)) == len(sizes)
    return False


# --- the denominators -------------------------------------------------------------------------------------------------

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
_CRITERIA: dict[str, tuple[str, Callable[[Node], Denominator]]] = {
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


def _criterion(node: Node, kind: str, factors: tuple[Any, ...]) -> Term:
    if kind in _CRITERIA:
        words, denominator = _CRITERIA[kind]
        if node._saved_reduction == SUM_REDUCTION:
            return Term(f"sum of {words}", node, None)
        return Term(words, node, denominator(node))
    if kind == "Mean":
        return Term("mean", node, _mean_count(node))
    if kind in _SUMS:
        if (count := _mean_over_batch(node)) is not None:
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
    count = _reduced_numel(node)
    below, _ = node.next_functions[0]
    # x.mean(0).mean(): the inner mean is over the batch too
    if below is not None and kind_of(below) == "Mean" and 0 in _reduced_dims(below):
        count *= _reduced_numel(below)
    return count


def _mean_over_batch(node: Node) -> float | None:
    """The batch's size in ``x.mean(0).sum()``; None where the sum goes over the batch itself."""
    below, _ = node.next_functions[0]
    if below is not None and kind_of(below) == "Mean" and 0 in _reduced_dims(below):
        return _reduced_numel(below)
    return None


def _reduced_dims(node: Node) -> tuple[int, ...]:
    sizes = node._saved_self_sym_sizes
    dims = getattr(node, "_saved_dim", None)
    if not dims:
        return tuple(range(len(sizes)))
    # a negative dim is saved as an unsigned 64-bit number
    return tuple((dim - 2**64 if dim >= 2**63 else dim) % len(sizes) for dim in dims)


def _reduced_numel(node: Node) -> int:
    sizes = node._saved_self_sym_sizes
    return int(math.prod(sizes[dim] for dim in _reduced_dims(node)))


def _count_of(division: Node, summed: Node) -> Denominator:
    """The denominator of a sum divided by a count: a tensor, or a number that can be one.

    ``denominator.clamp(min=1)`` hides that nothing was counted; the mask under the sum still shows it.
    """
    denominator = division._saved_other
    if not isinstance(denominator, Tensor) or _is_number(denominator):
        return _plausible_count(float(denominator), summed)
    if denominator.numel() != 1:
        raise UnreadableLossError(f"a sum divided by {denominator.numel()} numbers")
    below = summed.next_functions[0][0]
    while below is not None and kind_of(below) == "Mul" and len(inputs := _inputs(below)) == 1:
        mask = _constant_operand(below)
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


# --- what does not depend on the batch --------------------------------------------------------------------------------

_OF_PARAMETERS = {
    "Pow", "Abs", "Sqrt", "Exp", "Log", "Neg", "Sum", "Mean", "Norm", "LinalgVectorNorm", "Add", "Sub", "Rsub", "Stack", "Cat",
    "View", "Reshape", "ToCopy", "T", "Transpose", "Softplus", "Sigmoid", "Clone", "Clamp", "ClampMin", "Reciprocal", "Square",
    "Select", "Squeeze", "Unsqueeze", "Expand",
}  # fmt: skip


def _is_of_parameters_only(root: Node) -> bool:
    """Whether every path from ``root`` ends in a parameter, through operations that take in no other tensor."""
    stack = [root]
    while stack:
        node = stack.pop()
        if node.name().endswith("AccumulateGrad"):
            continue
        kind = kind_of(node)
        inputs = _inputs(node)
        if kind in ("Mul", "Div"):
            operands = [getattr(node, f"_saved_{side}", None) for side in ("self", "other")]
            if len(inputs) < 2 and any(isinstance(t, Tensor) and t.dim() > 0 for t in operands):
                return False
        elif kind not in _OF_PARAMETERS:
            return False
        stack.extend(child for child, _ in inputs)
    return True
