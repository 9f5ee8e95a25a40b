"""What is made or refused once, before the first window: by the policy, the module and its optimizers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_accum.accumulation import Accumulation
from lightning_accum.arguments import MisconfiguredError
from lightning_accum.engine import Engine
from lightning_accum.main_gradients import MainGradients, is_narrower
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.nonfinite import Guard
from lightning_accum.sync import slots_of

_log = logging.getLogger("lightning.pytorch.accumulation")


def main_gradients(dtype: torch.dtype, parameters: Callable[[], list[nn.Parameter]]) -> MainGradients | None:
    """Where gradients are added up in ``dtype``; None where they have it, or a wider one, anyway."""
    if not any(is_narrower(parameter.dtype, dtype) for parameter in parameters()):
        rank_zero_info(f"GradientAccumulation(accumulate_dtype={dtype}): no parameter has a narrower type, so it changes nothing.")
        return None
    return MainGradients(dtype, parameters)


def guard(strategy: Engine, accumulation: Accumulation) -> Guard:
    """What looks whether the micro-batches of a training are finite."""

    def in_words(micro_batch: MicroBatch) -> str:
        trainer = strategy.trainer()
        part = f" (micro-batch {micro_batch.position} of {micro_batch.number})" if micro_batch.number > 1 else ""
        batch, epoch = trainer.fit_loop.epoch_loop.batch_idx, trainer.current_epoch
        return f"Batch {batch}{part} of epoch {epoch} on rank {strategy.global_rank}"

    return Guard(
        accumulation.policy.on_nonfinite == "skip",
        lambda: slots_of(strategy.sync, strategy.parameters_by_name(), accumulation.sums),
        in_words,
        strategy.snapshotter,
        _log.info,
        strategy.ranks_of_micro_batch(),
        looks_at_gradients=getattr(strategy.precision_plugin, "scaler", None) is None,  # which looks at them by itself
    )


_Policy = TypeVar("_Policy", bound=str)


def checked(sync: _Policy, *others: str) -> _Policy:
    """The argument ``sync`` of a strategy.

    Raises:
        MisconfigurationException: it is none of them.
    """
    known = ("window", "micro_batch", *others)
    if sync not in known:
        raise MisconfiguredError(f"sync={sync!r}: expected {', '.join(map(_quoted, known[:-1]))} or {_quoted(known[-1])}")
    return sync


def _quoted(value: str) -> str:
    return f'"{value}"'
