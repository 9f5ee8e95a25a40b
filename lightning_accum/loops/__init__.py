"""The places where Lightning's training loop decides about accumulation, handed over to the strategy.

This folder is the only place that touches Lightning's internals (underscored names). All were read in Lightning 2.6.6;
``tests/test_lightning_internals.py`` fails loudly when a release moves one.

The loops of a Trainer keep their identity and their progress, since checkpoints, tuners and callbacks hold on to them: each
gets a subclass of its own class instead of a successor.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from lightning_accum.loops.epochs import AccumulatingEpochLoop, AccumulatingFitLoop
from lightning_accum.loops.loggers import WindowRows
from lightning_accum.loops.manual import WindowManualOptimization
from lightning_accum.loops.optimization import WindowOptimization, loss_unlogged
from lightning_accum.loops.results import BatchResults
from lightning_accum.loops.trainer import AccumulatingTrainer
from lightning_accum.loops.uneven import PatientSignals, UnrepeatingData, stop

if TYPE_CHECKING:
    from lightning_accum.strategies.mixin import AccumulationMixin

__all__ = [
    "end_metrics",
    "end_window_inside_batch",
    "flush_metrics",
    "install",
    "is_logging_due",
    "loader_batches_into_window",
    "loader_batches_seen",
    "log_metrics",
    "loss_unlogged",
    "samples_of_loader",
    "show_metrics",
    "stop",
]


def install(trainer: pl.Trainer) -> None:
    """Hand the decisions of the Trainer's fit loop over to its strategy."""
    fit_loop = trainer.fit_loop
    _specialise(trainer, AccumulatingTrainer)
    cast("AccumulatingTrainer", trainer).window_metrics = {}
    _specialise(trainer._data_connector, UnrepeatingData)
    _specialise(trainer._signal_connector, PatientSignals)
    _specialise(trainer._logger_connector, WindowRows)
    cast("WindowRows", trainer._logger_connector).pending = {}
    _specialise(fit_loop, AccumulatingFitLoop)
    _specialise(fit_loop.epoch_loop, AccumulatingEpochLoop)
    _specialise(fit_loop.epoch_loop.automatic_optimization, WindowOptimization)
    _specialise(fit_loop.epoch_loop.manual_optimization, WindowManualOptimization)
    _specialise(fit_loop.epoch_loop._results, BatchResults)
    results = cast("BatchResults", fit_loop.epoch_loop._results)
    results.metrics_of_module, results.strategy = None, cast("AccumulationMixin", trainer.strategy)
    results.look_and_log = None
    epoch_loop = fit_loop.epoch_loop
    for loop in (epoch_loop, epoch_loop.automatic_optimization, epoch_loop.manual_optimization):
        cast("AccumulatingEpochLoop | WindowOptimization | WindowManualOptimization", loop).strategy = cast(
            "AccumulationMixin", trainer.strategy
        )


def _specialise(instance: Any, mixin: type) -> None:
    if not isinstance(instance, mixin):
        instance.__class__ = _subclass(mixin, instance.__class__)


@cache
def _subclass(mixin: Any, base: Any) -> type:
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "__doc__": base.__doc__})


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


def end_window_inside_batch(trainer: pl.Trainer) -> None:
    """A micro-batch has ended, but not its loader batch. Called on all ranks together."""
    cast("AccumulatingEpochLoop", trainer.fit_loop.epoch_loop).end_window_inside_batch()


def is_logging_due(trainer: pl.Trainer) -> bool:
    """Whether the Trainer's loggers get metrics at this optimizer step."""
    return trainer._logger_connector.should_update_logs


def show_metrics(trainer: pl.Trainer, metrics: Mapping[str, Tensor | float]) -> None:
    """Add to ``trainer.callback_metrics`` and ``logged_metrics``, numbers in double precision."""
    cast("AccumulatingTrainer", trainer).window_metrics.update(metrics)


def end_metrics(trainer: pl.Trainer) -> None:
    """What was shown is there for good: those of another run of the Trainer take its place."""
    cast("AccumulatingTrainer", trainer).show_window_metrics()


def log_metrics(trainer: pl.Trainer, metrics: dict[str, float]) -> None:
    """Give metrics to the Trainer's loggers, in the row that the module's own metrics of the step get."""
    cast("WindowRows", trainer._logger_connector).hold(metrics)


def flush_metrics(trainer: pl.Trainer) -> None:
    """The loader batch of the last window has ended, or never will: what :func:`log_metrics` got is a row by itself."""
    cast("WindowRows", trainer._logger_connector).flush()
