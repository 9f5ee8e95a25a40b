"""Logging: joins the logs of micro-batches, and adds the metrics of a window to the row of the module's metrics."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Number
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.wrappers import ClasswiseWrapper, MultitaskWrapper
from torchmetrics.wrappers.abstract import WrapperMetric
from typing_extensions import override

from lightning_accum.accumulation import Accumulation
from lightning_accum.exact import exact
from lightning_accum.micro_batch import Output
from lightning_accum.splitting.logs import BatchLog, Joined, joined_logs
from lightning_accum.trainer.from_lightning import _LoggerConnector, _ResultCollection, _ResultMetric, pl
from lightning_accum.trainer.manual import ManualWindows
from lightning_accum.undo import replacing
from lightning_accum.windows import Windows


class BatchResults(_ResultCollection):
    """Gives the logs of a shadow batch no weight, and stores how the batches of this fit are logged."""

    strategy: Any = None  # the Engine of the fit, whose file imports this one
    batch_log: BatchLog | None = None  # collects logs while a split batch runs
    is_left_out: bool = False  # the current batch is left out of the logs
    replaced: dict[int, tuple[Any, dict[str, Any]]]
    """The module and its metrics, and the replacements of their methods while a split batch runs: the same functions for all
    batches, since new ones would recompile training_step."""
    looked_in: int | None = None  # the epoch in which metrics were last searched for

    @override
    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Add a logged value; for a batch that does not count, a neutral value."""
        metric, accumulation = self[key], None if self.strategy is None else self.strategy.accumulation
        is_shadow = accumulation is not None and accumulation.is_shadow_batch
        if is_shadow and metric.is_tensor and not metric.meta.sync.should:
            return
        if (is_shadow or self.is_left_out) and metric.is_tensor:
            value, batch_size = _neutral(metric, value), 0
        super().update_metrics(key, value, batch_size)
        if self.strategy is not None and self.strategy.world_size > 1 and metric.is_tensor and metric.meta.is_mean_reduction:
            # Lightning averages it over the ranks, which would truncate an integer
            metric.cumulated_batch_size = exact(metric.cumulated_batch_size)


def _neutral(metric: _ResultMetric, value: Tensor) -> Tensor:
    """A neutral value for the reduction over ranks; for the mean of a step, about the last logged value."""
    last = metric._forward_cache
    if metric.meta.is_mean_reduction and isinstance(last, Tensor):
        return last.clone()
    default = torch.as_tensor(metric._defaults["value"])
    return default.to(value.device, value.dtype if value.is_floating_point() else default.dtype)  # the same type on all ranks


@contextmanager
def collecting_logs(trainer: pl.Trainer) -> Iterator[BatchLog]:
    """Inside, collect the module's logged values without logging them."""
    module, results = trainer.lightning_module, cast("BatchResults", trainer.fit_loop.epoch_loop._results)
    if results.looked_in != trainer.current_epoch:
        results.looked_in = trainer.current_epoch
        methods = [(metric, "compute", _noting(results, metric)) for metric in _metrics_in(module)]
        for owner, name, method in [(module, "log", _collecting(results, module)), *methods]:
            no_part_of_a_graph = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
            results.replaced.setdefault(id(owner), (owner, {name: no_part_of_a_graph}))
    with replacing(results, batch_log=(log := BatchLog())), ExitStack() as replaced:
        for owner, own in results.replaced.values():
            replaced.enter_context(replacing(owner, **own))
        yield log


def _noting(results: BatchResults, metric: Metric) -> Callable[[], Any]:
    compute = metric.compute

    def compute_and_note() -> Any:
        """Note the value of a call of the metric."""
        value = compute()
        if results.batch_log is not None and not metric._should_unsync:  # only `forward` sets this
            results.batch_log.note_call(metric, value)
        return value

    return compute_and_note


