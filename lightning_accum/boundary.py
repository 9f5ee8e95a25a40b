"""When a window ends, how many there will be, and what schedulers and validation count of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

SchedulerCounts: TypeAlias = Literal["optimizer_steps", "micro_batches"]
Tail: TypeAlias = Literal["step", "drop", "carry"]


class TailRule(NamedTuple):
    """What the end of an epoch does to a window that is not full.

    Attributes:
        steps: whether it takes its step, if so many of its loader batches are there; else its gradients are dropped.
        outcome: of windows that are longer than an epoch, in words.
        goes_on: it goes on in the next epoch, and takes its step at the end of training.
    """

    steps: Callable[[float, float], bool]
    outcome: str
    goes_on: bool = False


TAILS: dict[Tail, TailRule] = {
    "step": TailRule(lambda there, size: True, "there is one optimizer step an epoch, on all of its data"),
    "drop": TailRule(lambda there, size: False, "nothing is trained"),
    "carry": TailRule(lambda there, size: True, "it goes on in the next epoch", goes_on=True),
}
"""All values of ``tail=``, each of which is decided here alone."""


def drops(tail: Tail, there: float, size: float) -> bool:
    """Whether the end of an epoch drops a window of ``size`` loader batches, of which these are ``there``, and not all."""
    return not (TAILS[tail].goes_on or TAILS[tail].steps(there, size))


class Boundary:
    """Decides which loader batch is the last of its window, counting them over the whole training: it may span epochs."""

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self.closed_at = 0
        """The loader batch, counted from 1, that ended the last window."""
        self.size = math.inf
        """Loader batches in the window that is under way, or in the last one; inf before the first."""
        self.is_under_way = False
        """A window has begun, and not ended."""
        self.ends_at: float = 0
        """The loader batch that ends the window that is under way, or ended the last one; inf where something else ends it."""
        self.tokens: int | None = None
        """The tokens that the window under way has to reach, where windows are measured in tokens and it was asked."""

    def begin(self, size: float) -> None:
        """A loader batch begins. A window that begins with it has this size (inf where something else ends it), and keeps it."""
        if not self.is_under_way:
            self.size, self.is_under_way, self.ends_at = size, True, self.closed_at + size

    def is_reached(self, seen: int, size: Callable[[], float]) -> bool:
        """Whether the window ends with loader batch number ``seen``, whatever follows; ``size`` is asked if none has begun."""
        is_known = self.is_under_way or seen == self.ends_at
        return seen >= (self.ends_at if is_known else self.closed_at + size())

    def is_cut_by_the_end(self, seen: int, size: Callable[[], float], is_end_of_training: bool) -> bool:
        """Whether the window takes its step with loader batch number ``seen``, the last of the data."""
        rule = TAILS[self.tail]
        steps = rule.steps(self.position(seen), self.size if self.is_under_way else size())
        return steps and (is_end_of_training or not rule.goes_on)

    def is_dropped_by_the_end(self, seen: int) -> bool:
        """Whether the end of an epoch drops the window, which has begun."""
        return self.position(seen) > 0 and drops(self.tail, self.position(seen), self.size)

    def position(self, seen: int) -> int:
        """Loader batches in the window so far."""
        return seen - self.closed_at

    def left(self, seen: int, size: Callable[[], float]) -> float:
        """Loader batches that the window has after number ``seen``, if none of them is the last of the data."""
        return (self.size if self.is_under_way else size()) - self.position(seen)

    def cut_short(self, seen: int) -> None:
        """Nothing follows loader batch ``seen``: it is the last of its window."""
        self.ends_at = seen

    def close(self, seen: int) -> None:
        """End the window with loader batch ``seen``."""
        self.closed_at, self.is_under_way, self.ends_at, self.tokens = seen, False, seen, None

    def go_on(self, seen: int, position: int, size: float, tokens: int | None) -> None:
        """Be inside a window of ``size`` loader batches, or ``tokens``, the last of ``position`` so far being number ``seen``."""
        self.close(seen - position)
        self.begin(size)
        self.tokens = tokens


def count_windows(batches: int, epochs: int, size: Callable[[int, int], int], tail: Tail) -> int:
    """Number of optimizer steps in ``epochs`` epochs of ``batches`` each; a window has ``size(epoch, step)`` loader batches.

    Example:
        >>> count_windows(6, 4, lambda epoch, step: 1 if epoch == 0 else 4, "step")  # 6 + 2 + 2 + 2
        12
    """
    begun = windows = 0
    while begun < batches * epochs:
        epoch = begun // batches
        end = begun + size(epoch, windows)
        if not TAILS[tail].goes_on and (left := (epoch + 1) * batches - begun) < end - begun:
            windows -= drops(tail, left, end - begun)
            end = begun + left
        begun, windows = end, windows + 1
    return windows


@dataclass
class StepClock:
    """Counts optimizer steps, and knows which schedulers are due.

    Attributes:
        counts: what a scheduler's frequency counts.
        optimizer_steps: steps that really happened; one that a GradScaler skipped is none.
        time: what schedulers have seen so far: optimizer steps, or the loader batches that those took.
    """

    counts: SchedulerCounts = "optimizer_steps"
    optimizer_steps: int = 0
    time: int = 0
    _before: int = 0

    def tick(self, loader_batches: int) -> None:
        """Count an optimizer step on a window of ``loader_batches``."""
        self.optimizer_steps += 1
        self._before = self.time
        self.time += 1 if self.counts == "optimizer_steps" else loader_batches

    def hold(self) -> None:
        """No scheduler is due: a window ended without an optimizer step, or all have stepped after its step."""
        self._before = self.time

    def times_due(self, frequency: int) -> int:
        """How often a scheduler of this frequency is to step now."""
        return self.time // frequency - self._before // frequency


@dataclass
class ValidationClock:
    """Decides when validation every n optimizer steps is due.

    Attributes:
        every: optimizer steps between validations.
        steps: optimizer steps at the last validation; where there was none, when counting began.
        after: the loader batch, counted from 1 over all epochs, that it came after.
    """

    every: int
    steps: int
    after: int = 0

    def is_due(self, steps: int) -> bool:
        """Whether a multiple of :attr:`every` was reached since the last validation."""
        return steps // self.every > self.steps // self.every

    def begin(self, steps: int, seen: int) -> None:
        """Validation is about to run, after ``steps`` optimizer steps and loader batch number ``seen``."""
        self.steps, self.after = steps, seen
