"""The loop over the batches of an epoch: when a window ends, and what is due then."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from lightning_accum.boundary import Boundary
from lightning_accum.splitting.micro_batch import Tokens
from lightning_accum.trainer import seams
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.first_batch import check_manual_batch
from lightning_accum.trainer.from_lightning import _DataFetcher, pl, rank_zero_info
from lightning_accum.trainer.optimization import WindowOptimization
from lightning_accum.trainer.uneven import WindowFetcher, is_agreeing
from lightning_accum.trainer.validation import ValidatingEpochLoop
from lightning_accum.trainer.watch import call_batch_end
from lightning_accum.user_warnings import rank_zero_warn

if TYPE_CHECKING:
    from lightning_accum.accumulation import Accumulation
    from lightning_accum.trainer.manual import ManualWindows


class AccumulatingEpochLoop(ValidatingEpochLoop):
    """Windows end where the boundary says; schedulers step when their clock says."""

    strategy: Engine
    begins_anew: bool = False
    """The epoch of the checkpoint is over."""
    batch: Any = None
    """The last loader batch, where a callback is to get it that counts optimizer steps."""
    begun: int = 0
    """The loader batch that began last, counted from 1 over all epochs."""
    _advanced: int = 0
    """That which :meth:`advance` was called for."""
    _inspected: Any = None
    _takes_batch_idx: bool = False

    @override
    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        if self.begins_anew:
            fit_loop = self.trainer.fit_loop
            fit_loop._restarting = self.restarting = self.begins_anew = False
            # without a length a batch has been drawn ahead, which is the new epoch's first
            fit_loop._resuming_from_checkpoint = data_fetcher.length is None and not data_fetcher.done
            self.reset_restart_stage()
            self.reset()
        if self.begun > self.batch_progress.total.ready:  # the batch size finder sets the progress back
            self.begun = 0
        super().on_run_start(data_fetcher)

    @override
    def advance(self, data_fetcher: _DataFetcher) -> None:
        self._advanced = self.batch_progress.total.ready + 1
        if self.strategy.manual is not None:
            self.strategy.manual.begin_loader_batch()
        super().advance(data_fetcher)

    @property
    @override
    def done(self) -> bool:
        return super().done and not self._is_in_counted_window

    @property
    def _is_in_counted_window(self) -> bool:
        """Its terms are divided by what all of it has, so training does not stop inside."""
        fetcher = self.trainer.fit_loop._data_fetcher
        return isinstance(fetcher, WindowFetcher) and fetcher.is_ahead

    @override
    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        if self.strategy.accumulation is not None:
            self.strategy.accumulation.is_shadow_batch = False
        if self.strategy.manual is not None:
            self.strategy.manual.leave_loader_batch()
        self.strategy.rows.flush()
        if self.validation is not None and self.validation.is_due(self.global_step):
            self.validation.begin(self.global_step, self.batch_progress.total.ready)
        super().on_advance_end(data_fetcher)

    @override
    def _broadcast_sigterm_tensor(self) -> None:
        if not is_agreeing(self.trainer):
            super()._broadcast_sigterm_tensor()

    @override
    def _should_accumulate(self) -> bool:
        boundary, seen = self._boundary, self.batch_progress.total.ready
        if boundary is None:
            return super()._should_accumulate()
        if self.begun == seen:  # asked five times a loader batch
            return seen < boundary.ends_at
        return not (self._is_cut_by_the_end(boundary) or boundary.is_reached(seen, self.window_size))

    @property
    def _boundary(self) -> Boundary | None:
        """Decides where windows end; None where Lightning does."""
        return None if self.strategy.windows is None else self.strategy.windows.boundary

    def window_size(self) -> float:
        """Loader batches in a window that begins now; inf for tokens, which are counted after it."""
        return math.inf if isinstance(self.strategy.policy.window, Tokens) else self.trainer.accumulate_grad_batches

    def begin_loader_batch(self, boundary: Boundary, runs: str) -> bool:
        """A loader batch begins, and a window with it, unless one is under way.

        Returns:
            Whether the window ends with it.
        """
        seen = self.batch_progress.total.ready
        if seen == self.begun or seen != self._advanced:
            raise seams.broken(f"{runs}.run was called twice for a loader batch, or not by _TrainingEpochLoop.advance.")
        self.begun = seen
        if not boundary.is_under_way:
            boundary.begin(self.window_size())
        if seen < boundary.ends_at and self._is_cut_by_the_end(boundary):
            boundary.cut_short(seen)
        return seen >= boundary.ends_at

    def _is_cut_by_the_end(self, boundary: Boundary) -> bool:
        """The data end with this loader batch, and so does the window."""
        if not self._num_ready_batches_reached():
            return False
        fit_loop = self.trainer.fit_loop
        epochs_done = fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]  # the tracker of epochs has it
        return boundary.is_cut_by_the_end(fit_loop.max_epochs not in (None, -1) and bool(epochs_done + 1 >= fit_loop.max_epochs))

    @override
    def run(self, data_fetcher: _DataFetcher) -> None:
        self.strategy.watch.begin_epoch(self.trainer.current_epoch)
        super().run(data_fetcher)
        if self.strategy.policy.tail != "carry":
            self.finish_window()
            self.validate_if_due()
        self.batch = None

    @override
    def _should_check_val_epoch(self) -> bool:
        if self.trainer.should_stop and self._is_in_counted_window:  # Lightning validates where it stops
            return False
        return super()._should_check_val_epoch()

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

    def end_loader_batch(self, accumulation: Accumulation, seen: int) -> None:
        """A loader batch has ended: so does the window, if it is one of tokens and has come to them."""
        accumulation.end_loader_batch(seen)
        if accumulation.boundary.size != math.inf or accumulation.boundary.position(seen) <= 0:
            return
        if accumulation.is_full() or self._is_cut_by_the_end(accumulation.boundary):  # the first is asked on all ranks
            accumulation.boundary.cut_short(seen)
            self.optimization.step_without_batch()

    def finish_window(self) -> None:
        """An unfinished window meets the end of its epoch, or of the training."""
        accumulation = self.strategy.accumulation
        seen = self.batch_progress.total.ready
        if self.strategy.manual is not None:
            self._drop_manual_window(self.strategy.manual, seen)
            return
        if accumulation is None or accumulation.boundary.position(seen) <= 0:
            return
        if accumulation.policy.tail == "drop":
            self._report_dropped(accumulation.discard(seen))
            self.strategy.sync.drop_accumulated()
            self.strategy.module.zero_grad()
            return
        accumulation.boundary.cut_short(seen)
        steps = self.global_step
        self.optimization.step_without_batch()
        # and what Lightning does at the end of a loader batch that ends a window
        has_stepped, closed = self.global_step > steps, accumulation.closed
        ended = self.trainer, {"loss": None if closed is None else closed.loss}, self.batch, self.batch_idx
        if has_stepped:
            call_batch_end(pl.callbacks.WeightAveraging, *ended)
        self.strategy.rows.flush()
        self._update_learning_rates("step", update_plateau_schedulers=False)
        self._update_learning_rates("step", update_plateau_schedulers=True)
        self._batches_that_stepped += has_stepped
        if has_stepped:
            call_batch_end(pl.callbacks.ModelCheckpoint, *ended)

    def _drop_manual_window(self, windows: ManualWindows, seen: int) -> None:
        """Only the module's own training_step steps, and no loader batch is left for it to do so."""
        lost = windows.discard(seen)
        if lost > 0 and windows.policy.tail == "drop":
            self._report_dropped(lost)
        elif lost > 0:
            rank_zero_warn(
                f"Training ended inside a window, and the module steps by itself: the gradients of the last {lost} loader batches"
                " are dropped."
            )

    def _report_dropped(self, lost: int) -> None:
        rank_zero_info(
            f"GradientAccumulation(tail='drop'): the gradients of {lost} loader batches at the end of epoch"
            f" {self.trainer.current_epoch} are dropped."
        )

    @override
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        is_of_steps = interval == "step"
        # the first thing that Lightning does after every loader batch, also where it was None and nothing ran
        if is_of_steps and not update_plateau_schedulers and self.batch_progress.total.ready != self.begun:
            self._end_batch_that_did_not_run()
        if self.strategy.lr_scheduler_configs and not (is_of_steps and self._should_accumulate()):
            self._update_learning_rates(interval, update_plateau_schedulers)

    def _end_batch_that_did_not_run(self) -> None:
        progress = self.batch_progress
        is_forgotten = progress.current.started < progress.current.ready  # type: ignore[attr-defined]  # the tracker has it
        # on_train_batch_start ends an epoch with a batch that Lightning then calls the last
        ends_epoch = is_forgotten and progress.is_last_batch and progress.current.ready < self.trainer.num_training_batches
        if ends_epoch and self._boundary is not None and not self._boundary.is_under_way:
            self._boundary.close(progress.total.ready)
            return
        if is_forgotten and not ends_epoch:
            progress.increment_started()  # which it forgets for None, and then resumes one batch too early
        elif not is_forgotten and self._boundary is not None:
            runs = "_AutomaticOptimization" if self.strategy.manual is None else "_ManualOptimization"
            raise seams.broken(f"A loader batch was trained on without a call of {runs}.run.")
        if self.strategy.accumulation is not None:
            self.optimization.run_without_batch()
        elif self.strategy.manual is not None:
            windows = self.strategy.manual
            windows.check_batch(False, self.begin_loader_batch(windows.boundary, "_ManualOptimization"))
            check_manual_batch(self.trainer, self.strategy, {})
            windows.end_loader_batch(progress.total.ready)

    @property
    def optimization(self) -> WindowOptimization:
        """The loop of automatic optimization, by its own type."""
        return cast("WindowOptimization", self.automatic_optimization)

    @override
    def _update_learning_rates(self, interval: str, update_plateau_schedulers: bool) -> None:
        strategy = self.strategy
        if interval != "step" or strategy.accumulation is None:
            super()._update_learning_rates(interval, update_plateau_schedulers)
            return
        # Lightning counts loader batches of the epoch; what is due is decided here, and stepped by Lightning
        clock = strategy.accumulation.clock
        configs = strategy.lr_scheduler_configs
        if not configs:
            return
        due: list[pl.utilities.types.LRSchedulerConfig] = []
        for config in configs if strategy.watch.take_turn(update_plateau_schedulers) else ():
            if config.interval == "step":
                due += [replace(config, frequency=1)] * clock.times_due(config.frequency)
        strategy.lr_scheduler_configs = due
        try:
            with strategy.watch.ticks([] if update_plateau_schedulers else due):
                super()._update_learning_rates(interval, update_plateau_schedulers)
        finally:
            strategy.lr_scheduler_configs = configs
        if update_plateau_schedulers:  # they come last: a loader batch may end after the last of its windows
            clock.hold()
