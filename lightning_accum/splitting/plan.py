"""A loader batch as micro-batches: the longest rows first, trimmed to the longest of each, packed to a size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from torch import Tensor, nn

from lightning_accum.errors import UnsplittableBatchError
from lightning_accum.splitting.lengths import (
    Spans,
    cut_where_lengths_fall,
    kept_columns,
    number_within,
    read_spans,
)
from lightning_accum.splitting.micro_batch import Tokens, layout_of_samples
from lightning_accum.splitting.rows import Layout
from lightning_accum.splitting.trimming import Proof, TrimmingCheck
from lightning_accum.weighing.counts import count_samples, tensors_of

MicroBatchSize: TypeAlias = int | Tokens | Literal["auto"]
Split: TypeAlias = Callable[[Any, int], Sequence[Any]]
"""Cuts a batch into micro-batches of so many samples (or tokens, for a size in :class:`Tokens`)."""

T = TypeVar("T")


class Mark(NamedTuple):
    """Where a window stands before an attempt at a loader batch."""

    undo: Callable[[], None]
    """Undoes what the attempt did to the window and to the gradients."""
    accumulated: Iterable[nn.Parameter] | None
    """Parameters whose gradients hold earlier batches of the window; None where there are none."""


@dataclass(frozen=True)
class RowSlice:
    """One micro-batch of a plan: which rows of the batch, how many, and the elements in one."""

    rows: slice | list[int]
    count: int
    cost: int
    columns: Mapping[int, slice] = field(default_factory=dict)
    """Those that are kept, by the size of the dimension that has them."""


@dataclass
class Plan:
    """A batch as micro-batches, each made when it is asked for."""

    batch: Any
    pieces: Sequence[RowSlice]
    make: Callable[[RowSlice], Any]
    order: list[int] | None = None
    """The rows of the batch in the order of the micro-batches; None where they keep theirs."""
    tensors: Sequence[Tensor] = ()
    is_read: bool = True
    """What a micro-batch is made of are rows of the batch."""
    current: int = 0
    """The micro-batch that was asked for last."""

    @property
    def rows(self) -> int | None:
        """The samples of the current micro-batch, where it is known to be made of them."""
        return self.pieces[self.current].count if self.is_read else None

    def note(self, error: Exception) -> None:
        """Add to an error which micro-batch raised it (Python 3.10 shows no notes)."""
        piece = self.pieces[self.current]
        if not (len(self.pieces) > 1 or piece.columns) or not hasattr(error, "add_note"):
            return
        found = f", {piece.count} rows of the loader batch, columns {dict(piece.columns) or 'all'}" if self.is_read else ""
        error.add_note(
            f"GradientAccumulation(micro_batch=...) has split the batch: this was micro-batch {self.current} of"
            f" {len(self.pieces)}{found}. If something in the batch belongs to all of its rows, pass split=, a function that cuts"
            " it; if the step takes the longest row for the number of columns, name the lengths: trim_padding=<their key>, or"
            ' trim_padding="lengths" for encoder_lengths and decoder_lengths.'
        )

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches, one at a time."""
        for index, piece in enumerate(self.pieces):
            self.current = index
            yield self.make(piece)


