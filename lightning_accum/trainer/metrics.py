"""What one sees of the windows: metrics for loggers and callbacks, numbers in the progress bar."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_accum.accumulation import Accumulation
from lightning_accum.trainer.from_lightning import pl
from lightning_accum.trainer.manual import ManualWindows
from lightning_accum.window_totals import ClosedWindow
from lightning_accum.windows import Windows


class WindowMetrics:
    """Shows each window once.

    The numbers come from the all-reduce that the window made anyway, and are the same on all ranks. They go to the loggers by
    the Trainer's ``log_every_n_steps``, and to ``trainer.callback_metrics`` and the progress bar at every window. The module's own
    ``log`` would do all of that at a hundred times the cost.
    """

    def __init__(self, trainer: pl.Trainer, pl_module: pl.LightningModule, epoch_loss: Sequence[float] | None = None) -> None:
        self._trainer = trainer
        self._module = pl_module
        self._rows = cast("Any", trainer._logger_connector)  # without their type: the loops of a fit import this file
        self._epoch: list[tuple[Tensor | float, Tensor | float]] = []
        self._weighed_loss, self._weight = (0.0, 0.0) if epoch_loss is None else epoch_loss
        self._last_end: float | None = None

    def log_window(self, windows: Accumulation) -> None:
        """Show the window that ended last."""
        closed = windows.closed
        assert closed is not None
        others: dict[str, Tensor | float] = {}
        if windows.policy.on_nonfinite == "skip":
            others["window/skipped_micro_batches"] = closed.left_out
            others["window/total_skipped_micro_batches"] = windows.total_left_out
        if closed.is_empty:
            self._rows.show(others)
            return
        if windows.splitting is not None and windows.splitting.largest is not None:
            others["window/micro_batch_size"] = windows.splitting.largest
        if windows.gradient_norm is not None:
            others["window/grad_norm"] = windows.gradient_norm
        self._log(closed, windows, others)

    def log_calls(self, windows: ManualWindows) -> None:
        """Show the window that ended last, of each call of ``manual_backward``."""
        if windows.closed:
            first, *others = windows.closed
            self._log(first, windows, {f"window/loss_{index}": closed.loss for index, closed in enumerate(others, 2)})

    def _log(self, closed: ClosedWindow, windows: Windows, others: Mapping[str, Tensor | float]) -> None:
        steps = windows.clock.optimizer_steps
        self._epoch.append((closed.loss, closed.weight))
        if len(self._epoch) == 100:
            self._fold_epoch()
        metrics: dict[str, Tensor | float] = {
            "window/loss": closed.loss,
            "window/weight": closed.weight,
            "window/total_weight": windows.total_weight,
            "window/micro_batches": closed.micro_batches,
            "window/optimizer_steps": steps,
            **others,
        }
        if not isinstance(closed.weight, Tensor) and (rate := self._weight_per_second(closed.weight)) is not None:
            metrics["window/weight_per_second"] = rate
        self._rows.show(metrics)
        self._rows.in_bar = {"w_loss": closed.loss, "w_steps": _Whole(steps)}

    def _weight_per_second(self, weight: float) -> float | None:
        """Between the ends of the last two windows; None for the first, and where the clock has not moved."""
        last_end, self._last_end = self._last_end, time.perf_counter()
        elapsed = 0.0 if last_end is None else self._last_end - last_end
        return weight / elapsed if elapsed > 0 else None

    def begin_epoch(self) -> None:
        """No window of it has ended yet: a checkpoint from the end of an epoch holds that epoch's."""
        self._epoch, self._weighed_loss, self._weight = [], 0.0, 0.0

    def log_epoch(self) -> None:
        """Log the epoch's loss: the mean of its windows, each with its weight."""
        self._fold_epoch()
        if self._weight and not self._trainer.barebones:
            mean = torch.tensor(self._weighed_loss / self._weight, dtype=torch.float64)
            self._module.log("window/loss_epoch", mean, batch_size=1, sync_dist=True)
        self.begin_epoch()

    def epoch_loss(self) -> list[float]:
        """The sum of the losses of the epoch's windows so far, each times its weight, and that of the weights, for a checkpoint."""
        self._fold_epoch()
        return [self._weighed_loss, self._weight]

    def _fold_epoch(self) -> None:
        """Take the windows into the epoch's sums, one after another: many at a time, since on an accelerator that waits for it."""
        for loss, weight in ((float(loss), float(weight)) for loss, weight in self._epoch):
            if not math.isnan(loss):
                self._weighed_loss, self._weight = self._weighed_loss + loss * weight, self._weight + weight
        self._epoch = []

    def close(self) -> None:
        """Give the loggers what they have not got."""
        self._rows.flush()


class _Whole(int):
    """A number that is printed without decimals, also where the progress bar asks for three."""

    def __format__(self, spec: str) -> str:
        return str(int(self))
