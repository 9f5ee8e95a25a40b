"""What the strategies of sharded modules share: no rank can leave out a forward or backward that the others wait for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from lightning_accum import loops
from lightning_accum.callback import GradientAccumulation
from lightning_accum.checkpointing.whole import written_whole
from lightning_accum.splitting.snapshot import Snapshot
from lightning_accum.strategies.mixin import AccumulationMixin
from lightning_accum.sync import ShardedSync
from lightning_accum.weighing.safeguards import gradients_of_zero


class ShardedMixin(AccumulationMixin, ParallelStrategy):
    """In front of Lightning's strategies for FSDP1 and FSDP2.

    Where this rank has no loss, it takes part in the forward and backward of the others: with what its sharded modules have given
    before training_step returned None, or else with the last loader batch that had a loss, again. Its gradients are zeros, nothing
    that it logs is taken, and what it changed in the module is put back.
    """

    is_waited_for_in_forward = True
    reduces_every_backward_by_itself = True
    _sharded_sync: ShardedSync
    _stand_in: Tensor | None = None
    _snapshot: Snapshot | None = None
    _batch: Any = None
    """The loader batch in hand, as it was before it was moved to the device."""
    _last_batch: Any = None
    """The last that had a loss, or the last part of one."""
    _is_last_moved: bool = False

    @override
    def _begin(self, trainer: pl.Trainer, callback: GradientAccumulation | None) -> None:
        super()._begin(trainer, callback)
        if self.accumulation is None:
            return
        if self.policy.micro_batch == "auto":
            raise MisconfigurationException(
                f'GradientAccumulation(micro_batch="auto") runs a batch again on the rank that ran out of memory, but with'
                f" {type(self).__name__} the other ranks wait for it in every forward. Give a number of samples, or Tokens(...)."
            )
        if self.row_wise is not None and (reason := self._why_not_row_wise()) is not None:
            raise MisconfigurationException(
                f"GradientAccumulation(row_wise={list(self.policy.row_wise)}) runs submodules again after the backward of the loss,"
                f' on all ranks together, and cannot {reason}. Use Trainer(strategy="accum_ddp").'
            )
        self.sync = self._sharded_sync = self._make_sync()
        self.sync.keeps_outputs = self.row_wise is None
        assert self._fit is not None
        self._fit.callback(self.sync.close)
        if self.policy.accumulate_dtype is not None:
            self._check_accumulate_dtype(self.policy.accumulate_dtype)

    def _why_not_row_wise(self) -> str | None:
        """Why sharded submodules cannot run in micro-batches; None where they can."""
        return f"with {type(self).__name__}"

    @override
    def _wide_sums(self, dtype: torch.dtype) -> None:
        return None  # whole gradients are the engine's, and so is their sum

    @abstractmethod
    def _check_accumulate_dtype(self, dtype: torch.dtype) -> None:
        """Whether the engine adds up gradients in ``dtype``; else an error that says how to have it."""

    @abstractmethod
    def _make_sync(self) -> ShardedSync:
        """The reduction of the engine, once the module is sharded."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        path = Path(self.broadcast(filepath))
        if path.is_dir() and any(path.iterdir()) and not (path / "meta.pt").is_file():  # which Lightning writes last
            raise IsADirectoryError(f"The checkpoint path exists, and is a folder that holds no checkpoint: {path}")
        with written_whole(path, self.is_global_zero, self.barrier) as partial:
            super().save_checkpoint(checkpoint, partial, storage_options)

    # --- one micro-batch ----------------------------------------------------------------------------------------------

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        is_split = self.accumulation is not None and self.accumulation.plan is not None
        with nullcontext() if is_split else self.blocked():  # split, it blocks by itself
            yield

    @override
    def blocked(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.accumulation is None else self.sync.blocked()

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.accumulation is not None and self.trainer().training:
            self._batch = batch
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.accumulation is None:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        training_step = self.lightning_module.training_step

        def or_stand_in(*args: Any, **kwargs: Any) -> Any:
            self._sharded_sync.forget_outputs()
            output = training_step(*args, **kwargs)
            if output is None:
                output = self._stand_in = self._loss_without_batch()
            return output

        return self._run(or_stand_in, *args, **kwargs)

    def _run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step as the engine wants it. Returns None where it gave a stand-in for a loss."""
        self._stand_in = None
        with self.precision_plugin.train_step_context():
            output = self.run_as_engine(step, *args, **kwargs)
        if self._stand_in is not None:
            self._stand_in = output  # as the engine returned it
            return None
        return output

    @override
    def _weigh(self, loss: Tensor) -> tuple[Tensor, Tensor | None]:
        accumulation = self.accumulation
        assert accumulation is not None
        if self._last_batch is None or not accumulation.is_stand_in:
            # a part of a batch is on the device, a whole one stays on the host
            self._is_last_moved = accumulation.plan is not None
            self._last_batch = accumulation.batch if self._is_last_moved else self._batch
        return super()._weigh(loss)

    # --- a rank without a loss ----------------------------------------------------------------------------------------

    def _loss_without_batch(self) -> Tensor:
        """A loss that depends on all that the other ranks' losses do."""
        if self.row_wise is not None:
            raise RuntimeError(
                f"Rank {self.global_rank} has a loader batch without a loss, or fewer of them than others: with"
                f" row_wise={list(self.policy.row_wise)} and {type(self).__name__} it cannot take part in what they run. Have each"
                ' loader batch of each rank give a loss, or use Trainer(strategy="accum_ddp").'
            )
        loss = self._sharded_sync.loss_of_outputs()
        if loss is not None:
            return loss
        if self._last_batch is None:
            raise RuntimeError(
                f"Rank {self.global_rank} has had no batch with a loss yet, so it cannot take part in the forward and backward that"
                f" the other ranks wait for with {type(self).__name__}. Begin with a batch that has one."
            )
        self._snapshot = self.keeper.take(watches_parameters=False)
        batch = self._last_batch if self._is_last_moved else super().batch_to_device(self._last_batch)
        loss = loops.loss_unlogged(self.trainer(), batch)
        if loss is None:
            raise RuntimeError(
                f"training_step returned None on rank {self.global_rank} for a batch that it had given a loss for before, and that"
                " was to stand in for one without."
            )
        return loss

    @override
    def _forward_without_batch(self) -> None:
        def stand_in() -> Tensor:
            self._sharded_sync.forget_outputs()
            self._stand_in = self._loss_without_batch()
            return self._stand_in

        self._run(stand_in)

    @override
    def _backward_without_loss(self) -> None:
        stand_in, self._stand_in = self._stand_in, None
        snapshot, self._snapshot = self._snapshot, None
        assert stand_in is not None
        self._sharded_sync.begin_backward()
        with gradients_of_zero(stand_in):
            torch.autograd.backward(stand_in)
        if snapshot is not None:
            snapshot.restore()

    @override
    def _reduce_apart(self) -> None:
        super()._reduce_apart()
        self._reduce_accumulated()

    @override
    def reduce_for_checkpoint(self) -> None:
        self._reduce_accumulated()

    @override
    def is_reduced_inside(self) -> bool:
        return True

    @override
    def drop_gradients(self) -> None:
        self._reduce_accumulated()
        super().drop_gradients()

    def _reduce_accumulated(self) -> None:
        """Have the sharded modules give out what they keep whole: they do so only when they reduce it. On all ranks together."""
        if self._sharded_sync.policy == "window" and not self._sharded_sync.reduce():
            self._forward_without_batch()
            self._backward_without_loss()
