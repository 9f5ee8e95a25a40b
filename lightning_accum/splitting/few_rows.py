"""A few rows of a batch, together and in parts, for the check that losses add up; functions that split; and joined batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from lightning_accum.errors import ArgumentError, UnsplittableBatchError
from lightning_accum.splitting.rows import IGNORE_INDEX, Layout, Part, entries_of, is_whole, made_of, parse, with_entries
from lightning_accum.verdict import MOST_ROWS, CannotCheckError, UnsuitableRowsError


class FewRows:
    """Rows of loader batches as passed to ``training_step``, followed by rows from ``before``.

    The most informative rows come first, see :func:`_telling_first`. There are ``number`` rows, ``of_batch`` of them in the loader
    batches, and about ``at_once`` in each of these. ``of_others`` are the rows of another batch that alternate with them. A
    CannotCheckError says why there are none.
    """

    is_guess = False

    def __init__(
        self, batches: Sequence[Any], samples: Collection[int] = (), before: Any = None, known: Mapping[str, str] | None = None
    ) -> None:
        try:
            layout = Layout(batches[0], known, samples)
        except UnsplittableBatchError as error:
            raise CannotCheckError(
                "the rows of the batch cannot be identified (pass split=, a function that splits the batch)"
            ) from error
        if not layout.size:
            raise UnsuitableRowsError("the first batch has no rows")
        if (doubt := _doubt_about(layout)) is not None:
            raise CannotCheckError(doubt)
        layout = _joined(batches, layout) if len(batches) > 1 else layout
        self._own, self.of_batch, self.of_others = layout, layout.size, list[int]()
        self.at_once = math.ceil(layout.size / len(batches))
        self._order = _telling_first(layout)
        if before is not None and layout.size < MOST_ROWS:
            with suppress(CannotCheckError):
                layout = _joined([layout.take(self._order), before], layout)
        self._layout, self.number = layout, layout.size

    @property
    def kept(self) -> Any:
        """A copy of the first rows."""
        return self.take(range(min(self.number, MOST_ROWS)))

    def alone(self) -> FewRows:
        """The rows of the batch alone."""
        return self._with(_layout=self._own, number=self.of_batch)

    def _with(self, **changed: Any) -> FewRows:
        vars(found := copy(self)).update(changed)
        return found

    def by_turns(self, others: FewRows) -> FewRows:
        """The first rows of this batch and of another, alternating. A CannotCheckError if they are of different kinds."""
        own, joined = min(self.of_batch, MOST_ROWS), _joined([self.kept, others.kept], self._own)
        order = sorted(range(joined.size), key=lambda row: (row if row < own else row - own, row >= own))[:MOST_ROWS]
        layout, of_others = Layout(joined.take(order), joined.kinds), [place for place, row in enumerate(order) if row >= own]
        return self._with(_layout=layout, of_others=of_others, number=layout.size, at_once=max(self.of_batch, others.of_batch))

    def may_be_misread(self, samples: Collection[int]) -> bool:
        """Whether the rows may be in another dimension, since their number is not the number of samples, or is also the number of
        columns; or whether a number in the batch may count them."""
        columns = {tensor.shape[1] for tensor in self._own.tensors.values() if tensor.dim() > 1}
        has_numbers = self.at_once > 1 and bool(_numbers_of(self._own.parts[0].value))
        return has_numbers or self.at_once in columns or bool(samples and self.at_once not in samples)

    def misread(self, two: Any) -> set[str]:
        """The paths of parts that were read as rows, but have more than two entries in a batch of two samples."""
        read = {part.path for part in self._own.parts if part.kind == "rows"}
        return {part.path for part in parse(two).walk() if part.path in read and (part.size or 0) > 2}

    def may_be_shared(self, two: Any) -> dict[str, Any]:
        """Parts with an entry for each row that may still be shared by all rows, by path: those that are misread in a batch of
        ``two`` samples; else lists without tensors, and vectors."""
        misread, rows = self.misread(two), [part for part in self._own.parts if part.kind == "rows"]
        shared = [part for part in rows if part.path in misread]
        shared = shared or [part for part in rows if not part.has_tensors or (part.is_tensor and part.value.dim() == 1)]
        shared = shared[1:] if len(shared) == len(rows) else shared  # some are rows
        return {part.path: part.value.cpu() if part.is_tensor else part.value for part in shared}

    def take(self, rows: Sequence[int]) -> Any:
        """Some of the rows, as a new batch."""
        size = self._layout.size
        order = self._order if self._layout is self._own else range(size)
        return self._layout.take([order[row % size] for row in rows])

    def emptied(self, rows: Sequence[int], without_labels: Collection[int]) -> Any:
        """A batch of ``rows``, of which some have no labels; None if the labels have no value that is ignored."""
        tensors = self._layout.tensors.items()
        labels = [path for path, tensor in tensors if is_whole(tensor) and bool((tensor == IGNORE_INDEX).any())]
        if not labels:
            return None
        batch = self.take(rows)  # a copy
        for path, tensor in Layout(batch, self._layout.kinds).tensors.items():
            if path in labels:
                tensor[torch.tensor([row in without_labels for row in rows])] = IGNORE_INDEX
        return batch

    def two(self, number: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Two batches of equal size from the first ``number`` rows; the second repeats a row if there are few."""
        half = min(number // 2, 4)
        first, second = ([*range(half)], [*range(half, 2 * half)]) if half > 1 else ([0, 1], [1, 1])
        return partial(self.take, first), partial(self.take, second)


def are_counted(two: Any, four: Any) -> bool:
    """Whether a number in a batch is another for four samples than for two of them."""
    numbers, of_four = _numbers_of(two), _numbers_of(four)
    return any(number != of_four.get(path, number) for path, number in numbers.items())


def _numbers_of(batch: Any) -> dict[Any, float]:
    """The numbers that all rows of a batch share, by path."""
    leaves: list[tuple[Any, Any]] = tree_flatten_with_path(batch)[0]
    numbers = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Real) or (isinstance(leaf, Tensor) and leaf.numel() == 1)]
    return {path: float(leaf) for path, leaf in numbers if not (isinstance(leaf, Tensor) and leaf.is_complex())}


