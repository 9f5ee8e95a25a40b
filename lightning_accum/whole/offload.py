"""Runs a whole batch once, while tensors that autograd saves for the backward wait in host memory.

Nothing is split, so any module takes the step of its batch. Storages are moved, each once for all of its saved views. The stream of
the device orders the copies among its other work, and the host waits for none. Parameters, buffers, the batch, small tensors, and
tensors of other devices, layouts and subclasses stay.

With hooks for saved tensors, torch does not detect later changes. So this module does: an in-place change of a tensor that stayed
is an error, as without hooks. A change of a tensor that was copied is harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_accum.errors import UsageError

_SMALL = 2**12  # largest storage in bytes that is not worth two copies


class HostMemory:
    """Pinned memory of the host, since copies to pageable memory are synchronous."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)  # CUDA's, or another with the same stream API

    def stream(self) -> Any:
        """The stream on which the next copy is made."""
        return self._module.current_stream(self._device)

    def store(self, source: Tensor) -> Tensor:
        """A copy on the host."""
        source.record_stream(self.stream())  # its memory may be given away before the copy is made
        return torch.empty_like(source, device="cpu", pin_memory=True).copy_(source, non_blocking=True)

    def fetch(self, stored: Tensor) -> Tensor:
        """A copy on the device."""
        return stored.to(self._device, non_blocking=True)


def host_memory_of(device: torch.device) -> HostMemory | None:
    """The host memory of a device; None if the device has none."""
    if device.type in ("cpu", "mps", "meta") or not hasattr(torch.get_device_module(device), "current_stream"):
        return None
    return HostMemory(device)


def offload_in_words(device: torch.device) -> str:
    """The fate of tensors that autograd saves, for the start line."""
    if host_memory_of(device) is None:
        return f"nothing offloaded on a {device.type.upper()}"
    return "activations on the host"


class Offload:
    """Moves tensors that autograd saves to the host and back. On the CPU nothing is moved and no hook is set."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, host_memory_of(device)
        self._staying: frozenset[int] = frozenset()
        self._saved: WeakValueDictionary[Any, _Stored] = WeakValueDictionary()

    @contextmanager
    def engaged(self, staying: Iterable[Any]) -> Iterator[None]:
        """Inside, tensors that autograd saves are moved. A backward after the end of the context still finds them.

        ``staying`` are tensors that stay in memory anyway: parameters, buffers, the batch.
        """
        if self._memory is None:
            yield
            return
        self._staying = frozenset(value.untyped_storage()._cdata for value in staying if _is_plain(value))
        try:
            with saved_tensors_hooks(self._pack, lambda unpack: unpack()):
                yield
        finally:
            self._saved, self._staying = WeakValueDictionary(), frozenset()

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        if not self._is_moved(tensor):
            # not the output itself, which would create a reference cycle
            return partial(_unchanged, tensor if tensor.is_leaf else tensor.detach(), tensor._version)
        assert self._memory is not None
        key = tensor.untyped_storage()._cdata, self._memory.stream()
        stored = self._saved.get(key)
        if stored is None or not stored.holds(tensor):
            stored = self._saved[key] = _Stored(tensor.detach(), self._memory)
        return partial(stored.view, tensor.dtype, *_place_of(tensor))

    def _is_moved(self, tensor: Tensor) -> bool:
        if not _is_plain(tensor) or tensor.device != self._device:
            return False
        base, storage = tensor if tensor._base is None else tensor._base, tensor.untyped_storage()
        return not isinstance(base, nn.Parameter) and storage.nbytes() > _SMALL and storage._cdata not in self._staying


class _Stored:
    """A saved storage on the host, and on the device while the backward uses views of it."""

    def __init__(self, tensor: Tensor, memory: HostMemory) -> None:
        storage = tensor.untyped_storage()
        self._memory, self._version = memory, tensor._version
        self._storage, self._place = ref(storage), _place_of(tensor)
        self._host = memory.store(_view(storage, torch.uint8, 0, (storage.nbytes(),), (1,)))
        self._fetched: ReferenceType[torch.UntypedStorage] | None = None

    def holds(self, tensor: Tensor) -> bool:
        """The tensor is a view of the storage, unchanged. Parts of ``unsafe_chunk`` count their versions separately."""
        is_same = self._storage() is tensor.untyped_storage() and self._version == tensor._version
        return is_same and (not self._version or self._place == _place_of(tensor))

    @torch.no_grad()
    def view(self, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        """A view of the storage on the device."""
        storage = None if self._fetched is None else self._fetched()
        if storage is None:
            storage = self._memory.fetch(self._host).untyped_storage()
            self._fetched = ref(storage)
        return _view(storage, dtype, offset, size, stride)


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    """Return a tensor that stayed, if it was not changed since."""
    if tensor._version != version:
        raise UsageError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: change a copy. "
            f"It is a {tensor.type()} of shape {list(tensor.shape)}."
        )
    return tensor


def _is_plain(value: Any) -> bool:
    """Whether its bytes define it: a strided tensor with its own storage, not a subclass."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_nested or value.is_conj() or value.is_neg() or value.is_quantized)
    )


def _place_of(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return int(tensor.storage_offset()), tensor.size(), tensor.stride()


def _view(storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
