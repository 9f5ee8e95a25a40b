"""Reduction of the gradients of sharded modules: the common base of FSDP1 and FSDP2, and FSDP1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from typing_extensions import override

from lightning_accum.errors import UsageError
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.ranks import Ranks
from lightning_accum.step import Trained
from lightning_accum.sync.base import SyncPolicy, WrappedSync, gradients_in_place
from lightning_accum.undo import Snapshot
from lightning_accum.weighing.safeguards import gradients_of_zero

_PRIME = 2**31 - 1
CANNOT_FORGET_FORWARD = "training_step failed on a few rows, and leaves its sharded modules unusable. Pass check=False."


class ShardedSync(WrappedSync):
    """The base of FSDP1 and FSDP2: each forward and backward gathers parameters, and waits for the other ranks.

    Without reduction, gradients of all parameters are held whole on every rank until the window ends. ``"micro_batch"`` reduces,
    and holds shards only. Both are exact: a sum of averages is the average of sums.

    If this rank has no loss, it still takes part in the forward and backward of the others: with the outputs of its sharded modules
    before training_step returned None, or by repeating the last micro-batch with a loss. Its gradients are zeros, its logs are
    dropped, and its changes to the module are undone. It cannot do so without ``may_lack_loss``.

    If ranks have parts of the same rows, as in context parallelism, ``of_same_rows`` has the ranks, and a number for each group of
    ranks that share rows.
    """

    is_waited_for_in_forward = True
    is_reduced_inside = True

    def __init__(
        self,
        units: list[Any],
        policy: SyncPolicy,
        engine: Trained,
        may_lack_loss: bool = True,
        of_same_rows: tuple[Ranks, int] | None = None,
    ) -> None:
        self.units, self.policy = units, policy
        self.batch_on_host: Any = None  # the last loader batch drawn, before its transfer to the device
        self._engine = engine
        self._last: tuple[Any, bool] | None = None
        """The last batch with a loss, or the last part of one, and whether it is on the device."""
        self._snapshot: Snapshot | None = None
        below = {child for unit in units for child in unit.modules() if child is not unit}
        self._roots = [unit for unit in units if unit not in below]
        self._unused_roots = set(self._roots)
        self._may_lack_loss, self._of_same_rows = may_lack_loss, of_same_rows
        self._had_loss = 1  # which micro-batches of the window had a loss, as one number
        self._ran: set[nn.Module] = set()  # the units that this micro-batch has run
        self._ran_in = [1] * len(units)  # in which micro-batches each unit ran, as one number
        self._outputs: list[Tensor] = []
        self._handles = [unit.register_forward_hook(self._note_output) for unit in units]

    def _note_output(self, unit: nn.Module, arguments: Any, output: Any) -> None:
        self._unused_roots.discard(unit)
        self._ran.update([unit] * torch.is_grad_enabled())
        if self._may_lack_loss and torch.is_grad_enabled():
            leaves = torch.utils._pytree.tree_leaves(output)
            self._outputs += [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

    @override
    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._outputs.clear()
        self._ran.clear()
        return super().forward(step, *args, **kwargs)

    @override
    def forward_without_batch(self) -> None:
        if self._outputs:  # a hand-written loop has run the forward, without a loss
            self._stand_in = self._loss_without_batch()
        else:
            super().forward_without_batch()

    @override
    def _run_in_engine(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._engine.run_as_engine(step, *args, **kwargs)

    @override
    def _loss_without_batch(self) -> Tensor:
        """A loss that depends on the same modules as the losses of other ranks."""
        if not self._may_lack_loss:
            raise UsageError(
                f"Rank {dist.get_rank()} has a loader batch without a loss, or fewer loader batches, but runs sharded row-wise "
                'submodules. Have each loader batch of each rank give a loss, or use Trainer(strategy="accum_ddp").'
            )
        outputs, self._outputs = self._outputs, []
        if outputs:
            return torch.stack([output.flatten()[:1].sum().float() for output in outputs]).sum()
        if self._last is None:
            raise UsageError(f"Rank {dist.get_rank()} has had no batch with a loss yet, and others wait for it: begin with one.")
        self._snapshot = self._engine.snapshotter.take(watches_parameters=False)
        return self._engine.loss_again(*self._last)

    @override
    def backward_without_loss(self) -> None:
        loss, self._stand_in = self._stand_in, None
        snapshot, self._snapshot = self._snapshot, None
        if loss is None:
            return
        self._outputs.clear()
        self._note(has_loss=False)
        with gradients_of_zero(loss):
            torch.autograd.backward(loss)
        if snapshot is not None:
            snapshot.restore()

    @override
    def begin_backward(self, micro_batch: MicroBatch, loss: Tensor) -> None:
        self._outputs.clear()  # outputs may be large, and a backward does not need them
        self._note(has_loss=not micro_batch.is_shadow_batch)
        if self._last is None or not micro_batch.is_shadow_batch:
            # a part of a batch is on the device; a whole batch is kept on the host, if available
            is_part = micro_batch.number > 1 or self.batch_on_host is None
            self._last = (micro_batch.batch if is_part else self.batch_on_host, is_part)

    @override
    def reduce_accumulated(self) -> None:
        if self.policy != "micro_batch":
            self.forward_without_batch()
            self.backward_without_loss()

    def _note(self, has_loss: bool) -> None:
        self._had_loss = (3 * self._had_loss + has_loss) % _PRIME
        self._ran_in = [(3 * ran + (unit in self._ran)) % _PRIME for unit, ran in zip(self.units, self._ran_in, strict=True)]
        self._ran.clear()

    @override
    def without_weight(self, loss: Tensor, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        if self._of_same_rows is None or micro_batch.is_shadow_batch:
            return super().without_weight(loss, micro_batch)
        return nullcontext()  # other parts of the rows attend to this one, and have their own losses

    @override
    def drop_accumulated(self) -> None:
        self.reduce_accumulated()
        self._had_loss = 1

    @override
    def end_window(self) -> None:
        had_loss, self._had_loss = self._had_loss, 1
        if self._of_same_rows is None:
            return
        ranks, number = self._of_same_rows
        found = set(ranks.gather((number, had_loss)))
        if len(found) > len({number for number, _ in found}):  # the others would attend to keys and values of another batch
            raise UsageError(
                "A rank returned no loss, while other ranks with parts of the same rows returned one. Return a loss for each part: "
                "for a part without labels it may be NaN, and has weight 0."
            )

    @override
    def gradients_of(
        self, loss: Tensor, share: float, parameters: Sequence[nn.Parameter], keeps_graph: bool = False
    ) -> Sequence[Tensor | None]:
        try:
            with nullcontext() if share or self._of_same_rows is not None else gradients_of_zero(loss):
                return gradients_in_place(loss, share, parameters)
        finally:
            self._outputs.clear()

    def close(self) -> None:
        """Release the modules."""
        self._outputs.clear()
        for handle in self._handles:
            handle.remove()


class FSDP1Sync(ShardedSync):
    """Reduce-scatter of the FullyShardedDataParallel modules in a module."""

    can_forget_forward = False

    def __init__(self, module: nn.Module, policy: SyncPolicy, engine: Trained) -> None:
        super().__init__([unit for unit in module.modules() if isinstance(unit, FullyShardedDataParallel)], policy, engine)

    @override
    def forget_forward(self) -> None:
        states = [getattr(unit, "training_state", None) for unit in self.units]  # a failed forward blocks the next one
        if any(getattr(state, "name", None) != "IDLE" for state in states):
            raise UsageError(CANNOT_FORGET_FORWARD)

    @override
    def blocked(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        stack = ExitStack()
        for root in self._roots if self.policy == "window" else ():
            stack.enter_context(root.no_sync())
        return stack
