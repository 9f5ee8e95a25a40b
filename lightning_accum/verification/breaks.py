"""What can break equality, in words: what was seen, and what mends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_accum.verification.report import Break

_WORDS = {
    "non-deterministic operations": (
        "The full batch, run twice with the same random numbers, gives two gradients.",
        "torch.use_deterministic_algorithms(True) replaces such operations where there is a replacement. Until then, nothing finer"
        " than this can be found out.",
    ),
    "random numbers": (
        "The full batch itself gives another gradient with other random numbers, and what draws them cannot be made the same for"
        " batches of all sizes (a permutation of the batch, Python's or NumPy's generator).",
        "No argument does: micro-batches draw other numbers than their batch, and are equal to it in distribution only. Verify a"
        " copy of the module that does not draw them.",
    ),
    "non-finite gradient": (
        "The gradient of the micro-batches is infinite or NaN, where that of the full batch is finite.",
        "Look for what divides by a count that can be 0 in a micro-batch, or for a variance over a single row.",
    ),
    "BatchNorm": (
        "Each micro-batch is normalised by its own statistics, in {}.",
        'GradientAccumulation(micro_batch="offload") runs a loader batch whole: have the loader yield the batch that is wanted. Or'
        " use GroupNorm, or layers in evaluation mode.",
    ),
    "batch_idx": (
        "training_step reads batch_idx, which is another for every micro-batch of a window, and 0 for the full batch.",
        "GradientAccumulation(micro_batch=...) splits each loader batch into micro-batches of the same batch_idx; or read"
        " self.global_step, which counts optimizer steps.",
    ),
    "padding": (
        "The loss depends on padding: {}, and with that padding the micro-batches have other gradients.",
        "Mask the padding in the module and in its loss; or let the loader pad all batches to one length.",
    ),
    "losses that do not add up": (
        "{}",
        'GradientAccumulation(micro_batch="offload"), which runs the batch as it is.',
    ),
    "state": (
        "The same batch twice gives another gradient than once: the module carries something from one training_step to the next (a"
        " hidden state, a counter, a buffer that each forward updates).",
        "No argument does. Reset it in training_step, or update it once in on_train_batch_start.",
    ),
    "weight": (
        "The micro-batches are not weighed by what their losses are divided by.",
        'weight="auto" reads that from the loss: so the step was the full batch\'s.',
    ),
    "rows that depend on each other": (
        "The module computes something over the whole batch that its parts do not add up to.{}",
        'GradientAccumulation(micro_batch="offload"), which runs the batch as it is.',
    ),
    "optimizer step": (
        "The gradients are equal, but the same gradient moves the parameters elsewhere: the learning rate, the optimizer or a hook"
        " around the step differs.",
        "Compare what configure_optimizers and the hooks around the step do with a window: they may count loader batches.",
    ),
    "buffers": (
        "After the step {} differ by {:.1e} from what the full batch leaves: each forward updates them once.",
        "No argument does. Update them once a step, in on_train_batch_start or on_before_zero_grad.",
    ),
}
"""By name: what was seen of it, and what mends it."""


def named(name: str, difference: float, *words: Any, without: float | None = None) -> Break:
    """The break of this name.

    Args:
        name: a key of the table above.
        difference: how far the gradients differ with it.
        words: what its sentence is completed by.
        without: how far they differ without it; None where it could not be taken out.
    """
    found, mend = _WORDS[name]
    return Break(name, found.format(*words), difference, without, mend)


def mended_by_row_wise(found: Break, names: Sequence[str]) -> Break:
    """A break with another mend."""
    if not names:
        return found
    mend = (
        f"GradientAccumulation(micro_batch=..., row_wise={list(names)}) and a window of 1: so the step was the full batch's. The"
        " loss sees the outputs of all rows, which these submodules compute in micro-batches."
    )
    return replace(found, mend=mend)
