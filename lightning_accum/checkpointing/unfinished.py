"""Checkpoints inside a window: what a training puts into them, and goes on from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn

from lightning_accum.checkpointing.resume import PartialWindow
from lightning_accum.sync import GradientSync
from lightning_accum.windows import Windows


class Training(Protocol):
    """What a checkpoint asks of the training that it is taken of."""

    sync: GradientSync

    @property
    def is_global_zero(self) -> bool:
        """This is the first rank."""

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """All that may get a gradient, by names that are the same in another run."""

    def rank_in_group(self) -> int:
        """Of this rank, among those whose gradients are averaged."""

    def loss_scale(self) -> float:
        """What a GradScaler multiplies losses by."""


def unfinished_window(
    training: Training, windows: Windows, size: int, warn: Callable[[str], None], inform: Callable[[str], None]
) -> PartialWindow | None:
    """The unfinished window of a training; None at a boundary. Called on all ranks."""
    if windows.position == 0:
        return None
    if not windows.is_between_loader_batches:
        warn(
            "The checkpoint is taken inside a window and inside a loader batch, a part of which is in the gradients: it does"
            " not hold them, and going on from it the first step is made on the rest of the window."
        )
        return None
    training.sync.reduce_for_checkpoint()
    is_reduced, is_kept = training.sync.is_reduced_inside, training.is_global_zero
    partial = windows.partial_window(size, training.parameters_by_name(), is_reduced, is_kept, training.loss_scale())
    inform(
        f"The checkpoint is taken after {partial.position} loader batches of a window; their gradients add"
        f" {partial.bytes() / 2**20:.1f} MiB to it."
    )
    return partial


def go_on_with(partial: PartialWindow, training: Training, windows: Windows) -> None:
    """Restore the gradients and weights of an unfinished window."""
    windows.restore(partial, training.parameters_by_name(), training.rank_in_group(), training.loss_scale())
    training.sync.note_gradients()
