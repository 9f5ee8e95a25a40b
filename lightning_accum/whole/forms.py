"""The rows in calls of a row-wise submodule: which arguments and outputs have one entry a row, in which dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from lightning_accum.errors import RowWiseError
from lightning_accum.exact import as_real, exact, rounding
from lightning_accum.randomness import RandomState
from lightning_accum.splitting.rows import Part, holds_tensors, made_of, parse

HINT = 'Name a submodule without it in row_wise=, or use micro_batch="offload", which is exact for any module.'


@dataclass
class Layer:
    """A submodule that runs in micro-batches."""

    name: str
    module: nn.Module
    run: Callable[..., Any]  # the original call, hooks included
    is_sharded: bool = False  # whether ranks wait for each other in each of its forwards and backwards, to gather parameters


class Tree(NamedTuple):
    """Nested arguments or outputs as a tree: the leaves are tensors, and lists of texts or numbers."""

    root: Part
    leaves: list[Part]

    @property
    def values(self) -> list[Any]:
        """Of the leaves."""
        return [leaf.value for leaf in self.leaves]

    def make(self, values: Iterable[Any]) -> Any:
        """A copy, with other values of the leaves."""
        left = iter(values)

        def made(part: Part) -> Any:
            if part.kind == "rows":  # a leaf, see read
                return next(left)
            return made_of(part, made)

        return made(self.root)


def read(value: Any, layer: Layer) -> Tree:
    """Parse arguments or outputs of a call. Raises a RowWiseError if tensors may be hidden."""
    root, leaves = parse(value), list[Part]()
    for part in root.walk():
        if part.is_tensor or (part.size is not None and _is_list_of_rows(part.value)):
            part.kind = "rows"
            leaves.append(part)
        elif (part.problem or isinstance(part.value, PackedSequence)) and holds_tensors(part.value, depth=3):
            found = f"an argument or output is a {type(part.value).__name__}, which holds tensors"
            raise RowWiseError.of(layer.name, f"{found}. Have it take and return tensors (Hugging Face: use_cache=False).")
    return Tree(root, leaves)


def _is_list_of_rows(value: Any) -> bool:
    """Whether it is a list that may have one text or number a row; a tuple of numbers is a shape."""
    kinds = (str, int, float) if type(value) is list else (str,)
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(entry, kinds) for entry in value)


def is_same(found: Any, expected: Any) -> bool:
    """Whether two values are equal, tensors up to rounding."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        return found.shape == expected.shape and bool(is_near(found, expected))
    try:
        return found is expected or bool(found == expected)
    except Exception:  # the truth value of an array is ambiguous
        return False


