"""Manual optimization of a window: the module's own backwards and steps, some of which wait."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from typing_extensions import override

if TYPE_CHECKING:
    from lightning_accum.mixin import AccumulationMixin


class WindowManualOptimization(_ManualOptimization):
    """Counts the steps that do not wait, and tells where a micro-batch begins and ends."""

    strategy: AccumulationMixin

    @override
    def run(self, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        if self.strategy.manual is None:
            return super().run(kwargs)
        windows, epoch_loop = self.strategy.manual.windows, self.trainer.fit_loop.epoch_loop
        windows.begin_micro_batch(next(iter(kwargs.values()), None), is_boundary=not epoch_loop._should_accumulate())
        self.strategy.begin_manual_micro_batch()
        outputs = super().run(kwargs)
        windows.end_micro_batch(epoch_loop.batch_progress.total.ready)
        if windows.is_boundary:
            self.strategy.end_manual_window()
        return outputs

    @override
    def _on_before_step(self) -> None:
        if self.strategy.manual is None or not self.strategy.manual.windows.waits:
            super()._on_before_step()

    @override
    def _on_after_step(self) -> None:
        if self.strategy.manual is None or not self.strategy.manual.windows.waits:
            super()._on_after_step()
