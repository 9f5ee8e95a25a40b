"""Checkpoints inside a window: what a training puts into them, and goes on from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from torch import nn

from lightning_accum.accumulation import Accumulation
from lightning_accum.checkpointing.resume import PartialWindow, gather_gradients, gather_weighed, put_back
from lightning_accum.session import Session
from lightning_accum.sync import GradientSync
from lightning_accum.weighing.terms import TermsCountedAhead


class Training(Protocol):
    """What a checkpoint asks of the training that it is taken of."""

    sync: GradientSync
    session: Session

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
    training: Training, accumulation: Accumulation, size: int, warn: Callable[[str], None], inform: Callable[[str], None]
) -> PartialWindow | None:
    """The unfinished window of a training; None at a boundary. Called on all ranks.

    Args:
        training: whose parameters have the gradients.
        accumulation: its state.
        size: loader batches in a window now.
        warn: is told where the window's gradients are those of a part of a loader batch, and so cannot be kept.
        inform: is told of the window's size.
    """
    if accumulation.position == 0:
        return None
    if not accumulation.is_between_loader_batches:
        warn(
            "The checkpoint is taken inside a window and inside a loader batch, a part of which is in the gradients: it does"
            " not hold them, and going on from it the first step is made on the rest of the window."
        )
        return None
    is_kept = training.is_global_zero
    training.sync.reduce_for_checkpoint()
    is_reduced, named = training.sync.is_reduced_inside, training.parameters_by_name()
    partial = PartialWindow(
        accumulation.policy.in_words(size),
        accumulation.position,
        None if accumulation.boundary.size == math.inf else accumulation.boundary.size,
        accumulation.window_tokens,
        accumulation.ranks.size,
        accumulation.window.reference,
        gather_weighed(accumulation.window, accumulation.ranks),
        is_reduced,
        gather_gradients(named, accumulation.ranks, is_reduced, is_kept, accumulation.sums),
        training.loss_scale(),
        int(accumulation.ranks.sum(accumulation.window.left_out)) if training.session.guard is not None else 0,
        terms.totals if isinstance(terms := accumulation.window.terms, TermsCountedAhead) else None,
    )
    inform(
        f"The checkpoint is taken after {partial.position} loader batches of a window; their gradients add"
        f" {partial.bytes() / 2**20:.1f} MiB to it."
    )
    return partial


def go_on_with(partial: PartialWindow, training: Training, accumulation: Accumulation, warn: Callable[[str], None]) -> None:
    """Put the gradients and weights of an unfinished window back where they were."""
    named, rank, scale = training.parameters_by_name(), training.rank_in_group(), training.loss_scale()
    put_back(partial, named, accumulation.window, accumulation.ranks, rank, scale, warn, accumulation.sums)
    training.sync.note_gradients()
