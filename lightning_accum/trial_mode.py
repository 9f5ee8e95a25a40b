"""The mode in which a module is tried: random numbers and writes to parameters are watched, and its type may be wider."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_accum.randomness import NoiseOfRows
from lightning_accum.splitting.rows import is_whole


class TrialMode(NoiseOfRows):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """Inside, random numbers belong to rows, and parameters are copied before a write.

    A momentum encoder writes into its parameters, perhaps through ``.data``, which leaves their version counters unchanged.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], eps: float = torch.finfo(torch.float64).eps) -> None:
        super().__init__()
        self.eps = eps  # machine epsilon of the narrowest type that was used
        self.has_waited = False  # whether ranks communicated
        self.watch(parameters)

    def watch(self, parameters: Iterable[nn.Parameter], may_be_set: bool = False) -> None:
        """Copy these parameters from now on, and no others. If they ``may_be_set``, undo ``parameter.data = ...``, too."""
        self._parameters: dict[int, list[Tensor]] = {}
        self.written: dict[Tensor, Tensor] = {}  # the parameters that were written to, and their values before
        self._data: list[tuple[nn.Parameter, Tensor]] = []
        self._are_trained = [(parameter, parameter.requires_grad) for parameter in parameters]
        for parameter, _ in self._are_trained:
            if parameter.device.type != "meta":
                self._data += [(parameter, parameter.data)] * may_be_set
                self._parameters.setdefault(_storage_of(parameter), []).append(parameter)

    def restore(self, rows: Sequence[int] | None = None, total: int = 0) -> None:
        """Restore the parameters that were written to or frozen, and draw the same random numbers again."""
        self.restart(rows, total)
        with torch.no_grad():
            for own, is_trained in self._are_trained:
                if own.requires_grad != is_trained:
                    own.requires_grad_(is_trained)
            for own, data in self._data:
                if own.data_ptr() != data.data_ptr():
                    own.data = data
            for parameter, value in self.written.items():
                parameter.data.copy_(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_waited |= "c10d" in func.namespace
        if hasattr(func, "_schema") and func._schema.is_mutable:
            self._keep_written(func._schema.arguments, args, kwargs or {})
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and not is_whole(tensor) and tensor.dtype.itemsize > 1:
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
                        self.written[parameter] = parameter.detach().clone()


def _storage_of(tensor: Tensor) -> int:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.untyped_storage().data_ptr()


# --- a module and its batches in a wider type than their own, in which rounding shows less ------------------------------------


@contextmanager
def widened(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Replace parameters and buffers of narrower types by copies in this type.

    The parameters themselves do not change: with data of another type they would lose DDP's hooks on their gradients. The user's
    hooks on gradients are copied.
    """
    parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]  # whose parameters are fixed
    holders: list[Any] = [held for part in parts for held in (part._parameters, part._buffers)]
    narrow = [(held, {n: own for n, own in held.items() if own is not None and is_narrow(own, dtype)}) for held in holders]
    wide: dict[Tensor, Tensor] = {}
    try:
        for held, before in narrow:
            for tensor in before.values():
                if tensor not in wide:
                    wide[tensor] = _in_type(tensor, dtype)
            held.update({name: wide[tensor] for name, tensor in before.items()})
        yield
    finally:
        for held, before in narrow:
            held.update(before)


def _in_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    wide = tensor.detach().to(dtype.to_complex() if tensor.is_complex() else dtype)
    if isinstance(tensor, nn.Parameter):
        wide = nn.Parameter(wide, tensor.requires_grad)
        for hook in (tensor._backward_hooks or {}).values():
            wide.register_hook(hook)  # type: ignore[no-untyped-call]
    return wide


def widened_batch(batch: Any, dtype: torch.dtype) -> Any:
    """A batch whose tensors of narrower types are converted to this type."""
    return apply_to_collection(batch, Tensor, lambda own: _in_type(own, dtype) if is_narrow(own, dtype) else own)


def is_narrow(tensor: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the numbers of a tensor, which may be complex, have fewer bytes than ``dtype``, float32 or float64."""
    return not is_whole(tensor) and tensor.dtype.to_real().itemsize < dtype.itemsize
