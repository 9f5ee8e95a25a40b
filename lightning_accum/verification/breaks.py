"""What can break equality, in words: what was seen, and what mends it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_accum.errors import UnreadableLossError
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
    "contrastive loss": (
        "It is a cross entropy over logits that are square in the batch, with labels 0..B-1: every sample is a negative of all"
        " others, and a micro-batch has fewer of them.",
        'GradientAccumulation(micro_batch="offload"), which runs the batch as it is.',
    ),
    "backward that is not linear": (
        "A multiple of the loss does not give that multiple of its gradient: something in the backward clips, rounds, adds or"
        " normalises{}. It sees each micro-batch's own gradient, scaled by its weight, instead of the full batch's.",
        "No argument does. Move it to on_before_optimizer_step or configure_gradient_clipping, which get the gradient of the whole"
        " window (gradient_clip_val= clips that).",
    ),
    "state": (
        "The same batch twice gives another gradient than once: the module carries something from one training_step to the next (a"
        " hidden state, a counter, a buffer that each forward updates).",
        "No argument does. Reset it in training_step, or update it once in on_train_batch_start.",
    ),
    "weight of a term": (
        "{}",
        "weight=[...] has the weights in the order of the terms: count in each what its term is divided by.",
    ),
    "terms of the loss": ("{}", "weight=[...] with a weight for each term; or return one mean, or means over the same count."),
    "rows that depend on each other": (
        "No weights of the micro-batches give the gradient of the full batch; the nearest leave {:.1e} of it. The module"
        " computes something over the whole batch that its parts do not add up to.{}",
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
    "scale of the loss": (
        "{}",
        "No argument does. Divide by a count of the batch that training_step gets; or return the sum itself, and a window adds up.",
    ),
}
"""By name: what was seen of it, and what mends it."""
WARNED = {
    "weight of a term": "the term of the loss that it weighs",
    "BatchNorm": "BatchNorm (",
    "terms of the loss": "terms",
}
"""Words of the warning about it while training."""


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


def unreadable_weight(error: UnreadableLossError) -> Break:
    """The weight cannot be read, and training would stop."""
    found, _, mend = str(error).partition(" Say what")
    return Break("weight", found, math.nan, None, f"Say what{mend}")


def weight(given: Any, fits: Sequence[float], used: Sequence[float | None], difference: float, without: float) -> Break:
    """Other weights would be right."""
    total = sum(1.0 if value is None else value for value in used)
    right = ", ".join(f"{value * total:.6g}" for value in fits[:8])
    wrong = ", ".join("nothing (a sum)" if value is None else f"{value:.6g}" for value in used[:8])
    found = f"The micro-batches weigh {wrong}; with {right or 'other weights'} they would give the gradient of the full batch."
    mend = 'weight="auto" reads the right ones from the loss, if it is a mean.'
    if given == "auto":
        mend = "weight=<a callable of the batch> that counts what the loss is divided by (TokenCount(...), SampleCount())."
    return Break("weight", found, difference, without, mend)


def scale(fits: Sequence[float], difference: float) -> Break:
    """The weights that would be right are none of a mean."""
    factors = ", ".join(f"{value:.6g}" for value in fits[:8])
    if factors and all(abs(value - 1) < 1e-6 for value in fits):
        found = (
            "The gradients of the micro-batches add up to that of the full batch, and a window takes their mean: the loss is a sum"
            " divided by a number that is the same for a micro-batch as for its batch."
        )
    else:
        found = "The gradient of the full batch is no weighted mean of those of the micro-batches, but another sum of them" + (
            f" (times {factors}, which add up to {sum(fits):.6g})." if factors else "."
        )
    return named("scale of the loss", difference, found)


def mended_by_row_wise(found: Break, names: Sequence[str]) -> Break:
    """A break with another mend."""
    if not names:
        return found
    mend = (
        f"GradientAccumulation(micro_batch=..., row_wise={list(names)}) and a window of 1: so the step was the full batch's. The"
        " loss sees the outputs of all rows, which these submodules compute in micro-batches."
    )
    if found.name in ("weight", "terms of the loss"):
        mend = f"{found.mend} Or, for a loss of pairs or of statistics of the batch: {mend}"
    return replace(found, mend=mend)
