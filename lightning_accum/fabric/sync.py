"""How gradients of a hand-written loop are reduced: the loop itself calls the model, and may switch the reduction on and off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_accum.errors import UsageError
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.sync import DDPSync, FSDP2Sync
from lightning_accum.undo import Snapshot, Undo


class LoopDDPSync(DDPSync):
    """As its base, where the loop itself calls the wrapper: inside a window no forward may wait for other ranks."""

    @override
    def begin_backward(self, micro_batch: MicroBatch) -> None:
        if micro_batch.is_boundary and not self._ddp.require_backward_grad_sync:
            raise UsageError(
                "The last backward of a window runs where the loop has switched the reduction of gradients off, so every rank would"
                " take a step of its own. Leave fabric.no_backward_sync(...), or no_sync(), out of the loop: the Accumulator"
                " reduces once a window."
            )

    def note_loss(self, loss: Tensor) -> None:
        """A backward of this loss is next."""
        self._last_node = loss.grad_fn if self._ddp.require_backward_grad_sync else None

    @override
    def end_window(self) -> None:
        super().end_window()
        self._settle()


class ShardedModel:
    """What the reduction of sharded modules asks for."""

    def __init__(self, snapshotter: Undo, loss_of: Callable[[Any], Tensor] | None) -> None:
        self._snapshotter = snapshotter
        self._loss_of = loss_of

    def run_in_engine(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step as it is."""
        return step(*args, **kwargs)

    def loss_again(self, batch: Any, is_on_device: bool) -> Tensor:
        """The loss of a batch that had one before."""
        if self._loss_of is None:
            raise UsageError(
                f"Rank {dist.get_rank()} has a micro-batch that ran no forward, and the others wait for it in theirs, since the"
                " model is sharded. Call the model in every micro-batch, also where accumulator.backward(None) follows; or pass"
                " Accumulator(loss_of=...), by which an earlier batch takes its place."
            )
        return self._loss_of(batch)

    def snapshot(self) -> Snapshot:
        """What puts back what a step changes."""
        return self._snapshotter.take(watches_parameters=False)


class LoopFSDP2Sync(FSDP2Sync):
    """As its base, where the loop itself has called the model, and may still switch the reduction on and off."""

    @override
    def begin_backward(self, micro_batch: MicroBatch) -> None:
        super().begin_backward(micro_batch)
        self._set_reduced(micro_batch.is_boundary)

    @override
    def reduce_accumulated(self) -> None:
        self._set_reduced(True)
        super().reduce_accumulated()

    def _set_reduced(self, is_reduced: bool) -> None:
        units: list[Any] = self.units
        for unit in units:
            unit.set_requires_gradient_sync(is_reduced, recurse=False)

    @override
    def forward_without_batch(self) -> None:
        if self._outputs:  # the forward has run, and has no loss
            self._shadow_loss = self._loss_without_batch()
        else:
            super().forward_without_batch()
