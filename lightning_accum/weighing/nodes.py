"""Nodes of an autograd graph: their names, their saved values, and the nodes below them.

The names of nodes were read in torch 2.13. Their saved attributes are listed in tests/unit/test_shape_of_the_code.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_accum.exact import exact, is_on_host

Node: TypeAlias = Any  # torch.autograd.graph.Node: its saved attributes are not in the type stubs

# One operand passes through unchanged, or with its sign changed.
THROUGH = {
    "Alias", "Clone", "Contiguous", "Copy", "Expand", "MaskedFill", "NanToNum", "Neg", "Permute", "Reshape", "ReshapeAlias",
    "Squeeze", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View", "Where",
}  # fmt: skip
SUMS = {"Sum", "Nansum", "Dot"}
ADDITIONS, STACKS = {"Add", "Sub", "Rsub"}, {"Stack", "Cat"}
_OF_EACH = {*ADDITIONS, "Clone", "Div", "Mul", "Neg", "ToCopy"}
"""Elementwise operations."""
CONTRACTIONS = {"Bmm", "Mm", "Mv"}  # products that sum
# A selection or a permutation of the elements.
SELECTIONS = {
    "AsStrided", "ConstantPadNd", "CopySlices", "Diagonal", "Flip", "Gather", "Index", "IndexFill", "IndexPut", "IndexSelect",
    "MaskedScatter", "MaskedSelect", "Repeat", "Roll", "Scatter", "Select", "Slice", "Split", "SplitWithSizes", "Take", "Tril",
    "Triu", "Unbind",
}  # fmt: skip


def kind_of(node: Node) -> str:
    """The operation of a node: 'NllLossBackward0' -> 'NllLoss', 'torch::autograd::CopyBackwards' -> 'Copy'."""
    kind = _KINDS.get(type(node))
    if kind is None:
        name: str = node.name().rpartition("::")[2]
        kind = name.partition("Backward")[0].removesuffix("Impl")  # 'IndexPutImpl' is 'IndexPut' in a dispatch mode
        if type(node).__name__ == name:  # operations written in C++ share one type
            _KINDS[type(node)] = kind
    return kind


_KINDS: dict[type, str] = {}


KINKS = {"Abs", "Clamp", "ClampMax", "ClampMin", "Hardtanh", "LeakyRelu", "Maximum", "Minimum", "Relu", "Threshold"}
"""Piecewise linear functions of numbers: all micro-batches of a window must be on the same side of the kink."""
_CHOICES, _OF_NUMBERS = {"Amax", "Amin", "Max", "Min"}, {"HuberLoss", "SmoothL1Loss"}
BENT = {*KINKS, *_CHOICES, *_OF_NUMBERS, "Topk"}
"""Piecewise linear functions: means of rows may add up within one piece only."""
SOMETIMES = {"ConstantPadNd", "Slice"}
"""Operations that create no node if they change nothing."""


def inputs_of(node: Node) -> list[tuple[Node, int]]:
    """The nodes of the operands that need a gradient, each with the index of its output."""
    return [(child, index) for child, index in node.next_functions if child is not None]


def nodes_below(root: Node) -> Iterator[Node]:
    """``root`` and all nodes below it, each once."""
    stack, seen = [root], {root}
    while stack:
        node = stack.pop()
        yield node
        children = [child for child, _ in inputs_of(node) if child not in seen]
        seen.update(children)
        stack.extend(children)


def factor_in_sum(node: Node, kind: str, place: int) -> float:
    """The factor of an operand in a sum or a difference: ``other - alpha * self`` in ``Rsub``."""
    if place == (1 if kind == "Rsub" else 0):
        return 1.0
    alpha = float(getattr(node, "_saved_alpha", 1.0))  # an addition of a number has none
    return alpha if kind == "Add" else -alpha


def kinds_below(node: Node) -> tuple[str, ...]:
    """The kinds of ``node`` and of a few below it, along first operands."""
    kinds: list[str] = []
    while node is not None and len(kinds) < _KINDS_BELOW:
        kind = kind_of(node)
        if kind not in _SHOW_NOTHING:
            kinds.append(kind)
        if kind == _OF_A_CALL:
            break
        node = next((child for child, _ in node.next_functions if child is not None), None)
    return tuple(kinds)


_KINDS_BELOW = 4
_SHOW_NOTHING = {*THROUGH, *SOMETIMES, "_DDPSink"}
"""These differ for a single row, and autocast adds some."""
_OF_A_CALL = "RowWiseOutputs"
"""The node of a call of a row-wise submodule; the nodes below it differ between calls."""


def is_compiled(edge: tuple[Node, int | None, Any]) -> bool:
    """Whether a node below it was made by ``torch.compile``."""
    node, place, _ = edge
    below = nodes_below(node if place is None else node.next_functions[place][0])
    return any(kind_of(one) == "CompiledFunction" for one in below)


def head_of(node: Node, places: Mapping[int, int]) -> tuple[int, ...]:
    """Distinguishes losses of one kind: by their columns, and by the index in ``places`` of the parameter of their layer."""
    found: list[int] = []
    for _ in range(_NODES_ABOVE_A_LAYER):
        inputs = inputs_of(node)
        for leaf, _ in inputs if kind_of(node) in _HEADS else ():
            while kind_of(leaf) in THROUGH and inputs_of(leaf):
                leaf = inputs_of(leaf)[0][0]
            if (place := places.get(id(getattr(leaf, "variable", None)), 0)) > 0:
                return (*found, place)
        if kind_of(node) == "Select" and 0 < node._saved_dim < _MOST_DIMS:  # not a row
            found += [int(node._saved_dim), int(node._saved_index) % 2**32]
        if not inputs or kind_of(node) in _MIXTURES:
            break
        node = inputs[0][0]
    return tuple(found)


_HEADS = {"Addmm", "Baddbmm", "Bmm", "Convolution", "Linear", "Mm", "Mv"}
_MIXTURES = {_OF_A_CALL, "Cat", "CopySlices", "IndexAdd", "IndexCopy", "IndexPut", "Scatter", "ScatterAdd", "Stack"}
"""Operations on rows that may have passed through different layers."""
_NODES_ABOVE_A_LAYER, _MOST_DIMS = 24, 64


def number_of(operand: Any) -> float | None:
    """A saved operand that was a Python int or float, which takes no part in type promotion; None if it was a tensor."""
    if not isinstance(operand, Tensor):
        return None if operand is None else float(operand)
    if operand.dim() != 0 or operand.dtype in (torch.bool, torch.uint8):
        return None
    narrow = _NARROW_FLOAT if operand.is_floating_point() else _NARROW_INTEGER
    return None if torch.result_type(operand, narrow) == operand.dtype else float(operand)


_NARROW_FLOAT, _NARROW_INTEGER = torch.zeros((), dtype=torch.float16), torch.zeros((), dtype=torch.int8)

MEAN_REDUCTION = 1  # at::Reduction


def ignored_of(node: Node) -> int:
    """The label that a cross entropy ignores, which is saved as an unsigned 64-bit number."""
    label = int(node._saved_ignore_index)
    return label - 2**64 if label >= 2**63 else label


def _numel(node: Node) -> float:
    return int(node._saved_self.numel())


def _rows(node: Node) -> float:
    return int(node._saved_self.shape[0]) if node._saved_self.dim() > 1 else 1


def _labels(node: Node) -> Tensor:
    """The weight of all labels; without class weights, half precision would round their number."""
    total: Tensor = node._saved_total_weight
    if total.dtype.itemsize > 2 or node._saved_weight is not None:
        return total
    return exact((node._saved_target != node._saved_ignore_index).sum())


# the criterion in words, and a function from its node to the denominator of its mean
CRITERIA: dict[str, tuple[str, Callable[[Node], Tensor | float]]] = {
    "NllLoss": ("cross entropy", _labels),
    "NllLoss2D": ("cross entropy", _labels),
    "MseLoss": ("mean squared error", _numel),
    "SmoothL1Loss": ("smooth L1 loss", _numel),
    "HuberLoss": ("Huber loss", _numel),
    "SoftMarginLoss": ("soft margin loss", _numel),
    "BinaryCrossEntropy": ("binary cross entropy", _numel),
    "BinaryCrossEntropyWithLogits": ("binary cross entropy", _numel),
    "MultiMarginLoss": ("multi margin loss", _rows),
    "MultilabelMarginLoss": ("multilabel margin loss", _rows),
}


# Operations that are linear in each operand, or only move and select.
PRODUCTS_ADDED = {"Addbmm", "Addcdiv", "Addcmul", "Addmm", "Addmv", "Baddbmm"}
LINEAR = {
    *THROUGH, *SUMS, *SELECTIONS, *CONTRACTIONS, *PRODUCTS_ADDED, "Add", "Cat", "Cumsum", "Div", "IndexAdd", "IndexCopy", "Lerp",
    "Mean", "Mul", "Rsub", "ScatterAdd", "Stack", "Sub", "Trace", "_DDPSink",
}  # fmt: skip
_OF_PARAMETERS = {
    "Abs", "Add", "Amax", "Amin", "Cat", "Clamp", "ClampMin", "Clone", "Diagonal", "Dot", "Exp", "Expand", "Expm1", "LinalgSvd",
    "LinalgVectorNorm", "Log", "Log1P", "Max", "Mean", "Min", "Neg", "Norm", "Permute", "Pow", "Reciprocal", "Relu", "Reshape",
    "Rsqrt", "Rsub", "Select", "Sigmoid", "Slice", "Softmax", "Softplus", "Split", "SplitWithSizes", "Sqrt", "Square", "Squeeze",
    "Stack", "Sub", "Sum", "T", "Tanh", "ToCopy", "Transpose", "Unbind", "Unsqueeze", "View", *CONTRACTIONS,
}  # fmt: skip
_OF_TWO = {"Add", "Sub", "Rsub", "Dot", *CONTRACTIONS}


def in_order(root: Node) -> list[Node]:
    """``root`` and the linear nodes below it, in topological order."""
    order, stack, seen = list[Node](), [(root, False)], {root}
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
            continue
        stack.append((node, True))
        if (kind := kind_of(node)) in LINEAR or (kind in BENT and are_numbers((node, 0))):
            for child, _ in node.next_functions:
                if child is not None and child not in seen:
                    seen.add(child)
                    stack.append((child, False))
    return order[::-1]


def is_first_layer(node: Node) -> bool:
    """Whether ``node`` multiplies the batch by parameters: no loss is below such a layer."""
    inputs = inputs_of(node)
    return len(inputs) == 1 and is_of_parameters_only(inputs[0][0]) and not is_of_parameters_only(node)


def below_constants(node: Node) -> Node:
    """The node below additions of constants, such as the 0 with which Python's ``sum`` begins."""
    while len(inputs := inputs_of(node)) == 1 and kind_of(node) in ADDITIONS:
        ((node, _),) = inputs
    return node


