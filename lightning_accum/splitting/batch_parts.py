"""What a batch is made of, and how many rows it has.

The batch becomes a tree of parts. Every size that could be the number of rows is tried: the one that leaves the fewest tensors
unsplit is taken, and two that do equally well are an error, never a guess, unless the loader says which of them it is.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import UserDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_accum.errors import UnsplittableBatchError

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, range, slice})


@dataclass(slots=True, eq=False)
class BatchNode:
    """A part of a batch. Strings, numbers and the like are none: all micro-batches share them.

    Attributes:
        key: where it is in the part around it: a key, an index, or the name of an attribute.
        size: of dimension 0, or how many entries a list has that may be rows, for its entries are alike.
        is_of_records: a list of mappings that have keys in common, or of dataclass objects; or the batch is a list of tuples with
            a tensor and a number each: ``[(image, 3), (image, 5)]``.
        problem: why it cannot be split. With a size, only where that is the number of rows.
        kind: what it is if the batch has the rows that were found: a tensor, rows, a container, or shared.
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
    parts: list[BatchNode] = field(default_factory=list)
    leaves: list[BatchNode] = field(default_factory=list)

    def __str__(self) -> str:
        name = f"{self.path} is a {type(self.value).__name__}"
        if self.is_list:
            return f"{name} of {self.size} entries"
        has_shape = self.size is not None or (isinstance(self.value, Tensor) and not self.value.is_nested)
        return f"{name} of shape {tuple(self.value.shape)}" if has_shape else name


def read_parts(batch: Any, known: Mapping[str, str], samples: Collection[int] = ()) -> tuple[BatchNode, int, list[BatchNode]]:
    """Find out what a batch is made of.

    Args:
        batch: tensors and arrays in mappings, lists, tuples and dataclasses, nested in any way.
        known: what parts of earlier batches were, by path. It holds where this batch could be read in two ways.
        samples: how many of them the loader puts into a batch, where it says so. It decides between two readings.

    Returns:
        The batch as a part, the number of rows, and the parts outside rows, all with their kind.

    Raises:
        UnsplittableBatchError: no size, or more than one, fits.
    """
    root = _parse(batch)
    if isinstance(batch, (list, tuple)) and (known.get(root.path) == "rows" or _is_uncollated(root, samples)):
        root.is_list = root.is_of_records = True
        root.size = len(batch)
    size = _find_size(root, known, samples)
    reached = list(_reach(root, size, known))
    if any(part.is_of_records and kind == "rows" for part, kind in reached):  # then other lists are one a sample too
        reached = list(_reach(root, size, {**_tensor_lists(root, size), **known}))
    for part, kind in reached:
        part.kind = kind
        is_doubted = part.path not in known and _may_be_samples(part.value, least=3)  # two are an input and its target as a rule
        if kind == "container" and is_doubted and (size not in samples or len(part.value) == size):
            found = f"{part.path} is a {type(part.value).__name__} of {len(part.value)} tensors, and their dimension 0 is {size}"
            raise UnsplittableBatchError.because(f"{found}: either could be the samples")
        if part is root and kind == "rows" and size not in samples and _may_be_batches(part):
            found = f"{part} with a number each, and its tensors all have {part.leaves[0].size} rows: either could be the samples"
            raise UnsplittableBatchError.because(found)
        if kind == "container" and part.is_of_records and part.size == size > 1 and part.path not in known:
            raise UnsplittableBatchError.because(f"{part}, and its tensors have {size} rows too: either could be the samples")
    return root, size, [part for part, _ in reached]


