"""What the gradient noise scale suggests, in words."""

from __future__ import annotations

import math

from lightning_accum.noise.scale import NoiseScale


def report(estimate: NoiseScale, are_tokens: bool, largest: int | None = None, is_limited: bool = False) -> str:
    """The batch size that is worth having, with its interval, and how large a micro-batch may be.

    Args:
        estimate: the noise scale.
        are_tokens: its weight counts tokens.
        largest: samples in the largest micro-batch that ran with ``micro_batch="auto"``; None where that was not asked for.
        is_limited: memory has set it; else whole loader batches fitted.
    """

    def units(weight: float) -> str:
        in_weight = f"{_rounded(weight)} {'tokens' if are_tokens else 'units of weight'}"
        if math.isnan(estimate.weight_per_sample):
            return in_weight
        in_samples = f"{_rounded(weight / estimate.weight_per_sample)} samples"
        return in_samples if abs(estimate.weight_per_sample - 1) < 1e-9 else f"{in_samples} ({in_weight})"

    low, high, is_infinite = units(estimate.weight_low), units(estimate.weight_high), math.isinf(estimate.weight)
    measured = f"measured over {estimate.windows} windows of {units(estimate.weight_per_window)} on average"
    if estimate.weight_low == 0 and math.isinf(estimate.weight_high):
        return (
            f"GradientNoiseScale: the noise scale is not known yet, {measured}. Measure more windows, or windows of more"
            " micro-batches."
        )
    found = f"a window of about {units(estimate.weight)} was worth having on average, but the noise scale" if estimate.trend else ""
    if is_infinite:
        text = f"a window of {low} or more is worth having"
    elif estimate.trend > 0:
        text = f"{found} grew while it was measured: now it is {low} at least (two standard errors)"
    elif estimate.trend < 0:
        text = f"{found} shrank while it was measured: now it is {high} at most (two standard errors)"
    elif math.isinf(estimate.weight_high):
        text = f"a window of about {units(estimate.weight)} is worth having, and of {low} at least"
    else:
        text = f"a window of about {units(estimate.weight)} is worth having, between {low} and {high} (two standard errors)"
    text = f"GradientNoiseScale: {text}. That is the gradient noise scale (arXiv 1812.06162), {measured}."
    return text + _advice(estimate) + _about_micro_batches(estimate, largest, is_limited)


def _advice(estimate: NoiseScale) -> str:
    if estimate.weight_per_window < estimate.weight_low:
        return " Larger windows would take fewer steps nearly in proportion."
    if estimate.weight_per_window > estimate.weight_high:
        return " Smaller windows would learn nearly as much in a step, and cost less."
    if estimate.trend:
        size = "smaller" if estimate.trend > 0 else "larger"
        return f" Before you make them {size}, measure again with a smaller smoothing=, which looks back over fewer windows."
    return " The windows have about the right size."


def _about_micro_batches(estimate: NoiseScale, largest: int | None, is_limited: bool) -> str:
    if largest is None:
        return ""
    size = f"{largest:,} sample{'s' if largest != 1 else ''}"
    text = f" Micro-batches of {size}, whole loader batches, fit into memory"
    if is_limited:
        text = f" The largest micro-batch that fits into memory is {size}"
    if math.isfinite(estimate.samples):
        text += f": about {max(1, math.ceil(estimate.samples / largest)):,} of them, over all ranks, make that window"
    return text + "."


def _rounded(number: float) -> str:
    """Three digits are more than an estimate has."""
    if number <= 0:
        return "0"
    if math.isinf(number):
        return "inf"
    digits = 2 - math.floor(math.log10(number))
    return f"{round(number, digits):,.0f}" if number >= 100 or digits <= 0 else f"{number:.3g}"
