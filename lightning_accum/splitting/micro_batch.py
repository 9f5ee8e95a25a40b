"""Sizes of micro-batches and of loader batches: in tokens, and in samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_accum.errors import ArgumentError
from lightning_accum.splitting.rows import Layout


@dataclass(frozen=True)
class Tokens:
    """A size in tokens, for a window or a micro-batch.

    Args:
        count: how many tokens, at least 1. For a window also a function of the tokens (weights of all ranks) that training has
            seen in its windows so far, for a batch size that grows; it is asked when a window begins.

    Raises:
        ValueError: ``count`` is not an int of at least 1.

    Example:
        >>> Tokens(8_192)
        Tokens(count=8192)
        >>> warm_up = Tokens(lambda seen: 32_768 if seen < 10**9 else 524_288)
        >>> warm_up.at(0), warm_up.at(2 * 10**9)
        (32768, 524288)
    """

    count: int | Callable[[float], int]

    def __post_init__(self) -> None:
        if not callable(self.count):
            _check_tokens(self.count, "Tokens(count)")

    def at(self, seen: float) -> int:
        """The size of a window that begins after ``seen`` tokens.

        Raises:
            ValueError: the function did not return an int of at least 1.
        """
        if not callable(self.count):
            return self.count
        count = self.count(seen)
        _check_tokens(count, f"The function in Tokens(...), asked after {seen:.0f} tokens,")
        return count


def _check_tokens(count: Any, what: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError(f"{what} must be an int of at least 1, but count={count!r}")


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