def _parse(value: Any, path: str = "", key: Any = None, is_attribute: bool = False) -> BatchNode:
    part = BatchNode(path or "batch", value, key, is_attribute)
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
        part.is_of_records = bool(entries) and (_are_records(entries) or (not path and _are_labelled(entries)))
        are_alike = part.is_of_records or types <= _PLAIN or (bool(entries and path) and not isinstance(entries[0], Mapping))
        if are_alike and not _has_fields(value):
            part.is_list, part.size = True, len(value)
    elif _is_record(value):
        part.parts = _parse_all(_attributes(value), path, are_attributes=True)
    elif _is_numpy(value):
        part.size = value.shape[0] if value.ndim else None
    elif isinstance(value, Iterator):
        part.problem = "an iterator, which can be read only once"
    elif is_array_like(value):
        part.size = len(value) if value.shape else None
        if len(value.shape) > 1 and not hasattr(value, "iloc"):
            part.problem = "an array of a class that is not known here"
    elif not isinstance(value, type) and (hasattr(value, "to") or holds_tensors(value, depth=4)):
        part.problem = "of a class that is not known here, and holds tensors"
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview)):
        part.is_list, part.size = True, len(value)
    is_leaf = part.problem or (part.size is not None and not part.is_list)
    part.leaves = [part] if is_leaf else [leaf for inner in part.parts for leaf in inner.leaves]
    return part


def _parse_all(entries: Iterable[tuple[Any, Any]], path: str, are_attributes: bool = False) -> list[BatchNode]:
    parts = []
    for key, value in entries:
        if type(value) not in _PLAIN:
            is_name = isinstance(key, str) and key.isidentifier()
            step = (f".{key}" if path else key) if is_name else f"[{key!r}]"
            parts.append(_parse(value, path + step, key, are_attributes))
    return parts


def _has_fields(value: Any) -> bool:
    """Whether the entries of a tuple have names, as in a named tuple or what ``torch.max`` returns: they are no rows."""
    return hasattr(value, "_fields") or hasattr(value, "n_fields")


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _are_records(entries: Sequence[Any]) -> bool:
    if isinstance(entries[0], Mapping):
        return bool(set(entries[0]).intersection(*entries))
    return _is_record(entries[0])


def _are_labelled(entries: Sequence[Any]) -> bool:
    """Whether all are tuples of tensors and a number: what a loader gives that does not collate its samples."""
    return all(
        isinstance(entry, (tuple, list)) and any(map(_is_number, entry)) and any(getattr(v, "ndim", 0) > 0 for v in entry)
        for entry in entries
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) or (isinstance(value, Tensor) and not value.is_nested and value.dim() == 0)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """The attributes of a dataclass object, and those of a mapping that are not its entries by another name."""
    if not isinstance(value, Mapping):
        return list(attributes_of(value).items())
    if not isinstance(value, (dict, UserDict)):  # nothing is known of where such a mapping keeps its entries
        return []
    found, storage = getattr(value, "__dict__", {}), "data" if isinstance(value, UserDict) else None
    return [(name, attribute) for name, attribute in found.items() if name not in value and name != storage]


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object holds by name, in slots too."""
    slots = (name for of in reversed(type(value).__mro__) for name in _as_tuple(vars(of).get("__slots__", ())))
    of_slots = {name: getattr(value, name) for name in slots if name != "__dict__" and hasattr(value, name)}
    return {**of_slots, **getattr(value, "__dict__", {})}


def _as_tuple(names: str | Iterable[str]) -> Iterable[str]:
    return (names,) if isinstance(names, str) else names


def is_array_like(value: Any) -> bool:
    """A pandas object, an array of another library: neither a tensor nor NumPy's."""
    if isinstance(value, (type, Tensor)) or _is_numpy(value):
        return False
    return hasattr(value, "__array__") and isinstance(getattr(value, "shape", None), tuple)


def _is_numpy(value: Any) -> bool:
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray)


def holds_tensors(value: Any, depth: int) -> bool:
    """Whether ``value`` is a tensor, or an object with one in it, so many objects deep."""
    if isinstance(value, Tensor) or depth == 0 or isinstance(value, (str, bytes, range)):
        return isinstance(value, Tensor)
    inside = list(attributes_of(value).values())
    if isinstance(value, Collection):
        inside.extend(value.values() if isinstance(value, Mapping) else value)
    return any(holds_tensors(entry, depth - 1) for entry in inside if type(entry) not in _PLAIN)


