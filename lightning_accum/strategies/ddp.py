"""DistributedDataParallel: ``Trainer(strategy="accum_ddp")``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import (
    DDPStrategy,
)
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_accum.callback import GradientAccumulation
from lightning_accum.strategies.mixin import AccumulationMixin
from lightning_accum.strategies.preparation import checked
from lightning_accum.sync import DDPSync, SyncPolicy, WideDDPSync


class DDPAccumulationStrategy(AccumulationMixin, DDPStrategy):
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
    _ddp_sync: DDPSync

    def __init__(self, *args: Any, sync: SyncPolicy = "window", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sync_policy = checked(sync)

    @override
    def _begin(self, trainer: pl.Trainer, callback: GradientAccumulation | None) -> None:
        super()._begin(trainer, callback)
        if self.accumulation is None:
            return
        assert isinstance(self.model, DistributedDataParallel)
        if (sums := self.accumulation.sums) is None:
            self.sync = self._ddp_sync = DDPSync(self.model, self._sync_policy)
            return
        self.sync = self._ddp_sync = WideDDPSync(self.model, sums, self.accumulation.ranks)

    @override
    def _engine(self) -> dict[str, Any]:
        ddp = self.model
        assert isinstance(ddp, DistributedDataParallel)
        is_static, has_hook = bool(ddp.static_graph), bool(ddp._comm_hooks)
        return {"engine": "ddp", "sync": self._sync_policy, "is_static_graph": is_static, "has_comm_hook": has_hook}

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if self.accumulation is None:
            with super().block_backward_sync():
                yield
        else:
            with self.sync.blocked() if self.accumulation.plan is None else nullcontext():  # split, it blocks by itself
                yield

    @override
    def blocked(self) -> AbstractContextManager[None]:
        if self.accumulation is None:
            return self.block_backward_sync()
        plan = self.accumulation.plan
        is_last = plan is None or plan.current == len(plan.pieces) - 1
        # when a window of tokens ends, some ranks may have run their last micro-batch and others not
        return self.sync.blocked(is_last_of_batch=is_last and not self.counts_tokens_of_parts)

    @override
    def begin_manual_loader_batch(self) -> None:
        assert self.manual is not None
        ddp = self.model
        assert isinstance(ddp, DistributedDataParallel)
        if self.manual.windows.is_first and ddp.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            ddp._sync_buffers()  # type: ignore[no-untyped-call]  # as DistributedDataParallel does in a forward

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if self.manual is None:  # else nothing is left to DistributedDataParallel that it could delay
            super().post_backward(closure_loss)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        if self.manual is not None:  # its windows reduce gradients themselves, each backward by itself
            assert isinstance(self.model, DistributedDataParallel)
            with self.precision_plugin.train_step_context(), self.model.no_sync():
                return self.lightning_module.training_step(*args, **kwargs)
        if self.accumulation is None:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            if self.ends_windows_apart:  # it may fail on this rank alone, so the others must not wait for it in there
                return self.lightning_module.training_step(*args, **kwargs)
            return self._ddp_sync.forward(self.lightning_module.training_step, *args, **kwargs)

    @override
    def _run_shadow_batch(self) -> Tensor | None:
        if not self.ends_windows_apart:
            return super()._run_shadow_batch()
        assert self.accumulation is not None
        self.accumulation.window.skip()  # as the others agree on a scale in their first micro-batch
        return self.end_window_apart() if self.accumulation.is_boundary else None

    @override
    def _forward_without_batch(self) -> None:
        self._ddp_sync.forward_without_batch()

    @override
    def _backward_without_loss(self) -> None:
        self._ddp_sync.backward_without_loss()

    @override
    def drop_gradients(self) -> None:
        self._ddp_sync.forget()
        super().drop_gradients()

    @override
    def is_reduced_inside(self) -> bool:
        return self._sync_policy == "micro_batch" and not self.counts_tokens_of_parts  # as in `blocked`

    @override
    def _reduce_apart(self) -> None:
        self._ddp_sync.forward_without_batch()
        super()._reduce_apart()
        self._ddp_sync.reduce_without_loss()
