"""Runs a whole batch once, while tensors that autograd saves for the backward wait in host memory.

Nothing is split, so any module takes the step of its batch. Storages are moved, each once for all of its saved views: a few
leave while the forward continues, and in the backward a few are prefetched in reverse order. Parameters, buffers, the batch, small
tensors, and tensors of other devices, layouts and subclasses stay.

With hooks for saved tensors, torch does not detect later changes. So this module does: an in-place change of a tensor that stayed,
or whose copy was not finished, is an error, as without hooks. After the copy a change is harmless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_accum.errors import UsageError

_SMALL = 2**12  # largest storage in bytes that is not worth two copies
_LEAVING = 2  # copies to the host in flight during the forward
_AHEAD = 2  # storages prefetched in the backward
_FARTHEST = 32  # how many storages to search for the next prefetch, past freed ones


class CopyStream:
    """Copies between a device and the host on a separate stream, in parallel with computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)  # CUDA's, or another with the same stream API
        self._stream = self._module.Stream(device=device)

    def host(self, size: int) -> Tensor:
        """Pinned host memory, since a copy to pageable memory is synchronous."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Copy bytes after all computation so far. Returns the argument of :meth:`wait`.

        The caller keeps both tensors until then, so allocators need not know of the stream.
        """
        computing = self._module.current_stream(self._device)
        self._stream.wait_stream(computing)
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return computing, self._stream.record_event()

    def wait(self, copy: Any) -> None:
        """Make later computation on both streams wait for a copy. The host does not wait."""
        began_on, done = copy
        began_on.wait_event(done)
        now = self._module.current_stream(self._device)
        if now != began_on:
            now.wait_event(done)


def copy_stream_for(device: torch.device) -> CopyStream | None:
    """The copies between a device and the host; None if the device has none."""
    if device.type in ("cpu", "mps", "meta") or not hasattr(torch.get_device_module(device), "Stream"):
        return None
    return CopyStream(device)


def offload_in_words(device: torch.device) -> str:
    """The fate of tensors that autograd saves, for the start line."""
    if copy_stream_for(device) is None:
        return f"nothing offloaded on a {device.type.upper()}"
    return "activations on the host"


