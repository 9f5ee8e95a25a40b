"""The loops over epochs and batches: they end windows, run what is due then, and end epochs on all ranks together."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

from typing_extensions import override

from lightning_accum.accumulation import Accumulation
from lightning_accum.boundary import TAILS, Boundary
from lightning_accum.policy import Tokens
from lightning_accum.ranks import Ranks
from lightning_accum.trainer import seams
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.first_batch import check_manual_batch
from lightning_accum.trainer.from_lightning import (
    _DataFetcher,
    _FitLoop,
    _PrefetchDataFetcher,
    callbacks_of,
    pl,
    rank_zero_info,
    replacing,
)
from lightning_accum.trainer.optimization import WindowOptimization
from lightning_accum.trainer.seams import specialised
from lightning_accum.trainer.uneven import WindowFetcher, is_agreeing
from lightning_accum.trainer.validation import ValidatingEpochLoop
from lightning_accum.user_warnings import rank_zero_warn


class AccumulatingEpochLoop(ValidatingEpochLoop):
    """Ends windows at the boundary, and steps schedulers by their clock."""

    strategy: Engine
    begins_anew: bool = False  # the epoch of the checkpoint is over
    begun: int = 0  # the loader batch that began last, counted from 1 over all epochs
    _advanced: int = 0  # the loader batch that :meth:`advance` was last called for
    _is_running: bool = False  # a loader batch has begun, and not ended
    _inspected: Any = None
    _arguments: tuple[str, ...] = ()

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
        self._is_running = False
        super().on_run_start(data_fetcher)

    @override
    def advance(self, data_fetcher: _DataFetcher) -> None:
        if self._is_running:
            raise seams.broken("_TrainingEpochLoop.update_lr_schedulers was not called after a loader batch.")
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
        """Whether a window is open whose terms are divided by totals over all of it, so that training must not stop inside."""
        fetcher = self.trainer.fit_loop._data_fetcher
        accumulation = self.strategy.accumulation
        counted = None if accumulation is None else accumulation.window.counted
        return counted is not None and counted.is_agreed and isinstance(fetcher, WindowFetcher) and fetcher.is_ahead

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
        windows, seen = self.strategy.windows, self.batch_progress.total.ready
        if windows is None:
            return super()._should_accumulate()
        if self.begun == seen:  # called five times a loader batch
            return seen < windows.boundary.ends_at
        return not (self._is_cut_by_the_end(windows.boundary) or windows.boundary.is_reached(seen, self.window_size))

    def window_size(self) -> float:
        """Loader batches in a window that begins now; inf for a window of tokens."""
        return math.inf if isinstance(self.strategy.policy.window, Tokens) else self.trainer.accumulate_grad_batches

    def begin_loader_batch(self, boundary: Boundary) -> tuple[int, bool]:
        """Begin a loader batch, and a window with it, if none is open. Returns its number, and whether the window ends with it."""
        seen = self.batch_progress.total.ready
        if seen == self.begun or seen != self._advanced:
            raise seams.broken(f"{self._runs} was called twice for a loader batch, or outside of _TrainingEpochLoop.advance.")
        self.begun, self._is_running = seen, True
        if not boundary.is_under_way:
            boundary.begin(self.window_size())
        if seen < boundary.ends_at and self._is_cut_by_the_end(boundary):
            boundary.cut_short(seen)
        return seen, seen >= boundary.ends_at

    @property
    def _runs(self) -> str:
        """The method of Lightning's that runs a loader batch."""
        return f"{'_AutomaticOptimization' if self.strategy.manual is None else '_ManualOptimization'}.run"

    def _is_cut_by_the_end(self, boundary: Boundary) -> bool:
        """End the window with this loader batch, the last of the data."""
        if not self._num_ready_batches_reached():
            return False
        fit_loop = self.trainer.fit_loop
        epochs_done = fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]  # the tracker of epochs has it
        is_end = fit_loop.max_epochs not in (None, -1) and bool(epochs_done + 1 >= fit_loop.max_epochs)
        return boundary.is_cut_by_the_end(self.batch_progress.total.ready, self.window_size, is_end)

    @override
    def run(self, data_fetcher: _DataFetcher) -> None:
        strategy, epoch = self.strategy, self.trainer.current_epoch
        strategy.watch.begin_epoch(epoch)
        if strategy.windows is not None and strategy.windows.epoch != epoch:
            strategy.windows.begin_epoch(epoch)
        strategy.set_size()
        super().run(data_fetcher)
        if not TAILS[self.strategy.policy.tail].goes_on:
            self.finish_window()
            self.validate_if_due()

    @override
    def _should_check_val_epoch(self) -> bool:
        if self.trainer.should_stop and self._is_in_counted_window:  # Lightning validates before it stops
            return False
        return super()._should_check_val_epoch()

    @override
    def _build_kwargs(self, kwargs: OrderedDict[str, Any], batch: Any, batch_idx: int) -> OrderedDict[str, Any]:
        # Lightning inspects the signature of training_step again for every batch, at 20 us
        function = getattr(self.trainer.lightning_module.training_step, "__func__", None)
        if function is None or function is not self._inspected:
            kwargs = super()._build_kwargs(kwargs, batch, batch_idx)
            self._inspected, self._arguments = function, (*kwargs,)
            return kwargs
        return OrderedDict(zip(self._arguments, (batch, batch_idx), strict=False))

    def finish_window(self) -> None:
        """Handle an unfinished window at the end of its epoch or of training."""
        strategy, windows, seen = self.strategy, self.strategy.windows, self.batch_progress.total.ready
        if windows is None or windows.boundary.position(seen) <= 0:
            return
        if (is_dropped := windows.boundary.is_dropped_by_the_end(seen)) or strategy.accumulation is None:
            lost = windows.discard(seen)
            if is_dropped:
                rank_zero_info(
                    f"GradientAccumulation(tail='{windows.policy.tail}'): the gradients of {lost} loader batches at the end of"
                    f" epoch {self.trainer.current_epoch} are dropped."
                )
            else:  # only training_step itself can step, and no loader batch is left for it
                rank_zero_warn(
                    f"Training ended inside a window of manual optimization: the gradients of the last {lost} loader batches are "
                    "dropped."
                )
            if strategy.accumulation is not None:
                strategy.sync.drop_accumulated()
                strategy.module.zero_grad()
            return
        windows.boundary.cut_short(seen)
        steps = self.global_step
        self.optimization.step_without_batch()
        # Lightning's actions at the end of a loader batch that ends a window
        strategy.rows.flush()
        self._update_learning_rates("step", update_plateau_schedulers=False)
        self._update_learning_rates("step", update_plateau_schedulers=True)
        closed = strategy.accumulation.closed
        if self.global_step > steps and closed is not None:
            self._batches_that_stepped += 1
            outputs: Any = {"loss": closed.loss}
            for callback in callbacks_of(self.trainer):  # those that count optimizer steps
                if isinstance(callback, (pl.callbacks.WeightAveraging, pl.callbacks.ModelCheckpoint)):
                    callback.on_train_batch_end(self.trainer, strategy.module, outputs, None, self.batch_idx)

    @override
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        is_of_steps = interval == "step"
        if is_of_steps and not update_plateau_schedulers:
            self._end_loader_batch()
        if self.strategy.lr_scheduler_configs and not (is_of_steps and self._should_accumulate()):
            self._update_learning_rates(interval, update_plateau_schedulers)

    def _end_loader_batch(self) -> None:
        """End a loader batch, and with it a window of tokens that is full. Lightning's first action after each, even after None."""
        strategy, seen = self.strategy, self.batch_progress.total.ready
        windows = strategy.accumulation if strategy.manual is None else strategy.manual
        if seen != self.begun:
            self._run_without_batch()
        if windows is None or not self._is_running:
            return
        self._is_running = False
        windows.end_loader_batch(seen)
        if windows.boundary.size != math.inf or windows.boundary.position(seen) <= 0 or not isinstance(windows, Accumulation):
            return
        if windows.is_full() or self._is_cut_by_the_end(windows.boundary):  # the first runs on all ranks
            windows.boundary.cut_short(seen)
            self.optimization.step_without_batch()

    def _run_without_batch(self) -> None:
        """Count a loader batch for which nothing ran in its window, with weight 0."""
        progress = self.batch_progress
        is_forgotten = progress.current.started < progress.current.ready  # type: ignore[attr-defined]  # the tracker has it
        # on_train_batch_start may end an epoch, and Lightning then treats this batch as the last
        ends_epoch = is_forgotten and progress.is_last_batch and progress.current.ready < self.trainer.num_training_batches
        windows = self.strategy.windows
        if ends_epoch and windows is not None and not windows.boundary.is_under_way:
            windows.boundary.close(progress.total.ready)
            return
        if is_forgotten and not ends_epoch:
            progress.increment_started()  # Lightning skips this for None, and would resume one batch too early
        elif not is_forgotten and windows is not None:
            raise seams.broken(f"A loader batch was trained without a call of {self._runs}.")
        if self.strategy.accumulation is not None:
            self.optimization.run_loader_batch(())
        elif self.strategy.manual is not None:
            _, is_boundary = self.begin_loader_batch(self.strategy.manual.boundary)
            self.strategy.manual.check_batch(False, is_boundary)
            check_manual_batch(self.trainer, self.strategy, ())

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
        # Lightning would count loader batches of the epoch: here the clock decides which schedulers are due, and Lightning steps
        # them
        clock, due = strategy.accumulation.clock, list[pl.utilities.types.LRSchedulerConfig]()
        for config in strategy.lr_scheduler_configs:
            if config.interval == "step":
                due += [replace(config, frequency=1)] * clock.times_due(config.frequency, update_plateau_schedulers)
        with replacing(strategy, lr_scheduler_configs=due), strategy.watch.ticks([] if update_plateau_schedulers else due):
            super()._update_learning_rates(interval, update_plateau_schedulers)
        clock.hold(update_plateau_schedulers)


