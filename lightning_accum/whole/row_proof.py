"""The proof that a submodule treats rows independently: its outputs for some rows, together and one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_accum.dispatch import in_eager_mode
from lightning_accum.errors import RowWiseError
from lightning_accum.randomness import NoiseOfRows, RandomState, dropout_switched_off
from lightning_accum.splitting.memory import is_out_of_memory
from lightning_accum.splitting.trimming import Inconclusive, Verdict
from lightning_accum.whole.call_state import as_with_a_graph
from lightning_accum.whole.calls import Form
from lightning_accum.whole.gradient_proof import check_gradients
from lightning_accum.whole.layers import INSTEAD, Layer, check_others, is_close
from lightning_accum.whole.trees import Tree, UnknownObjectError, is_list_of_numbers, leaves, read
from lightning_accum.wider import is_narrow, widened, widened_batch

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


def read_arguments(layer: Layer, arguments: _Arguments) -> Tree:
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

    Args:
        layer: that is called.
        arguments: of the call.
        of_batch: the rows of the batch, where that is known.

    Raises:
        RowWiseError: there are none.
    """
    found = [leaf for leaf in arguments.leaves if not is_list_of_numbers(leaf)]
    sizes = [size for leaf in found if (size := _size(leaf)) is not None]
    if not sizes:
        raise RowWiseError(
            f"row_wise={layer.name!r}: {layer.name!r} is called without a tensor whose dimension 0 could be the rows."
        )
    if of_batch:
        sizes.sort(key=lambda size: 0 if size == of_batch else 1 if size and size % of_batch == 0 else 2)
    return sizes[0]


def _size(leaf: Any) -> int | None:
    if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.dim() == 0):
        return None
    return len(leaf)


Largest: TypeAlias = Callable[..., Sequence[float]]
"""Of each of some numbers, the largest over the ranks. Called on all of them."""


class RowProof:
    """Proves once for each kind of call that its rows are independent, and finds where they are.

    Dropout is off and other random numbers are the same for every row; nothing is compiled; buffers are put back.

    Args:
        largest: over the ranks, where they wait for each other in each forward.
        most: rows that are run together, at least 2.
    """

    def __init__(self, largest: Largest | None = None, most: int = 8) -> None:
        self._forms: dict[Any, Form] = {}
        self._largest = largest
        self._most = 2 if largest is not None else max(2, most)  # ranks that wait for each other all run equally often

    def __call__(self, layer: Layer, arguments: Tree, number: int) -> Form:
        """Where the rows of a call are.

        Args:
            layer: that is called.
            arguments: of the call.
            number: of rows.

        Raises:
            RowWiseError: its rows are not independent, or it cannot be told where they are.
        """
        fitting = tuple(_size(leaf) == number for leaf in arguments.leaves)
        shapes = tuple(map(_shape, arguments.leaves, fitting))
        flags = tuple(map(_flag, arguments.others))
        key = (layer.name, layer.module.training, fitting, shapes, flags)
        form = self._forms.get(key)
        if self._largest is not None:
            is_needed, fewest = self._largest(float(form is None), float(-number))
            if fewest == -1:
                raise RowWiseError(
                    f"row_wise={layer.name!r}: {layer.name!r} is called with one row on a rank, where others have more. Sharded,"
                    " it runs on all ranks together: have the loader yield at least two rows."
                )
            form = None if is_needed else form
        if form is None:
            try:
                with _held(layer.module), torch.no_grad():
                    form = _prove_exactly(layer, arguments, fitting, number, self._most)
            except UnknownObjectError as error:
                raise RowWiseError(
                    f"row_wise={layer.name!r}: {layer.name!r} returns {error}. Have it return tensors: of a model of Hugging Face,"
                    " pass use_cache=False."
                ) from error
            if number > 1:
                self._forms[key] = form
        return form


def _flag(other: Any) -> Any:
    """What calls of one kind have in common in an argument that is no tensor: a mode, names, whether outputs are asked for."""
    return tuple(other) if isinstance(other, list) else other if isinstance(other, (bool, str)) else type(other)


def _shape(leaf: Any, fits: bool) -> Any:
    """What calls of one kind have in common in an argument: not its number of rows or its length."""
    return (leaf.dtype, leaf.dim(), None if fits else leaf.shape[:1]) if isinstance(leaf, Tensor) else str


