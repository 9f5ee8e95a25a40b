"""A loader batch as micro-batches: sorted by length, trimmed to the longest of them, each made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import Tensor, nn

from lightning_accum.errors import UnsplittableBatchError
from lightning_accum.splitting.memory import MicroBatchSizes
from lightning_accum.splitting.micro_batch import Layout, Tokens
from lightning_accum.splitting.packed import PackedBatches
from lightning_accum.splitting.packing import MicroBatchSize, Packer, RowSlice
from lightning_accum.splitting.padding import AmbiguousDims, Spans, read_spans
from lightning_accum.splitting.proofs import Proof, TrimmingCheck
from lightning_accum.weighing.counts import count_samples

Split: TypeAlias = Callable[[Any, int], Sequence[Any]]
"""Cuts a batch into micro-batches of so many samples (or tokens, for a size in :class:`Tokens`)."""


T = TypeVar("T")


class Mark(NamedTuple):
    """Where a window stands before an attempt at a loader batch.

    Attributes:
        undo: undoes what the attempt did to the window and to the gradients.
        accumulated: parameters whose gradients hold earlier batches of the window; None where there are none.
    """

    undo: Callable[[], None]
    accumulated: Iterable[nn.Parameter] | None


@dataclass
class Plan:
    """A batch as micro-batches, each made when it is asked for.

    Attributes:
        batch: the whole batch.
        pieces: what each micro-batch is made of.
        make: makes one.
        order: the rows of the batch in the order of the micro-batches; None where they keep theirs.
        is_whole: the batch is one micro-batch, as it came.
        tensors: those of the batch.
        is_read: what a micro-batch is made of are rows of the batch.
        current: the micro-batch that was asked for last.
    """

    batch: Any
    pieces: Sequence[RowSlice]
    make: Callable[[RowSlice], Any]
    order: list[int] | None = None
    is_whole: bool = False
    tensors: Sequence[Tensor] = ()
    is_read: bool = True
    current: int = 0

    @property
    def rows(self) -> int | None:
        """The samples of the current micro-batch, where it is known to be made of them."""
        return self.pieces[self.current].count if self.is_read else None

    def note(self, error: Exception) -> None:
        """Add to an error which micro-batch raised it (Python 3.10 shows no notes)."""
        if self.is_whole or not hasattr(error, "add_note"):
            return
        piece, found = self.pieces[self.current], ""
        if self.is_read:
            rows = range(piece.count) if piece.rows == slice(None) else piece.rows
            rows = list(range(rows.start, rows.start + piece.count)) if isinstance(rows, slice) else list(rows)
            more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
            columns = " and ".join(f"columns {c.start} to {c.stop - 1} of {size}" for size, c in piece.columns.items())
            found = f", row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:8]))}{more} of the loader batch"
            found += f", {columns}" if columns else ", with all columns"
        hint = ""
        if self.is_read and not piece.columns:
            hint = (
                " Where the step takes the longest row for the number of columns, name the lengths: trim_padding=<their key>, or"
                ' trim_padding="lengths" for encoder_lengths and decoder_lengths.'
            )
        error.add_note(
            f"GradientAccumulation(micro_batch=...) has split the batch: this was micro-batch {self.current} of"
            f" {len(self.pieces)}{found}.{hint}"
        )

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches, one at a time."""
        for index, piece in enumerate(self.pieces):
            self.current = index
            yield self.batch if self.is_whole else self.make(piece)


