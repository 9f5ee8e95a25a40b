"""Running out of memory: how to recognise it among errors, and the sizes of micro-batches that are found by it."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_accum.errors import AccumulationError

_MESSAGES = (
    # c10/cuda/CUDACachingAllocator.cpp, its HIP and XPU counterparts, aten/src/ATen/mps/MPSAllocator.mm
    "CUDA out of memory",
    "HIP out of memory",
    "XPU out of memory",
    "MPS backend out of memory",
    # from the driver, past the allocator: c10/cuda/CUDAException.cpp
    "CUDA error: out of memory",
    "HIP error: out of memory",
    # c10/core/impl/alloc_cpu.cpp: on Linux and macOS, and on Windows
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    # cuBLAS allocates its handle and workspace past torch: pytorch#128601; the second is what it says of its handle
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    # so does cuDNN; the last two are its names since version 9 (cudnnStatus_t)
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    # a tensor too large for cuDNN, or no memory left for it: pytorch#4107; Lightning and Accelerate read it so, too
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input",
    # every algorithm ran out of memory, which was caught: aten/src/ATen/native/cudnn/Conv_v8.cpp and Conv_v7.cpp
    "unable to find an engine to execute this computation",
    "Unable to find a valid cuDNN algorithm to run convolution",
)


class NothingSmallerError(AccumulationError, torch.OutOfMemoryError):
    """One sample does not fit into memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that memory ran out.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("expected a tensor of shape (2, 3)"))
        (True, False)
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(cause, RuntimeError) and any(message in str(cause) for message in _MESSAGES):
            return True
        cause = cause.__cause__
    return False


def free(device: torch.device) -> None:
    """Give back what a failed attempt left allocated, and forget how much that was at its peak.

    To be called when the error is out of scope: its traceback holds on to what the attempt computed.
    """
    gc.collect()
    if device.type not in ("cuda", "mps", "xpu"):
        return
    try:
        getattr(torch, device.type).empty_cache()
    except RuntimeError as error:  # even this can run out of memory
        if not is_out_of_memory(error):
            raise
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def has_room_to_double(device: torch.device) -> bool:
    """Whether micro-batches of twice the size are likely to fit, by the peak since the last :func:`free`.

    What is allocated now is taken to stay, and all above it to double. The sum has to be within nine tenths of the memory that
    this process has or can have. Always True where no device keeps count of that: then there is only trial.
    """
    if device.type != "cuda":
        return True
    room, passing = _room_and_passing(device)
    return 2 * passing <= room


def _room_and_passing(device: torch.device) -> tuple[float, int]:
    """Bytes for what passes, and how many passed at the peak: what is allocated now stays, of nine tenths of what can be had."""
    lasting = torch.cuda.memory_allocated(device)
    available = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return 0.9 * available - lasting, torch.cuda.max_memory_allocated(device) - lasting


@dataclass
class _Bucket:
    """What is known of rows whose cost is within a factor of two.

    Attributes:
        limit: the rows that a micro-batch may have; None before any failure.
        patience: batches that have to go well at the limit before more is tried.
        calm: batches that went well at the limit since it was set.
        is_due: the next micro-batch tries twice the limit.
        has_grown: more than the limit of a failure was found to fit. A later failure doubles the patience.
    """

    patience: int
    limit: int | None = None
    calm: int = 0
    is_due: bool = False
    has_grown: bool = False

    def wait_longer(self, longest: int) -> None:
        """A trial failed: the next is after twice as many batches."""
        self.patience = min(2 * self.patience, longest)
        self.calm, self.is_due = 0, False


