"""Running again out of memory where each rank waits for all others in every micro-batch, as those of sharded modules do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from typing_extensions import override

from lightning_accum.ranks import Ranks
from lightning_accum.splitting.attempts import RetriedSplitting
from lightning_accum.splitting.memory import (
    MicroBatchSizes,
    NothingSmallerError,
    PeakMemory,
    free,
    has_room_to_double,
    is_out_of_memory,
)
from lightning_accum.splitting.packing import RowSlice
from lightning_accum.splitting.plan import Mark

T = TypeVar("T")


class TogetherSplitting(RetriedSplitting):
    """Has all ranks run a loader batch again, in sizes that they agree on, where memory ran out on one of them.

    That rank first takes part in what the others wait for: in the rest of the micro-batch that did not fit, and in those that
    follow. Whether any ran out is asked once for each loader batch, before the next forward.

    Args:
        ranks: those of the training.
        device: of this one.
        arguments: see :class:`RetriedSplitting`.
    """

    def __init__(self, ranks: Ranks, device: torch.device, **arguments: Any) -> None:
        sizes = MicroBatchSizes(may_grow=lambda: has_room_to_double(device), peaks=PeakMemory(device))
        super().__init__(trim=False, device=device, sizes=sizes, **arguments)
        self._ranks = ranks

    @override
    def run_beside(self, attempt: Callable[[], T], mark: Callable[[], Mark]) -> T:
        undo = mark().undo
        while True:
            result = attempt()
            if not self._have_all_fit(True):
                undo()
                self._agree_on_sizes()
                continue
            return result

    @override
    def _is_to_run_again(self, failed: RowSlice | None, before: Mark) -> bool:
        if failed is not None:
            self._take_part(failed, before)
        return not self._have_all_fit(failed is None)

    def _have_all_fit(self, has_fit: bool) -> bool:
        return self._ranks.largest(not has_fit) == [0]

    def _take_part(self, failed: RowSlice, before: Mark) -> None:
        assert self.plan is not None
        if failed.count <= 1:
            self.sizes.halve(failed.cost, failed.count)  # which raises that there is nothing smaller
        free(self._device)
        try:
            before.take_part(self.plan, self.planner.smallest(self.plan))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise NothingSmallerError(
                f'GradientAccumulation(micro_batch="auto"): {failed.count} samples of {failed.cost} elements do not fit into'
                " memory. Nor did one sample, with which this rank was then to take part in what the others wait for. Try shorter"
                " sequences or smaller inputs, lower precision, or activation checkpointing."
            ) from error

    @override
    def _agree_on_sizes(self) -> None:
        # all ranks have left the attempt: the largest of the negatives are the smallest
        sizes = self.sizes.as_tensor()
        self.sizes.agree(-torch.tensor(self._ranks.largest(*(-sizes).flatten().tolist()), dtype=sizes.dtype).view_as(sizes))
