"""The result of the check, and its progress over the loader batches of a fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

MOST_ROWS = 8
_WINDOWS_TO_LOOK_AT = frozenset(2 * 4**power for power in range(16))
"""A verdict may hold only for the first parameters, or for the first batches."""
_WINDOWS_BETWEEN_LOOKS = 64


class CannotCheckError(Exception):
    """The check cannot give an answer."""


class GathersError(CannotCheckError):
    """The loss of one rank depends on the rows of all ranks."""


class UnsuitableRowsError(CannotCheckError):
    """These rows give no answer; others may."""


@dataclass(frozen=True)
class Verdict:
    """The result of the check."""

    deviation: float | None  # relative error of the sum of the parts; None if not measured
    tolerance: float = 0.0  # the error that rounding explains
    seen: str = ""  # the quantity with this error, or why nothing was measured
    rows: tuple[int, ...] = ()  # the sizes of the parts
    is_suitable: bool = True  # False if these rows give no answer, and others may
    looked_at: int = 0  # rows checked so far, in this batch and earlier ones

    @classmethod
    def unknown(cls, reason: CannotCheckError) -> Verdict:
        """The verdict of a check without an answer."""
        return cls(None, seen=str(reason), is_suitable=not isinstance(reason, UnsuitableRowsError))

    @property
    def may_try_again(self) -> bool:
        """Whether another batch may give an answer."""
        return not self.is_suitable if self.deviation is None else self.looked_at < MOST_ROWS

    @property
    def in_words(self) -> str:
        """The quantity that deviates, and its error."""
        if self.adds_up:
            return "they deviate on another rank"
        return self.seen if self.deviation == math.inf else f"relative error of {self.seen}: {self.deviation:.2g}"

    @property
    def adds_up(self) -> bool:
        """Whether rounding explains the deviation, or nothing was measured."""
        return self.deviation is None or self.deviation <= self.tolerance

    def __str__(self) -> str:
        if self.deviation is None:
            return f"not checked: {self.seen}"
        rows = f" on {self.looked_at} row{'s' * (self.looked_at > 1)}" if self.looked_at < MOST_ROWS else ""
        return f"exact, checked to {self.deviation:.1g}{rows}"


class Progress:
    """The loader batches that the check of a loss may use, and what it has found. The same on all ranks, but for ``rows``."""

    def __init__(self) -> None:
        self.batches_left = 0
        """How many more of the first loader batches the check may use, until it has seen enough rows on every rank."""
        self.verdict: Verdict | None = None  # None before the first loader batch, or if nothing is checked
        self.is_checked = False  # parts of some rows have added up
        self.rows: Any = None  # a few rows of the last loader batch that was checked
        self.has_joint_loss = False  # the loss of a rank depends on the rows of all ranks
        self._looks_anew = False
        """The next window is checked again: a loss may change with the epoch, for example by a factor in a buffer."""
        self._looked_at = 0  # optimizer steps before the last look

    def begin(self, most_batches: int, reason: str | None = None) -> None:
        """Check at most this many of the first loader batches; or none, for a reason."""
        self.batches_left = 0 if reason else most_batches
        self.find(Verdict(None, seen=reason) if reason else None)

    def use(self, batches: int) -> None:
        """Use this many loader batches; a negative number gives them back."""
        self.batches_left -= batches

    def find(self, verdict: Verdict | None, rows: Any = None) -> None:
        """Note a result, and rows that were checked."""
        self.verdict, self.rows = verdict, self.rows if rows is None else rows
        self.is_checked = verdict is not None and verdict.deviation is not None

    def end(self, has_joint_loss: bool = False) -> None:
        """Use no more of the first loader batches."""
        self.batches_left, self.has_joint_loss = 0, self.has_joint_loss or has_joint_loss

    def begin_epoch(self, epoch: int, steps: int) -> None:
        """Look anew in epochs 1, 2, 4, 8, ..., and in others if it takes little time beside the windows since the last look."""
        self._looks_anew = epoch.bit_count() == 1 or steps - self._looked_at >= _WINDOWS_BETWEEN_LOOKS

    def take_look(self, steps: int) -> bool:
        """Whether the window after so many optimizer steps is checked before it begins."""
        if self.batches_left or self.verdict is None or not (self.is_checked or not self.verdict.is_suitable):
            return False
        is_due, self._looks_anew = self._looks_anew or steps + 1 in _WINDOWS_TO_LOOK_AT, False
        self._looked_at = steps if is_due else self._looked_at
        return is_due
