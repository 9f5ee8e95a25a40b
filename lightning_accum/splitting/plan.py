"""A loader batch as micro-batches: the longest rows first, trimmed to the longest of each, packed to a size."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from lightning_accum.errors import NothingSmallerError, UnsplittableBatchError
from lightning_accum.policy import Policy, Split, Tokens
from lightning_accum.ranks import Ranks
from lightning_accum.splitting.rows import Layout
from lightning_accum.splitting.trimming import Lengths, Trimming, kept_columns, read_lengths
from lightning_accum.step import Trained
from lightning_accum.trial import Step
from lightning_accum.weighing.counts import count_samples, name_of, tensors_of


class RowSlice(NamedTuple):
    """One micro-batch of a plan: which rows of the batch, how many, and the elements in one."""

    rows: slice | list[int]
    size: int
    cost: int
    columns: Mapping[int, slice] = MappingProxyType({})  # the columns to keep, by the size of their dimension
    made: Any = None  # the micro-batch, if the user's function returned it


@dataclass
class Plan:
    """A batch as micro-batches, each constructed when needed."""

    batch: Any
    pieces: Sequence[RowSlice]
    layout: Layout | None  # the batch as rows; None if the user's function splits it
    order: list[int] | None = None
    """The rows of the batch in the order of the micro-batches; None if the order is unchanged."""
    current: int = 0  # the index of the last micro-batch

    @property
    def rows(self) -> int | None:
        """The number of samples in the current micro-batch, if known."""
        return None if self.layout is None else self.pieces[self.current].size

    def note(self, error: Exception) -> None:
        """Add to an error which micro-batch raised it (Python 3.10 shows no notes)."""
        piece = self.pieces[self.current]
        if (len(self.pieces) > 1 or piece.columns) and hasattr(error, "add_note"):
            found = f", {piece.size} rows of the loader batch, columns {dict(piece.columns) or 'all'}" if self.layout else ""
            error.add_note(
                f"This was micro-batch {self.current} of {len(self.pieces)}{found}. If an entry of the batch belongs to all rows, "
                "pass split=; if the step uses the longest row as the number of columns, name the lengths: trim_padding=<key>. "
                "What a hook, or training_step on earlier rows, has left in the module belongs to other rows."
            )

    def __iter__(self) -> Iterator[Any]:
        for index, piece in enumerate(self.pieces):
            self.current = index
            yield piece.made if self.layout is None else self.layout.take(piece.rows, piece.columns)


@dataclass(eq=False)
class Splitting:
    """Splits the loader batches of a training."""

    policy: Policy
    trained: Trained
    trim: bool | str  # whether to trim padding, or the key of the lengths of rows, see :func:`read_lengths`
    warn: Callable[[str], None]
    samples: Callable[[], Collection[int]]  # how many samples the loader puts into a batch; empty if unknown
    step: Step  # tried before padding is trimmed
    sizes: MicroBatchSizes | None = None  # those that fit into memory, with "auto"

    def __post_init__(self) -> None:
        self._size, self._split = self.policy.micro_batch, self.policy.split
        self.plan: Plan | None = None  # the plan of the current loader batch; None if there is no batch
        self.largest: int | None = None  # with "auto", the samples in the largest micro-batch of the last batch
        self.kinds: dict[str, str] = {}  # the kind of each part of a batch, by path, fixed by the first batch
        self._trimming = Trimming(self.trained, self.policy.weight, self.warn)
        self._seen: tuple[Any, dict[int, Lengths]] | None = None
        self._warned = set[str]()

    def describe(self) -> str:
        """How loader batches are split, in words."""
        if isinstance(self._size, Tokens):
            words = [f"in micro-batches of up to {self._size.count} tokens"]
        else:
            words = ["in micro-batches that fit in memory" if self._size == "auto" else f"in micro-batches of {self._size}"]
        if self._split is not None:
            words.append(f"cut by {name_of(self._split)}")
        elif self.plan is not None and self.plan.layout is not None:
            words += ["sorted and trimmed"] * any(piece.columns for piece in self.plan.pieces)
            shared = ", ".join(f"{path} {tuple(tensor.shape)}" for path, tensor in self.plan.layout.shared_tensors.items())
            words += [f"all of them share {shared}"] * bool(shared)
        return ", ".join(words)

    def look_at(self, batch: Any) -> None:
        """Read the lengths of a batch while it is on the host, which waits for no device."""
        if self.trim and self._split is None:
            layout = self._layout_of(batch)
            self._seen = (_shapes(layout), self._read_lengths(layout))

    def begin_epoch(self) -> None:
        """Check again whether padding may be trimmed, since the loss may have changed."""
        self._trimming.prove_again()
        if self.sizes is not None:
            self.sizes.begin_epoch()

    def begin(self, batch: Any) -> None:
        """Plan a loader batch, or None."""
        self.plan = None  # an error leaves no plan of another batch
        seen, self._seen = self._seen, None
        if batch is None:
            return
        if self._split is not None:
            self.plan = self._plan_by_function(batch, self._split)
            return
        layout = self._layout_of(batch)
        lengths = seen[1] if seen is not None and seen[0] == _shapes(layout) else self._read_lengths(layout)
        self.plan = self._pack(batch, layout, self._trimming.trimmable(layout, lengths, self.step) if lengths else lengths)

    def begin_again(self) -> None:
        """Plan the current loader batch again, with other sizes or kinds."""
        if self.plan is not None:
            self._seen = None  # of a batch that was drawn ahead
            self.begin(self.plan.batch)

    def share(self, paths: Sequence[str]) -> None:
        """Treat parts with one entry a row as shared by all rows."""
        self.kinds = {**self.kinds, **dict.fromkeys(paths, "shared")}
        self.begin_again()

    def end_batch(self) -> None:
        """End a loader batch that has run."""
        if self.sizes is not None and self.plan is not None:
            self.sizes.end_batch()
            self.largest = max(piece.size for piece in self.plan.pieces)

    def _layout_of(self, batch: Any) -> Layout:
        layout = Layout(batch, self.kinds, self.samples())
        self.kinds = layout.kinds
        return layout

    def _read_lengths(self, layout: Layout) -> dict[int, Lengths]:
        """The lengths of rows; empty if the whole batch fits into one micro-batch, padding included."""
        if isinstance(self._size, Tokens):
            fits = layout.size * max(columns_of(layout.tensors)) <= self._size.at(0)
        else:
            fits = isinstance(self._size, int) and layout.size <= self._size
        return {} if fits or not self.trim else read_lengths(layout.tensors, self.trim if isinstance(self.trim, str) else None)

    def _plan_by_function(self, batch: Any, split: Split) -> Plan:
        size = self._room(1, 1, 0 if self.sizes is None else len(_cut(split, batch, 1)))
        micro_batches = _cut(split, batch, size)
        counts, found = [count_samples(micro_batch) for micro_batch in micro_batches], [dict(tensors_of(m)) for m in micro_batches]
        for path, tensor in tensors_of(batch):
            cut = [of_part[path] for of_part in found if path in of_part and of_part[path].shape[1:] == tensor.shape[1:]]
            if len(cut) == len(found) and (number := sum(map(len, cut))) < len(tensor):
                said = f"split={name_of(split)} returned {number} samples of {len(tensor)} in a loader batch. Return all of them."
                self._warn_once("split", said)
        pairs = zip(micro_batches, counts, strict=True)
        return Plan(batch, [RowSlice([], min(size, count or size), 1, made=made) for made, count in pairs], None)

    # --- which rows make a micro-batch ------------------------------------------------------------------------------------

    def _pack(self, batch: Any, layout: Layout, lengths: Mapping[int, Lengths]) -> Plan:
        """The micro-batches of a batch: the longest rows first, as many in each as fit."""
        if layout.size == 0:
            return Plan(batch, [RowSlice(slice(None), 0, 1)], layout)
        columns = columns_of(layout.tensors) if lengths or isinstance(self._size, Tokens) else []
        untrimmed = max((size for size in columns if size not in lengths), default=0)  # such as a source beside a padded target
        elements = sum(tensor.numel() for tensor in layout.tensors.values()) // layout.size
        widths, order, costs = [untrimmed] * layout.size, [*range(layout.size)], {untrimmed: max(1, elements)}
        if lengths:
            of_rows = [*zip(*(each.of_rows for each in lengths.values()), strict=True)]
            widths = [max((untrimmed, *of_row)) for of_row in of_rows]
            order.sort(key=lambda row: (widths[row], sum(of_rows[row])), reverse=True)
            costs = {width: max(1, elements * width // max((*lengths, untrimmed, 1))) for width in {*widths}}
        groups, done = list[list[int]](), 0
        while done < layout.size:
            widest = widths[order[done]]
            groups.append(order[done : done + self._room(widest, costs[widest], layout.size - done)])
            done += len(groups[-1])
        is_sorted = bool(lengths) and len(groups) > 1
        pieces, stops = list[RowSlice](), accumulate(map(len, groups))
        for rows, stop in zip(groups, stops, strict=True):
            own = rows if is_sorted else slice(stop - len(rows), stop)  # slices of tensors are views
            pieces.append(RowSlice(own, len(rows), costs[widths[rows[0]]], kept_columns(rows, lengths.values()) if lengths else {}))
        return Plan(batch, pieces, layout, order if is_sorted else None)

    def _room(self, width: int, cost: int, rows: int) -> int:
        """How many rows a micro-batch may have, if its longest has ``width`` columns and ``cost`` elements."""
        if isinstance(self._size, int):
            return self._size
        if not isinstance(self._size, Tokens):
            assert self.sizes is not None
            return self.sizes.size_for(cost, rows)
        if width > self._size.at(0):
            self._warn_once("long rows", f"A row of {width} tokens, longer than {self._size}, becomes a micro-batch of its own.")
        return max(1, self._size.at(0) // max(1, width))

    def _warn_once(self, of: str, message: str) -> None:
        if of not in self._warned:
            self._warned.add(of)
            self.warn(message)


class MicroBatchSizes:
    """The size of micro-batches that fits into memory, found by trying. A failed attempt leaves no trace.

    A batch is one micro-batch until one fails. The limit is then half of its elements, rounded up to a power of two, so that rows
    of similar length have one size. In each later epoch the first loader batch that the limit splits is tried at twice the limit;
    if it fits, this is the new limit. ``say`` prints a size that was found.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.has_changed = False  # whether the limit has changed since ranks last agreed
        self._limit: int | None = None  # the elements that a micro-batch may have; None before any failure
        self._tries_more = self._is_bound = False
        """Whether to try twice the limit; whether the limit has split the current loader batch."""

    def begin_epoch(self) -> None:
        """Try twice the limit once more."""
        self._tries_more = True

    def size_for(self, cost: int, rows: int) -> int:
        """How many of the remaining ``rows`` a micro-batch may have, with ``cost`` elements or tokens in each."""
        if self._limit is None or self._limit >= rows * _rounded(cost):
            return rows
        self._is_bound = True
        return min(rows, max(1, self._limit * (1 + self._tries_more) // _rounded(cost)))

    def halve(self, cost: int, rows: int, seen: str) -> None:
        """Halve the limit after a micro-batch ran out of memory; ``seen`` is the error. Raises it if there was one row."""
        if rows <= 1:
            raise NothingSmallerError(
                f"One sample (of cost {cost}) does not fit into memory. Try activation checkpointing, or loader batches of one "
                'sample with micro_batch="offload".'
            )
        if self._limit is None or rows * _rounded(cost) <= self._limit:
            self._limit = math.ceil(rows / 2) * _rounded(cost)
        self._tries_more, self.has_changed = False, True
        number = max(1, self._limit // _rounded(cost))
        self._say(f"{rows} samples of {cost} elements do not fit into memory ({seen}): again in micro-batches of {number}")

    def end_batch(self) -> None:
        """End a loader batch that has fit into memory."""
        if self._is_bound and self._tries_more and self._limit is not None:
            self._limit, self._tries_more, self.has_changed = 2 * self._limit, False, True
        self._is_bound = False

    def agree(self, ranks: Ranks) -> None:
        """Agree on one limit. Called on all ranks.

        A limit that fell on any rank falls on all; one that only grew grows on all.
        """
        limit = self._limit if self.has_changed and self._limit is not None else math.inf
        limit = -ranks.largest(-limit)[0]
        if limit != math.inf:
            self._limit, self._tries_more = int(limit), False
        self.has_changed = False

    def state_dict(self) -> dict[str, Any]:
        """The limit, as plain numbers."""
        return {"limit": self._limit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a :meth:`state_dict`. Ranks then agree again, since they may have loaded different states."""
        self._limit, self.has_changed = state["limit"], True


def columns_of(tensors: Mapping[str, Tensor]) -> list[int]:
    """Columns of all whole numbers in two dimensions, labels of a few classes among them; else of all features over time."""
    tensors = {path: tensor for path, tensor in tensors.items() if tensor.dim() > 1}
    tokens = [tensor for tensor in tensors.values() if tensor.dim() == 2 and not tensor.is_floating_point()]
    columns = [tensor.shape[1] for tensor in tokens or tensors.values() if tensor.dim() < 4]
    if not columns:
        images = ", ".join(f"{path} {tuple(tensor.shape)}" for path, tensor in tensors.items())
        found = f"none of {images} says which dimension has the tokens" if images else "no tensor of the batch has two dimensions"
        raise UnsplittableBatchError(f"micro_batch=Tokens(...) needs rows with columns, but {found}. Use a number of samples.")
    return columns


def _cut(split: Split, batch: Any, size: int) -> Sequence[Any]:
    micro_batches = split(batch, size)
    if not isinstance(micro_batches, Sequence) or not micro_batches:
        raise UnsplittableBatchError(f"split={split} must return the micro-batches as a list, but returned {micro_batches!r}")
    return micro_batches


def _shapes(layout: Layout) -> list[tuple[str, Any]]:
    return [(path, tensor.shape) for path, tensor in layout.tensors.items()]


def _rounded(cost: int) -> int:
    return 1 << max(cost - 1, 0).bit_length()
