"""Whether all ranks make the same calls in a training_step that optimizes by itself: they wait for each other in these."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn
from zlib import crc32

from lightning_accum.errors import UsageError
from lightning_accum.failures import have_all_left
from lightning_accum.ranks import Ranks
from lightning_accum.user_warnings import users_line

PATIENCE = 10.0
"""Seconds that a rank which has left training_step early waits for the others to leave it, beside ten times what it took."""
_MEND = (
    " Over ranks, all of them make the same calls of manual_backward and step, where gradients are reduced or sharded: a rank that"
    " has nothing to add takes part with a loss of 0 that depends on the parameters. With automatic optimization a rank may return"
    " None."
)


class SamePlace:
    """Compares where the ranks are in ``training_step``.

    Args:
        ranks: those of the training.
        waits_in_backward: each forward and backward of a rank waits for the others, as those of sharded modules do.
    """

    def __init__(self, ranks: Ranks, waits_in_backward: bool) -> None:
        self._ranks = ranks
        self._waits_in_backward = waits_in_backward
        self._most_calls = 0
        self._begun = 0.0

    def begin(self) -> None:
        """Enter training_step."""
        self._begun = time.monotonic()

    def compare(self, calls: int, stepped: Sequence[str], is_end: bool) -> None:
        """Gradients are reduced next, or a training_step that may step has ended. Called on all ranks.

        Args:
            calls: of ``manual_backward`` so far.
            stepped: the optimizers whose step was called.
            is_end: training_step has ended.

        Raises:
            RuntimeError: on all ranks, one is elsewhere.
        """
        if self._ranks.size == 1 or (self._waits_in_backward and not is_end):
            return
        steps = f"stepped {', '.join(stepped) or 'nothing'}"
        called = f"called manual_backward {calls} time{'s' * (calls != 1)}"
        where = f"has {called}, {steps}, and left training_step" if is_end else f"has {called} ({users_line()}), and {steps}"
        code = crc32(f"{calls} {stepped} {is_end}".encode()) & 0xFFFFFF  # exact in any type
        most, fewest = self._ranks.largest(code, -code)
        if most != -fewest:
            self._refuse([self._ranks.share(where, rank) for rank in range(self._ranks.world_size)])

    def leave(self, calls: int) -> None:
        """A training_step has ended. Called on all ranks, if all of them come to it.

        Args:
            calls: of ``manual_backward``.

        Raises:
            RuntimeError: this rank has called it less often than before, and others are still in training_step.
        """
        if self._ranks.size == 1 or not self._waits_in_backward:
            return
        may_be_early = calls < self._most_calls or not self._most_calls
        self._most_calls = max(self._most_calls, calls)
        if not have_all_left(may_be_early, PATIENCE + 10 * (time.monotonic() - self._begun)):
            raise UsageError(
                f"Rank {self._ranks.rank} has called manual_backward {calls} time{'s' * (calls != 1)} and left training_step, and"
                f" another rank is still in it, where it waits for this one.{_MEND}"
            )

    def _refuse(self, places: Sequence[str]) -> NoReturn:
        found = "; ".join(f"rank {rank} {place}" for rank, place in enumerate(places))
        raise UsageError(f"The ranks are at different places in the training_step that ends a window: {found}.{_MEND}")
