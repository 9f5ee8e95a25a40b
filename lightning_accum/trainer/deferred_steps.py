"""Defers the optimizer and scheduler steps of manual optimization to the end of a window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_accum.step import Trained
from lightning_accum.trainer.from_lightning import pl
from lightning_accum.undo import replacing


class DeferredSteps:
    """Until :meth:`end`, each step of a fit's optimizers asks ``may_step`` first, and each of its schedulers ``are_deferred``."""

    def __init__(self, trained: Trained, may_step: Callable[[str, Optimizer], bool], are_deferred: Callable[[], bool]) -> None:
        self.trained, self.may_step, self.are_deferred = trained, may_step, are_deferred
        self.optimizers: list[Optimizer] = []
        self.others: list[Optimizer] = []  # of the module, which step at once
        self._undo, self._is_stepping = ExitStack(), False

    def begin(self, schedulers: Iterable[Any]) -> None:
        """Defer the Trainer's optimizers and ``schedulers``, and the module's own schedulers of these optimizers; and its own
        optimizers, if the Trainer has none.

        Other optimizers, such as of an inner loop, are not changed.
        """
        optimizers = [optimizer for optimizer in self.trained.optimizers if optimizer.param_groups]
        held = [value for owner in (self.trained.module, *optimizers) for value in vars(owner).values()]
        held += [one for value in held if isinstance(value, (list, tuple)) for one in value]
        held += [one for value in held if isinstance(value, dict) for one in value.values()]
        wrapper = pl.core.optimizer.LightningOptimizer
        own = [one for one in held if isinstance(one, Optimizer) and not isinstance(one, wrapper)]
        self.optimizers = [*dict.fromkeys(optimizers or own)]
        self.others = [one for one in own if one not in self.optimizers]
        their = [one for one in held if isinstance(one, (LRScheduler, ReduceLROnPlateau)) and one.optimizer in self.optimizers]
        for optimizer in self.optimizers:
            self._undo.enter_context(self._intercepted(optimizer))
        for scheduler in {id(one): one for one in (*schedulers, *their)}.values():
            self._undo.enter_context(self._scheduler_deferred(scheduler))

    def end(self) -> None:
        """Restore the optimizers and schedulers."""
        self._undo.close()

    def on_step(self, optimizer: Optimizer, run: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Called instead of the step of an optimizer, which ``run`` makes, with a closure or without."""
        if self._is_stepping:  # Lightning's step calls the optimizer's step
            return run() if closure is None else run(closure)  # some optimizers take none
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if not self.may_step(self._name_of(optimizer), optimizer):
            return result
        with replacing(self, _is_stepping=True):
            return run() if closure is None else run(lambda: result)

    def _name_of(self, optimizer: Optimizer) -> str:
        name, optimizers = type(optimizer).__name__, self.trained.optimizers
        if all(optimizer is not one for one in optimizers):
            return f"{name} (not of configure_optimizers)"
        return name if len(optimizers) == 1 else f"optimizer {optimizers.index(optimizer)} ({name})"

    def _intercepted(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Inside, ``optimizer.step`` calls :meth:`on_step`."""
        original = optimizer.step  # a scheduler may have replaced it with a counter

        @wraps(original)  # keeps the attribute that a scheduler checks
        def step(_: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            """Step, or defer it."""
            return self.on_step(optimizer, partial(original, **kwargs), closure)

        return replacing(optimizer, step=MethodType(step, optimizer))  # a later scheduler needs a method

    @contextmanager
    def _scheduler_deferred(self, scheduler: Any) -> Iterator[None]:
        """Inside, ``scheduler.step`` does nothing while steps are deferred."""
        original, are_deferred = type(scheduler), self.are_deferred

        def step(self: Any, *args: Any, **kwargs: Any) -> None:
            """Step, unless steps are deferred."""
            if not are_deferred():
                original.step(self, *args, **kwargs)

        # through its class, since a scheduler's attributes go into checkpoints
        names = {"step": step, "__module__": original.__module__, "__doc__": original.__doc__}
        scheduler.__class__ = type(original.__name__, (original,), names)
        yield
        scheduler.__class__ = original


@contextmanager
def groups_kept(optimizers: Iterable[Optimizer], others: Iterable[Any] = ()) -> Iterator[None]:
    """Undo, at the end, what a trial changes in the parameter groups of optimizers, such as learning rates, and in ``others``."""
    kept = [(group, {**group}) for optimizer in optimizers for group in optimizer.param_groups]
    states = [(other, deepcopy(other.state_dict())) for other in others]
    try:
        yield
    finally:
        for group, values in kept:
            group.update(values)
        for other, state in states:
            other.load_state_dict(state)
