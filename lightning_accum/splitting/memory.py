"""Running out of memory: how to recognise it among errors, and the sizes of micro-batches that are found by it."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
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
    """Give back what a failed attempt left allocated.

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


class MicroBatchSizes:
    """The size of micro-batches that fits into memory, found by trying.

    A batch is one micro-batch until one fails. Half of its elements are the limit from then on, in rows of any length, rounded up
    to a power of two, so that those of about one length have one size. If as many loader batches as ``patience`` went well at the
    limit, twice the limit is tried. It becomes the limit if that fits; if it fails, then or later, patience doubles. Equal
    histories give equal sizes: there is no clock and no chance in it.

    Example:
        >>> sizes = MicroBatchSizes()
        >>> sizes.size_for(cost=1000, rows=32)
        32
        >>> sizes.halve(cost=1000, rows=32)
        16
        >>> sizes.size_for(cost=1000, rows=32), sizes.size_for(cost=4000, rows=32), sizes.size_for(cost=100, rows=32)
        (16, 4, 32)
    """

    def __init__(self) -> None:
        self.has_changed = False
        """Something was learned since ranks last agreed."""
        self._limit: int | None = None
        """The elements that a micro-batch may have; None before any failure."""
        self._patience, self._calm = 100, 0
        """Loader batches that have to go well at the limit before more is tried, and that went well since it was set."""
        self._is_bound = self._has_failed = False
        """The limit has split the loader batch under way; it has failed before."""

    def size_for(self, cost: int, rows: int) -> int:
        """The rows that a micro-batch of the loader batch under way may have.

        Args:
            cost: elements or tokens in a row, from 1.
            rows: what is left of the batch, the most that is returned.
        """
        if self._limit is None or self._limit >= rows * _rounded(cost):
            return rows
        self._is_bound = True
        limit = 2 * self._limit if self._calm >= self._patience else self._limit
        return min(rows, max(1, limit // _rounded(cost)))

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
        elements = rows * _rounded(cost)
        if self._limit is not None and not self._has_failed:
            self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
        if self._limit is None or elements <= self._limit:
            self._limit = math.ceil(rows / 2) * _rounded(cost)
        self._calm, self._is_bound = 0, False
        self._has_failed = self.has_changed = True
        return max(1, self._limit // _rounded(cost))

    def end_batch(self, micro_batches: Sequence[tuple[int, int]]) -> None:
        """A loader batch went well, in the end.

        Args:
            micro_batches: the cost and the rows of each that it was run in.
        """
        if self._is_bound and not self._has_failed and self._limit is not None:
            self._calm += 1
            largest = max((_rounded(cost) * rows for cost, rows in micro_batches if rows > 1), default=0)
            if largest > self._limit:
                self._limit, self._calm, self.has_changed = largest, 0, True
        self._is_bound = self._has_failed = False

    # --- several ranks ------------------------------------------------------------------------------------------------

    def as_tensor(self) -> Tensor:
        """What this rank has learned since the last agreement, for one all-reduce with MIN over ranks.

        Shape (2,), float64: the limit, inf if it has not changed, and the negative of patience. So a limit that fell on any rank
        falls on all, and one that only grew grows on all.
        """
        limit = self._limit if self.has_changed and self._limit is not None else math.inf
        return torch.tensor([limit, -self._patience], dtype=torch.float64)

    def agree(self, tensor: Tensor) -> None:
        """Take over what ranks have learned: their reduced :meth:`as_tensor`."""
        limit, patience = tensor.tolist()
        if limit not in (math.inf, self._limit) or -patience > self._patience:
            self._calm = 0
        self._limit = self._limit if limit == math.inf else int(limit)
        self._patience, self.has_changed = int(-patience), False

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as plain numbers."""
        return {"limit": self._limit, "patience": self._patience, "calm": self._calm}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a :meth:`state_dict`. It counts as learned just now, as ranks may have loaded different ones."""
        self._limit, self._patience, self._calm = state["limit"], state["patience"], state["calm"]
        self.has_changed = True


def _rounded(cost: int) -> int:
    return 1 << max(cost - 1, 0).bit_length()


_LONGEST_PATIENCE = 100_000
