"""Counts what a device would hold, on a CPU: all tensors that are alive, and apart from them what waits on a host."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_accum.batch_norm.host_memory import HostMemory


class Alive(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, from when an operator has made them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return output

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def forget(_: Any) -> None:
            self.bytes -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, forget)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


class Elsewhere(HostMemory):
    """A host for the CPU, out of sight of :class:`Alive`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.held = self.most = 0

    def is_movable(self, tensor: Tensor) -> bool:
        """As if the tensor were on a device."""
        base = tensor if tensor._base is None else tensor._base
        return type(tensor) is Tensor and not isinstance(base, nn.Parameter) and tensor.untyped_storage().nbytes() > 2**12

    def pack(self, tensor: Tensor) -> Any:
        """Copy it into an array."""
        return _Packed(self, tensor.detach().numpy().copy()) if self.is_movable(tensor) else tensor

    def unpack(self, packed: Any) -> Tensor:
        """Copy it back."""
        return packed if isinstance(packed, Tensor) else torch.from_numpy(packed.array).clone()


class _Packed:
    def __init__(self, host: Elsewhere, array: Any) -> None:
        self.array, self._host = array, host
        host.held += array.nbytes
        host.most = max(host.most, host.held)

    def __del__(self) -> None:
        self._host.held -= self.array.nbytes
