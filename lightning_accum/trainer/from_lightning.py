"""All imports from Lightning, from the package that ``package.py`` selects."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_accum.errors import AccumulationError, ArgumentError
from lightning_accum.trainer.package import take

if TYPE_CHECKING:
    import lightning.fabric as _fabric
    import lightning.pytorch as _pl
    from lightning.pytorch.trainer import connectors as _connectors
else:
    _pl = import_module(take())
    _fabric = import_module("lightning.fabric" if take() == "lightning.pytorch" else "lightning_fabric")
    _connectors = _pl.trainer.connectors

pl, fabric = _pl, _fabric
_AutomaticOptimization = pl.loops.optimization.automatic._AutomaticOptimization
_DataConnector = _connectors.data_connector._DataConnector
_DataFetcher = pl.loops.fetchers._DataFetcher
_FitLoop = pl.loops.fit_loop._FitLoop
_LoggerConnector = _connectors.logger_connector.logger_connector._LoggerConnector
_ManualOptimization = pl.loops.optimization.manual._ManualOptimization
_MultiProcessingLauncher = pl.strategies.launchers.multiprocessing._MultiProcessingLauncher
_PrefetchDataFetcher = pl.loops.fetchers._PrefetchDataFetcher
_ResultCollection = _connectors.logger_connector.result._ResultCollection
_ResultMetric = _connectors.logger_connector.result._ResultMetric
_SignalConnector = _connectors.signal_connector._SignalConnector
_TrainingEpochLoop = pl.loops.training_epoch_loop._TrainingEpochLoop
call = pl.trainer.call
Closure = pl.loops.optimization.automatic.Closure
ClosureResult = pl.loops.optimization.automatic.ClosureResult
MisconfigurationException = fabric.utilities.exceptions.MisconfigurationException
move_data_to_device = fabric.utilities.move_data_to_device
rank_zero_info = pl.utilities.rank_zero.rank_zero_info
SIGTERMException = pl.utilities.exceptions.SIGTERMException
Strategy = pl.strategies.Strategy


class MisconfiguredError(AccumulationError, MisconfigurationException):
    """Wrong arguments, module, data or Trainer. It is an error of Lightning and of this package."""


@contextmanager
def misconfigured() -> Iterator[None]:
    """Inside, an ArgumentError is raised as Lightning's error for wrong arguments."""
    try:
        yield
    except ArgumentError as error:
        raise MisconfiguredError(str(error)) from error.__cause__


def is_lightnings(owner: object, hook: str, kind: type = pl.LightningModule) -> bool:
    """Whether a module, or another ``kind`` of object, does not override Lightning's ``hook``."""
    return getattr(type(owner), hook) is getattr(kind, hook) and hook not in vars(owner)


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The Trainer's callbacks, to read and to add to."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector, unseen by type checkers
    return callbacks


def forks_or_spawns(launcher: Any) -> bool:
    """Whether the process starts the other ranks as functions."""
    return isinstance(launcher, _MultiProcessingLauncher)


def with_status(error: SystemExit, trainer: pl.Trainer) -> SystemExit:
    """The SIGTERMException that ends a rank, with a status if a process that started it as a function waits for its result."""
    if forks_or_spawns(trainer.strategy.launcher):
        error.code = 128 + signal.SIGTERM
    return error


def scheduler_of_windows(trainer: pl.Trainer) -> pl.callbacks.GradientAccumulationScheduler | None:
    """Lightning's own callback that changes the number of loader batches in a window by the epoch."""
    return next((own for own in callbacks_of(trainer) if isinstance(own, pl.callbacks.GradientAccumulationScheduler)), None)


def longest_window(trainer: pl.Trainer) -> int:
    """Loader batches in the longest window by the Trainer's number, or by Lightning's scheduler of it."""
    scheduler = scheduler_of_windows(trainer)
    return max([trainer.accumulate_grad_batches, *([] if scheduler is None else scheduler.scheduling.values())])
