"""What a training says at its start: what was understood, and which windows will never be full."""

from __future__ import annotations

from typing import Any

from lightning_accum.accumulation import Accumulation
from lightning_accum.micro_batch import MicroBatch, Weighed
from lightning_accum.splitting.micro_batch import Tokens
from lightning_accum.weighing.counts import SampleCount, TokenCount, count_samples
from lightning_accum.whole.offload import offload_in_words


def window_in_words(loader_batches: int, ranks: int, samples: int | None) -> str:
    """A window, for the line at the start."""
    words = f"a window is {loader_batches} loader batch{'es' if loader_batches != 1 else ''}"
    if ranks > 1:
        words += f" on each of {ranks} ranks"
    if samples is not None:
        words += f", {samples * loader_batches * ranks} samples with loader batches like the first ({samples})"
    return words


def start_line(
    accumulation: Accumulation, micro_batch: MicroBatch, weighed: Weighed, samples: int | None, loader_batches: int
) -> str:
    """One line: what was understood."""
    policy = accumulation.policy
    if isinstance(policy.window, Tokens):
        tokens, unit = policy.window.at(float(accumulation.total_weight)), _unit(accumulation, micro_batch, weighed)
        parts = [f"a window is as many loader batches as come to {tokens} {unit} over all ranks"]
    else:
        parts = [window_in_words(loader_batches, accumulation.world_size // accumulation.ranks.same_rows, samples)]
    if accumulation.splitting is not None:
        parts.append(f"each runs {accumulation.splitting.describe()}")
    if policy.offload:
        parts.append(offload_in_words(accumulation.ranks.device))
    if accumulation.row_wise is not None:
        parts.append(accumulation.row_wise.describe())
    if accumulation.weigher.criterion is not None:
        parts.append(f"weight: {accumulation.weigher.criterion}")
    if accumulation.sums is not None:
        parts.append(f"gradients are added up in {accumulation.sums.dtype}")
    if accumulation.verdict is not None:
        parts.append(str(accumulation.verdict))
    return f"GradientAccumulation: {'; '.join(parts)}."


def _unit(accumulation: Accumulation, micro_batch: MicroBatch, weighed: Weighed) -> str:
    """What the weight of a micro-batch counts, in words."""
    weight = accumulation.policy.main_weight
    if weight == "auto":
        if weighed.weight is not None and float(weighed.weight) == count_samples(micro_batch.batch):
            return "samples (the loss has no tokens)"
        is_of_tokens = accumulation.weigher.criterion is not None and accumulation.weigher.criterion.startswith("cross entropy")
        return "tokens" if is_of_tokens else "of what the loss is divided by"
    if isinstance(weight, (TokenCount, SampleCount)):
        return "tokens" if isinstance(weight, TokenCount) else "samples"
    return 'micro-batches (weight="equal")' if weight == "equal" else f"of weight={accumulation.weigher.criterion}"


def warn_of_windows_never_full(
    accumulation: Accumulation, micro_batch: MicroBatch, weighed: Weighed, batch: Any, loader_batches: float
) -> None:
    """Called at the first micro-batch."""
    policy = accumulation.policy
    if not isinstance(policy.window, Tokens) or policy.tail == "carry" or not weighed.weight:
        return
    part, whole = count_samples(micro_batch.batch), count_samples(batch)
    in_batch = float(weighed.weight) * (whole / part if part and whole else 1)
    unit = _unit(accumulation, micro_batch, weighed)
    in_epoch = in_batch * loader_batches * accumulation.world_size
    tokens = policy.window.at(float(accumulation.total_weight))
    if in_epoch < tokens:
        outcome = "nothing is trained" if policy.tail == "drop" else "there is one optimizer step an epoch, on what is there"
        accumulation.warn_once(
            f"A window of {tokens} {unit} is never full: by the first loader batch an epoch has about {in_epoch:.0f} of"
            f' them, and with tail="{policy.tail}" {outcome}. Use a smaller window, or tail="carry".'
        )
