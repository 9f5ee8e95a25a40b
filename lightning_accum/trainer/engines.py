"""The strategies of one device, of DistributedDataParallel and of FullyShardedDataParallel (FSDP1).

The strategy of ``fully_shard`` is in ``model_parallel.py``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_accum.errors import UsageError
from lightning_accum.policy import check_is_one_of
from lightning_accum.sync.base import GradientSync, SyncPolicy, forward_replaced
from lightning_accum.sync.ddp import DDPSync, LateDDPSync, sync_buffers
from lightning_accum.sync.sharded import FSDP1Sync, ShardedSync
from lightning_accum.trainer.first_batch import loss_unlogged
from lightning_accum.trainer.from_lightning import MisconfiguredError, misconfigured, pl
from lightning_accum.trainer.strategy import AccumulationMixin

__all__ = ["AccumulationStrategy", "DDPAccumulationStrategy", "FSDPAccumulationStrategy"]


class AccumulationStrategy(AccumulationMixin, pl.strategies.SingleDeviceStrategy):
    """Exact gradient accumulation on one device, ``Trainer(strategy="accum")``.

    It runs on the device that the Trainer's ``accelerator`` and ``devices`` name.

    Args:
        device: the device; None for the Trainer's device.
        kwargs: see :class:`lightning.pytorch.strategies.SingleDeviceStrategy`.

    Raises:
        MisconfigurationException: (from the Trainer) it names more than one device or node.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_accum import GradientAccumulation
        >>> trainer = Trainer(accelerator="cpu", strategy="accum", callbacks=[GradientAccumulation(8)], logger=False)
    """

    strategy_name = "accum"

    def __init__(self, device: torch.device | str | int | None = None, **kwargs: Any) -> None:
        super().__init__(device="cpu" if device is None else device, **kwargs)
        self._has_device = device is not None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The single device, for the Trainer's connector; None until it is known."""
        return [self.root_device] if self._has_device else None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        _refuse_several(len(devices), "device")
        self._root_device, self._has_device = devices[0], True

    @property
    def num_nodes(self) -> int:
        """Always 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        _refuse_several(num_nodes, "node")


def _refuse_several(number: int, what: str) -> None:
    if number > 1:
        raise MisconfiguredError(f'strategy="accum" runs on one {what}, but there are {number}. Use strategy="accum_ddp".')


class ReducingMixin(AccumulationMixin):
    """A mixin in front of Lightning's strategies over ranks. ``sync`` says when they reduce gradients."""

    _engine_name: str  # as in :class:`lightning_accum.exclusions.Asked`
    _syncs: tuple[str, ...] = ("window", "micro_batch")

    def __init__(self, *args: Any, sync: SyncPolicy = "window", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with misconfigured():
            check_is_one_of("sync", sync, *self._syncs)
        self._sync_policy = sync

    @override
    def _engine(self) -> dict[str, Any]:
        return {"engine": self._engine_name, "sync": self._sync_policy}

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.accumulation is None:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self.sync.forward(self.module.training_step, *args, **kwargs)


class DDPAccumulationStrategy(ReducingMixin, pl.strategies.DDPStrategy):
    """Exact gradient accumulation over DistributedDataParallel, ``Trainer(strategy="accum_ddp")``.

    Also registered with Lightning's suffixes: ``_spawn``, ``_fork``, ``_notebook`` and ``_find_unused_parameters_true``.

    Args:
        args: see :class:`lightning.pytorch.strategies.DDPStrategy`; so are the keyword arguments.
        sync: reduce the gradients over the ranks once a ``"window"``, or at every ``"micro_batch"`` (Accelerate's
            ``sync_each_batch``); if loader batches are split, at the end of each, since ranks may have different numbers of
            micro-batches. The result is the same.
        kwargs: see above.

    Raises:
        MisconfigurationException: ``sync`` is neither of the two.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=2, strategy="accum_ddp", accumulate_grad_batches=8, logger=False)
    """

    strategy_name, _engine_name = "accum_ddp", "ddp"

    @override
    def _make_sync(self) -> GradientSync:
        assert self.accumulation is not None
        assert isinstance(self.model, DistributedDataParallel)
        sums, ranks = self.accumulation.sums, self.accumulation.ranks
        if sums is not None or self.policy.finishes_after_backward:
            return LateDDPSync(self.model, ranks, sums)
        return DDPSync(self.model, self._sync_policy, ranks)

    @override
    def _engine(self) -> dict[str, Any]:
        ddp = self.model
        assert isinstance(ddp, DistributedDataParallel)
        return {**super()._engine(), "is_static_graph": bool(ddp.static_graph), "has_comm_hook": bool(ddp._comm_hooks)}

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if self.manual is None:  # else DistributedDataParallel reduces nothing
            super().post_backward(closure_loss)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.manual is not None:  # its windows reduce gradients themselves, after each backward
            assert isinstance(self.model, DistributedDataParallel)
            if self.manual.micro_batches_begun == 1:
                sync_buffers(self.model)
            with self.precision_plugin.train_step_context(), self.model.no_sync():
                return self.module.training_step(*args, **kwargs)
        return super().training_step(*args, **kwargs)


class ShardedMixin(ReducingMixin):
    """A mixin in front of Lightning's strategies for FSDP1 and FSDP2."""

    reduces_every_backward_by_itself = True

    @override
    def _make_sync(self) -> ShardedSync:
        with misconfigured():
            sync = self._sync_of_units()
        self._fit.callback(sync.close)
        return sync

    @abstractmethod
    def _sync_of_units(self) -> ShardedSync:
        """The reduction of the engine, once the module is sharded."""

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if isinstance(self.sync, ShardedSync) and self.trainer().training:
            self.sync.batch_on_host = batch
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def loss_again(self, batch: Any, is_on_device: bool) -> Tensor:
        loss = loss_unlogged(self.trainer(), batch if is_on_device else super().batch_to_device(batch))
        if loss is None:
            raise UsageError(f"On rank {self.global_rank} a batch has no loss when it runs again. The first time it had one.")
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

    strategy_name, _engine_name = "accum_fsdp", "fsdp1"
    can_save_window = False

    @override
    def _sync_of_units(self) -> FSDP1Sync:
        assert self.model is not None
        return FSDP1Sync(self.model, self._sync_policy, self)

    @override
    def run_as_engine(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.model is self.lightning_module:  # the user has wrapped parts of the module
            return step(*args, **kwargs)
        assert self.model is not None
        with forward_replaced(self.module, step):
            return self.model(*args, **kwargs)

    @override
    def clip_by_norm(self, parameters: Iterable[Tensor], largest: float) -> Tensor:
        if not isinstance(self.model, FullyShardedDataParallel):
            kind = type(self.model).__name__
            raise MisconfiguredError(f"{kind} wraps only its parts in FSDP1, which cannot clip by the norm of all. Clip by value.")
        return self.model.clip_grad_norm_(largest)
