"""What the strategies of sharded modules share: no rank can leave out a forward or backward that the others wait for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_accum.errors import UsageError
from lightning_accum.from_lightning import ParallelStrategy
from lightning_accum.loops.optimization import loss_unlogged
from lightning_accum.strategies.mixin import AccumulationMixin
from lightning_accum.sync import ShardedSync
from lightning_accum.undo import Snapshot


class ShardedMixin(AccumulationMixin, ParallelStrategy):
    """In front of Lightning's strategies for FSDP1 and FSDP2."""

    reduces_every_backward_by_itself = True

    @override
    def _make_sync(self) -> ShardedSync:
        sync = self._sync_of_units()
        sync.may_lack_loss = self.row_wise is None
        assert self._fit is not None
        self._fit.callback(sync.close)
        return sync

    @override
    def _main_gradients(self, dtype: torch.dtype) -> None:
        return None  # whole gradients are the engine's, and so is their sum

    @abstractmethod
    def _sync_of_units(self) -> ShardedSync:
        """The reduction of the engine, once the module is sharded."""

    # --- one micro-batch ----------------------------------------------------------------------------------------------

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with super().block_backward_sync() if self.accumulation is None else nullcontext():  # else the session blocks
            yield

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if isinstance(self.sync, ShardedSync) and self.trainer().training:
            self.sync.batch_on_host = batch
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.accumulation is None:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        return self.sync.forward(self.lightning_module.training_step, *args, **kwargs)

    def run_in_engine(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step as the engine wants it."""
        with self.precision_plugin.train_step_context():
            return self.run_as_engine(step, *args, **kwargs)

    def loss_again(self, batch: Any, is_on_device: bool) -> Tensor:
        """The loss of a batch that had one before, of which nothing is logged."""
        loss = loss_unlogged(self.trainer(), batch if is_on_device else super().batch_to_device(batch))
        if loss is None:
            raise UsageError(
                f"training_step returned None on rank {self.global_rank} for a batch that it had given a loss for before, and that"
                " was to stand in for one without."
            )
        return loss

    def snapshot(self) -> Snapshot:
        """What restores all that a step changes."""
        return self.snapshotter.take(watches_parameters=False)
