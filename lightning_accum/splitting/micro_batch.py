"""Micro-batches: how a loader's batch is made of rows, and how some of its rows are taken.

What a micro-batch takes of each part of the batch is put into functions, once, so that :meth:`Layout.take` is quick.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

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


TakeRows: TypeAlias = "Callable[[Any, RowSelector], Any]"


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
        pattern: what of it other batches can have too.

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
    _batch: Any = field(repr=False)
    pattern: Pattern = field(repr=False)

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
        take = _compile(root)
        assert take is not None  # it has rows
        kinds = {**known, **{part.path: part.kind for part in parts}}
        pattern = Pattern(size, tuple(tensors["tensor"]), tuple(tensors["shared"]), kinds, _signature(batch), take)
        return cls(size, tensors["tensor"], tensors["shared"], kinds, batch, pattern)

    def take(self, rows: slice | Sequence[int] | Tensor, columns: Mapping[int, slice] | None = None) -> Any:
        """A batch of the same types with some of the rows. The batch that was read stays as it is.

        Args:
            rows: a slice (tensors are then views), or row numbers from 0 in the wanted order (tensors are then copies).
            columns: ``{L: part}`` keeps only ``part`` of dimensions of size ``L``, to trim padding. In tensors with rows these
                are the dimensions after 0; where a floating tensor has size ``L`` in dimension 1 the others stay, for they are
                features. In shared tensors they are all dimensions.
        """
        return self.pattern.take(self._batch, RowSelector(rows, columns))


class Pattern(NamedTuple):
    """A layout without the batch that it was read from, so that no batch is kept alive."""

    size: int
    tensors: tuple[str, ...]
    shared_tensors: tuple[str, ...]
    kinds: dict[str, str]
    signature: tuple[Any, ...] | None
    take: TakeRows

    def fits(self, batch: Any) -> bool:
        """Whether another batch certainly has this layout: tensors of the same shapes in a tuple, list or dict."""
        return self.signature is not None and _signature(batch) == self.signature

    def of(self, batch: Any) -> Layout | None:
        """The layout of another batch; None where it does not certainly fit, see :meth:`fits`."""
        if not self.fits(batch):
            return None
        named = batch if isinstance(batch, dict) else {f"[{index}]": value for index, value in enumerate(batch)}
        tensors, shared = ({path: named[path] for path in paths} for paths in (self.tensors, self.shared_tensors))
        return Layout(self.size, tensors, shared, self.kinds, batch, self)


def _signature(batch: Any) -> tuple[Any, ...] | None:
    """What batches of one layout have in common; None where more has to be looked at."""
    is_dict = type(batch) is dict
    if not (is_dict or type(batch) is tuple or type(batch) is list):
        return None
    values = list(batch.values() if is_dict else batch)
    if not all(type(value) is Tensor and not value.is_nested for value in values):
        return None
    keys = tuple(batch) if is_dict else ()
    if not all(type(key) is str and key.isidentifier() for key in keys):  # a path of others is not their name
        return None
    return type(batch), keys, tuple(value.shape for value in values), tuple(value.dtype for value in values)


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


def _compile(part: BatchNode) -> TakeRows | None:
    """What a micro-batch takes of one part; None if it takes the part as it is."""
    value = part.value
    if part.kind == "rows":
        return lambda value, selector: _maker_of(value)(selector.entries(value))
    if part.kind == "tensor":
        return lambda value, selector: selector.tensor(value)
    if isinstance(value, Tensor):  # shared
        return (lambda value, selector: selector.shared(value)) if value.dim() else None
    takes = [(inner, take) for inner in part.parts if (take := _compile(inner))]
    if not takes:
        # a copy, so that a micro-batch does to its own what it does to it
        return (lambda value, selector: copy.copy(value)) if type(value) in (dict, list) else None
    try:
        return _rebuild(value, takes)
    except Exception as error:
        raise UnsplittableBatchError.because(f"{part}, and cannot be made anew ({error})") from error


def _rebuild(value: Any, takes: list[tuple[BatchNode, TakeRows]]) -> TakeRows:
    """Make a container anew, and put what is taken of its parts into the new one."""
    items = [(part.key, take) for part, take in takes if not part.is_attribute]
    attributes = [(part.key, take) for part, take in takes if part.is_attribute]
    if type(value) in (list, tuple) and all(part.kind == "tensor" for part, _ in takes) and len(items) == len(value):
        return lambda value, selector: type(value)(map(selector.tensor, value))  # the usual batch, the quick way
    if isinstance(value, (list, tuple)):

        def rebuilt(value: Any, selector: RowSelector) -> Any:
            entries = list(value)
            for index, take in items:
                entries[index] = take(entries[index], selector)
            return _maker_of(value)(entries)

        _maker_of(value)(value)  # now, rather than in the middle of a window
        return rebuilt
    second_names = [name for name in getattr(value, "__dict__", {}) if items and name in value]

    def copied(value: Any, selector: RowSelector) -> Any:
        made = copy.copy(value)
        for key, take in items:
            made[key] = take(value[key], selector)
        for name in second_names:  # `batch.labels` for `batch["labels"]`
            made.__dict__[name] = made[name]
        for name, take in attributes:
            object.__setattr__(made, name, take(getattr(value, name), selector))  # also where the class is frozen
        return made

    copy.copy(value)
    return copied


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
