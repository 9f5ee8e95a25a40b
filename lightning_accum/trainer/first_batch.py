"""What is tried out on the first batches of a fit: ``training_step`` on other batches, of which nothing is logged."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from lightning_accum import check
from lightning_accum.later_terms import check_doubted
from lightning_accum.looks import Checked, have_one_loss
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.from_lightning import DummyLogger, HalfPrecision, MixedPrecision, call, pl, rank_zero_info
from lightning_accum.trainer.results import collecting_logs
from lightning_accum.trial_mode import is_narrow
from lightning_accum.user_warnings import rank_zero_warn
from lightning_accum.whole.row_proof import prove_row_wise


def unlogged_step(trainer: pl.Trainer, kwargs: OrderedDict[str, Any]) -> Callable[[Any], Any]:
    """``training_step`` on another batch than that in ``kwargs``, of which nothing is logged.

    It runs in full precision, where rounding is the least; a module's loss hardly changes by that.
    """
    strategy, precision, others = cast("Engine", trainer.strategy), trainer.precision_plugin, [*kwargs.values()][1:]

    def training_step(batch: Any) -> Any:
        is_half = isinstance(precision, HalfPrecision) and any(map(is_narrow, trainer.lightning_module.parameters()))
        is_plain = isinstance(precision, (MixedPrecision, HalfPrecision)) and not is_half
        context = nullcontext() if is_plain else precision.train_step_context()
        with torch.enable_grad(), context, collecting_logs(trainer), _without_loggers(trainer):
            step = partial(call._call_lightning_module_hook, trainer, "training_step")
            return strategy.run_as_engine(step, batch, *others)

    return training_step


@contextmanager
def _without_loggers(trainer: pl.Trainer) -> Iterator[None]:
    """What ``training_step`` sends to loggers by itself is sent to none; their kind and their folders are as they are."""
    loggers = trainer.loggers
    trainer.loggers = [_silent(logger) for logger in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


def _silent(logger: Any) -> Any:
    nothing, nowhere = DummyLogger().log_metrics, DummyLogger().experiment
    methods = {"log_metrics": nothing, "log_hyperparams": nothing, "experiment": property(lambda _: nowhere)}
    kind = type(logger)
    silent: Any = object.__new__(type(kind.__name__, (kind,), methods))
    vars(silent).update(vars(logger))
    return silent


def _may_count_first(strategy: Engine, is_long: bool) -> bool:
    """The terms of a window can be counted before it runs."""
    if is_long and (strategy.accumulation is None or strategy.accumulation.rest_of_window is None):
        return False  # training_step draws its batches by itself
    if strategy.snapshotter.iterators():
        return False  # what it draws from one cannot be put back
    return strategy.policy.may_count_first(is_long)


def check_first_batch(trainer: pl.Trainer, strategy: Engine, kwargs: OrderedDict[str, Any]) -> None:
    """Check the loader batch in ``kwargs``, which are those of ``training_step``; they are empty where this rank has no batch.

    Called on all ranks at each loader batch, until enough rows were looked at on all.
    """
    accumulation = strategy.accumulation
    assert accumulation is not None
    step, samples = unlogged_step(trainer, kwargs), strategy.samples_of_loader()
    is_long = accumulation.policy.may_be_longer_than_one(trainer.accumulate_grad_batches)
    may_count = _may_count_first(strategy, is_long)
    is_told = "batch_idx" in kwargs
    after = unlogged_step(trainer, OrderedDict(kwargs, batch_idx=kwargs["batch_idx"] + 1)) if is_told else None
    checked = Checked(strategy, step, accumulation, samples, is_long, rank_zero_info, may_count, next_step=after)
    check.check_first_batch(checked, list(kwargs.values())[:1])
    accumulation.look_at_doubted = partial(check_doubted, checked)


def check_manual_batch(trainer: pl.Trainer, strategy: Engine, kwargs: OrderedDict[str, Any]) -> None:
    """As ``check_first_batch``, where the module optimizes by itself: the loss of each ``manual_backward`` alone. Nothing steps."""
    windows = strategy.manual
    assert windows is not None
    if not windows.takes_check():
        return
    run, number = unlogged_step(trainer, kwargs), 0
    is_long = windows.policy.may_be_longer_than_one(trainer.accumulate_grad_batches)

    def loss_of_call(batch: Any, number: int) -> torch.Tensor | None:
        with windows.trying_out() as losses:
            run(batch)
        return losses[number] if number < len(losses) else None

    def sum_of_losses(batch: Any, moves: bool) -> torch.Tensor:
        with windows.trying_out(moves) as losses:
            run(batch)
        found = torch.stack([loss.detach().reshape(()) for loss in losses])
        places = torch.arange(1.0, len(found) + 1, device=found.device)  # none makes up for another
        return torch.where((found == 0).any(), torch.nan, (places * found).sum())  # one that is 0 shows nothing

    while number < windows.ranks.largest(windows.most_tried)[0]:
        accumulation = windows.call(number)
        step, inform = partial(loss_of_call, number=number), lambda _: None  # the line at the start says it for each call
        checked = Checked(strategy, step, accumulation, strategy.samples_of_loader(), is_long, inform, is_manual=True)
        if accumulation.checks_left:
            check.check_first_batch(checked, list(kwargs.values())[:1])
        if number == 0 and is_long and windows.is_free_of_steps is None and not checked.on_any(accumulation.checked_rows is None):
            before, after = (replace(checked, step=partial(sum_of_losses, moves=moves)) for moves in (False, True))
            windows.is_free_of_steps = have_one_loss(before, after)
        number += 1


def prove_row_wise_step(trainer: pl.Trainer, strategy: Engine, kwargs: OrderedDict[str, Any]) -> None:
    """Try submodules in micro-batches on the loader batch in ``kwargs``, while that is due. Called as ``check_first_batch``."""
    row_wise = strategy.row_wise
    if row_wise is not None and row_wise.proofs_left:
        batches = [value for name, value in kwargs.items() if name != "dataloader_iter"][:1]
        step, samples = unlogged_step(trainer, kwargs), strategy.samples_of_loader()
        prove_row_wise(strategy, row_wise, step, batches, samples, rank_zero_warn)
