"""Counted first: the weights of the terms of a window, before the window runs."""

from __future__ import annotations

import math
from contextlib import suppress
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_accum.errors import UsageError
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.step import CountsAhead
from lightning_accum.sync.base import GradientSync
from lightning_accum.undo import Undo
from lightning_accum.weighing.counted import TermValues
from lightning_accum.weighing.counts import count_by

if TYPE_CHECKING:
    from lightning_accum.accumulation import Accumulation


def count_window(accumulation: Accumulation, step: CountsAhead, batch: Any, sync: GradientSync, undo: Undo) -> None:
    """Count the weights of a window's terms, if it begins with this loader batch and has several micro-batches on a rank."""
    counted, splitting, boundary = accumulation.window.counted, accumulation.splitting, accumulation.boundary
    assert counted is not None
    if counted.is_agreed or accumulation.is_passthrough() or (splitting is None and boundary.size == 1):
        return
    plan, weights = accumulation.plan, accumulation.policy.weight
    rest = iter(()) if accumulation.rest_of_window is None or boundary.size == 1 else accumulation.rest_of_window()
    # drawn before the snapshot, so that no random number of the data is drawn again
    rest = rest if boundary.size == math.inf else iter([*rest])
    snapshot = None if isinstance(weights, tuple) else undo.take(watches_parameters=False)
    counted.loader_batches_left = 0
    named = {} if snapshot is None or not accumulation.written else dict(undo.module.named_parameters())
    written = [(own, own.detach().clone()) for own in map(named.get, accumulation.written) if own is not None]
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code hides the additions
            for number, (own, is_shadow_batch) in enumerate(chain([(batch, accumulation.is_shadow_batch)], rest)):
                counted.loader_batches_left += 1
                if not isinstance(weights, tuple):
                    _count_by_running(accumulation, step, own, is_shadow_batch, number, sync)
                elif own is not None and not is_shadow_batch:
                    counted.add({place: count_by(weight, own) for place, weight in enumerate(weights)})
                if boundary.size == math.inf and accumulation.comes_to_tokens(counted.first()):
                    break
            else:
                if boundary.size == math.inf:  # the data end before the window is full
                    counted.loader_batches_left = math.inf
    finally:
        if snapshot is not None:
            snapshot.restore()
            for parameter, value in written:
                parameter.data.copy_(value)
            sync.forget_forward()
            sync.reshard()
        if splitting is not None:
            splitting.plan = plan
    if snapshot is not None and accumulation.ranks.largest(accumulation.later.is_doubtful())[0]:
        before = accumulation.weigher.known.modes, {**counted.constants}
        if accumulation.look_at_doubted() or before != (accumulation.weigher.known.modes, counted.constants):
            counted.discard()
            return count_window(accumulation, step, batch, sync, undo)
    counted.agree()


def _count_by_running(
    accumulation: Accumulation, step: CountsAhead, batch: Any, is_shadow_batch: bool, ahead: int, sync: GradientSync
) -> None:
    splitting = accumulation.splitting
    if batch is None:
        if sync.is_waited_for_in_forward:
            raise UsageError(
                "The loader yields None on this rank, while other ranks run forward to count the terms of the loss. Pass one "
                "weight for each term, weight=[...], which need no forward."
            )
        return
    if ahead:
        batch = step.transferred(copied(batch))
        if splitting is not None:
            splitting.begin(batch)
    micro_batches = [batch] if accumulation.plan is None else accumulation.plan
    own, rounds = len(accumulation.plan.pieces) if accumulation.plan is not None else 1, 0
    if sync.is_waited_for_in_forward:  # ranks may have more micro-batches than others
        rounds = own if splitting is None else int(accumulation.ranks.largest(own)[0])
    is_own = ahead and rounds <= own  # a batch that was drawn ahead is a copy already, and runs once
    with sync.blocked(MicroBatch(batch)):
        for micro_batch in () if is_shadow_batch else micro_batches:
            _count_micro_batch(accumulation, step, micro_batch if is_own else copied(micro_batch), ahead)
        for _ in range(0 if is_shadow_batch else own, rounds):
            step.run_ahead(copied(next(iter(micro_batches))), ahead)


def _count_micro_batch(accumulation: Accumulation, step: CountsAhead, micro_batch: Any, ahead: int) -> None:
    """Run a micro-batch forward, without a backward, and count the weights of its terms.

    Its random numbers are the same as in its real run, if everything is restored after the last micro-batch of the window.
    """
    counted = accumulation.window.counted
    assert counted is not None
    with TermValues() as values:
        loss = step.run_ahead(micro_batch, ahead)
    if loss is not None and loss.grad_fn is not None:
        contribution, reading = accumulation.weigher(loss, micro_batch)
        if not accumulation.check.batches_left:
            accumulation.later.note(micro_batch, contribution, False)
        counted.add(contribution.of_terms or {})
        counted.values.append(values.of(loss, reading.terms))


def copied(batch: Any) -> Any:
    """Copy a batch, since a step may write into it."""

    def of_leaf(leaf: Any) -> Any:
        return leaf.clone() if type(leaf) is Tensor and not leaf.requires_grad else deepcopy(leaf)  # ten times as fast as deepcopy

    with suppress(Exception):
        return tree_map(of_leaf, batch)
    return batch
