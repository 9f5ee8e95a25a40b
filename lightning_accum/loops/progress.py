"""The end of the progress bar, where a training ends after so many optimizer steps."""

from __future__ import annotations

from typing import cast

from lightning.pytorch.callbacks import ProgressBar
from typing_extensions import override

from lightning_accum.boundary import count_batches
from lightning_accum.engine import Engine
from lightning_accum.splitting.micro_batch import Tokens


class BarOfLoaderBatches(ProgressBar):
    """Ends with the loader batches that the steps take: it counts these, and Lightning gives it the steps for an end."""

    @property
    @override
    def total_train_batches(self) -> int | float:
        trainer, strategy = self.trainer, cast("Engine", self.trainer.strategy)
        policy, windows = strategy.policy, strategy.windows
        if trainer.max_epochs != -1 or trainer.max_steps <= 0 or not trainer.lightning_module.automatic_optimization:
            return super().total_train_batches
        if isinstance(policy.window, Tokens):
            return trainer.num_training_batches  # nobody knows how many they take
        steps, epoch = trainer.global_step, trainer.current_epoch

        def size(window: int) -> int:
            return policy.size_at(epoch, steps + window) or trainer.accumulate_grad_batches

        carried = 0 if windows is None else windows.position
        return count_batches(trainer.max_steps - steps, size, trainer.num_training_batches + carried) - carried
