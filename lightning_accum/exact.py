"""How exact numbers are: the widest floating-point type that a device has, and what rounding makes of numbers in a type."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_dtype(device: torch.device) -> torch.dtype:
    """float64; Apple's MPS has none and raises a TypeError where it is asked for.

    Example:
        >>> exact_dtype(torch.device("cpu")), exact_dtype(torch.device("mps"))
        (torch.float64, torch.float32)
    """
    return torch.float32 if device.type == "mps" else torch.float64


def exact(tensor: Tensor) -> Tensor:
    """The values of a tensor in that type, where they are, and without their graph."""
    return tensor.detach().to(exact_dtype(tensor.device))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, in a type that the device has."""
    return tensor.to(device, exact_dtype(device) if tensor.dtype == torch.float64 else tensor.dtype)


def rounding(eps: float) -> float:
    """How far two numbers may be apart, relative to their size, that were computed in another order in a type with that ``eps``."""
    return float(eps**0.6)


def rounding_of_gradients(eps: float) -> float:
    """How far two gradients may be.

    In single precision it is 1 %: where rounding changes the sign of one activation in a million, ReLU has another slope there, and
    a gradient of the size of the square root of a million is off by 1. In double precision that hardly ever happens, and half
    precision has more of a tolerance.
    """
    return max(rounding(eps), 1e-2 if eps >= torch.finfo(torch.float32).eps else 0.0)
