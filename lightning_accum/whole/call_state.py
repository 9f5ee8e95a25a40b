"""What a call depends on beside its arguments, and what it runs in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_accum.errors import RowWiseError
from lightning_accum.whole.layers import Layer


class CallState:
    """What a call depends on beside its arguments, which has to be the same when it runs again."""

    def __init__(self, layer: Layer, inputs: list[Any]) -> None:
        self._modules = list(layer.module.modules())
        self._modes = [inner.training for inner in self._modules]
        self._parameters = [] if layer.is_sharded else self._parameters_now()
        self._are_trained = [parameter.requires_grad for parameter in self._parameters]
        self._tensors = [*self._parameters, *(leaf for leaf in inputs if isinstance(leaf, Tensor))]
        self._versions = _versions(self._tensors)
        self._buffers = [value for inner in self._modules for value in inner._buffers.values() if value is not None]
        self._versions_of_buffers = _versions(self._buffers)
        kinds = dict.fromkeys(("cpu", *(tensor.device.type for tensor in self._tensors)))
        self._autocasts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self._dtype = torch.get_default_dtype()

    def _parameters_now(self) -> list[nn.Parameter]:
        # without the names that torch would give them
        held = (value for inner in self._modules for value in inner._parameters.values() if value is not None)
        return list(dict.fromkeys(held))

    def check_unchanged(self, layer: Layer) -> None:
        """Raise where the call has changed what it depends on."""
        if _versions(self._buffers) != self._versions_of_buffers:
            names = {id(buffer): name for name, buffer in layer.module.named_buffers()}
            changed = next(b for b, before in zip(self._buffers, self._versions_of_buffers, strict=True) if b._version != before)
            raise RowWiseError(
                f"row_wise={layer.name!r}: a call changes the buffer {layer.name}.{names.get(id(changed), '?')}, as if each micro-"
                'batch were a batch. Have another submodule run row-wise, or use micro_batch="offload".'
            )
        if _versions(self._tensors) != self._versions:
            raise RowWiseError(
                f"row_wise={layer.name!r}: a call changes its input or its parameters in place, and would again when it is run"
                " again. Have it change a copy."
            )

    def check_same(self, layer: Layer) -> None:
        """Raise where what the call depends on is not what it was."""
        parameters = [] if layer.is_sharded else self._parameters_now()
        is_same = all(now is before for now, before in zip(parameters, self._parameters, strict=False))
        if not is_same or _versions(self._tensors) != self._versions:
            raise RowWiseError(
                f"row_wise={layer.name!r}: the parameters or inputs of a call were changed or exchanged before its backward,"
                " in which it runs again (an optimizer step in between, functional_call). Run the backward first, or use"
                ' micro_batch="offload".'
            )

    @contextmanager
    def modes_as_before(self) -> Iterator[None]:
        """In here training and evaluation mode, and which parameters are trained, are those of the call."""
        modes = [(inner, inner.training) for inner, mode in zip(self._modules, self._modes, strict=True) if inner.training != mode]
        trained = zip(self._parameters, self._are_trained, strict=True)
        toggled = [parameter for parameter, is_trained in trained if parameter.requires_grad != is_trained]
        for inner, mode in modes:
            inner.training = not mode
        for parameter in toggled:
            parameter.requires_grad_(not parameter.requires_grad)
        try:
            yield
        finally:
            for inner, mode in modes:
                inner.training = mode
            for parameter in toggled:
                parameter.requires_grad_(not parameter.requires_grad)

    def autocast_again(self) -> Callable[[], AbstractContextManager[None]]:
        """Contexts in which autocast and the default type are those of the call."""
        is_off = not any(is_enabled or torch.is_autocast_enabled(kind) for kind, _, is_enabled in self._autocasts)
        return nullcontext if is_off and self._dtype is torch.get_default_dtype() else self._autocast_again

    @contextmanager
    def _autocast_again(self) -> Iterator[None]:
        dtype = torch.get_default_dtype()
        with ExitStack() as stack:
            for kind, of_autocast, is_enabled in self._autocasts:
                if is_enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, of_autocast, is_enabled))
            torch.set_default_dtype(self._dtype)
            try:
                yield
            finally:
                torch.set_default_dtype(dtype)


@contextmanager
def as_with_a_graph() -> Iterator[None]:
    """In here what has no graph computes as with one, attention in padding too, and nothing without a graph is cached for later."""
    fast_path, autocast = torch.backends.mha.get_fastpath_enabled(), torch.is_autocast_cache_enabled()
    parametrizations = parametrize._cache_enabled
    torch.backends.mha.set_fastpath_enabled(False)
    torch.set_autocast_cache_enabled(False)
    parametrize._cache_enabled = 0
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        torch.set_autocast_cache_enabled(autocast)
        parametrize._cache_enabled = parametrizations


def saving_nothing() -> AbstractContextManager[None]:
    """In here others' hooks do not see what is saved for a backward: there will be none."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