def is_of_parameters_only(root: Node) -> bool:
    """Whether every path from ``root`` ends in a parameter, through operations without other tensors."""
    for node in nodes_below(root):
        if node.name().endswith("AccumulateGrad"):
            continue
        kind = kind_of(node)
        inputs = inputs_of(node)
        if kind in ("Mul", "Div"):
            operands = [getattr(node, side, None) for side in ("_saved_self", "_saved_other")]
            if len(inputs) < 2 and any(isinstance(t, Tensor) and t.dim() > 0 for t in operands):
                return False
        elif kind not in _OF_PARAMETERS or (kind in _OF_TWO and len(inputs) < 2 and node.name() != "RsubBackward1"):  # of a number
            return False  # an operand without a gradient is not saved, and may be the batch
    return True


def is_multiplied_by_zero(node: Node) -> Tensor | bool:
    """Whether a node is multiplied by a number that is 0, such as a loss without rows beside a learned factor."""
    found: Tensor | bool = False
    while len(inputs := inputs_of(node)) == 1 and kind_of(node) in LINEAR:
        for operand in (getattr(node, side, None) for side in ("_saved_self", "_saved_other") if kind_of(node) == "Mul"):
            found = found | (operand == 0) if isinstance(operand, Tensor) and not operand.dim() else found
        node = inputs[0][0]
    return found


