"""What is called at each optimizer step: ``on_window_end``, and what else counts steps where no end of a loader batch shows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_accum.ended_window import EndedWindow
from lightning_accum.engine import Engine
from lightning_accum.hook_table import callbacks_of
from lightning_accum.loops.results import BatchResults, current_hook


def call_window_hooks(trainer: pl.Trainer, listeners: list[Any], window: EndedWindow) -> None:
    """Call ``on_window_end`` of those that have it."""
    module = trainer.lightning_module
    with _logging(trainer):
        for owner in listeners:
            owner.on_window_end(*((window,) if owner is module else (trainer, module, window)))


def call_step_counters(trainer: pl.Trainer, strategy: Engine, since: int, batch: Any, batch_idx: int) -> None:
    """Have those that count optimizer steps at the end of loader batches see one that no end of a loader batch comes after."""
    accumulation, module = strategy.accumulation, trainer.lightning_module
    assert accumulation is not None
    if trainer.global_step == since or not strategy.hooks.step_counters:
        return
    closed, dtype = accumulation.closed, accumulation.window.dtype
    outputs = {"loss": None if closed is None else torch.as_tensor(closed.loss, dtype=dtype, device=strategy.root_device)}
    with _logging(trainer):
        for owner in strategy.hooks.step_counters:
            arguments = (outputs, batch, batch_idx)
            owner.on_train_batch_end(*(arguments if owner is module else (trainer, module, *arguments)))


def call_checkpoints(trainer: pl.Trainer, since: int, batch: Any, batch_idx: int) -> None:
    """Have ModelCheckpoint save where one of its every n optimizer steps was not the last of its loader batch.

    A checkpoint is one of whole loader batches, since training cannot go on inside of one: it is taken at the end of the batch.
    """
    for callback in callbacks_of(trainer):
        if not isinstance(callback, ModelCheckpoint):
            continue
        every = callback._every_n_train_steps
        if every > 0 and trainer.global_step // every > since // every:
            callback._every_n_train_steps = _Reached(every)
            try:
                callback.on_train_batch_end(trainer, trainer.lightning_module, None, batch, batch_idx)
            finally:
                callback._every_n_train_steps = every


class _Reached(int):
    """A number of which any number of steps is a multiple; its name in checkpoints is the same."""

    def __rmod__(self, steps: int) -> int:
        return 0


@contextmanager
def _logging(trainer: pl.Trainer) -> Iterator[None]:
    """``self.log`` works in here as in ``on_train_batch_end``, also while the logs of micro-batches are collected."""
    module = trainer.lightning_module
    attributes, results = vars(module), cast("BatchResults", trainer.fit_loop.epoch_loop._results)
    collecting = attributes.get("log")
    is_collecting = collecting is not None and collecting is results.log_of_module
    if is_collecting:
        del attributes["log"]
    try:
        with current_hook(module, "on_train_batch_end"):
            yield
    finally:
        if is_collecting:
            attributes["log"] = collecting
