"""A Trainer whose numbers are those of windows: the optimizer steps that a training will have, and when to validate."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Any, cast

from typing_extensions import override

from lightning_accum.boundary import count_windows
from lightning_accum.policy import Policy
from lightning_accum.randomness import generators_kept
from lightning_accum.splitting.micro_batch import Tokens
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.from_lightning import (
    GradientAccumulationScheduler,
    has_iterable_dataset,
    isolate_rng,
    pl,
)
from lightning_accum.trainer.hooks import callbacks_of
from lightning_accum.user_warnings import rank_zero_warn
from lightning_accum.weighing.counts import expected_weight


def _argument(name: str, where_steps_decide: Callable[[int], int | None]) -> Any:
    """An argument of a Trainer's, as it is where validation comes every so many optimizer steps."""

    def value(trainer: AccumulatingTrainer) -> Any:
        every = trainer.validates_every
        return where_steps_decide(every) if every else vars(trainer).get(name)

    return property(value, lambda trainer, own: vars(trainer).update({name: own}))


class AccumulatingTrainer(pl.Trainer):
    """``estimated_stepping_batches`` is the number of optimizer steps that will happen."""

    @property
    def validates_every(self) -> int | None:
        """Optimizer steps from one validation to the next; None where Lightning's own arguments decide."""
        if self.fast_dev_run:  # type: ignore[attr-defined]  # set by a function
            return None
        policies = (getattr(callback, "policy", None) for callback in callbacks_of(self))
        return next((policy.validate_every for policy in policies if isinstance(policy, Policy)), None)

    # EarlyStopping and ModelCheckpoint ask these two whether they are to look after a validation or after an epoch
    val_check_interval = _argument("val_check_interval", lambda every: every)
    check_val_every_n_epoch = _argument("check_val_every_n_epoch", lambda every: None)

    @property
    @override
    def estimated_stepping_batches(self) -> int | float:
        lightnings = super().estimated_stepping_batches  # also sets up the data, and knows the cases without a length
        policy = cast("Engine", self.strategy).policy
        batches, epochs = self.num_training_batches, self.max_epochs
        if epochs is None or epochs == -1 or batches == float("inf"):
            return lightnings
        scheduler = next((c for c in callbacks_of(self) if isinstance(c, GradientAccumulationScheduler)), None)

        def size(epoch: int, step: int) -> int:
            if scheduler is not None:
                return scheduler.get_accumulate_grad_batches(epoch)
            return policy.size_at(epoch, step) or self.accumulate_grad_batches

        if isinstance(policy.window, Tokens):
            if any(has_iterable_dataset(loader) for loader in self.fit_loop._combined_loader.flattened):  # type: ignore[union-attr]
                return lightnings  # to look at its first batches might use them up; it is the most that there can be
            return self._estimated_windows(policy.window, int(batches) * max(epochs, 1))

        steps = count_windows(int(batches), max(epochs, 1), size, policy.tail)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)

    def _estimated_windows(self, window: Tokens, batches: int) -> int:
        """How many windows of tokens there will be, by the first loader batches. It is counted once, on all ranks."""
        strategy = cast("Engine", self.strategy)
        policy = strategy.policy
        if strategy.estimated_windows is None:
            fetcher = self.fit_loop._data_fetcher
            assert fetcher is not None
            with isolate_rng(), generators_kept(*fetcher.combined_loader.flattened):
                first = [item[0] for item in islice(fetcher.combined_loader, 8)]
                iter(fetcher)  # it begins anew
            batches_there = [batch for batch in first if batch is not None]
            weight = sum(expected_weight(batch, policy.main_weight) for batch in batches_there)
            mean, unit = weight / max(1, len(first)), weight / max(1, len(batches_there))
            mean, unit = strategy.ranks.sum(mean), strategy.ranks.sum(unit)
            seen, strategy.estimated_windows = 0.0, 0
            while unit > 0 and seen < mean * batches:
                seen += math.ceil(window.at(seen) / unit) * unit
                strategy.estimated_windows += 1
            rank_zero_warn(
                f"estimated_stepping_batches={strategy.estimated_windows} is an estimate: a window of {window} ends when its tokens"
                f" are there, and the first {len(first)} loader batches have {mean:.0f} on average, over all ranks."
            )
        steps = strategy.estimated_windows
        return steps if self.max_steps == -1 else min(steps, self.max_steps)
