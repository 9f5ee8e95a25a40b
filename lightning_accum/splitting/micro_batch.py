"""Micro-batches: how a loader's batch is made of rows, and how some of its rows are taken."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lightning_accum.errors import ArgumentError, UnsplittableBatchError
from lightning_accum.splitting.batch_parts import BatchNode, read_parts


@dataclass(frozen=True)
class Tokens:
    """A size in tokens, for a window or a micro-batch.

    Args:
        count: how many tokens, at least 1. For a window also a function of the tokens (weights of all ranks) that training has
            seen in its windows so far, for a batch size that grows; it is asked when a window begins.

    Raises:
        ValueError: ``count`` is no int, or less than 1.

    Example:
        >>> Tokens(8_192)
        Tokens(count=8192)
        >>> warm_up = Tokens(lambda seen: 32_768 if seen < 10**9 else 524_288)
        >>> warm_up.at(0), warm_up.at(2 * 10**9)
        (32768, 524288)
    """

    count: int | Callable[[float], int]

    def __post_init__(self) -> None:
        if not callable(self.count):
            _check_tokens(self.count, "Tokens(count)")

    def at(self, seen: float) -> int:
        """The size of a window that begins when training has seen so many tokens.

        Raises:
            ValueError: the function gave no int, or less than 1.
        """
        if not callable(self.count):
            return self.count
        count = self.count(seen)
        _check_tokens(count, f"The function in Tokens(...), asked after {seen:.0f} tokens,")
        return count


def _check_tokens(count: Any, what: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError(f"{what} must be an int of at least 1, but count={count!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How a batch is made of rows: which parts have one entry a sample, and which are shared.

    Attributes:
        size: the number of rows (samples).
        tensors: the tensors whose dimension 0 is the rows, by path: ``input_ids``, ``[0]``, ``inputs.mask``; ``batch`` if the
            batch itself is a tensor.
        shared_tensors: the tensors with a dimension 0 that is not the rows, by path.
        kinds: what each part is, by path: a ``tensor`` with rows; a list that is ``rows``, one entry a sample; a
            ``container`` of other parts; or ``shared`` by all rows.
        taken: a batch of the same types with what a selector takes of each part. The batch that was read stays as it is.

    Example:
        >>> layout = Layout.read({"x": torch.arange(6).reshape(3, 2), "name": ["a", "b", "c"], "rate": 0.5})
        >>> layout.size, list(layout.tensors)
        (3, ['x'])
        >>> layout.take(slice(1, 3))
        {'x': tensor([[2, 3],
                [4, 5]]), 'name': ['b', 'c'], 'rate': 0.5}
    """

    size: int
    tensors: dict[str, Tensor] = field(repr=False)
    shared_tensors: dict[str, Tensor] = field(repr=False)
    kinds: dict[str, str]
    taken: Callable[[RowSelector], Any] = field(repr=False)

    @classmethod
    def read(cls, batch: Any, known: Mapping[str, str] | None = None, samples: Collection[int] = ()) -> Layout:
        """Find out how ``batch`` is made of rows.

        Args:
            batch: tensors in mappings, lists, tuples and dataclasses, nested in any way.
            known: the ``kinds`` of an earlier batch of the same loader. They hold where this batch could be read in two ways: a
                table of 5 entries stays shared in a last batch of 5 rows.
            samples: how many of them the loader puts into a batch, where it says so.

        Raises:
            UnsplittableBatchError: no size, or more than one, fits; or there is a part that cannot be split.
        """
        known = known or {}
        root, size, parts = read_parts(batch, known, samples)
        tensors: dict[str, dict[str, Tensor]] = {"tensor": {}, "shared": {}}
        for part in parts:
            if isinstance(part.value, Tensor) and part.size is not None:
                tensors[part.kind][part.path] = part.value
        kinds = {**known, **{part.path: part.kind for part in parts}}
        for part in parts:
            if part.kind == "container":
                part.cut = [inner for inner in part.parts if _is_cut(inner)]
                try:
                    _rebuilt(part, [], lambda inner: inner.value)
                except Exception as error:  # now, rather than in the middle of a window
                    raise UnsplittableBatchError.because(f"{part}, and cannot be made anew ({error})") from error
        return cls(size, tensors["tensor"], tensors["shared"], kinds, partial(_taken, root))

    def take(self, rows: slice | Sequence[int] | Tensor, columns: Mapping[int, slice] | None = None) -> Any:
        """A batch of the same types with some of the rows. The batch that was read stays as it is.

        Args:
            rows: a slice (tensors are then views), or row numbers from 0 in the wanted order (tensors are then copies).
            columns: ``{L: part}`` keeps only ``part`` of dimensions of size ``L``, to trim padding. In tensors with rows these
                are the dimensions after 0; where a floating tensor has size ``L`` in dimension 1 the others stay, for they are
                features. In shared tensors they are all dimensions.
        """
        return self.taken(RowSelector(rows, columns))


