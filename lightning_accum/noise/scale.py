"""The gradient noise scale: how large a batch is worth having, estimated from gradients of two sizes of batch.

From McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162, appendix A.1, for micro-batches of
unequal sizes. Let a unit of weight (a sample, a token) have a gradient of mean G and of covariance with trace S. The mean gradient
g_i of a micro-batch of weight n_i has E|g_i|^2 = |G|^2 + S/n_i. That of a window of K of them, g = sum(n_i g_i) / N with
N = sum(n_i), has E|g|^2 = |G|^2 + S/N. So E sum(n_i |g_i|^2) = N |G|^2 + K S, and without bias

    S     = (sum(n_i |g_i|^2) - N |g|^2) / (K - 1)
    |G|^2 = |g|^2 - S / N

With equal n_i these are the paper's formulas for batches of s = n and b = N. They are those of an analysis of variance, which for
a normal distribution have the least variance of all without bias. The noise scale is B = S / |G|^2. A ratio of means has less bias
than a mean of ratios, so S and |G|^2 are smoothed each by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Number = TypeVar("Number", Tensor, float)


def variance_and_gradient(squares: Number, gradient: Number, weight: Number, micro_batches: Number) -> tuple[Number, Number]:
    """S and |G|^2, estimated without bias from one window.

    Args:
        squares: sum(n_i |g_i|^2) over the micro-batches.
        gradient: |g|^2 of the window.
        weight: N, the sum of the n_i.
        micro_batches: K, at least 2.

    Returns:
        S, the trace of the covariance of the gradient of a unit of weight, and |G|^2. Both may be negative by chance.

    Example:
        >>> variance_and_gradient(2 * 1.0 + 2 * 9.0, 4.0, 4.0, 2.0)  # gradients 1 and 3 of weight 2 each
        (4.0, 3.0)
    """
    variance = (squares - weight * gradient) / (micro_batches - 1)
    return variance, gradient - variance / weight


@dataclass(frozen=True)
class NoiseScale:
    """An estimate of the gradient noise scale, and so of the batch size that is worth having.

    Attributes:
        weight: the noise scale in units of weight: tokens, for a language model; inf where noise hides the gradient.
        weight_low: the lower end of its interval of two standard errors (95 %), 0 where the noise is not seen.
        weight_high: the upper end, inf where it is not known.
        weight_per_sample: the mean weight of a sample; nan where the batches do not tell how many they have.
        weight_per_window: the mean weight of a window.
        variance: S, the trace of the covariance of the gradient of a unit of weight.
        gradient: |G|^2, the squared norm of the gradient without noise.
        windows: how many were measured.
    """

    weight: float
    weight_low: float
    weight_high: float
    weight_per_sample: float
    weight_per_window: float
    variance: float
    gradient: float
    windows: int

    @property
    def samples(self) -> float:
        """The noise scale in samples."""
        return self.weight / self.weight_per_sample

    @property
    def samples_low(self) -> float:
        """The lower end of its interval."""
        return self.weight_low / self.weight_per_sample

    @property
    def samples_high(self) -> float:
        """The upper end of its interval."""
        return self.weight_high / self.weight_per_sample


# what is summed over the windows, each with a weight w that decays: w, w^2, w S, w |G|^2, their squares and product, weight and
# samples of the window; and the windows, all alike
_SUMS = 10


class SmoothedNoise:
    """Means of S and |G|^2 over the windows, the last ones counting the most, and how far they can be trusted.

    All sums stay on the device until they are asked for.

    Args:
        smoothing: how much a window counts less than the next one after it; 1 for all alike.
        device: where the sums are.
        dtype: of the sums.
    """

    def __init__(self, smoothing: float, device: torch.device, dtype: torch.dtype = torch.float64) -> None:
        self._sums = torch.zeros(_SUMS, dtype=dtype, device=device)
        decay = [smoothing, smoothing**2] + [smoothing] * (_SUMS - 3) + [1.0]
        self._decay = torch.tensor(decay, dtype=dtype, device=device)

    def add(self, variance: Tensor, gradient: Tensor, weight: Tensor, samples: Tensor, is_valid: Tensor) -> None:
        """Take in a window.

        Args:
            variance: its estimate of S.
            gradient: its estimate of |G|^2.
            weight: its weight.
            samples: its samples; nan where they are not known.
            is_valid: False leaves it out, and so does an estimate that is not finite.
        """
        one = torch.ones_like(weight)
        products = (variance * variance, variance * gradient, gradient * gradient)
        new = torch.stack((one, one, variance, gradient, *products, weight, samples, one))
        is_valid = is_valid & new[:8].isfinite().all()
        self._sums = torch.where(is_valid, self._sums * self._decay + new, self._sums)

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Go on on a device."""
        self._sums, self._decay = self._sums.to(device, dtype), self._decay.to(device, dtype)

    def shown(self) -> dict[str, Tensor]:
        """What is logged, on the device: the noise scale in weight and in samples, and the two that it is the ratio of."""
        total, _, variance, gradient, _, _, _, weight, samples, _ = self._sums.unbind()
        scale = torch.where(gradient > 0, (variance / gradient).clamp(min=0), math.inf)
        scale = torch.where(total > 0, scale, math.nan)
        return {
            "noise_scale/weight": scale,
            "noise_scale/samples": scale * samples / weight,
            "noise_scale/variance": variance / total,
            "noise_scale/gradient": gradient / total,
        }

    def estimate(self) -> NoiseScale | None:
        """The noise scale and its interval; None before the second window. Waits for the device.

        The interval is Fieller's for a ratio: all B for which the mean of S - B |G|^2 is within two standard errors of 0, these
        from the scatter of the windows. It is right also where |G|^2 is not well known, and then has no upper end.
        """
        total, squares, *sums, windows = self._sums.tolist()
        if windows < 2:
            return None
        s, g, ss, sg, gg, weight, samples = (value / total for value in sums)
        four = 4 * squares / (total**2 - squares)  # two standard errors, squared
        var_s, cov, var_g = four * max(ss - s * s, 0.0), four * (sg - s * g), four * max(gg - g * g, 0.0)
        # B^2 a - 2 B b + c <= 0
        a, b, c = g * g - var_g, s * g - cov, s * s - var_s
        root = math.sqrt(max(b * b - a * c, 0.0))
        is_noise_seen, is_gradient_seen = s > 0 and c > 0, g > 0 and a > 0
        low = c / (b + root) if is_noise_seen and b + root > 0 else 0.0
        high = (b + root) / a if is_gradient_seen else math.inf
        scale = max(s, 0.0) / g if g > 0 else math.inf
        per_sample = weight / samples if samples > 0 else math.nan
        return NoiseScale(scale, low, max(high, scale), per_sample, weight, s, g, int(windows))

    def state_dict(self) -> dict[str, Any]:
        """The sums, as plain numbers."""
        return {"sums": self._sums.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict`."""
        self._sums = torch.tensor(state["sums"], dtype=self._sums.dtype, device=self._sums.device)
