"""The loop over epochs, which end on all ranks together."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from typing import Any, cast

from typing_extensions import override

from lightning_accum.ranks import Ranks
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.epochs import AccumulatingEpochLoop
from lightning_accum.trainer.from_lightning import _FitLoop, _PrefetchDataFetcher
from lightning_accum.trainer.seams import specialised
from lightning_accum.trainer.uneven import WindowFetcher


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
        if not strategy.module.automatic_optimization:
            return
        lengths, policy = self._lengths(strategy.ranks), strategy.policy
        draws_ahead = policy.may_count_terms and policy.may_be_longer_than_one(self.trainer.accumulate_grad_batches)
        if type(fetcher) is _PrefetchDataFetcher and (strategy.ranks.world_size > 1 or draws_ahead):  # else training_step draws
            is_done = not strategy.ranks.largest(not fetcher.done)[0]
            own: dict[str, Any] = {"strategy": strategy, "states": deque(), "done": is_done}
            self.seams.enter_context(specialised(fetcher, WindowFetcher, **own, **lengths))

    def _lengths(self, ranks: Ranks) -> dict[str, Any]:
        """Have an epoch end on all ranks with that of the rank that has the most. Returns what is known of their lengths."""
        own = float(self.max_batches)
        longest, negated_shortest = ranks.largest(own, -own)
        if longest != own:
            self._take_length(int(longest) if longest != float("inf") else longest)
        # beside tensor parallelism the weights of a window do not go to all ranks, and a SIGTERM neither
        known = int(longest) if longest != float("inf") and ranks.size == ranks.world_size else None
        return {"longest": known, "is_one_empty": not negated_shortest}

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
        if isinstance(fetcher, WindowFetcher) and fetcher.is_ahead and "combined_loader" in state:
            state["combined_loader"] = fetcher.states[0]
        return state

    @override
    def on_run_end(self) -> None:
        epoch_loop = cast("AccumulatingEpochLoop", self.epoch_loop)
        epoch_loop.finish_window()
        epoch_loop.validate_if_due()
        epoch_loop.strategy.watch.expect_schedulers()
        super().on_run_end()
