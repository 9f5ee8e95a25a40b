"""Reduction of the gradients of a DistributedDataParallel module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_accum.errors import UsageError
from lightning_accum.main_gradients import GradientSums, MainGradients, sparse_layers
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.ranks import Ranks
from lightning_accum.sync.base import NOTHING_AROUND, GradientSync, SyncPolicy, WrappedSync, forward_replaced, put_gradients
from lightning_accum.undo import replacing
from lightning_accum.user_warnings import listed
from lightning_accum.weighing.nodes import Node, nodes_below
from lightning_accum.weighing.safeguards import gradients_of_zero, zero_loss_of

_OF_NO_SYNC = "Remove fabric.no_backward_sync() or no_sync(), by which each rank would take its own step."


class DDPSync(WrappedSync):
    """Reduces once a window, or at every micro-batch (in split batches at the last of each loader batch).

    Reducing more than once a window is exact, too, since averaging an average changes nothing.
    """

    def __init__(self, ddp: DistributedDataParallel, policy: SyncPolicy, ranks: Ranks) -> None:
        self._ddp, self._policy, self._ranks = ddp, policy, ranks
        self.is_reduced_inside, self.notes_parameters = policy == "micro_batch", ddp.find_unused_parameters
        self._trainable = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        self._sparse = frozenset(p for layer in sparse_layers(ddp.module).values() for p in layer.parameters())
        self._used: list[nn.Parameter] = []
        self._last_node: Node | None = None
        ddp.require_forward_param_sync = False  # its next forward with a reduction sets it

    @override
    def blocked(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        # ranks have equally many loader batches, but not equally many micro-batches in each
        if self._policy == "micro_batch" and micro_batch.ends_loader_batch:
            return NOTHING_AROUND
        # A static graph is recorded at the first backward and reduced with it: torch raises "SystemError" or an internal assert
        # if that happens under no_sync (Lightning-AI/pytorch-lightning #19354, #20704; still so in torch 2.13).
        return NOTHING_AROUND if self.is_recording_graph else self._ddp.no_sync()

    @property
    @override
    def is_recording_graph(self) -> bool:
        """Whether the next forward and backward record a static graph, and must be the module's own."""
        return bool(self._ddp.static_graph and not self._ddp._static_graph_delay_allreduce_enqueued)

    @override
    def _run_in_engine(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._last_node = None
        with forward_replaced(self._ddp.module, step):
            return self._ddp(*args, **kwargs)

    @override
    def _loss_without_batch(self) -> Tensor | None:
        if not self._ddp.require_backward_grad_sync:
            return None
        parameters = self._trainable
        if self._ddp.static_graph:  # reaching other parameters than recorded is an error
            parameters = [parameter for parameter in self._trainable if parameter.grad is not None] or self._used or parameters
        return zero_loss_of(parameters, self._sparse)

    @override
    def begin_backward(self, micro_batch: MicroBatch, loss: Tensor) -> None:
        is_reduced = self._ddp.require_backward_grad_sync
        if micro_batch.is_boundary and not is_reduced:
            raise UsageError(_OF_NO_SYNC)
        if micro_batch.is_boundary and not self._ddp.require_forward_param_sync:
            raise UsageError(
                "The last loss of the window did not run through DistributedDataParallel, which would reduce no gradient: call the "
                "wrapped model, not model.module or a method of it, and not under torch.no_grad() between a loss and its backward."
            )
        self._last_node = loss.grad_fn if is_reduced else None

    @override
    def complete_reduction(self, micro_batch: MicroBatch) -> None:
        """Reduce parameters that have gradients from earlier micro-batches, but that the last one did not reach.

        DistributedDataParallel waits for every parameter in the last backward, and would reduce none. Its own RuntimeError remains
        for a parameter that no micro-batch of this rank has used.
        """
        node, self._last_node = self._last_node, None
        if node is None or self._ddp.find_unused_parameters or self._ddp.static_graph:
            return
        try:
            self._ddp.reducer._check_reducer_finalized()
        except RuntimeError:
            reached = {below.variable for below in nodes_below(node) if below.name().endswith("AccumulateGrad")}
            left = [parameter for parameter in self._trainable if parameter not in reached]
            if not micro_batch.is_shadow_batch:  # a shadow batch may use other parameters than this rank's own batches
                left = [parameter for parameter in left if parameter.grad is not None]
            if not left:
                raise
            _backward_without_gradients(zero_loss_of(left, self._sparse))
            self._ddp.reducer._check_reducer_finalized()

    @override
    def backward_without_loss(self) -> None:
        loss, self._stand_in = self._stand_in, None
        if loss is not None:
            _backward_without_gradients(loss)

    @override
    def reduce_accumulated(self) -> None:
        if not self._ddp.require_backward_grad_sync:
            raise UsageError(_OF_NO_SYNC)
        self._forget_used()  # including those of a skipped micro-batch
        _average(self._trainable, self._ranks)

    @override
    def drop_accumulated(self) -> None:
        self._forget_used()

    def _forget_used(self) -> None:
        # else torch remembers the used parameters until the next reduction, and raises an error if they have no gradients
        if self._ddp.find_unused_parameters:
            self._ddp.reducer._reset_state()

    @override
    def note_gradients(self) -> None:
        """Tell torch that the parameters with restored gradients of an unfinished window were used."""
        if self._ddp.find_unused_parameters:
            with self._ddp.no_sync():
                _backward_without_gradients(zero_loss_of(self._trainable, self._sparse))

    @override
    def end_window(self) -> None:
        """Refuse gradients that are never reduced, and remember which parameters a static graph uses."""
        self._refuse_unreduced()
        if not self._used and self._ddp.static_graph:
            self._used = [parameter for parameter in self._trainable if parameter.grad is not None]
        # In the forward after a reduction DistributedDataParallel sends buffers to all ranks, and after the first also the order in
        # which gradients came. Do this here, on all ranks together: a later forward may run on one rank only, since ranks have
        # different numbers of micro-batches.
        sync_buffers(self._ddp)
        self._ddp.require_forward_param_sync = False
        self._ddp.reducer._rebuild_buckets()

    def _refuse_unreduced(self) -> None:
        if self._ddp.process_group.size() == 1:
            return
        known, ignored = set(self._trainable), self._ddp.parameters_to_ignore
        named = self._ddp.module.named_parameters()
        if left := [name for name, p in named if p.grad is not None and p not in known and name not in ignored]:
            raise UsageError(
                f"DistributedDataParallel does not reduce the gradients of {listed(left)}, frozen or missing at its set-up. To "
                "train a parameter later, freeze it in on_train_start, and pass find_unused_parameters=True to the strategy."
            )


class LateDDPSync(GradientSync):
    """Has ``ranks`` average the gradients, or their sums in a wider type, once at the end of a window.

    DistributedDataParallel reduces nothing, so its forward is skipped, in which other ranks would wait for one that fails, and
    ``find_unused_parameters`` and ``static_graph`` have no effect.
    """

    def __init__(self, ddp: DistributedDataParallel, ranks: Ranks, sums: MainGradients | None) -> None:
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False
        self._ddp, self._ranks, self._sums = ddp, ranks, sums
        named = ddp.module.named_parameters()
        self._parameters = [parameter for name, parameter in named if name not in ddp.parameters_to_ignore]

    @override
    def end_window(self) -> None:
        if self._sums is None:
            _average(self._parameters, self._ranks)
        else:
            self._sums.reduce(self._ranks, self._parameters)
        # DistributedDataParallel does this in the forward after a reduction
        sync_buffers(self._ddp)


def _average(parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
    """Average ``.grad`` over the ranks. Called on all ranks, with the same parameters."""
    sums = GradientSums()
    sums.by_parameter.update({own: own.grad for own in parameters if own.grad is not None})
    sums.reduce(ranks, parameters)
    put_gradients(sums.by_parameter, sums.by_parameter)


def sync_buffers(ddp: DistributedDataParallel) -> None:
    """Broadcast the buffers of the first rank, as DistributedDataParallel does in the forward after a reduction."""
    with replacing(ddp, require_forward_param_sync=True):
        if ddp.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            ddp._sync_buffers()  # type: ignore[no-untyped-call]


def _backward_without_gradients(loss: Tensor) -> None:
    """Mark each parameter below ``loss`` as done for DistributedDataParallel: hooks see zero gradients, which are dropped."""
    with gradients_of_zero(loss, leaves_none=True):
        torch.autograd.backward(loss)
