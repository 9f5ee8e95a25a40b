"""A loader batch runs as micro-batches; out of memory, it is as if it had not run, and it runs again in smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_accum.splitting.memory import MicroBatchSizes, free, has_room_to_double, is_out_of_memory
from lightning_accum.splitting.micro_batch import Tokens
from lightning_accum.splitting.packing import MicroBatchSize, Piece
from lightning_accum.splitting.plan import Plan, Planner, Split
from lightning_accum.splitting.proofs import Proof
from lightning_accum.splitting.snapshot import StateSnapshotter

T = TypeVar("T")


class Splitting:
    """How the loader batches of a training are split.

    Args:
        size: of a micro-batch.
        trim: whether to trim padding, or the key that tells lengths.
        split: cuts batches that cannot be read.
        module: what runs them.
        device: where.
        has_ranks: there are other ranks. What is logged in a split batch is reduced over them at its end, so for batches that are
            not split it has to be at their end too.
        warn: takes a warning that should be seen once.
        say: takes a line for the log of this rank.
        samples: returns how many samples the loader puts into a batch; empty where it does not say so.
    """

    def __init__(
        self,
        size: MicroBatchSize,
        trim: bool | str,
        split: Split | None,
        module: nn.Module,
        device: torch.device,
        has_ranks: bool,
        warn: Callable[[str], None],
        say: Callable[[str], None],
        samples: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        self.size = size
        self.is_retried = size == "auto"
        """An attempt at a batch may fail, so nothing of it may be irrevocable."""
        self.sizes = MicroBatchSizes(may_grow=lambda _: has_room_to_double(device)) if self.is_retried else None
        self.planner = Planner(size, self.sizes, trim, split, warn, samples)
        self.plan: Plan | None = None
        """The batch in hand; None where it runs as it is."""
        self._rows_of_whole: int | None = None
        self.largest: int | None = None
        """With ``"auto"``, the samples in the largest micro-batch of the last batch."""
        self.snapshotter = StateSnapshotter(module, device)
        self._device = device
        self._may_be_whole = not (has_ranks or self.is_retried)
        self._say = say
        self._proof: Proof = lambda padded, trimmed: None

    def begin(self, batch: Any, proof: Proof) -> None:
        """Plan a batch."""
        self._proof = proof
        plan = self._planned(batch)
        self.plan = None if plan.is_whole and self._may_be_whole else plan
        self._rows_of_whole = plan.rows

    @property
    def rows(self) -> int | None:
        """The samples of the current micro-batch, where it is known to be made of them."""
        return self._rows_of_whole if self.plan is None else self.plan.rows

    @property
    def pieces(self) -> Sequence[Piece]:
        """The micro-batches of the batch in hand."""
        assert self.plan is not None
        return self.plan.pieces

    @property
    def failed(self) -> Piece | None:
        """The micro-batch that raised an error; None where smaller ones would not have helped."""
        assert self.plan is not None
        return self.plan.pieces[self.plan.current]

    def run(self, attempt: Callable[[Plan], T], discard: Callable[[], None], accumulated: Iterable[nn.Parameter] | None) -> T:
        """Run the batch in hand, as often as it takes.

        Args:
            attempt: runs a plan.
            discard: undoes what an attempt did to the window and to the gradients.
            accumulated: parameters whose gradients hold earlier batches of the window; None where there are none.

        Raises:
            torch.OutOfMemoryError: with ``"auto"``, where a micro-batch of one sample does not fit.
        """
        assert self.plan is not None
        if self.sizes is None:
            try:
                return attempt(self.plan)
            except Exception as error:
                self.plan.note(error)
                raise
        snapshot = self.snapshotter.take(accumulated)
        versions = [tensor._version for tensor in self.plan.tensors]
        while True:
            try:
                result = attempt(self.plan)
            except Exception as error:
                piece = self.failed
                if piece is None or not is_out_of_memory(error):
                    self.plan.note(error)
                    raise
                seen = str(error).strip().partition("\n")[0]
            else:
                self.sizes.end_batch(self.pieces)
                self.largest = max((piece.count for piece in self.pieces), default=None)
                return result
            if [tensor._version for tensor in self.plan.tensors] != versions:
                raise RuntimeError(
                    'training_step changed its batch in place; micro_batch="auto" cannot take that back when memory runs out.'
                    " Change a copy, or use a fixed micro_batch."
                )
            # out of the handler: its traceback held on to what the attempt had allocated
            discard()
            snapshot.restore()
            free(self._device)
            rows = self.sizes.halve(piece.cost, piece.count)
            self._say(
                f'GradientAccumulation(micro_batch="auto"): {piece.count} samples of {piece.cost} elements do not fit into memory'
                f" ({seen}). The batch runs again in micro-batches of {rows}."
            )
            self.plan = self._planned(self.plan.batch)

    def _planned(self, batch: Any) -> Plan:
        plan = self.planner.plan(batch, self._proof)
        if self.is_retried:  # a container of its own each time: `batch.pop("labels")` must not be felt in the next attempt
            plan.is_whole = False
        return plan

    def describe(self) -> str:
        """What is done to a loader batch, in words."""
        if isinstance(self.size, Tokens):
            size = f"in micro-batches of up to {self.size.count} tokens, padding included"
        elif self.size == "auto":
            size = "in micro-batches as large as memory allows"
        else:
            size = f"in micro-batches of {self.size}"
        return ", ".join(part for part in (size, self.planner.description) if part)