class Splitting:
    """How the loader batches of a training are split, and the one that is under way.

    Args:
        size: of a micro-batch.
        trim: whether to trim padding; or the key of the lengths of rows, see :func:`read_spans`.
        split: cuts batches instead.
        warn: takes a warning that should be seen once.
        samples: returns how many samples the loader puts into a batch; empty where it does not say so.
    """

    def __init__(
        self,
        size: MicroBatchSize,
        trim: bool | str,
        split: Split | None,
        warn: Callable[[str], None],
        samples: Callable[[], Collection[int]],
    ) -> None:
        self.size, self._trim, self._split = size, trim, split
        self._warn, self._samples = warn, samples
        self.plan: Plan | None = None
        """That of the loader batch under way; None where there is no batch."""
        self.largest: int | None = None
        """With ``"auto"``, the samples in the largest micro-batch of the last batch."""
        self.kinds: dict[str, str] = {}
        """What each part of a batch is, by path: found in the first batch, and held to."""
        self._trimming = TrimmingCheck(warn)
        self._proof: Proof = lambda padded, trimmed: None
        self._seen: tuple[Any, dict[int, Spans]] | None = None
        self._warned = set[str]()
        self._description = ""
        """What was understood of the first batch, in words."""

    def describe(self) -> str:
        """What is done to a loader batch, in words."""
        if isinstance(self.size, Tokens):
            size = f"in micro-batches of up to {self.size.count} tokens"
        else:
            size = "in micro-batches that fit in memory" if self.size == "auto" else f"in micro-batches of {self.size}"
        return ", ".join(part for part in (size, self._description) if part)

    def look_at(self, batch: Any) -> None:
        """See a batch that is still on the host, where its lengths can be read without waiting for a device."""
        if self._trim and self._split is None:
            layout = self._layout_of(batch)
            if not self._fits(layout):
                self._seen = (_shapes(layout), self._read_spans(layout))

    def begin_epoch(self) -> None:
        """What a loss depends on may change in a training: try out again what was tried."""
        self._trimming.prove_again()

    def begin(self, batch: Any, proof: Proof) -> None:
        """Plan a loader batch; ``proof`` is asked before padding is trimmed.

        Raises:
            UnsplittableBatchError: there are no rows to be found in it, or no columns for :class:`Tokens`.
            ArgumentError: the key for lengths is not in the batch.
        """
        self._proof = proof
        self.plan = self._planned(batch)

    def share(self, path: str) -> None:
        """Have all rows share a part of a batch that has as many entries."""
        self.kinds = {**self.kinds, path: "shared"}
        if self.plan is not None:
            self.begin(self.plan.batch, self._proof)

    def run(self, attempt: Callable[[Plan], T], mark: Callable[[], Mark]) -> T:
        """Run the loader batch under way."""
        assert self.plan is not None
        try:
            return attempt(self.plan)
        except Exception as error:
            self.plan.note(error)
            raise

    def _planned(self, batch: Any) -> Plan:
        seen, self._seen = self._seen, None
        if self._split is not None:
            return self._plan_by_function(batch, self._split)
        layout = self._layout_of(batch)
        spans = dict[int, Spans]()
        if self._trim and not self._fits(layout):
            found = seen[1] if seen is not None and seen[0] == _shapes(layout) else self._read_spans(layout)
            spans = self._trimming.trimmable(layout, found, self._proof)
        pieces, order = self._pack(layout, spans)
        if not self._description:
            shared = ", ".join(f"{path} {tuple(tensor.shape)}" for path, tensor in layout.shared_tensors.items())
            order_of = ["sorted and trimmed"] if spans else []
            self._description = ", ".join([*order_of, f"all of them share {shared}"] if shared else order_of)
        # in a container of its own each time: `batch.pop("labels")` must not be felt where the batch runs again
        tensors = [*layout.tensors.values(), *layout.shared_tensors.values()]
        return Plan(batch, pieces, lambda piece: layout.take(piece.rows, piece.columns), order, tensors)

    def _layout_of(self, batch: Any) -> Layout:
        layout = layout_of_samples(batch, self._samples(), self.kinds)
        self.kinds = layout.kinds
        return layout

    def _read_spans(self, layout: Layout) -> dict[int, Spans]:
        return read_spans(layout.tensors, self._trim if isinstance(self._trim, str) else None)

    def _plan_by_function(self, batch: Any, split: Split) -> Plan:
        size = self.size.at(0) if isinstance(self.size, Tokens) else self.size
        if size == "auto":
            size = self._as_many_as_fit(1, len(_cut(split, batch, 1)))
        micro_batches = _cut(split, batch, size)
        name = getattr(split, "__name__", split)
        self._description = self._description or f"cut by {name}"
        counts, found = [count_samples(micro_batch) for micro_batch in micro_batches], [dict(tensors_of(m)) for m in micro_batches]
        for path, tensor in tensors_of(batch):
            cut = [of_part[path] for of_part in found if path in of_part and of_part[path].shape[1:] == tensor.shape[1:]]
            if len(cut) == len(found) and (number := sum(map(len, cut))) < len(tensor):
                self._warn_once(
                    "split",
                    f"split={name} returned micro-batches of {number} samples for a loader batch of {len(tensor)}: the others are"
                    " not trained on. Return all of them: the last micro-batch may be smaller.",
                )
        pieces = [RowSlice(slice(index, None), min(size, count or size), 1) for index, count in enumerate(counts)]
        return Plan(batch, pieces, lambda piece: micro_batches[piece.rows.start], is_read=False)  # type: ignore[union-attr]

    # --- which rows make a micro-batch ------------------------------------------------------------------------------------

    def _fits(self, layout: Layout) -> bool:
        """The whole batch is no larger than a micro-batch may be, padding included."""
        if isinstance(self.size, Tokens):
            return layout.size * max(columns_of(layout.tensors)) <= self.size.at(0)
        return isinstance(self.size, int) and layout.size <= self.size

    def _pack(self, layout: Layout, spans: Mapping[int, Spans]) -> tuple[list[RowSlice], list[int] | None]:
        """The micro-batches of a batch, and the order of its rows in them; None where they keep theirs."""
        if layout.size == 0:
            return [RowSlice(slice(None), 0, 1)], None
        elements = max(1, sum(tensor.numel() for tensor in layout.tensors.values()) // layout.size)
        if not spans:
            size = self._room(max(columns_of(layout.tensors)) if isinstance(self.size, Tokens) else 0, elements, layout.size)
            starts = range(0, layout.size, size)
            return [RowSlice(slice(s, s + size), min(size, layout.size - s), elements) for s in starts], None
        # beside a padded target, a source
        untrimmed = max((size for size in columns_of(layout.tensors) if size not in spans), default=0)
        widest = max(*spans, untrimmed)
        of_rows = list(zip(*(span.widths for span in spans.values()), strict=True))
        widths = [max(untrimmed, *of_row) for of_row in of_rows]
        costs = [max(1, elements * width // widest) for width in widths]
        longest_first = sorted(range(layout.size), key=lambda row: (widths[row], sum(of_rows[row])), reverse=True)
        groups, rest = [], longest_first
        while rest:
            number = min(self._room(widths[rest[0]], costs[rest[0]], len(rest)), len(rest))
            if isinstance(self.size, Tokens):
                number = number_within(self.size.at(0), rest[:number], untrimmed, spans.values())
            groups.append(rest[:number])
            rest = rest[number:]
        if isinstance(self.size, int):
            groups = cut_where_lengths_fall(groups, widths)
        pieces = [RowSlice(rows, len(rows), costs[rows[0]], kept_columns(rows, spans.values())) for rows in groups]
        if len(pieces) == 1:  # nothing to sort
            return [replace(pieces[0], rows=slice(None))], None
        return pieces, longest_first

    def _room(self, width: int, cost: int, rows: int) -> int:
        """How many rows a micro-batch may have, where its longest has ``width`` columns and ``cost`` elements."""
        if isinstance(self.size, int):
            return self.size
        if not isinstance(self.size, Tokens):
            return self._as_many_as_fit(cost, rows)
        if width > self.size.at(0):
            self._warn_once(
                "long rows",
                f"A row of {width} tokens is longer than micro_batch={self.size}. It is a micro-batch of its own: leaving it out"
                " would change the result.",
            )
        return max(1, self.size.at(0) // max(1, width))

    def _warn_once(self, of: str, message: str) -> None:
        if of not in self._warned:
            self._warned.add(of)
            self._warn(message)

    def _as_many_as_fit(self, cost: int, rows: int) -> int:
        """With ``"auto"``, how many of the rows that are left a micro-batch may have, with so many elements in each."""
        raise NotImplementedError


def columns_of(tensors: Mapping[str, Tensor]) -> list[int]:
    """Columns of all whole numbers in two dimensions, labels of a few classes among them; else of all features over time.

    Raises:
        UnsplittableBatchError: there are none.
    """
    tensors = {path: tensor for path, tensor in tensors.items() if tensor.dim() > 1}
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


def _cut(split: Split, batch: Any, size: int) -> Sequence[Any]:
    micro_batches = split(batch, size)
    if not isinstance(micro_batches, Sequence) or not micro_batches:
        raise UnsplittableBatchError(f"split={split} must return the micro-batches as a list, but returned {micro_batches!r}")
    return micro_batches


def _shapes(layout: Layout) -> list[tuple[str, Any]]:
    return [(path, tensor.shape) for path, tensor in layout.tensors.items()]
