"""What the gradient noise scale suggests, in words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_accum.noise.scale import NoiseScale


@dataclass(slots=True)
class LargestMicroBatch:
    """The largest micro-batch that ran with ``micro_batch="auto"``.

    Attributes:
        samples: None before the first.
        is_limited: memory has set it; else whole loader batches fitted.
    """

    samples: int | None = None
    is_limited: bool = False

    def note(self, samples: int, micro_batches: int) -> None:
        """A loader batch was run in so many micro-batches, the largest of so many samples."""
        self.samples = max(samples, self.samples or 0)
        self.is_limited |= micro_batches > 1


def report(estimate: NoiseScale, are_tokens: bool, largest: LargestMicroBatch) -> str:
    """The batch size that is worth having, with its interval, and how large a micro-batch may be.

    Args:
        estimate: the noise scale.
        are_tokens: the weight counts tokens.
        largest: the largest micro-batch, if it was found by trying.
    """
    units = _Units(estimate, are_tokens)
    now = units(estimate.weight_per_window)
    measured = f"measured over {estimate.windows} windows of {now} on average"
    if estimate.weight_low == 0 and math.isinf(estimate.weight_high):
        return (
            f"GradientNoiseScale: the noise scale is not known yet, {measured}. Measure more windows, or windows of more"
            " micro-batches."
        )
    if estimate.trend and not math.isinf(estimate.weight):
        moved, end, most = (
            ("grew", estimate.weight_low, "least") if estimate.trend > 0 else ("shrank", estimate.weight_high, "most")
        )
        text = (
            f"a window of about {units(estimate.weight)} was worth having on average, but the noise scale {moved} while it was"
            f" measured: now it is {units(end)} at {most} (two standard errors)"
        )
    elif math.isinf(estimate.weight):
        text = f"a window of {units(estimate.weight_low)} or more is worth having"
    else:
        text = f"a window of about {units(estimate.weight)} is worth having"
        if math.isinf(estimate.weight_high):
            text += f", and of {units(estimate.weight_low)} at least"
        else:
            text += f", between {units(estimate.weight_low)} and {units(estimate.weight_high)} (two standard errors)"
    text = f"GradientNoiseScale: {text}. That is the gradient noise scale (arXiv 1812.06162), {measured}."
    return text + _advice(estimate) + _about_micro_batches(estimate, largest)


def _advice(estimate: NoiseScale) -> str:
    if estimate.weight_per_window < estimate.weight_low:
        return " Larger windows would take fewer steps nearly in proportion."
    if estimate.weight_per_window > estimate.weight_high:
        return " Smaller windows would learn nearly as much in a step, and cost less."
    if estimate.trend:
        size = "smaller" if estimate.trend > 0 else "larger"
        return f" Before you make them {size}, measure again with a smaller smoothing=, which looks back over fewer windows."
    return " The windows have about the right size."


def _about_micro_batches(estimate: NoiseScale, largest: LargestMicroBatch) -> str:
    if largest.samples is None:
        return ""
    size = f"{largest.samples:,} sample{'s' if largest.samples != 1 else ''}"
    if not largest.is_limited:
        text = f" Micro-batches of {size}, whole loader batches, fit into memory"
    else:
        text = f" The largest micro-batch that fits into memory is {size}"
    if math.isfinite(estimate.samples):
        text += f": about {max(1, math.ceil(estimate.samples / largest.samples)):,} of them, over all ranks, make that window"
    return text + "."


class _Units:
    """A number of units of weight, in samples and in tokens."""

    def __init__(self, estimate: NoiseScale, are_tokens: bool) -> None:
        self._per_sample = estimate.weight_per_sample
        self._name = "tokens" if are_tokens else "units of weight"

    def __call__(self, weight: float) -> str:
        in_weight = f"{_rounded(weight)} {self._name}"
        if math.isnan(self._per_sample):
            return in_weight
        in_samples = f"{_rounded(weight / self._per_sample)} samples"
        if abs(self._per_sample - 1) < 1e-9:
            return in_samples
        return f"{in_samples} ({in_weight})"


def _rounded(number: float) -> str:
    """Three digits are more than an estimate has."""
    if number <= 0:
        return "0"
    digits = 2 - math.floor(math.log10(number))
    return f"{round(number, digits):,.0f}" if number >= 100 or digits <= 0 else f"{number:.3g}"