class Planner:
    """Plans every batch of a training.

    Args:
        size: of a micro-batch: samples, padded tokens, or ``"auto"``.
        sizes: with ``"auto"``, what was found to fit.
        trim: whether to trim padding; or the key of the lengths of rows, see :func:`read_spans`.
        split: cuts batches that :class:`Layout` cannot.
        warn: takes a warning that should be seen once.
        samples: returns how many samples the loader puts into a batch; empty where it does not say so.
    """

    def __init__(
        self,
        size: MicroBatchSize,
        sizes: MicroBatchSizes | None = None,
        trim: bool | str = True,
        split: Split | None = None,
        warn: Callable[[str], None] = print,
        samples: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        self._size = size
        self._sizes = sizes
        self._trim = trim
        self._split = split
        self._warn = warn
        self._ambiguous = AmbiguousDims()
        self.proofs = TrimmingCheck(warn)
        """What was found out about padding."""
        self._kinds: dict[str, str] | None = None
        self._seen: tuple[Any, dict[int, Spans]] | None = None
        self._samples = samples
        self._packed = PackedBatches(samples, warn)
        self.packer = Packer(size, sizes, warn)
        self.description = ""
        """What was understood of the first batch, in words."""

    def look_at(self, batch: Any) -> None:
        """See a batch that is still on the host, where its lengths can be read without waiting for a device."""
        if self._trim and self._split is None:
            layout = self._layout_of(batch)
            if not self.packer.fits(layout):
                self._seen = (_shapes(layout), self._read_spans(layout))

    def prove_again(self) -> None:
        """What a loss depends on may change in a training: ask again where trimming was found right."""
        self.proofs.forget_what_was_right()

    def plan(self, batch: Any, proof: Proof) -> Plan:
        """Plan one batch.

        Args:
            batch: as ``training_step`` would get it.
            proof: asked once for either side on which rows are padded, before they are trimmed there.

        Raises:
            UnsplittableBatchError: there are no rows to be found in it, or no columns for :class:`Tokens`.
            LengthsNotFoundError: the key for lengths is not in the batch.
        """
        seen, self._seen = self._seen, None
        if self._split is not None:
            return self._plan_by_function(batch, self._split)
        layout = self._layout_of(batch)
        spans = self.trimmable(layout, proof, seen[1] if seen is not None and seen[0] == _shapes(layout) else None)
        pieces, order = self.packer.pack(layout, spans)
        if not self.description:
            self.description = self._describe(layout, bool(spans))
        is_whole = len(pieces) == 1 and not pieces[0].columns
        tensors = [*layout.tensors.values(), *layout.shared_tensors.values()]
        return Plan(batch, pieces, lambda piece: layout.taken(piece.selector), order, is_whole, tensors)

    def trimmable(self, layout: Layout, proof: Proof, seen: dict[int, Spans] | None = None) -> dict[int, Spans]:
        """Where rows begin and end, as far as the padding around them may be trimmed; empty where nothing is to be."""
        if not self._trim or self.packer.fits(layout):
            return {}
        return self.proofs.trimmable(layout, self._read_spans(layout) if seen is None else seen, proof)

    def _layout_of(self, batch: Any) -> Layout:
        layout = Layout.read(batch, self._kinds, self._samples())
        self._packed.check(layout, is_first=self._kinds is None)
        self._kinds = layout.kinds
        return layout

    def _may_be_padded(self, layout: Layout) -> bool:
        tensors = layout.tensors.items()
        return isinstance(self._trim, str) or any(
            "mask" in path or (tensor.dim() > 1 and not tensor.is_floating_point()) for path, tensor in tensors
        )

    def _read_spans(self, layout: Layout) -> dict[int, Spans]:
        if not self._may_be_padded(layout):
            return {}
        spans = read_spans(layout.tensors, self._trim if isinstance(self._trim, str) else None)
        return self._ambiguous.without(spans, layout.tensors, layout.shared_tensors)

    def _plan_by_function(self, batch: Any, split: Split) -> Plan:
        if isinstance(self._size, int):
            size = self._size
        elif isinstance(self._size, Tokens):
            size = self._size.at(0)
        else:
            assert self._sizes is not None
            size = self._sizes.size_for(1, len(_cut(split, batch, 1)))
        micro_batches = _cut(split, batch, size)
        self.description = self.description or f"cut by {getattr(split, '__name__', split)}"
        counts = [min(size, count_samples(micro_batch) or size) for micro_batch in micro_batches]
        pieces = [RowSlice([index], count, 1) for index, count in enumerate(counts)]

        def make(piece: RowSlice) -> Any:
            assert isinstance(piece.rows, list)
            return micro_batches[piece.rows[0]]

        return Plan(batch, pieces, make, is_whole=len(micro_batches) == 1 and micro_batches[0] is batch, is_read=False)

    def _describe(self, layout: Layout, is_sorted: bool) -> str:
        parts = ["longest rows first, trimmed to the longest of each"] if is_sorted else []
        if layout.shared_tensors:
            shared = ", ".join(f"{path} {tuple(tensor.shape)}" for path, tensor in layout.shared_tensors.items())
            parts.append(f"all of them share {shared}")
        return ", ".join(parts)


class Splitting:
    """How the loader batches of a training are split, and the one that is under way.

    Args:
        has_ranks: there are other ranks. What is logged in a split batch is reduced over them at its end, so for batches that are
            not split it has to be at their end too.
    """

    def __init__(
        self,
        size: MicroBatchSize,
        trim: bool | str,
        split: Split | None,
        has_ranks: bool,
        warn: Callable[[str], None],
        samples: Callable[[], Collection[int]] = frozenset,
        sizes: MicroBatchSizes | None = None,
    ) -> None:
        self.size = size
        self.sizes = sizes
        """What was found to fit into memory; None where a batch runs once, whatever comes of it."""
        self.planner = Planner(size, sizes, trim, split, warn, samples)
        self.plan: Plan | None = None
        """That of the loader batch under way; None where it runs as it is."""
        self.largest: int | None = None
        """With ``"auto"``, the samples in the largest micro-batch of the last batch."""
        self._rows_of_whole: int | None = None
        self._may_be_whole = not (has_ranks or sizes is not None)

    def begin(self, batch: Any, proof: Proof) -> None:
        """Plan a loader batch."""
        plan = self._planned(batch, proof)
        self.plan = None if plan.is_whole and self._may_be_whole else plan
        self._rows_of_whole = plan.rows

    def _planned(self, batch: Any, proof: Proof) -> Plan:
        return self.planner.plan(batch, proof)

    @property
    def rows(self) -> int | None:
        """The samples of the micro-batch under way, where it is known to be made of them."""
        return self._rows_of_whole if self.plan is None else self.plan.rows

    def run(self, attempt: Callable[[Plan], T], mark: Callable[[], Mark]) -> T:
        """Run the loader batch under way."""
        assert self.plan is not None
        try:
            return attempt(self.plan)
        except Exception as error:
            self.plan.note(error)
            raise

    def describe(self) -> str:
        """What is done to a loader batch, in words."""
        if isinstance(self.size, Tokens):
            size = f"in micro-batches of up to {self.size.count} tokens, padding included"
        elif self.size == "auto":
            size = "in micro-batches as large as memory allows"
        else:
            size = f"in micro-batches of {self.size}"
        return ", ".join(part for part in (size, self.planner.description) if part)


def _cut(split: Split, batch: Any, size: int) -> Sequence[Any]:
    micro_batches = split(batch, size)
    if not isinstance(micro_batches, Sequence) or not micro_batches:
        raise UnsplittableBatchError(f"split={split} must return the micro-batches as a list, but returned {micro_batches!r}")
    return micro_batches


def _shapes(layout: Layout) -> list[tuple[str, Any]]:
    return [(path, tensor.shape) for path, tensor in layout.tensors.items()]
