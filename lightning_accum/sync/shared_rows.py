"""Ranks that have parts of the same rows, as in context parallelism: they run each micro-batch together."""

from __future__ import annotations

from math import inf

from lightning_accum.errors import UsageError
from lightning_accum.ranks import Ranks

_PRIME = 2**31 - 1


class SharedRows:
    """Which micro-batches of a window this rank had a loss for, and whether those that have parts of the same rows had one too.

    In the place of a rank without a loss another batch would run, whose keys and values the others would attend to.

    Args:
        ranks: those of the training.
        number: of the rows that this rank has parts of, from 0.
        of: how many there are.
    """

    def __init__(self, ranks: Ranks, number: int, of: int) -> None:
        self._ranks = ranks
        self._number = number
        self._of = of
        self._seen = 1

    def note(self, has_loss: bool) -> None:
        """A micro-batch has run."""
        self._seen = (3 * self._seen + has_loss) % _PRIME

    def forget(self) -> None:
        """The window is dropped."""
        self._seen = 1

    def end_window(self) -> None:
        """Compare. Called on all ranks.

        Raises:
            RuntimeError: on all ranks, some that have parts of the same rows had a loss, and others had none.
        """
        largest = [-inf] * self._of
        smallest = largest.copy()
        largest[self._number], smallest[self._number] = self._seen, -self._seen
        self.forget()
        found = self._ranks.largest(*largest, *smallest)
        if any(most != -fewest for most, fewest in zip(found[: self._of], found[self._of :], strict=True)):
            raise UsageError(
                "In a window, a rank had no loss for a batch that others with parts of the same rows had one for. With"
                " context_parallel or sequence_parallel in mesh=, these ranks need the same batches, and training_step returns a"
                " loss for each part: that of a part without labels may be NaN, and weighs nothing."
            )
