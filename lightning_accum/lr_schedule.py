"""How learning-rate schedulers count: optimizer steps that really happened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.optim import Optimizer

SchedulerCounts: TypeAlias = Literal["optimizer_steps", "micro_batches"]


@dataclass
class StepClock:
    """Counts optimizer steps, and tells which schedulers are due.

    Attributes:
        counts: what a scheduler's frequency counts.
        optimizer_steps: steps that really happened; one that a GradScaler skipped is none.
        time: what schedulers have seen so far: optimizer steps, or the loader batches that those took.

    Example:
        >>> clock = StepClock("micro_batches")
        >>> clock.tick(loader_batches=4)
        >>> clock.times_due(frequency=1), clock.times_due(frequency=3)
        (4, 1)
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


class StepWatch:
    """Sees whether an optimizer's ``step`` really ran.

    A GradScaler that found an inf does not call it; an optimizer that unscales by itself (``fused=True``) is called, with the
    finding in its ``found_inf``.

    Args:
        optimizer: that is watched.
        before: called whenever it is about to step, as a hook of the optimizer's.
    """

    def __init__(self, optimizer: Optimizer, before: Callable[[], None]) -> None:
        self.optimizer = optimizer
        self._before, self._depth = before, 0
        self._has_stepped = False
        register: Callable[..., Any] | None = getattr(optimizer, "register_step_post_hook", None)
        self._is_watching = register is not None
        self._handles = []
        if register is not None:
            self._handles = [register(self._on_step), optimizer.register_step_pre_hook(self._on_begin)]

    def _on_begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth == 1:  # a step that calls that of the class it extends is one
            self._before()

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        found_inf = getattr(optimizer, "found_inf", None)
        self._has_stepped |= not (isinstance(found_inf, torch.Tensor) and bool(found_inf))

    def has_stepped(self) -> bool:
        """Whether the optimizer stepped since the last call. True where it cannot be watched."""
        stepped = self._has_stepped or not self._is_watching
        self._has_stepped, self._depth = False, 0
        return stepped

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
