"""Hooks of the user's: who has one, and those that Lightning does not call.

A call of Lightning's takes longer than a small micro-batch. What nobody listens to is left out, which is found anew at each loader
batch, by comparison with the functions that Lightning shipped.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_accum.ended_window import EndedWindow
from lightning_accum.from_lightning import (
    PassThroughProfiler,
    Precision,
    Strategy,
    _TrainingEpochLoop,
    call,
    pl,
)

# --- what nobody listens to -------------------------------------------------------------------------------------------

_LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_accum.", "builtins")
_MOVE = ("on_after_batch_transfer", "transfer_batch_to_device")
_TELL = ("on_before_backward", "on_after_backward")
_HOOKS: dict[str, dict[type, tuple[str, ...]]] = {
    "training_step": {
        pl.LightningModule: (*_TELL, "backward"),
        pl.Callback: _TELL,
        Strategy: ("training_step", "post_training_step", "pre_backward", "post_backward"),
        Precision: ("train_step_context", "forward_context", "pre_backward", "backward", "post_backward"),
    },
    "batch_to_device": dict.fromkeys((pl.LightningModule, pl.LightningDataModule), _MOVE),
    "on_train_batch_start": dict.fromkeys((pl.Callback, pl.LightningModule, Strategy), ("on_train_batch_start",)),
    "on_train_batch_end": dict.fromkeys((pl.Callback, pl.LightningModule), ("on_train_batch_end",)),
}
"""What Lightning's calls around these come to. ``Strategy.backward`` and ``batch_to_device`` are this package's own."""
_OWNERS: dict[type, Callable[[Any], Iterable[Any]]] = {
    pl.Callback: lambda trainer: trainer.callbacks,
    pl.LightningModule: lambda trainer: (trainer.lightning_module,),
    pl.LightningDataModule: lambda trainer: () if trainer.datamodule is None else (trainer.datamodule,),
    Strategy: lambda trainer: (trainer.strategy,),
    Precision: lambda trainer: (trainer.precision_plugin,),
}


def _shipped(base: type, names: tuple[str, ...]) -> Callable[[Any], bool]:
    """Whether an object has Lightning's own of these hooks: neither it nor its class has another by now."""
    get = attrgetter(*names, names[0])  # of one name it would make no tuple
    hooks = get(base)
    # and none was replaced before this package was imported
    are_lightnings = all(hook.__globals__["__name__"].startswith((*_LIBRARIES, "contextlib")) for hook in hooks)

    def is_shipped(owner: Any) -> bool:
        try:
            return are_lightnings and get(type(owner)) == hooks and vars(owner).keys().isdisjoint(names)
        except AttributeError:  # something that only looks like one of Lightning's
            return False

    return is_shipped


_SHIPPED = {calls: {base: _shipped(base, names) for base, names in hooks.items()} for calls, hooks in _HOOKS.items()}


def is_lightnings(module: pl.LightningModule, hook: str) -> bool:
    """Whether a module leaves ``hook`` to Lightning, of whatever release."""
    return getattr(type(module), hook) is getattr(pl.LightningModule, hook) and hook not in vars(module)


def is_unheard(trainer: Any, calls: str) -> bool:
    """Nobody listens to Lightning's calls around ``calls``: one of the names above."""
    if type(trainer.profiler) is not PassThroughProfiler:
        return False
    for base, is_shipped in _SHIPPED[calls].items():
        for owner in _OWNERS[base](trainer):
            if not is_shipped(owner):
                return False
    return True


def already_on_cpu(batch: Any) -> Any:
    """What Lightning makes of a batch that is to be moved to the CPU and is there: its tensors, in a container of its own.

    None if the batch is more than tensors in a tuple, list or dict.
    """
    kind = type(batch)
    parts = (batch,) if kind is Tensor else batch.values() if kind is dict else batch if kind in (list, tuple) else (None,)
    if not all(type(part) is Tensor and part.is_cpu for part in parts):
        return None
    return kind(batch) if kind in (dict, list) else batch


