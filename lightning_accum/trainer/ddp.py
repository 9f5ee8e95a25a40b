"""DistributedDataParallel: ``Trainer(strategy="accum_ddp")``."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_accum.policy import check_is_one_of
from lightning_accum.sync.base import GradientSync, SyncPolicy
from lightning_accum.sync.ddp import DDPSync, WideDDPSync, sync_buffers
from lightning_accum.trainer.from_lightning import misconfigured, pl
from lightning_accum.trainer.strategy import AccumulationMixin

_Sync = TypeVar("_Sync", bound=str)


def checked_sync(sync: _Sync, *others: str) -> _Sync:
    """The argument ``sync`` of a strategy.

    Raises:
        MisconfigurationException: it is none of them.
    """
    with misconfigured():
        check_is_one_of("sync", sync, "window", "micro_batch", *others)
    return sync


class DDPAccumulationStrategy(AccumulationMixin, pl.strategies.DDPStrategy):
    """Exact gradient accumulation over DistributedDataParallel, ``Trainer(strategy="accum_ddp")``.

    Also registered with the suffixes of Lightning's own: ``_spawn``, ``_fork``, ``_notebook`` and
    ``_find_unused_parameters_true``.

    Args:
        args: see :class:`lightning.pytorch.strategies.DDPStrategy`; so are the keyword arguments.
        sync: reduce the gradients over the ranks once a ``"window"``, or at every ``"micro_batch"`` (Accelerate's
            ``sync_each_batch``); where loader batches are split, at the end of each, since the ranks may come to different
            numbers of micro-batches. The result is the same.
        kwargs: see above.

    Raises:
        MisconfigurationException: ``sync`` is neither of the two.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=2, strategy="accum_ddp", accumulate_grad_batches=8, logger=False)
    """

    strategy_name = "accum_ddp"

    def __init__(self, *args: Any, sync: SyncPolicy = "window", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sync_policy = checked_sync(sync)

    @override
    def _make_sync(self) -> GradientSync:
        assert self.accumulation is not None
        assert isinstance(self.model, DistributedDataParallel)
        if (sums := self.accumulation.sums) is not None:
            return WideDDPSync(self.model, sums, self.accumulation.ranks)
        return DDPSync(self.model, self._sync_policy, self.policy.finishes_after_backward)

    @override
    def _engine(self) -> dict[str, Any]:
        ddp = self.model
        assert isinstance(ddp, DistributedDataParallel)
        is_static, has_hook = bool(ddp.static_graph), bool(ddp._comm_hooks)
        return {"engine": "ddp", "sync": self._sync_policy, "is_static_graph": is_static, "has_comm_hook": has_hook}

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if self.manual is None:  # else nothing is left to DistributedDataParallel that it could delay
            super().post_backward(closure_loss)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.manual is not None:  # its windows reduce gradients themselves, each backward by itself
            assert isinstance(self.model, DistributedDataParallel)
            if self.manual.micro_batches_begun == 1:
                sync_buffers(self.model)
            with self.precision_plugin.train_step_context(), self.model.no_sync():
                return self.module.training_step(*args, **kwargs)
        if self.accumulation is None:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self.sync.forward(self.module.training_step, *args, **kwargs)
