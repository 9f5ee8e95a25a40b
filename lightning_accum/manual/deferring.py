"""Steps that a module calls itself, and that may be put off to the end of a window."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, TypeAlias

from torch.optim import Optimizer

Closure: TypeAlias = Callable[[], Any]
OnStep: TypeAlias = Callable[[Optimizer, Callable[..., Any], "Closure | None"], Any]
"""Called instead of ``step``: takes the optimizer, its own ``step`` (which takes a closure or nothing), and the closure."""


def intercept_steps(optimizer: Optimizer, on_step: OnStep) -> Callable[[], None]:
    """Have ``optimizer.step`` call ``on_step``.

    Returns:
        A function that makes it as it was.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
        >>> undo = intercept_steps(optimizer, lambda optimizer, step, closure: "later")
        >>> optimizer.step()
        'later'
        >>> undo(); optimizer.step()
    """
    own, original = vars(optimizer).get("step"), optimizer.step  # a scheduler has put its own there, to count

    @wraps(original)  # with the mark that a scheduler looks for
    def step(self: Optimizer, closure: Closure | None = None, **kwargs: Any) -> Any:
        def own_step(closure: Closure | None = None) -> Any:
            return original(**kwargs) if closure is None else original(closure, **kwargs)

        return on_step(optimizer, own_step, closure)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # a scheduler made later wants a method

    def undo() -> None:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]

    return undo


def defer_scheduler(scheduler: Any, defers_steps: Callable[[], bool]) -> Callable[[], None]:
    """Have ``scheduler.step`` do nothing while ``defers_steps()`` is true.

    Returns:
        A function that makes it as it was.
    """
    original = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        if not defers_steps():
            original.step(self, *args, **kwargs)

    # by its class, since all attributes of a scheduler go into checkpoints
    names = {"step": step, "__module__": original.__module__, "__doc__": original.__doc__}
    scheduler.__class__ = type(original.__name__, (original,), names)

    def undo() -> None:
        scheduler.__class__ = original

    return undo