def is_of_numbers(node: Node, index: int, places: Mapping[int, int], is_learned: bool = False) -> bool:
    """Whether a vector consists of numbers with the same operations, as in ``torch.stack(losses)``.

    The losses of a loop over rows, all of one kind, do not count, unless a learned factor (``is_learned``) multiplies them. Numbers
    of different heads (by the ``places`` of their parameters), and numbers divided by a vector of counts, are of different kinds.
    """
    kind, inputs = kind_of(node), inputs_of(node)
    if kind in STACKS:
        are_numbers = len(node.next_functions) == numel_of(node, index) and all(numel_of(*one) == 1 for one in inputs)
        kinds = {(kinds_below(child), head_of(child, places) if places else ()) for child, _ in inputs} if are_numbers else set()
        return are_numbers and (is_learned or len(kinds) > 1)
    of_batch = [one for one in inputs if not is_of_parameters_only(one[0])] if kind in _OF_EACH else []
    are_as_long = all(numel_of(*one) == numel_of(node, index) for one in inputs)
    if places and are_as_long and divides_each(node, index):
        return True
    is_learned |= len(of_batch) < len(inputs)
    return bool(of_batch) and are_as_long and all(is_of_numbers(*one, places, is_learned) for one in of_batch)


def chosen_of(node: Node, own: int) -> tuple[Node, int] | None:
    """The branch that a ``torch.where`` over ``own`` numbers has taken, if the host knows it."""
    condition, inputs = node._saved_condition, inputs_of(node)
    if condition.numel() > 1 or not is_on_host(condition) or any(numel_of(*one) != own for one in inputs):
        return None
    return inputs[not condition]


