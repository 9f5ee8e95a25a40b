"""Ranks whose loaders yield different numbers of batches end together, and together stop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import DataLoader, DistributedSampler, Sampler
from typing_extensions import override

from lightning_accum.balanced_sampler import BalancedBatchSampler
from lightning_accum.engine import Engine
from lightning_accum.errors import ArgumentError
from lightning_accum.from_lightning import (
    RunningStage,
    SIGTERMException,
    _DataConnector,
    _PrefetchDataFetcher,
    _SignalConnector,
    pl,
)
from lightning_accum.samplers import SameOrderSampler, leave_out_repeats

if TYPE_CHECKING:
    from lightning_accum.accumulation import Accumulation


class UnevenDataFetcher(_PrefetchDataFetcher):
    """Yields as many batches as that of the rank that has the most.

    A rank that has none gets its last one again, as a shadow batch: it weighs nothing. So it takes part in all that the other
    ranks wait for, in the module, in callbacks and in Lightning.
    """

    strategy: Engine
    longest: int | None = None
    """Batches in an epoch of the rank that has the most. None: before every batch the ranks exchange what each has, since they do
    not know a length, or one of them has no batch and gets its first from another."""
    _own_done: bool = False
    _last: Any = None

    @override
    def __iter__(self) -> UnevenDataFetcher:
        super().__iter__()
        self.begin()
        return self

    def begin(self) -> None:
        """The iterator is new: the other ranks may have more than this one."""
        self._own_done, self.done = self.done, False

    @override
    def __next__(self) -> Any:
        accumulation = self.strategy.accumulation
        assert accumulation is not None
        batch = self._next_by_agreement(accumulation) if self.longest is None else self._next_by_length(self.longest)
        accumulation.is_shadow_batch = batch is None and self._last is not None
        if accumulation.is_shadow_batch:
            return self._last, self.fetched - 1, 0
        self._last = batch
        return batch, self.fetched - 1, 0

    def _next_by_length(self, longest: int) -> Any:
        """The batch of this rank; None where it has none."""
        batch, is_there = self._next_of_this_rank()
        self.fetched += not is_there
        self.done = self.fetched >= longest
        return batch

    def _next_by_agreement(self, accumulation: Accumulation) -> Any:
        """The batch of this rank; None where it has none, and another rank does.

        Raises:
            StopIteration: no rank has one.
            SIGTERMException: a rank got SIGTERM.
        """
        ranks, trainer = accumulation.ranks, self.strategy.trainer()
        batch, is_there = self._next_of_this_rank()
        status, last = ranks.agree_on_batch(batch, self._last, is_there, not self._own_done, accumulation.window.is_last)
        if status.is_stopped:
            trainer._signal_connector.received_sigterm = True  # all ranks know
            raise SIGTERMException
        self.done = not (status.has_more and status.is_alive)
        if not status.is_alive:
            raise StopIteration
        self._last = last
        return batch

    def _next_of_this_rank(self) -> tuple[Any, bool]:
        """A batch, and whether there was one: a loader may yield None."""
        self.done = self._own_done
        try:
            return (None, False) if self.done else (super().__next__()[0], True)
        except StopIteration:
            self.done = True
            return None, False
        finally:
            self._own_done = self.done

    @override
    def teardown(self) -> None:
        self._last = None
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
        if ranks is None:
            return
        largest, smallest = ranks.largest(batch_sampler.digest, -batch_sampler.digest)
        if largest != -smallest:
            raise ArgumentError(
                "BalancedBatchSampler has other lengths, costs or arguments on one rank than on another, so some samples would be"
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
    """In a fit over ranks, SIGTERM waits until all ranks know of it: by the end of the window, in validation by that of the next.

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
