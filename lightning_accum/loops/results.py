"""What is logged in the micro-batches of a batch, kept apart until the batch ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torchmetrics import Metric
from typing_extensions import override

from lightning_accum.batch_log import BatchLog


class BatchResults(_ResultCollection):
    """Keeps what is logged in a micro-batch apart until its batch ends."""

    batch_log: BatchLog | None = None
    metrics_of_module: list[Metric] | None = None
    shown: set[int]
    _is_batch_size_given = False

    @override
    def log(self, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        self._is_batch_size_given = batch_size is not None
        super().log(*args, batch_size=batch_size, **kwargs)

    @override
    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        if self.batch_log is None:
            super().update_metrics(key, value, batch_size)
        else:
            self.batch_log.collect(key, value, batch_size, self._is_batch_size_given)


@contextmanager
def collecting_logs(trainer: pl.Trainer) -> Iterator[BatchLog]:
    """Collect what the module logs, and log nothing yet."""
    module, results = trainer.lightning_module, cast("BatchResults", trainer.fit_loop.epoch_loop._results)
    if results.metrics_of_module is None:
        results.metrics_of_module = [child for child in module.modules() if isinstance(child, Metric)]
        results.shown = set()
    log = BatchLog(results.metrics_of_module, results.shown)
    modules_own = module.log

    def look_and_log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        log.look_at(value)
        modules_own(name, value, *args, **kwargs)

    attributes = vars(module)
    had_log = attributes.get("log")
    results.batch_log = log
    attributes["log"] = look_and_log
    try:
        yield log
    finally:
        results.batch_log = None
        del attributes["log"]
        if had_log is not None:
            attributes["log"] = had_log
        log.close(lambda key: results[key].meta.on_step)


def show_logs(trainer: pl.Trainer, log: BatchLog) -> None:
    """Log what was collected, as the whole batch would have."""
    results = trainer.fit_loop.epoch_loop._results
    for key, value, batch_size in log.merged(lambda key: results[key].meta.reduce_fx):
        results.update_metrics(key, value, batch_size)


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
