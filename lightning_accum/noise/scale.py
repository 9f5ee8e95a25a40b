"""The gradient noise scale: how large a batch is worth having, estimated from gradients of two sizes of batch.

From McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162, appendix A.1, for micro-batches of
unequal sizes; the formulas are in :class:`~lightning_accum.GradientNoiseScale`. They are those of an analysis of variance. A ratio
of means has less bias than a mean of ratios, so S and |G|^2 are smoothed each by itself.

A mean over windows lags behind a noise scale that moves. So the slope of S - B |G|^2 over time is looked at, by weighted least
squares; where it is significant, the interval is open to the side that the noise scale moves to.
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
        weight: the noise scale in units of weight: tokens, for a language model; inf where noise hides the gradient. The mean over
            the windows, of which the last count the most.
        weight_low: the lower end of its interval of two standard errors (95 %), 0 where the noise is not seen, or has shrunk.
        weight_high: the upper end, inf where it is not known, as where the noise scale has grown.
        weight_per_sample: the mean weight of a sample; nan where the batches do not show how many they have.
        weight_per_window: the mean weight of a window.
        variance: S, the trace of the covariance of the gradient of a unit of weight.
        gradient: |G|^2, the squared norm of the gradient without noise.
        windows: how many were measured.
        trend: 1 where the noise scale has grown while it was measured, -1 where it has shrunk, by a slope of more than two standard
            errors; else 0.
    """

    weight: float
    weight_low: float
    weight_high: float
    weight_per_sample: float
    weight_per_window: float
    variance: float
    gradient: float
    windows: int
    trend: int = 0

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


_SUMMED = ("1", "S", "G", "SS", "SG", "GG", "weight", "samples", "a", "aa", "aS", "aG")
"""What is summed over the windows, each with a weight w that decays: G is |G|^2, a the age in windows."""
_SQUARED = ("1", "a", "aa")
"""What is summed with the weight w^2."""
_NAMES = (*_SUMMED, *(f"{name} ww" for name in _SQUARED), "windows")
"""The last counts all windows alike."""


class SmoothedNoise:
    """Means of S and |G|^2 over the windows, the last ones counting the most, and how far they can be trusted.

    All sums stay on the device until they are asked for.

    Args:
        smoothing: how much a window counts less than the next one after it; 1 for all alike.
    """

    def __init__(self, smoothing: float, device: torch.device, dtype: torch.dtype = torch.float64) -> None:
        self._sums = torch.zeros(len(_NAMES), dtype=dtype, device=device)
        self._ageing = torch.tensor(_ageing(smoothing), dtype=dtype, device=device)

    def add(self, variance: Tensor, gradient: Tensor, weight: Tensor, samples: Tensor, is_valid: Tensor) -> None:
        """Take in a window."""
        one, young = torch.ones_like(weight), torch.zeros_like(weight)
        products = (variance * variance, variance * gradient, gradient * gradient)
        new = torch.stack((one, variance, gradient, *products, weight, samples, *[young] * 4, one, young, young, one))
        is_valid = is_valid & new[:7].isfinite().all()
        self._sums = torch.where(is_valid, self._ageing @ self._sums + new, self._sums)

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Go on on a device."""
        self._sums, self._ageing = self._sums.to(device, dtype), self._ageing.to(device, dtype)

    def shown(self) -> dict[str, Tensor]:
        """What is logged, on the device: the noise scale in weight and in samples, and the two that it is the ratio of."""
        total, variance, gradient, weight, samples = (
            self._sums[_NAMES.index(name)] for name in ("1", "S", "G", "weight", "samples")
        )
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
        from the scatter of the windows. It is right also where |G|^2 is not well known, and then has no upper end. It is open to
        the side that the noise scale has moved to meanwhile.
        """
        sums = dict(zip(_NAMES, self._sums.tolist(), strict=True))
        total, squares, windows = sums["1"], sums["1 ww"], int(sums["windows"])
        if windows < 2:
            return None
        mean = {name: sums[name] / total for name in _SUMMED}
        s, g, weight, samples = mean["S"], mean["G"], mean["weight"], mean["samples"]
        four = 4 * squares / (total**2 - squares)  # two standard errors, squared
        var_s, cov, var_g = four * max(mean["SS"] - s * s, 0.0), four * (mean["SG"] - s * g), four * max(mean["GG"] - g * g, 0.0)
        # B^2 a - 2 B b + c <= 0
        a, b, c = g * g - var_g, s * g - cov, s * s - var_s
        root = math.sqrt(max(b * b - a * c, 0.0))
        is_noise_seen, is_gradient_seen = s > 0 and c > 0, g > 0 and a > 0
        low = c / (b + root) if is_noise_seen and b + root > 0 else 0.0
        high = (b + root) / a if is_gradient_seen else math.inf
        scale = max(s, 0.0) / g if g > 0 else math.inf
        per_sample = weight / samples if samples > 0 else math.nan
        trend = _trend(sums, scale)
        low, high = 0.0 if trend < 0 else low, math.inf if trend > 0 else max(high, scale)
        return NoiseScale(scale, low, high, per_sample, weight, s, g, windows, trend)

    def state_dict(self) -> dict[str, Any]:
        """The sums, as plain numbers."""
        return {"sums": dict(zip(_NAMES, self._sums.tolist(), strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict`."""
        sums = state["sums"]
        self._sums = torch.tensor([sums[name] for name in _NAMES], dtype=self._sums.dtype, device=self._sums.device)


def _ageing(smoothing: float) -> list[list[float]]:
    """The matrix that makes of the sums what they are one window later."""
    # (a + 1) x = a x + x, and (a + 1)^2 = a^2 + 2 a + 1
    grown = {"a": {"a": 1, "1": 1}, "aa": {"aa": 1, "a": 2, "1": 1}, "aS": {"aS": 1, "S": 1}, "aG": {"aG": 1, "G": 1}}
    rows = []
    for name in _NAMES:
        what, _, squared = name.partition(" ")
        decay = 1.0 if name == "windows" else smoothing**2 if squared else smoothing
        parts = {f"{part} ww" if squared else part: factor for part, factor in grown.get(what, {what: 1}).items()}
        rows.append([decay * parts.get(column, 0) for column in _NAMES])
    return rows


def _trend(sums: Mapping[str, float], scale: float) -> int:
    """The sign of the slope of S - B |G|^2 over time, 0 where it is within two standard errors of 0."""
    total, squares = sums["1"], sums["1 ww"]
    degrees = total**2 - 2 * squares  # of freedom, but for a factor: a mean and a slope are taken out
    mean = {name: sums[name] / total for name in _SUMMED}
    age, spread = mean["a"], mean["aa"] - mean["a"] ** 2
    if degrees <= 0 or spread <= 0:
        return 0
    s_part, g_part = (1.0, scale) if math.isfinite(scale) else (0.0, 1.0)
    covariance = s_part * (mean["aS"] - age * mean["S"]) - g_part * (mean["aG"] - age * mean["G"])
    middle = s_part * mean["S"] - g_part * mean["G"]
    variance = s_part**2 * mean["SS"] - 2 * s_part * g_part * mean["SG"] + g_part**2 * mean["GG"] - middle**2
    residual = max(variance - covariance**2 / spread, 0.0) * total**2 / degrees
    lever = sums["aa ww"] - 2 * age * sums["a ww"] + age**2 * squares
    error = math.sqrt(residual * lever) / (total * spread)
    slope = -covariance / spread  # over time, not over age
    return 0 if abs(slope) <= 2 * error else 1 if slope > 0 else -1
