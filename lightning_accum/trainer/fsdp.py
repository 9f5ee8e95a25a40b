"""FullyShardedDataParallel (FSDP1), ``Trainer(strategy="accum_fsdp")``, and what it shares with FSDP2."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from typing_extensions import override

from lightning_accum.checkpoint import PartialWindow
from lightning_accum.errors import UsageError
from lightning_accum.sync.base import SyncPolicy, forward_replaced
from lightning_accum.sync.sharded import FSDP1Sync, ShardedSync
from lightning_accum.trainer.ddp import checked_sync
from lightning_accum.trainer.from_lightning import MisconfiguredError, pl
from lightning_accum.trainer.optimization import loss_unlogged
from lightning_accum.trainer.strategy import AccumulationMixin
from lightning_accum.user_warnings import rank_zero_warn


class ShardedMixin(AccumulationMixin):
    """In front of Lightning's strategies for FSDP1 and FSDP2."""

    reduces_every_backward_by_itself = True

    @override
    def _make_sync(self) -> ShardedSync:
        sync = self._sync_of_units()
        sync.may_lack_loss = self.row_wise is None
        assert self._fit is not None
        self._fit.callback(sync.close)
        return sync

    @abstractmethod
    def _sync_of_units(self) -> ShardedSync:
        """The reduction of the engine, once the module is sharded."""

    # --- one micro-batch ----------------------------------------------------------------------------------------------

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if isinstance(self.sync, ShardedSync) and self.trainer().training:
            self.sync.batch_on_host = batch
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.accumulation is None:
            return super().training_step(*args, **kwargs)
        return self.sync.forward(self.module.training_step, *args, **kwargs)

    def run_in_engine(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step as the engine wants it."""
        with self.precision_plugin.train_step_context():
            return self.run_as_engine(step, *args, **kwargs)

    def loss_again(self, batch: Any, is_on_device: bool) -> Tensor:
        """The loss of a batch that had one before, of which nothing is logged."""
        loss = loss_unlogged(self.trainer(), batch if is_on_device else super().batch_to_device(batch))
        if loss is None:
            raise UsageError(
                f"training_step returned None on rank {self.global_rank} for a batch for which it had returned a loss before,"
                " and which ran again in place of a batch without a loss."
            )
        return loss


class FSDPAccumulationStrategy(ShardedMixin, pl.strategies.FSDPStrategy):
    """Exact gradient accumulation over FullyShardedDataParallel (FSDP1), ``Trainer(strategy="accum_fsdp")``.

    Lightning runs it on CUDA only.

    Args:
        args: see :class:`lightning.pytorch.strategies.FSDPStrategy`; so are the keyword arguments.
        sync: reduce the gradients over the ranks once a ``"window"``, or at every ``"micro_batch"``. Once a window sends less, but
            holds whole gradients on every rank until the window ends; the other holds shards. The result is the same.
        kwargs: see above.

    Raises:
        MisconfigurationException: ``sync`` is neither of the two.

    Example:
        >>> strategy = FSDPAccumulationStrategy(sync="micro_batch")
    """

    strategy_name = "accum_fsdp"

    def __init__(self, *args: Any, sync: SyncPolicy = "window", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sync_policy = checked_sync(sync)

    @override
    def _engine(self) -> dict[str, Any]:
        return {"engine": "fsdp1", "sync": self._sync_policy}

    @override
    def _sync_of_units(self) -> FSDP1Sync:
        assert self.model is not None
        return FSDP1Sync(self.model, self._sync_policy, self)

    @override
    def run_as_engine(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.model is self.lightning_module:  # the user wrapped parts of it
            return step(*args, **kwargs)
        assert self.model is not None
        with forward_replaced(self.module, step):
            return self.model(*args, **kwargs)

    @override
    def partial_window(self) -> PartialWindow | None:
        if self.accumulation is not None and self.accumulation.position:
            rank_zero_warn(
                "With FSDP1 a checkpoint inside a window does not hold its gradients: going on from it, the first step is made on"
                ' the rest of the window. strategy="accum_model_parallel" (FSDP2) holds them.'
            )
        return None

    @override
    def clip_by_norm(self, parameters: Iterable[Tensor], largest: float) -> Tensor:
        if not isinstance(self.model, FullyShardedDataParallel):
            raise MisconfiguredError(
                f"The norm of all gradients is known to one FullyShardedDataParallel around all, but {type(self.model).__name__}"
                " wraps its parts by itself. Clip by value, or in its configure_gradient_clipping."
            )
        return self.model.clip_grad_norm_(largest)