def _prove_exactly(layer: Layer, arguments: Tree, fitting: tuple[bool, ...], number: int, most: int) -> Form:
    """In single precision if it computes in half precision, where rounding hides breaks, and runs in single precision too."""
    tensors = [*layer.module.parameters(), *(leaf for leaf in arguments.leaves if isinstance(leaf, Tensor))]
    kinds = {tensor.device.type for tensor in tensors}
    if not layer.is_sharded and (any(map(is_narrow, tensors)) or any(map(torch.is_autocast_enabled, kinds))):
        try:
            with ExitStack() as stack:
                for kind in kinds:
                    stack.enter_context(torch.autocast(kind, enabled=False))
                stack.enter_context(widened(layer.module, torch.float32))
                wide = read(arguments.make(widened_batch(leaf, torch.float32) for leaf in arguments.leaves))
                return _prove(layer, wide, fitting, number, most)
        except RowWiseError:
            raise
        except Exception:  # some submodules run in their own precision only, and memory may run out
            pass
    return _prove(layer, arguments, fitting, number, most)


def _prove(layer: Layer, arguments: Tree, fitting: tuple[bool, ...], number: int, most: int) -> Form:
    for name, inner in layer.module.named_modules():
        if isinstance(inner, _BatchNorm) and (inner.training or inner.running_mean is None):
            raise _not_independent(layer, name, inner, "normalises by the statistics of the rows beside it")
    if number == 1:  # nothing is joined
        outputs = leaves(_run(layer, arguments, fitting, [0]))
        return Form(fitting, tuple(0 if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == 1 else None for leaf in outputs))
    two = [0, _unlike_first(arguments.leaves, fitting, number)]
    are_rows = _kinds(layer, arguments, fitting, two)
    watch = _Watch(layer.module)
    several = [*two, *(row for row in range(min(number, most)) if row not in two)][:most]
    rows, together = _run_several(layer, arguments, are_rows, several, watch)
    buffers = {name: (buffer, buffer._version) for name, buffer in layer.module.named_buffers()}
    apart = []
    for row in rows:
        with watch.as_("apart"):
            apart.append(_run(layer, arguments, are_rows, [row]))
    for name, buffer in layer.module.named_buffers():
        if name in buffers and (buffers[name][0] is not buffer or buffers[name][1] != buffer._version):
            owner = name.rpartition(".")[0]
            what = f"changes its buffer {name.rpartition('.')[2]!r} in forward"
            raise _not_independent(layer, owner, layer.module.get_submodule(owner), what)
    for output in apart:
        check_others(layer, read(output).others, read(together).others)
    dims = _dims(together, apart)
    if dims is None:
        name, inner = watch.first_that_differs()
        raise _not_independent(layer, name, inner, "gives some rows together other outputs than alone")
    if not layer.is_sharded:
        # not as one alone where an expert takes so many rows and no more
        if _dims(_run(layer, arguments, are_rows, two[:1] * len(rows)), apart[:1] * len(rows)) != dims:
            raise _not_independent(layer, "", layer.module, "gives rows that are alike other outputs together than alone")
        check_gradients(layer, partial(_run, layer, arguments, are_rows), (two + two[:1])[:most], dims)
    sizes = (
        None if dim is None else len(leaf) if isinstance(leaf, (list, tuple)) else leaf.shape[dim]
        for leaf, dim in zip(leaves(together), dims, strict=True)
    )
    return Form(are_rows, dims, may_be_sorted=all(size in (None, len(rows)) for size in sizes))


def _run_several(
    layer: Layer, arguments: Tree, are_rows: tuple[bool, ...], rows: list[int], watch: _Watch
) -> tuple[list[int], Any]:
    """Run more rows than two together, for what depends on how many there are, where there is memory for that. Returns which."""
    try:
        with watch.as_("together"):
            return rows, _run(layer, arguments, are_rows, rows)
    except Exception as error:
        if len(rows) == 2 or not is_out_of_memory(error):
            raise
    return _run_several(layer, arguments, are_rows, rows[:2], watch)


def difference_by_padding(layer: Layer, padded: _Arguments, trimmed: _Arguments, *others: _Arguments) -> Verdict:
    """Whether the outputs of a submodule are others with the padding of some rows than without; None for no."""
    if others:
        return Inconclusive("it is tried on one part alone")
    with _held(layer.module), torch.no_grad():
        try:
            outputs = [leaves(_as_it_is(layer, *arguments)) for arguments in (padded, trimmed)]
        except Exception as error:
            return Inconclusive(f"{layer.name} raises {type(error).__name__}: {error}")
    if len(outputs[0]) == len(outputs[1]) and all(map(_are_equal, *outputs)):
        return None
    return "its outputs have the columns of the padding, or depend on them"