def is_near(found: Tensor, expected: Tensor) -> Tensor:
    """Whether they are equal up to rounding, on their device."""
    found, expected = as_real(found), as_real(expected)
    if not found.is_floating_point():
        return (found == expected).all()
    kind, is_tf32 = expected.device.type, expected.is_cuda and expected.dtype == torch.float32
    dtypes = [expected.dtype, *([torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else [])]
    tolerance = rounding(max(*(torch.finfo(dtype).eps for dtype in dtypes), 2**-10 if is_tf32 else 0.0))
    found, expected = exact(found), exact(expected)
    difference, size = (x.nan_to_num(0.0, 0.0, 0.0).norm() for x in (found - expected, expected))
    return torch.logical_and(difference <= tolerance * size, (found.isfinite() == expected.isfinite()).all())


class Form(NamedTuple):
    """The positions of rows in calls of one kind."""

    inputs: tuple[bool, ...]  # which of the input leaves have one entry a row
    dims: tuple[int | None, ...]  # the row dimension of each output leaf; None if all rows share the numbers


def number_of_rows(layer: Layer, arguments: Tree, of_batch: int | None) -> int:
    """The size of dimension 0 of the tensors; if they differ, the batch size or a multiple (two joined views), else the first."""
    sizes = [leaf.size for leaf in arguments.leaves if leaf.size is not None and (leaf.is_tensor or type(leaf.value[0]) is str)]
    if not sizes:
        raise RowWiseError.of(layer.name, f"{layer.name!r} is called without a tensor whose dimension 0 could be the rows.")
    if of_batch:
        sizes.sort(key=lambda size: 0 if size == of_batch else 1 if size and size % of_batch == 0 else 2)
    return sizes[0]


def kind_of(layer: Layer, arguments: Tree) -> tuple[Any, ...]:
    """The kind of a call: the mode, the dimensions, and flags and names among the arguments."""
    others = [x for x in tree_leaves(arguments.root.value, is_leaf=_is_list_of_rows) if not _is_list_of_rows(x)]
    flags = [x if isinstance(x, (bool, str)) else type(x) for x in others if not isinstance(x, Tensor)]
    dims = [(leaf.path, leaf.value.dim() if leaf.is_tensor else -1) for leaf in arguments.leaves]
    return layer.name, layer.module.training, *dims, *flags


def form_of(layer: Layer, arguments: Tree, fitting: tuple[bool, ...], rows: int, run: Callable[[range, Any], Any]) -> Form:
    """Find the rows of a call by running fewer: the dimension of an output that changes its size has the rows.

    Arguments with the size of the batch have rows; one may have it by chance, such as a mask of (length, length).
    """
    for name, inner in layer.module.named_modules(prefix=layer.name):
        if isinstance(inner, _BatchNorm) and (inner.training or inner.running_mean is None):
            found = f"{name} ({type(inner).__name__}) normalises by the statistics of its micro-batch"
            raise RowWiseError.of(layer.name, f"{found}. {HINT}")
    tries, places = [fitting], [place for place, fits in enumerate(fitting) if fits]
    if len(places) > 1 and not layer.is_sharded:
        tries += [tuple(fits and at != place for at, fits in enumerate(fitting)) for place in places[1:] + places[:1]]
    problem: Any = None
    few, fewer = (3, 2) if rows > 2 else (2, 1)
    for are_rows in tries:
        try:
            more, less = (_run_some(layer, arguments, are_rows, number, run) for number in (few, fewer))
        except RowWiseError:
            raise
        except Exception as error:  # the submodule cannot run without these rows
            problem = problem or error
            continue
        dims = tuple(map(_dim_of_rows, more.values, less.values))
        check_outputs(layer, more, less, dims)
        return Form(are_rows, dims)
    note = f"row_wise={layer.name!r}: the call does not run on {few} of {rows} rows, which arguments need in dimension 0. {HINT}"
    getattr(problem, "add_note", id)(note)  # Python 3.10 has no notes
    raise problem


def _run_some(layer: Layer, arguments: Tree, are_rows: Sequence[bool], number: int, run: Callable[[range, Any], Any]) -> Tree:
    def some(value: Any, is_row: bool) -> Any:
        """Copies of the first rows, into which the submodule may write."""
        found = value[:number] if is_row else value
        return found.detach().clone() if isinstance(found, Tensor) else found

    device = next((leaf.value.device for leaf in arguments.leaves if leaf.is_tensor), torch.device("cpu"))
    with RandomState(device), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return read(run(range(number), arguments.make(map(some, arguments.values, are_rows))), layer)


def _dim_of_rows(more: Any, less: Any) -> int | None:
    """The first dimension of an output that differs for fewer rows; None if all are equal."""
    if not isinstance(more, Tensor):
        return None if more == less else 0
    return next((dim for dim, (a, b) in enumerate(zip(more.shape, less.shape, strict=False)) if a != b), None)


def check_outputs(layer: Layer, found: Tree, first: Tree, dims: Sequence[int | None]) -> None:
    """Raise if outputs for different rows cannot be joined in the dimensions of their rows."""
    others, first_others = (tree.make(repeat("a tensor")) for tree in (found, first))
    pairs = [(others, first_others), (len(found.leaves), len(dims)), (len(first.leaves), len(dims))]
    for value, other, dim in zip(found.values, first.values, dims, strict=False):
        pairs.append((value, other) if dim is None else (_shape_beside(value, dim), _shape_beside(other, dim)))
    for one, other in pairs:
        if not is_same(one, other):
            seen = f"it returns {one!r} for some rows and {other!r} for others: have it return tensors with one entry a row"
            raise RowWiseError.of(layer.name, f"{seen}. {HINT}")


def _shape_beside(value: Any, dim: int) -> tuple[int, ...]:
    shape = value.shape if isinstance(value, Tensor) else [len(value)]
    return tuple(size for at, size in enumerate(shape) if at != dim)