class Offload:
    """Moves tensors that autograd saves to the host and back. On the CPU nothing is moved and no hook is set."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, copy_stream_for(device)
        self._lock = RLock()  # each device has its own thread in a backward
        self._staying: frozenset[int] = frozenset()
        self._saved: dict[int, ReferenceType[_Stored]] = {}
        self._order: list[ReferenceType[_Stored]] = []
        self._leaving: deque[ReferenceType[_Stored]] = deque()

    @contextmanager
    def engaged(self, staying: Iterable[Any]) -> Iterator[None]:
        """Inside, tensors that autograd saves are moved; they may be used after it.

        ``staying`` are tensors that stay in memory anyway: parameters, buffers, the batch.
        """
        if self._stream is None:
            yield
            return
        self._staying = frozenset(value.untyped_storage()._cdata for value in staying if _is_plain(value))
        try:
            with saved_tensors_hooks(self._pack, lambda unpack: unpack()):
                yield
        finally:
            with self._lock:
                self._free_oldest(keep=0)
                self._saved, self._order, self._staying = {}, [], frozenset()

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        if not self._is_moved(tensor):
            # not the output itself, which would create a reference cycle
            return partial(_unchanged, tensor if tensor.is_leaf else tensor.detach(), tensor._version)
        key = tensor.untyped_storage()._cdata
        with self._lock:
            stored = self._saved[key]() if key in self._saved else None
            if stored is None or not stored.holds(tensor):
                assert self._stream is not None
                stored = _Stored(tensor.detach(), self._stream, self._order)
                self._saved[key] = ref(stored)
                self._order.append(ref(stored))
                self._leaving.append(ref(stored))
                self._free_oldest(keep=_LEAVING)
        return partial(self._unpack, stored, tensor.dtype, *_place_of(tensor))

    def _is_moved(self, tensor: Tensor) -> bool:
        if not _is_plain(tensor) or tensor.device != self._device:
            return False
        base, storage = tensor if tensor._base is None else tensor._base, tensor.untyped_storage()
        return not isinstance(base, nn.Parameter) and storage.nbytes() > _SMALL and storage._cdata not in self._staying

    def _free_oldest(self, keep: int) -> None:
        """Free the memory of the oldest copies, once they are on the host."""
        while len(self._leaving) > keep:
            if (stored := self._leaving.popleft()()) is not None:
                stored.free()

    def _unpack(self, stored: _Stored, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        with self._lock, torch.no_grad():
            found = stored.take()
            stored.prefetch()
            return _view(found, dtype, offset, size, stride)


class _Stored:
    """One saved storage: on its way to the host, there, or back on the device."""

    def __init__(self, tensor: Tensor, stream: CopyStream, order: list[ReferenceType[_Stored]]) -> None:
        self._stream, self._device, self._version = stream, tensor.device, tensor._version
        self._order, self._index = order, len(order)
        self._here: Tensor | None = tensor
        self._has_left = self._is_changed = False
        self._storage, self._place = ref(tensor.untyped_storage()), _place_of(tensor)
        self._host = stream.host(size := tensor.untyped_storage().nbytes())
        self._copy: Any = stream.copy(self._host, _view(tensor, torch.uint8, 0, (size,), (1,)))

    def holds(self, tensor: Tensor) -> bool:
        """The tensor is a view of the storage, unchanged. Parts of ``unsafe_chunk`` count their versions separately."""
        is_same = self._storage() is tensor.untyped_storage() and self._version == tensor._version
        return is_same and (not self._version or self._place == _place_of(tensor))

    def free(self) -> None:
        """Finish the copy to the host: the device memory is free for later computation, and a change does no harm."""
        assert self._here is not None
        self._finish_copy()
        self._is_changed = self._here._version != self._version  # it may be in the copy
        self._here, self._has_left = None, True

    def fetch(self) -> None:
        """Begin to copy it back, if only the host has it."""
        if self._here is None:
            self._here = torch.empty_like(self._host, device=self._device, pin_memory=False)
            self._copy = self._stream.copy(self._here, self._host)

    def prefetch(self) -> None:
        """Begin to copy back storages saved before it, the last first."""
        before = [one() for one in self._order[max(0, self._index - _FARTHEST) : self._index]]
        for stored in [one for one in before if one is not None][: -_AHEAD - 1 : -1]:
            stored.fetch()

    def take(self) -> Tensor:
        """A tensor on the device with these bytes. An error if it was changed in place before they were on the host."""
        if self._here is not None and not self._has_left:
            return _unchanged(self._here, self._version)
        if self._is_changed:
            raise UsageError(_CHANGED)
        self.fetch()
        self._finish_copy()
        assert self._here is not None
        return self._here

    def _finish_copy(self) -> None:
        if self._copy is not None:
            self._stream.wait(self._copy)
            self._copy = None

    def __del__(self) -> None:
        # memory of an unfinished copy must not be reused
        if getattr(self, "_copy", None) is not None:
            self._finish_copy()


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    """Return a tensor that stayed, or whose copy is not finished, if it was not changed since."""
    if tensor._version != version:
        raise UsageError(f"{_CHANGED} It is a {tensor.type()} of shape {list(tensor.shape)}.")
    return tensor


_CHANGED = "one of the variables needed for gradient computation has been modified by an inplace operation: change a copy."


def _is_plain(value: Any) -> bool:
    """Whether its bytes define it: a strided tensor with its own storage, not a subclass."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_nested or value.is_conj() or value.is_neg() or value.is_quantized)
    )


def _place_of(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return int(tensor.storage_offset()), tensor.size(), tensor.stride()


def _view(tensor: Tensor, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """A view of a tensor's storage."""
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage(), offset, size, stride)
