"""What is watched while a module is tried out: the random numbers that it draws, what it writes into, its types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_accum.randomness import NoiseOfRows


class TrialMode(NoiseOfRows):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """Random numbers belong to rows, and parameters are copied before something is written into them.

    Args:
        parameters: of the module. A momentum encoder writes into its own, also through ``.data``, which counts no changes.

    Attributes:
        eps: of the coarsest type that anything was computed in, and of one to begin with.
        has_waited: something was sent to other ranks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], eps: float = torch.finfo(torch.float64).eps) -> None:
        super().__init__()
        self.eps = eps
        self.has_waited = False
        self.watch(parameters)

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy these from now on, and no others."""
        self._parameters: dict[int, list[Tensor]] = {}
        self._written: list[tuple[Tensor, Tensor]] = []
        for parameter in parameters:
            if parameter.device.type != "meta":
                self._parameters.setdefault(_storage_of(parameter), []).append(parameter)

    def restore(self, rows: Sequence[int] | None = None, total: int = 0) -> None:
        """Put back what was written into, and draw the same random numbers again."""
        self.restart(rows, total)
        with torch.no_grad():
            for parameter, value in self._written:
                parameter.data.copy_(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_waited |= "c10d" in func.namespace
        if func._schema.is_mutable:
            self._keep_written(func._schema.arguments, args, kwargs or {})
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
                device_eps = 2**-10 if tensor.is_cuda and tensor.dtype == torch.float32 else 0.0  # TF32
                self.eps = max(self.eps, torch.finfo(tensor.dtype).eps, device_eps)
        return result

    def _keep_written(self, arguments: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for place, argument in enumerate(arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                    for parameter in self._parameters.pop(_storage_of(tensor), ()):
                        self._written.append((parameter, parameter.detach().clone()))


def _storage_of(tensor: Tensor) -> int:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.untyped_storage().data_ptr()
