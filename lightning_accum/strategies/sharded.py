"""What the strategies of sharded modules share: no rank can leave out a forward or backward that the others wait for."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from lightning_accum.checkpointing.remote import LAST, Remote, local_path, new_local_path
from lightning_accum.checkpointing.whole import atomic_checkpoint
from lightning_accum.errors import CheckpointPathError, UsageError
from lightning_accum.loops.optimization import loss_unlogged
from lightning_accum.splitting.plan import Splitting
from lightning_accum.splitting.snapshot import Snapshot
from lightning_accum.splitting.together import TogetherSplitting
from lightning_accum.strategies.mixin import AccumulationMixin
from lightning_accum.sync import ShardedSync
from lightning_accum.user_warnings import rank_zero_warn

_log = logging.getLogger("lightning.pytorch.accumulation")


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
    def _splitting(self) -> Splitting | None:
        if self.policy.micro_batch != "auto":
            return super()._splitting()
        assert self.ranks is not None
        return TogetherSplitting(
            self.ranks,
            self.root_device,
            split=self.policy.split,
            snapshotter=self.snapshotter,
            warn=rank_zero_warn,
            say=_log.info,
            samples=self.samples_of_loader,
        )

    @override
    def _main_gradients(self, dtype: torch.dtype) -> None:
        return None  # whole gradients are the engine's, and so is their sum

    @abstractmethod
    def _sync_of_units(self) -> ShardedSync:
        """The reduction of the engine, once the module is sharded."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        filepath = self.broadcast(filepath)
        if (path := local_path(filepath)) is None:
            with self._remote(filepath).written_whole() as local:
                super().save_checkpoint(checkpoint, local, storage_options)
            return
        if path.is_dir() and any(path.iterdir()) and not (path / LAST).is_file():
            raise CheckpointPathError(f"The checkpoint path exists, and is a folder that holds no checkpoint: {path}")
        with atomic_checkpoint(path, self.is_global_zero, self.barrier) as partial:
            super().save_checkpoint(checkpoint, partial, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load from the path of rank 0; what is under a URL is copied to a local folder first. Called on all ranks."""
        checkpoint_path = self.broadcast(checkpoint_path)
        if (path := local_path(checkpoint_path)) is not None:
            return super().load_checkpoint(path, *args, **kwargs)
        with self._remote(checkpoint_path).read() as local:
            return super().load_checkpoint(local, *args, **kwargs)

    def _remote(self, url: str | Path) -> Remote:
        return Remote(str(url), self.broadcast(new_local_path()), self.is_global_zero, self.local_rank == 0, self.barrier)

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