# --- how many rows it has, and what each part is ----------------------------------------------------------------------


def _find_size(root: BatchNode, known: Mapping[str, str], samples: Collection[int]) -> int:
    """The size that leaves the fewest tensors unsplit; of several that leave none, the one that the loader says."""
    witnesses: dict[int, BatchNode] = {}
    is_shown = False
    for part in _walk(root, known):
        earlier = known.get(part.path)
        if part.size is not None and earlier not in ("container", "shared"):
            shows_rows = not part.is_list or part.is_of_records or earlier == "rows" or part.size in samples
            is_shown |= shows_rows
            if shows_rows or not part.parts:  # a list of texts shows no rows, but casts doubt on sizes other than its own
                witnesses.setdefault(part.size, part)
    if not is_shown:
        problems = [f"{leaf}, {leaf.problem}" for leaf in root.leaves if leaf.problem]
        raise UnsplittableBatchError.because(problems[0] if problems else f"no tensor has rows ({_listed(_walk(root, known))})")
    if len(witnesses) > 1:
        witnesses.pop(0, None)
    if len(witnesses) > 1:
        unsplit = {size: _count_unsplit(root, size, known) for size in witnesses}
        fewest = min(unsplit.values())
        witnesses = {size: part for size, part in witnesses.items() if unsplit[size] == fewest}
        agreed = [size for size in witnesses if size in samples and not unsplit[size][0]]
        witnesses = {size: witnesses[size] for size in agreed} or witnesses
    if len(witnesses) > 1:
        sizes = " and ".join(f"{size} in {part.path}" for size, part in witnesses.items())
        raise UnsplittableBatchError.because(f"dimension 0 is {sizes} ({_listed(witnesses.values())})")
    return next(iter(witnesses))


def _walk(part: BatchNode, known: Mapping[str, str]) -> Iterator[BatchNode]:
    yield part
    if known.get(part.path) != "rows":
        for inner in part.parts:
            yield from _walk(inner, known)


def _is_uncollated(root: BatchNode, samples: Collection[int]) -> bool:
    """Whether a list has as many entries as the loader puts samples into a batch, and no tensor in it has as many rows."""
    if root.is_list or _has_fields(root.value) or len(root.value) not in samples or not root.leaves:
        return False
    return len(set(map(type, root.value))) == 1 and all(leaf.size not in samples for leaf in root.leaves)


def _may_be_samples(value: Any, least: int) -> bool:
    """Whether a list of tensors of equal dimension 0 may be of samples nevertheless, and so this no number of rows.

    They are at least so many and look like images of one, three or four channels; or they are more of one shape than a batch has
    tensors as a rule.
    """
    if not isinstance(value, (list, tuple)) or len(value) < least or _has_fields(value):
        return False
    first = value[0]
    if not all(isinstance(entry, Tensor) and not entry.is_nested and entry.dtype == first.dtype for entry in value):
        return False
    if len(value) > 4 and first.dim() and all(entry.shape == first.shape for entry in value):
        return True
    return first.dim() == 3 and all(entry.dim() == 3 and entry.shape[0] == first.shape[0] in (1, 3, 4) for entry in value)


def may_be_list_of_samples(value: Sequence[Any]) -> bool:
    """Whether a list may have one entry a sample, by its entries alone: records, labelled tuples, tensors that are no one batch."""
    if _has_fields(value):
        return False
    entries = [entry for entry in value if entry is not None]
    if len({type(entry) for entry in entries}) != 1 or type(entries[0]) in _PLAIN:
        return False
    if not isinstance(entries[0], Tensor):
        return _are_records(entries) or _are_labelled(entries)
    dim = entries[0].dim()
    if not dim or any(entry.dim() != dim for entry in entries):
        return False
    is_even = len({entry.size(0) for entry in entries}) == 1
    return _may_be_samples(entries, least=2) if is_even else len({entry.dtype for entry in entries}) == 1


