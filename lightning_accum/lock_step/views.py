"""What each of several micro-batches that take turns sees of its module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Views:
    """What each of several micro-batches that take turns sees of its module, as if it were alone with it.

    That is ``.grad`` of the parameters, ``requires_grad`` as it has set it, attributes that it has written, and the default dtype.
    What the last of them leaves in ``.grad`` is what all of them find there; what the others leave is gone with their turn.

    Args:
        parameters: of the module and its optimizers.
        module: the module. In ``_param_requires_grad_state`` Lightning's ``toggle_optimizer`` keeps what it has changed.
        number: of micro-batches.
    """

    def __init__(self, parameters: list[nn.Parameter], module: nn.Module, number: int) -> None:
        self._parameters, self._attributes, self._last = parameters, vars(module), number - 1
        self._gradients: list[Tensor | None] = []
        self._requires_grad = [self._flags()] * number
        self._owners = [vars(child) for child in module.modules()]
        self._found: list[dict[str, Any]] = []
        self._written: list[list[dict[str, Any]]] = [[{} for _ in self._owners] for _ in range(number)]
        self._dtype = torch.get_default_dtype()
        self._dtypes = [self._dtype] * number

    def turn(self, before: int | None, now: int | None) -> None:
        """Micro-batch ``before`` stops, ``now`` goes on; None is nobody."""
        if before is not None:
            self._requires_grad[before] = self._flags()
            self._dtypes[before] = torch.get_default_dtype()
            for owner, found, written in zip(self._owners, self._found, self._written[before], strict=True):
                changed = {k: v for k, v in owner.items() if k not in _REGISTERED and (k not in found or found[k] is not v)}
                written.update(changed)
            if before != self._last:
                for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                    parameter.grad = gradient
        if now is not None:
            flags, toggled = self._requires_grad[now]
            for parameter, flag in zip(self._parameters, flags, strict=True):
                parameter.requires_grad_(flag)
            if toggled is not None:
                self._attributes[_TOGGLED] = toggled
            self._gradients = [parameter.grad for parameter in self._parameters]
            for owner, written in zip(self._owners, self._written[now], strict=True):
                owner.update(written)
            self._found = [dict(owner) for owner in self._owners]
        torch.set_default_dtype(self._dtype if now is None else self._dtypes[now])

    def _flags(self) -> tuple[list[bool], Any]:
        return [parameter.requires_grad for parameter in self._parameters], self._attributes.get(_TOGGLED)


_TOGGLED = "_param_requires_grad_state"
_REGISTERED = {"_parameters", "_buffers", "_modules", "_current_fx_name", "log"}
