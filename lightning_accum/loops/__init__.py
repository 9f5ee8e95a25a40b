"""The places where Lightning's training loop decides about accumulation, handed over to the strategy.

This folder is the only place that touches Lightning's internals (underscored names). Each is a row of the table of seams.

The loops of a Trainer keep their identity and their progress, since checkpoints, tuners and callbacks hold on to them: each
gets a subclass of its own class instead of a successor, for as long as a fit takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from lightning_accum.loops.epochs import AccumulatingEpochLoop, AccumulatingFitLoop
from lightning_accum.loops.launch import naming_launcher
from lightning_accum.loops.loggers import WindowRows
from lightning_accum.loops.manual import WindowManualOptimization
from lightning_accum.loops.optimization import WindowOptimization, loss_unlogged
from lightning_accum.loops.results import BatchResults
from lightning_accum.loops.specialised import specialised
from lightning_accum.loops.trainer import AccumulatingTrainer
from lightning_accum.loops.uneven import PatientSignals, UnrepeatingData, stop
from lightning_accum.seams import SeamError

if TYPE_CHECKING:
    from lightning_accum.strategies.mixin import AccumulationMixin

__all__ = [
    "end_window_inside_batch",
    "flush_metrics",
    "handle_sigterm_before_training",
    "installed",
    "is_logging_due",
    "loader_batches_into_window",
    "loader_batches_seen",
    "log_metrics",
    "loss_unlogged",
    "naming_launcher",
    "samples_of_loader",
    "show_metrics",
    "stop",
    "trainer_of",
]


@contextmanager
def installed(trainer: pl.Trainer) -> Iterator[None]:
    """Hand the decisions of the Trainer's fit loop over to its strategy, for one fit.

    Afterwards the Trainer, its loops and its connectors have the types and attributes that they had.

    Raises:
        SIGTERMException: (at the end) SIGTERM has come, and there was no window any more that could have told the other ranks.
    """
    strategy = cast("AccumulationMixin", trainer.strategy)
    fit_loop, epoch_loop, signals = trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer._signal_connector
    with (
        specialised(trainer, AccumulatingTrainer, is_users_first=True, window_metrics={}),
        specialised(trainer._data_connector, UnrepeatingData),
        specialised(signals, PatientSignals, before_training=ExitStack()),
        specialised(trainer._logger_connector, WindowRows, pending={}),
        specialised(fit_loop, AccumulatingFitLoop, seams=ExitStack()),
        specialised(epoch_loop, AccumulatingEpochLoop, strategy=strategy),
        specialised(epoch_loop.automatic_optimization, WindowOptimization, strategy=strategy),
        specialised(epoch_loop.manual_optimization, WindowManualOptimization, strategy=strategy),
        specialised(epoch_loop._results, BatchResults, strategy=strategy),
        cast("PatientSignals", signals).before_training,
        cast("AccumulatingFitLoop", fit_loop).seams,
    ):
        yield
        epoch_loop.manual_optimization.on_run_end()  # a step that raised left the optimizers' hooks in place
        cast("AccumulatingTrainer", trainer).show_window_metrics()  # those of another run take their place
        is_over = trainer.state.status == TrainerStatus.RUNNING
        if is_over and strategy.watch.is_unfinished:
            raise SeamError("Training is over, and _FitLoop.on_run_end was not called: an unfinished window took no step.")
        is_unheard = cast("PatientSignals", signals).is_waiting and not signals.received_sigterm
    if is_unheard and is_over:
        raise SIGTERMException


def handle_sigterm_before_training(trainer: pl.Trainer) -> None:
    """The ranks of a fit are connected: have one that gets SIGTERM name itself on the others."""
    signals = cast("PatientSignals", trainer._signal_connector)
    signals.before_training.enter_context(signals.handled_before_training())


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


def end_window_inside_batch(trainer: pl.Trainer) -> None:
    """A micro-batch has ended, but not its loader batch. Called on all ranks together."""
    cast("AccumulatingEpochLoop", trainer.fit_loop.epoch_loop).end_window_inside_batch()


def is_logging_due(trainer: pl.Trainer) -> bool:
    """Whether the Trainer's loggers get metrics at this optimizer step."""
    return trainer._logger_connector.should_update_logs


def show_metrics(trainer: pl.Trainer, metrics: Mapping[str, Tensor | float]) -> None:
    """Add to ``trainer.callback_metrics`` and ``logged_metrics``, numbers in double precision."""
    cast("AccumulatingTrainer", trainer).window_metrics.update(metrics)


def log_metrics(trainer: pl.Trainer, metrics: dict[str, float]) -> None:
    """Give metrics to the Trainer's loggers, in the row that the module's own metrics of the step get."""
    cast("WindowRows", trainer._logger_connector).hold(metrics)


def flush_metrics(trainer: pl.Trainer) -> None:
    """The loader batch of the last window has ended, or never will: what :func:`log_metrics` got is a row by itself."""
    cast("WindowRows", trainer._logger_connector).flush()
