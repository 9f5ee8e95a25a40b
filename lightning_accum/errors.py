"""The errors of the package, with one base class, and lack of memory. Each is constructed from a message, so it can be pickled."""

from __future__ import annotations

import torch


class AccumulationError(Exception):
    """The base class of all errors of this package. Each is also a built-in type of error, such as ValueError."""


class DoesNotAddUpError(AccumulationError, ValueError):
    """The weighted losses or gradients of the parts of a batch do not sum to the loss or gradient of the batch."""


class UnreadableLossError(AccumulationError, ValueError):
    """The graph of the loss shows no denominator."""


class UnsplittableBatchError(AccumulationError, ValueError):
    """The package cannot tell which parts of a batch are its rows."""

    @classmethod
    def because(cls, found: str) -> UnsplittableBatchError:
        """The error with its fix."""
        return cls(
            f"The batch cannot be split into micro-batches: {found}. Say how to split it: GradientAccumulation(split=...) takes a"
            " function split(batch, size) that returns the micro-batches as a list."
        )


class RowWiseError(AccumulationError, RuntimeError):
    """A submodule cannot run in micro-batches."""

    @classmethod
    def of(cls, name: str, problem: str) -> RowWiseError:
        """The error of the submodule with this name."""
        return cls(f"row_wise={name!r}: {problem}")


class SeamError(AccumulationError, RuntimeError):
    """Another library behaves differently from the versions for which this package was written."""


# --- without a public name of their own ---------------------------------------------------------------------------------


class ArgumentError(AccumulationError, ValueError):
    """An argument, or the return value of a user's function, has a wrong value."""


class WrongTypeError(AccumulationError, TypeError):
    """An argument, or the return value of a user's function, has a wrong type."""


class UsageError(AccumulationError, RuntimeError):
    """The program does something that windows do not allow."""


class NotFiniteError(AccumulationError, FloatingPointError):
    """A loss or a gradient is infinite or NaN."""


class MissingEntryError(AccumulationError, KeyError):
    """A batch has no entry of that name."""


class NothingSmallerError(AccumulationError, torch.OutOfMemoryError):
    """One sample does not fit into memory."""


# --- memory ------------------------------------------------------------------------------------------------------------

_OF_MEMORY = (
    # torch's allocators: c10/core/impl/alloc_cpu.cpp, c10/cuda/CUDACachingAllocator.cpp and its siblings
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


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that memory ran out."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(message in str(error) for message in _OF_MEMORY):
            return True
        error = error.__cause__
    return False
