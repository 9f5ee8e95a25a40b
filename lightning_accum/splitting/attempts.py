"""Out of memory, it is as if a loader batch had not run, and it runs again in smaller micro-batches: only with ``"auto"``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
from typing_extensions import override

from lightning_accum.errors import UsageError
from lightning_accum.splitting.memory import MicroBatchSizes, free, is_out_of_memory
from lightning_accum.splitting.plan import Mark, Plan, RowSlice, Split, Splitting
from lightning_accum.undo import Undo

T = TypeVar("T")


class RetriedSplitting(Splitting):
    """Runs each loader batch as often as it takes, in micro-batches as large as memory allows.

    Args:
        snapshotter: of the module that runs them.
        device: where.
        say: takes a line for the log of this rank.
        sizes: what was found to fit; None for nothing so far.
    """

    sizes: MicroBatchSizes

    def __init__(
        self,
        trim: bool | str,
        split: Split | None,
        snapshotter: Undo,
        device: torch.device,
        warn: Callable[[str], None],
        say: Callable[[str], None],
        samples: Callable[[], Collection[int]] = frozenset,
        sizes: MicroBatchSizes | None = None,
    ) -> None:
        super().__init__("auto", trim, split, has_ranks=True, warn=warn, samples=samples, sizes=sizes or MicroBatchSizes())
        self._snapshotter = snapshotter
        self._device = device
        self._say = say

    @property
    def pieces(self) -> Sequence[RowSlice]:
        """The micro-batches of the loader batch under way."""
        assert self.plan is not None
        return self.plan.pieces

    @property
    def failed(self) -> RowSlice | None:
        """The micro-batch that raised an error; None where smaller ones would not have helped."""
        assert self.plan is not None
        return self.plan.pieces[self.plan.current]

    @override
    def run(self, attempt: Callable[[Plan], T], mark: Callable[[], Mark]) -> T:
        """Run the loader batch under way, as often as it takes.

        Args:
            attempt: runs a plan.
            mark: called before the first attempt, returns what undoes one.

        Raises:
            torch.OutOfMemoryError: a micro-batch of one sample does not fit.
        """
        assert self.plan is not None
        before = mark()
        snapshot = self._snapshotter.take(before.accumulated)
        versions = [tensor._version for tensor in self.plan.tensors]
        while True:
            failed, seen = None, ""
            try:
                result = attempt(self.plan)
            except Exception as error:
                failed = self.failed
                if failed is None or not is_out_of_memory(error):
                    self.plan.note(error)
                    raise
                seen = str(error).strip().partition("\n")[0]
            # out of the handler: its traceback held on to what the attempt had allocated
            if failed is None:
                self.sizes.end_batch([(piece.cost, piece.count) for piece in self.pieces])
                self.largest = max((piece.count for piece in self.pieces), default=None)
                return result
            if [tensor._version for tensor in self.plan.tensors] != versions:
                raise UsageError(
                    'training_step changed its batch in place; micro_batch="auto" cannot take that back when memory runs out.'
                    " Change a copy, or use a fixed micro_batch."
                )
            before.undo()
            snapshot.restore()
            free(self._device)
            rows = self.sizes.halve(failed.cost, failed.count)
            self._say(
                f'GradientAccumulation(micro_batch="auto"): {failed.count} samples of {failed.cost} elements do not fit into'
                f" memory ({seen}). The batch runs again in micro-batches of {rows}."
            )
            self.plan = self._planned(self.plan.batch)

    @override
    def _planned(self, batch: Any) -> Plan:
        plan = super()._planned(batch)
        plan.is_whole = False  # a container of its own each time: `batch.pop("labels")` must not be felt in the next attempt
        return plan
