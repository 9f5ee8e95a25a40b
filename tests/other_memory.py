"""A second memory for the CPU, put in place privately, only here."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_accum.whole import offload


class OtherMemory:
    """The host of the CPU, as a device, out of sight of :class:`Alive`. It replaces ``host_memory_of`` and its result."""

    def __init__(self) -> None:
        self.held = self.most = self.out = self.back = 0

    def __call__(self, device: torch.device) -> OtherMemory | None:
        return self if device.type == "cpu" else None

    def stream(self) -> int:
        return 0

    def store(self, source: Tensor) -> Tensor:
        with _disable_current_modes():
            stored = source.clone()
        size = stored.numel()
        self.out, self.held = self.out + size, self.held + size
        self.most = max(self.most, self.held)
        weakref.finalize(stored.untyped_storage(), self._free, size)
        return stored

    def _free(self, size: int) -> None:
        self.held -= size

    def fetch(self, stored: Tensor) -> Tensor:
        self.back += stored.numel()
        return stored.clone()


@contextmanager
def other_memory(smallest: int | None = None) -> Iterator[OtherMemory]:
    """The CPU is a device that has a host, to which tensors of more than so many bytes (None: as on a GPU) are moved."""
    own, host = (offload.host_memory_of, offload._SMALL), OtherMemory()
    offload.host_memory_of, offload._SMALL = host, own[1] if smallest is None else smallest
    try:
        yield host
    finally:
        offload.host_memory_of, offload._SMALL = own
    gc.collect()
    assert host.held == 0