class MicroBatchSizes:
    """The sizes of micro-batches that fit into memory, found by trying.

    Rows come in 64 buckets by the logarithm of their cost. A batch is one micro-batch until one fails. After a failure of
    ``rows`` rows, the limit of the bucket, and of every bucket of longer rows whose limit is not below ``rows``, is half of them,
    or the highest limit of longer rows that is in between. A bucket without a limit has the lowest of all shorter rows.

    When batches went well at a limit for as long as ``patience``, twice the limit is tried. It becomes the limit when that fits;
    when it fails, then or later, the patience of the bucket doubles. So failures become rarer and rarer while memory is the same,
    and sizes recover when there is more of it. Equal histories give equal sizes: there is no clock and no chance in it.

    Args:
        may_grow: vetoes the trial of a size, which then waits for as long again.
        patience: loader batches, at first.
        longest_patience: loader batches, at most.

    Example:
        >>> sizes = MicroBatchSizes()
        >>> sizes.size_for(cost=1000, rows=32)
        32
        >>> sizes.halve(cost=1000, rows=32)
        16
        >>> sizes.size_for(cost=1000, rows=32), sizes.size_for(cost=4000, rows=32), sizes.size_for(cost=100, rows=32)
        (16, 16, 32)
    """

    def __init__(
        self,
        may_grow: Callable[[], bool] | None = None,
        patience: int = 100,
        longest_patience: int = 100_000,
    ) -> None:
        self.has_changed = False
        """Something was learned since ranks last agreed."""
        self._may_grow = may_grow
        self._patience, self._longest_patience = patience, longest_patience
        self._buckets = [_Bucket(patience) for _ in range(64)]
        self._bound: set[int] = set()
        """Buckets whose limit has split the loader batch under way."""
        self._has_failed = False
        """The loader batch under way has failed before."""
        self._changed: set[int] = set()
        """Buckets whose limit changed since ranks last agreed."""

    def size_for(self, cost: int, rows: int) -> int:
        """The rows that a micro-batch of the loader batch under way may have.

        Args:
            cost: elements or tokens in a row, from 1.
            rows: what is left of the batch, the most that is returned.
        """
        index = _index(cost)
        limit = self._limit(index)
        if limit is None or limit >= rows:
            return rows
        self._bound.add(index)
        return min(2 * limit, rows) if self._buckets[index].is_due else limit

    def halve(self, cost: int, rows: int) -> int:
        """A micro-batch ran out of memory. Returns the rows that the next may have.

        Args:
            cost: elements or tokens in each of its rows.
            rows: how many it had.

        Raises:
            torch.OutOfMemoryError: it had one row.
        """
        if rows <= 1:
            raise NothingSmallerError(
                f"A micro-batch of one sample (of cost {cost}) does not fit into memory, and there is no smaller one. Try shorter"
                " sequences or smaller inputs, a smaller model, lower precision, or activation checkpointing."
            )
        self._has_failed = self.has_changed = True
        self._bound.clear()
        index = _index(cost)
        bucket, before = self._buckets[index], self._limit(index)
        if before is not None and rows > before:  # a trial: the limit stands
            bucket.wait_longer(self._longest_patience)
            return before
        longer = [b.limit for b in self._buckets[index + 1 :] if b.limit is not None and b.limit < rows]
        limit = max([math.ceil(rows / 2), *longer])
        for other, b in enumerate(self._buckets[index:], index):
            if b is bucket or (b.limit is not None and b.limit >= rows):
                b.limit, b.calm, b.is_due = limit, 0, False
                self._changed.add(other)
                if b.has_grown:
                    b.wait_longer(self._longest_patience)
        return limit

    def end_batch(self, micro_batches: Sequence[tuple[int, int]]) -> None:
        """A loader batch went well, in the end.

        Args:
            micro_batches: the cost and the rows of each that it was run in.
        """
        if self._bound and not self._has_failed:
            for index in self._bound:
                self._buckets[index].calm += 1
            for cost, rows in micro_batches:
                self._note(_index(cost), rows)
            for index in self._bound:
                bucket, limit = self._buckets[index], self._limit(index)
                if bucket.calm >= bucket.patience and not bucket.is_due and limit is not None:
                    bucket.is_due = self._may_grow is None or self._may_grow()
                    bucket.calm = 0
        self._bound.clear()
        self._has_failed = False

    def _note(self, index: int, rows: int) -> None:
        limit = self._limit(index)
        if limit is not None and rows > limit:
            bucket = self._buckets[index]
            bucket.limit, bucket.calm, bucket.is_due, bucket.has_grown = rows, 0, False, True
            self._changed.add(index)
            self.has_changed = True

    def _limit(self, index: int) -> int | None:
        limit = self._buckets[index].limit
        if limit is None:
            limit = min((bucket.limit for bucket in self._buckets[:index] if bucket.limit is not None), default=None)
        return limit

    # --- several ranks ------------------------------------------------------------------------------------------------

    def as_tensor(self) -> Tensor:
        """What this rank has learned since the last agreement, for one all-reduce with MIN over ranks.

        Shape (2, 64), float64: limits, inf where they have not changed, and the negative of patience. So a limit that fell on
        any rank falls on all, and one that only grew grows on all.
        """
        limits = [bucket.limit if index in self._changed else None for index, bucket in enumerate(self._buckets)]
        return torch.tensor(
            [[math.inf if limit is None else limit for limit in limits], [-bucket.patience for bucket in self._buckets]],
            dtype=torch.float64,
        )

    def agree(self, tensor: Tensor) -> None:
        """Take over what ranks have learned: their reduced :meth:`as_tensor`."""
        limits, patiences = tensor.tolist()
        for bucket, limit, patience in zip(self._buckets, limits, patiences, strict=True):
            if limit != math.inf and limit != bucket.limit:
                bucket.has_grown |= bucket.limit is not None and limit > bucket.limit
                bucket.limit, bucket.calm, bucket.is_due = int(limit), 0, False
            if -patience > bucket.patience:
                bucket.patience, bucket.calm, bucket.is_due = int(-patience), 0, False
        self._changed.clear()
        self.has_changed = False

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as plain numbers."""
        untouched = _Bucket(self._patience)
        return {str(index): asdict(bucket) for index, bucket in enumerate(self._buckets) if bucket != untouched}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a :meth:`state_dict`. It counts as learned just now, as ranks may have loaded different ones."""
        self._buckets = [_Bucket(**state.get(str(index), {"patience": self._patience})) for index in range(64)]
        self._changed = {index for index, bucket in enumerate(self._buckets) if bucket.limit is not None}
        self.has_changed = True


def _index(cost: int) -> int:
    return min(max(cost - 1, 0).bit_length(), 63)  # ceil(log2(cost))