def first_tensor_or_list(batch: Any) -> Tensor | Sequence[Any] | None:
    """The first tensor with a dimension 0, or the first list that may have one entry a sample, whichever comes first."""
    if isinstance(batch, Tensor):
        return batch if batch.dim() else None
    children: Iterable[Any]
    if type(batch) in _PLAIN or isinstance(batch, Iterator) or is_array_like(batch):  # a step may draw its batches by itself
        return None
    if isinstance(batch, Mapping) or callable(getattr(batch, "values", None)):
        children = batch.values()
    elif isinstance(batch, (list, tuple)):
        if may_be_list_of_samples(batch):
            return batch
        children = batch
        if all(isinstance(child, (list, tuple)) for child in batch) and len(set(map(len, batch))) == 1:
            # lists of one length beside each other, one of them of samples: the only image beside its record
            children = sorted(batch, key=lambda child: not may_be_list_of_samples(child))
    else:
        children = attributes_of(batch).values()
    return next((found for child in children if (found := first_tensor_or_list(child)) is not None), None)


def _may_be_batches(root: BatchNode) -> bool:
    """Whether a list of tuples may be of two loaders, ``[(x, y, 0.5), (x, y, 0.5)]``, rather than of samples."""
    are_tuples = all(isinstance(entry, (tuple, list)) for entry in root.value)
    return are_tuples and len(root.leaves) > len(root.parts) and len({leaf.size for leaf in root.leaves}) == 1


def _tensor_lists(root: BatchNode, size: int) -> dict[str, str]:
    """The lists of ``size`` tensors, as rows: three images of three channels each, next to three records."""
    lists = [part for part in _walk(root, {}) if part.is_list and part.size == size]
    return {part.path: "rows" for part in lists if all(isinstance(inner.value, Tensor) for inner in part.parts)}


def _listed(parts: Iterable[BatchNode]) -> str:
    return ", ".join(str(part) for part in islice(parts, 8))


def _count_unsplit(root: BatchNode, size: int, known: Mapping[str, str]) -> tuple[int, int]:
    """How many tensors would be shared if there were ``size`` rows; then how many numbers that each belong to one record."""
    tensors = numbers = 0
    for part, kind in _reach(root, size, known):
        earlier = known.get(part.path)
        if kind == "shared" and earlier != "shared":
            tensors += len(part.leaves) or earlier == "rows"
        elif kind == "container" and part.is_of_records:
            numbers += _count_numbers(part)
    return tensors, numbers


def _count_numbers(part: BatchNode) -> int:
    """The numbers in a list of records: a label of ``{"image": ..., "label": 3}`` shows that a record is one sample."""
    return sum(_is_number(value) for entry in part.value if entry is not None for value in _values(entry))


def _values(entry: Any) -> Iterable[Any]:
    if isinstance(entry, (tuple, list)):
        return entry
    return entry.values() if isinstance(entry, Mapping) else dict(_attributes(entry)).values()


def _reach(part: BatchNode, size: int, known: Mapping[str, str]) -> Iterator[tuple[BatchNode, str]]:
    """All parts outside rows, each with its kind if there are ``size`` rows."""
    kind = _kind(part, size, known.get(part.path))
    yield part, kind
    if kind == "container":
        for inner in part.parts:
            yield from _reach(inner, size, known)


def _kind(part: BatchNode, size: int, earlier: str | None) -> str:
    if part.is_list:
        if earlier == "rows" or (part.size == size and earlier not in ("container", "shared") and _is_rows(part, size)):
            return "rows" if part.size == size else "shared"
    elif part.size == size and earlier != "shared":
        return "tensor"
    return "container" if part.parts else "shared"


def _is_rows(part: BatchNode, size: int) -> bool:
    """Whether a list of ``size`` entries has one a sample, rather than parts that have ``size`` rows each."""
    fitting = sum(leaf.size == size for leaf in part.leaves)
    if part.is_of_records:
        return size == 1 or fitting < len(part.leaves) or not fitting or _count_numbers(part) > 0
    if part.parts and all(inner.is_list and inner.size == size for inner in part.parts):
        return False
    return not fitting or 2 * fitting < len(part.leaves)
