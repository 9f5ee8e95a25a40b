"""Steps that wait: what a module calls itself does nothing until the window ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch.optim import Optimizer


def make_wait(optimizers: Iterable[Optimizer], schedulers: Iterable[Any], waits: Callable[[], bool]) -> Callable[[], None]:
    """Have ``step`` of each of them do nothing while ``waits()`` is true. A closure that an optimizer is given runs all the same.

    Returns:
        A function that makes them as they were.

    Example:
        >>> parameter = torch.nn.Parameter(torch.ones(()))
        >>> parameter.grad = torch.ones(())
        >>> optimizer = torch.optim.SGD([parameter], lr=0.25)
        >>> undo = make_wait([optimizer], [], lambda: True)
        >>> optimizer.step(); parameter.item()
        1.0
        >>> undo(); optimizer.step(); parameter.item()
        0.75
    """
    undo = ExitStack()
    for optimizer in optimizers:
        undo.callback(_make_optimizer_wait(optimizer, waits))
    for scheduler in schedulers:
        undo.callback(_make_scheduler_wait(scheduler, waits))
    return undo.close


def _make_optimizer_wait(optimizer: Optimizer, waits: Callable[[], bool]) -> Callable[[], None]:
    own, original = vars(optimizer).get("step"), optimizer.step  # a scheduler has put its own there, to count

    @wraps(original)  # with the mark that a scheduler looks for
    def step(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        if not waits():
            return original(closure, *args, **kwargs)
        with torch.enable_grad():
            return None if closure is None else closure()

    optimizer.step = step  # type: ignore[method-assign]

    def undo() -> None:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]

    return undo


def _make_scheduler_wait(scheduler: Any, waits: Callable[[], bool]) -> Callable[[], None]:
    original = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        if not waits():
            original.step(self, *args, **kwargs)

    # by its class, since all attributes of a scheduler go into checkpoints
    names = {"step": step, "__module__": original.__module__, "__doc__": original.__doc__}
    scheduler.__class__ = type(original.__name__, (original,), names)

    def undo() -> None:
        scheduler.__class__ = original

    return undo
