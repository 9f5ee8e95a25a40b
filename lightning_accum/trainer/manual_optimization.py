"""Manual optimization of a window: the module's own backwards and steps, some of which are deferred."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from lightning_accum.trainer.from_lightning import _ManualOptimization
from lightning_accum.window_totals import ClosedWindow

if TYPE_CHECKING:
    from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.epochs import AccumulatingEpochLoop
from lightning_accum.trainer.first_batch import check_manual_batch
from lightning_accum.trainer.watch import call_window_hooks


class WindowManualOptimization(_ManualOptimization):
    """Counts the steps that are not deferred, and begins and ends micro-batches."""

    strategy: Engine

    @override
    def run(self, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        """Run ``training_step`` on a loader batch, which calls the optimizers by itself."""
        batch = next(iter(kwargs.values()), None)
        with self.strategy.around_loader_batch(kwargs), self.strategy.running_row_wise(batch):
            return self._run(kwargs, batch)

    def _run(self, kwargs: OrderedDict[str, Any], batch: Any) -> dict[str, Any]:
        manual, before = self.strategy.manual, self.optim_step_progress.total.completed
        if manual is None:
            outputs = super().run(kwargs)
            self._call_window_hooks([], 1, before)
            return outputs
        epoch_loop = cast("AccumulatingEpochLoop", self.trainer.fit_loop.epoch_loop)
        is_boundary = epoch_loop.begin_loader_batch(manual.boundary, "_ManualOptimization")
        manual.check_batch(True, is_boundary)
        check_manual_batch(self.trainer, self.strategy, kwargs)
        manual.begin_training_step(batch, is_boundary)
        outputs = super().run(kwargs)
        seen = epoch_loop.batch_progress.total.ready
        size = manual.boundary.position(seen)
        manual.end_training_step(seen)
        manual.announce(batch, self.trainer.accumulate_grad_batches, self.strategy.samples_of_loader())
        if is_boundary:
            self.strategy.end_window()
            self._call_window_hooks(manual.closed, size, before)
        return outputs

    def _call_window_hooks(self, closed: Sequence[ClosedWindow], loader_batches: int, before: int) -> None:
        """A window has ended.

        Args:
            closed: what it was for each call of ``manual_backward``; none where nothing was weighed.
            loader_batches: of each rank.
            before: optimizer steps before its last loader batch.
        """
        if self.optim_step_progress.total.completed > before:
            first = closed[0] if closed else ClosedWindow(math.nan, math.nan, 1)
            call_window_hooks(self.trainer, first._replace(loader_batches=loader_batches, has_stepped=not first.is_empty))

    @override
    def _on_before_step(self) -> None:
        if not self._defers_steps():
            super()._on_before_step()

    @override
    def _on_after_step(self) -> None:
        if not self._defers_steps():
            super()._on_after_step()

    def _defers_steps(self) -> bool:
        return self.strategy.manual is not None and self.strategy.manual.current.defers_steps