def _unless_unheard(name: str, base: type) -> Callable[..., Any]:
    """A function of Lightning's that calls hooks of loader batches, but for those that nobody has."""
    shipped = {hook: _SHIPPED[hook][base] for hook in ("on_train_batch_start", "on_train_batch_end") if base in _HOOKS[hook]}
    owners = _OWNERS[base]

    def call_hook(trainer: Any, hook: str, *args: Any, **kwargs: Any) -> Any:
        if type(trainer.profiler) is PassThroughProfiler:
            if hook == "batch_to_device":
                return trainer.strategy.batch_to_device(*args, **kwargs)
            if hook in shipped and all(map(shipped[hook], owners(trainer))):
                return None
        return getattr(call, name)(trainer, hook, *args, **kwargs)

    return call_hook


ADVANCE: Any = _TrainingEpochLoop.advance
_CALLS = {
    "_call_callback_hooks": pl.Callback,
    "_call_lightning_module_hook": pl.LightningModule,
    "_call_strategy_hook": Strategy,
}
_QUIET = SimpleNamespace(**vars(call) | {name: _unless_unheard(name, base) for name, base in _CALLS.items()})
advance_quietly = FunctionType(ADVANCE.__code__, {**ADVANCE.__globals__, "call": _QUIET}, closure=ADVANCE.__closure__)
"""Lightning's ``_TrainingEpochLoop.advance``, in which hooks that nobody has are not called: each call takes 5 to 10 us."""


# --- what Lightning does not call -------------------------------------------------------------------------------------


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The Trainer's callbacks, to read and to add to."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector, unseen by type checkers
    return callbacks


class current_hook:  # noqa: N801
    """The hook that ``module.log`` is called in."""

    def __init__(self, module: pl.LightningModule, name: str) -> None:
        self._attributes, self._name = vars(module), name  # of a Module, setting one takes microseconds

    def __enter__(self) -> None:
        self._before = self._attributes["_current_fx_name"]
        self._attributes["_current_fx_name"] = self._name

    def __exit__(self, *_: object) -> None:
        self._attributes["_current_fx_name"] = self._before


def call_window_hooks(trainer: pl.Trainer, ended: Callable[[], EndedWindow]) -> None:
    """Call ``on_window_end`` of the callbacks and of the module that have it."""
    module = trainer.lightning_module
    owners: list[Any] = [*callbacks_of(trainer), module]
    listeners = [owner for owner in owners if callable(getattr(owner, "on_window_end", None))]
    if not listeners:
        return
    window = ended()
    with current_hook(module, "on_train_batch_end"):  # `self.log` works as there
        for owner in listeners:
            owner.on_window_end(*((window,) if owner is module else (trainer, module, window)))


def call_batch_end(kind: type[pl.Callback], trainer: pl.Trainer, outputs: Any, batch: Any, batch_idx: int) -> None:
    """Have callbacks of a kind see an optimizer step that no end of a loader batch comes after."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, kind):
            callback.on_train_batch_end(trainer, trainer.lightning_module, outputs, batch, batch_idx)


# --- hooks that see gradients inside of a window -----------------------------------------------------------------------

_GRADIENT: Any = Tensor.grad
"""Its getter and its setter are of this."""


def gradient_reads(trainer: pl.Trainer, warn: Callable[[str], None]) -> TorchFunctionMode | None:
    """Notices an ``on_after_backward``, or the module's ``backward``, that looks at gradients, which are not those of a window yet.

    None where nobody has one.
    """
    hooks: dict[CodeType, str] = {}
    owners = [(owner, "on_after_backward") for owner in (*callbacks_of(trainer), trainer.lightning_module)]
    for owner, name in (*owners, (trainer.lightning_module, "backward")):
        hook: Any = getattr(owner, name, None)
        hook = inspect.unwrap(getattr(hook, "func", hook)) if callable(hook) else None
        code = getattr(hook, "__code__", None)
        if code is not None and not hook.__module__.startswith(_LIBRARIES):
            hooks[code] = f"{name} of {type(owner).__name__}"
    return GradientReads(hooks, warn) if hooks else None


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
