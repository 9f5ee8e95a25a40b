"""How torch runs a few rows that are tried out: what every ``TorchDispatchMode`` has to do, and nothing compiled."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch


def with_tensors(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments of an operator, the first a tensor where the operator takes one.

    torch gives a dispatch mode the bare number where a tensor was made of one (the divisor that the graph of ``loss / 12`` has
    saved), which most operators refuse (read in torch 2.13).

    Example:
        >>> with_tensors(torch.ops.aten.neg.default, (12,)), with_tensors(torch.ops.aten.arange.default, (12,))
        ((tensor(12),), (12,))
    """
    if not args or not isinstance(args[0], (bool, int, float, complex)):
        return args
    if not isinstance(func._schema.arguments[0].type, torch.TensorType):
        return args
    return torch.tensor(args[0], dtype=torch.float64 if isinstance(args[0], float) else None), *args[1:]


def in_eager_mode() -> AbstractContextManager[Any]:
    """Nothing is compiled in here."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