def _are_equal(a: Any, b: Any) -> bool:
    return is_close(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and bool(a == b)


def _kinds(layer: Layer, arguments: Tree, fitting: tuple[bool, ...], rows: list[int]) -> tuple[bool, ...]:
    """Which arguments have rows: those of fitting size, but for one that only runs, with fewer rows, if it is left as it is.

    A mask of the size (length, length) fits a batch of as many rows by chance.
    """
    if _runs(layer, arguments, fitting, rows):
        return fitting
    places = [place for place, fits in enumerate(fitting) if fits]
    for place in places[1:] + places[:1] if len(places) > 1 else []:
        others = tuple(fits and index != place for index, fits in enumerate(fitting))
        if _runs(layer, arguments, others, rows):
            return others
    _run(layer, arguments, fitting, rows)  # the error is the user's
    return fitting


def _runs(layer: Layer, arguments: Tree, are_rows: Sequence[bool], rows: list[int]) -> bool:
    try:
        outputs = leaves(_run(layer, arguments, are_rows, rows))
    except UnknownObjectError:
        raise
    except Exception:
        return False
    return any(isinstance(leaf, Tensor) for leaf in outputs)


def _run(layer: Layer, arguments: Tree, are_rows: Sequence[bool], rows: Sequence[int]) -> Any:
    def some_rows(leaf: Any, is_row: bool) -> Any:
        if not is_row:
            return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
        return leaf.detach()[rows] if isinstance(leaf, Tensor) else [leaf[row] for row in rows]

    return _as_it_is(layer, *arguments.make(map(some_rows, arguments.leaves, are_rows)))


def _as_it_is(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = (leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor))
    before = RandomState(next((tensor.device for tensor in tensors), torch.device("cpu")))
    try:
        with NoiseOfRows():
            return layer.run(*args, **kwargs)
    finally:
        before.restore()  # each run draws the same of Python and numpy


def _unlike_first(found: list[Any], fitting: Sequence[bool], number: int) -> int:
    """The first row that is not as row 0."""
    for row in range(1, min(number, 64)):
        for leaf, fits in zip(found, fitting, strict=True):
            if fits and (not torch.equal(leaf[0], leaf[row]) if isinstance(leaf, Tensor) else leaf[0] != leaf[row]):
                return row
    return 1


def _dims(together: Any, apart: list[Any]) -> tuple[int | None, ...] | None:
    """The dimension of each output that has the rows; None where outputs together are not those of each row."""
    whole, parts = leaves(together), [leaves(part) for part in apart]
    if any(len(part) != len(whole) for part in parts):
        return None
    dims: list[int | None] = []
    for leaf, *of_rows in zip(whole, *parts, strict=True):
        if not isinstance(leaf, Tensor):
            is_same = all(row == leaf for row in of_rows)
            if not is_same and list(leaf) != [entry for row in of_rows for entry in row]:
                return None
            dims.append(None if is_same else 0)
            continue
        joined = [dim for dim in range(leaf.dim()) if _is_joined(leaf, of_rows, dim)]
        if joined:
            dims.append(joined[0])
        elif all(row.shape == leaf.shape and is_close(row, leaf) for row in of_rows):
            dims.append(None)
        else:
            return None
    return tuple(dims)


def _is_joined(whole: Tensor, parts: list[Tensor], dim: int) -> bool:
    if any(part.dim() != whole.dim() for part in parts):
        return False
    shapes = [part.shape[:dim] + part.shape[dim + 1 :] for part in (whole, *parts)]
    if len(set(shapes)) > 1 or sum(part.shape[dim] for part in parts) != whole.shape[dim]:
        return False
    return is_close(torch.cat(parts, dim), whole)


class _Watch:
    """The inputs and outputs of all modules inside of one, for some rows together and for each."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen: dict[str, dict[nn.Module, list[Any]]] = {"together": {}, "apart": {}}

    @contextmanager
    def as_(self, what: str) -> Iterator[None]:
        """The modules run in here."""
        kept = self._seen[what]

        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            kept.setdefault(module, []).append(((args, kwargs), output))

        with ExitStack() as stack:
            for inner in self._module.modules():
                handle = inner.register_forward_hook(keep, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def first_that_differs(self) -> tuple[str, nn.Module]:
        """The first module with other outputs for rows together than for each, from the same inputs; its parts come first."""
        names = {inner: name for name, inner in self._module.named_modules()}
        for inner, together in self._seen["together"].items():
            apart = self._seen["apart"].get(inner, [])
            if len(together) != 1 or not apart:
                continue
            with suppress(UnknownObjectError):
                inputs, outputs = (_dims(together[0][which], [seen[which] for seen in apart]) for which in (0, 1))
                if inputs is not None and outputs is None:
                    return names[inner], inner
        return "", self._module


@contextmanager
def _held(module: nn.Module) -> Iterator[None]:
    """In here dropout is off and nothing is compiled; afterwards buffers are as they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    with dropout_switched_off(module), as_with_a_graph(), in_eager_mode():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    if buffer._version or not torch.equal(buffer, value):
                        buffer.copy_(value)


def _not_independent(layer: Layer, name: str, inner: nn.Module, what: str) -> RowWiseError:
    path = ".".join(part for part in (layer.name, name) if part)
    return RowWiseError(
        f"row_wise={layer.name!r} runs {layer.name!r} in micro-batches, but {path} ({type(inner).__name__}) {what}, so that the"
        f" whole batch has other outputs. {INSTEAD}"
    )
