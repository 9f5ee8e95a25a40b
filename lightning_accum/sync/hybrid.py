"""Reduction of hybrid shards: within a shard at every micro-batch, over its replicas once a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_accum.micro_batch import MicroBatch
from lightning_accum.ranks import Ranks
from lightning_accum.sync.fsdp import FSDP2Sync, ShardedEngine, groups_of, whole_gradient, whole_parameter


class HybridSync(FSDP2Sync):
    """Reduce-scatter among the ranks that share the parameters at every micro-batch, all-reduce over their replicas once a window.

    Between micro-batches ``fully_shard`` keeps what it has scattered as one flat tensor for each group of parameters, of those
    that the micro-batch gave a gradient to. Where the next one reaches others, it adds up different parameters, and where the last
    of a window reaches none of the group, it leaves what is there to the next window. So here all parameters of a group get a
    gradient, of zeros if they have none. Those that no rank has reached in a window have None again when it ends.

    Args:
        module: what the sharded modules are in.
        engine: runs it.
        ranks: whose gradients are averaged.
    """

    def __init__(self, module: nn.Module, engine: ShardedEngine, ranks: Ranks) -> None:
        super().__init__(module, "shard", engine)
        self._ranks = ranks
        self._groups = [group for unit in self.units for group in groups_of(unit)]
        self._trained = [sharded for group in self._groups for sharded in _trained_of(group)]
        self._reached: set[Any] = set()
        """Parameters that a micro-batch of this window has given a gradient to."""
        self._filled: set[Any] = set()
        """Those that were given zeros."""
        self._is_of_window = False
        """The backward under way is that of a micro-batch of the window, and none that only takes part."""
        self._is_reduced = False
        for group in self._groups:
            group.post_backward = partial(self._reduce, group, group.post_backward)

    def _reduce(self, group: Any, post_backward: Callable[..., None], *args: Any) -> None:
        self._is_reduced = True
        trained = _trained_of(group)
        lacking = [sharded for sharded in trained if whole_gradient(sharded) is None]
        if self._is_of_window:
            self._reached.update(set(trained).difference(lacking))
        if len(lacking) < len(trained) or (group.all_reduce_grads and group._partial_reduce_output is not None):
            for sharded in lacking:
                self._fill(sharded)
        post_backward(*args)

    def _fill(self, sharded: Any) -> None:
        whole = whole_parameter(sharded)
        assert whole is not None  # the group was gathered
        if sharded not in self._filled:
            self._filled.add(sharded)
            if sharded.sharded_param.grad is not None:  # from a checkpoint inside the window, or a zero_grad that leaves zeros
                self._reached.add(sharded)
        whole.grad = torch.zeros_like(whole)

    @override
    def begin_backward(self, micro_batch: MicroBatch) -> None:
        super().begin_backward(micro_batch)
        self._is_of_window, self._is_reduced = not micro_batch.is_shadow_batch, False

    @override
    def backward_without_loss(self) -> None:
        self._is_of_window = False
        super().backward_without_loss()

    @override
    def complete_reduction(self, micro_batch: MicroBatch) -> None:
        """Reduce what earlier micro-batches gave gradients to, in modules that the last backward of a window has not come to.

        Raises:
            RuntimeError: fully_shard reduces in another way than the versions of torch that were read.
        """
        if self._is_of_window and not self._is_reduced:
            raise RuntimeError(f'torch {torch.__version__} does not call FSDPParamGroup.post_backward: use sync="micro_batch".')
        self._is_of_window = False
        if micro_batch.is_boundary and self._holds_partial_sums():
            self.reduce_accumulated()

    def _holds_partial_sums(self) -> bool:
        return any(group._partial_reduce_output is not None for group in self._groups)

    @override
    def drop_accumulated(self) -> None:
        super().drop_accumulated()
        self._forget_window()

    @override
    def end_window(self) -> None:
        super().end_window()
        if self._holds_partial_sums():
            raise RuntimeError('A window has ended, and fully_shard has not reduced all of its gradients: use sync="micro_batch".')
        is_reached = self._ranks.largest(*(float(sharded in self._reached) for sharded in self._trained))
        for sharded, is_one in zip(self._trained, is_reached, strict=True):
            if not is_one:
                sharded.sharded_param.grad = None
        self._forget_window()

    def _forget_window(self) -> None:
        self._reached.clear()
        self._filled.clear()

    @override
    def gradients_of(self, loss: Tensor, share: float, parameters: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
        try:
            return super().gradients_of(loss, share, parameters)
        finally:
            self._forget_window()  # it is in none

    @override
    def close(self) -> None:
        super().close()
        for group in self._groups:
            del group.post_backward


def _trained_of(group: Any) -> list[Any]:
    return [sharded for sharded in group.fsdp_params if sharded.sharded_param.requires_grad]


def has_replicas(unit: FSDPModule) -> bool:
    """Whether ``fully_shard`` has spread a module over a mesh of two dimensions: shards, and replicas of them."""
    return all(group._is_hsdp for group in groups_of(unit))
