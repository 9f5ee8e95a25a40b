"""A second memory for the CPU, with copies as late and as careless as a device may make them; put in place privately, only here."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_accum.whole import offload


class OtherMemory:
    """Copies between the CPU, as a device, and a host out of sight of :class:`Alive`. It replaces ``copy_stream_for`` is.

    A copy is made when somebody waits for it, or for a later one, and not before; and of what is in the memory by then.
    """

    def __init__(self) -> None:
        self.held = self.most = self.out = self.back = 0
        self.faults: list[str] = []
        self._waiting: deque[tuple[int, Any, Any, bool]] = deque()
        self._copies = 0
        self._hosts: set[int] = set()

    def __call__(self, device: torch.device) -> OtherMemory | None:
        return self if device.type == "cpu" else None

    def host(self, size: int) -> Tensor:  # memory that is counted
        with _disable_current_modes():
            bytes_ = torch.zeros(size, dtype=torch.uint8)
        self.held += size
        self.most = max(self.most, self.held)
        self._hosts.add(key := bytes_.data_ptr())
        weakref.finalize(bytes_.untyped_storage(), self._free, key, size)
        return bytes_

    def _free(self, key: int, size: int) -> None:
        self.held -= size
        self._hosts.discard(key)

    def copy(self, target: Tensor, source: Tensor) -> int:  # make a note of a copy
        is_out = target.data_ptr() in self._hosts
        self.out, self.back = self.out + is_out * target.numel(), self.back + (not is_out) * target.numel()
        # nobody but the caller keeps what a device reads from or writes to; the allocator of pinned memory keeps the host's
        on_device = weakref.ref((source if is_out else target).untyped_storage())
        self._copies += 1
        self._waiting.append((self._copies, on_device, (target if is_out else source).untyped_storage(), is_out))
        return self._copies

    def wait(self, copy: int) -> None:  # make it, and those before it
        while self._waiting and self._waiting[0][0] <= copy:
            _, on_device, host, is_out = self._waiting.popleft()
            if (device := on_device()) is None:
                self.faults.append("memory of the device was given away before its copy was made")
            elif is_out:
                _bytes(host)[:] = _bytes(device)
            else:
                _bytes(device)[:] = _bytes(host)

    @property
    def is_quiet(self) -> bool:  # nothing is on its way, nothing was lost, and the host is empty
        return not self._waiting and not self.faults and self.held == 0


def _bytes(storage: torch.UntypedStorage) -> Any:  # without an operator, which :class:`Alive` would see
    return np.frombuffer((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()), dtype=np.uint8)


@contextmanager
def other_memory(smallest: int | None = None) -> Iterator[OtherMemory]:
    """The CPU is a device that has a host, to which tensors of more than so many bytes (None: as on a GPU) are moved."""
    own, host = (offload.copy_stream_for, offload._SMALL), OtherMemory()
    offload.copy_stream_for, offload._SMALL = host, own[1] if smallest is None else smallest
    try:
        yield host
    finally:
        offload.copy_stream_for, offload._SMALL = own
    gc.collect()
    assert host.is_quiet
