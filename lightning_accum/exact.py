"""Floating-point precision: the widest type of a device, and the rounding error of a type."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point type of a device: float64, or float32 on Apple's MPS."""
    return torch.float32 if device.type == "mps" else torch.float64


def exact(tensor: Tensor) -> Tensor:
    """The detached values of a tensor in the widest type of its device."""
    return tensor.detach().to(exact_dtype(tensor.device))


def as_real(tensor: Tensor) -> Tensor:
    """The detached tensor; a complex one as pairs of numbers."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()


def is_on_host(tensor: Tensor) -> bool:
    """Whether its values are read without waiting for a device."""
    return tensor.device.type == "cpu"


def is_dense(tensor: Tensor) -> bool:
    """Whether it is neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def on_host(value: float | Tensor) -> float | Tensor:
    """A float if the tensor is on the host; a tensor of a device stays there, detached."""
    if not isinstance(value, Tensor):
        return value
    return value.item() if is_on_host(value) else value.detach()


def tensor_of(value: float | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on the device, without a detour over the host, and without waiting for the device."""
    return value.to(device, dtype) if isinstance(value, Tensor) else torch.full((), value, device=device, dtype=dtype)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, in a type that the device supports."""
    return tensor.to(device, exact_dtype(device) if tensor.dtype == torch.float64 else tensor.dtype)


def rounding(eps: float) -> float:
    """The relative error between two orders of the same computation, in a type with this ``eps``."""
    return float(eps**0.6)


def rounding_of_gradients(eps: float) -> float:
    """The relative error between two gradients, as :func:`rounding`.

    In single precision it is 1 %: if rounding changes the sign of one activation in a million, ReLU has another slope there, and a
    gradient of the size of the square root of a million is off by 1. In double precision this is rare, and half precision has a
    larger tolerance.
    """
    return max(rounding(eps), 1e-2 if eps >= torch.finfo(torch.float32).eps else 0.0)
