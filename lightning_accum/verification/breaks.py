"""What can break equality, in words: what was seen, and what mends it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning_accum.verification.report import Break
from lightning_accum.weighing.denominator import UnreadableLossError


def unreadable_weight(error: UnreadableLossError, row_wise: Sequence[str]) -> Break:
    """The weight cannot be read, and training would stop.

    Args:
        error: that it would stop with.
        row_wise: submodules with which the step was found to be that of the full batch.
    """
    found, _, mend = str(error).partition(" Say what")
    return Break("weight", found, math.nan, None, f"Say what{mend}{_or_row_wise(row_wise)}")


def non_deterministic(difference: float) -> Break:
    """The full batch differs from itself."""
    found = "The full batch, run twice with the same random numbers, gives two gradients."
    mend = (
        "torch.use_deterministic_algorithms(True) replaces such operations where there is a replacement. Until then, nothing finer"
        " than this can be told."
    )
    return Break("non-deterministic operations", found, difference, None, mend)


def random_numbers(difference: float) -> Break:
    """What draws them cannot be made the same for every row."""
    found = (
        "The full batch itself gives another gradient with other random numbers, and what draws them cannot be made the same for"
        " batches of all sizes (a permutation of the batch, Python's or NumPy's generator)."
    )
    mend = (
        "No argument does: micro-batches draw other numbers than their batch, and are equal to it in distribution only. Verify a"
        " copy of the module that does not draw them."
    )
    return Break("random numbers", found, difference, None, mend)


def not_finite() -> Break:
    """The window's gradient is infinite or NaN, and the full batch's is not."""
    found = "The gradient of the micro-batches is infinite or NaN, where that of the full batch is finite."
    mend = "Look for what divides by a count that can be 0 in a micro-batch, or for a variance over a single row."
    return Break("non-finite gradient", found, math.nan, None, mend)


def batch_norm(layers: Sequence[str], difference: float, without: float | None) -> Break:
    """Layers normalise by the statistics of what they see."""
    found = f"{listed(layers)} normalise{'s' * (len(layers) == 1)} each micro-batch by its own statistics."
    mend = (
        'GradientAccumulation(micro_batch="offload") runs a loader batch whole: have the loader yield the batch that is wanted. Or'
        " use GroupNorm, or layers in evaluation mode."
    )
    return Break("BatchNorm", found, difference, without, mend)


def batch_idx(difference: float, without: float) -> Break:
    """The module reads the number of the loader batch."""
    found = "training_step reads batch_idx, which is another for every micro-batch of a window, and 0 for the full batch."
    mend = (
        "GradientAccumulation(micro_batch=...) splits each loader batch into micro-batches of the same batch_idx; or read"
        " self.global_step, which counts optimizer steps."
    )
    return Break("batch_idx", found, difference, without, mend)


def padding(how: str, difference: float, without: float) -> Break:
    """The module's loss is another with more padding."""
    found = f"The loss depends on padding: {how}, and with that padding the micro-batches have other gradients."
    mend = "Mask the padding in the module and in its loss; or let the loader pad all batches to one length."
    return Break("padding", found, difference, without, mend)


def contrastive(difference: float, row_wise: Sequence[str]) -> Break:
    """Every sample is compared with all others.

    Args:
        difference: of the gradients.
        row_wise: submodules with which the step was found to be that of the full batch.
    """
    found = (
        "It is a cross entropy over logits that are square in the batch, with labels 0..B-1: every sample is a negative of all"
        " others, and a micro-batch has fewer of them."
    )
    mend = _row_wise(row_wise) or 'GradientAccumulation(micro_batch="offload"), which runs the batch as it is.'
    return Break("contrastive loss", found, difference, None, mend)


