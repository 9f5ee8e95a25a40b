"""What every ``TorchDispatchMode`` of this package has to do with the arguments that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def with_tensors(args: Sequence[Any]) -> Sequence[Any]:
    """The arguments of an operator, the first a tensor if none is.

    torch gives a dispatch mode the bare number where a tensor was made of one (the divisor that the graph of ``loss / 12`` has
    saved), which most operators refuse (read in torch 2.13).

    Example:
        >>> with_tensors((12,))
        (tensor(12),)
        >>> with_tensors((torch.ones(1), 12))
        (tensor([1.]), 12)
    """
    is_number = bool(args) and isinstance(args[0], (bool, int, float, complex))
    if not is_number or any(isinstance(value, Tensor) for value in args):
        return args
    return torch.tensor(args[0], dtype=torch.float64 if isinstance(args[0], float) else None), *args[1:]
