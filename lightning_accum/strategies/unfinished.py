"""Checkpoints inside a window: what a strategy puts into them, and goes on from."""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_accum.accumulation import Accumulation
from lightning_accum.checkpointing.resume import PartialWindow, gather_gradients, gather_weighed, put_back
from lightning_accum.engine import Engine
from lightning_accum.weighing.terms import TermsCountedAhead


def unfinished_window(strategy: Engine, warn: Callable[[str], None]) -> PartialWindow | None:
    """The unfinished window of a training; None at a boundary. Called on all ranks.

    Args:
        strategy: of the Trainer.
        warn: is told where the window's gradients are those of a part of a loader batch, and so cannot be kept.
    """
    accumulation = strategy.accumulation
    if accumulation is None or accumulation.position == 0:
        return None
    if not accumulation.is_between_loader_batches:
        warn(
            "The checkpoint is taken inside a window and inside a loader batch, a part of which is in the gradients: it does"
            " not hold them, and going on from it the first step is made on the rest of the window."
        )
        return None
    is_kept = strategy.is_global_zero
    strategy.sync.reduce_for_checkpoint()
    is_reduced, named = strategy.sync.is_reduced_inside, strategy.parameters_by_name()
    partial = PartialWindow(
        accumulation.policy.in_words(strategy.trainer().accumulate_grad_batches),
        accumulation.position,
        None if accumulation.boundary.size == math.inf else accumulation.boundary.size,
        accumulation.window_tokens,
        accumulation.ranks.size,
        accumulation.window.reference,
        gather_weighed(accumulation.window, accumulation.ranks),
        is_reduced,
        gather_gradients(named, accumulation.ranks, is_reduced, is_kept, accumulation.sums),
        strategy.loss_scale(),
        int(accumulation.ranks.sum(accumulation.window.left_out)) if strategy.session.guard is not None else 0,
        terms.totals if isinstance(terms := accumulation.window.terms, TermsCountedAhead) else None,
    )
    rank_zero_info(
        f"The checkpoint is taken after {partial.position} loader batches of a window; their gradients add"
        f" {partial.bytes() / 2**20:.1f} MiB to it."
    )
    return partial


def go_on_with(partial: PartialWindow, strategy: Engine, accumulation: Accumulation, warn: Callable[[str], None]) -> None:
    """Put the gradients and weights of an unfinished window back where they were."""
    named, rank, scale = strategy.parameters_by_name(), strategy.rank_in_group(), strategy.loss_scale()
    put_back(partial, named, accumulation.window, accumulation.ranks, rank, scale, warn, accumulation.sums)
    strategy.sync.note_gradients()
