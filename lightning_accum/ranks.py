"""What ranks exchange beside gradients and weights: one small all-reduce a loader batch."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_accum.exact import exact_dtype


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank has when a loader batch is due; of :meth:`Ranks.agree_on_batch`, what any rank has.

    Attributes:
        is_alive: its loader gave something, a batch or None.
        batch_from: one more than the rank, where it has a batch; the highest of them.
        has_more: its loader goes on after this.
        lacks_batch: it has none, and never had one.
        is_stopped: it got SIGTERM, and is to end.
    """

    is_alive: bool = False
    batch_from: int = 0
    has_more: bool = False
    lacks_batch: bool = False
    is_stopped: bool = False


class Ranks:
    """The ranks of a training, and those among them whose gradients are averaged.

    Args:
        device: of this rank.
        size: ranks whose gradients are averaged.
        group: these ranks; None for all.
        world_size: all ranks, those of tensor parallelism too.
        rank: this one.
        timeout: for what they exchange; None for torch's own.
        same_rows: so many of those whose gradients are averaged have parts of the same rows.
    """

    def __init__(
        self,
        device: torch.device,
        size: int = 1,
        group: dist.ProcessGroup | None = None,
        world_size: int = 1,
        rank: int = 0,
        timeout: timedelta | None = None,
        same_rows: int = 1,
    ) -> None:
        self.device = device
        self.size = size
        self.same_rows = same_rows
        self.group = group
        self.world_size = world_size
        self.rank = rank
        self._world: dist.ProcessGroup | None = None
        self._device = device
        if world_size > 1 and device.type != "cpu" and dist.is_gloo_available():
            # from host to host: the answer is needed there, and asking for it on the device would wait for all that it has to do
            self._world, self._device = dist.new_group(backend="gloo", timeout=timeout), torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Of those whose gradients are averaged, this is the first."""
        return self.size == 1 or dist.get_rank(self.group) == 0

    def close(self) -> None:
        """Give back the group that was made for these, at the end of a fit."""
        if self._world is not None and dist.is_initialized():
            dist.destroy_process_group(self._world)

    def agree_on_batch(
        self, batch: Any, last: Any, is_alive: bool, has_more: bool, is_stopped: bool = False
    ) -> tuple[RankStatus, Any]:
        """A loader batch is due: the ranks tell each other what they have. Called on all of them.

        Args:
            batch: of this rank; None if it has none.
            last: its last one.

        Returns:
            What any of them has; and what this rank can run without a batch: its last one, or that of another if it never had one.
        """
        lacks_batch = batch is None and last is None
        own = RankStatus(is_alive, 0 if batch is None else self.rank + 1, has_more, lacks_batch, is_stopped)
        values = astuple(own)
        status = RankStatus(*(type(of_own)(most) for of_own, most in zip(values, self.largest(*values), strict=True)))
        if status.lacks_batch and status.batch_from:
            shared = self.share(batch, status.batch_from - 1)
            last = shared if lacks_batch else last
        return status, last

    def sum(self, number: float) -> float:
        """The sum over those whose gradients are averaged. Called on all."""
        if self.world_size == 1:
            return number
        value = torch.tensor([number], dtype=exact_dtype(self._device), device=self._device)
        dist.all_reduce(value, group=self._world)
        return float(value) * self.size / self.world_size  # those of tensor parallelism have the same numbers

    def largest(self, *numbers: float) -> list[float]:
        """The largest of the ranks' numbers; inf is one. Called on all of them."""
        if self.world_size == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=exact_dtype(self._device), device=self._device)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._world)
        return values.tolist()

    def share(self, batch: Any, source: int) -> Any:
        """The batch of rank ``source``. Called on all of them."""
        if self.world_size == 1:
            return batch
        batches = [batch if self.rank == source else None]
        dist.broadcast_object_list(batches, source, group=self._world, device=self._device)
        return batches[0]
