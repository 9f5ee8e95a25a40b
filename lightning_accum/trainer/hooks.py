"""Hooks of the user's: who has one, and those that Lightning does not call.

Lightning's calls around a step take longer than a small micro-batch. They are left out while nobody listens, which is found anew at
each loader batch, by comparison with the functions that Lightning shipped.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from types import CodeType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_accum.trainer.from_lightning import PassThroughProfiler, Precision, Strategy, pl
from lightning_accum.window_totals import ClosedWindow

# --- what nobody listens to -------------------------------------------------------------------------------------------

_LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_accum.", "builtins")
_TELL = ("on_before_backward", "on_after_backward")
_AROUND_A_STEP: dict[type, tuple[str, ...]] = {
    pl.LightningModule: (*_TELL, "backward"),
    pl.Callback: _TELL,
    Strategy: ("training_step", "post_training_step", "pre_backward", "post_backward"),
    Precision: ("train_step_context", "forward_context", "pre_backward", "backward", "post_backward"),
}
"""What Lightning's calls of ``training_step`` and of backward come to. ``Strategy.backward`` is this package's own."""
_HOOKS_OF = {kind: attrgetter(*hooks) for kind, hooks in _AROUND_A_STEP.items()}
_SHIPPED = {kind: hooks_of(kind) for kind, hooks_of in _HOOKS_OF.items()}
# none was replaced before this package was imported
_ARE_LIGHTNINGS = all(
    hook.__globals__["__name__"].startswith((*_LIBRARIES, "contextlib")) for hooks in _SHIPPED.values() for hook in hooks
)


def is_lightnings(owner: object, hook: str, kind: type = pl.LightningModule) -> bool:
    """Whether a module, or another ``kind`` of object, leaves ``hook`` to Lightning, of whatever release."""
    return getattr(type(owner), hook) is getattr(kind, hook) and hook not in vars(owner)


def is_unheard(trainer: Any) -> bool:
    """Nobody listens to Lightning's calls around ``training_step`` and backward: neither an object nor its class has a hook."""
    owners: list[tuple[type, Any]] = [(pl.Callback, callback) for callback in trainer.callbacks]
    owners += [(pl.LightningModule, trainer.lightning_module), (Strategy, trainer.strategy), (Precision, trainer.precision_plugin)]
    return (
        _ARE_LIGHTNINGS
        and type(trainer.profiler) is PassThroughProfiler
        and all(
            isinstance(owner, kind)  # a callback may be of another class, and have no such hook
            and _HOOKS_OF[kind](type(owner)) == _SHIPPED[kind]
            and vars(owner).keys().isdisjoint(_AROUND_A_STEP[kind])
            for kind, owner in owners
        )
    )


# --- what Lightning does not call -------------------------------------------------------------------------------------


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The Trainer's callbacks, to read and to add to."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector, unseen by type checkers
    return callbacks


@contextmanager
def replacing(module: pl.LightningModule, **attributes: Any) -> Iterator[None]:
    """In here a module has these attributes. ``_current_fx_name`` is the hook that ``module.log`` is called in."""
    own = vars(module)  # of a Module, setting one takes microseconds
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)


def call_window_hooks(trainer: pl.Trainer, window: ClosedWindow) -> None:
    """Call ``on_window_end`` of the callbacks and of the module that have it."""
    module = trainer.lightning_module
    owners: list[Any] = [*callbacks_of(trainer), module]
    listeners = [owner for owner in owners if callable(getattr(owner, "on_window_end", None))]
    if not listeners:
        return
    with replacing(module, _current_fx_name="on_train_batch_end"):  # `self.log` works as there
        for owner in listeners:
            owner.on_window_end(*((window,) if owner is module else (trainer, module, window)))


def call_batch_end(kind: type[pl.Callback], trainer: pl.Trainer, outputs: Any, batch: Any, batch_idx: int) -> None:
    """Have callbacks of a kind see an optimizer step that no end of a loader batch comes after."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, kind):
            callback.on_train_batch_end(trainer, trainer.lightning_module, outputs, batch, batch_idx)


# --- hooks that see gradients inside of a window -----------------------------------------------------------------------


def gradient_reads(trainer: pl.Trainer, warn: Callable[[str], None]) -> TorchFunctionMode | None:
    """Notices a hook around a backward, or the module's own, that looks at gradients, which are not those of a window yet.

    None where nobody has one.
    """
    hooks: dict[CodeType, str] = {}
    owners = [(owner, name) for owner in (*callbacks_of(trainer), trainer.lightning_module) for name in _TELL]
    for owner, name in (*owners, (trainer.lightning_module, "backward")):
        hook: Any = getattr(owner, name, None)
        hook = inspect.unwrap(getattr(hook, "func", hook)) if callable(hook) else None
        code = getattr(hook, "__code__", None)
        if code is not None and not hook.__module__.startswith(_LIBRARIES):
            hooks[code] = f"{name} of {type(owner).__name__}"
    return _GradientReads(hooks, warn) if hooks else None


class _GradientReads(TorchFunctionMode):
    """In here hooks that get or set the gradient of a tensor are noticed: by their code among the callers, and each once."""

    def __init__(self, left: dict[CodeType, str], warn: Callable[[str], None]) -> None:
        super().__init__()
        self._left, self._warn = left, warn

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._left and getattr(func, "__self__", None) is Tensor.grad:  # its getter or its setter
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_code not in self._left:
                # what runs in the middle of a backward is no part of the hook that called it
                frame = None if frame.f_code.co_name == "_engine_run_backward" else frame.f_back
            if frame is not None:
                self._warn(
                    f"{self._left.pop(frame.f_code)} looks at gradients. It runs at every micro-batch, on what the window has"
                    " accumulated so far, and not on the full batch's gradients. Do it in on_before_optimizer_step, which sees"
                    " these, once a window."
                )
        return func(*args, **(kwargs or {}))
