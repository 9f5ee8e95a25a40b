"""The policy of a training: what the user asked for, all in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from lightning_accum.boundary import SchedulerCounts, Tail
from lightning_accum.errors import ArgumentError
from lightning_accum.splitting.micro_batch import Tokens
from lightning_accum.splitting.plan import MicroBatchSize, Split
from lightning_accum.weighing.counts import Weight

WindowSize: TypeAlias = int | Tokens | Mapping[int, int] | Callable[[int], int] | None
"""Of a window: loader batches; tokens; ``{epoch: loader batches}``; loader batches by optimizer step; None: the Trainer says."""

OnNonfinite: TypeAlias = Literal["propagate", "skip", "raise"]


@dataclass(frozen=True)
class Policy:
    """What :class:`~lightning_accum.GradientAccumulation` was asked for; its arguments explain the fields."""

    window: WindowSize = None
    weight: Literal["auto", "equal"] | Weight | tuple[Weight, ...] = "auto"
    tail: Tail = "step"
    scheduler_counts: SchedulerCounts = "optimizer_steps"
    log: bool = True
    micro_batch: MicroBatchSize | None = None
    split: Split | None = None
    trim_padding: bool | str = True
    accumulate_dtype: torch.dtype | None = None
    on_nonfinite: OnNonfinite = "propagate"
    check: bool = True
    row_wise: tuple[str, ...] = ()
    """Submodules that run in micro-batches while the loss sees the whole batch; then :attr:`micro_batch` is None, and"""
    row_wise_size: MicroBatchSize | None = None
    """this is the size of theirs."""
    offload: bool = False
    """``micro_batch="offload"``: nothing is split."""
    validate_every: int | None = None

    @property
    def counts_ahead(self) -> bool:
        """Each term of the loss has its weight, by which a window is counted before it runs."""
        return isinstance(self.weight, tuple)

    @property
    def may_count_terms(self) -> bool:
        """The terms of a loss may be counted in a window before it runs."""
        return self.weight == "auto" or self.counts_ahead

    @property
    def ends_by_tokens(self) -> bool:
        """A window ends when the weights of its micro-batches come to its tokens: nobody knows before."""
        return isinstance(self.window, Tokens)

    @property
    def has_varying_windows(self) -> bool:
        """Windows may have another number of loader batches than the one before."""
        return isinstance(self.window, Mapping) or callable(self.window)

    @property
    def main_weight(self) -> Literal["auto", "equal"] | Weight:
        """What windows and logs go by."""
        return self.weight[0] if isinstance(self.weight, tuple) else self.weight

    @property
    def finishes_after_backward(self) -> bool:
        """The last micro-batch of a window is as all others, and gradients are reduced after it: it may come to nothing."""
        return self.on_nonfinite != "propagate" or self.micro_batch == "auto" or bool(self.row_wise)

    @property
    def counts_tokens_of_parts(self) -> bool:
        """A window ends with any micro-batch of a split batch, as soon as it has its tokens.

        With its last, where an attempt at a batch may fail: a step cannot be undone.
        """
        return self.ends_by_tokens and self.micro_batch not in (None, "auto")

    def size_at(self, epoch: int, step: int) -> int | None:
        """Loader batches in a window that begins in ``epoch``, after ``step`` steps; None where the Trainer or tokens say.

        Raises:
            ValueError: a function of the step gave no int, or less than 1.
        """
        if isinstance(self.window, Mapping):
            return self.window[max(start for start in self.window if start <= epoch)]
        if callable(self.window):
            size = self.window(step)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ArgumentError(f"window(step) must be an int of at least 1, but window({step}) is {size!r}")
            return size
        return None if isinstance(self.window, Tokens) else self.window

    def smallest_from(self, epoch: int, epochs: int | None, step: int) -> int | None:
        """Loader batches in the smallest window that begins before an optimizer step follows, in ``epoch`` or a later one.

        Returns:
            None where the Trainer or tokens say.
        """
        starts = self.window if isinstance(self.window, Mapping) else ()
        later = [start for start in starts if start > epoch and (epochs in (None, -1) or start < epochs)]
        return min((size for start in (epoch, *later) if (size := self.size_at(start, step)) is not None), default=None)

    def in_words(self, size: int) -> str:
        """What ends a window, for a comparison with that of a checkpoint."""
        if isinstance(self.window, Tokens):
            what = "tokens as a function tells" if callable(self.window.count) else f"{self.window.count} tokens"
        elif isinstance(self.window, Mapping):
            what = f"{dict(self.window)} loader batches by epoch"
        else:
            what = "loader batches as a function tells" if callable(self.window) else f"{self.window or size} loader batches"
        return f"{what} (weight: {self.weight_in_words})"

    @property
    def weight_in_words(self) -> str:
        """What weighs micro-batches, for a comparison with that of a checkpoint."""
        weight: str = self.weight if isinstance(self.weight, str) else getattr(self.weight, "__name__", repr(self.weight))
        return type(self.weight).__name__ if " at 0x" in weight else weight  # which is not the same in another process

    def may_count_first(self, is_long: bool) -> bool:
        """Whether the terms of a window can be counted before it runs."""
        goes_on = self.tail == "carry" and is_long  # with the next pass over the data, whose batches are not there yet
        return not goes_on and self.on_nonfinite != "skip" and not self.row_wise and not self.counts_tokens_of_parts

    def may_be_longer_than_one(self, trainers_own: int) -> bool:
        """Whether a window may have several loader batches."""
        if self.window is None or isinstance(self.window, int):
            return (self.window or trainers_own) > 1
        return not isinstance(self.window, Mapping) or max(self.window.values()) > 1
