"""Counts what a device would hold, on a CPU: all tensors that are alive, or those that autograd has saved."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Within this context, the bytes held for backwards to come, and their peak. A tensor that is saved twice counts twice."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        super().__init__(lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor)

    def __enter__(self) -> SavedBytes:
        super().__enter__()
        return self

    def add(self, number: int) -> None:
        self.now += number
        self.peak = max(self.peak, self.now)


class _Saved:
    """Lives as long as the graph needs the tensor: up to the backward, or to the end of what never has one."""

    def __init__(self, tensor: Tensor, counter: SavedBytes) -> None:
        self.tensor = tensor.detach()  # with its graph, an output that its own operation saves would hold itself
        self._counter = counter
        counter.add(tensor.nbytes)

    def __del__(self) -> None:
        self._counter.add(-self.tensor.nbytes)
