"""One loader batch, run as micro-batches in lock-step: what normalises by the batch sees all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_accum.batch_norm.host_memory import HostMemory
from lightning_accum.batch_norm.joint_layers import JointLayers
from lightning_accum.batch_norm.normalisation import AfterAll
from lightning_accum.lock_step.own_attributes import OwnAttributes
from lightning_accum.lock_step.thread_state import RandomStreams, carried, hooks_for_saved_tensors
from lightning_accum.lock_step.turns import LockStep
from lightning_accum.splitting.batch_log import BatchLog
from lightning_accum.splitting.batch_run import BatchRun
from lightning_accum.splitting.outputs import Outputs
from lightning_accum.splitting.plan import Plan

if TYPE_CHECKING:
    from lightning_accum.strategies.mixin import AccumulationMixin

TrainingStep = Callable[[Any], tuple[Tensor | None, dict[str, Any]]]
"""Takes a micro-batch; returns its loss and what else it returned."""
RunClosure = Callable[[Callable[[], Tensor | None]], Any]
"""Zeroes the gradients where that is due, and runs the backward of the loss that the function which it is given returns."""


class JointRun(BatchRun):
    """Runs the forwards of all micro-batches in lock-step, and then one backward for all.

    What is saved for the backward waits on the host, so that a device has to hold little more than what one micro-batch needs from
    one BatchNorm layer to the next, and what all of them have at one such layer.

    Args:
        strategy: whose accumulation has planned the batch.
        training_step: runs the forward of one.
        run_closure: runs a forward, and the backward after it.
        collecting: makes a log that takes in what is logged as long as its context lasts.
        show: logs what was collected.
    """

    def __init__(
        self,
        strategy: AccumulationMixin,
        training_step: TrainingStep,
        run_closure: RunClosure,
        collecting: Callable[[], AbstractContextManager[BatchLog]],
        show: Callable[[BatchLog, bool], None],
    ) -> None:
        super().__init__(strategy, training_step, collecting, show)
        self._training_step = training_step
        self._run_closure = run_closure

    def _attempt(self, plan: Plan) -> tuple[Outputs, list[int] | None, BatchLog, Tensor | None]:
        accumulation, strategy = self._accumulation, self._strategy
        assert strategy.lightning_module is not None
        accumulation.is_boundary = False  # its gradients are reduced when all is done
        device = strategy.root_device
        outputs = Outputs([piece.count for piece in plan.pieces])
        streams, attributes = RandomStreams(device), OwnAttributes(strategy.lightning_module)
        micro_batches: list[Any] = [None] * len(plan.pieces)

        def on_turn(before: int | None, now: int | None) -> None:
            streams.switch(before, now)
            attributes.switch(before, now)
            if now is not None:
                plan.current = log.micro_batch = now

        def run(index: int) -> tuple[Tensor | None, dict[str, Any]]:
            micro_batch = micro_batches[index] = plan.batch if plan.is_whole else plan.make(plan.pieces[index])
            return self._training_step(micro_batch)

        def forward() -> Tensor | None:
            found = steps.run(run)
            layers.close()
            for index, (loss, _) in enumerate(found):
                log.note_loss(loss, index)
            losses, seeds = self._weigh(found, plan, micro_batches, outputs)
            return self._joined(losses, seeds, any(weight is None for weight in outputs.weights), layers.shared_token)

        with self._collecting() as log:
            steps: LockStep[tuple[Tensor | None, dict[str, Any]]] = LockStep(len(plan.pieces), _around(device), on_turn)
            layers = JointLayers(strategy.lightning_module, steps, is_counted=not accumulation.is_stand_in)
            strategy.is_weighed = True
            try:
                with layers.installed():
                    self._run_closure(forward)
            finally:
                strategy.is_weighed, strategy.joint_seed = False, None
        log.weigh(outputs.weights, outputs.rows, outputs.of_means)
        return outputs, plan.order, log, None

    def _weigh(
        self, found: Sequence[tuple[Tensor | None, dict[str, Any]]], plan: Plan, micro_batches: list[Any], outputs: Outputs
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Take all micro-batches into the window. Returns the losses that count, and the ``gradient`` of each for its backward.

        Where none counts, all losses are returned, for a backward that adds zeros.
        """
        accumulation = self._accumulation
        losses, seeds, weightless = [], [], []
        for index, (loss, extra) in enumerate(found):
            plan.current = index
            accumulation.begin_micro_batch(micro_batches[index])
            micro_batches[index] = None
            if loss is not None:
                seed = self._strategy.weigh_micro_batch(loss)
                if accumulation.is_weightless:
                    weightless.append(loss)
                else:
                    losses.append(loss)
                    seeds.append(seed)
            accumulation.end_micro_batch()
            outputs.add(loss, accumulation.weight, extra, accumulation.of_mean)
        accumulation.is_weightless = not losses and bool(weightless)
        return (losses, seeds) if losses else (weightless, [None] * len(weightless))

    def _joined(
        self, losses: list[Tensor], seeds: list[Tensor | None], are_sums: bool, shared_token: Tensor | None
    ) -> Tensor | None:
        """The loss of the whole batch; the strategy is told what its backward takes as ``gradient``."""
        accumulation, strategy = self._accumulation, self._strategy
        is_shared = shared_token is not None and shared_token.requires_grad
        if is_shared and accumulation.is_weightless and not accumulation.is_stand_in:
            losses, accumulation.is_weightless = [], False  # NaN maybe; but its rows are in the statistics of the other ranks
        if not losses:
            if not is_shared:
                return None
            joined, strategy.joint_seed = torch.zeros((), device=strategy.root_device, requires_grad=True) * 1.0, None
        elif len(losses) == 1:
            joined, strategy.joint_seed = losses[0], seeds[0]
        elif are_sums:
            joined, strategy.joint_seed = torch.stack([loss.reshape(()) for loss in losses]).sum(), None
        else:
            joined, strategy.joint_seed = _mean(losses, seeds)
        return AfterAll.apply(joined, shared_token) if is_shared else joined  # type: ignore[no-untyped-call]


def _mean(losses: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """The mean of the losses, weighted by their seeds, and the sum of these."""
    stacked = torch.stack([loss.reshape(()) for loss in losses])
    weights = torch.stack([stacked.new_ones(()) if seed is None else seed.reshape(()) for seed in seeds])
    total = weights.sum()
    parts = torch.where(weights == 0, torch.zeros_like(stacked), stacked) * weights
    return parts.sum() / torch.where(total == 0, torch.ones_like(total), total), total


def _around(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """What each micro-batch runs in, in its thread: what holds here, and saved tensors go to the host."""
    as_here = carried(device)
    memory = None if hooks_for_saved_tensors() is not None else memory_for(device)  # the user has some

    @contextmanager
    def around() -> Iterator[None]:
        with as_here(), nullcontext() if memory is None else memory.hooks():
            yield

    return around


def memory_for(device: torch.device) -> HostMemory | None:
    """Where saved tensors wait; None for where they are."""
    return None if device.type == "cpu" else HostMemory(device)
