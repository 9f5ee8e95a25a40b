"""Reads and sets the state of a Trainer in a fit, whose loops and connectors are of the classes of this folder by then."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from lightning_accum.from_lightning import pl


def trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    """The Trainer that a module is attached to."""
    return module._trainer


def loader_batches_seen(trainer: pl.Trainer) -> int:
    """Loader batches that training has drawn so far, over all epochs."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def loader_batches_into_window(trainer: pl.Trainer) -> int:
    """Where in its window a run goes on that was restarted in the middle of an epoch, as Lightning counts."""
    epoch_loop = trainer.fit_loop.epoch_loop
    ready = epoch_loop.batch_progress.current.ready
    if not epoch_loop.restarting or ready >= trainer.num_training_batches:
        return 0
    return ready % trainer.accumulate_grad_batches


def samples_of_loader(trainer: pl.Trainer) -> frozenset[int]:
    """How many samples the loaders put into a batch; empty where one of them does not say so."""
    combined = trainer.fit_loop._combined_loader
    sizes = [_batch_size(loader) for loader in ([] if combined is None else combined.flattened)]
    return frozenset() if None in sizes else frozenset(size for size in sizes if size is not None)


def _batch_size(loader: Any) -> int | None:
    if not isinstance(loader, DataLoader):
        return None
    sampler = loader.batch_sampler
    size = sampler.batch_size if type(sampler) is BatchSampler else loader.batch_size
    return size if isinstance(size, int) else None


def is_logging_due(trainer: pl.Trainer) -> bool:
    """Whether the Trainer's loggers get metrics at this optimizer step."""
    connector: Any = trainer._logger_connector  # without its type here and below: the classes of a fit import this file
    return bool(connector.should_update_logs)


def window_metrics(trainer: pl.Trainer) -> dict[str, Tensor | float]:
    """What is to be added to ``trainer.callback_metrics`` and ``logged_metrics`` once somebody looks."""
    shown: dict[str, Tensor | float] = cast("Any", trainer).window_metrics
    return shown


def log_metrics(trainer: pl.Trainer, metrics: dict[str, float]) -> None:
    """Give metrics to the Trainer's loggers, in the row that the module's own metrics of the step get."""
    cast("Any", trainer._logger_connector).hold(metrics)


def flush_metrics(trainer: pl.Trainer) -> None:
    """The loader batch of the last window has ended, or never will: what :func:`log_metrics` got is a row by itself."""
    cast("Any", trainer._logger_connector).flush()


def stop(trainer: pl.Trainer) -> None:
    """All ranks know that one got SIGTERM: Lightning ends them after the current loader batch."""
    trainer._signal_connector.received_sigterm = True
