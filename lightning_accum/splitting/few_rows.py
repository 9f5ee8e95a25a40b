"""A few rows of a batch, together and in parts, for the check of whether losses add up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_accum.splitting.batch_parts import UnsplittableBatchError
from lightning_accum.splitting.micro_batch import Layout
from lightning_accum.splitting.padding import IGNORE_INDEX
from lightning_accum.weighing.check import CannotCheckError, Rows, parts_of


def few_rows(
    batch: Any,
    micro_batch: int | None,
    split: Callable[[Any, int], Sequence[Any]] | None = None,
    samples: Collection[int] = (),
) -> list[Rows]:
    """The first rows of a batch, in two ways: with a part of one row, and without. Where labels may be missing, also with a part
    that has none.

    Args:
        batch: as ``training_step`` gets it.
        micro_batch: rows that fit into memory; None for all of them.
        split: cuts the batch, see :class:`~lightning_accum.GradientAccumulation`.
        samples: how many of them the loader puts into a batch, where it says so.

    Raises:
        CannotCheckError: there are no two rows in it, or none that can be found.

    Example:
        >>> rows, _ = few_rows([torch.arange(12).reshape(6, 2)], None)
        >>> rows.sizes, rows.parts[0](), rows.whole()[0].shape
        ([1, 2, 3], [tensor([[0, 1]])], torch.Size([6, 2]))
    """
    if split is not None:
        return [_split_by(split, batch, micro_batch or 4)]
    try:
        layout = Layout.read(batch, samples=samples)
    except UnsplittableBatchError as error:
        raise CannotCheckError("the rows of the batch cannot be told apart") from error
    if layout.size < 2:
        raise CannotCheckError(f"the first batch has {layout.size} row{'s' * (layout.size != 1)}")
    sizes = parts_of(layout.size, micro_batch)
    found = [_cut(layout, sizes)]
    if sum(sizes) > 3:
        found.append(_cut(layout, [2, sum(sizes) - 2]))
    labels = [path for path, tensor in layout.tensors.items() if _has_ignored(tensor)]
    if labels and sum(sizes) > 2:
        whole = layout.take(list(range(sum(sizes))))
        emptied = Layout.read(whole, layout.kinds)
        for path in labels:
            emptied.tensors[path][:2] = IGNORE_INDEX
        found.append(_cut(emptied, [2, sum(sizes) - 2]))
    return found


def different_rows(batch: Any, samples: Collection[int] = ()) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Two batches of as many rows of one, each made anew when it is asked for.

    Raises:
        CannotCheckError: there are no two rows in it, or none that can be found.
    """
    try:
        layout = Layout.read(batch, samples=samples)
    except UnsplittableBatchError as error:
        raise CannotCheckError("the rows of the batch cannot be told apart") from error
    if layout.size < 2:
        raise CannotCheckError(f"the first batch has {layout.size} row{'s' * (layout.size != 1)}")
    half = min(layout.size // 2, 4)
    first, second = (range(half), range(half, 2 * half)) if half > 1 else ((0, 1), (1, 1))
    return partial(layout.take, list(first)), partial(layout.take, list(second))


def _cut(layout: Layout, sizes: Sequence[int]) -> Rows:
    bounds = list(accumulate(sizes, initial=0))
    parts = [partial(layout.take, list(range(start, stop))) for start, stop in pairwise(bounds)]
    return Rows(partial(layout.take, list(range(bounds[-1]))), parts, sizes)


def _has_ignored(tensor: Tensor) -> bool:
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return is_whole and bool((tensor == IGNORE_INDEX).any())


def _split_by(split: Callable[[Any, int], Sequence[Any]], batch: Any, size: int) -> Rows:
    """By the user's own function, whose sizes may be of another kind than samples."""

    def whole() -> Any:
        return split(batch, max(2, size))[0]

    def part(index: int) -> Any:
        return split(whole(), max(1, size // 2))[index]

    try:
        number = len(split(whole(), max(1, size // 2)))
    except Exception as error:
        raise CannotCheckError(f"split= raises {type(error).__name__} on a micro-batch: {error}") from error
    if number < 2:
        raise CannotCheckError("split= does not cut a micro-batch in two")
    return Rows(whole, [partial(part, index) for index in range(number)], [1] * number)
