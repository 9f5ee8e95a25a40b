"""What is logged: once for the micro-batches of a batch, and the metrics of a window, in one row with the module's own."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any, cast

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.wrappers import ClasswiseWrapper, MultitaskWrapper
from torchmetrics.wrappers.abstract import WrapperMetric
from typing_extensions import override

from lightning_accum.accumulation import Accumulation
from lightning_accum.exact import exact
from lightning_accum.splitting.logs import Arguments, BatchLog, name_of_reduction
from lightning_accum.trainer.from_lightning import _LoggerConnector, _ResultCollection, _ResultMetric, pl
from lightning_accum.trainer.manual import ManualWindows
from lightning_accum.trainer.watch import replacing
from lightning_accum.window_totals import ClosedWindow
from lightning_accum.windows import Windows


class BatchResults(_ResultCollection):
    """Counts what a shadow batch logs without weight, and stores how the batches of this fit are logged."""

    strategy: Any = None
    """The Engine of the fit, whose file imports this one."""
    batch_log: BatchLog | None = None
    """Takes what is logged, while a split batch runs."""
    metrics_of_module: tuple[int, list[Metric]] | None = None
    """The epoch in which they were looked for, and the metrics."""
    shown: set[int] | None = None
    log_of_module: Callable[..., None] | None = None
    """What replaces the module's ``log`` while a split batch runs: one function for all batches, since a compiled training_step is
    compiled anew for another."""

    @override
    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Take in a logged value; that of a shadow batch has no weight."""
        accumulation = None if self.strategy is None else self.strategy.accumulation
        if accumulation is not None and accumulation.is_shadow_batch and isinstance(value, Tensor):
            # it takes part in the other ranks' reduction, and adds nothing: the same batch was counted before
            value, batch_size = _weightless(value, self[key]), 0
        super().update_metrics(key, value, batch_size)
        metric = self[key]
        if self.strategy is not None and self.strategy.world_size > 1 and metric.is_tensor and metric.meta.is_mean_reduction:
            # Lightning averages it over the ranks, which cuts off the fraction of a whole number
            metric.cumulated_batch_size = exact(metric.cumulated_batch_size)


def _weightless(value: Tensor, metric: _ResultMetric) -> Tensor:
    if metric.meta.is_sum_reduction:
        return torch.zeros_like(value)
    return value.nan_to_num() if metric.meta.is_mean_reduction else value  # times its batch size of 0


def _neutral(value: Tensor, arguments: Arguments, metric: _ResultMetric | None) -> Tensor:
    """What changes nothing when it is reduced with what other ranks log; in the mean of a step, about what was logged last."""
    reduce_fx = name_of_reduction(arguments)
    if reduce_fx in ("max", "min"):
        return torch.full_like(value, -math.inf if reduce_fx == "max" else math.inf)
    last = None if metric is None else metric._forward_cache
    return last.clone() if reduce_fx == "mean" and isinstance(last, Tensor) else torch.zeros_like(value)


@contextmanager
def collecting_logs(trainer: pl.Trainer) -> Iterator[BatchLog]:
    """Collect what the module logs, and log nothing yet."""
    module, results = trainer.lightning_module, cast("BatchResults", trainer.fit_loop.epoch_loop._results)
    if results.metrics_of_module is None or results.metrics_of_module[0] != trainer.current_epoch:
        results.metrics_of_module = (trainer.current_epoch, _metrics_in(module))
        results.shown = results.shown or set()
    log, outer = BatchLog(results.metrics_of_module[1], results.shown), results.batch_log
    if results.log_of_module is None:
        results.log_of_module = _collecting(results, module)
    results.batch_log = log
    try:
        with replacing(module, log=results.log_of_module):
            yield log
    finally:
        results.batch_log = outer
        log.close()


def _collecting(results: BatchResults, module: pl.LightningModule) -> Callable[..., None]:
    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        assert results.batch_log is not None
        if isinstance(value, Number):
            value = torch.tensor(value, device=module.device, dtype=torch.get_default_dtype())  # as Lightning does
        if not isinstance(value, (Tensor, Metric)):
            return type(module).log(module, name, value, *args, **kwargs)  # raises what is wrong with it
        arguments = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        results.batch_log.collect(module._current_fx_name or "", name, value, arguments)

    # what is collected is no part of a graph that is compiled; `_compiler_ctx` is set by Lightning for a compiled module
    is_compiled = module._compiler_ctx is not None
    return torch.compiler.disable(log) if is_compiled else log  # type: ignore[no-untyped-call]


_ARGUMENTS = tuple(inspect.signature(pl.LightningModule.log).parameters)[3:]
"""Of ``log``, after the value."""


