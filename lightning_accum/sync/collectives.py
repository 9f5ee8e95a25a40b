"""What ``fully_shard`` sends in a micro-batch, counted: so a rank that ran out of memory can take part in what is left of it."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

from torch import Tensor


class Collectives:
    """Counts the gathers and reductions of a micro-batch, and can leave out as many of those that follow.

    Where memory runs out in a forward or backward, the other ranks go on to wait for all of that micro-batch. So this rank runs a
    small one in its place, whose first collectives are left out, as many as there were before. Nothing of it is used: what was not
    gathered is zeros, and all ranks undo the loader batch.

    Args:
        groups: of parameters.
    """

    def __init__(self, groups: Iterable[Any]) -> None:
        self._groups = list(groups)
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
        return False

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
