"""Hands the decisions of Lightning's training loop about accumulation to the strategy, for one fit.

Checkpoints, tuners and callbacks refer to the loops of a Trainer, so loops are not replaced: each gets a subclass of its class
during a fit.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

from torch.optim import Optimizer

from lightning_accum.failures import reraise_first_rank_error
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.epochs import AccumulatingEpochLoop, AccumulatingFitLoop
from lightning_accum.trainer.from_lightning import _MultiProcessingLauncher, _SubprocessScriptLauncher, is_lightnings, pl, replacing
from lightning_accum.trainer.optimization import WindowManualOptimization, WindowOptimization
from lightning_accum.trainer.results import BatchResults, WindowRows
from lightning_accum.trainer.seams import specialised
from lightning_accum.trainer.uneven import DeferredSigterm, NonPaddingSampling
from lightning_accum.trainer.validation import AccumulatingTrainer

SIGTERMException = pl.utilities.exceptions.SIGTERMException


@contextmanager
def installed(trainer: pl.Trainer) -> Iterator[None]:
    """Inside, the strategy of a Trainer decides; afterwards all objects have their own types. It may end with a late SIGTERM."""
    strategy = cast("Engine", trainer.strategy)
    fit_loop, epoch_loop, signals = trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer._signal_connector
    plugin, kinds = trainer.precision_plugin, (pl.plugins.Precision, pl.plugins.FSDPPrecision)
    has_lightnings_clipping = any(is_lightnings(plugin, "clip_grad_by_norm", kind) for kind in kinds)
    clip = partial(_clip_by_norm, strategy, plugin.clip_grad_by_norm)
    with (
        specialised(trainer, AccumulatingTrainer, is_users_first=True),
        specialised(trainer._data_connector, NonPaddingSampling),
        specialised(signals, DeferredSigterm),
        specialised(trainer._logger_connector, WindowRows, pending={}, in_bar={}),
        specialised(fit_loop, AccumulatingFitLoop, seams=ExitStack()),
        specialised(epoch_loop, AccumulatingEpochLoop, strategy=strategy),
        specialised(epoch_loop.automatic_optimization, WindowOptimization, strategy=strategy),
        specialised(epoch_loop.manual_optimization, WindowManualOptimization, strategy=strategy),
        specialised(epoch_loop._results, BatchResults, strategy=strategy, replaced={}),
        replacing(plugin, clip_grad_by_norm=clip) if has_lightnings_clipping else nullcontext(),
        cast("AccumulatingFitLoop", fit_loop).seams,
    ):
        yield
        epoch_loop.manual_optimization.on_run_end()  # a step that raised leaves the optimizers' hooks in place
        is_over = trainer.state.status == "running"
        is_unanswered = cast("DeferredSigterm", signals).is_waiting and not signals.received_sigterm
    if is_unanswered and is_over:
        raise SIGTERMException


def _clip_by_norm(strategy: Engine, lightnings: Callable[..., None], optimizer: Optimizer, clip_val: int | float) -> None:
    """Clip through the strategy, and keep the norm, which Lightning drops."""
    accumulation = strategy.accumulation
    if accumulation is None:  # manual optimization does its own clipping
        lightnings(optimizer, clip_val)
    else:
        norm = strategy.clip_by_norm(strategy.precision_plugin.main_params(optimizer), clip_val)
        accumulation.closed = accumulation.closed and accumulation.closed._replace(gradient_norm=norm)


# --- the processes of a fit over ranks, from their launch on ----------------------------------------------------------


def naming_launcher(strategy: Engine) -> Any:
    """The launcher of a strategy; with it, all ranks of a fit raise the first rank's error, also before training."""
    launcher, environment = strategy._launcher, getattr(strategy, "cluster_environment", None)
    if launcher is None and environment is not None and environment.creates_processes_externally:
        # sharding strategies may have no launcher, for example under torchrun, where DDP's launcher starts no process either
        launcher = strategy._launcher = _SubprocessScriptLauncher(environment, strategy.num_processes, strategy.num_nodes)  # type: ignore[attr-defined]
    if launcher is not None and "launch" not in vars(launcher):
        # an attribute and not a class, since a launcher is pickled to spawn processes
        launcher.launch = partial(_launch, type(launcher).launch, launcher)  # type: ignore[method-assign]
    return launcher


def forks_or_spawns(launcher: Any) -> bool:
    """Whether the process starts the other ranks as functions."""
    return isinstance(launcher, _MultiProcessingLauncher)


def _launch(
    launch: Callable[..., Any],
    launcher: Any,
    function: Callable[..., Any],
    *args: Any,
    trainer: pl.Trainer | None = None,
    **kwargs: Any,
) -> Any:
    if trainer is not None and trainer.state.fn == "fit":
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
            error.code = 128 + signal.SIGTERM  # else the parent process waits for its result
        raise
