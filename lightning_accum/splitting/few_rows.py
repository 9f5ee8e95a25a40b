"""A few rows of a batch, together and in parts, for the check of whether losses add up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_accum.errors import UnsplittableBatchError
from lightning_accum.splitting.joining import JoiningError, join
from lightning_accum.splitting.micro_batch import Layout
from lightning_accum.splitting.packed import layout_of_samples, may_be_one_sample
from lightning_accum.splitting.padding import IGNORE_INDEX
from lightning_accum.weighing.verdict import MOST_ROWS, CannotCheckError, Rows, parts_of

Losses: TypeAlias = Callable[[Sequence[Callable[[], Any]]], list[float]]
"""Gives the losses of some batches, or raises CannotCheckError."""


class FewRows:
    """The first rows of a batch.

    Args:
        batch: as ``training_step`` gets it.
        samples: how many of them the loader puts into a batch, where it says so.
        before: rows of batches before it, see :attr:`kept`: they follow those of the batch.

    Attributes:
        number: how many rows there are.
        of_batch: how many of them are in the batch.
        at_once: rows of the larger of both.

    Raises:
        CannotCheckError: there are none in it, or none that can be found.

    Example:
        >>> rows, *_ = FewRows([torch.arange(12).reshape(6, 2)]).ways(6)
        >>> rows.sizes, rows.parts[0](), rows.whole()[0].shape
        ([1, 2, 3], [tensor([[0, 1]])], torch.Size([6, 2]))
    """

    def __init__(self, batch: Any, samples: Collection[int] = (), before: Sequence[Any] = ()) -> None:
        try:
            layout = layout_of_samples(batch, samples)
        except UnsplittableBatchError as error:
            raise CannotCheckError("the rows of the batch cannot be told apart") from error
        self._own, self.of_batch = layout, layout.size
        self._are_others: Sequence[bool] = ()
        if not layout.size:
            raise CannotCheckError("the first batch has no rows")
        if may_be_one_sample(layout):
            raise CannotCheckError("the rows of the batch may be parts of one sample")
        self.kept = layout.take(list(range(min(layout.size, MOST_ROWS))))
        """Its first rows, a copy."""
        if before and layout.size < MOST_ROWS:
            with suppress(JoiningError, UnsplittableBatchError):
                layout = Layout.read(join([self.kept, *reversed(before)])[0], layout.kinds)
        self._layout = layout
        self.number = layout.size
        self.at_once = max(self.of_batch, self.number - self.of_batch)

    def alone(self) -> FewRows:
        """The rows of the batch alone."""
        found = copy(self)
        found._layout, found.number = self._own, self.of_batch
        return found

    def by_turns(self, others: FewRows) -> FewRows:
        """The first rows of this batch and of another, by turns.

        Raises:
            CannotCheckError: they are of different kinds.
        """
        few = [self.kept, others.kept]
        try:
            joined = Layout.read(join(few)[0], self._own.kinds)
        except (JoiningError, UnsplittableBatchError) as error:
            raise CannotCheckError("the rows of two batches cannot be joined") from error
        own = min(self.of_batch, MOST_ROWS)
        order = sorted(range(joined.size), key=lambda row: (row if row < own else row - own, row >= own))[:MOST_ROWS]
        found = copy(self)
        found._layout, found._are_others = Layout.read(joined.take(order), joined.kinds), [row >= own for row in order]
        found.number, found.at_once = found._layout.size, max(self.of_batch, others.of_batch)
        return found

    def beside(self, others: FewRows) -> Rows:
        """All rows of this batch and the first of another, together and each batch by itself.

        Raises:
            CannotCheckError: they are of different kinds.
        """
        try:
            joined = Layout.read(join([self._own.take(slice(None)), others.kept])[0], self._own.kinds)
        except (JoiningError, UnsplittableBatchError) as error:
            raise CannotCheckError("the rows of two batches cannot be joined") from error
        return _cut(joined, range(joined.size), [self.of_batch, joined.size - self.of_batch])

    def together(self) -> Any:
        """All of them, as one batch."""
        return self._layout.take(slice(None))

    def ways(self, number: int, micro_batch: int | None = None, attempt: int = 0, losses_of: Losses | None = None) -> list[Rows]:
        """As many of the first rows as are looked at, as many at once as fit into memory.

        Where there are fewer, some are there twice. The first of them with a part of one row, and each alone; and all with the rows
        of small losses in one part and of large ones in another: a loss that goes by a statistic of its batch is another one there.
        Then one row several times: a loss that goes by how often something is in its batch. The rows of two batches each by
        themselves, and a part that has no label, where labels may be missing.

        Args:
            number: of rows.
            micro_batch: rows that fit into memory; None for all of them.
            attempt: from 0; each has the rows that follow those of the last.
            losses_of: gives the losses of some batches.
        """
        layout, looked_at = self._layout, max(min(number, MOST_ROWS), 2 if micro_batch == 1 else 4)
        sizes = parts_of(looked_at, micro_batch)
        rows = [(attempt * looked_at + row) % layout.size for row in range(looked_at)]
        at_once = sum(sizes)
        found = [_cut(layout, rows[:at_once], sizes)]
        if at_once > 2:
            found.append(_cut(layout, rows[:at_once], [1] * at_once))
        losses = [0.0] * looked_at
        if losses_of is not None and at_once > 2:
            with suppress(CannotCheckError):
                of_row = dict(zip(rows, losses_of([partial(layout.take, [row]) for row in rows]), strict=True))
                losses = [of_row[row] for row in rows]
        for start in range(0 if at_once > 2 else 2, looked_at - 1, at_once):
            first = max(0, min(start, looked_at - at_once))  # the last of them have rows of those before, not to be too few
            together = sorted(range(first, first + at_once), key=losses.__getitem__)
            few = max(min(2, len(together) // 2), (len(together) - 1) // 2)
            found.append(_cut(layout, [rows[index] for index in together], [few, len(together) - few]))
        found.append(_cut(layout, rows[:1] * at_once, [1, at_once - 1]))
        if self._are_others:
            by_batch = sorted(rows[:at_once], key=self._are_others.__getitem__)
            of_others = sum(self._are_others[row] for row in by_batch)
            found.append(_cut(layout, by_batch, [at_once - of_others, of_others]))
        labels = [path for path, tensor in layout.tensors.items() if _has_ignored(tensor)]
        if labels and at_once > 2:
            emptied = Layout.read(layout.take(rows[:at_once]), layout.kinds)
            for path in labels:
                emptied.tensors[path][:2] = IGNORE_INDEX
            found.append(_cut(emptied, range(at_once), [2, at_once - 2]))
        return found

    def two(self, number: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Two batches of as many rows, of the first ``number``; the second repeats one where there are few."""
        half = min(number // 2, 4)
        first, second = ([*range(half)], [*range(half, 2 * half)]) if half > 1 else ([0, 1], [1, 1])
        first, second = ([row % self.number for row in rows] for rows in (first, second))
        return partial(self._layout.take, first), partial(self._layout.take, second)


class SplitRows:
    """The first micro-batch of a batch that the user's own function cuts, whose sizes may be of another kind than samples.

    Attributes:
        number: how many parts it has.

    Raises:
        CannotCheckError: it cannot be cut once more.
    """

    kept = None

    def alone(self) -> SplitRows:
        """The same: there are no others."""
        return self

    def __init__(self, batch: Any, split: Callable[[Any, int], Sequence[Any]], micro_batch: int | None) -> None:
        self._batch, self._split, self._size = batch, split, micro_batch or 4
        try:
            self.number = self.of_batch = self.at_once = len(self._parts())
        except Exception as error:
            raise CannotCheckError(f"split= raises {type(error).__name__} on a micro-batch: {error}") from error
        if self.number < 2:
            raise CannotCheckError("split= does not cut a micro-batch in two")

    def ways(self, number: int, micro_batch: int | None = None, attempt: int = 0, losses_of: Losses | None = None) -> list[Rows]:
        """The parts, where there are ``number`` of them."""
        if number != self.number:
            return []
        return [Rows(self._whole, [partial(self._part, index) for index in range(number)], [1] * number, are_counted=False)]

    def _whole(self) -> Any:
        return self._split(self._batch, max(2, self._size))[0]

    def _parts(self) -> Sequence[Any]:
        return self._split(self._whole(), max(1, self._size // 2))

    def _part(self, index: int) -> Any:
        return self._parts()[index]


def _cut(layout: Layout, rows: Sequence[int], sizes: Sequence[int]) -> Rows:
    bounds = pairwise(accumulate(sizes, initial=0))
    parts = [partial(layout.take, list(rows[start:stop])) for start, stop in bounds]
    return Rows(partial(layout.take, list(rows)), parts, sizes)


def _has_ignored(tensor: Tensor) -> bool:
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return is_whole and bool((tensor == IGNORE_INDEX).any())
