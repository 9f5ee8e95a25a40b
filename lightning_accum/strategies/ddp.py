"""DistributedDataParallel: ``Trainer(strategy="accum_ddp")``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import (
    DDPStrategy,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_accum.session import counts_tokens_of_parts, finishes_after_backward
from lightning_accum.splitting.micro_batch import Tokens
from lightning_accum.strategies.mixin import AccumulationMixin
from lightning_accum.strategies.preparation import check_reduces_once_a_window, check_row_wise_reduction, checked
from lightning_accum.sync import DDPSync, GradientSync, SyncPolicy, WideDDPSync


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

    def __init__(self, *args: Any, sync: SyncPolicy = "window", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sync_policy = checked(sync)

    @override
    def _make_sync(self) -> GradientSync:
        assert self.accumulation is not None
        assert isinstance(self.model, DistributedDataParallel)
        self._check_what_ranks_cannot_split(self.model)
        if (sums := self.accumulation.sums) is not None:
            self._check_what_sums_cannot_do(self.model, sums.dtype)
            return WideDDPSync(self.model, sums, self.accumulation.ranks)
        # when a window of tokens ends, some ranks may have run their last micro-batch and others not
        sync_policy = "window" if counts_tokens_of_parts(self.policy) else self._sync_policy
        return DDPSync(self.model, sync_policy, finishes_after_backward(self.policy))

    def _check_what_sums_cannot_do(self, ddp: DistributedDataParallel, dtype: torch.dtype) -> None:
        if self._sync_policy == "micro_batch":
            raise MisconfigurationException(
                'DDPAccumulationStrategy(sync="micro_batch") reduces the gradients of each micro-batch in the type of the'
                f' parameters, and GradientAccumulation(accumulate_dtype={dtype}) their sum: use sync="window".'
            )
        if ddp._comm_hooks:
            raise MisconfigurationException(
                "DDPAccumulationStrategy(ddp_comm_hook=...) changes how DistributedDataParallel reduces gradients, but"
                f" GradientAccumulation(accumulate_dtype={dtype}) reduces their sums by itself. Leave one of them out."
            )

    def _check_what_ranks_cannot_split(self, ddp: DistributedDataParallel) -> None:
        """Where ranks may come to different numbers of micro-batches, nothing in them may wait for another rank."""
        if self.policy.on_nonfinite != "propagate":
            check_reduces_once_a_window(self, self._sync_policy)
            if ddp.static_graph:
                raise MisconfigurationException(
                    "DDPAccumulationStrategy(static_graph=True) reduces in the backward that it has recorded, but with"
                    f" GradientAccumulation(on_nonfinite={self.policy.on_nonfinite!r}) gradients are looked at before. Leave"
                    " static_graph out."
                )
        if self.row_wise is not None:
            check_row_wise_reduction(ddp.static_graph, self._sync_policy)
        if isinstance(self.policy.window, Tokens) and ddp.static_graph:
            raise MisconfigurationException(
                "DDPAccumulationStrategy(static_graph=True) reduces in the backward that it has recorded, but a window of Tokens is"
                " known to have ended only after it. Leave static_graph out, or give the window in loader batches."
            )
        size = self.policy.micro_batch
        if not isinstance(size, Tokens) and size != "auto":
            return
        if self._sync_policy == "micro_batch":
            raise MisconfigurationException(
                f"GradientAccumulation(micro_batch={size!r}) may split the batches of the ranks into different numbers of micro-"
                'batches, so they cannot reduce at each: use DDPAccumulationStrategy(sync="window").'
            )
        if ddp.static_graph:
            raise MisconfigurationException(
                "DDPAccumulationStrategy(static_graph=True) records the first forward and backward on all ranks together, which"
                f" GradientAccumulation(micro_batch={size!r}) does not promise. Leave static_graph out, or give a"
                " number of samples."
            )
        names = [name for name, layer in ddp.module.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
        if names:
            raise MisconfigurationException(
                f"SyncBatchNorm ({names[0]}) waits for all ranks in every micro-batch, but GradientAccumulation(micro_batch="
                f"{size!r}) may come to different numbers of them on the ranks. Give a number of samples."
            )

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with super().block_backward_sync() if self.accumulation is None else nullcontext():  # else the session blocks
            yield

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
            return self.sync.forward(self.lightning_module.training_step, *args, **kwargs)
