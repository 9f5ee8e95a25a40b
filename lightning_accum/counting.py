"""Counted first: what the terms of a window's losses weigh, before it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_accum.dispatch import in_eager_mode
from lightning_accum.errors import UsageError
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.step import CountsAhead
from lightning_accum.sync import GradientSync
from lightning_accum.undo import Undo
from lightning_accum.weighing.counted import TermValues
from lightning_accum.weighing.weight import checked

if TYPE_CHECKING:
    from lightning_accum.accumulation import Accumulation

Forward = Callable[[Any, int], "Tensor | None"]
"""Runs a micro-batch of a loader batch, which is so many after the one under way, and logs nothing."""


def count_window(accumulation: Accumulation, step: CountsAhead, batch: Any, sync: GradientSync, undo: Undo) -> None:
    """Count what the terms of a window weigh, if it begins with this loader batch and is more than one micro-batch a rank."""
    counted, splitting, boundary = accumulation.window.counted, accumulation.splitting, accumulation.boundary
    assert counted is not None
    if counted.is_agreed or accumulation.is_passthrough() or (splitting is None and boundary.size == 1):
        return
    plan, is_listed = accumulation.plan, accumulation.weigher.counts_first is False
    snapshot = None if is_listed else undo.take(watches_parameters=False)
    counted.loader_batches_left = 0
    rest = iter(()) if accumulation.rest_of_window is None or boundary.size == 1 else accumulation.rest_of_window()
    try:
        for number, (own, is_shadow_batch) in enumerate(chain([(batch, accumulation.is_shadow_batch)], rest)):
            counted.loader_batches_left += 1
            if is_listed:
                if own is not None and not is_shadow_batch:
                    _count_batch(accumulation, own)
            else:
                _count_by_running(accumulation, step, own, is_shadow_batch, number, sync)
            if boundary.size == math.inf and accumulation.comes_to_tokens(counted.first()):
                break
    finally:
        if snapshot is not None:
            snapshot.restore()
            sync.forget_forward()
            sync.reshard()
        if splitting is not None:
            splitting.plan = plan
    counted.agree()


def _count_by_running(
    accumulation: Accumulation, step: CountsAhead, batch: Any, is_shadow_batch: bool, ahead: int, sync: GradientSync
) -> None:
    splitting = accumulation.splitting
    if batch is None:
        if sync.is_waited_for_in_forward:
            raise UsageError(
                "The loader yields None on this rank, where the others run forward to count the terms of the loss. Pass a"
                " weight for each term, weight=[...], which are counted in the batch."
            )
        return
    if ahead:
        batch = step.transferred(batch)
        if splitting is not None:
            splitting.plan = None
            step.plan_ahead(batch)
    plan = accumulation.plan
    micro_batches = [batch] if plan is None else plan
    own = 1 if plan is None else len(plan.pieces)
    rounds = own
    if sync.is_waited_for_in_forward and splitting is not None:  # ranks may have more micro-batches than others
        rounds = int(accumulation.ranks.largest(own)[0])
    with sync.blocked(MicroBatch(batch)):
        if not is_shadow_batch:
            _count_micro_batches(accumulation, micro_batches, ahead, step.run_ahead)
        if sync.is_waited_for_in_forward:
            for _ in range(0 if is_shadow_batch else own, rounds):
                step.run_ahead(_copy(next(iter(micro_batches))), ahead)


def _count_micro_batches(accumulation: Accumulation, micro_batches: Iterable[Any], ahead: int, forward: Forward) -> None:
    """Run the micro-batches of a loader batch forward, without a backward, and count what the terms of their losses weigh.

    Random numbers are those of their real run, if everything is put back after the last of the window.
    """
    counted, weigher = accumulation.window.counted, accumulation.weigher
    assert counted is not None
    for micro_batch in micro_batches:
        values = TermValues()
        with in_eager_mode(), values:  # what is compiled shows no additions
            loss = forward(_copy(micro_batch), ahead)
        if loss is None or not loss.requires_grad or loss.grad_fn is None:
            continue
        contribution = weigher(loss, micro_batch)
        terms = weigher.take_terms()
        counted.add(contribution.of_terms or {})
        counted.values.append(values.of(loss, terms))
        del loss


def _count_batch(accumulation: Accumulation, batch: Any) -> None:
    """Count a loader batch by the weights that are listed."""
    counted, weights = accumulation.window.counted, accumulation.policy.weight
    assert counted is not None
    assert isinstance(weights, tuple)
    counted.add({place: checked(weight(batch), weight) for place, weight in enumerate(weights)})


def _copy(batch: Any) -> Any:
    """A step may write into its batch."""
    with suppress(Exception):
        return deepcopy(batch)
    return batch