def _doubt_about(layout: Layout) -> str | None:
    """Why the rows may have been read wrongly, in words.

    They may be parts of a single sample. Or a part that was read as shared may have several entries a row, or hold whole numbers,
    which are rarely a table.
    """
    is_alone = any(tensor.shape[0] == 1 for tensor in layout.shared_tensors.values())
    numbers = (t for t in layout.tensors.values() if t.dim() == 1 and is_whole(t) and t.dtype != torch.bool)
    if is_alone and layout.size > 1 and any(not t.any() for t in numbers):
        return "the rows of the batch may be parts of one sample"
    for part in layout.unexplained:
        if is_whole(part.value) or (layout.size > 1 and len(part.value) % layout.size == 0):
            return f"{part}, and has no entry for each of the {layout.size} rows: it may have several"
    return None


def _telling_first(layout: Layout) -> list[int]:
    """Indices of rows, the most informative first: spread over the batch; then, for each tensor that is equal in all of these (a
    mask, a flag, weights of 1, labels without an ignored one), a row in which it differs.
    """
    size = layout.size
    first = [*dict.fromkeys(place * (size - 1) // (MOST_ROWS - 1) for place in (0, 7, 4, 2, 6, 1, 5, 3))]
    replaced = iter([place for place in (1, 3, 2) if place < size])
    for tensor in layout.tensors.values():
        for shown in (tensor, tensor == IGNORE_INDEX):
            differs = (shown != shown[first[0]]).reshape(size, -1).any(1).tolist() if shown.numel() else []
            if any(differs) and not any(differs[row] for row in first[:4]) and (place := next(replaced, None)) is not None:
                row = next((row for row in first if differs[row]), differs.index(True))
                first = [first[place] if other == row else row if at == place else other for at, other in enumerate(first)]
    return [*first, *(row for row in range(size) if row not in first)]


def _joined(batches: Sequence[Any], layout: Layout) -> Layout:
    try:
        return Layout(join(batches, layout.kinds)[0], layout.kinds)
    except (ArgumentError, UnsplittableBatchError) as error:
        raise CannotCheckError("the rows of two batches cannot be joined") from error


class SplitRows:
    """The first micro-batch of a batch that the user's function splits, whose size may not count samples."""

    kept = None

    def __init__(self, batch: Any, split: Callable[[Any, int], Sequence[Any]], micro_batch: int | None) -> None:
        self._batch, self._split, self.is_guess = batch, split, split is split_sources
        try:
            for self._size in (micro_batch or 4, 2):  # smaller, if all rows are one part
                self.number = self.of_batch = self.at_once = len(self._parts())
                if self.number > 1:
                    break
        except Exception as error:
            raise CannotCheckError(f"split= raises {type(error).__name__} on a micro-batch: {error}") from error
        if self.number < 2:
            raise CannotCheckError("split= does not cut a micro-batch in two")

    def may_be_shared(self, two: Any) -> dict[str, Any]:
        """Empty, since the user's function decides."""
        return {}

    @property
    def parts(self) -> list[Callable[[], Any]]:
        """Each part as a batch."""
        return [lambda index=index: self._parts()[index] for index in range(self.number)]  # type: ignore[misc]

    def whole(self) -> Any:
        """All parts as one batch."""
        return self._split(self._batch, max(2, self._size))[0]

    def _parts(self) -> Sequence[Any]:
        return self._split(self.whole(), max(1, self._size // 2))


def split_sources(batch: Any, size: int) -> list[Any]:
    """Split a dict of batches, each with its own rows, such as labeled and unlabeled samples: ``size`` rows of the smallest."""
    if not all(isinstance(source, (dict, list, tuple)) for source in batch.values()):
        raise UnsplittableBatchError("split_sources: an entry of the batch is no batch.")
    sources = {key: Layout(source) for key, source in batch.items()}
    number = -(-min(source.size for source in sources.values()) // size)
    cuts = [{key: slice(s.size * n // number, s.size * (n + 1) // number) for key, s in sources.items()} for n in range(number)]
    return [{key: sources[key].take(rows) for key, rows in cut.items()} for cut in cuts]


def split_lists(batch: Any, size: int) -> list[Any]:
    """Split a batch of lists with one entry a sample, such as the images and targets of a detector.

    For ``GradientAccumulation(micro_batch=2, split=split_lists)``. Lists and tensors with as many entries as the first list are
    split with it; everything else is shared by all micro-batches.

    Args:
        batch: a dict or a tuple with lists, ``{"images": [...], "targets": [...]}`` or ``(images, targets)``; or a list of samples.
        size: how many samples a micro-batch has.

    Returns:
        The micro-batches, each of the type of the batch.

    Raises:
        UnsplittableBatchError: there is no list in the batch.

    Example:
        >>> images, targets = [torch.zeros(3, n, 8) for n in (8, 9, 7)], [{"boxes": torch.zeros(n, 4)} for n in (2, 0, 1)]
        >>> [len(part[0]) for part in split_lists((images, targets), 2)]
        [2, 1]
    """
    if isinstance(batch, list) and not any(isinstance(entry, (list, Tensor)) for entry in batch):
        return [batch[start : start + size] for start in range(0, len(batch), size)]
    lists = [part for part in parse(batch).parts if isinstance(part.value, (list, tuple))]
    if not lists or not all(part.size for part in lists):
        raise UnsplittableBatchError(f"split_lists: no list in the batch, a {type(batch).__name__}, has one entry a sample.")
    layout = Layout(batch, {lists[0].path: "rows"})
    return [layout.take(slice(start, start + size)) for start in range(0, layout.size, size)]


# --- batches that become one ------------------------------------------------------------------------------------------


def _not_joined(found: str) -> ArgumentError:
    return ArgumentError(
        f"The batches of the window cannot be joined to the full batch: {found}. Say how: verify(join=...) takes a function "
        "join(batches) that returns one batch; or verify one batch that is split, with micro_batch=."
    )


def join(batches: Sequence[Any], known: Mapping[str, str] | None = None) -> tuple[Any, str]:
    """Concatenate batches along their rows, padded to the longest if they are padded.

    Returns the batch, with the types of the first, and the padded parts in words, empty if there are none.

    Raises:
        ValueError: their parts differ, or their columns differ without a mask or labels that mark padding.
    """
    if len(batches) == 1:
        return batches[0], ""
    layouts, found = list[Layout](), list[dict[str, Any]]()
    for number, batch in enumerate(batches):
        try:
            layouts.append(Layout(batch, layouts[0].kinds if layouts else known))
        except UnsplittableBatchError as error:
            raise _not_joined(str(error).partition(": ")[2].partition(". Say how")[0]) from error
        found.append({part.path: part.value for part in layouts[-1].parts})
        if others := sorted(found[-1].keys() ^ found[0].keys()):
            raise _not_joined(f"batch {number} has different parts than batch 0 ({', '.join(others[:5])})")
    values = {path: [own[path] for own in found] for path in found[0]}
    padded, description = _padded({path: values[path] for path in layouts[0].tensors})

    def joined(part: Part) -> Any:
        of_part = padded.get(part.path, values[part.path])
        if part.kind == "rows":
            if not part.is_tensor:
                return with_entries(part.value, [entry for value in of_part for entry in entries_of(value)])
            if len({value.shape[1:] for value in of_part}) > 1:
                shapes = " and ".join(dict.fromkeys(str(tuple(value.shape)) for value in of_part))
                raise _not_joined(f"{part.path} has the shapes {shapes}")
            return torch.cat(of_part)
        if part.is_tensor and not all(v.shape == part.value.shape and torch.equal(v, part.value) for v in of_part):
            raise _not_joined(f"{part.path} has no rows, and differs between the batches")
        return part.value if part.is_tensor else made_of(part, joined)

    return joined(layouts[0].parts[0]), description


def _padded(tensors: Mapping[str, Sequence[Tensor]]) -> tuple[dict[str, list[Tensor]], str]:
    """The tensors with different numbers of columns, padded to equal numbers, by path; and the padded parts in words."""
    lengths = {path: [v.shape[1] for v in values] for path, values in tensors.items() if all(v.dim() > 1 for v in values)}
    uneven = {path: found for path, found in lengths.items() if len(set(found)) > 1}
    if not uneven:
        return {}, ""
    masks = {path: tensors[path] for path in uneven if "mask" in path.lower()}
    if not masks and not any("label" in path.lower() for path in uneven):
        shown = ", ".join(f"{path} has {' and '.join(map(str, dict.fromkeys(u)))} columns" for path, u in uneven.items())
        raise _not_joined(f"{shown}, and no mask or labels mark the padding")
    of_tokens = [mask for path, values in masks.items() if not path.endswith("key_padding_mask") for mask in values]
    is_left = any(bool((mask[:, 0] == 0).any()) for mask in of_tokens) and all(bool((m[:, -1] != 0).all()) for m in of_tokens)
    padded: dict[str, list[Tensor]] = {}
    for path, found in uneven.items():
        fill = _fill(path, tensors[path], masks)
        for value in tensors[path]:
            missing = max(found) - value.shape[1]
            ends = (0, 0) * (value.dim() - 2) + ((missing, 0) if is_left else (0, missing))
            padded.setdefault(path, []).append(torch.nn.functional.pad(value, ends, value=fill))
    most, side = max(map(max, uneven.values())), "left" if is_left else "right"
    return padded, f"batches of unequal length were padded on the {side} to {most} columns ({', '.join(uneven)})"


def _fill(path: str, values: Sequence[Tensor], masks: Mapping[str, Sequence[Tensor]]) -> float:
    name, added = path.rpartition(".")[2].lower(), min(float(value.min()) for value in values if value.numel())
    if path in masks and added < 0:
        return added  # a mask that is added to scores
    if values[0].is_floating_point() or values[0].dtype == torch.bool or path in masks:
        return float(name.endswith("key_padding_mask"))
    if "label" in name or any(bool((value == IGNORE_INDEX).any()) for value in values):
        return IGNORE_INDEX
    for path_of_mask, of_batches in masks.items():  # the value that it has at masked positions
        for value, mask in zip(values, of_batches, strict=True):
            is_padding = (mask != 0) if path_of_mask.endswith("key_padding_mask") else (mask == 0)
            if value.shape == mask.shape and bool(is_padding.any()):
                return float(value[is_padding][0])
    return 0
