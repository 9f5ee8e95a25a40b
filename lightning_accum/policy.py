"""The policy of a training: all of the user's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch

from lightning_accum.boundary import TAILS, SchedulerCounts, Tail
from lightning_accum.errors import ArgumentError
from lightning_accum.weighing.counts import Weight


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


MicroBatchSize: TypeAlias = int | Tokens | Literal["auto"]
Split: TypeAlias = Callable[[Any, int], Sequence[Any]]
"""Splits a batch into micro-batches of this many samples (or tokens, for a size in :class:`Tokens`)."""
WindowSize: TypeAlias = int | Tokens | Mapping[int, int] | Callable[[int], int] | None
"""Size of a window: loader batches; tokens; ``{epoch: loader batches}``; loader batches by optimizer step; None: as the Trainer."""

OnNonfinite: TypeAlias = Literal["propagate", "skip", "raise"]


@dataclass(frozen=True)
class Policy:
    """The arguments of :class:`~lightning_accum.GradientAccumulation`, which documents the fields."""

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
    """Submodules that run in micro-batches while the loss sees the whole batch."""
    row_wise_size: int | Tokens | None = None
    """The size of the micro-batches of these submodules; then :attr:`micro_batch` is None."""
    offload: bool = False
    """``micro_batch="offload"``: nothing is split."""
    validate_every: int | None = None

    @property
    def counts_ahead(self) -> bool:
        """Each term of the loss has its own weight, so a window is counted before it runs."""
        return isinstance(self.weight, tuple)

    @property
    def may_count_terms(self) -> bool:
        """The terms of a loss may be counted in a window before it runs."""
        return self.weight == "auto" or self.counts_ahead

    @property
    def ends_by_tokens(self) -> bool:
        """A window ends when the weights of its micro-batches reach its tokens, which is not known ahead."""
        return isinstance(self.window, Tokens)

    @cached_property  # read after each window
    def has_varying_windows(self) -> bool:
        """The number of loader batches may differ between windows."""
        return isinstance(self.window, Mapping) or callable(self.window)

    @property
    def finishes_after_backward(self) -> bool:
        """Gradients are reduced after the last backward of a window, not in it: its micro-batch may be left out or run again."""
        return self.on_nonfinite != "propagate" or self.micro_batch == "auto"

    def size_at(self, epoch: int, step: int) -> int | None:
        """Loader batches in a window that begins in ``epoch``, after ``step`` steps; None if the Trainer or tokens decide."""
        if isinstance(self.window, Mapping):
            return self.window[max(start for start in self.window if start <= epoch)]
        if callable(self.window):
            size = self.window(step)
            if not is_natural(size):
                raise ArgumentError(f"window(step) must be an int of at least 1, but window({step}) is {size!r}")
            return size
        return None if isinstance(self.window, Tokens) else self.window

    def smallest_from(self, epoch: int, epochs: int | None, step: int) -> int | None:
        """Loader batches in the smallest window that begins at this ``step``, in ``epoch`` or a later epoch."""
        starts = self.window if isinstance(self.window, Mapping) else ()
        later = [start for start in starts if start > epoch and (epochs in (None, -1) or start < epochs)]
        return min((size for start in (epoch, *later) if (size := self.size_at(start, step)) is not None), default=None)

    def in_words(self, size: int) -> str:
        """What ends a window, in words that a checkpoint compares."""
        if isinstance(self.window, Tokens):
            what = "tokens as a function returns" if callable(self.window.count) else f"{self.window.count} tokens"
        elif isinstance(self.window, Mapping):
            what = f"{dict(self.window)} loader batches by epoch"
        else:
            what = "loader batches as a function returns" if callable(self.window) else f"{self.window or size} loader batches"
        return f"{what} (weight: {self.weight_in_words})"

    @property
    def weight_in_words(self) -> str:
        """The weight of micro-batches, in words that a checkpoint compares."""
        weight: str = self.weight if isinstance(self.weight, str) else getattr(self.weight, "__name__", repr(self.weight))
        return type(self.weight).__name__ if " at 0x" in weight else weight  # an address differs between processes

    def may_count_first(self, is_long: bool) -> bool:
        """Whether the terms of a window can be counted before it runs."""
        goes_on = TAILS[self.tail].goes_on and is_long  # a window continues in the next epoch, whose batches are not known yet
        return not goes_on and self.on_nonfinite != "skip" and not self.row_wise

    def may_be_longer_than_one(self, trainers_own: int) -> bool:
        """Whether a window may have several loader batches."""
        if self.window is None or isinstance(self.window, int):
            return (self.window or trainers_own) > 1
        return not isinstance(self.window, Mapping) or max(self.window.values()) > 1


# --- which values the fields may have ---------------------------------------------------------------------------------


def checked_policy(policy: Policy) -> Policy:
    """The policy, with a list of weights as a tuple. Raises an error for a wrong value."""
    for argument, example in (("window", "Tokens(8_192)"), ("micro_batch", "Tokens(8_192)"), ("weight", "TokenCount()")):
        _check_is_no_class(argument, getattr(policy, argument), example)
    _check_window(policy.window)
    _check_micro_batch(policy.micro_batch, policy.trim_padding, policy.split)
    weight = _checked_weight(policy.weight)
    check_is_one_of("tail", policy.tail, *TAILS)
    check_is_one_of("scheduler_counts", policy.scheduler_counts, "optimizer_steps", "micro_batches")
    dtype: Any = policy.accumulate_dtype
    if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        raise ArgumentError(f"accumulate_dtype={dtype!r}: expected a floating-point torch.dtype, such as torch.float32, or None")
    if not (policy.validate_every is None or is_natural(policy.validate_every, 1)):
        raise ArgumentError(f"validate_every={policy.validate_every!r}: expected a number of optimizer steps from 1, or None")
    check_is_one_of("on_nonfinite", policy.on_nonfinite, "propagate", "skip", "raise")
    for name, value in (("log", policy.log), ("check", policy.check)):
        if not isinstance(value, bool):
            raise ArgumentError(f"{name}={value!r}: expected True or False")
    return replace(policy, weight=weight)


def row_wise_fields(row_wise: Any, micro_batch: Any) -> dict[str, Any]:
    """The fields of a :class:`Policy` for the argument ``row_wise``."""
    if row_wise is None:
        return {}
    names = (row_wise,) if isinstance(row_wise, str) else tuple(row_wise) if isinstance(row_wise, (list, tuple)) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ArgumentError(f"row_wise={row_wise!r}: expected the name of a submodule, a list of names, or None")
    if micro_batch in (None, "offload", "auto"):
        raise ArgumentError(
            f"row_wise={row_wise!r}: expected micro_batch=<a number of samples> or Tokens(...), not {micro_batch!r}"
        )
    _check_micro_batch(micro_batch, True, None)
    return {"row_wise": names, "row_wise_size": micro_batch}


def check_is_one_of(argument: str, found: Any, *expected: str) -> None:
    """Refuse a value that is not one of the expected words."""
    if found not in expected:
        *first, last = (f'"{word}"' for word in expected)
        raise ArgumentError(f"{argument}={found!r}: expected {', '.join(first)} or {last}")


def _check_is_no_class(argument: str, found: Any, example: str) -> None:
    for one in found if isinstance(found, (list, tuple)) else [found]:
        if isinstance(one, type):
            raise ArgumentError(f"{argument}={one.__name__} is a class: pass an instance of it, such as {example}")


def _check_window(window: Any) -> None:
    if isinstance(window, Mapping):
        if not window or any(not is_natural(epoch, 0) or not is_natural(size, 1) for epoch, size in window.items()):
            raise ArgumentError(f"window={window!r}: expected {{epoch: loader batches}} with epochs from 0 and sizes from 1")
        if 0 not in window:
            raise ArgumentError(f"window={dict(window)!r} has no entry for epoch 0; add {{0: 1}}")
    elif not (window is None or isinstance(window, Tokens) or callable(window) or is_natural(window, 1)):
        expected = "a number of loader batches from 1, {epoch: number}, a function of the optimizer step, Tokens(...) or None"
        raise ArgumentError(f"window={window!r}: expected {expected}")


def _checked_weight(weight: Any) -> Any:
    if isinstance(weight, (list, tuple)) and len(weight) == 1:
        weight = weight[0]
    if not isinstance(weight, (list, tuple)):
        if not (callable(weight) or (isinstance(weight, str) and weight in ("auto", "equal"))):
            raise ArgumentError(
                f'weight={weight!r}: expected "auto", "equal" or a callable of the batch, or a list of callables, one for each term'
            )
        return weight
    if not weight or not all(callable(of_term) for of_term in weight):
        raise ArgumentError(
            f"weight={weight!r}: expected a callable of the batch for each term of the loss, such as [TokenCount(), SampleCount()]"
        )
    return tuple(weight)


def is_natural(number: Any, least: int = 1) -> bool:
    """Whether it is an integer of at least ``least``."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def _check_micro_batch(micro_batch: Any, trim_padding: Any, split: Any) -> None:
    if not (micro_batch is None or micro_batch == "auto" or isinstance(micro_batch, Tokens) or is_natural(micro_batch, 1)):
        raise ArgumentError(
            f'micro_batch={micro_batch!r}: expected a number of samples from 1, Tokens(...), "auto", "offload" or None'
        )
    if isinstance(micro_batch, Tokens) and callable(micro_batch.count):
        raise ArgumentError(f"micro_batch={micro_batch!r}: only the Tokens of a window can be a function")
    if not isinstance(trim_padding, (bool, str)):
        raise ArgumentError(f"trim_padding={trim_padding!r}: expected True, False, or the key of a mask or of lengths in the batch")
    if split is not None and not callable(split):
        raise ArgumentError(f"split={split!r}: expected a function of a batch and a size")
