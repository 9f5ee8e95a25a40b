"""The loop over epochs, and the number of optimizer steps of a training."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

from typing_extensions import override

from lightning_accum.boundary import count_windows
from lightning_accum.errors import UsageError
from lightning_accum.policy import Tokens
from lightning_accum.ranks import Ranks
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.epochs import AccumulatingEpochLoop
from lightning_accum.trainer.from_lightning import (
    MisconfiguredError,
    SIGTERMException,
    _FitLoop,
    _PrefetchDataFetcher,
    fabric,
    longest_window,
    pl,
    scheduler_of_windows,
    with_status,
)
from lightning_accum.trainer.seams import subclass_of
from lightning_accum.trainer.uneven import WindowFetcher
from lightning_accum.undo import replacing

_TRAINING = pl.trainer.states.RunningStage.TRAINING


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
        # without a length a batch has been drawn ahead, which is the new epoch's first
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
        if longest != own:  # numbers that Lightning derives from this rank's length now use the longest
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
        epoch_loop = cast("AccumulatingEpochLoop", self.epoch_loop)
        epoch_loop.finish_window()
        epoch_loop.validate_if_due()
        super().on_run_end()


def validating_every(steps: int, trainer: pl.Trainer) -> AbstractContextManager[None]:
    """Inside, EarlyStopping and ModelCheckpoint run after a validation, not after an epoch."""
    own = {name: getattr(trainer, name) for name in ("val_check_interval", "check_val_every_n_epoch")}
    if vars(trainer)["_val_check_time_interval"] is not None:
        own["val_check_interval"] = "a time"
    if own != {"val_check_interval": 1.0, "check_val_every_n_epoch": 1}:
        said = ", ".join(f"{name}={value}" for name, value in own.items())
        raise MisconfiguredError(f"Trainer({said}) and validate_every={steps} both say when to validate. Use only one of them.")
    return replacing(trainer, val_check_interval=steps, check_val_every_n_epoch=None)


class AccumulatingTrainer(pl.Trainer):
    """``estimated_stepping_batches`` is the number of optimizer steps that will happen."""

    training = property(
        lambda self: self.state.stage is _TRAINING or self.state.stage == _TRAINING,  # Lightning compares strings
        pl.Trainer.training.fset,  # type: ignore[attr-defined]
    )

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