def backward(hooked: Sequence[str], difference: float) -> Break:
    """Something in the backward does not do to a multiple of a gradient what it does to the gradient."""
    found = (
        "A multiple of the loss does not give that multiple of its gradient: something in the backward clips, rounds, adds or"
        " normalises"
    )
    if hooked:
        found += f", as the hooks on the gradients of {listed(hooked)} may"
    found += ". It sees each micro-batch's own gradient, scaled by its weight, instead of the full batch's."
    mend = (
        "No argument does. Move it to on_before_optimizer_step or configure_gradient_clipping, which get the gradient of the whole"
        " window (gradient_clip_val= clips that)."
    )
    return Break("backward that is not linear", found, difference, None, mend)


def state(difference: float) -> Break:
    """A training_step leaves something for the next."""
    found = (
        "The same batch twice gives another gradient than once: the module carries something from one training_step to the next (a"
        " hidden state, a counter, a buffer that each forward updates)."
    )
    mend = "No argument does. Reset it in training_step, or update it once in on_train_batch_start."
    return Break("state", found, difference, None, mend)


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
    mend = (
        "No argument does. Divide by a count of the batch that training_step gets; or return the sum itself, and a window adds up."
    )
    return Break("scale of the loss", found, difference, None, mend)


def weight_of_term(warning: str, difference: float) -> Break:
    """One of several weights counts something else than its term is divided by."""
    mend = "weight=[...] has the weights in the order of the terms: count in each what its term is divided by."
    return Break("weight of a term", warning, difference, None, mend)


def terms(warning: str, difference: float, row_wise: Sequence[str]) -> Break:
    """No one weight is right for all terms.

    Args:
        warning: that named them.
        difference: of the gradients.
        row_wise: submodules with which the step was found to be that of the full batch.
    """
    mend = f"Return one mean, or terms that are means over the same count.{_or_row_wise(row_wise)}"
    return Break("terms of the loss", warning, difference, None, mend)


def coupled_rows(nearest: float, order: float | None, difference: float, row_wise: Sequence[str]) -> Break:
    """No weights at all are right.

    Args:
        nearest: how near any weights come.
        order: how far the full batch is from itself in another order; None where it is not.
        difference: of the gradients.
        row_wise: submodules with which the step was found to be that of the full batch.
    """
    found = (
        f"No weights of the micro-batches give the gradient of the full batch; the nearest leave {nearest:.1e} of it. The module"
        " computes something over the whole batch that its parts do not add up to."
    )
    if order is not None:
        found += " It depends on the order of the rows, too."
    mend = _row_wise(row_wise) or 'GradientAccumulation(micro_batch="offload"), which runs the batch as it is.'
    return Break("rows that depend on each other", found, difference, None, mend)


def optimizer_step(difference: float) -> Break:
    """The same gradient leads elsewhere."""
    found = (
        "The gradients are equal, but the same gradient moves the parameters elsewhere: the learning rate, the optimizer or a hook"
        " around the step differs."
    )
    mend = "Compare what configure_optimizers and the hooks around the step do with a window: they may count loader batches."
    return Break("optimizer step", found, difference, None, mend)


def buffers(names: Sequence[str], apart: float, difference: float) -> Break:
    """The steps to come go by something else."""
    are = "is" if len(names) == 1 else "are"
    found = f"After the step {listed(names)} {are} {apart:.1e} from what the full batch leaves: each forward updates it once."
    mend = "No argument does. Update it once a step, in on_train_batch_start or on_before_zero_grad."
    return Break("buffers", found, difference, None, mend)


def _row_wise(names: Sequence[str]) -> str:
    if not names:
        return ""
    return (
        f"GradientAccumulation(micro_batch=..., row_wise={list(names)}) and a window of 1: so the step was the full batch's. The"
        " loss sees the outputs of all rows, which these submodules compute in micro-batches."
    )


def _or_row_wise(names: Sequence[str]) -> str:
    return f" Or, for a loss of pairs or of statistics of the batch: {_row_wise(names)}" if names else ""


def listed(names: Sequence[str], what: str = "") -> str:
    """The first three, and how many more.

    Example:
        >>> listed(["a", "b", "c", "d"], " places")
        'a, b, c and 1 more places'
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more{what}" if len(names) > 3 else "")
