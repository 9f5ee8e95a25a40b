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
    lasting = torch.cuda.memory_allocated(device)
    available = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return lasting + 2 * (torch.cuda.max_memory_allocated(device) - lasting) <= 0.9 * available


class MicroBatchSizes:
    """The size of micro-batches that fits into memory, found by trying.

    A batch is one micro-batch until one fails. Half of its elements are the limit from then on, in rows of any length
    (rounded up to a power of two). If batches
    went well at the limit for as long as ``patience``, twice the limit is tried. It becomes the limit if that fits; if it fails,
    then or later, patience doubles. So failures become rarer and rarer while memory is the same, and sizes recover if there is more
    of it. Equal histories give equal sizes: there is no clock and no chance in it.

    Args:
        may_grow: vetoes the trial of a size, which then waits for as long again.

    Example:
        >>> sizes = MicroBatchSizes()
        >>> sizes.size_for(cost=1000, rows=32)
        32
        >>> sizes.halve(cost=1000, rows=32)
        16
        >>> sizes.size_for(cost=1000, rows=32), sizes.size_for(cost=4000, rows=32), sizes.size_for(cost=100, rows=32)
        (16, 4, 32)
    """

    def __init__(self, may_grow: Callable[[], bool] | None = None) -> None:
        self.has_changed = False
        """Something was learned since ranks last agreed."""
        self._may_grow = may_grow
        self._known = _Known()
        self._is_bound = False
        """The limit has split the loader batch under way."""
        self._has_failed = False
        """The loader batch under way has failed before."""

    def size_for(self, cost: int, rows: int) -> int:
        """The rows that a micro-batch of the loader batch under way may have.

        Args:
            cost: elements or tokens in a row, from 1.
            rows: what is left of the batch, the most that is returned.
        """
        known, cost = self._known, _rounded(cost)
        if known.limit is None or known.limit >= rows * cost:
            return rows
        self._is_bound = True
        limit = 2 * known.limit if known.is_due else known.limit
        return min(rows, max(1, limit // cost))

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
        known, cost = self._known, _rounded(cost)
        self._has_failed = self.has_changed = True
        self._is_bound = False
        is_trial = known.limit is not None and rows * cost > known.limit
        if not is_trial:
            known.limit = math.ceil(rows / 2) * cost
        if is_trial or known.has_grown:
            known.patience = min(2 * known.patience, _LONGEST_PATIENCE)
        known.calm, known.is_due = 0, False
        assert known.limit is not None
        return max(1, known.limit // cost)

    def end_batch(self, micro_batches: Sequence[tuple[int, int]]) -> None:
        """A loader batch went well, in the end.

        Args:
            micro_batches: the cost and the rows of each that it was run in.
        """
        known = self._known
        if self._is_bound and not self._has_failed:
            assert known.limit is not None
            largest = max((_rounded(cost) * rows for cost, rows in micro_batches if rows > 1), default=0)
            known.calm += 1
            if known.is_due and largest > known.limit:
                known.limit, known.calm, known.is_due, known.has_grown = largest, 0, False, True
                self.has_changed = True
            elif known.calm >= known.patience and not known.is_due:
                known.calm, known.is_due = 0, self._may_grow is None or self._may_grow()
        self._is_bound = self._has_failed = False

    # --- several ranks ------------------------------------------------------------------------------------------------

    def as_tensor(self) -> Tensor:
        """What this rank has learned since the last agreement, for one all-reduce with MIN over ranks.

        Shape (2,), float64: the limit, inf if it has not changed, and the negative of patience. So a limit that fell on any rank
        falls on all, and one that only grew grows on all.
        """
        limit = self._known.limit if self.has_changed and self._known.limit is not None else math.inf
        return torch.tensor([limit, -self._known.patience], dtype=torch.float64)

    def agree(self, tensor: Tensor) -> None:
        """Take over what ranks have learned: their reduced :meth:`as_tensor`."""
        known, (limit, patience) = self._known, tensor.tolist()
        if limit != math.inf and limit != known.limit:
            known.has_grown |= known.limit is not None and limit > known.limit
            known.limit, known.calm, known.is_due = int(limit), 0, False
        if -patience > known.patience:
            known.patience, known.calm, known.is_due = int(-patience), 0, False
        self.has_changed = False

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as plain numbers."""
        return asdict(self._known)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a :meth:`state_dict`. It counts as learned just now, as ranks may have loaded different ones."""
        self._known = _Known(**state)
        self.has_changed = True


def _rounded(cost: int) -> int:
    """Up to a power of two: rows of about one length have one size."""
    return 1 << max(cost - 1, 0).bit_length()


_LONGEST_PATIENCE = 100_000


@dataclass
class _Known:
    """What is known of the size that fits.

    Attributes:
        patience: batches that have to go well at the limit before more is tried.
        limit: the elements that a micro-batch may have; None before any failure.
        calm: batches that went well at the limit since it was set.
        is_due: the next micro-batch tries twice the limit.
        has_grown: more than the limit of a failure was found to fit. A later failure doubles the patience.
    """

    patience: int = 100
    limit: int | None = None
    calm: int = 0
    is_due: bool = False
    has_grown: bool = False
