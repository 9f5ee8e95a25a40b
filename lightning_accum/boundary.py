"""Where a window ends. Loader batches and the end of the data ask the same object."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

Tail: TypeAlias = Literal["step", "drop", "carry"]


class Boundary:
    """Decides which loader batch is the last of its window.

    Counts are loader batches over the whole training, epochs included, so a window may reach over the end of an epoch.

    Args:
        tail: what the end of an epoch does to an unfinished window.

    Example:
        >>> boundary = Boundary("step")
        >>> boundary.begin(size=2)
        >>> [boundary.is_reached(seen, size=lambda: 3) for seen in (1, 2)]  # it keeps the size that it began with
        [False, True]
        >>> boundary.close(2)
        >>> boundary.is_reached(4, size=lambda: 3), boundary.is_cut_by_the_end(is_end_of_training=False)
        (False, True)
    """

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self.closed_at = 0
        """The loader batch, counted from 1, that ended the last window."""
        self.size = math.inf
        """Loader batches in the window that is under way, or in the last one; inf before the first."""
        self._is_under_way = False
        self.cut_at: int | None = None
        """The loader batch that is about to end its window, as nothing follows it; None where there is none."""

    def begin(self, size: float) -> None:
        """A loader batch begins: where a window begins with it, this is its size, and it keeps it.

        Args:
            size: loader batches in a window; inf where something else ends it.
        """
        if not self._is_under_way:
            self.size, self._is_under_way = size, True

    def is_reached(self, seen: int, size: Callable[[], float]) -> bool:
        """Whether the window ends with loader batch number ``seen``, whatever follows.

        Between the end of a window and the next loader batch the answer stays True.

        Args:
            seen: loader batches so far, this one included.
            size: returns the loader batches in a window that has not begun; see :meth:`begin`.
        """
        position = seen - self.closed_at
        if position == 0 or seen == self.cut_at:
            return True
        return position >= (self.size if self._is_under_way else size())

    def is_cut_by_the_end(self, is_end_of_training: bool) -> bool:
        """Whether an unfinished window ends where the data does.

        Args:
            is_end_of_training: it is the end of the last epoch.
        """
        return self.tail == "step" or (self.tail == "carry" and is_end_of_training)

    def position(self, seen: int) -> int:
        """Loader batches in the window so far."""
        return seen - self.closed_at

    def left(self, seen: int, size: Callable[[], float]) -> float:
        """Loader batches that the window has after number ``seen``, if none of them is the last of the data.

        Args:
            seen: loader batches so far.
            size: returns the loader batches in a window that has not begun; see :meth:`begin`.
        """
        return (self.size if self._is_under_way else size()) - self.position(seen)

    def cut_short(self, seen: int) -> None:
        """Nothing follows loader batch ``seen``: it is the last of its window."""
        self.cut_at = seen

    def close(self, seen: int) -> None:
        """End the window with loader batch ``seen``."""
        self.closed_at, self._is_under_way, self.cut_at = seen, False, None

    def go_on(self, seen: int, position: int, size: float) -> None:
        """Be inside a window of ``size`` loader batches, the last of ``position`` so far being number ``seen``."""
        self.close(seen - position)
        self.begin(size)


def count_windows(batches: int, epochs: int, size: Callable[[int, int], int], tail: Tail) -> int:
    """The number of optimizer steps in a training of known length.

    Args:
        batches: loader batches in an epoch.
        epochs: how many epochs.
        size: loader batches in a window that begins in the given epoch (from 0), after the given number of steps.
        tail: what the end of an epoch does to an unfinished window.

    Example:
        >>> count_windows(6, 4, lambda epoch, step: 1 if epoch == 0 else 4, "step")  # 6 + 2 + 2 + 2
        12
        >>> count_windows(6, 4, lambda epoch, step: 4, "carry"), count_windows(6, 4, lambda epoch, step: 4, "drop")
        (6, 4)
        >>> count_windows(10, 1, lambda epoch, step: 1 + step, "step")  # 1 + 2 + 3 + 4
        4
    """
    begun = windows = 0
    while begun < batches * epochs:
        epoch = begun // batches
        end = begun + size(epoch, windows)
        if tail != "carry" and end > (epoch + 1) * batches:
            end = (epoch + 1) * batches
            windows -= tail == "drop"
        begun, windows = end, windows + 1
    return windows
