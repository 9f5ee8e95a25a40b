"""The loader batches of a window are drawn before the first of them runs, so that the terms of a loss are counted in all of it.

Asked for by a weight for each term. The host holds one window of batches; on a device they are one by one, as ever.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from typing_extensions import override

from lightning_accum.loops.specialised import specialised
from lightning_accum.weighing.denominator import Denominator
from lightning_accum.weighing.terms import TermsCountedAhead

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
    """Draws a window of loader batches when the first of them is asked for, and counts in each what the terms are divided by.

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
            self._draw_window()
        item, self.done, self.fetched, self.accumulation.is_shadow_batch, self.loader_states = self.drawn.popleft()
        return item

    def _draw_window(self) -> None:
        """Draw what the window has, or what is left of it: as many on every rank.

        Raises:
            StopIteration: there is nothing left.
        """
        seen, boundary, terms = self.progress.total.ready, self.accumulation.boundary, self.accumulation.window.terms
        position, left = boundary.position(seen), boundary.left(seen, self.window_size)
        assert isinstance(terms, TermsCountedAhead)
        # one that is alone in its window is counted when it runs, as the hooks around its transfer have left it;
        # those of an unfinished window were, before its checkpoint
        is_counted = terms.is_agreed or (position == 0 and left == 1)
        own: Denominator = 0.0
        self.loader_states = self._states()
        while len(self.drawn) < left and not (self.drawn and self.done):
            try:
                self._draw()
            except StopIteration:
                if not self.drawn:
                    raise
                break
            last = self.drawn[-1]
            if not is_counted and not last.is_shadow_batch and last.item[0] is not None:
                own = terms.add(last.item[0])[0]
            if left == math.inf and self.accumulation.comes_to_tokens(float(own)):
                boundary.begin(position + len(self.drawn))
                break

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
    return specialised(fetcher, AheadFetcher, accumulation=accumulation, **own)
