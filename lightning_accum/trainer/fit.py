"""The loops over epochs and loaders: all ranks end an epoch together, and the Trainer knows the number of optimizer steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from typing import Any, cast

from torch.utils.data import DataLoader, DistributedSampler, Sampler
from typing_extensions import override

from lightning_accum.boundary import count_windows
from lightning_accum.errors import ArgumentError, UsageError
from lightning_accum.policy import Tokens
from lightning_accum.ranks import LoaderBatch, LoaderBatches, Ranks, of_all_ranks
from lightning_accum.samplers import BalancedBatchSampler, SameOrderSampler, leave_out_repeats
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.from_lightning import (
    MisconfiguredError,
    SIGTERMException,
    _DataConnector,
    _DataFetcher,
    _FitLoop,
    _PrefetchDataFetcher,
    _SignalConnector,
    fabric,
    longest_window,
    pl,
    scheduler_of_windows,
    with_status,
)
from lightning_accum.trainer.seams import subclass_of
from lightning_accum.undo import replacing

_TRAINING = (pl.trainer.states.RunningStage.TRAINING,)


class AccumulatingFitLoop(_FitLoop):
    """Ends the last window with the training, and gives an epoch the length of the longest loader over the ranks."""

    @override
    def run(self) -> None:
        try:
            super().run()
        except SIGTERMException as error:
            raise with_status(error, self.trainer) from None

    @override
    def reset(self) -> None:
        super().reset()
        epoch_loop, epoch, fetcher = self.epoch_loop, self.epoch_progress.current, self._data_fetcher
        is_processed = epoch.processed == epoch.ready  # type: ignore[attr-defined]  # the tracker of epochs has it
        if fetcher is None or not self.restarting or not is_processed or not epoch_loop.batch_progress.is_last_batch:
            return
        # The checkpoint is from after the last batch of an epoch. Lightning has ended that epoch, or ends it again if max_steps is
        # set. But it resumes the next epoch as if it had begun: without its start hooks, and on the rest of its loader
        if self.restarted_on_epoch_end:
            self.epoch_progress.increment_completed()
        epoch_loop.reset()
        for loop in (self, epoch_loop):
            loop.reset_restart_stage()
        self._restarting = epoch_loop.restarting = False
        # a loader without a length is read one batch ahead: this batch is the new epoch's first
        self._resuming_from_checkpoint = fetcher.length is None and not fetcher.done

    @override
    def setup_data(self) -> None:
        """Have all ranks end an epoch together, and draw the batches of a window before it runs if weights are counted ahead."""
        before, strategy = self._data_fetcher, cast("Engine", self.trainer.strategy)
        super().setup_data()
        if (fetcher := self._data_fetcher) is before:
            return
        if not strategy.module.automatic_optimization:
            self._refuse_other_lengths(strategy.ranks)
            return
        if strategy.accumulation is not None:
            strategy.accumulation.rest_of_window = None  # it draws from the earlier loaders
        longest, policy = self._longest(strategy.ranks), strategy.policy
        draws_ahead = policy.may_count_terms and policy.may_be_longer_than_one(longest_window(self.trainer))
        if type(fetcher) is _PrefetchDataFetcher and (strategy.ranks.world_size > 1 or draws_ahead):  # else training_step draws
            is_unsized = any(fabric.utilities.data.sized_len(one) is None for one in fetcher.combined_loader.flattened)
            is_there, is_unknown = strategy.ranks.largest(not fetcher.done, is_unsized)
            vars(fetcher).update(longest=longest, strategy=strategy, done=not is_there, may_end_early=is_unknown > 0)
            fetcher.__class__ = subclass_of(WindowFetcher, _PrefetchDataFetcher)  # it is dropped with the fit, or with its loaders

    def _refuse_other_lengths(self, ranks: Ranks) -> None:
        """In manual optimization a rank without a batch cannot take part in the steps of the others. Called on all ranks."""
        lengths, steps = ranks.gather(float(self.max_batches)), self.trainer.max_steps
        if len({*lengths}) > 1 and not 0 <= steps <= min(lengths) // longest_window(self.trainer):  # else it ends before
            raise MisconfiguredError(
                "With automatic_optimization=False training_step itself reduces gradients and steps, on all ranks or on none, but "
                f"the ranks have {', '.join(f'{length:g}' for length in lengths)} loader batches in an epoch. Give all equally "
                f"many: Trainer(limit_train_batches={max(1, min(lengths)):g}); or use automatic optimization."
            )

    def _longest(self, ranks: Ranks) -> int | None:
        """Give the epoch the length of the longest loader on all ranks. Returns it if it is known on all."""
        trainer: Any = self.trainer
        own, inf = float(self.max_batches), float("inf")
        (longest,) = ranks.largest(own)
        if longest != own:  # Lightning derived numbers from the length of this rank's loader
            self.max_batches = longest if longest == inf else int(longest)
            self._last_train_dl_reload_epoch = trainer.current_epoch
            interval: Any = None if trainer._val_check_time_interval is not None else trainer.val_check_interval
            is_count = interval is None or isinstance(interval, int)
            trainer.val_check_batch = interval if is_count else longest if longest == inf else max(1, int(longest * interval))
        # with tensor parallelism, neither the weights of a window nor a SIGTERM reach all ranks
        return int(longest) if longest != inf and ranks.size == ranks.world_size else None

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        state, fetcher = super().on_save_checkpoint(), self._data_fetcher
        if isinstance(fetcher, WindowFetcher) and fetcher.is_ahead and "combined_loader" in state:
            state["combined_loader"] = fetcher.states[0]
        return state

    @override
    def on_run_end(self) -> None:
        epoch_loop: Any = self.epoch_loop
        epoch_loop.finish_window()
        epoch_loop.validate_if_due()
        super().on_run_end()


def validating_every(steps: int, trainer: pl.Trainer) -> AbstractContextManager[None]:
    """Inside, EarlyStopping and ModelCheckpoint run after a validation, not after an epoch."""
    intervals = (trainer.val_check_interval, trainer.check_val_every_n_epoch, vars(trainer)["_val_check_time_interval"])
    if intervals != (1.0, 1, None):
        found = "val_check_interval or check_val_every_n_epoch of the Trainer"
        raise MisconfiguredError(f"{found} and validate_every={steps} both say when to validate. Use only one of them.")
    return replacing(trainer, val_check_interval=steps, check_val_every_n_epoch=None)


class AccumulatingTrainer(pl.Trainer):
    """``estimated_stepping_batches`` is the number of optimizer steps that will happen."""

    # Lightning compares strings, several times a loader batch
    training = property(lambda self: self.state.stage in _TRAINING, pl.Trainer.training.fset)  # type: ignore[attr-defined]

    @property
    @override
    def estimated_stepping_batches(self) -> int | float:
        lightnings = super().estimated_stepping_batches  # also sets up the data, and knows the cases without a length
        policy = cast("Engine", self.strategy).policy
        batches, epochs = self.num_training_batches, self.max_epochs
        if epochs is None or epochs == -1 or batches == float("inf"):
            return lightnings
        scheduler = scheduler_of_windows(self)

        def size(epoch: int, step: int) -> int:
            """Loader batches in a window."""
            if scheduler is not None:
                return scheduler.get_accumulate_grad_batches(epoch)
            return policy.size_at(epoch, step) or self.accumulate_grad_batches

        if isinstance(policy.window, Tokens) and not self.fast_dev_run:  # type: ignore[attr-defined]  # a few windows at most
            found = f"estimated_stepping_batches is unknown, as a window of {policy.window} ends when it has its tokens"
            raise UsageError(f"{found}. Set the number of steps: Trainer(max_steps=...) without max_epochs.")
        steps = count_windows(int(batches), max(epochs, 1), size, policy.tail)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)


# --- loaders, over ranks ------------------------------------------------------------------------------------------------


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
