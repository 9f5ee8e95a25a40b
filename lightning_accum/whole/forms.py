"""How calls of a row-wise submodule are made of rows: which arguments and outputs have one entry a row, and where."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_accum.dispatch import in_eager_mode
from lightning_accum.errors import RowWiseError
from lightning_accum.randomness import NoiseOfRows, RandomState, dropout_switched_off
from lightning_accum.splitting.plan import RowSlice
from lightning_accum.splitting.trimming import Inconclusive, Verdict
from lightning_accum.whole.trees import Tree, UnknownObjectError, is_list_of_numbers, is_same, read

INSTEAD = 'Have a submodule without it run row-wise, or use micro_batch="offload", which is exact for any module.'


@dataclass
class Layer:
    """A submodule that runs in micro-batches.

    Attributes:
        name: in the module.
        module: the submodule.
        run: what its calls ran before they were replaced, hooks included.
        is_sharded: ranks wait for each other in each forward and backward of it, between which its parameters are others.
    """

    name: str
    module: nn.Module
    run: Callable[..., Any]
    is_sharded: bool = False

    @cached_property
    def argument_names(self) -> list[str]:
        """The names of its positional arguments."""
        return list(inspect.signature(self.module.forward).parameters)


class Form(NamedTuple):
    """Where the rows are in calls of one kind.

    Attributes:
        inputs: which of the input leaves have one entry a row.
        dims: the dimension of each output leaf that has the rows; None if it is the same for all.
        may_be_sorted: each output has one entry a row there.
    """

    inputs: tuple[bool, ...]
    dims: tuple[int | None, ...]
    may_be_sorted: bool


def read_arguments(layer: Layer, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Tree:
    """Take the arguments of a call apart.

    Raises:
        RowWiseError: there may be tensors among them that are not found.
    """
    try:
        return read(arguments)
    except UnknownObjectError as error:
        raise RowWiseError(f"row_wise={layer.name!r}: an argument of {layer.name!r} is {error}. Pass tensors.") from error


def number_of_rows(layer: Layer, arguments: Tree, of_batch: int | None) -> int:
    """The rows of a call: the size of dimension 0 of its tensors.

    Of several sizes it is that of the batch, or a multiple of it, as of two views that were joined; else that of the first tensor.
    """
    found = [leaf for leaf in arguments.leaves if not is_list_of_numbers(leaf)]
    sizes = [size for leaf in found if (size := size_of(leaf)) is not None]
    if not sizes:
        raise RowWiseError(
            f"row_wise={layer.name!r}: {layer.name!r} is called without a tensor whose dimension 0 could be the rows."
        )
    if of_batch:
        sizes.sort(key=lambda size: 0 if size == of_batch else 1 if size and size % of_batch == 0 else 2)
    return sizes[0]


def form_of(layer: Layer, arguments: Tree, fitting: tuple[bool, ...], rows: int, run: Callable[[RowSlice, Any], Any]) -> Form:
    """Where the rows are in a call, found by running few: the dimension of an output that has another size for fewer has them.

    Arguments of the size of the batch have rows; of which one may be so by chance, such as a mask of (length, length).
    """
    for name, inner in layer.module.named_modules():
        if isinstance(inner, _BatchNorm) and (inner.training or inner.running_mean is None):
            raise RowWiseError(
                f"row_wise={layer.name!r}: {'.'.join(filter(None, (layer.name, name)))} ({type(inner).__name__}) normalises by the"
                f" statistics of the rows beside it, so that the whole batch has other outputs. {INSTEAD}"
            )
    tries, places = [fitting], [place for place, fits in enumerate(fitting) if fits]
    if len(places) > 1 and not layer.is_sharded:
        tries += [tuple(fits and at != place for at, fits in enumerate(fitting)) for place in places[1:] + places[:1]]
    problem: Exception | None = None
    few, fewer = (3, 2) if rows > 2 else (2, 1)
    for are_rows in tries:
        try:
            more, less = (_run_some(layer, arguments, are_rows, number, run) for number in (few, fewer))
        except RowWiseError:
            raise
        except Exception as error:  # of the submodule, for which this has no rows
            problem = problem or error
            continue
        check_others(layer, more, less)
        dims = tuple(_dim_of_rows(layer, *pair) for pair in zip(more.leaves, less.leaves, strict=True))
        sizes = (None if dim is None else _shape(leaf)[dim] for leaf, dim in zip(more.leaves, dims, strict=True))
        return Form(are_rows, dims, may_be_sorted=all(size in (None, few) for size in sizes))
    assert problem is not None
    raise problem


def _run_some(layer: Layer, arguments: Tree, are_rows: Sequence[bool], number: int, run: Callable[[RowSlice, Any], Any]) -> Tree:
    rows = [*range(number)]

    def some(leaf: Any, is_row: bool) -> Any:  # copies, into which the submodule may write
        if not isinstance(leaf, Tensor):
            return [leaf[row] for row in rows] if is_row else leaf
        return leaf.detach()[rows] if is_row else leaf.detach().clone()

    device = next((leaf.device for leaf in arguments.leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
    before = RandomState(device)
    try:
        with in_eager_mode():
            return read(run(RowSlice(rows, number, 1), arguments.make(map(some, arguments.leaves, are_rows))))
    except UnknownObjectError as error:
        raise RowWiseError(
            f"row_wise={layer.name!r}: {layer.name!r} returns {error}. Have it return tensors: of a model of Hugging"
            " Face, pass use_cache=False."
        ) from error
    finally:
        before.restore()


def check_others(layer: Layer, found: Tree, expected: Tree) -> None:
    """Raise if what is no tensor in the outputs for some rows is not what it is for others."""
    pairs = [*zip(found.others, expected.others, strict=False), (len(found.leaves), len(expected.leaves))]
    if differing := [pair for pair in pairs if not is_same(*pair)]:
        one, other = differing[0]
        raise RowWiseError(
            f"row_wise={layer.name!r}: {layer.name!r} returns {one!r} for some rows and {other!r} for"
            " others, which cannot be joined: have it return tensors, with one entry a row."
        )


def _dim_of_rows(layer: Layer, more: Any, less: Any) -> int | None:
    """The dimension of an output that has the rows; None if it is the same for all."""
    if not isinstance(more, Tensor):
        return None if more == less else 0
    differing = [dim for dim, (a, b) in enumerate(zip(more.shape, less.shape, strict=False)) if a != b]
    if more.dim() != less.dim() or len(differing) > 1:
        raise RowWiseError(
            f"row_wise={layer.name!r}: {layer.name!r} returns outputs whose shapes do not tell where their rows are,"
            f" {tuple(more.shape)} and {tuple(less.shape)} for one row fewer. {INSTEAD}"
        )
    return differing[0] if differing else None


def difference_by_padding(layer: Layer, padded: Any, trimmed: Any, *others: Any) -> Verdict:
    """Whether the outputs of a submodule are others with the padding of some rows than without; None for no."""
    if others:
        return Inconclusive("it is tried on one part alone")
    try:
        with in_eager_mode(), dropout_switched_off(layer.module), NoiseOfRows():
            whole, part = (read(layer.run(*args, **kwargs)).leaves for args, kwargs in (padded, trimmed))
    except Exception as error:
        return Inconclusive(f"{layer.name} raises {type(error).__name__}: {error}")
    is_exact = len(whole) == len(part) and all(map(is_same, whole, part))
    return None if is_exact else "its outputs have the columns of the padding, or depend on them"


def size_of(leaf: Any) -> int | None:
    """How many rows a leaf may have; None if it can have none."""
    return None if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.dim() == 0) else len(leaf)


def _shape(leaf: Any) -> Sequence[int]:
    return leaf.shape if isinstance(leaf, Tensor) else [len(leaf)]


def flag_of(other: Any) -> Any:
    """What calls of one kind have in common in an argument that is no tensor: a mode, names, whether outputs are asked for."""
    return tuple(other) if isinstance(other, list) else other if isinstance(other, (bool, str)) else type(other)


def name_of(layer: Layer, path: str) -> str:
    """What an argument is called: ``0.1.mask`` is in the second that was passed by position, ``1.x`` is one that has a name."""
    by_name, _, rest = path.partition(".")
    place, *inside = rest.split(".")
    if by_name == "0" and int(place) < len(layer.argument_names):
        place = layer.argument_names[int(place)]
    return ".".join([place, *inside])
