"""How gradients of a hand-written loop are reduced: the loop itself calls the model, and may switch the reduction on and off."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_accum.errors import UsageError
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.sync import DDPSync, FSDP2Sync


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