def divides_each(node: Node, index: int) -> bool:
    """Whether a few sums over rows have their own divisors, such as sums of columns divided by their counts."""
    inputs = inputs_of(node)
    divisor = getattr(node, "_saved_other", None) if kind_of(node) == "Div" and len(inputs) == 1 else None
    is_vector = isinstance(divisor, Tensor) and divisor.dim() == 1 and 1 < divisor.numel() == numel_of(node, index)
    is_sum = is_vector and kind_of(inputs[0][0]) == "Sum" and 0 in getattr(inputs[0][0], "_saved_dim", ())
    return is_sum and numel_of(node, index) <= _MOST_COLUMNS


_MOST_COLUMNS = 15
"""More terms of one kind are treated as one term."""


def numel_of(node: Node, index: int) -> int:
    """The number of elements of an output; 2 for a nested tensor, whose sizes are symbolic."""
    try:
        return math.prod(map(int, node._input_metadata[index].shape))
    except AttributeError:
        return 2


def bends_numbers(node: Node, index: int) -> bool:
    """Whether a piecewise linear function takes numbers, such as means over the batch: it chooses among them, or has a kink."""
    kind, inputs = kind_of(node), inputs_of(node)
    if not inputs or not are_numbers((node, index)):
        return False
    child = inputs[0][0]
    if kind in _CHOICES:
        return kind_of(child) == "Stack" and are_numbers(*inputs_of(child))
    is_reduced = kind_of(child) in ("Mean", "Sum", *CRITERIA)  # else it may be the output of a network for one row
    return are_numbers(*inputs) and (kind in KINKS or (kind in _OF_NUMBERS and is_reduced and len(inputs) == 1))


def are_numbers(*outputs: tuple[Node, int]) -> bool:
    """Whether outputs have no dimension, as a mean over the batch; the output of a network for one row has one."""
    return not any(len(node._input_metadata[index].shape) for node, index in outputs)
