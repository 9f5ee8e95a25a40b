"""``micro_batch="auto"``: if memory runs out, undo the loader batch, and run it again in smaller parts."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_accum.errors import AccumulationError
from lightning_accum.ranks import Ranks

_MESSAGES = (
    # the allocators of torch: c10/cuda/CUDACachingAllocator.cpp and those like it, c10/core/impl/alloc_cpu.cpp
    *(f"{device} out of memory" for device in ("CUDA", "HIP", "XPU", "MPS backend")),
    *("CUDA error: out of memory", "HIP error: out of memory"),  # from the driver, past the allocator
    *(f"DefaultCPUAllocator: {found}" for found in ("can't allocate memory", "not enough memory")),
    # cuBLAS and cuDNN allocate past torch: pytorch#128601; the second is cuBLAS's error for its handle
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_ALLOC_FAILED"),
    *("CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    # a tensor too large for cuDNN, or no memory left for it: pytorch#4107; Lightning and Accelerate treat it as such, too
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input",
    # every algorithm ran out of memory, which was caught: aten/src/ATen/native/cudnn/Conv_v8.cpp and Conv_v7.cpp
    *("unable to find an engine to execute this computation", "Unable to find a valid cuDNN algorithm to run convolution"),
)


class NothingSmallerError(AccumulationError, torch.OutOfMemoryError):
    """One sample does not fit into memory."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that memory ran out."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES):
            return True
        error = error.__cause__
    return False


def free(device: torch.device) -> None:
    """Free the memory of a failed attempt. Called when the error, whose traceback refers to it, is out of scope."""
    gc.collect()
    if device.type not in ("cuda", "mps", "xpu"):
        return
    try:
        getattr(torch, device.type).empty_cache()
    except RuntimeError as error:  # even this can run out of memory
        if not is_out_of_memory(error):
            raise


class MicroBatchSizes:
    """The size of micro-batches that fits into memory, found by trying. A failed attempt leaves no trace.

    A batch is one micro-batch until one fails. The limit is then half of its elements, rounded up to a power of two, so that rows
    of similar length have one size. In each later epoch the first loader batch that the limit splits is tried at twice the limit;
    if it fits, this is the new limit. ``say`` prints a size that was found.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.has_changed = False  # whether the limit has changed since ranks last agreed
        self._limit: int | None = None  # the elements that a micro-batch may have; None before any failure
        self._tries_more = self._is_bound = False
        """Whether to try twice the limit; whether the limit has split the current loader batch."""

    def begin_epoch(self) -> None:
        """Try twice the limit once more."""
        self._tries_more = True

    def size_for(self, cost: int, rows: int) -> int:
        """How many of the remaining ``rows`` a micro-batch may have, with ``cost`` elements or tokens in each."""
        if self._limit is None or self._limit >= rows * _rounded(cost):
            return rows
        self._is_bound = True
        return min(rows, max(1, self._limit * (1 + self._tries_more) // _rounded(cost)))

    def halve(self, cost: int, rows: int, seen: str) -> None:
        """Halve the limit after a micro-batch ran out of memory; ``seen`` is the error. Raises it if there was one row."""
        if rows <= 1:
            raise NothingSmallerError(
                f"One sample (of cost {cost}) does not fit into memory. Try activation checkpointing, or loader batches of one "
                'sample with micro_batch="offload".'
            )
        if self._limit is None or rows * _rounded(cost) <= self._limit:
            self._limit = math.ceil(rows / 2) * _rounded(cost)
        self._tries_more, self.has_changed = False, True
        number = max(1, self._limit // _rounded(cost))
        self._say(f"{rows} samples of {cost} elements do not fit into memory ({seen}): again in micro-batches of {number}")

    def end_batch(self) -> None:
        """End a loader batch that has fit into memory."""
        if self._is_bound and self._tries_more and self._limit is not None:
            self._limit, self._tries_more, self.has_changed = 2 * self._limit, False, True
        self._is_bound = False

    def agree(self, ranks: Ranks) -> None:
        """Agree on one limit. Called on all ranks.

        A limit that fell on any rank falls on all; one that only grew grows on all.
        """
        limit = self._limit if self.has_changed and self._limit is not None else math.inf
        limit = -ranks.largest(-limit)[0]
        if limit != math.inf:
            self._limit, self._tries_more = int(limit), False
        self.has_changed = False

    def state_dict(self) -> dict[str, Any]:
        """The limit, as plain numbers."""
        return {"limit": self._limit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a :meth:`state_dict`. Ranks then agree again, since they may have loaded different states."""
        self._limit, self.has_changed = state["limit"], True


def _rounded(cost: int) -> int:
    return 1 << max(cost - 1, 0).bit_length()
