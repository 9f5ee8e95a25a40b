"""What goes to the Trainer's loggers: one row for the metrics of a window and what the module logs at the same step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from torch import Tensor
from typing_extensions import override


class WindowRows(_LoggerConnector):
    """Joins the metrics of a window, which ends before the module's own are logged, to those."""

    pending: dict[str, Tensor]
    """Of a window that has ended, and whose loader batch has not."""
    since: int | None = None
    """The step of the first of the windows that ended inside of the last loader batch that has begun; None where none has."""

    def end_window_inside_batch(self) -> None:
        """A window has made its step and been logged, before its loader batch has ended: loggers go on to the next step."""
        epoch_loop = self.trainer.fit_loop.epoch_loop
        if self.since is None:
            self.since = epoch_loop._batches_that_stepped
        epoch_loop._batches_that_stepped += 1

    @property
    def is_step_due(self) -> bool:
        """Whether loggers get metrics at this optimizer step."""
        return super().should_update_logs

    @property
    @override
    def should_update_logs(self) -> bool:
        """Whether a row is due: the windows of a loader batch may pass a multiple of ``log_every_n_steps`` without ending on it."""
        if self.since is None:
            return super().should_update_logs
        steps = self.trainer.fit_loop.epoch_loop._batches_that_stepped
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        is_passed = every > 0 and steps // every > self.since // every
        return is_passed or (super().should_update_logs and not self.trainer.fit_loop._should_accumulate())

    @override
    def update_train_step_metrics(self) -> None:
        """Log what the module logs, at the step of the last window that ended in the loader batch."""
        if not self.trainer.loggers:
            return
        if not (self.since is not None and self.trainer.fit_loop._should_accumulate()):
            super().update_train_step_metrics()
        elif self.should_update_logs:  # the last of the windows that ended in the loader batch is the step before
            self.log_metrics(self.metrics["log"], step=self.trainer.fit_loop.epoch_loop._batches_that_stepped - 1)

    @override
    def on_batch_end(self) -> None:
        results = self.trainer.fit_loop.epoch_loop._results
        if results:
            super().on_batch_end()
        else:  # nothing was logged, which takes Lightning long to find
            results.batch = results.batch_size = None

    def hold(self, metrics: Mapping[str, float]) -> None:
        """Have ``metrics`` in the next row."""
        self.pending.update({name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()})

    def flush(self) -> None:
        """A loader batch has ended, or a window without one: no row of the module's own comes at this step."""
        if self.pending:
            self.log_metrics({})

    @override
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if step is None and self.pending:
            metrics, self.pending = {**self.pending, **metrics}, {}
        super().log_metrics(metrics, step)
