"""Manual optimization of a window: the module's own backwards and steps, some of which are deferred."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from typing_extensions import override

if TYPE_CHECKING:
    from lightning_accum.engine import Engine
from lightning_accum.loops.epochs import AccumulatingEpochLoop


class WindowManualOptimization(_ManualOptimization):
    """Counts the steps that are not deferred, and tells where a micro-batch begins and ends."""

    strategy: Engine

    @override
    def run(self, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        batch = next(iter(kwargs.values()), None)
        with self.strategy.around_loader_batch(kwargs), self.strategy.running_row_wise(batch):
            return self._run(kwargs, batch)

    def _run(self, kwargs: OrderedDict[str, Any], batch: Any) -> dict[str, Any]:
        manual = self.strategy.manual
        if manual is None:
            return super().run(kwargs)
        epoch_loop = cast("AccumulatingEpochLoop", self.trainer.fit_loop.epoch_loop)
        is_boundary = epoch_loop.begin_loader_batch(manual.windows.boundary, "_ManualOptimization")
        self.strategy.begin_manual_loader_batch()
        manual.windows.begin_training_step(batch, is_boundary)
        outputs = super().run(kwargs)
        manual.windows.end_training_step(epoch_loop.batch_progress.total.ready)
        manual.announce(batch, self.trainer.accumulate_grad_batches)
        if is_boundary:
            self.strategy.end_manual_window()
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
        return self.strategy.manual is not None and self.strategy.manual.windows.current.defers_steps
