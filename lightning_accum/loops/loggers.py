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