def show_logs(trainer: pl.Trainer, log: BatchLog, is_left_out: bool = False) -> None:
    """Log what was collected, as the whole batch would have.

    Args:
        trainer: whose module logs it.
        log: what was collected.
        is_left_out: the batch is as if it had never been there. What the ranks reduce together is logged without weight.
    """
    module, results = trainer.lightning_module, trainer.fit_loop.epoch_loop._results

    def is_synced(is_metric: bool, arguments: Arguments) -> bool:
        return trainer.world_size > 1 and (is_metric or bool(arguments.get("sync_dist")))

    hooks = set()
    for logged in log.merged(is_synced):
        value, arguments = logged.value, logged.arguments
        if is_left_out and not is_synced(isinstance(value, Metric), arguments):
            continue
        if is_left_out and isinstance(value, Tensor):
            value, arguments = _neutral(value, arguments, results.get(logged.key)), {**arguments, "batch_size": 0}
        elif is_left_out and logged.key in results:
            continue  # a metric: it holds what it held before the batch
        if logged.hook in hooks:  # else Lightning forgets, in a first batch, what the hook has logged
            trainer._logger_connector._current_fx = logged.hook
        hooks.add(logged.hook)
        with replacing(module, _current_fx_name=logged.hook):
            module.log(logged.name, value, **arguments)


def _metrics_in(module: pl.LightningModule) -> list[Metric]:
    """The metrics of a module, but for those that a wrapper works with in ways of its own."""
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    passing_on = (ClasswiseWrapper, MultitaskWrapper)
    wrappers = (m for m in metrics if isinstance(m, WrapperMetric) and not isinstance(m, passing_on))
    held = {id(child) for wrapper in wrappers for child in wrapper.modules() if child is not wrapper}
    return [metric for metric in metrics if id(metric) not in held]


# --- one row for a window and what the module logs at its step --------------------------------------------------------


class WindowRows(_LoggerConnector):
    """Joins the metrics of a window, which ends before the module's own are logged, to those."""

    pending: dict[str, Tensor]
    """Of a window that has ended, and whose loader batch has not."""
    in_bar: dict[str, Any]
    """What the progress bar shows of the last window."""

    @property
    @override
    def progress_bar_metrics(self) -> Any:
        shown = {name: value.item() if isinstance(value, Tensor) else value for name, value in self.in_bar.items()}
        return {**shown, **super().progress_bar_metrics}  # a metric of the module's may have such a name

    @override
    def on_batch_end(self) -> None:
        results = self.trainer.fit_loop.epoch_loop._results
        if results:
            super().on_batch_end()
        else:  # nothing was logged, which takes Lightning long to find
            results.batch = results.batch_size = None

    def show(self, metrics: Mapping[str, Tensor | float], is_finite: bool = False) -> None:
        """Have metrics among the Trainer's, and in the next row, if loggers get one at this step: all, or those that are finite."""
        shown = {name: v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64) for name, v in metrics.items()}
        self._callback_metrics.update(shown)
        self._logged_metrics.update(shown)
        if self.trainer.loggers and self.should_update_logs:
            self.pending.update({name: value for name, value in shown.items() if not is_finite or value.isfinite()})

    def flush(self) -> None:
        """A loader batch has ended, or a window without one: no row of the module's own comes at this step."""
        if self.pending:
            self.log_metrics({})

    @override
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if step is None and self.pending:
            metrics, self.pending = {**self.pending, **metrics}, {}
        super().log_metrics(metrics, step)


class WindowMetrics:
    """Shows each window once.

    The numbers come from the all-reduce that the window made anyway, and are the same on all ranks. They go to the loggers by
    the Trainer's ``log_every_n_steps``, and to ``trainer.callback_metrics`` and the progress bar at every window. The module's own
    ``log`` would do all of that at a hundred times the cost.
    """

    def __init__(self, trainer: pl.Trainer, pl_module: pl.LightningModule, epoch_loss: Sequence[float] | None = None) -> None:
        self._trainer = trainer
        self._module = pl_module
        self._rows = cast("WindowRows", trainer._logger_connector)
        self._epoch: list[tuple[Tensor | float, Tensor | float]] = []
        self._weighed_loss, self._weight = (0.0, 0.0) if epoch_loss is None else epoch_loss
        self._last_end: float | None = None

    def log(self, windows: Windows | None) -> None:
        """Show the window that ended last: one for each call of ``manual_backward``, if the module optimizes by itself."""
        if isinstance(windows, Accumulation):
            self._log_window(windows)
        elif isinstance(windows, ManualWindows) and windows.closed:
            first, *others = windows.closed
            self._log(first, windows, {f"window/loss_{index}": closed.loss for index, closed in enumerate(others, 2)})

    def _log_window(self, windows: Accumulation) -> None:
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
        if closed.gradient_norm is not None:
            others["window/grad_norm"] = closed.gradient_norm
        self._log(closed, windows, others)

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
