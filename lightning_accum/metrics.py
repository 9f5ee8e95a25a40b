"""What one sees of the windows: metrics for the loggers, numbers in the progress bar."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import ProgressBar
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_accum.accumulation import Accumulation

STEPS = "window/optimizer_steps"


class WindowMetrics:
    """Logs each window once, through the module's own ``log``.

    The numbers come from the all-reduce that the window made anyway; they are the same on all ranks.
    """

    def __init__(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._module = pl_module
        self._epoch_loss = MeanMetric(sync_on_compute=False, nan_strategy="ignore").to(pl_module.device)
        self._throughput = Throughput(window_size=2)  # between the ends of the last two windows
        self._started = time.perf_counter()
        self._windows = 0
        self._elements = 0
        self._last: object = None
        self._bar = trainer.progress_bar_callback
        if self._bar is not None:
            _show_whole_steps(self._bar)

    def log_window(self, accumulation: Accumulation) -> None:
        """Log the window that ended last, unless it was logged before."""
        closed = accumulation.closed
        if closed is None or closed.is_empty or closed is self._last:
            return
        self._last = closed
        self._epoch_loss.update(closed.loss, closed.weight)
        metrics: dict[str, Tensor | float] = {
            "window/weight": closed.weight,
            "window/total_weight": accumulation.total_weight,
            "window/micro_batches": float(closed.micro_batches),
        }
        if accumulation.gradient_norm is not None:
            metrics["window/grad_norm"] = accumulation.gradient_norm
        if not isinstance(closed.weight, Tensor) and (rate := self._weight_per_second(closed.weight)) is not None:
            metrics["window/weight_per_second"] = rate
        options: dict[str, Any] = {"on_step": True, "on_epoch": False, "batch_size": 1}
        # a float would be rounded to float32
        loss = torch.as_tensor(closed.loss, dtype=accumulation.window.dtype, device=self._module.device)
        self._module.log("window/loss", loss, prog_bar=True, **options)
        self._module.log(STEPS, float(accumulation.clock.optimizer_steps), prog_bar=True, **options)
        self._module.log_dict(metrics, **options)

    def _weight_per_second(self, weight: float) -> float | None:
        self._windows += 1
        self._elements += round(weight)
        elapsed = time.perf_counter() - self._started
        self._throughput.update(time=elapsed, batches=self._windows, samples=self._elements)
        return self._throughput.compute().get("device/samples_per_sec")

    def log_epoch(self) -> None:
        """Log the epoch's loss: the mean of its windows, each with its weight."""
        if self._epoch_loss.update_called:
            self._module.log("window/loss_epoch", self._epoch_loss.compute(), batch_size=1, sync_dist=True)
            self._epoch_loss.reset()

    def close(self) -> None:
        """Give the progress bar back."""
        if self._bar is not None:
            vars(self._bar).pop("get_metrics", None)


def _show_whole_steps(bar: ProgressBar) -> None:
    """Metrics are floats, and progress bars print all their decimals; steps are counted in whole numbers."""
    original = bar.get_metrics

    def get_metrics(trainer: pl.Trainer, pl_module: pl.LightningModule) -> Any:
        metrics = original(trainer, pl_module)
        if STEPS in metrics:
            metrics[STEPS] = _Whole(float(metrics[STEPS]))  # type: ignore[arg-type]  # no string or dict
        return metrics

    bar.get_metrics = get_metrics  # type: ignore[method-assign]


class _Whole(int):
    """A number that is printed without decimals, also where the progress bar asks for three."""

    def __format__(self, spec: str) -> str:
        return str(int(self))
