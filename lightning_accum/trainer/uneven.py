"""Ranks whose loaders yield different numbers of batches end together, and together stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, cast

from torch.utils.data import DataLoader, DistributedSampler, Sampler
from typing_extensions import override

from lightning_accum.balanced_sampler import BalancedBatchSampler
from lightning_accum.errors import ArgumentError
from lightning_accum.ranks import LoaderBatch, of_all_ranks
from lightning_accum.samplers import SameOrderSampler, leave_out_repeats
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.from_lightning import (
    RunningStage,
    SIGTERMException,
    _DataConnector,
    _DataFetcher,
    _PrefetchDataFetcher,
    _SignalConnector,
    pl,
)


class UnevenDataFetcher(_PrefetchDataFetcher):
    """Yields as many batches as that of the rank that has the most, see :func:`of_all_ranks`.

    A rank that has none runs a shadow batch. So it takes part in all that the other ranks wait for, in the module, in callbacks
    and in Lightning.
    """

    strategy: Engine
    longest: int | None = None
    """Batches in an epoch of the rank that has the most; None where some length is not known, or a rank has none."""
    _of_all: Iterator[LoaderBatch] = iter(())

    @override
    def __iter__(self) -> UnevenDataFetcher:
        _DataFetcher.__iter__(self)  # nothing is drawn yet
        self.begin()
        return self

    def begin(self) -> None:
        """The iterator is new: the other ranks may have more than this one."""
        self._of_all, self.done = self._batches_of_all(), False

    def _batches_of_all(self) -> Iterator[LoaderBatch]:
        accumulation = self.strategy.accumulation
        assert accumulation is not None
        left = None if self.longest is None else self.longest - self.fetched  # Lightning adds what was done before a checkpoint
        yield from of_all_ranks(self._own_batches(), left, accumulation.ranks, lambda: accumulation.window.is_last)

    def _own_batches(self) -> Iterator[Any]:
        with suppress(StopIteration):
            while True:
                yield (self.batches.pop(0) if self.batches else _DataFetcher.__next__(self))[0]

    @override
    def __next__(self) -> Any:
        """The batch of this rank.

        Raises:
            StopIteration: no rank has one.
            SIGTERMException: a rank got SIGTERM.
        """
        drawn, accumulation = next(self._of_all), self.strategy.accumulation
        assert accumulation is not None
        if drawn.is_stopped:
            self.strategy.trainer()._signal_connector.received_sigterm = True  # all ranks know
            raise SIGTERMException
        self.done, accumulation.is_shadow_batch = drawn.is_last, drawn.is_shadow
        return drawn.batch, self.fetched - 1, 0

    @override
    def teardown(self) -> None:
        self._of_all = iter(())
        super().teardown()


def is_agreeing(trainer: pl.Trainer) -> bool:
    """Whether this package keeps the ranks together; not where training_step draws its batches by itself."""
    return isinstance(trainer.fit_loop._data_fetcher, UnevenDataFetcher)


class NonPaddingSampling(_DataConnector):
    """Every sample counts once an epoch: the sampler that Lightning puts into a loader repeats none to even out the ranks."""

    @override
    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        sampler = getattr(dataloader, "sampler", None)
        kwargs = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        if isinstance(sampler, SameOrderSampler):
            sampler.deal(**kwargs)
        batch_sampler = getattr(dataloader, "batch_sampler", None)
        if isinstance(batch_sampler, BalancedBatchSampler):
            batch_sampler.check_length_of(cast("DataLoader[Any]", dataloader).dataset)
            batch_sampler.deal(**kwargs)
            self._check_agreement(batch_sampler)
            return dataloader
        return super()._prepare_dataloader(dataloader, shuffle, mode)

    def _check_agreement(self, batch_sampler: BalancedBatchSampler) -> None:
        """Refuse ranks that share out their samples by other numbers: some would be in no window. Called on all of them."""
        ranks = cast("Engine", self.trainer.strategy).ranks
        largest, smallest = ranks.largest(batch_sampler.digest, -batch_sampler.digest)
        if largest != -smallest:
            raise ArgumentError(
                "BalancedBatchSampler has other lengths or arguments on one rank than on another, so some samples would be"
                " in no window and some in several: pass the lengths of the whole dataset, the same on all ranks"
            )

    @override
    def _resolve_sampler(
        self, dataloader: DataLoader[Any], shuffle: bool, mode: RunningStage | None = None
    ) -> Sampler[Any] | Iterable[Any]:
        sampler = super()._resolve_sampler(dataloader, shuffle, mode)
        # the user's own stays as it is
        if mode == RunningStage.TRAINING and sampler is not dataloader.sampler and isinstance(sampler, DistributedSampler):
            leave_out_repeats(sampler)
        return sampler


class DeferredSigterm(_SignalConnector):
    """In a fit over ranks, SIGTERM waits until all ranks know of it: at the end of this window, or, in validation, of the next.

    Lightning broadcasts from inside of the handler, between whatever collectives the ranks are in, and stops a rank by itself.
    """

    is_waiting: bool = False
    """SIGTERM has come in this fit."""

    @override
    def _sigterm_notifier_fn(self, signum: Any, frame: Any) -> None:
        trainer = self.trainer
        accumulation = cast("Engine", trainer.strategy).accumulation
        has_begun = trainer.fit_loop._data_fetcher is not None  # the sanity check comes before
        if accumulation is None or trainer.world_size == 1 or (has_begun and not is_agreeing(trainer)):
            # without super(), since Lightning restores the handlers after this object has its own class again
            _SignalConnector._sigterm_notifier_fn(self, signum, frame)
            return
        launcher = trainer.strategy.launcher
        if launcher is not None and not accumulation.window.is_last:
            launcher.kill(signum)
        accumulation.window.is_last = self.is_waiting = True
