"""Validation every so many optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from lightning_accum.boundary import ValidationClock
from lightning_accum.trainer.from_lightning import _DataFetcher, _TrainingEpochLoop

if TYPE_CHECKING:
    from lightning_accum.trainer.estimate import AccumulatingTrainer


class ValidatingEpochLoop(_TrainingEpochLoop):
    """Validates after loader batches in which a multiple of ``validate_every`` was reached, where that was asked for."""

    validation: ValidationClock | None = None
    """When validation is due; None where Lightning decides, or there is none."""
    _should_check_val_fx: Any
    """Lightning's own, unless there is such a clock: it is asked after every loader batch."""
    _validated: Sequence[int] | None = None
    """In the checkpoint that training goes on from: the steps of that clock, and after which loader batch."""

    @override
    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Start the clock of ``validate_every``; validate first where a checkpoint was taken before a validation had ended."""
        super().on_run_start(data_fetcher)
        every = cast("AccumulatingTrainer", self.trainer).validates_every
        if self.validation is None and every is not None and self.trainer.enable_validation:
            self.validation = ValidationClock(every, *(self._validated or (self.global_step,)))
            self._should_check_val_fx = self._is_validation_next
        self.validate_if_due()  # in a checkpoint that was taken between a step and the end of its validation

    def _is_validation_next(self, data_fetcher: _DataFetcher) -> bool:
        """Validation comes after the last loader batch.

        Also where training goes on from a checkpoint that was taken at its end: Lightning leaves it out then.
        """
        assert self.validation is not None
        return self.validation.after == self.batch_progress.total.ready

    def note_loader_batch(self, validation: ValidationClock) -> None:
        """A loader batch has ended: validation comes next, if its steps have reached a multiple of those asked for."""
        if validation.is_due(self.global_step):
            validation.begin(self.global_step, self.batch_progress.total.ready)

    def validate_if_due(self) -> None:
        """Validate where no end of a loader batch comes after the optimizer step that it is due at."""
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
        """The checkpoint that training goes on from was taken in a validation, and before all of its batches had run."""
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
