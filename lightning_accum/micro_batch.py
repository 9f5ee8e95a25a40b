"""Micro-batches: how a loader's batch is made of rows, and how some of its rows are taken.

:meth:`Layout.read` turns the batch into a tree of parts, and tries every size that could be the number of rows: the one that leaves
the fewest tensors unsplit is taken, and two that do equally well are an error, never a guess. What a micro-batch takes of each part
is then put into functions, once, so that :meth:`Layout.take` is quick.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from numbers import Number
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Tokens:
    """A size in tokens, for a window or a micro-batch.

    Args:
        count: how many tokens, at least 1.

    Raises:
        ValueError: ``count`` is no int, or less than 1.

    Example:
        >>> Tokens(8_192)
        Tokens(count=8192)
    """

    count: int

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"Tokens(count) must be an int of at least 1, but count={self.count!r}")


class UnsplittableBatchError(ValueError):
    """A batch does not show how it is made of rows."""


Take: TypeAlias = "Callable[[_Cut], Any]"
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, range, slice})


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How a batch is made of rows: which parts have one entry a sample, and which are shared.

    Attributes:
        size: the number of rows (samples).
        tensors: the tensors whose dimension 0 is the rows, by path: ``input_ids``, ``[0]``, ``inputs.mask``; ``batch`` if the
            batch itself is a tensor.
        shared_tensors: the tensors with a dimension 0 that is not the rows, by path.
        kinds: what each part is, by path: a ``tensor`` (or array) with rows; a list that is ``rows``, one entry a sample; a
            ``container`` of other parts; or ``shared`` by all rows.

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
    _take: Take = field(repr=False)

    @classmethod
    def read(cls, batch: Any, known: Mapping[str, str] | None = None) -> Layout:
        """Find out how ``batch`` is made of rows.

        Args:
            batch: tensors and NumPy arrays in mappings, lists, tuples and dataclasses, nested in any way.
            known: the ``kinds`` of an earlier batch of the same loader. They hold where this batch could be read in two ways: a
                table of 5 entries stays shared in a last batch of 5 rows.

        Raises:
            UnsplittableBatchError: no size, or more than one, fits; or there is a part that cannot be split.
        """
        known = known or {}
        root = _parse(batch)
        size = _find_size(root, known)
        reached = list(_reach(root, size, known))
        if any(part.is_of_records and kind == "rows" for part, kind in reached):  # then other lists are one a sample too
            reached = list(_reach(root, size, {**_tensor_lists(root, size), **known}))
        tensors: dict[str, dict[str, Tensor]] = {"tensor": {}, "shared": {}}
        kinds = dict(known)
        for part, kind in reached:
            part.kind = kinds[part.path] = kind
            if isinstance(part.value, Tensor) and part.size is not None:
                tensors[kind][part.path] = part.value
            elif kind == "container" and part.is_of_records and part.size == size > 1 and part.path not in known:
                raise _unsplittable(f"{part}, and its tensors have {size} rows too: either could be the samples")
        take = _compile(root)
        assert take is not None  # it has rows
        return cls(size, tensors["tensor"], tensors["shared"], kinds, take)

    def take(self, rows: slice | Sequence[int] | Tensor, columns: Mapping[int, slice] | None = None) -> Any:
        """A batch of the same types with some of the rows. The batch that was read stays as it is.

        Args:
            rows: a slice (tensors are then views), or row numbers from 0 in the wanted order (tensors are then copies).
            columns: ``{L: part}`` keeps only ``part`` of dimensions of size ``L``, to trim padding. In tensors with rows these
                are the dimensions after 0; where a floating tensor has size ``L`` in dimension 1 the others stay, for they are
                features. In shared tensors they are all dimensions.
        """
        return self._take(_Cut(rows, columns))


class _Cut:
    """What is kept for one micro-batch, applied to one leaf at a time."""

    def __init__(self, rows: slice | Sequence[int] | Tensor, columns: Mapping[int, slice] | None) -> None:
        self._columns = columns or {}
        self.entries: Callable[[Any], Any]
        self.tensor: Callable[[Any], Any]
        if isinstance(rows, slice):
            self.entries = itemgetter(rows)
            self.tensor = (lambda value: value[(rows, *self._kept(value))]) if columns else self.entries
        else:
            self._rows = rows
            self._indices: dict[torch.device, Tensor] = {}
            self.entries = lambda value: [value[number] for number in self._numbers()]
            self.tensor = self._select

    def shared(self, value: Tensor) -> Tensor:
        if self._columns.keys().isdisjoint(value.shape):
            return value
        return value[tuple(self._columns.get(size, slice(None)) for size in value.shape)]

    def _kept(self, value: Any) -> list[slice]:
        """What stays of the dimensions after 0."""
        sizes = value.shape[1:]
        is_floating = value.is_floating_point() if isinstance(value, Tensor) else value.dtype.kind == "f"
        if is_floating and sizes and sizes[0] in self._columns:
            sizes = sizes[:1]
        return [self._columns.get(size, slice(None)) for size in sizes]

    def _select(self, value: Any) -> Any:
        if self._columns:  # first, so that there is less to copy
            value = value[(slice(None), *self._kept(value))]
        if not isinstance(value, Tensor):
            return value[self._numbers()]
        index = self._indices.get(value.device)
        if index is None:
            index = self._rows if isinstance(self._rows, Tensor) else torch.tensor(self._numbers(), dtype=torch.long)
            # nobody waits for the copy: right towards a device, but the host could read it too early
            index = self._indices[value.device] = index.to(value.device, non_blocking=value.device.type != "cpu")
        return value.index_select(0, index)

    def _numbers(self) -> list[int]:
        return self._rows.tolist() if isinstance(self._rows, Tensor) else list(self._rows)


def _unsplittable(found: str) -> UnsplittableBatchError:
    return UnsplittableBatchError(
        f"The batch cannot be split into micro-batches: {found}. Say how to split it: GradientAccumulation(split=...) takes a"
        " function split(batch, size) that returns the micro-batches as a list."
    )


# --- what a batch is made of ------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Part:
    """A part of a batch. Strings, numbers and the like are none: all micro-batches share them.

    Attributes:
        key: where it is in the part around it: a key, an index, or the name of an attribute.
        size: of dimension 0, or how many entries a list has that may be rows, for its entries are alike.
        is_of_records: a list of mappings that have keys in common, or of dataclass objects.
        problem: why it cannot be split.
        leaves: the tensors, arrays and unsplittable objects inside.
    """

    path: str
    value: Any
    key: Any = None
    is_attribute: bool = False
    size: int | None = None
    is_list: bool = False
    is_of_records: bool = False
    problem: str = ""
    kind: str = "shared"
    parts: list[_Part] = field(default_factory=list)
    leaves: list[_Part] = field(default_factory=list)

    def __str__(self) -> str:
        name = f"{self.path} is a {type(self.value).__name__}"
        if self.is_list:
            return f"{name} of {self.size} entries"
        has_shape = self.size is not None or (isinstance(self.value, Tensor) and not self.value.is_nested)
        return f"{name} of shape {tuple(self.value.shape)}" if has_shape else name


def _parse(value: Any, path: str = "", key: Any = None, is_attribute: bool = False) -> _Part:
    part = _Part(path or "batch", value, key, is_attribute)
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided:
            part.problem = "nested" if value.is_nested else f"of the layout {value.layout}"
        elif value.dim():
            part.size = value.shape[0]
    elif isinstance(value, PackedSequence):
        part.problem = "packed, so that its rows are interleaved"
    elif isinstance(value, Mapping):
        part.parts = _parse_all(value.items(), path) + _parse_all(_attributes(value), path, are_attributes=True)
    elif isinstance(value, (list, tuple)):
        types = set(map(type, value)) - {type(None)}
        if not types <= _PLAIN:
            part.parts = _parse_all(enumerate(value), path)
        entries = [entry for entry in value if entry is not None] if len(types) == 1 else []
        part.is_of_records = bool(entries) and _are_records(entries)
        are_alike = part.is_of_records or types <= _PLAIN or (bool(entries and path) and not isinstance(entries[0], Mapping))
        if are_alike and not hasattr(value, "_fields") and not hasattr(value, "n_fields"):  # the entries of named tuples are fields
            part.is_list, part.size = True, len(value)
    elif _is_record(value):
        part.parts = _parse_all(_attributes(value), path, are_attributes=True)
    elif "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray):
        part.size = value.shape[0] if value.ndim else None
    elif isinstance(value, Iterator):
        part.problem = "an iterator, which can be read only once"
    elif not isinstance(value, type) and (hasattr(value, "to") or _holds_tensors(value, depth=4)):
        part.problem = "of a class that is not known here, and holds tensors"
    is_leaf = part.problem or (part.size is not None and not part.is_list)
    part.leaves = [part] if is_leaf else [leaf for inner in part.parts for leaf in inner.leaves]
    return part


def _parse_all(entries: Iterable[tuple[Any, Any]], path: str, are_attributes: bool = False) -> list[_Part]:
    parts = []
    for key, value in entries:
        if type(value) not in _PLAIN:
            is_name = isinstance(key, str) and key.isidentifier()
            step = (f".{key}" if path else key) if is_name else f"[{key!r}]"
            parts.append(_parse(value, path + step, key, are_attributes))
    return parts


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _are_records(entries: Sequence[Any]) -> bool:
    if isinstance(entries[0], Mapping):
        return bool(set(entries[0]).intersection(*entries))
    return _is_record(entries[0])


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """The attributes of a dataclass object, and those of a mapping that are not its entries by another name."""
    found = dict(getattr(value, "__dict__", {}))
    if not isinstance(value, Mapping):
        names = (name.name for name in dataclasses.fields(value))  # slots too
        return list({**{name: getattr(value, name) for name in names if hasattr(value, name)}, **found}.items())
    if not isinstance(value, (dict, UserDict)):  # nothing is known of where such a mapping keeps its entries
        return []
    storage = "data" if isinstance(value, UserDict) else None
    return [(name, attribute) for name, attribute in found.items() if name not in value and name != storage]


def _holds_tensors(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor) or depth == 0 or isinstance(value, (str, bytes, range)):
        return isinstance(value, Tensor)
    inside = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, Collection):
        inside += value.values() if isinstance(value, Mapping) else value
    return any(_holds_tensors(entry, depth - 1) for entry in inside if type(entry) not in _PLAIN)


# --- how many rows it has, and what each part is ----------------------------------------------------------------------


def _find_size(root: _Part, known: Mapping[str, str]) -> int:
    """The size that leaves the fewest tensors unsplit."""
    witnesses: dict[int, _Part] = {}
    is_shown = False
    for part in _walk(root, known):
        earlier = known.get(part.path)
        if part.size is not None and earlier not in ("container", "shared"):
            shows_rows = not part.is_list or part.is_of_records or earlier == "rows"
            is_shown |= shows_rows
            if shows_rows or not part.parts:  # a list of texts shows no rows, but casts doubt on sizes other than its own
                witnesses.setdefault(part.size, part)
    if not is_shown:
        problems = [f"{leaf}, {leaf.problem}" for leaf in root.leaves if leaf.problem]
        raise _unsplittable(problems[0] if problems else f"no tensor has rows ({_listed(_walk(root, known))})")
    if len(witnesses) > 1:
        witnesses.pop(0, None)
    if len(witnesses) > 1:
        unsplit = {size: _count_unsplit(root, size, known) for size in witnesses}
        fewest = min(unsplit.values())
        witnesses = {size: part for size, part in witnesses.items() if unsplit[size] == fewest}
    if len(witnesses) > 1:
        sizes = " and ".join(f"{size} in {part.path}" for size, part in witnesses.items())
        raise _unsplittable(f"dimension 0 is {sizes} ({_listed(witnesses.values())})")
    return next(iter(witnesses))


def _walk(part: _Part, known: Mapping[str, str]) -> Iterator[_Part]:
    yield part
    if known.get(part.path) != "rows":
        for inner in part.parts:
            yield from _walk(inner, known)


def _tensor_lists(root: _Part, size: int) -> dict[str, str]:
    """The lists of ``size`` tensors, as rows: three images of three channels each, next to three records."""
    lists = [part for part in _walk(root, {}) if part.is_list and part.size == size]
    return {part.path: "rows" for part in lists if all(isinstance(inner.value, Tensor) for inner in part.parts)}


def _listed(parts: Iterable[_Part]) -> str:
    return ", ".join(str(part) for part in islice(parts, 8))


def _count_unsplit(root: _Part, size: int, known: Mapping[str, str]) -> tuple[int, int]:
    """How many tensors would be shared if there were ``size`` rows; then how many numbers that each belong to one record."""
    tensors = numbers = 0
    for part, kind in _reach(root, size, known):
        earlier = known.get(part.path)
        if kind == "shared" and earlier != "shared":
            tensors += len(part.leaves) or earlier == "rows"
        elif kind == "container" and part.is_of_records:
            numbers += _count_numbers(part)
    return tensors, numbers


def _count_numbers(part: _Part) -> int:
    """The numbers in a list of records: a label of ``{"image": ..., "label": 3}`` shows that a record is one sample."""
    values = [
        v for entry in part.value for v in (entry.values() if isinstance(entry, Mapping) else dict(_attributes(entry)).values())
    ]
    return sum(isinstance(v, Number) or (isinstance(v, Tensor) and not v.is_nested and v.dim() == 0) for v in values)


def _reach(part: _Part, size: int, known: Mapping[str, str]) -> Iterator[tuple[_Part, str]]:
    """All parts outside rows, each with its kind if there are ``size`` rows."""
    kind = _kind(part, size, known.get(part.path))
    yield part, kind
    if kind == "container":
        for inner in part.parts:
            yield from _reach(inner, size, known)


def _kind(part: _Part, size: int, earlier: str | None) -> str:
    if part.is_list:
        if earlier == "rows" or (part.size == size and earlier not in ("container", "shared") and _is_rows(part, size)):
            return "rows" if part.size == size else "shared"
    elif part.size == size and earlier != "shared":
        return "tensor"
    return "container" if part.parts else "shared"


def _is_rows(part: _Part, size: int) -> bool:
    """Whether a list of ``size`` entries has one a sample, rather than parts that have ``size`` rows each."""
    fitting = sum(leaf.size == size for leaf in part.leaves)
    if part.is_of_records:
        return size == 1 or fitting < len(part.leaves) or not fitting or _count_numbers(part) > 0
    if part.parts and all(inner.is_list and inner.size == size for inner in part.parts):
        return False
    return not fitting or 2 * fitting < len(part.leaves)


# --- what a micro-batch takes of each part ----------------------------------------------------------------------------


def _compile(part: _Part) -> Take | None:
    """What a micro-batch takes of one part; None if it takes the part as it is."""
    value = part.value
    if part.problem:
        raise _unsplittable(f"{part}, {part.problem}")
    if part.kind == "rows":
        make = _maker_of(value)
        return lambda cut: make(cut.entries(value))
    if part.kind == "tensor":
        return lambda cut: cut.tensor(value)
    if part.kind == "shared":
        return (lambda cut: cut.shared(value)) if isinstance(value, Tensor) and value.dim() else None
    takes = [(inner, take) for inner in part.parts if (take := _compile(inner))]
    try:
        return _rebuild(value, takes) if takes else None
    except Exception as error:
        raise _unsplittable(f"{part}, and cannot be made anew ({error})") from error


def _rebuild(value: Any, takes: list[tuple[_Part, Take]]) -> Take:
    """Make a container anew, and put what is taken of its parts into the new one."""
    items = [(part.key, take) for part, take in takes if not part.is_attribute]
    attributes = [(part.key, take) for part, take in takes if part.is_attribute]
    if isinstance(value, (list, tuple)):
        make = _maker_of(value)

        def rebuilt(cut: _Cut) -> Any:
            entries = list(value)
            for index, take in items:
                entries[index] = take(cut)
            return make(entries)

        make(value)  # now, rather than in the middle of a window
        return rebuilt
    if isinstance(value, Mapping) and not isinstance(value, (dict, UserDict)):
        new = type(value)
        new(dict(value))  # type: ignore[call-arg]
        return lambda cut: new({**value, **{key: take(cut) for key, take in items}})  # type: ignore[call-arg]
    second_names = [name for name in getattr(value, "__dict__", {}) if items and name in value]

    def copied(cut: _Cut) -> Any:
        made = copy.copy(value)
        for key, take in items:
            made[key] = take(cut)
        for name in second_names:  # `batch.labels` for `batch["labels"]`
            made.__dict__[name] = made[name]
        for name, take in attributes:
            object.__setattr__(made, name, take(cut))  # also where the class is frozen
        return made

    copy.copy(value)
    return copied


def _maker_of(value: Sequence[Any]) -> Callable[[Any], Any]:
    if isinstance(value, tuple):
        return getattr(value, "_make", type(value))
    if type(value) is list:
        return list

    def copied(entries: Any) -> Any:
        made: Any = copy.copy(value)
        made[:] = entries
        return made

    return copied
