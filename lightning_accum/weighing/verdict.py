"""What the check looks at, and what it says of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

MOST_ROWS = 8


class CannotCheckError(Exception):
    """What keeps the check from an answer."""


class NoDenominatorError(CannotCheckError):
    """The graph of the loss shows none."""


class UnsuitableRowsError(CannotCheckError):
    """These rows show nothing; others may."""


class Rows(NamedTuple):
    """A few rows of a batch, together and in parts, each made anew when it is asked for: a step may take its batch apart.

    Attributes:
        sizes: of the parts.
        are_counted: these are numbers of rows, in their order; not where the user's own function cuts.
    """

    whole: Callable[[], Any]
    parts: Sequence[Callable[[], Any]]
    sizes: Sequence[int]
    are_counted: bool = True


@dataclass(frozen=True)
class Verdict:
    """What the check found.

    Attributes:
        deviation: how far the parts are from the whole, as part of its size; None where that could not be found out.
        tolerance: what rounding makes of it.
        seen: what deviates by that much, or why nothing could be found out.
        rows: the sizes of the parts.
        has_terms: the loss has terms that are divided by something else than the main one, and share its weight.
        is_suitable: False where these rows show nothing, and others may.
        looked_at: how many rows were looked at until now, of this batch and those before.
        loss: the largest that was seen in them.
        is_unread: the graph of the loss of all rows shows no denominator.
    """

    deviation: float | None
    tolerance: float = 0.0
    seen: str = ""
    rows: tuple[int, ...] = ()
    has_terms: bool = False
    is_suitable: bool = True
    looked_at: int = 0
    loss: float = 0.0
    is_unread: bool = False

    @classmethod
    def unknown(cls, reason: CannotCheckError) -> Verdict:
        """That of what could not be found out."""
        is_suitable, is_unread = not isinstance(reason, UnsuitableRowsError), isinstance(reason, NoDenominatorError)
        return cls(None, seen=str(reason), is_suitable=is_suitable, is_unread=is_unread)

    @staticmethod
    def worst(verdicts: Iterable[Verdict]) -> Verdict:
        """That which is farthest off: first of those that rounding does not explain."""
        return max(verdicts, key=lambda verdict: (not verdict.adds_up, verdict.deviation or 0.0))

    def after(self, before: Verdict | None) -> Verdict:
        """The worst of both, where rows of another batch were looked at before."""
        if before is None or before.deviation is None:
            return self
        worst = before if self.deviation is None else Verdict.worst([self, before])
        return replace(worst, looked_at=self.looked_at + before.looked_at, loss=max(self.loss, before.loss))

    @property
    def may_try_again(self) -> bool:
        """Another batch may show more."""
        return not self.is_suitable if self.deviation is None else self.looked_at < MOST_ROWS

    @property
    def in_words(self) -> str:
        """What deviates, and by how much."""
        return self.seen if self.deviation == math.inf else f"{self.seen} is {self.deviation:.2g} of its size off"

    @property
    def adds_up(self) -> bool:
        """Nothing was seen that rounding does not explain."""
        return self.deviation is None or self.deviation <= self.tolerance

    def __str__(self) -> str:
        if self.deviation is None:
            return f"not checked: {self.seen}"
        words = "adds up to" if self.adds_up else "does not add up, by"
        rows = f" on {self.looked_at} row{'s' * (self.looked_at > 1)}" if self.looked_at < MOST_ROWS else ""
        return f"checked: {words} {self.deviation:.1g}{rows}"


def parts_of(rows: int, size: int | None) -> list[int]:
    """The sizes of the parts that a batch of so many rows is looked at in: unequal ones, one of a single row among them.

    Args:
        rows: of the batch.
        size: of a micro-batch, which has memory, and so have 4 rows (2 where a micro-batch is one); None for all of them.

    Example:
        >>> parts_of(64, None), parts_of(64, 6), parts_of(64, 2), parts_of(64, 1), parts_of(2, None)
        ([1, 2, 5], [1, 2, 3], [1, 2, 1], [1, 1], [1, 1])
    """
    looked_at = min(rows, MOST_ROWS, rows if size is None else 2 if size == 1 else max(4, size))
    if looked_at < 4:
        return [1, looked_at - 1]
    return [1, 2, looked_at - 3]
