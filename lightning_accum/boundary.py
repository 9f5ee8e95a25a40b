"""When a window ends, how many windows there are, and when schedulers and validation are due."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

SchedulerCounts: TypeAlias = Literal["optimizer_steps", "micro_batches"]
Tail: TypeAlias = Literal["step", "drop", "carry"]


class TailRule(NamedTuple):
    """The effect of the end of an epoch on a window that is not full: by default it takes its step."""

    outcome: str  # what happens to windows that are longer than an epoch, in words
    least: float = 0.0  # the share of its loader batches with which it takes its step; with fewer it is dropped
    goes_on: bool = False  # the window continues in the next epoch; at the end of training it takes its step

    def drops(self, position: float, size: float) -> bool:
        """Whether a window is dropped that ends after ``position`` of its ``size`` loader batches (inf if tokens end it)."""
        return self.least > 0 and position < self.least * size


TAILS: dict[Tail, TailRule] = {
    "step": TailRule("there is one optimizer step an epoch, on all of its data"),
    "drop": TailRule("nothing is trained", least=1.0),
    "carry": TailRule("it continues in the next epoch", goes_on=True),
}
"""All values of ``tail=``."""


class Boundary:
    """Decides which loader batch is the last of its window. It counts over the whole training, since a window may span epochs."""

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self.closed_at = 0
        """The loader batch, counted from 1, that ended the last window."""
        self.size = math.inf
        """Loader batches in the window that is under way, or in the last one; inf before the first."""
        self.is_under_way = False
        """A window has begun, and not ended."""
        self.ends_at: float = 0
        """The loader batch that ends the current window, or ended the last one; inf if tokens or the end of the data end it."""
        self.tokens: int | None = None
        """The tokens that the current window must reach; None if windows are not measured in tokens, or it was not asked yet."""

    def begin(self, size: Callable[[], float]) -> None:
        """Begin a loader batch. If a window begins with it, the window keeps this size (inf if tokens or the data end it)."""
        if not self.is_under_way:
            self.size, self.is_under_way = size(), True
            self.ends_at = self.closed_at + self.size

    def is_reached(self, seen: int, size: Callable[[], float]) -> bool:
        """Whether the window ends with loader batch number ``seen``, whatever follows. ``size`` is its size if none has begun."""
        is_known = self.is_under_way or seen == self.ends_at
        return seen >= (self.ends_at if is_known else self.closed_at + size())

    def is_cut_by_the_end(self, seen: int, is_end_of_training: bool, size: float) -> bool:
        """Whether the window takes its step with ``seen``, the last loader batch of the data. ``size`` is its size if none has
        begun."""
        rule, size = TAILS[self.tail], self.size if self.is_under_way else size
        return not rule.drops(self.position(seen), size) and (is_end_of_training or not rule.goes_on)

    def is_dropped_by_the_end(self, seen: int) -> bool:
        """Whether the end of an epoch drops the window, which has begun."""
        return self.position(seen) > 0 and TAILS[self.tail].drops(self.position(seen), self.size)

    def position(self, seen: int) -> int:
        """Loader batches in the window so far."""
        return seen - self.closed_at

    def left(self, seen: int) -> float:
        """Loader batches of the window under way after number ``seen``, if the data do not end before."""
        return self.size - self.position(seen)

    def cut_short(self, seen: int) -> None:
        """End the window with loader batch ``seen``, which is the last of the data."""
        self.ends_at = seen

    def close(self, seen: int) -> None:
        """End the window with loader batch ``seen``."""
        self.closed_at, self.is_under_way, self.ends_at, self.tokens = seen, False, seen, None

    def go_on(self, seen: int, position: int, size: float, tokens: int | None) -> None:
        """Resume inside a window of ``size`` loader batches, or ``tokens``: after ``position`` of them, the last is ``seen``."""
        self.close(seen - position)
        self.begin(lambda: size)
        self.tokens = tokens


def count_windows(batches: int, epochs: int, size: Callable[[int, int], int], tail: Tail) -> int:
    """Number of optimizer steps in ``epochs`` epochs of ``batches`` each; a window has ``size(epoch, step)`` loader batches."""
    begun = windows = 0
    while begun < batches * epochs:
        whole, left = size(begun // batches, windows), batches - begun % batches
        taken = whole if TAILS[tail].goes_on else min(whole, left)
        windows += not TAILS[tail].drops(taken, whole)
        begun += taken
    return windows


@dataclass
class StepClock:
    """Counts optimizer steps, and knows which schedulers are due."""

    counts: SchedulerCounts = "optimizer_steps"  # what a scheduler's frequency counts
    optimizer_steps: int = 0  # without those that a GradScaler skipped
    time: int = 0  # the count of schedulers so far: optimizer steps, or the loader batches of these steps
    _before: dict[bool, int] = field(default_factory=dict)  # the time when schedulers last stepped; plateau schedulers: True

    def tick(self, loader_batches: int) -> None:
        """Count an optimizer step on a window of ``loader_batches``."""
        self.optimizer_steps += 1
        self.hold(False, True)
        self.time += 1 if self.counts == "optimizer_steps" else loader_batches

    def hold(self, *are_plateau: bool) -> None:
        """Make no scheduler of these kinds due: a window ended without an optimizer step, or they have stepped."""
        self._before.update(dict.fromkeys(are_plateau, self.time))

    def times_due(self, frequency: int, is_plateau: bool) -> int:
        """How often a scheduler of this frequency is to step now."""
        return self.time // frequency - self._before.get(is_plateau, self.time) // frequency


@dataclass
class ValidationClock:
    """Decides when validation every n optimizer steps is due."""

    every: int  # optimizer steps between validations
    steps: int  # optimizer steps at the last validation, or when counting began
    after: int = 0  # the loader batch before that validation, counted from 1 over all epochs

    def is_due(self, steps: int) -> bool:
        """Whether a multiple of :attr:`every` was reached since the last validation."""
        return steps // self.every > self.steps // self.every

    def begin(self, steps: int, seen: int) -> None:
        """Note that validation runs after ``steps`` optimizer steps and loader batch number ``seen``."""
        self.steps, self.after = steps, seen
