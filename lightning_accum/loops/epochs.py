"""The Trainer, its loop over epochs and its loop over the batches of one: when a window ends, and what is due then."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_accum.boundary import count_windows
from lightning_accum.listeners import callbacks_of
from lightning_accum.loops.optimization import WindowOptimization

if TYPE_CHECKING:
    from lightning_accum.mixin import AccumulationMixin


class CountingTrainer(pl.Trainer):
    """``estimated_stepping_batches`` is the number of optimizer steps that will happen."""

    @property
    @override
    def estimated_stepping_batches(self) -> int | float:
        lightnings = super().estimated_stepping_batches  # also sets up the data, and knows the cases without a length
        policy = cast("AccumulationMixin", self.strategy).policy
        batches, epochs = self.num_training_batches, self.max_epochs
        if epochs is None or epochs == -1 or batches == float("inf"):
            return lightnings
        scheduler = next((c for c in callbacks_of(self) if isinstance(c, GradientAccumulationScheduler)), None)

        def size(epoch: int) -> int:
            if scheduler is not None:
                return scheduler.get_accumulate_grad_batches(epoch)
            return policy.size_at(epoch) or self.accumulate_grad_batches

        steps = count_windows(int(batches), max(epochs, 1), size, policy.tail)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)


class AccumulatingFitLoop(_FitLoop):
    """The last window ends with the training."""

    @override
    def on_run_end(self) -> None:
        epoch_loop = cast("AccumulatingEpochLoop", self.epoch_loop)
        epoch_loop.finish_window(is_end_of_training=True)
        super().on_run_end()


class AccumulatingEpochLoop(_TrainingEpochLoop):
    """Windows end where the boundary says; schedulers step when their clock says."""

    strategy: AccumulationMixin
    _inspected: Any = None
    _takes_batch_idx = False

    @override
    def _should_accumulate(self) -> bool:
        accumulation = self.strategy.accumulation
        if accumulation is None:
            return super()._should_accumulate()
        boundary = accumulation.boundary
        if boundary.is_reached(self.batch_progress.total.ready, self.trainer.accumulate_grad_batches):
            return False
        return not (self._num_ready_batches_reached() and boundary.is_cut_by_the_end(self._is_last_epoch()))

    def _is_last_epoch(self) -> bool:
        fit_loop = self.trainer.fit_loop
        epochs_done = fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]  # the tracker of epochs has it
        return fit_loop.max_epochs not in (None, -1) and bool(epochs_done + 1 >= fit_loop.max_epochs)

    @override
    def run(self, data_fetcher: _DataFetcher) -> None:
        super().run(data_fetcher)
        accumulation = self.strategy.accumulation
        if accumulation is not None and accumulation.policy.tail != "carry":
            self.finish_window(is_end_of_training=False)

    @override
    def _build_kwargs(self, kwargs: OrderedDict[str, Any], batch: Any, batch_idx: int) -> OrderedDict[str, Any]:
        # Lightning inspects the signature of training_step again for every batch, at 20 us
        function = getattr(self.trainer.lightning_module.training_step, "__func__", None)
        if function is None or function is not self._inspected:
            self._inspected = function
            kwargs = super()._build_kwargs(kwargs, batch, batch_idx)
            self._takes_batch_idx = "batch_idx" in kwargs
            return kwargs
        kwargs["batch"] = batch
        if self._takes_batch_idx:
            kwargs["batch_idx"] = batch_idx
        return kwargs

    def finish_window(self, is_end_of_training: bool) -> None:
        """An unfinished window meets the end of its epoch, or of the training."""
        accumulation = self.strategy.accumulation
        seen = self.batch_progress.total.ready
        if accumulation is None or accumulation.boundary.position(seen) <= 0:
            return
        if accumulation.policy.tail == "drop":
            lost = accumulation.discard(seen)
            call._call_lightning_module_hook(self.trainer, "zero_grad")
            rank_zero_info(
                f"GradientAccumulation(tail='drop'): the gradients of {lost} loader batches at the end of epoch"
                f" {self.trainer.current_epoch} are dropped."
            )
            return
        accumulation.boundary.cut_short(seen)
        accumulation.is_boundary = True
        self._step_without_batch()
        if self.trainer.lightning_module.automatic_optimization:
            super().update_lr_schedulers("step", update_plateau_schedulers=False)
            super().update_lr_schedulers("step", update_plateau_schedulers=True)

    @override
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        if interval == "step":
            # the first thing that Lightning does after every loader batch, also where it was None and nothing ran
            if not update_plateau_schedulers and self.batch_progress.total.ready != self.optimization.visited:
                self._visit_skipped_batch()
            if self._should_accumulate():
                return
        self._update_learning_rates(interval, update_plateau_schedulers)

    @property
    def optimization(self) -> WindowOptimization:
        """The loop of automatic optimization, by its own type."""
        return cast("WindowOptimization", self.automatic_optimization)

    def _visit_skipped_batch(self) -> None:
        """A loader batch that ran no training_step counts in its window, with weight 0."""
        strategy, optimization, seen = self.strategy, self.optimization, self.batch_progress.total.ready
        accumulation = strategy.accumulation
        if accumulation is None:
            return
        optimization.visited = seen
        if accumulation.splitting is not None:
            accumulation.splitting.plan = None
        accumulation.is_boundary = not self._should_accumulate()
        zero_grad = optimization._make_zero_grad_fn(self.batch_idx, self.trainer.optimizers[0])
        if zero_grad is not None:  # a reduction may be next, and stale gradients must not be in it
            zero_grad()
        if accumulation.is_plain():
            accumulation.discard(seen)
            accumulation.after_optimizer_step(has_stepped=False)
        elif accumulation.is_boundary:
            self._step_without_batch()
        else:
            strategy.run_without_batch()

    def _step_without_batch(self) -> None:
        self.optimization._optimizer_step(self.batch_idx, self.strategy.run_without_batch)

    @override
    def _update_learning_rates(self, interval: str, update_plateau_schedulers: bool) -> None:
        strategy = self.strategy
        if interval != "step" or strategy.accumulation is None:
            super()._update_learning_rates(interval, update_plateau_schedulers)
            return
        # Lightning counts loader batches of the epoch; what is due is decided here, and stepped by Lightning
        clock = strategy.accumulation.clock
        configs = strategy.lr_scheduler_configs
        due = []
        for config in configs:
            if config.interval == "step":
                due += [replace(config, frequency=1)] * clock.times_due(config.frequency)
        strategy.lr_scheduler_configs = due
        try:
            super()._update_learning_rates(interval, update_plateau_schedulers)
        finally:
            strategy.lr_scheduler_configs = configs
