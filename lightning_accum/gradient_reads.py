"""Whether hooks look at gradients inside of a window, where they are not those of its full batch yet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class GradientReads(TorchFunctionMode):
    """In here hooks that get or set the gradient of a tensor are noticed.

    Args:
        hooks: their code, their name and whose they are.
        warn: takes a warning to be seen once.

    Example:
        >>> import torch
        >>> weight = torch.ones(2, requires_grad=True)
        >>> def hook(is_due):
        ...     return weight.grad if is_due else None
        >>> with GradientReads({hook.__code__: "on_after_backward of Net"}, print):
        ...     hook(is_due=False)
        ...     hook(is_due=True)  # doctest: +ELLIPSIS
        on_after_backward of Net looks at gradients. ...
    """

    def __init__(self, hooks: Mapping[CodeType, str], warn: Callable[[str], None]) -> None:
        super().__init__()
        self._left = dict(hooks)
        self._warn = warn

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._left and getattr(func, "__self__", None) is _GRADIENT:
            self._look_who_asks()
        return func(*args, **(kwargs or {}))

    def _look_who_asks(self) -> None:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code not in self._left:
            # what runs in the middle of a backward is no part of the hook that called it
            frame = None if frame.f_code.co_name == "_engine_run_backward" else frame.f_back  # type: ignore[assignment]
        if frame is not None:
            self._warn(
                f"{self._left.pop(frame.f_code)} looks at gradients. It runs after every micro-batch, on what"
                " the window has accumulated so far, before that is normalised: what it changes or measures is not what it would"
                " in the full batch. Do it in on_before_optimizer_step, which sees the full batch's gradients, once a window."
            )


_GRADIENT: Any = Tensor.grad
"""Its getter and its setter are of this."""
