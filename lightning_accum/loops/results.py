"""What is logged in the micro-batches of a batch, kept apart until the batch ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.wrappers import ClasswiseWrapper, MultitaskWrapper
from torchmetrics.wrappers.abstract import WrapperMetric
from typing_extensions import override

from lightning_accum.engine import Engine
from lightning_accum.splitting.batch_log import BatchLog


class BatchResults(_ResultCollection):
    """Keeps what is logged in a micro-batch apart until its batch ends."""

    strategy: Engine | None = None
    batch_log: BatchLog | None = None
    metrics_of_module: tuple[int, list[Metric]] | None = None
    """The epoch in which they were looked for, and the metrics."""
    look_and_log: tuple[Callable[..., None], Callable[..., None]] | None = None
    """The module's own ``log``, and what stands in for it while a split batch runs."""
    shown: set[int]
    _is_batch_size_given: bool = False

    @override
    def log(self, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        self._is_batch_size_given = batch_size is not None
        super().log(*args, batch_size=batch_size, **kwargs)

    @override
    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        if self.batch_log is not None:
            self.batch_log.collect(key, value, batch_size, self._is_batch_size_given)
            return
        accumulation = None if self.strategy is None else self.strategy.accumulation
        if accumulation is not None and accumulation.is_shadow_batch and isinstance(value, Tensor):
            # it takes part in the other ranks' reduction, and adds nothing: the same batch was counted before
            value, batch_size = _weightless(value, self[key]), 0
        super().update_metrics(key, value, batch_size)
        metric = self[key]
        if self.strategy is not None and self.strategy.world_size > 1 and metric.is_tensor and metric.meta.is_mean_reduction:
            # Lightning averages it over the ranks, which cuts off the fraction of a whole number
            metric.cumulated_batch_size = metric.cumulated_batch_size.double()


def _weightless(value: Tensor, metric: _ResultMetric) -> Tensor:
    if metric.meta.is_sum_reduction:
        return torch.zeros_like(value)
    return value.nan_to_num() if metric.meta.is_mean_reduction else value  # times its batch size of 0


def _neutral(value: Tensor, metric: _ResultMetric) -> Tensor:
    """What changes nothing when it is reduced with what other ranks log; in the mean of a step, about what was logged last."""
    if metric.meta.is_max_reduction or metric.meta.is_min_reduction:
        return torch.full_like(value, -math.inf if metric.meta.is_max_reduction else math.inf)
    last = metric._forward_cache
    return last.clone() if metric.meta.is_mean_reduction and isinstance(last, Tensor) else torch.zeros_like(value)


@contextmanager
def collecting_logs(trainer: pl.Trainer) -> Iterator[BatchLog]:
    """Collect what the module logs, and log nothing yet."""
    module, results = trainer.lightning_module, cast("BatchResults", trainer.fit_loop.epoch_loop._results)
    if results.metrics_of_module is None:
        results.shown = set()
    if results.metrics_of_module is None or results.metrics_of_module[0] != trainer.current_epoch:
        results.metrics_of_module = (trainer.current_epoch, _metrics_in(module))
    log, registered_before = BatchLog(results.metrics_of_module[1], results.shown), set(results)
    attributes = vars(module)
    had_log, outer = attributes.get("log"), results.batch_log
    results.batch_log = log
    attributes["log"] = _look_and_log(results, module)
    try:
        yield log
    finally:
        results.batch_log = outer
        del attributes["log"]
        if had_log is not None:
            attributes["log"] = had_log
        log.close(lambda key: results[key].meta.on_step)
        # of an attempt that fails, nothing stays; else they are registered in the order in which they are shown
        log.registered = {key: results.pop(key) for key in list(results) if key not in registered_before}


def _look_and_log(results: BatchResults, module: pl.LightningModule) -> Callable[..., None]:
    """The same for all batches of a module: a compiled training_step is compiled anew for another."""
    modules_own = module.log
    known = results.look_and_log
    if known is not None and known[0] == modules_own:
        return known[1]

    def look_and_log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if results.batch_log is not None:
            results.batch_log.look_at(value)
        modules_own(name, value, *args, **kwargs)

    # what is looked at is no part of a graph that is compiled; `_compiler_ctx` is set by Lightning for a compiled module
    is_compiled = module._compiler_ctx is not None
    log = torch.compiler.disable(look_and_log) if is_compiled else look_and_log  # type: ignore[no-untyped-call]
    results.look_and_log = (modules_own, log)
    return log


def show_logs(trainer: pl.Trainer, log: BatchLog, is_left_out: bool = False) -> None:
    """Log what was collected, as the whole batch would have.

    Args:
        trainer: whose results it goes to.
        log: what was collected.
        is_left_out: the batch is as if it had never been there. What the ranks reduce together is logged without weight.
    """
    results = trainer.fit_loop.epoch_loop._results

    def of(key: str) -> _ResultMetric:
        return cast("_ResultMetric", results[key] if key in results else log.registered[key])

    def is_synced(key: str) -> bool:
        return trainer.world_size > 1 and (not of(key).is_tensor or of(key).meta.sync.should)

    for key, value, batch_size in log.merged(lambda key: of(key).meta.reduce_fx, is_synced):
        if is_left_out and not is_synced(key):
            continue
        if is_left_out and isinstance(value, Tensor):
            value, batch_size = _neutral(value, of(key)), 0
        elif is_left_out and key in results:
            continue  # a metric: it holds what it held before the batch
        results.setdefault(key, of(key))
        results.update_metrics(key, value, batch_size)


def _metrics_in(module: pl.LightningModule) -> list[Metric]:
    """The metrics of a module, but for those that a wrapper works with in ways of its own."""
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    passing_on = (ClasswiseWrapper, MultitaskWrapper)
    wrappers = (m for m in metrics if isinstance(m, WrapperMetric) and not isinstance(m, passing_on))
    held = {id(child) for wrapper in wrappers for child in wrapper.modules() if child is not wrapper}
    return [metric for metric in metrics if id(metric) not in held]


@contextmanager
def current_hook(module: pl.LightningModule, name: str) -> Iterator[None]:
    """The hook that ``module.log`` is called in."""
    attributes = vars(module)  # of a Module, setting one takes microseconds
    before = module._current_fx_name
    attributes["_current_fx_name"] = name
    try:
        yield
    finally:
        attributes["_current_fx_name"] = before
