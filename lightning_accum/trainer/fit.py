"""The loop over epochs, which end on all ranks together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from typing_extensions import override

from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.epochs import AccumulatingEpochLoop
from lightning_accum.trainer.from_lightning import _DataFetcher, _FitLoop, _PrefetchDataFetcher
from lightning_accum.trainer.seams import specialised
from lightning_accum.trainer.uneven import UnevenDataFetcher

if TYPE_CHECKING:
    from lightning_accum.accumulation import Accumulation


class AccumulatingFitLoop(_FitLoop):
    """The last window ends with the training, and an epoch is as long as that of the rank that has the most."""

    seams: ExitStack
    """Ends with the fit."""

    @override
    def reset(self) -> None:
        super().reset()
        epoch_loop, epoch = cast("AccumulatingEpochLoop", self.epoch_loop), self.epoch_progress.current
        is_processed = epoch.processed == epoch.ready  # type: ignore[attr-defined]  # the tracker of epochs has it
        if not self.restarting or not is_processed or not epoch_loop.batch_progress.is_last_batch:
            return
        # The checkpoint is from after the last batch of an epoch. Lightning has ended that epoch, or does so once more where
        # max_steps is set, but takes the next for the one that was under way: without its start, and on what its loader had left
        if self.restarted_on_epoch_end:
            self.epoch_progress.increment_completed()
        self.reset_restart_stage()
        epoch_loop.begins_anew = True

    @override
    def setup_data(self) -> None:
        """Have all ranks end an epoch together, and draw the batches of a window before it runs where weights are counted ahead."""
        before, strategy = self._data_fetcher, cast("Engine", self.trainer.strategy)
        strategy.watch.called.add("_FitLoop.setup_data")
        super().setup_data()
        if (fetcher := self._data_fetcher) is before:
            return
        self.seams.close()  # what holds the fetcher of loaders that were reloaded
        self._end_together(fetcher, strategy)
        accumulation, is_long = strategy.accumulation, strategy.policy.may_be_longer_than_one(self.trainer.accumulate_grad_batches)
        draws = isinstance(fetcher, _PrefetchDataFetcher)  # and no training_step that does by itself
        if accumulation is not None and strategy.policy.may_count_terms and draws and is_long:
            epoch_loop = cast("AccumulatingEpochLoop", self.epoch_loop)
            own: dict[str, Any] = {"progress": epoch_loop.batch_progress, "window_size": epoch_loop.window_size}
            own |= {"accumulation": accumulation, "drawn": deque(), "loader_states": []}
            self.seams.enter_context(specialised(fetcher, AheadFetcher, **own))
            accumulation.rest_of_window = lambda: cast("AheadFetcher", fetcher).rest_of_window()

    def _end_together(self, fetcher: _DataFetcher | None, strategy: Engine) -> None:
        """An epoch ends on all ranks with that of the rank that has the most."""
        if strategy.ranks.world_size == 1 or not strategy.module.automatic_optimization:
            return
        ranks, own = strategy.ranks, float(self.max_batches)
        longest, negated_shortest = ranks.largest(own, -own)
        if longest != own:
            self._take_length(int(longest) if longest != float("inf") else longest)
        if type(fetcher) is not _PrefetchDataFetcher:
            return
        self.seams.enter_context(specialised(fetcher, UnevenDataFetcher, strategy=strategy))
        even = cast("UnevenDataFetcher", fetcher)
        # beside tensor parallelism the weights of a window do not go to all ranks, and a SIGTERM neither
        if longest != float("inf") and negated_shortest < 0 and ranks.size == ranks.world_size:
            even.longest = int(longest)
        even.begin()

    def _take_length(self, batches: float) -> None:
        """What Lightning derives from the loader of this rank, from that of the longest."""
        trainer = self.trainer
        self.max_batches = batches
        self._last_train_dl_reload_epoch = trainer.current_epoch
        if getattr(trainer, "_val_check_time_interval", None) is not None:
            trainer.val_check_batch = None
        elif isinstance(trainer.val_check_interval, int):
            trainer.val_check_batch = trainer.val_check_interval
        elif batches == float("inf"):
            trainer.val_check_batch = batches
        else:
            trainer.val_check_batch = max(1, int(batches * trainer.val_check_interval))

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        state, fetcher = super().on_save_checkpoint(), self._data_fetcher
        if isinstance(fetcher, AheadFetcher) and fetcher.drawn and "combined_loader" in state:
            state["combined_loader"] = fetcher.loader_states
        return state

    @override
    def on_run_end(self) -> None:
        epoch_loop = cast("AccumulatingEpochLoop", self.epoch_loop)
        epoch_loop.finish_window()
        epoch_loop.validate_if_due()
        epoch_loop.strategy.watch.expect_schedulers()
        super().on_run_end()


# --- windows that are drawn before they run: what their terms weigh is counted in all of them -------------------------


class Place(NamedTuple):
    """Where the fetcher is in an epoch.

    Attributes:
        done: the loader batch before was the last.
        fetched: loader batches until then.
        is_shadow_batch: this rank had none, and one stands in for it.
    """

    done: bool
    fetched: int
    is_shadow_batch: bool


class AheadFetcher(_PrefetchDataFetcher):
    """Draws the rest of a window when it is asked for, so that what the terms of its losses weigh is counted in all of it.

    All that is seen of it (``done``, ``fetched``, a checkpoint of the loaders) is as if each had been drawn when it is yielded.
    """

    accumulation: Accumulation
    progress: Any
    """Of the loader batches."""
    window_size: Callable[[], float]
    """Loader batches in a window that begins now; inf where it ends by its tokens."""
    drawn: deque[tuple[Any, Place, list[dict[str, Any]]]]
    """Items that have not been yielded, each with the place after it and the states of the loaders that have one."""
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
        item, place, self.loader_states = self.drawn.popleft()
        self._go_to(place)
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
        while len(self.drawn) < left and not drawn.done:
            self._go_to(drawn)
            try:
                item = super().__next__()
                self.drawn.append((item, self._place(), self._states() if self.loader_states else []))
            except StopIteration:
                return
            finally:
                drawn = self._place()
                self._go_to(seen)
            yield item[0], drawn.is_shadow_batch

    def _place(self) -> Place:
        return Place(self.done, self.fetched, self.accumulation.is_shadow_batch)

    def _go_to(self, place: Place) -> None:
        self.done, self.fetched, self.accumulation.is_shadow_batch = place

    def _states(self) -> list[dict[str, Any]]:
        return deepcopy(self.combined_loader._state_dicts())
