"""The messages at the start of a training: the policy and the loss, and a warning of windows that are never full."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from textwrap import fill
from typing import Any

from torch import Tensor

from lightning_accum.accumulation import Accumulation
from lightning_accum.boundary import TAILS
from lightning_accum.micro_batch import MicroBatch, Weighed
from lightning_accum.policy import Tokens
from lightning_accum.splitting.rows import Layout
from lightning_accum.weighing.counts import SampleCount, TokenCount, count_samples
from lightning_accum.whole.offload import offload_in_words

WIDTH = 120


def window_in_words(loader_batches: int, ranks: int, samples: int | None) -> str:
    """The size of an optimizer step in words; the samples are estimated from the first batch."""
    if loader_batches == ranks == 1 and samples is not None:
        return f"accumulating {samples} samples a step"
    words = f"accumulating {loader_batches} loader batch{'es' if loader_batches != 1 else ''}"
    if ranks > 1:
        words += f" of each of {ranks} ranks"
    if samples is not None:
        words += f" ({samples * loader_batches * ranks} samples)"
    return f"{words} a step"


def samples_of(batch: Any, samples: Collection[int]) -> int | None:
    """The number of samples in a loader batch; None if its rows may not be samples, as in a graph."""
    if isinstance(batch, Iterator):  # training_step draws its own batches
        return None
    try:
        return Layout(batch, samples=samples).size
    except Exception:  # any type of batch, which need not be splittable
        if len(samples) == 1 and 1 not in samples:  # else the dataset may make whole batches
            return next(iter(samples))
        return batch.size(0) if isinstance(batch, Tensor) and batch.dim() else None


def in_lines(parts: list[str]) -> str:
    """The parts in one line, or in several if they are longer than a terminal is wide."""
    return fill("; ".join(parts), WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def start_line(
    accumulation: Accumulation,
    micro_batch: MicroBatch,
    weighed: Weighed,
    samples: Collection[int],
    loader_batches: int,
    of_epoch: float,
) -> str:
    """The start line: ``accumulating 4 loader batches a step; loss: mean cross entropy (exact, checked to 7e-8)``.

    Called at the first micro-batch, with the batch sizes of the loader and the loader batches of a window and of an epoch. Warns of
    windows that are never full.
    """
    policy, batch = accumulation.policy, micro_batch.batch if accumulation.plan is None else accumulation.plan.batch
    if isinstance(policy.window, Tokens):
        tokens, unit = policy.window.at(float(accumulation.total_weight)), _unit(accumulation, micro_batch, weighed)
        window = f"accumulating {tokens} {unit} a step"
        if weighed.weight and not TAILS[policy.tail].goes_on:
            part, whole = count_samples(micro_batch.batch), count_samples(batch)
            in_batch = float(weighed.weight) * (whole / part if part and whole else 1)
            in_epoch = in_batch * of_epoch * accumulation.world_size
            if in_epoch < tokens:
                accumulation.warn_once(
                    f"A window of {tokens} {unit} is never full: an epoch has about {in_epoch:.0f} of them (estimated from its "
                    f'first loader batch), and with tail="{policy.tail}" {TAILS[policy.tail].outcome}. Use a smaller window, or '
                    'tail="carry".'
                )
    else:
        ranks = accumulation.world_size // accumulation.ranks.same_rows
        window = window_in_words(loader_batches, ranks, samples_of(batch, samples))
    if accumulation.splitting is not None:
        window += f" {accumulation.splitting.describe()}"
    parts = [window + _how_it_runs(accumulation)]
    if accumulation.weigher.criterion is not None:
        parts.append(f"loss: {accumulation.weigher.criterion}")
    if accumulation.check.verdict is not None:
        parts[-1] += f" ({accumulation.check.verdict})"
    if accumulation.sums is not None:
        parts.append(f"gradients summed in {accumulation.sums.dtype}")
    return in_lines(parts)


def manual_start_line(calls: Sequence[Accumulation], lines: Sequence[str], samples: int | None, loader_batches: int) -> str:
    """The start line of manual optimization: the line of code and the loss of each backward call."""
    first = calls[0]
    parts = [window_in_words(loader_batches, first.ranks.size, samples) + _how_it_runs(first), "manual optimization"]
    for number, (call, line) in enumerate(zip(calls, lines, strict=True), 1):
        name = f"window/loss_{number}" if number > 1 else "window/loss"
        verdict = f" ({call.check.verdict})" if call.check.verdict else ""
        parts.append((f"{name} of {line}: {call.weigher.criterion}" if line else "no call of self.manual_backward") + verdict)
    return in_lines(parts)


def _how_it_runs(accumulation: Accumulation) -> str:
    offload = f", {offload_in_words(accumulation.ranks.device)}" if accumulation.policy.offload else ""
    return offload if accumulation.row_wise is None else f"{offload}, {accumulation.row_wise.describe()}"


def _unit(accumulation: Accumulation, micro_batch: MicroBatch, weighed: Weighed) -> str:
    """The unit of the weight, in words."""
    weight = accumulation.policy.weight
    weight = weight[0] if isinstance(weight, tuple) else weight
    if weight == "auto":
        if weighed.weight is not None and float(weighed.weight) == count_samples(micro_batch.batch):
            return "samples"
        return "tokens" if "cross entropy" in (accumulation.weigher.criterion or "") else "units of weight"
    if isinstance(weight, (TokenCount, SampleCount)):
        return "tokens" if isinstance(weight, TokenCount) else "samples"
    return "micro-batches" if weight == "equal" else f"units of weight={accumulation.weigher.criterion}"
