"""The widest floating-point type that a device has, in which sums, counts and differences are computed."""

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
