"""Manual optimization of a window: the module's own backwards and steps, some of which are deferred."""

from __future__ import annotations

import math
from collections import OrderedDict
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
        strategy, manual, before = self.strategy, self.strategy.manual, self.optim_step_progress.total.completed
        batch = next(iter(kwargs.values()), None)
        with strategy.around_loader_batch(kwargs), strategy.running_row_wise(batch):
            if manual is None:
                outputs, closed, loader_batches = super().run(kwargs), list[ClosedWindow](), 1
            else:
                epoch_loop = cast("AccumulatingEpochLoop", self.trainer.fit_loop.epoch_loop)
                is_boundary = epoch_loop.begin_loader_batch(manual.boundary, "_ManualOptimization")
                manual.check_batch(True, is_boundary)
                check_manual_batch(self.trainer, strategy, kwargs)
                manual.begin_training_step(batch, is_boundary)
                outputs, loader_batches = super().run(kwargs), manual.boundary.position(epoch_loop.begun)
                manual.end_training_step(epoch_loop.begun)
                manual.announce(batch, self.trainer.accumulate_grad_batches, strategy.samples_of_loader())
                if not is_boundary:
                    return outputs
                strategy.end_window()
                closed = manual.closed
            if self.optim_step_progress.total.completed > before:
                window = closed[0] if closed else ClosedWindow(math.nan, math.nan, 1)  # if nothing was weighed
                call_window_hooks(self.trainer, window._replace(loader_batches=loader_batches, has_stepped=not window.is_empty))
        return outputs

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