# --- the loop over epochs -------------------------------------------------------------------------------------------------


class AccumulatingFitLoop(_FitLoop):
    """Ends the last window with the training, and gives an epoch the length of the longest loader over the ranks."""

    seams: ExitStack  # ends with the fit

    @override
    def reset(self) -> None:
        super().reset()
        epoch_loop, epoch = cast("AccumulatingEpochLoop", self.epoch_loop), self.epoch_progress.current
        is_processed = epoch.processed == epoch.ready  # type: ignore[attr-defined]  # the tracker of epochs has it
        if not self.restarting or not is_processed or not epoch_loop.batch_progress.is_last_batch:
            return
        # The checkpoint is from after the last batch of an epoch. Lightning has ended that epoch, or ends it again if max_steps is
        # set. But it resumes the next epoch as if it had begun: without its start hooks, and on the rest of its loader
        if self.restarted_on_epoch_end:
            self.epoch_progress.increment_completed()
        self.reset_restart_stage()
        epoch_loop.begins_anew = True

    @override
    def setup_data(self) -> None:
        """Have all ranks end an epoch together, and draw the batches of a window before it runs if weights are counted ahead."""
        before, strategy = self._data_fetcher, cast("Engine", self.trainer.strategy)
        strategy.watch.called.add("_FitLoop.setup_data")
        super().setup_data()
        if (fetcher := self._data_fetcher) is before:
            return
        self.seams.close()  # the changes to the fetcher of reloaded loaders
        if not strategy.module.automatic_optimization:
            return
        lengths, policy = self._lengths(strategy.ranks), strategy.policy
        draws_ahead = policy.may_count_terms and policy.may_be_longer_than_one(self.trainer.accumulate_grad_batches)
        if type(fetcher) is _PrefetchDataFetcher and (strategy.ranks.world_size > 1 or draws_ahead):  # else training_step draws
            is_done = not strategy.ranks.largest(not fetcher.done)[0]
            own: dict[str, Any] = {"strategy": strategy, "states": deque(), "done": is_done}
            self.seams.enter_context(specialised(fetcher, WindowFetcher, **own, **lengths))

    def _lengths(self, ranks: Ranks) -> dict[str, Any]:
        """Give the epoch the length of the longest loader on all ranks. Returns the known lengths."""
        trainer: Any = self.trainer
        own, inf = float(self.max_batches), float("inf")
        longest, negated_shortest = ranks.largest(own, -own)
        if longest != own:  # numbers that Lightning derives from this rank's length now use the longest
            self.max_batches = longest if longest == inf else int(longest)
            self._last_train_dl_reload_epoch = trainer.current_epoch
            interval: Any = None if trainer._val_check_time_interval is not None else trainer.val_check_interval
            is_count = interval is None or isinstance(interval, int)
            trainer.val_check_batch = interval if is_count else longest if longest == inf else max(1, int(longest * interval))
        # with tensor parallelism, neither the weights of a window nor a SIGTERM reach all ranks
        known = int(longest) if longest != inf and ranks.size == ranks.world_size else None
        return {"longest": known, "is_one_empty": not negated_shortest}

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        state, fetcher = super().on_save_checkpoint(), self._data_fetcher
        if isinstance(fetcher, WindowFetcher) and fetcher.is_ahead and "combined_loader" in state:
            state["combined_loader"] = fetcher.states[0]
        return state

    @override
    def on_run_end(self) -> None:
        epoch_loop = cast("AccumulatingEpochLoop", self.epoch_loop)
        epoch_loop.finish_window()
        epoch_loop.validate_if_due()
        super().on_run_end()
