"""The parameters that the micro-batches of a window reach: ``fully_shard`` takes these to be the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accum.errors import SeamError
from lightning_accum.ranks import Ranks


class ReachedParameters:
    """Has each rank reduce all parameters of a group, where it has a gradient of any, and knows which of them no rank has reached.

    ``fully_shard`` reduces a group of parameters as one flat tensor, of those that have a gradient on this rank. Where another rank
    has a gradient of others that are as large, these are added up with them; where they are of another size, it hangs or dies. So
    all parameters of the group get one, of zeros if they have none. Those that no rank has reached have None again after it.

    Args:
        groups: of parameters.
        ranks: whose gradients are averaged.
    """

    def __init__(self, groups: Iterable[Any], ranks: Ranks) -> None:
        self._groups = list(groups)
        self._ranks = ranks
        self._trained = [sharded for group in self._groups for sharded in _trained_of(group)]
        self._reached: set[Any] = set()
        """Parameters that a micro-batch of this window has given a gradient to."""
        self._filled: set[Any] = set()
        """Those that were given zeros."""
        self._is_of_window = False
        """The backward under way is that of a micro-batch of the window, and none that only takes part."""
        self._is_called = False
        """``fully_shard`` reduces gradients where it is expected to."""
        for group in self._groups:
            group.post_backward = partial(self._reduce, group, group.post_backward)

    def _reduce(self, group: Any, post_backward: Callable[..., None], *args: Any) -> None:
        self._is_called = True
        trained = _trained_of(group)
        lacking = [sharded for sharded in trained if whole_gradient(sharded) is None]
        if self._is_of_window:
            self._reached.update(set(trained).difference(lacking))
        holds_sum = group.all_reduce_grads and partial_sum_of(group) is not None
        if lacking and group.reduce_grads and (holds_sum or len(lacking) < len(trained)):
            for sharded in lacking:
                self._fill(sharded)
        post_backward(*args)

    def _fill(self, sharded: Any) -> None:
        whole = whole_parameter(sharded)
        if whole is None:  # torch passes over it
            return
        if sharded not in self._filled:
            self._filled.add(sharded)
            if sharded.sharded_param.grad is not None:  # from a checkpoint inside the window, or a zero_grad that leaves zeros
                self._reached.add(sharded)
        whole.grad = torch.zeros_like(whole)

    def begin_backward(self, is_of_window: bool) -> None:
        """A backward is next."""
        self._is_of_window = is_of_window

    def end_backward(self) -> None:
        """It is done.

        Raises:
            RuntimeError: fully_shard reduces in another way than the versions of torch that were read.
        """
        if self._is_of_window and not self._is_called and any(map(_has_gradient, self._trained)):
            raise SeamError(f"torch {torch.__version__} does not call FSDPParamGroup.post_backward to reduce gradients.")
        self._is_of_window = False

    def are_any_left(self) -> bool:
        """Whether something was accumulated, and not reduced over all ranks."""
        has_sum = any(partial_sum_of(group) is not None for group in self._groups)
        return has_sum or any(whole_gradient(sharded) is not None for sharded in self._trained)

    def leave_out_others(self) -> None:
        """Have no gradient of what no rank has reached so far. Called on all ranks."""
        if not self._trained:
            return
        is_reached = self._ranks.largest(*(float(sharded in self._reached) for sharded in self._trained))
        for sharded, is_one in zip(self._trained, is_reached, strict=True):
            if not is_one:
                sharded.sharded_param.grad = None
                self._filled.discard(sharded)

    def forget(self) -> None:
        """The window has ended, or what was reached is of none."""
        self._reached.clear()
        self._filled.clear()

    def close(self) -> None:
        """Let go of the groups."""
        for group in self._groups:
            del group.post_backward


def _has_gradient(sharded: Any) -> bool:
    return sharded.sharded_param.grad is not None or whole_gradient(sharded) is not None


def partial_sum_of(group: Any) -> Tensor | None:
    """What ``fully_shard`` has of a group that was scattered, and not all-reduced over replicas yet."""
    partial_sum: Tensor | None = getattr(group, "_partial_reduce_output", None)
    return partial_sum


def whole_parameter(sharded: Any) -> nn.Parameter | None:
    """What a module computes with; None before its first forward."""
    whole: nn.Parameter | None = getattr(sharded, "_unsharded_param", None)
    return whole


def whole_gradient(sharded: Any) -> Tensor | None:
    """What was accumulated and not reduced, in one of the two places where ``fully_shard`` may have it."""
    whole = whole_parameter(sharded)
    gradient: Tensor | None = sharded.unsharded_accumulated_grad
    return whole.grad if gradient is None and whole is not None else gradient


def _trained_of(group: Any) -> list[Any]:
    return [sharded for sharded in group.fsdp_params if sharded.sharded_param.requires_grad]
