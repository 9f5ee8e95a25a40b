"""Nodes of an autograd graph: what they are called, what they keep, what is below them.

The names of nodes were read in torch 2.13; those of what they save are in the table of seams.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import Tensor

Node: TypeAlias = Any  # torch.autograd.graph.Node: its saved attributes are not in the type stubs

# One operand goes through unchanged, or with its sign turned.
THROUGH = {
    "Alias", "Clone", "Contiguous", "Copy", "Expand", "MaskedFill", "NanToNum", "Neg", "Permute", "Reshape", "ReshapeAlias",
    "Squeeze", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View", "Where",
}  # fmt: skip
SUMS = {"Sum", "Nansum", "Dot"}
CONTRACTIONS = {"Bmm", "Mm", "Mv"}  # products that sum
# Some of the elements, or all in other places.
SELECTIONS = {
    "AsStrided", "ConstantPadNd", "CopySlices", "Diagonal", "Flip", "Gather", "Index", "IndexFill", "IndexPut", "IndexSelect",
    "MaskedScatter", "MaskedSelect", "Repeat", "Roll", "Scatter", "Select", "Slice", "Split", "SplitWithSizes", "Take", "Tril",
    "Triu", "Unbind",
}  # fmt: skip
# Each element of the result depends on all elements along a dimension, or on all there are.
ALONG_A_DIMENSION = {
    "Amax", "Amin", "Cumprod", "Cumsum", "Kthvalue", "LinalgVectorNorm", "LogSoftmax", "Logcumsumexp", "Logsumexp", "Max", "Median",
    "Min", "Norm", "Prod", "Renorm", "Softmax", "Sort", "Std", "StdMean", "Topk", "Var", "VarMean",
}  # fmt: skip


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


def inputs_of(node: Node) -> list[tuple[Node, int]]:
    """The nodes of the operands that need a gradient, each with the place of the operand among its outputs."""
    return [(child, index) for child, index in node.next_functions if child is not None]


def is_choice(node: Node) -> bool:
    """Whether it is ``torch.where(condition, loss, other_loss)``, of one number each."""
    return kind_of(node) == "Where" and len(inputs_of(node)) > 1 and node._saved_condition.numel() == 1


def path_of(node: Node | None, index: int = 0) -> tuple[str, ...]:
    """The first operations from ``node`` down, along first operands. What comes several times, as in a loop over samples, once."""
    path: list[str] = []
    while node is not None and len(path) < _ON_PATH:
        kind = kind_of(node)
        below = node.next_functions
        if kind not in _NOT_ON_PATH and path[-1:] != [kind]:
            path.append(kind)
        node, index = below[index if kind == "_DDPSink" else 0] if below else (None, 0)
    return tuple(path)


_ON_PATH = 5
_NOT_ON_PATH = {"Alias", "Clone", "Contiguous", "ToCopy", "_DDPSink"}
"""Those of autocast, and of DistributedDataParallel: the check runs without them."""


def nodes_below(root: Node) -> Iterator[Node]:
    """``root`` and all nodes below it, each once."""
    stack, seen = [root], {root}
    while stack:
        node = stack.pop()
        yield node
        children = [child for child, _ in inputs_of(node) if child not in seen]
        seen.update(children)
        stack.extend(children)


def constant_operand(node: Node) -> Any:
    """The operand of a product that needs no gradient: a tensor, a number, or None if it was not saved."""
    operand = getattr(node, "_saved_other", None)
    return operand if operand is not None else getattr(node, "_saved_self", None)


def sizes_of(node: Node) -> tuple[int, ...]:
    """The shape that an operation over dimensions works on; empty where it was not saved."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is None:
        saved = getattr(node, "_saved_self", None)
        saved = getattr(node, "_saved_result", None) if saved is None else saved
        # a nested one has symbols among its sizes
        sizes = () if not isinstance(saved, Tensor) else (saved.numel(),) if saved.is_nested else saved.shape
    return tuple(sizes)


def reduced_dims(node: Node, sizes: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The dimensions that an operation, as a sum or a mean, goes over.

    Args:
        node: of the operation.
        sizes: the shape that it works on, if it did not save that.
    """
    sizes = getattr(node, "_saved_self_sym_sizes", None) if sizes is None else sizes
    dims = getattr(node, "_saved_dim", None)
    if dims is None or dims == ():  # all; a dot product, or a sum that leaves nan out, did not save its shape
        return (0,) if sizes is None else tuple(range(len(sizes)))
    # a negative dim is saved as an unsigned 64-bit number
    signed = tuple(dim - 2**64 if dim >= 2**63 else dim for dim in (dims if isinstance(dims, tuple) else (dims,)))
    return signed if sizes is None else tuple(dim % max(1, len(sizes)) for dim in signed)


def reduced_numel(node: Node) -> int:
    """The elements that go into one result of a sum or a mean."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is None:  # a nested tensor goes into a mean as a whole, and is not saved by its sizes
        return int(node._saved_self_sym_numel)
    return int(math.prod(sizes[dim] for dim in reduced_dims(node)))


_OF_PARAMETERS = {
    "Abs", "Add", "Amax", "Amin", "Cat", "Clamp", "ClampMin", "Clone", "Diagonal", "Dot", "Exp", "Expand", "Expm1",
    "LinalgVectorNorm", "Log", "Log1P", "Max", "Mean", "Min", "Neg", "Norm", "Permute", "Pow", "Reciprocal", "Relu", "Reshape",
    "Rsqrt", "Rsub", "Select", "Sigmoid", "Slice", "Softmax", "Softplus", "Sqrt", "Square", "Squeeze", "Stack", "Sub", "Sum", "T",
    "Tanh", "ToCopy", "Transpose", "Unbind", "Unsqueeze", "View", *CONTRACTIONS,
}  # fmt: skip


def is_of_parameters_only(root: Node) -> bool:
    """Whether every path from ``root`` ends in a parameter, through operations that take in no other tensor."""
    for node in nodes_below(root):
        if node.name().endswith("AccumulateGrad"):
            continue
        kind = kind_of(node)
        inputs = inputs_of(node)
        if kind in ("Mul", "Div"):
            operands = [getattr(node, side, None) for side in ("_saved_self", "_saved_other")]
            if len(inputs) < 2 and any(isinstance(t, Tensor) and t.dim() > 0 for t in operands):
                return False
        elif kind not in _OF_PARAMETERS or (kind in ("Add", "Sub", "Rsub", "Dot", *CONTRACTIONS) and len(inputs) < 2):
            return False  # what is added without a gradient is not saved, and may be the batch
    return True
