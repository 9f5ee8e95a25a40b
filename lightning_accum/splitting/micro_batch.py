"""Micro-batches: how a loader's batch is made of rows that are samples, and how some of its rows are taken."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lightning_accum.errors import ArgumentError, UnsplittableBatchError
from lightning_accum.splitting.lengths import is_whole
from lightning_accum.splitting.rows import Part, entries_of, read_parts, with_entries


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
    """How a batch is made of ``size`` rows: which parts have one entry a sample, and which are shared.

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
    """Whose dimension 0 is the rows, by path: ``input_ids``, ``[0]``, ``inputs.mask``; ``batch`` if the batch itself is one."""
    shared_tensors: dict[str, Tensor] = field(repr=False)
    """With a dimension 0 that is not the rows."""
    kinds: dict[str, str]
    """What each part is, by path, see :class:`Part`."""
    root: Part = field(repr=False)
    """The batch, as a part."""

    @classmethod
    def read(cls, batch: Any, known: Mapping[str, str] | None = None, samples: Collection[int] = ()) -> Layout:
        """Find out how ``batch`` is made of rows: tensors in mappings, lists, tuples and dataclasses, nested in any way.

        ``known``, the ``kinds`` of an earlier batch, hold where this one could be read in two ways: a table of 5 entries stays
        shared in a last batch of 5 rows.

        Raises:
            UnsplittableBatchError: no size, or more than one, fits; or there is a part that cannot be split.
        """
        known = known or {}
        root, size, parts = read_parts(batch, known, samples)
        tensors, shared = (
            {part.path: part.value for part in parts if part.is_tensor and part.size is not None and part.kind == kind}
            for kind in ("tensor", "shared")
        )
        for part in parts:
            if part.kind == "container" and part.is_cut:
                try:
                    rebuilt(part, lambda inner: inner.value)
                except Exception as error:  # now, rather than in the middle of a window
                    raise UnsplittableBatchError.because(f"{part}, and cannot be made anew ({error})") from error
        return cls(size, tensors, shared, {**known, **{part.path: part.kind for part in parts}}, root)

    @property
    def columns(self) -> set[int]:
        """The sizes of the dimensions of its rows."""
        return {size for tensor in self.tensors.values() for size in tensor.shape[1:]}

    def take(self, rows: slice | Sequence[int], columns: Mapping[int, slice] | None = None) -> Any:
        """A batch of the same types with some of the rows: of a slice tensors are views, of row numbers they are copies.

        ``columns={L: part}`` keeps only ``part`` of dimensions of size ``L``, to trim padding. In tensors with rows these are the
        dimensions after 0; where a floating tensor has size ``L`` in dimension 1 the others stay, for they are features. In shared
        tensors they are all dimensions.
        """
        columns, indices = columns or {}, dict[torch.device, Tensor]()

        def of_tensor(value: Tensor) -> Tensor:
            if columns:  # first, so that there is less to copy
                sizes = value.shape[1:]
                sizes = sizes[:1] if value.is_floating_point() and sizes and sizes[0] in columns else sizes
                value = value[(slice(None), *(columns.get(size, slice(None)) for size in sizes))]
            if isinstance(rows, slice):
                return value[rows]
            if value.device not in indices:
                # nobody waits for the copy: right towards a device, but the host could read it too early
                is_copied = value.device.type != "cpu"
                indices[value.device] = torch.tensor(rows, dtype=torch.long).to(value.device, non_blocking=is_copied)
            return value.index_select(0, indices[value.device])

        def taken(part: Part) -> Any:  # containers of its own, so that a micro-batch does to them what it does to them
            value = part.value
            if part.kind == "rows":
                entries = entries_of(value)
                return with_entries(value, entries[rows] if isinstance(rows, slice) else [entries[row] for row in rows])
            if part.kind == "tensor":
                return of_tensor(value)
            if not part.is_tensor:
                return rebuilt(part, taken) if part.is_cut else value
            is_as_it_is = columns.keys().isdisjoint(value.shape)
            return value if is_as_it_is else value[tuple(columns.get(size, slice(None)) for size in value.shape)]

        return taken(self.root)


def rebuilt(part: Part, taken: Callable[[Part], Any]) -> Any:
    """A container made anew, with what is taken of the parts inside of it in their places."""
    value, inside = part.value, {inner.key: taken(inner) for inner in part.parts if inner.is_cut}
    if isinstance(value, (list, tuple)):
        return with_entries(value, [inside.get(index, entry) for index, entry in enumerate(value)])
    made: Any = copy.copy(value)
    for key, entry in inside.items():
        if not isinstance(value, Mapping):
            object.__setattr__(made, key, entry)  # also where the class is frozen
            continue
        made[key] = entry
        if key in getattr(made, "__dict__", {}):  # `batch.labels` for `batch["labels"]`
            made.__dict__[key] = made[key]
    return made


