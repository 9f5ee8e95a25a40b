"""A few rows of a batch, together and in parts, for the check of whether losses add up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_accum.errors import UnsplittableBatchError
from lightning_accum.splitting.joining import JoiningError, join
from lightning_accum.splitting.micro_batch import Layout
from lightning_accum.splitting.packed import layout_of_samples, may_be_one_sample, may_belong_to_rows
from lightning_accum.splitting.padding import IGNORE_INDEX
from lightning_accum.verdict import MOST_ROWS, CannotCheckError


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
        if (shared := may_belong_to_rows(layout)) is not None:
            raise CannotCheckError(f"{shared} has no entry for each of the {layout.size} rows, and may have several")
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

    def take(self, rows: Sequence[int]) -> Any:
        """Some of them, as a new batch."""
        return self._layout.take([row % self._layout.size for row in rows])

    @property
    def of_others(self) -> Sequence[int]:
        """Those of another batch that were brought in by turns."""
        return [row for row, is_other in enumerate(self._are_others) if is_other]

    def emptied(self, rows: Sequence[int], without_labels: Collection[int]) -> Any:
        """Some of them, of which some have no label; None where no label is ignored anywhere."""
        labels = [path for path, tensor in self._layout.tensors.items() if _has_ignored(tensor)]
        if not labels:
            return None
        layout = Layout.read(self.take(rows), self._layout.kinds)
        for path in labels:
            for place, row in enumerate(rows):
                if row in without_labels:
                    layout.tensors[path][place] = IGNORE_INDEX
        return layout.take(slice(None))

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

    @property
    def whole(self) -> Callable[[], Any]:
        """The parts together."""
        return self._whole

    @property
    def parts(self) -> list[Callable[[], Any]]:
        """Each by itself."""
        return [partial(self._part, index) for index in range(self.number)]

    def _whole(self) -> Any:
        return self._split(self._batch, max(2, self._size))[0]

    def _parts(self) -> Sequence[Any]:
        return self._split(self._whole(), max(1, self._size // 2))

    def _part(self, index: int) -> Any:
        return self._parts()[index]


def _has_ignored(tensor: Tensor) -> bool:
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return is_whole and bool((tensor == IGNORE_INDEX).any())
