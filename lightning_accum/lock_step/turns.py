"""Several runs of one function, of which only one moves at a time, and which wait for each other at named places."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class WaysPartError(RuntimeError):
    """The runs came to different places."""


class _Ended(BaseException):  # no error: it unwinds a run that has been given up
    """Another run has failed."""


class LockStep(Generic[T]):
    """Runs a function once for each index, in turns.

    Each run has a thread of its own, but only the one whose turn it is moves, in the order of the indices: so the result is the
    same each time. A turn goes from one :meth:`meet` to the next. When all have come to the same place, the last to come does
    what there is to do for all of them, and the turns begin anew.

    An exception in one run ends all of them, one after the other, and is raised by :meth:`run` with its own traceback. So does one
    that comes from outside while they run, such as KeyboardInterrupt: the run whose turn it is ends at its next meeting.

    Args:
        number: of runs.
        around: makes a context that a run is in, in its own thread.
        on_turn: told whose turn ends and whose begins; None for nobody, before the first turn and after the last.

    Example:
        >>> def double(index):
        ...     seen.append(index)
        ...     steps.meet("half way", lambda: seen.append("all"))
        ...     return 2 * index
        >>> seen, steps = [], LockStep(2)
        >>> steps.run(double), seen
        ([0, 2], [0, 1, 'all'])
    """

    def __init__(
        self,
        number: int,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        on_turn: Callable[[int | None, int | None], None] = lambda before, now: None,
    ) -> None:
        self.number = number
        self.current: int | None = None
        """Whose turn it is; None outside of :meth:`run`."""
        self._around = around
        self._on_turn = on_turn
        self._turns = [_closed_gate() for _ in range(number)]
        self._all_ended = _closed_gate()
        self._has_ended = [False] * number
        self._threads: list[int | None] = [None] * number
        self._place: str | None = None
        """Where the first run of this round has come to; None where it has ended."""
        self._failure: BaseException | None = None

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Run ``function`` for 0, 1, ... up to the number, and return what it returned.

        Raises:
            WaysPartError: the runs did not come to the same places in the same order.
        """
        results: list[Any] = [None] * self.number

        def one(index: int) -> None:
            self._turns[index].acquire()
            self._threads[index] = threading.get_ident()
            try:
                if self._failure is None:
                    with self._around():
                        results[index] = function(index)
                    self._agree_on(None, index)
            except _Ended:
                pass
            except BaseException as error:
                self._fail(error)
            finally:
                self._has_ended[index] = True
                self._pass_on(index)

        threads = [
            threading.Thread(target=copy_context().run, args=(one, index), name=f"micro-batch {index}", daemon=True)
            for index in range(self.number)
        ]
        try:
            for thread in threads:
                thread.start()
            self._give_turn(None, 0)
        except BaseException as error:  # there is no room for so many threads, or a signal
            self._fail(error)
            self._has_ended = [
                thread.ident is None or has_ended for thread, has_ended in zip(threads, self._has_ended, strict=True)
            ]
            self._pass_on(self.number - 1)
        while not all(self._has_ended):
            try:
                self._all_ended.acquire()
            except BaseException as error:  # a signal, while a run moves: it sees at its next meeting that all is over
                self._fail(error)
        threads = [thread for thread in threads if thread.ident is not None]
        for thread in threads:
            thread.join()
        self.current = None
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback refers to this frame
        return results

    def meet(self, place: str, join: Callable[[], None] = lambda: None) -> None:
        """Wait until all runs have come here. Called inside of a run.

        Args:
            place: where this is.
            join: called by the last to come, before any goes on.

        Raises:
            WaysPartError: another run has ended, or has come to another place.
        """
        index = self.current
        assert index is not None
        self._raise_if_over()
        self._agree_on(place, index)
        if index == self.number - 1:
            join()
        if self.number > 1:
            self._pass_on(index)
            self._turns[index].acquire()
            self._raise_if_over()

    def is_in_turn(self) -> bool:
        """Whether the caller is the run whose turn it is."""
        return self.current is not None and self._threads[self.current] == threading.get_ident()

    def _agree_on(self, place: str | None, index: int) -> None:
        if index == 0:
            self._place = place
        elif place != self._place:
            raise WaysPartError(
                f"The ways of the micro-batches part: micro-batch {index} {_came_to(place)}, where micro-batch 0"
                f" {_came_to(self._place)}."
            )

    def _raise_if_over(self) -> None:
        if self._failure is not None:
            raise _Ended

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error

    def _pass_on(self, index: int) -> None:
        """The turn of ``index`` has ended: the next may move."""
        following = (index + 1) % self.number
        if self._failure is not None or self._has_ended[following]:
            following = next((i for i, has_ended in enumerate(self._has_ended) if not has_ended), self.number)
        self._give_turn(index, following if following < self.number else None)

    def _give_turn(self, before: int | None, now: int | None) -> None:
        try:
            self._on_turn(before, now)
        except BaseException as error:
            self._fail(error)
        self.current = now
        (self._all_ended if now is None else self._turns[now]).release()


def _closed_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


def _came_to(place: str | None) -> str:
    return "had ended" if place is None else f"came to {place}"
