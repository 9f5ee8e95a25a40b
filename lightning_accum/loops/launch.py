"""What runs in each process of a fit over ranks, from its launch on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_accum.failures import reraise_first_rank_error


def naming_launcher(strategy: Strategy) -> _Launcher | None:
    """The launcher of a strategy; it runs fits so that all ranks raise what the first of them failed with, before training too."""
    launcher, environment = strategy._launcher, getattr(strategy, "cluster_environment", None)
    if launcher is None and environment is not None and environment.creates_processes_externally:
        # sharding strategies have none, under torchrun for example; that of DDP then starts no process either
        launcher = strategy._launcher = _SubprocessScriptLauncher(environment, strategy.num_processes, strategy.num_nodes)  # type: ignore[attr-defined]
    if launcher is not None and "launch" not in vars(launcher):
        # an attribute and not a class, since a launcher is pickled where it spawns processes
        launcher.launch = partial(_launch, type(launcher).launch, launcher)  # type: ignore[method-assign]
    return launcher


def forks_or_spawns(launcher: _Launcher | None) -> bool:
    """Whether the process starts the others from itself, as functions."""
    return isinstance(launcher, _MultiProcessingLauncher)


def _launch(
    launch: Callable[..., Any],
    launcher: _Launcher,
    function: Callable[..., Any],
    *args: Any,
    trainer: pl.Trainer | None = None,
    **kwargs: Any,
) -> Any:
    if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
        function = partial(_fit_on_rank, forks_or_spawns(launcher), function)
    try:
        return launch(launcher, function, *args, trainer=trainer, **kwargs)
    finally:
        vars(launcher).pop("launch", None)


def _fit_on_rank(is_forked: bool, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        with reraise_first_rank_error(passing=(SIGTERMException,)):
            return function(*args, **kwargs)
    except SIGTERMException as error:
        if is_forked:
            error.code = 128 + signal.SIGTERM  # with status 0 the process that forked this one waits for its result
        raise
