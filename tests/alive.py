"""Counts what a device would hold, on a CPU: all tensors that are alive, or those that autograd has saved."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):  # counts the bytes of all tensors that are alive, from when an operator has made them
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
    """Within this context, the bytes of the storages that are held for backwards to come, each once, and their peak."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._left_out: set[int] = set()
        self._holders: Counter[int] = Counter()
        super().__init__(lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor)

    def __enter__(self) -> SavedBytes:
        super().__enter__()
        return self

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count what shares its storage with these, which must live as long as the context."""
        self._left_out |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def restart(self) -> None:  # forget the peak
        self.peak = self.now

    def change(self, tensor: Tensor, holders: int) -> None:  # a tensor is saved (1), or dropped (-1)
        storage = tensor.untyped_storage()
        before = self._holders[storage._cdata]
        self._holders[storage._cdata] += holders
        if storage._cdata not in self._left_out and before * self._holders[storage._cdata] == 0:
            self.now += holders * storage.nbytes()
            self.peak = max(self.peak, self.now)


class _Saved:  # lives as long as the graph needs the tensor: up to the backward, or to the end of what never has one
    def __init__(self, tensor: Tensor, counter: SavedBytes) -> None:
        self.tensor = tensor.detach()  # with its graph, an output that its own operation saves would hold itself
        self._counter = counter
        counter.change(self.tensor, 1)

    def __del__(self) -> None:
        self._counter.change(self.tensor, -1)
