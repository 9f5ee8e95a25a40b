"""A module and its batches in a wider type than their own, in which rounding shows less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn


@contextmanager
def widened(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Have others of a type in place of parameters and buffers that have a narrower one.

    The parameters themselves stay as they are: with data of another type they would lose the hooks that DDP has at their gradients.
    The user's hooks at their gradients are on the others too.

    Example:
        >>> module = nn.Linear(2, 1)
        >>> with widened(module, torch.float64):
        ...     print(module.weight.dtype)
        torch.float64
        >>> module.weight.dtype
        torch.float32
    """
    wide: dict[int, Tensor] = {}
    before = []
    holders: list[Any] = [held for child in module.modules() for held in (child._parameters, child._buffers)]
    try:
        for held in holders:
            for name, tensor in held.items():
                if tensor is None or not is_narrow(tensor, dtype):
                    continue
                if id(tensor) not in wide:
                    copied = tensor.detach().to(dtype)
                    if isinstance(tensor, nn.Parameter):
                        copied = nn.Parameter(copied, tensor.requires_grad)
                        for hook in (tensor._backward_hooks or {}).values():
                            copied.register_hook(hook)  # type: ignore[no-untyped-call]
                    wide[id(tensor)] = copied
                before.append((held, name, tensor))
                held[name] = wide[id(tensor)]
        yield
    finally:
        for held, name, tensor in before:
            held[name] = tensor


def widened_batch(batch: Any, dtype: torch.dtype) -> Any:
    """A batch with its tensors of narrower types in that type."""
    return apply_to_collection(batch, Tensor, lambda tensor: tensor.to(dtype) if is_narrow(tensor, dtype) else tensor)


def is_narrow(tensor: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a tensor has a floating-point type of fewer bytes than ``dtype``, float32 or float64; it may be one of eight bits."""
    return tensor.is_floating_point() and tensor.dtype.itemsize < dtype.itemsize
