"""What is made or refused once, before the first window of a hand-written loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS

from lightning_accum import wider
from lightning_accum.accumulation import Accumulation
from lightning_accum.asked import Asked
from lightning_accum.check import MOST_BATCHES
from lightning_accum.errors import ArgumentError
from lightning_accum.exclusions import why_refused
from lightning_accum.fabric.training import Training
from lightning_accum.fabric.words import Words
from lightning_accum.main_gradients import MainGradients, is_narrower
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.nonfinite import Guard
from lightning_accum.policy import Policy
from lightning_accum.splitting import trimming
from lightning_accum.splitting.plan import Splitting
from lightning_accum.splitting.proofs import Proof
from lightning_accum.sync import slots_of
from lightning_accum.verdict import Verdict

_log = logging.getLogger("lightning.fabric.accumulation")


def refuse_sizes(micro_batch: Any) -> None:
    """Refuse sizes of micro-batches that a hand-written loop cannot have.

    Raises:
        ValueError: with the reason.
    """
    if micro_batch == "auto":
        raise ArgumentError(
            'micro_batch="auto" runs a batch again where memory runs out, and cannot run your loop again. Give a number of samples'
            " or Tokens(...); or train a LightningModule with GradientAccumulation."
        )
    if micro_batch == "offload":
        raise ArgumentError(
            'micro_batch="offload" is not for hand-written loops: run the forward and backward of each batch in'
            " torch.autograd.graph.save_on_cpu(pin_memory=True), and leave micro_batch out."
        )


def refuse(policy: Policy, training: Training, words: Words) -> None:
    """Refuse what a hand-written loop cannot have.

    Raises:
        ValueError: with the reason.
    """
    optimizers = [training.raw_optimizer]
    if isinstance(training.raw_optimizer, LBFGS):
        raise ArgumentError(
            "LBFGS runs its closure several times in a step, and accumulator.step() has none. Use another optimizer."
        )
    engine: dict[str, Any] = {}
    if training.ddp is not None:
        is_static, has_hook = bool(training.ddp.static_graph), bool(training.ddp._comm_hooks)
        engine = {"engine": "ddp", "is_static_graph": is_static, "has_comm_hook": has_hook, "strategy": "DDPStrategy"}
    elif training.is_sharded:
        engine = {"engine": "fsdp2", "strategy": "ModelParallelStrategy"}
    asked = Asked(
        policy, 1, training.module, optimizers=optimizers, parameters=training.parameters(), ranks=training.ranks.size, **engine
    )
    if (reason := why_refused(asked)) is not None:
        raise ArgumentError(words(reason))


def loss_without_wrapper(loss_of: Callable[[Any, Any], Tensor], training: Training) -> Callable[[Any], Tensor]:
    """The loss of a batch outside of any window, for which no rank waits for another; in full precision, where the model has it."""
    module = training.module
    precision: Any = getattr(getattr(training.fabric, "strategy", None), "precision", None)

    def loss(batch: Any) -> Tensor:
        is_narrow = precision is not None and any(map(wider.is_narrow, module.parameters()))
        with torch.enable_grad(), precision.forward_context() if is_narrow else nullcontext():
            return loss_of(module, precision.convert_input(batch) if is_narrow else batch)

    return loss


def splitting(
    policy: Policy, training: Training, is_proven: bool, samples: Callable[[], Collection[int]], words: Words
) -> Splitting | None:
    """How loader batches are split; None where each is a micro-batch.

    Args:
        policy: what was asked for.
        training: that runs them.
        is_proven: whether padding is trimmed can be tried out.
        samples: returns how many samples the loader puts into a batch.
        words: for warnings.

    Raises:
        ValueError: lengths are named, and cannot be used.
    """
    if policy.micro_batch is None:
        return None
    may_trim = is_proven and not training.is_sharded
    if isinstance(policy.trim_padding, str) and not may_trim:
        raise ArgumentError(
            f"trim_padding={policy.trim_padding!r} is tried out on two rows before it is used, which needs the loss as a function:"
            " pass loss_of=; and a model that is not sharded."
        )
    trim = policy.trim_padding if may_trim else False
    has_ranks, size, split = training.ranks.world_size > 1, policy.micro_batch, policy.split
    return Splitting(size, trim, split, has_ranks, words.rank_zero_warn, samples)


def difference_by_padding(policy: Policy, training: Training, loss_of: Callable[[Any], Tensor] | None) -> Proof:
    """What tries out whether the loss depends on padding; without the loss, nothing is trimmed and nothing asks."""
    weigh = policy.weight
    return partial(
        trimming.difference_by_padding,
        module=training.module,
        snapshotter=training.snapshotter,
        training_step=loss_of or (lambda batch: torch.zeros(())),
        weigh=weigh if callable(weigh) else None if weigh != "equal" else lambda batch: 1.0,
    )


def main_gradients(policy: Policy, training: Training) -> MainGradients | None:
    """Where gradients are added up, if in a wider type than that of their parameters.

    Raises:
        ValueError: it is ``fully_shard`` that adds them up.
    """
    dtype = policy.accumulate_dtype
    if dtype is None or not any(is_narrower(parameter.dtype, dtype) for parameter in training.parameters()):
        return None
    if training.is_sharded:
        raise ArgumentError(
            f"accumulate_dtype={dtype}: the model is sharded, and it is fully_shard that adds up its gradients. Leave it out, and"
            f" apply fully_shard with mp_policy=MixedPrecisionPolicy(reduce_dtype={dtype})."
        )
    return MainGradients(dtype, training.parameters)


def guard(training: Training, accumulation: Accumulation, words: Words) -> Guard | None:
    """What looks whether micro-batches are finite; None where nobody asked."""
    policy = accumulation.policy
    if policy.on_nonfinite == "propagate":
        return None

    def in_words(micro_batch: MicroBatch) -> str:
        part = f" (micro-batch {micro_batch.position} of {micro_batch.number})" if micro_batch.number > 1 else ""
        return f"Loader batch {training.seen}{part} of rank {training.ranks.rank}, counted from 1,"

    return Guard(
        policy.on_nonfinite == "skip",
        lambda: slots_of(training.sync, training.parameters_by_name(), accumulation.sums),
        in_words,
        training.snapshotter,
        _log.info,
        looks_at_gradients=training.scaler is None,  # which looks at them by itself
        warn=words.warn,
    )


def begin_check(accumulation: Accumulation, has_loss: bool) -> None:
    """Have the first batches checked, or have it said why they are not."""
    if accumulation.policy.weight == "equal":
        accumulation.verdict = Verdict(None, seen="a mean of means was asked for")
    elif not has_loss:
        accumulation.verdict = Verdict(None, seen="pass loss_of=")
    else:
        accumulation.checks_left = MOST_BATCHES
