"""The result of the check."""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_ROWS = 8


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
