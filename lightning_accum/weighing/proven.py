"""What the check has proven: that windows add up, of losses that are read in the ways that it has seen.

A later micro-batch may take another branch: ``loss[mask].mean() if mask.any() else loss.mean()``. Its graph shows that, or a count
of 1 that may have been raised from 0. So its rows are looked at, together with rows of a micro-batch like those that were checked,
before the step of its window.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_accum.weighing.contribution import COUNTS_NOTHING, Contribution, Kind, Way

_MOST_LOOKS, _MOST_OF_COUNTS = 16, 4
"""At windows with doubts in a fit, and at those that a count of at most 1 is the reason of."""
_AT_ONCE = 4
_COUNTS_AT_ONCE = 16
"""Micro-batches of a window that are kept to be looked at; and those of them that may have nothing to count."""


class Proven:
    """The ways in which losses may be read.

    Args:
        ways: those that the check has seen.
        kinds: what weights count there.
        rows: some of a checked batch; None to keep the first micro-batch that is read in these ways.

    Example:
        >>> proven = Proven({("Mean", "NllLoss")})
        >>> proven.doubts(Contribution(4.0, ways=frozenset({("Mean", "NllLoss")})), "a batch")
        False
        >>> proven.doubts(Contribution(4.0, ways=frozenset({("Mean", "Index")})), "another batch")
        True
        >>> proven.take_doubted()
        ([('another batch', False)], 0)
    """

    def __init__(self, ways: Iterable[Way], kinds: Iterable[Kind] = (), rows: Any = None) -> None:
        self.ways = set(ways)
        self.kinds = set(kinds)
        self.rows = rows
        self.number_doubted = 0
        """Micro-batches of the window so far, also like those that are kept."""
        self.do_counts_matter = False
        """A micro-batch that has nothing to count, and counts 1, does not add up. The same on all ranks."""
        self._counts_left_out = 0
        self._doubted: list[tuple[Any, frozenset[Way]]] = []
        self._looks_left, self._looks_at_counts_left = _MOST_LOOKS, _MOST_OF_COUNTS

    def add(self, ways: set[Way], kinds: set[Kind], rows: Any) -> None:
        """The check has seen these ways. A count of at most 1 is no surprise where samples are counted."""
        self.kinds |= kinds
        self.ways |= ways if all(kind.is_of_samples for kind in self.kinds) else ways - {COUNTS_NOTHING}
        self.rows = rows

    def doubts(self, contribution: Contribution, batch: Any) -> bool:
        """Whether a micro-batch is to be looked at before the step of its window. It is kept until then."""
        if contribution.ways <= self.ways:
            if self.rows is None:
                self.rows = batch
            return False
        weight = contribution.weight
        if not self._looks_left or (not isinstance(weight, Tensor) and weight == 0):
            return False
        self.number_doubted += 1
        new = contribution.ways - self.ways
        is_of_count = new == {COUNTS_NOTHING}
        if is_of_count or not any(new <= ways for _, ways in self._doubted):
            is_kept = len(self._doubted) < (_COUNTS_AT_ONCE if is_of_count else _AT_ONCE)
            self._counts_left_out += is_of_count and not is_kept
            if is_kept:
                self._doubted.append((batch, new))
        return True

    def take_doubted(self) -> tuple[list[tuple[Any, bool]], int]:
        """The batches of the window that has ended, and whether it is their counts alone that are doubted; and how many more are.

        Their ways are not doubted again; but for counts, of which each is another.
        """
        (doubted, self._doubted), (left_out, self._counts_left_out) = (self._doubted, []), (self._counts_left_out, 0)
        self.number_doubted = 0
        self._looks_left -= any(ways != {COUNTS_NOTHING} for _, ways in doubted) or bool(doubted and not self.do_counts_matter)
        if any(COUNTS_NOTHING in ways for _, ways in doubted) and not self.do_counts_matter:
            self._looks_at_counts_left -= 1
        for _, ways in doubted:
            self.ways |= ways - ({COUNTS_NOTHING} if self._looks_at_counts_left > 0 else set())
        return [(batch, ways == {COUNTS_NOTHING}) for batch, ways in doubted], left_out

    def trust_counts(self) -> None:
        """There was a warning of what counts nothing: no more micro-batches are looked at for it."""
        self.ways.add(COUNTS_NOTHING)
