"""The loader batches of a window are drawn before the first of them runs, so that the terms of a loss are counted in all of it.

The host holds one window of batches; on a device they are one by one, as ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from typing_extensions import override

from lightning_accum.loops.specialised import specialised

if TYPE_CHECKING:
    from lightning_accum.accumulation import Accumulation


class Drawn(NamedTuple):
    """A loader batch, and how things stood when it had been drawn.

    Attributes:
        item: what the fetcher yields.
        done: it is the last of the epoch.
        fetched: batches of the epoch until then.
        is_shadow_batch: this rank had none, and it stands in for it.
        loader_states: of the loaders that have one.
    """

    item: Any
    done: bool
    fetched: int
    is_shadow_batch: bool
    loader_states: list[dict[str, Any]]


class AheadFetcher(_PrefetchDataFetcher):
    """Draws the rest of a window when it is asked for, so that what the terms of its losses weigh is counted in all of it.

    All that is seen of it (``done``, ``fetched``, a checkpoint of the loaders) is as if each had been drawn when it is yielded.
    """

    accumulation: Accumulation
    progress: Any
    """Of the loader batches."""
    window_size: Callable[[], float]
    """Loader batches in a window that begins now; inf where it ends by its tokens."""
    drawn: deque[Drawn]
    """Those that have not been yielded."""
    loader_states: list[dict[str, Any]]
    """What a checkpoint is to hold of the loaders while there are any: that of the last that was yielded."""

    @override
    def __iter__(self) -> AheadFetcher:
        self.drawn.clear()
        super().__iter__()
        return self

    @override
    def __next__(self) -> Any:
        if not self.drawn:
            return super().__next__()
        item, self.done, self.fetched, self.accumulation.is_shadow_batch, self.loader_states = self.drawn.popleft()
        return item

    def rest_of_window(self) -> Iterator[tuple[Any, bool]]:
        """Draw what the window under way has after its first loader batch, one by one: as many on every rank.

        Yields:
            The batch as the loader gave it, and whether this rank runs it for the sake of the others.
        """
        left = self.accumulation.boundary.left(self.progress.total.ready, self.window_size)
        seen, drawn = self._place(), self._place()
        if not self.drawn:
            self.loader_states = self._states()
        while len(self.drawn) < left and not drawn[0]:
            self._go_to(drawn)
            try:
                self._draw()
            except StopIteration:
                return
            finally:
                drawn = self._place()
                self._go_to(seen)
            yield self.drawn[-1].item[0], self.drawn[-1].is_shadow_batch

    def _place(self) -> tuple[bool, int, bool]:
        return self.done, self.fetched, self.accumulation.is_shadow_batch

    def _go_to(self, place: tuple[bool, int, bool]) -> None:
        self.done, self.fetched, self.accumulation.is_shadow_batch = place

    def _draw(self) -> None:
        item = super().__next__()
        self.drawn.append(Drawn(item, self.done, self.fetched, self.accumulation.is_shadow_batch, self._states()))

    def _states(self) -> list[dict[str, Any]]:
        return deepcopy(self.combined_loader._state_dicts())


def drawing_ahead(
    fetcher: Any, accumulation: Accumulation, progress: Any, window_size: Callable[[], float]
) -> AbstractContextManager[None]:
    """Have a fetcher of Lightning's draw windows, each when its first loader batch is asked for."""
    own: dict[str, Any] = {"progress": progress, "window_size": window_size, "drawn": deque(), "loader_states": []}
    accumulation.rest_of_window = lambda: fetcher.rest_of_window()
    return specialised(fetcher, AheadFetcher, accumulation=accumulation, **own)