# --- are its rows samples? --------------------------------------------------------------------------------------------


def samples_of(batch: Any, samples: Collection[int]) -> int | None:
    """How many samples a loader batch has; None where its rows may be none, as those of a graph."""
    if isinstance(batch, Iterator):  # training_step draws its batches by itself
        return None
    try:
        return layout_of_samples(batch, samples).size
    except Exception:  # whatever a batch is that is not split
        if len(samples) == 1 and 1 not in samples:  # else the dataset may make whole batches
            return next(iter(samples))
        return batch.size(0) if isinstance(batch, Tensor) and batch.dim() else None


def layout_of_samples(batch: Any, samples: Collection[int], known: Mapping[str, str] | None = None) -> Layout:
    """How a batch is made of rows that are samples, of which the loader puts so many into a batch.

    What it shares by all rows has to be a table: no part that had rows before, and no whole numbers that nobody explains: tokens,
    labels or indices, of which a flat batch has more than samples.

    Raises:
        UnsplittableBatchError: the batch has no rows, or its rows are not samples.
    """
    layout, known = Layout.read(batch, known, samples), known or {}
    found = _contradiction(layout, samples) or (None if known else _packing(layout, samples))
    for path, tensor in layout.shared_tensors.items() if found is None else ():
        is_unexplained = is_whole(tensor) and path not in known and not samples
        if tensor.shape[0] not in (1, *layout.columns) and (is_unexplained or known.get(path) == "tensor"):
            found = f"{_shape(path, tensor)} has no entry for each of the {layout.size} rows"
    if found is not None:
        raise UnsplittableBatchError.because(found)
    return layout


def doubt_about(layout: Layout, known: Mapping[str, str]) -> str | None:
    """Why what was read as rows may be none, in words.

    They may be the parts of the only sample: all have its number, and something is there once. Or what is read as shared may be
    several entries of each row, or whole numbers, which are hardly ever a table.
    """
    is_alone = any(tensor.dim() > 0 and tensor.shape[0] == 1 for tensor in layout.shared_tensors.values())
    numbers = (t for t in layout.tensors.values() if t.dim() == 1 and is_whole(t) and t.dtype != torch.bool)
    if is_alone and layout.size > 1 and any(not t.any() for t in numbers):
        return "the rows of the batch may be parts of one sample"
    for path, tensor in layout.shared_tensors.items():
        is_explained = path in known or tensor.shape[0] <= 1 or layout.columns.issuperset(tensor.shape)
        if not is_explained and (is_whole(tensor) or (layout.size > 1 and tensor.shape[0] % layout.size == 0)):
            return f"{_shape(path, tensor)} has no entry for each of the {layout.size} rows, and may have several"
    return None


def _contradiction(layout: Layout, samples: Collection[int]) -> str | None:
    if not samples or layout.size in samples or layout.size <= max(samples):  # a collate_fn may leave samples out
        return None
    hint = " (DataLoader(batch_size=None) says that the dataset makes whole batches)" if max(samples) == 1 else ""
    says = f"the loader puts {' or '.join(map(str, sorted(samples)))} into a batch"
    tensors = ", ".join(_shape(*found) for found in islice(layout.tensors.items(), 1))
    return f"it would be {layout.size} samples, but {says}{hint}: {tensors}"


def _packing(layout: Layout, samples: Collection[int]) -> str | None:
    """Which tensor says that samples lie end to end: offsets, lengths, or the sample of each entry. Reads values."""
    for tensors, others in ((layout.tensors, layout.shared_tensors), (layout.shared_tensors, layout.tensors)):
        ends = {t.shape[1] if t.shape[0] == 1 and t.dim() > 1 else t.shape[0] for t in others.values()}
        for path, numbers in tensors.items() if ends else ():
            if numbers.dim() != 1 or not is_whole(numbers) or numbers.dtype == torch.bool or len(numbers) < 2:
                continue
            steps, total, last = numbers.long().diff(), int(numbers.sum()), int(numbers[-1])
            is_sorted = int(numbers[0]) == 0 and bool((steps >= 0).all())
            are_offsets = is_sorted and last in ends and last != len(numbers)
            are_lengths = int(numbers.min()) > 0 and total in ends and len(numbers) < total
            is_index = is_sorted and bool((steps <= 1).all()) and last + 1 in ends and 0 < last + 1 < len(numbers)
            if are_offsets or are_lengths or (is_index and layout.size not in samples):
                return f"{_shape(path, numbers)} says that samples lie end to end"
    return None


def _shape(path: str, tensor: Tensor) -> str:
    return f"{path} of shape {tuple(tensor.shape)}"
