"""How many rows go into a micro-batch, and which: the longest first, packed to a size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from operator import sub
from typing import Literal, TypeAlias

from lightning_accum.errors import UnsplittableBatchError
from lightning_accum.splitting.memory import MicroBatchSizes
from lightning_accum.splitting.micro_batch import Layout, RowSelector, Tokens
from lightning_accum.splitting.padding import Spans
from lightning_accum.splitting.proofs import kept_columns

MicroBatchSize: TypeAlias = int | Tokens | Literal["auto"]


@dataclass(frozen=True)
class RowSlice:
    """One micro-batch of a plan.

    Attributes:
        rows: which rows of the batch.
        count: how many.
        columns: which columns are kept, by the size of the dimension that has them.
        cost: elements in a row.
    """

    rows: slice | list[int]
    count: int
    cost: int
    columns: Mapping[int, slice] = field(default_factory=dict)

    @cached_property
    def selector(self) -> RowSelector:
        """What is taken of a batch."""
        return RowSelector(self.rows, self.columns)


class Packer:
    """Packs the rows of batches."""

    def __init__(self, size: MicroBatchSize, sizes: MicroBatchSizes | None, warn: Callable[[str], None]) -> None:
        self._size = size
        self._sizes = sizes
        self._warn = warn
        self._warned_of_long_rows = False

    def fits(self, layout: Layout) -> bool:
        """The whole batch is no larger than a micro-batch may be, padding included."""
        if isinstance(self._size, Tokens):
            return layout.size * _columns(layout) <= self._size.at(0)
        return isinstance(self._size, int) and layout.size <= self._size

    def pack(self, layout: Layout, spans: Mapping[int, Spans]) -> tuple[list[RowSlice], list[int] | None]:
        """The micro-batches of a batch, and the order of its rows in them; None where they keep theirs."""
        if layout.size == 0:
            return [RowSlice(slice(None), 0, 1)], None
        elements = max(1, sum(tensor.numel() for tensor in layout.tensors.values()) // layout.size)
        if not spans:
            size = self._rows_allowed(layout.size, _columns(layout) if isinstance(self._size, Tokens) else 0, elements)
            starts = range(0, layout.size, size)
            return [RowSlice(slice(s, s + size), min(size, layout.size - s), elements) for s in starts], None
        untrimmed = max((size for size in _all_columns(layout) if size not in spans), default=0)  # a source with a padded target
        widest = max(*spans, untrimmed)
        of_rows = list(zip(*(span.widths for span in spans.values()), strict=True))
        widths = [max(untrimmed, *of_row) for of_row in of_rows]

        def cost_of(width: int) -> int:
            return max(1, elements * width // widest)

        longest_first = sorted(range(layout.size), key=lambda row: (widths[row], sum(of_rows[row])), reverse=True)
        groups, rest = [], longest_first
        while rest:
            width = widths[rest[0]]
            allowed = min(self._rows_allowed(len(rest), width, cost_of(width)), len(rest))
            groups.append(rest[: self._rows_within(allowed, rest, untrimmed, spans.values())])
            rest = rest[len(groups[-1]) :]
        if isinstance(self._size, int):
            groups = _cut_where_lengths_fall(groups, widths)
        pieces = [RowSlice(rows, len(rows), cost_of(widths[rows[0]]), kept_columns(rows, spans.values())) for rows in groups]
        if len(pieces) == 1:  # nothing to sort
            return [replace(pieces[0], rows=slice(None))], None
        return pieces, longest_first

    def _rows_allowed(self, rows: int, width: int, cost: int) -> int:
        """How many rows a micro-batch may have, where its longest has ``width`` columns and ``cost`` elements."""
        if isinstance(self._size, Tokens):
            if width > self._size.at(0) and not self._warned_of_long_rows:
                self._warned_of_long_rows = True
                self._warn(
                    f"A row of {width} tokens is longer than micro_batch={self._size}. It is a micro-batch of its own: leaving it"
                    " out would change the result."
                )
            return max(1, self._size.at(0) // max(1, width))
        if isinstance(self._size, int):
            return self._size
        assert self._sizes is not None
        return self._sizes.size_for(cost, rows)

    def _rows_within(self, allowed: int, rows: Sequence[int], untrimmed: int, spans: Iterable[Spans]) -> int:
        """How many of the first ``rows`` keep to the tokens allowed: padded left and right, they need more columns than any has."""
        if not isinstance(self._size, Tokens):
            return allowed
        widths = [untrimmed] * allowed
        for span in spans:
            starts = accumulate((span.starts[row] for row in rows[:allowed]), min)
            stops = accumulate((span.stops[row] for row in rows[:allowed]), max)
            widths = list(map(max, widths, map(sub, stops, starts)))
        return next((count for count in range(1, allowed) if widths[count] * (count + 1) > self._size.at(0)), allowed)


def _cut_where_lengths_fall(groups: list[list[int]], widths: Sequence[int]) -> list[list[int]]:
    """Make two of a micro-batch where half of what they all have on average is padding that this saves."""
    least = sum(len(rows) * widths[rows[0]] for rows in groups) / len(groups) / 2
    cut: list[list[int]] = []
    waiting = groups[::-1]
    while waiting:
        rows = waiting.pop()
        # what is saved when so many of the longest rows are on their own
        saved = [(len(rows) - first) * (widths[rows[0]] - widths[rows[first]]) for first in range(len(rows))]
        most = max(saved)
        if most < least:
            cut.append(rows)
        else:
            first = saved.index(most)
            waiting += [rows[first:], rows[:first]]
    return cut


def _columns(layout: Layout) -> int:
    """Columns of a row, padding included: of the tensor that has the most."""
    return max(_all_columns(layout))


def _all_columns(layout: Layout) -> list[int]:
    """Columns of all whole numbers in two dimensions, labels of a few classes among them; else of all features over time."""
    tensors = {path: tensor for path, tensor in layout.tensors.items() if tensor.dim() > 1}
    tokens = [tensor for tensor in tensors.values() if tensor.dim() == 2 and not tensor.is_floating_point()]
    columns = [tensor.shape[1] for tensor in tokens or tensors.values() if tensor.dim() < 4]
    if not columns:
        images = ", ".join(f"{path} {tuple(tensor.shape)}" for path, tensor in tensors.items())
        found = f"none of {images} says which dimension has the tokens" if images else "no tensor of the batch has two dimensions"
        raise UnsplittableBatchError(
            f"A micro-batch in Tokens needs rows with columns, but {found}. Use a number of samples:"
            " GradientAccumulation(micro_batch=8)."
        )
    return columns
