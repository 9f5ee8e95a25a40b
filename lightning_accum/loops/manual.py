"""Manual optimization of a window: the module's own backwards and steps, some of which wait."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.loops.optimization.manual import ManualResult, _ManualOptimization
from typing_extensions import override

from lightning_accum.lock_step.thread_state import carried
from lightning_accum.loops.results import collecting_logs, current_hook, show_logs
from lightning_accum.splitting.outputs import Outputs
from lightning_accum.splitting.plan import Plan

if TYPE_CHECKING:
    from lightning_accum.loops.epochs import AccumulatingEpochLoop
    from lightning_accum.strategies.mixin import AccumulationMixin


class WindowManualOptimization(_ManualOptimization):
    """Counts the steps that do not wait, and tells where a micro-batch begins and ends."""

    strategy: AccumulationMixin
    _plan: Plan | None = None
    _is_boundary: bool = True

    @override
    def run(self, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        self.strategy.watch.run("_ManualOptimization")
        with self.strategy.around_loader_batch(kwargs):
            outputs = self._run(kwargs)
        self.strategy.watch.end_run(is_manual=True)
        return outputs

    def _run(self, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        manual = self.strategy.manual
        if manual is None:
            return super().run(kwargs)
        epoch_loop, batch = cast("AccumulatingEpochLoop", self.trainer.fit_loop.epoch_loop), next(iter(kwargs.values()), None)
        self._is_boundary, self._plan = epoch_loop.begin_loader_batch(manual.windows.boundary), manual.plan(batch)
        self.strategy.begin_manual_loader_batch()
        if self._plan is None:
            manual.windows.begin_micro_batch(batch, self._is_boundary)
        outputs = super().run(kwargs)
        manual.windows.end_loader_batch(epoch_loop.batch_progress.total.ready)
        manual.announce(batch, self.trainer.accumulate_grad_batches)
        if self._is_boundary:
            self.strategy.end_manual_window()
        return outputs

    @override
    def advance(self, kwargs: OrderedDict[str, Any]) -> None:
        if self._plan is None:
            super().advance(kwargs)
        else:
            self._run_micro_batches(kwargs, self._plan)

    def _run_micro_batches(self, kwargs: OrderedDict[str, Any], plan: Plan) -> None:
        manual = self.strategy.manual
        assert manual is not None
        windows, name = manual.windows, next(iter(kwargs))
        outputs = Outputs([piece.count for piece in plan.pieces])

        def training_step(index: int, batch: Any) -> tuple[dict[str, Any], Any]:
            try:
                output = self.strategy.training_step(*{**kwargs, name: batch}.values())
            except Exception as error:
                plan.current = index
                plan.note(error)
                raise
            return ManualResult.from_training_step_output(output).asdict(), windows.hand.weight

        with collecting_logs(self.trainer) as log, current_hook(self.trainer.lightning_module, "training_step"):

            def log_for(index: int) -> None:
                log.micro_batch = index

            if self._is_boundary:
                results = manual.run_together(list(plan), training_step, carried(self.strategy.root_device), log_for)
            else:
                results = []
                for index, micro_batch in enumerate(plan):
                    windows.begin_micro_batch(micro_batch, is_boundary=False)
                    log_for(index)
                    results.append(training_step(index, micro_batch))
        for extra, weight in results:
            outputs.add(None, weight, extra)
        log.weigh(outputs.weights, outputs.rows)
        show_logs(self.trainer, log)
        self._output = outputs.extra(plan.order)

    @override
    def _on_before_step(self) -> None:
        if self.strategy.manual is None or not self.strategy.manual.windows.waits:
            super()._on_before_step()

    @override
    def _on_after_step(self) -> None:
        if self.strategy.manual is None or not self.strategy.manual.windows.waits:
            super()._on_after_step()
