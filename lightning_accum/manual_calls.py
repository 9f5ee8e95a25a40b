"""One backward call of a module that optimizes by itself, and the loader batch that its ``training_step`` runs on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_accum.accumulation import Accumulation
from lightning_accum.main_gradients import GradientSums
from lightning_accum.whole.row_wise import RowWise
from lightning_accum.windows import Windows


class Call(Accumulation):
    """One of the backward calls in a ``training_step``: its windows, each with one loss, and what the check finds of that."""

    def __init__(self, windows: Windows, weight_scale: float | None, checks: int, row_wise: RowWise | None) -> None:
        self.given = GradientSums()
        """What it has given to the gradients in this window."""
        super().__init__(windows.policy, windows.ranks, windows.warn_once, sums=self.given, weight_scale=weight_scale)
        self.boundary, self.checks_left, self.row_wise, self._windows = windows.boundary, checks, row_wise, windows
        self.line = ""
        """Of the user's code, which makes it."""

    @property
    @override
    def position(self) -> int:
        return self._windows.position


@dataclass
class ManualMicroBatch:
    """The loader batch that ``training_step`` runs on.

    Attributes:
        batch: it.
        defers_steps: those of optimizers and schedulers are put off, since it does not end its window.
        moves: what is put off changes parameters a little.
        is_running: it is in ``training_step``.
        next_call: the number of its next backward call.
        stepped: the optimizers whose step it has called.
        versions: of the parameters before it.
        before: what was in ``.grad`` before its first backward.
        begun: the time when it entered ``training_step``.
    """

    batch: Any = None
    defers_steps: bool = False
    moves: bool = False
    is_running: bool = False
    next_call: int = 0
    stepped: list[str] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    before: dict[nn.Parameter, Tensor] | None = None
    begun: float = field(default_factory=time.monotonic)
