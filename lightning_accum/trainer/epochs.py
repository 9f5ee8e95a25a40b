"""The loop over batches: it begins and ends loader batches and windows, and runs everything due there."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any, cast

from typing_extensions import override

from lightning_accum.accumulation import Accumulation
from lightning_accum.boundary import TAILS, Boundary, ValidationClock
from lightning_accum.manual_calls import check_batches
from lightning_accum.policy import Tokens
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.first_batch import check_manual_batch
from lightning_accum.trainer.fit import WindowFetcher, is_agreeing
from lightning_accum.trainer.from_lightning import _DataFetcher, _TrainingEpochLoop, callbacks_of, pl, rank_zero_info
from lightning_accum.trainer.optimization import WindowOptimization
from lightning_accum.undo import replacing
from lightning_accum.user_warnings import listed, rank_zero_warn


class AccumulatingEpochLoop(_TrainingEpochLoop):
    """Ends windows at the boundary, steps schedulers by their clock, and validates by optimizer steps with ``validate_every``."""

    strategy: Engine
    validation: ValidationClock | None = None  # None if Lightning decides, or there is no validation
    _validated: Sequence[int] | None = None
    """The steps and loader batch of the clock in the checkpoint that training resumes from."""
    begun: int = 0  # the loader batch that began last, counted from 1 over all epochs
    _carried: Set[str] = frozenset()  # the parameters trained at the end of the last epoch, if its window goes on in this one
    _inspected: Any = None
    _arguments: tuple[str, ...] = ()

    @override
    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        if self.begun > self.batch_progress.total.ready:  # the batch size finder sets the progress back
            self.begun = 0
        super().on_run_start(data_fetcher)
        trainer: Any = self.trainer
        every = self.strategy.policy.validate_every
        if self.validation is None and every is not None and trainer.enable_validation and not trainer.fast_dev_run:
            self.validation = ValidationClock(every, *(self._validated or (self.global_step,)))
        self.validate_if_due()  # in a checkpoint that was taken between a step and the end of its validation

    @override
    def advance(self, data_fetcher: _DataFetcher) -> None:
        if self.strategy.manual is not None:
            self.strategy.manual.begin_loader_batch()
        super().advance(data_fetcher)

    @property
    @override
    def done(self) -> bool:
        return super().done and not self._is_in_counted_window

    @property
    def _is_in_counted_window(self) -> bool:
        """Whether training must not stop, since a window is open whose terms are divided by totals of the whole window."""
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
        self.begun = seen
        manual, fetcher = self.strategy.manual, self.trainer.fit_loop._data_fetcher
        if manual is not None and manual.ranks.size > 1 and fetcher is not None and fetcher.length is None:
            check_batches(manual.ranks, not self._num_ready_batches_reached())
        boundary.begin(self.window_size)
        if seen < boundary.ends_at and self._is_cut_by_the_end(boundary):
            boundary.cut_short(seen)
        return seen, seen >= boundary.ends_at

    def _is_cut_by_the_end(self, boundary: Boundary) -> bool:
        """End the window with this loader batch, the last of the data."""
        if not self._num_ready_batches_reached():
            return False
        fit_loop = self.trainer.fit_loop
        epochs_done = fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]  # the tracker of epochs has it
        is_end = fit_loop.max_epochs not in (None, -1) and bool(epochs_done + 1 >= fit_loop.max_epochs)
        return boundary.is_cut_by_the_end(self.batch_progress.total.ready, is_end, self.window_size())

    @override
    def run(self, data_fetcher: _DataFetcher) -> None:
        strategy, epoch, windows = self.strategy, self.trainer.current_epoch, self.strategy.windows
        strategy.watch.begin_epoch()
        if windows is not None and windows.epoch != epoch:
            windows.begin_epoch(epoch)
        if windows is not None and self._carried and (changed := self._carried ^ self._trained()):
            windows.warn_once(
                f"{listed(sorted(changed))} was frozen or unfrozen after {windows.position} loader batches of a window that goes "
                f'on in epoch {epoch}, and gets the gradient of a part of the window. Use tail="step" or "drop".'
            )
        strategy.set_size()
        super().run(data_fetcher)
        self._carried = self._trained() if windows is not None and windows.position else frozenset()
        if not TAILS[self.strategy.policy.tail].goes_on:
            self.finish_window()
            self.validate_if_due()

    def _trained(self) -> Set[str]:
        return {name for name, parameter in self.strategy.parameters_by_name().items() if parameter.requires_grad}

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
            how = f"tail='{windows.policy.tail}'" if is_dropped else "only training_step can step in manual optimization"
            inform = rank_zero_info if is_dropped else rank_zero_warn
            inform(f"The gradients of {lost} loader batches at the end of epoch {self.trainer.current_epoch} are dropped: {how}.")
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
        windows, seen = self.strategy.windows, self.batch_progress.total.ready
        if seen != self.begun:
            self._run_without_batch()
        if windows is None or seen != self.begun:
            return
        windows.end_loader_batch(seen)
        if windows.boundary.size != math.inf or windows.boundary.position(seen) <= 0 or not isinstance(windows, Accumulation):
            return
        if windows.is_full() or self._is_cut_by_the_end(windows.boundary):  # is_full runs on all ranks
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
        # Lightning would count the loader batches of the epoch. The clock decides which schedulers are due; Lightning steps them
        clock, due = strategy.accumulation.clock, list[pl.utilities.types.LRSchedulerConfig]()
        for config in strategy.lr_scheduler_configs:
            if config.interval == "step":
                due += [replace(config, frequency=1)] * clock.times_due(config.frequency, update_plateau_schedulers)
        with replacing(strategy, lr_scheduler_configs=due):
            super()._update_learning_rates(interval, update_plateau_schedulers)
        clock.hold(update_plateau_schedulers)

    # --- validation every n optimizer steps ---------------------------------------------------------------------------

    @override
    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        """Whether validation runs after the last loader batch. Lightning would skip it on a resume from the end of that batch."""
        if self.validation is None:
            return super()._should_check_val_fx(data_fetcher)
        return self.validation.after == self.batch_progress.total.ready

    def validate_if_due(self) -> None:
        """Validate after an optimizer step, if no loader batch ends after it."""
        validation, seen = self.validation, self.batch_progress.total.ready
        if validation is None or not (validation.is_due(self.global_step) or self._is_validation_broken_off(validation)):
            return
        trainer, connector = self.trainer, self.trainer._logger_connector
        validation.begin(self.global_step, seen)
        is_first = connector._first_loop_iter
        self.val_loop.restarting, trainer.validating = False, True
        self.val_loop.reset_restart_stage()
        self.val_loop.run()
        trainer.training, connector._first_loop_iter = True, is_first
        if not self.restarted_on_last:
            validation.after = 0  # else Lightning would count its batches again

    def _is_validation_broken_off(self, validation: ValidationClock) -> bool:
        """Whether the checkpoint was taken in a validation, before all of its batches had run."""
        if not self.restarting or not 0 < validation.after == self.batch_progress.total.ready:
            return False
        batches, current = self.val_loop.batch_progress, self.val_loop.batch_progress.current
        return not (batches.is_last_batch and current.completed == current.ready)

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        state = super().on_save_checkpoint()
        if self.validation is not None:
            state["validated"] = [self.validation.steps, self.validation.after]
        return state

    @override
    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._validated = state_dict.get("validated")