class RowSelector:
    """What is kept for one micro-batch, applied to one leaf at a time."""

    def __init__(self, rows: slice | Sequence[int] | Tensor, columns: Mapping[int, slice] | None) -> None:
        self._columns = columns or {}
        self._rows = rows
        self._indices: dict[torch.device, Tensor] = {}
        self.entries: Callable[[Any], Any]
        self.tensor: Callable[[Any], Any]
        if isinstance(rows, slice):
            self.entries = itemgetter(rows)
            self.tensor = (lambda value: value[(rows, *self._kept(value))]) if columns else self.entries
        else:
            self.entries = lambda value: [value[number] for number in self._numbers()]
            self.tensor = self._select

    def shared(self, value: Tensor) -> Tensor:
        """What is kept of a tensor without rows."""
        if self._columns.keys().isdisjoint(value.shape):
            return value
        return value[tuple(self._columns.get(size, slice(None)) for size in value.shape)]

    def write_back(self, into: Tensor, part: Tensor) -> None:
        """Write ``part``, which was cut out of a tensor, to where it was in one of the same shape."""
        if not isinstance(self._rows, slice):
            view = into[(slice(None), *self._kept(into))]
            view.index_copy_(0, self._index(into.device), part)
        else:
            self.tensor(into).copy_(part)

    def _kept(self, value: Tensor) -> list[slice]:
        """What stays of the dimensions after 0."""
        sizes = value.shape[1:]
        if value.is_floating_point() and sizes and sizes[0] in self._columns:
            sizes = sizes[:1]
        return [self._columns.get(size, slice(None)) for size in sizes]

    def _select(self, value: Tensor) -> Tensor:
        if self._columns:  # first, so that there is less to copy
            value = value[(slice(None), *self._kept(value))]
        return value.index_select(0, self._index(value.device))

    def _index(self, device: torch.device) -> Tensor:
        """The numbers of the rows, on a device."""
        index = self._indices.get(device)
        if index is None:
            index = self._rows if isinstance(self._rows, Tensor) else torch.tensor(self._numbers(), dtype=torch.long)
            # nobody waits for the copy: right towards a device, but the host could read it too early
            index = self._indices[device] = index.to(device, non_blocking=device.type != "cpu")
        return index

    def _numbers(self) -> list[int]:
        assert not isinstance(self._rows, slice)
        return self._rows.tolist() if isinstance(self._rows, Tensor) else list(self._rows)


# --- what a micro-batch takes of each part ----------------------------------------------------------------------------


def _taken(part: BatchNode, selector: RowSelector) -> Any:
    value = part.value
    if part.kind == "rows":
        return _maker_of(value)(selector.entries(value))
    if part.kind == "tensor":
        return selector.tensor(value)
    if isinstance(value, Tensor):
        return selector.shared(value)
    if not part.cut:  # a copy, so that a micro-batch does to its own what it does to it
        return copy.copy(value) if type(value) in (dict, list) else value
    return _rebuilt(part, part.cut, lambda inner: _taken(inner, selector))


def _is_cut(part: BatchNode) -> bool:
    """A micro-batch does not take it as it is."""
    is_shared_tensor = isinstance(part.value, Tensor) and part.value.dim() > 0
    is_open = type(part.value) in (dict, list)
    return part.kind in ("rows", "tensor") or is_shared_tensor or is_open or any(map(_is_cut, part.parts))


def _rebuilt(part: BatchNode, inside: Sequence[BatchNode], taken: Callable[[BatchNode], Any]) -> Any:
    """A container made anew, with what is taken of the parts inside of it in their places."""
    value = part.value
    if isinstance(value, (list, tuple)):
        entries = list(value)
        for inner in inside:
            entries[inner.key] = taken(inner)
        return _maker_of(value)(entries)
    made = copy.copy(value)
    items = [inner for inner in inside if not inner.is_attribute]
    for inner in items:
        made[inner.key] = taken(inner)
    for name in getattr(made, "__dict__", {}) if items else ():
        if name in value:  # `batch.labels` for `batch["labels"]`
            made.__dict__[name] = made[name]
    for inner in inside:
        if inner.is_attribute:
            object.__setattr__(made, inner.key, taken(inner))  # also where the class is frozen
    return made


def _maker_of(value: Sequence[Any]) -> Callable[[Any], Any]:
    if type(value) is tuple or type(value) is list:
        return type(value)
    if isinstance(value, tuple):
        return getattr(value, "_make", type(value))

    def copied(entries: Any) -> Any:
        made: Any = copy.copy(value)
        made[:] = entries
        return made

    return copied
