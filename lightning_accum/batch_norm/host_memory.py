"""What a graph has saved for its backward waits in the memory of the host, and comes back when it is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_SMALL = 2**12
"""Bytes below which a tensor is not worth two copies."""


class HostMemory:
    """Moves saved tensors to the host.

    As :func:`torch.autograd.graph.save_on_cpu`, but parameters stay where they are, and so do tensors of up to 4 KiB. From CUDA the
    host's memory is pinned and nobody waits for a copy: all of them are in the order of the stream.

    Args:
        device: where tensors are used. On the CPU there is nowhere to move them, so :meth:`hooks` are to be left out.

    Attributes:
        moved: bytes that were moved away so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.moved = 0
        self._is_pinned = device.type == "cuda"

    def hooks(self) -> saved_tensors_hooks:
        """A context in which what is saved is moved."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Any:
        """Move a tensor away. Returns what :meth:`unpack` needs."""
        if not self.is_movable(tensor):
            return tensor
        self.moved += tensor.numel() * tensor.element_size()
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._is_pinned, requires_grad=False)
        with torch.no_grad():
            host.copy_(tensor, non_blocking=self._is_pinned)
        return tensor.device, host

    def unpack(self, packed: Any) -> Tensor:
        """Bring a tensor back."""
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        back: Tensor = host.to(device, non_blocking=self._is_pinned)
        return back

    def is_movable(self, tensor: Tensor) -> bool:
        """Whether it is worth it."""
        if tensor.layout is not torch.strided or tensor.device.type == "cpu" or type(tensor) not in (Tensor, nn.Parameter):
            return False
        base = tensor if tensor._base is None else tensor._base
        return not isinstance(base, nn.Parameter) and tensor.untyped_storage().nbytes() > _SMALL
