"""A batch as rows: its parts, its number of rows, and which parts have one entry a row.

The number of rows is the loader's batch size, if a part has as many entries; or else the one size that most tensors have in
dimension 0. A tensor or a list of as many entries is rows. Everything else is shared by all rows, and must be a table: not a part
that had rows before, and not unexplained whole numbers, since a flat batch has more tokens, labels or indices than samples.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_accum.errors import UnsplittableBatchError

IGNORE_INDEX = -100  # the label of ignored positions, as in :func:`torch.nn.functional.cross_entropy`
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, range, slice})


@dataclass(slots=True, eq=False)
class Part:
    """A tensor, list or container inside a batch. Strings, numbers and the like are not parts: all micro-batches share them."""

    path: str
    value: Any
    key: Any = None  # its key, index or attribute name in the enclosing part
    size: int | None = None  # the size of dimension 0 of a tensor, or the length of a list
    problem: str = ""  # why it cannot be split
    parts: list[Part] = field(default_factory=list)
    is_tensor: bool = field(init=False)
    is_cut: bool = False  # a micro-batch gets its own slice or copy of it
    kind: str = "shared"
    """``rows``: a tensor or a list with one entry for each; a ``container`` of other parts; or ``shared`` by all rows."""

    def __post_init__(self) -> None:
        self.is_tensor = isinstance(self.value, Tensor)

    @property
    def is_list(self) -> bool:
        """Whether it may have one entry a row."""
        return self.size is not None and not self.is_tensor

    @property
    def has_tensors(self) -> bool:
        """Whether it is a tensor, or holds one."""
        return any(isinstance(part.value, (Tensor, PackedSequence)) for part in self.walk())

    def walk(self) -> Iterator[Part]:
        """This part and all parts inside it."""
        yield self
        for inner in self.parts:
            yield from inner.walk()

    def __str__(self) -> str:
        name = f"{self.path} is a {type(self.value).__name__}"
        if self.size is None or self.problem:
            return name
        return f"{name} of shape {tuple(self.value.shape)}" if self.is_tensor else f"{name} of {self.size} entries"


class Layout:
    """A batch of ``size`` rows: which parts have one entry a row, and which are shared.

    ``known`` has the kinds of parts in earlier batches, by path, which stay: a table of 5 entries is still shared in a last batch
    of 5 rows. ``samples`` are the batch sizes of the loader, empty if unknown; if known, rows must be samples.

    Attributes:
        parts: the batch and all parts inside it that are not inside a row, with their kinds.
        kinds: of the parts of all batches so far, by path.
        tensors: with rows, by path: ``input_ids``, ``[0]``, ``inputs.mask``; ``batch`` if the batch itself is one.
        shared_tensors: tensors whose dimension 0 is not the rows.
        columns: the sizes of the dimensions of rows.
        unexplained: tensors without rows that no earlier batch had, and whose dimensions are not columns.
    """

    def __init__(self, batch: Any, known: Mapping[str, str] | None = None, samples: Collection[int] | None = None) -> None:
        known, sizes_of_loader = known or {}, samples or ()
        root = parse(batch)
        sized = [part for part in root.walk() if part.size and known.get(part.path) != "shared"]
        of_known = {part.size for part in sized if known.get(part.path) == "rows"}
        of_loader = {part.size for part in sized if part.size in sizes_of_loader and part is not root}
        earlier, may_be = known.get(root.path), not of_loader and (root.size in sizes_of_loader or may_be_samples(batch))
        if root.is_list and (earlier == "rows" or (earlier is None and may_be)):  # samples that were not collated
            if earlier is None and root.size not in sizes_of_loader and _may_be_of_several_loaders(root):
                raise _unsplittable(root, f"either its {root.size} entries or their contents could be the samples")
            root.kind, self.size, self.parts = "rows", root.size or 0, [root]
        else:
            self.size = next((sizes.pop() for sizes in (of_known, of_loader) if len(sizes) == 1), None) or _most_frequent(root)
            self.parts = [*_set_kinds(root, root, self.size, known)]
        self.kinds = {**known, **{part.path: part.kind for part in self.parts}}
        tensors = [part for part in self.parts if part.is_tensor and part.size is not None]
        self.tensors: dict[str, Tensor] = {part.path: part.value for part in tensors if part.kind == "rows"}
        self.shared_tensors: dict[str, Tensor] = {part.path: part.value for part in tensors if part.kind != "rows"}
        self.columns = {size for tensor in self.tensors.values() for size in tensor.shape[1:]}
        new = [part for part in self.parts if part.path not in known]
        for part in new:
            if part.kind == "container":
                try:
                    made_of(part, lambda inner: inner.value)
                except Exception as error:  # fail now, not in the middle of a window
                    raise UnsplittableBatchError.because(f"{part}, and cannot be constructed again ({error})") from error
        others = [part for part in new if part.path in self.shared_tensors and (part.size or 0) > 1]
        self.unexplained = [part for part in others if not self.columns.issuperset(part.value.shape)]
        if samples is not None and (found := self._objection(known, samples)) is not None:
            raise UnsplittableBatchError.because(found)

    def take(self, rows: slice | Sequence[int], columns: Mapping[int, slice] | None = None) -> Any:
        """A batch of the same types with some of the rows. Tensors are views for a slice, copies for row numbers.

        ``columns={L: part}`` keeps only ``part`` of dimensions of size ``L``, to trim padding. This applies to the dimensions after
        0 of tensors with rows, and to all dimensions of shared tensors. If a floating-point tensor with rows has size ``L`` in
        dimension 1, only that dimension is trimmed; the others are features.
        """
        columns, indices = columns or {}, dict[torch.device, Tensor]()

        def trimmed(value: Tensor, first: int) -> Tensor:
            sizes = value.shape[first:]
            if columns.keys().isdisjoint(sizes):
                return value
            sizes = sizes[:1] if first and value.is_floating_point() and sizes[0] in columns else sizes
            return value[(*[slice(None)] * first, *(columns.get(size, slice(None)) for size in sizes))]

        def taken(part: Part) -> Any:  # new containers, so that a micro-batch may change them
            value = part.value
            if part.kind != "rows":
                return trimmed(value, 0) if part.is_tensor else made_of(part, taken)
            if not part.is_tensor:
                entries = entries_of(value)
                return with_entries(value, entries[rows] if isinstance(rows, slice) else [entries[row] for row in rows])
            value = trimmed(value, 1) if columns else value  # first, so that there is less to copy
            if isinstance(rows, slice):
                return value[rows]
            if value.device not in indices:
                # a non-blocking copy is safe to a device, but the host could read it too early
                is_copied = value.device.type != "cpu"
                indices[value.device] = torch.tensor(rows, dtype=torch.long).to(value.device, non_blocking=is_copied)
            return value.index_select(0, indices[value.device])

        return taken(self.parts[0])

    # --- are its rows samples? ----------------------------------------------------------------------------------------

    def _objection(self, known: Mapping[str, str], samples: Collection[int]) -> str | None:
        if samples and self.size > max(samples):  # fewer is fine: a collate_fn may leave samples out
            hint = " (DataLoader(batch_size=None) says that the dataset makes whole batches)" if max(samples) == 1 else ""
            says = f"the loader puts {' or '.join(map(str, sorted(samples)))} into a batch{hint}"
            tensors = (str(part) for part in self.parts if part.path in self.tensors)
            return f"it would be {self.size} samples, but {says}: {next(tensors, self.parts[0])}"
        if not known and (found := self._packing(samples)) is not None:
            return found
        lost = [part for part in self.parts if part.kind != "rows" and part.size is not None and known.get(part.path) == "rows"]
        lost = [part for part in lost if part.has_tensors and not (part.is_tensor and part.size in (1, *self.columns))]
        lost += [part for part in self.unexplained if is_whole(part.value) and part.size not in self.columns and not samples]
        return f"{lost[0]}, and has no entry for each of the {self.size} rows" if lost else None

    def _packing(self, samples: Collection[int]) -> str | None:
        """The tensor that marks samples packed end to end: offsets, lengths, or the sample of each entry. Reads values."""
        for part in self.parts:
            others = self.shared_tensors if part.path in self.tensors else self.tensors
            ends = {tensor.shape[1] if tensor.shape[0] == 1 and tensor.dim() > 1 else tensor.shape[0] for tensor in others.values()}
            numbers = part.value
            is_count = ends and part.is_tensor and numbers.dim() == 1 and is_whole(numbers) and numbers.dtype != torch.bool
            if not is_count or len(numbers) < 2:
                continue
            steps, total, last = numbers.long().diff(), int(numbers.sum()), int(numbers[-1])
            is_sorted = int(numbers[0]) == 0 and bool((steps >= 0).all())
            are_offsets = is_sorted and last in ends and last != len(numbers)
            are_lengths = int(numbers.min()) > 0 and total in ends and len(numbers) < total
            is_index = is_sorted and bool((steps <= 1).all()) and last + 1 in ends and 0 < last + 1 < len(numbers)
            if are_offsets or are_lengths or (is_index and self.size not in samples):
                return f"{part}, which marks samples packed end to end"
        return None


def made_of(part: Part, taken: Callable[[Part], Any]) -> Any:
    """A copy of a container for a micro-batch, with each part replaced by ``taken(part)``; the container if nothing is cut."""
    if not part.is_cut:
        return part.value
    value, inside = part.value, {inner.key: taken(inner) for inner in part.parts if inner.is_cut}
    if isinstance(value, (list, tuple)):
        return with_entries(value, [inside.get(index, entry) for index, entry in enumerate(value)])
    made: Any = copy.copy(value)
    for key, entry in inside.items():
        if not isinstance(value, Mapping):
            object.__setattr__(made, key, entry)  # works for frozen classes, too
            continue
        made[key] = entry
        if key in getattr(made, "__dict__", {}):  # `batch.labels` for `batch["labels"]`
            made.__dict__[key] = made[key]
    return made


def parse(value: Any, path: str = "", key: Any = None) -> Part:
    """A value as parts. Parts with a problem are not parsed further."""
    size, problem, entries = None, "", list[tuple[Any, Any]]()
    if isinstance(value, Tensor):
        size = value.size(0) if value.dim() else None
        if value.is_nested or value.layout is not torch.strided:
            problem = "nested" if value.is_nested else f"of the layout {value.layout}"
    elif isinstance(value, PackedSequence):
        size = int(value.batch_sizes[0])
    elif isinstance(value, (dict, UserDict)):
        entries = [*value.items()]
    elif isinstance(value, (list, tuple)):
        entries = [*enumerate(value)]
        kinds = {(inner.dtype, inner.dim()) if isinstance(inner, Tensor) else None for inner in value}
        is_named = hasattr(value, "_fields") or hasattr(value, "n_fields")  # a named tuple, such as torch.max returns
        if not is_named and (not path or len(kinds) < 2 or None in kinds):  # and not inputs and labels
            size = len(value)
    elif is_record(value):
        entries = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    elif not isinstance(value, type) and (
        isinstance(value, Iterator) or hasattr(value, "to") or bool(getattr(value, "shape", ())) or holds_tensors(value, depth=4)
    ):
        problem = "of a class that is not known here"
    parts = [parse(inner, path + _step(at, path), at) for at, inner in entries if type(inner) not in _PLAIN]
    is_cut = size is not None or isinstance(value, (Tensor, dict)) or any(inner.is_cut for inner in parts)
    return Part(path or "batch", value, key, size, problem, parts, is_cut)


def _step(key: Any, path: str) -> str:
    """The end of the path of an entry."""
    is_name = isinstance(key, str) and key.isidentifier()
    return f"[{key!r}]" if not is_name else f".{key}" if path else str(key)


def holds_tensors(value: Any, depth: int) -> bool:
    """Whether ``value`` is a tensor, or an object that holds one at most ``depth`` objects deep."""
    if isinstance(value, Tensor) or depth == 0 or isinstance(value, (str, bytes, range, type)):
        return isinstance(value, Tensor)
    slots = [vars(of).get("__slots__", ()) for of in type(value).__mro__]
    names = [name for found in slots for name in ((found,) if isinstance(found, str) else found)]
    inside = [*(getattr(value, name, None) for name in names), *getattr(value, "__dict__", {}).values()]
    if isinstance(value, Collection):
        inside.extend(value.values() if isinstance(value, Mapping) else value)
    return any(holds_tensors(entry, depth - 1) for entry in inside if type(entry) not in _PLAIN)


def entries_of(value: Any) -> Sequence[Any]:
    """The entries of a list or a packed sequence."""
    return unpack_sequence(value) if isinstance(value, PackedSequence) else value


def with_entries(value: Any, entries: Sequence[Any]) -> Any:
    """A list, tuple or packed sequence of the type of another."""
    if isinstance(value, PackedSequence):
        return pack_sequence([*entries], enforce_sorted=False)
    if isinstance(value, tuple):
        return getattr(value, "_make", type(value))(entries)
    made: Any = copy.copy(value)
    made[:] = entries
    return made


# --- how many rows it has, and what each part is ----------------------------------------------------------------------


def _most_frequent(root: Part) -> int:
    votes = Counter(size for part in root.parts or [root] for size in _votes(part))
    if len(votes) > 1:
        votes.pop(0, None)
    if not votes:
        problems = [f"{part}, {part.problem}" for part in root.walk() if part.problem]
        raise _unsplittable(root, problems[0] if problems else "no tensor has rows")
    most = max(votes.values())
    sizes = sorted(size for size, number in votes.items() if number == most)
    if len(sizes) > 1:
        raise _unsplittable(root, f"{' or '.join(map(str, sizes))} could be its number of rows")
    return sizes[0]


def _votes(part: Part) -> list[int]:
    """The sizes that parts propose. A list of tensors proposes its length, and the size of its tensors if all have one size."""
    if part.is_tensor or isinstance(part.value, PackedSequence):
        found = [part.size]
    elif part.is_list:
        sizes = {inner.size for inner in part.walk() if inner.is_tensor}
        found = [part.size] * bool(sizes) + list(sizes) * (len(sizes) == 1)
    else:
        found = [size for inner in part.parts for size in _votes(inner)]
    return [size for size in found if size is not None]


def _set_kinds(part: Part, root: Part, size: int, known: Mapping[str, str]) -> Iterator[Part]:
    """Set the kind of each part for ``size`` rows. Yields the parts outside rows."""
    earlier = known.get(part.path)
    if part.problem:
        raise _unsplittable(root, f"{part}, {part.problem}")
    is_whole = part.is_tensor or isinstance(part.value, PackedSequence)
    if part.size == size and earlier != "shared" and (is_whole or (part is not root and earlier != "container")):
        part.kind = "rows"
    elif isinstance(part.value, PackedSequence):
        raise _unsplittable(root, f"{part}, and has no entry for each of the {size} rows")
    else:
        part.kind = "container" if part.parts else "shared"
    yield part
    if part.kind == "container":
        for inner in part.parts:
            yield from _set_kinds(inner, root, size, known)


def _unsplittable(root: Part, found: str) -> UnsplittableBatchError:
    """The error, with the entries of the batch."""
    entries = [str(part) for part in root.walk() if part.size is not None or part.problem or part is root]
    return UnsplittableBatchError.because(f"{found} ({', '.join(islice(entries, 8))}{', ...' * (len(entries) > 8)})")


def may_be_samples(batch: Any) -> bool:
    """Whether a batch may be samples that were not collated, ``[(image, 3), (image, 5)]``, and not batches of several loaders."""
    return (
        isinstance(batch, list)
        and bool(batch)
        and all((isinstance(e, (dict, tuple)) and not hasattr(e, "_fields")) or is_record(e) for e in batch)
    )


def _may_be_of_several_loaders(root: Part) -> bool:
    """Whether all tensors have one size, and no entry looks like a sample with a label, ``(image, 3)``."""
    sizes = {part.size for part in root.walk() if part.is_tensor}
    values = (v for e in root.value for v in (e.values() if isinstance(e, dict) else e if isinstance(e, tuple) else ()))
    return len(sizes) == 1 and not any(isinstance(value, (int, float)) for value in values)


def is_record(value: Any) -> bool:
    """An instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_whole(tensor: Tensor) -> bool:
    """Whether it holds whole numbers or bools."""
    return not tensor.is_floating_point() and not tensor.is_complex()
