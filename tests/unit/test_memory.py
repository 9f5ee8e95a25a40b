"""Sizes of micro-batches are found by running out of memory, which is told from other errors; twice that is tried once an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Limit, Toy, fit, labelled
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation


def fails_above(rows: Callable[[], int], error: Callable[[], Exception]) -> Toy:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(Limit.apply(net(batch[0]), len(batch[0]), rows(), "forward", error), batch[1])

    return Toy(loss)


AUTO = {"micro_batch": "auto", "check": False}


def caused() -> Exception:
    error = ValueError("the step failed")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    return error


LACK_OF_MEMORY: list[Callable[[], Exception]] = [
    lambda: RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"),
    lambda: RuntimeError("MPS backend out of memory (MPS allocated: 17.21 GB, other allocations: 1 MB, max allowed: 18.13 GB)"),
    lambda: RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    lambda: RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    lambda: RuntimeError("FIND was unable to find an engine to execute this computation"),
    MemoryError,
    caused,
]


@pytest.mark.parametrize("error", LACK_OF_MEMORY)
def test_a_lack_of_memory_of_any_device_or_library_halves_the_micro_batch(error: Callable[[], Exception]) -> None:
    run = fit(fails_above(lambda: 4, error), labelled(8, 8), GradientAccumulation(**AUTO))
    assert (run.global_step, run.callback_metrics["window/micro_batch_size"]) == (2, 4)


def shapes_differ() -> Exception:
    return RuntimeError("mat1 and mat2 shapes cannot be multiplied")


@pytest.mark.parametrize("error", [shapes_differ, lambda: RuntimeError("CUDA error: device-side assert triggered"), KeyError])
def test_other_errors_are_raised(error: Callable[[], Exception]) -> None:
    with pytest.raises(type(error())):
        fit(fails_above(lambda: 4, error), labelled(8, 8), GradientAccumulation(**AUTO))


def test_sizes_grow_again_when_memory_comes_back() -> None:
    most = [4]
    module = fails_above(lambda: most[0], lambda: torch.OutOfMemoryError("CUDA out of memory"))
    module.on_train_epoch_end = lambda: most.__setitem__(0, 8)
    run = fit(module, labelled(8, 8), GradientAccumulation(**AUTO), max_epochs=2)
    assert run.callback_metrics["window/micro_batch_size"] == 8
