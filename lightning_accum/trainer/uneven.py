"""Ends epochs and training on all ranks together, if their loaders have different lengths."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from typing import Any, cast

from torch.utils.data import DataLoader, DistributedSampler, Sampler
from typing_extensions import override

from lightning_accum.errors import ArgumentError
from lightning_accum.ranks import LoaderBatch, LoaderBatches, of_all_ranks
from lightning_accum.samplers import BalancedBatchSampler, SameOrderSampler, leave_out_repeats
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.from_lightning import (
    SIGTERMException,
    _DataConnector,
    _DataFetcher,
    _PrefetchDataFetcher,
    _SignalConnector,
    pl,
)


class WindowFetcher(_PrefetchDataFetcher):
    """Yields as many batches as the longest loader over the ranks, and can draw the rest of a window ahead.

    A rank without a batch runs a shadow batch, see :func:`lightning_accum.ranks.of_all_ranks`, and so takes part in all collectives
    of the module, callbacks and Lightning.
    """

    strategy: Engine
    longest: int | None  # batches in an epoch of the longest loader; None if a length is unknown, and the Trainer limits none
    may_end_early: bool  # there is a limit, and a loader of unknown length
    states: deque[list[dict[str, Any]]]
    """States of the loaders that have one: after the last batch yielded, and after each batch drawn ahead."""
    _batches: LoaderBatches | None = None

    @override
    def __iter__(self) -> WindowFetcher:
        _DataFetcher.__iter__(self)  # nothing is drawn yet
        self._batches, self.done = None, False  # the other ranks may have more than this one
        return self

    @property
    def is_ahead(self) -> bool:
        """Whether batches were drawn that have not been yielded."""
        return self._batches is not None and bool(self._batches.drawn)

    def _own_batches(self) -> Iterator[Any]:
        with suppress(StopIteration):
            while True:
                yield (self.batches.pop(0) if self.batches else _DataFetcher.__next__(self))[0]

    @override
    def __next__(self) -> Any:
        """The batch of this rank, until no rank has one, or a rank got SIGTERM."""
        accumulation = self.strategy.accumulation
        assert accumulation is not None
        if self._batches is None:
            window, ranks, longest = accumulation.window, accumulation.ranks, self.longest
            if longest is not None and ranks.world_size == 1 and self.length is not None:
                longest = min(longest, self.length)  # an epoch may be shorter than the first
            left = None if longest is None else longest - self.fetched  # Lightning adds the batches before a checkpoint
            of_all = of_all_ranks(self._own_batches(), left, ranks, lambda: window.is_last, self.may_end_early)
            self._batches, accumulation.rest_of_window = LoaderBatches(of_all), self.rest_of_window
        if self.is_ahead:
            self.states.popleft()
        drawn = next(self._batches)
        self._stop_at_sigterm(drawn)
        self.done, accumulation.is_shadow_batch = drawn.is_last, drawn.is_shadow
        return drawn.batch, self.fetched - 1, 0

    def rest_of_window(self) -> Iterator[tuple[Any, bool]]:
        """Draw the batches of the window after its first, as many on every rank, each with whether it is a shadow batch."""
        accumulation, epoch_loop = self.strategy.accumulation, self.strategy.trainer().fit_loop.epoch_loop
        assert accumulation is not None
        assert self._batches is not None
        left = accumulation.boundary.left(epoch_loop.batch_progress.total.ready)
        if not self.is_ahead:
            self.states = deque([self._states_of_loaders()])
        for batch, is_shadow_batch in self._batches.draw_ahead(left):
            if len(self.states) == len(self._batches.drawn):  # it was drawn now
                self._stop_at_sigterm(self._batches.drawn[-1])
                self.states.append(self._states_of_loaders())
            yield batch, is_shadow_batch

    def _stop_at_sigterm(self, drawn: LoaderBatch) -> None:
        if drawn.is_stopped:
            self.strategy.trainer()._signal_connector.received_sigterm = True  # all ranks know
            raise SIGTERMException

    def _states_of_loaders(self) -> list[dict[str, Any]]:
        return deepcopy(self.combined_loader._state_dicts())


def is_agreeing(trainer: pl.Trainer) -> bool:
    """Whether this package keeps several ranks together; False if training_step draws its own batches."""
    return isinstance(trainer.fit_loop._data_fetcher, WindowFetcher)


class NonPaddingSampling(_DataConnector):
    """Makes every sample count once an epoch: Lightning's sampler repeats no samples to make the ranks even."""

    @override
    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: Any) -> object:
        sampler = getattr(dataloader, "sampler", None)
        kwargs = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        if isinstance(sampler, SameOrderSampler):
            sampler.deal(**kwargs)
        batch_sampler = getattr(dataloader, "batch_sampler", None)
        if isinstance(batch_sampler, BalancedBatchSampler):
            batch_sampler.check_length_of(cast("DataLoader[Any]", dataloader).dataset)
            batch_sampler.deal(**kwargs)
            largest, smallest = cast("Engine", self.trainer.strategy).ranks.largest(batch_sampler.digest, -batch_sampler.digest)
            if largest != -smallest:  # on all ranks
                raise ArgumentError("BalancedBatchSampler differs between ranks: pass the same lengths and arguments on all")
            return dataloader
        return super()._prepare_dataloader(dataloader, shuffle, mode)

    @override
    def _resolve_sampler(self, dataloader: DataLoader[Any], shuffle: bool, mode: Any = None) -> Sampler[Any] | Iterable[Any]:
        sampler = super()._resolve_sampler(dataloader, shuffle, mode)
        # the user's own sampler is not changed
        if mode == "train" and sampler is not dataloader.sampler and isinstance(sampler, DistributedSampler):
            leave_out_repeats(sampler)
        return sampler


class DeferredSigterm(_SignalConnector):
    """Defers SIGTERM in a fit over ranks until all ranks know of it, at the end of this window, or in validation of the next.

    Lightning would broadcast inside the handler, in the middle of other collectives, and stop one rank alone.
    """

    is_waiting: bool = False  # SIGTERM has come in this fit

    @override
    def _sigterm_notifier_fn(self, signum: Any, frame: Any) -> None:
        trainer = self.trainer
        accumulation = cast("Engine", trainer.strategy).accumulation
        has_begun = trainer.fit_loop._data_fetcher is not None  # it is None in the sanity check
        if accumulation is None or trainer.world_size == 1 or (has_begun and not is_agreeing(trainer)):
            # without super(), since Lightning restores the handlers after this object has its own class again
            _SignalConnector._sigterm_notifier_fn(self, signum, frame)
            return
        launcher = trainer.strategy.launcher
        if launcher is not None and not accumulation.window.is_last:
            launcher.kill(signum)
        accumulation.window.is_last = self.is_waiting = True
