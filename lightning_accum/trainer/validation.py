"""Counts of optimizer steps in a Trainer: the total of a training, and between validations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from typing_extensions import override

from lightning_accum.boundary import ValidationClock, count_windows
from lightning_accum.errors import UsageError
from lightning_accum.policy import Tokens
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.from_lightning import MisconfiguredError, _DataFetcher, _TrainingEpochLoop, callbacks_of, pl, replacing


def validating_every(steps: int, trainer: pl.Trainer) -> AbstractContextManager[None]:
    """Inside, EarlyStopping and ModelCheckpoint run after a validation, not after an epoch."""
    own = {name: getattr(trainer, name) for name in ("val_check_interval", "check_val_every_n_epoch")}
    if vars(trainer)["_val_check_time_interval"] is not None:
        own["val_check_interval"] = "a time"
    if own != {"val_check_interval": 1.0, "check_val_every_n_epoch": 1}:
        said = ", ".join(f"{name}={value}" for name, value in own.items())
        raise MisconfiguredError(f"Trainer({said}) and validate_every={steps} both say when to validate. Use only one of them.")
    return replacing(trainer, val_check_interval=steps, check_val_every_n_epoch=None)


class AccumulatingTrainer(pl.Trainer):
    """``estimated_stepping_batches`` is the number of optimizer steps that will happen."""

    @property
    @override
    def estimated_stepping_batches(self) -> int | float:
        lightnings = super().estimated_stepping_batches  # also sets up the data, and knows the cases without a length
        policy = cast("Engine", self.strategy).policy
        batches, epochs = self.num_training_batches, self.max_epochs
        if epochs is None or epochs == -1 or batches == float("inf"):
            return lightnings
        scheduler = next((c for c in callbacks_of(self) if isinstance(c, pl.callbacks.GradientAccumulationScheduler)), None)

        def size(epoch: int, step: int) -> int:
            """Loader batches in a window."""
            if scheduler is not None:
                return scheduler.get_accumulate_grad_batches(epoch)
            return policy.size_at(epoch, step) or self.accumulate_grad_batches

        if isinstance(policy.window, Tokens) and not self.fast_dev_run:  # type: ignore[attr-defined]  # a few windows at most
            found = f"estimated_stepping_batches is unknown, as a window of {policy.window} ends when it has its tokens"
            raise UsageError(f"{found}. Set the number of steps: Trainer(max_steps=...) without max_epochs.")
        steps = count_windows(int(batches), max(epochs, 1), size, policy.tail)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)


class ValidatingEpochLoop(_TrainingEpochLoop):
    """Validates after loader batches in which a multiple of ``validate_every`` was reached, if it is set."""

    validation: ValidationClock | None = None  # None if Lightning decides, or there is no validation
    _validated: Sequence[int] | None = None
    """The steps and loader batch of the clock in the checkpoint that training resumes from."""

    @override
    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Start the clock of ``validate_every``; validate first if the checkpoint was taken before a validation had ended."""
        super().on_run_start(data_fetcher)
        trainer: Any = self.trainer
        every = trainer.strategy.policy.validate_every
        if self.validation is None and every is not None and trainer.enable_validation and not trainer.fast_dev_run:
            self.validation = ValidationClock(every, *(self._validated or (self.global_step,)))
        self.validate_if_due()  # in a checkpoint that was taken between a step and the end of its validation

    @override
    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        """Whether validation runs after the last loader batch, also on a resume from its end, for which Lightning skips it."""
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