def _collecting(results: BatchResults, module: pl.LightningModule) -> Callable[..., None]:
    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Collect a value that the module logs."""
        assert results.batch_log is not None
        if isinstance(value, Number):
            value = torch.tensor(value, device=module.device, dtype=torch.get_default_dtype())  # as Lightning does
        if not isinstance(value, (Tensor, Metric)):
            return type(module).log(module, name, value, *args, **kwargs)  # raises Lightning's error
        arguments = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        results.batch_log.collect(module._current_fx_name or "", name, value, arguments)

    return log


_ARGUMENTS = tuple(inspect.signature(pl.LightningModule.log).parameters)[3:]  # of ``log``, after the value


def show_logs(trainer: pl.Trainer, outputs: Sequence[Output]) -> None:
    """Log the collected values as the batch of these micro-batches.

    If all are left out, only values that ranks reduce together are logged, without weight. These come last and sorted, since ranks
    pair their reductions by order, and the order of logging may differ between ranks.
    """
    module, results = trainer.lightning_module, cast("BatchResults", trainer.fit_loop.epoch_loop._results)
    kept = [output for output in outputs if not output.is_left_out]
    alone, synced, hooks = list[Joined](), list[Joined](), set[str]()
    for log in joined_logs(kept or outputs[-1:], results.strategy.accumulation.warn_once):
        is_metric = isinstance(log.value, Metric)
        is_synced = trainer.world_size > 1 and (is_metric or bool(log.arguments.get("sync_dist")))
        if kept or (is_synced and not (is_metric and log.key in results)):  # a metric keeps its state from before the batch
            (synced if is_synced else alone).append(log)
    with replacing(results, is_left_out=not kept):
        for log in [*alone, *sorted(synced, key=attrgetter("key"))]:
            if log.hook in hooks:  # else Lightning drops the hook's values in a first batch
                trainer._logger_connector._current_fx = log.hook
            hooks.add(log.hook)
            with replacing(module, _current_fx_name=log.hook):
                module.log(log.name, log.value, **log.arguments)


@contextmanager
def logging_nothing(trainer: pl.Trainer) -> Iterator[None]:
    """Inside, the module's logs are dropped, and its own calls of loggers do nothing.

    The loggers keep their types and folders.
    """
    with replacing(trainer, _loggers=[_silent(logger) for logger in trainer.loggers]), collecting_logs(trainer):
        yield


def _silent(logger: Any) -> Any:
    dummy = pl.loggers.logger.DummyLogger()
    nothing, nowhere = dummy.log_metrics, dummy.experiment
    methods = {"log_metrics": nothing, "log_hyperparams": nothing, "experiment": property(lambda _: nowhere)}
    silent: Any = object.__new__(type(type(logger).__name__, (type(logger),), methods))
    vars(silent).update(vars(logger))
    return silent


def _metrics_in(module: pl.LightningModule) -> list[Metric]:
    """The metrics of a module, without metrics inside wrappers."""
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    passing_on = (ClasswiseWrapper, MultitaskWrapper)
    wrappers = (m for m in metrics if isinstance(m, WrapperMetric) and not isinstance(m, passing_on))
    held = {id(child) for wrapper in wrappers for child in wrapper.modules() if child is not wrapper}
    return [metric for metric in metrics if id(metric) not in held]


# --- one row for a window and what the module logs at its step --------------------------------------------------------


class WindowRows(_LoggerConnector):
    """Logs each window once, in one row with the module's metrics of its step.

    The numbers come from the window's own all-reduce, and are the same on all ranks. They go to the loggers by the Trainer's
    ``log_every_n_steps``, and to ``trainer.callback_metrics`` and the progress bar at every window. The module's own ``log`` would
    cost a hundred times as much.
    """

    pending: dict[str, Tensor]  # metrics of a window that has ended inside the current loader batch
    in_bar: dict[str, Any]  # what the progress bar shows of the last window
    last_end: float | None = None  # when the last window ended

    @property
    @override
    def progress_bar_metrics(self) -> Any:
        shown = {name: value.item() if isinstance(value, Tensor) else value for name, value in self.in_bar.items()}
        return {**shown, **super().progress_bar_metrics}  # metrics of the module take precedence

    @override
    def on_batch_end(self) -> None:
        results = self.trainer._results  # of training or of validation
        if results or results is None:
            super().on_batch_end()
        else:  # nothing was logged; skip Lightning's slow search
            results.batch = results.batch_size = None

    def show(self, metrics: Mapping[str, Tensor | float], is_finite: bool = False) -> None:
        """Add metrics to ``trainer.callback_metrics``, and (all, or finite ones) to the next row of the loggers, if one is due."""
        shown = {name: v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64) for name, v in metrics.items()}
        self._callback_metrics.update(shown)
        self._logged_metrics.update(shown)
        if self.trainer.loggers and self.should_update_logs:
            self.pending.update({name: value for name, value in shown.items() if not is_finite or value.isfinite()})

    def flush(self) -> None:
        """Log pending metrics at the end of a loader batch or window, if the module has no row at this step."""
        if self.pending:
            self.log_metrics({})

    @override
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if step is None and self.pending:
            metrics, self.pending = {**self.pending, **metrics}, {}
        super().log_metrics(metrics, step)

    def show_window(self, windows: Windows) -> None:
        """Log the last window; in manual optimization, one for each call of ``manual_backward``."""
        others: dict[str, Tensor | float] = {}
        if isinstance(windows, ManualWindows) and windows.closed:
            closed, *more = windows.closed
            others.update({f"window/loss_{index}": call.loss for index, call in enumerate(more, 2)})
        elif isinstance(windows, Accumulation) and windows.closed is not None:
            closed = windows.closed
            if windows.policy.on_nonfinite == "skip":
                others["window/skipped_micro_batches"] = closed.left_out
                others["window/total_skipped_micro_batches"] = windows.total_left_out
            if closed.is_empty:
                return self.show(others)
            if windows.splitting is not None and windows.splitting.largest is not None:
                others["window/micro_batch_size"] = windows.splitting.largest
            if closed.gradient_norm is not None:
                others["window/grad_norm"] = closed.gradient_norm
        else:
            return None
        last_end, self.last_end = self.last_end, time.perf_counter()
        if last_end is not None and self.last_end > last_end and not isinstance(closed.weight, Tensor):
            others["window/weight_per_second"] = closed.weight / (self.last_end - last_end)
        steps = windows.clock.optimizer_steps
        self.in_bar = {"w_loss": closed.loss, "w_steps": str(steps)}
        shown = {
            "window/loss": closed.loss,
            "window/weight": closed.weight,
            "window/total_weight": windows.total_weight,
            "window/micro_batches": closed.micro_batches,
            "window/optimizer_steps": steps,
        }
        self.show({**shown, **others})
        return windows.epoch_loss.add(closed.loss, closed.weight)
