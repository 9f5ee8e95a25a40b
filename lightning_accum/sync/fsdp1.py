"""Reduction of the gradients of FullyShardedDataParallel modules (FSDP1)."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from typing_extensions import override

from lightning_accum.errors import UsageError
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.sync.base import SyncPolicy
from lightning_accum.sync.sharded import NO_WAY_BACK, ShardedEngine, ShardedSync


class FSDP1Sync(ShardedSync):
    """Reduce-scatter of FullyShardedDataParallel modules.

    Args:
        module: one, or what they are in.
        policy: reduce once a window, or at every micro-batch.
        engine: runs it.
    """

    can_forget_forward = False

    def __init__(self, module: nn.Module, policy: SyncPolicy, engine: ShardedEngine) -> None:
        units = [unit for unit in module.modules() if isinstance(unit, FullyShardedDataParallel)]
        super().__init__(list(units), policy, engine)

    @override
    def forget_forward(self) -> None:
        states = [getattr(unit, "training_state", None) for unit in self.units]  # a forward that stopped half-way refuses the next
        if any(getattr(state, "name", None) != "IDLE" for state in states):
            raise UsageError(NO_WAY_BACK)

    @override
    def blocked(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        if self.policy == "micro_batch":
            return nullcontext()
        stack = ExitStack()
        for root in self._roots:
            stack.enter_context(root.no_sync())  # type: ignore[operator]
        return stack
