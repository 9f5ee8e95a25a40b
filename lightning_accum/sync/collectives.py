"""What ``fully_shard`` sends in a micro-batch, counted: so a rank that ran out of memory can take part in what is left of it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from math import inf
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_accum.errors import UsageError
from lightning_accum.user_warnings import listed


class Collectives:
    """Counts the gathers and reductions of a micro-batch, and can leave out as many of those that follow.

    Where memory runs out in a forward or backward, the other ranks go on to wait for all of that micro-batch. So this rank runs a
    small one in its place, whose first collectives are left out, as many as there were before. Nothing of it is used: what was not
    gathered is zeros, and all ranks undo the loader batch.

    So a step must not send collectives of its own: they would meet those of another micro-batch.

    Args:
        groups: of parameters.
        module: that they are in.
    """

    def __init__(self, groups: Iterable[Any], module: nn.Module) -> None:
        self._groups = list(groups)
        self._module = module
        self._sent = 0
        """Those that were not left out, so far."""
        self._others_before: int | None = None
        """Those of others when the step's own were last looked for; None while they are not."""
        self._others_of_step = 0
        self._done = 0
        """Those of the micro-batch under way."""
        self._left_out: float = 0
        """So many of the next are left out."""
        self._whole: list[Any] = []
        """Groups that were gathered when it began."""
        self._kept = [(group._all_gather_comm, group._reduce_scatter_comm) for group in self._groups]
        for group in self._groups:
            group._all_gather_comm = _Counted(group._all_gather_comm, self)
            group._reduce_scatter_comm = _Counted(group._reduce_scatter_comm, self)

    def begin(self) -> None:
        """A micro-batch begins, or has ended."""
        self._done, self._left_out = 0, 0
        self._others_before = None
        self._whole = [group for group in self._groups if group.is_unsharded]

    def begin_again(self) -> None:
        """Another is run in the place of the one that began last."""
        self._left_out = inf
        for group in self._whole:  # in which the others do not gather them either
            group.unshard()
            group.wait_for_unshard()
        self._left_out, self._done = self._done, 0

    def leave_out_next(self) -> bool:
        """The next is due: count it, or say that it is one of those that are left out."""
        if self._left_out:
            self._left_out -= 1
            return True
        self._done += 1
        self._sent += 1
        return False

    def watch(self) -> None:
        """What the step itself runs is next: its forward, or a backward with its hooks."""
        self._others_before = self._others()

    def end_watch(self) -> None:
        """It is done, or failed."""
        if self._others_before is not None:
            self._others_of_step = max(self._others_of_step, self._others() - self._others_before)
            self._others_before = None

    def refuse_others(self) -> None:
        """Called where all ranks are, between micro-batches.

        Raises:
            RuntimeError: a step has sent collectives of its own.
        """
        self.end_watch()
        number = self._others_of_step
        if not number:
            return
        named = self._module.named_modules()
        found = [name for name, layer in named if isinstance(layer, nn.SyncBatchNorm) or getattr(layer, "dist_sync_on_step", False)]
        where = f"in {listed(found)}" if found else "such as self.all_gather or torch.distributed.all_reduce"
        raise UsageError(
            f'GradientAccumulation(micro_batch="auto"): {type(self._module).__name__} sends {number}'
            f" collective{'s' * (number > 1)} of its own in a micro-batch ({where}), beside those of fully_shard. Where memory runs"
            " out on one rank, they cannot be undone on the others. Give micro_batch= a number of samples or Tokens(...), or leave"
            " them out of training_step."
        )

    def _others(self) -> int:
        """Those that this rank has sent so far beside them."""
        return _sent_over_all_groups() - self._sent

    def close(self) -> None:
        """Let go of the groups."""
        for group, (gather, reduction) in zip(self._groups, self._kept, strict=True):
            group._all_gather_comm, group._reduce_scatter_comm = gather, reduction


class _Counted:
    """A collective of a group of parameters.

    Args:
        collective: what runs it.
        collectives: counts it.
    """

    def __init__(self, collective: Any, collectives: Collectives) -> None:
        self._collective = collective
        self._collectives = collectives

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collective, name)

    def __call__(self, *, output_tensor: Tensor, **kwargs: Any) -> Any:
        if self._collectives.leave_out_next():
            output_tensor.zero_()
            return None
        return self._collective(output_tensor=output_tensor, **kwargs)


def _sent_over_all_groups() -> int:
    """Collectives that this rank has sent so far; those of backends that do not count them are not among them."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    backends = {id(backend): backend for group in groups for backend in map(group._get_backend, group._device_types)}
    number = 0
    for backend in backends.values():
        with suppress(RuntimeError):
            number += backend._get_sequence_number_for_group()
    return number
