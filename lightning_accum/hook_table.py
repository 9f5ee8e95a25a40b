"""Which of Lightning's hooks somebody overrides: only those are called, as a call of Lightning's takes longer than a small step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, KeysView
from operator import attrgetter, is_
from types import CodeType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_accum import seams
from lightning_accum.gradient_reads import GradientReads
from lightning_accum.user_warnings import listed

_HOOKS_OF_A_MICRO_BATCH = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
_HOOK_OF_A_WINDOW = "on_window_end"
"""Lightning has none of that name."""
_HOOKS_OF_A_TRANSFER = ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device")
_HOOKS_OF_A_MODULE = (
    *_HOOKS_OF_A_MICRO_BATCH,
    *_HOOKS_OF_A_TRANSFER,
    _HOOK_OF_A_WINDOW,
    "backward",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "optimizer_step",
    "lr_scheduler_step",
)
_WATCHED_HOOKS = ("backward", "optimizer_zero_grad", "optimizer_step", "lr_scheduler_step")
"""``loops/watch.py`` compares what these do, unless the module overrides them."""
_HOOKS_OF_A_STRATEGY = (
    "on_train_batch_start",
    "training_step",
    "post_training_step",
    "pre_backward",
    "backward",
    "post_backward",
    "optimizer_step",
)
_HOOKS_OF_A_PRECISION = (
    "train_step_context",
    "forward_context",
    "pre_backward",
    "backward",
    "post_backward",
    "optimizer_step",
    "_wrap_closure",
    "_after_closure",
    "_clip_gradients",
    "clip_gradients",
)
_ENGINES = ("lightning_accum.engine", "lightning_accum.pytorch_lightning.engine")
_LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_accum.", "builtins")
_are_disjoint: Callable[..., bool] = type({}.keys()).isdisjoint


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The Trainer's callbacks, to read and to add to."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector, unseen by type checkers
    return callbacks


def window_listeners(trainer: pl.Trainer) -> list[Any]:
    """The callbacks and the module that have a hook ``on_window_end``."""
    owners: list[Any] = [*callbacks_of(trainer), trainer.lightning_module]
    return [owner for owner in owners if callable(getattr(owner, _HOOK_OF_A_WINDOW, None))]


def already_on_cpu(batch: Any) -> Any:
    """What Lightning makes of a batch that is to be moved to the CPU and is there: its tensors, in a container of its own.

    Lightning's hooks around it take 30 us. None where the batch is more than tensors in a tuple, list or dict.
    """
    kind = type(batch)
    if kind not in (dict, list, tuple):
        return batch if _is_on_cpu(batch) else None
    if not all(map(_is_on_cpu, batch.values() if kind is dict else batch)):
        return None
    return batch if kind is tuple else kind(batch)


def _is_on_cpu(value: Any) -> bool:
    return type(value) is Tensor and value.is_cpu


class HookTable:
    """Which of Lightning's hooks somebody overrides in a training.

    Args:
        trainer: whose callbacks, module, data, strategy and precision plugin may override hooks. Where Lightning's methods are not
            those that were read, all of them count as overridden.

    Attributes:
        has_own_transfer: a batch may be another on the device than on the host: augmented, or moved by the user's own rules.
        has_no_transfer: a batch that is on the CPU need not be moved, and nobody is to see it before it is.
        is_profiled: a profiler measures how long Lightning's calls take, or it is not known what they are.
        is_more_than_callbacks: not only callbacks have hooks around a loader batch, or its way to the device.
        has_batch_start: a callback overrides ``on_train_batch_start``.
        has_batch_end: a callback overrides ``on_train_batch_end``.
        has_batch_hooks: somebody overrides a hook around a loader batch, in which hooks may come or go.
        has_backward: there are hooks around the backward of a micro-batch.
        is_step_bare: ``training_step`` needs nothing around it: no wrapper of the module, no autocast.
        own_hooks: those of ``backward``, ``optimizer_zero_grad``, ``optimizer_step`` and ``lr_scheduler_step`` that the module
            overrides.
        step_counters: the module and callbacks whose ``on_train_batch_end`` reads ``global_step``, as Lightning's
            EMAWeightAveraging does to see each optimizer step once. No checkpoint callbacks: theirs are of whole loader batches.
        window_listeners: the callbacks and the module that have a hook ``on_window_end``, in the order in which they are called.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer, self._is_read = trainer, not seams.changed()
        self._look()

    def look_again(self) -> None:
        """See who is there, if somebody may have come or gone since. At every loader batch, so it takes 2 us where nobody has."""
        trainer = self._trainer
        callbacks = callbacks_of(trainer)
        if (
            len(callbacks) != len(self._callbacks)
            or not all(map(is_, callbacks, self._callbacks))
            or trainer.profiler is not self._profiler  # type: ignore[attr-defined]  # set by a connector
            or self._hooks.have_changed()
        ):
            self._look()

    @property
    def has_step(self) -> bool:
        """There is something between the gradients of a window and its optimizer step."""
        return self._has_step or bool(self._trainer.gradient_clip_val)

    def _look(self) -> None:
        trainer, module = self._trainer, self._trainer.lightning_module
        self._callbacks, self._profiler = list(callbacks_of(trainer)), trainer.profiler  # type: ignore[attr-defined]
        self._hooks = _Hooks(
            [(callback, (*_HOOKS_OF_A_MICRO_BATCH, _HOOK_OF_A_WINDOW)) for callback in self._callbacks]
            + [(module, _HOOKS_OF_A_MODULE)]
            + ([] if (data := _data_of(trainer)) is None else [(data, _HOOKS_OF_A_TRANSFER)])
            + [(trainer.strategy, _HOOKS_OF_A_STRATEGY), (trainer.precision_plugin, _HOOKS_OF_A_PRECISION)]
        )
        self.has_own_transfer, self.is_profiled = _has_own_transfer(trainer), _is_profiled(trainer) or not self._is_read
        is_on_cpu = trainer.strategy.root_device.type == "cpu" and _is_of_the_engine(trainer.strategy, "batch_to_device")
        self.has_no_transfer = is_on_cpu and not (self.has_own_transfer or self.is_profiled)
        self.is_more_than_callbacks = self.is_profiled or _has_batch_hooks(trainer)
        self.has_batch_start, self.has_batch_end = (
            not all(_is_inherited(callback, pl.Callback, (hook,)) for callback in self._callbacks)
            for hook in ("on_train_batch_start", "on_train_batch_end")
        )
        self.has_batch_hooks = self.is_more_than_callbacks or self.has_batch_start or self.has_batch_end
        self.has_backward = self.is_profiled or _has_backward_hooks(trainer)
        self._has_step = self.is_profiled or _has_step_hooks(trainer)
        self.is_step_bare = self._is_read and _is_step_bare(trainer)
        owners: list[Any] = [callback for callback in self._callbacks if not isinstance(callback, Checkpoint)]
        owners.append(module)
        self.window_listeners = window_listeners(trainer)
        self.own_hooks = frozenset(hook for hook in _WATCHED_HOOKS if not _is_inherited(module, pl.LightningModule, (hook,)))
        self.step_counters = [owner for owner in owners if _reads(owner, "on_train_batch_end", "global_step")]


class _Hooks:
    """The hooks that objects have, in themselves and in their classes.

    Args:
        owners: objects, and the hooks that they may have. The classes of libraries stay as they are.
    """

    def __init__(self, owners: Iterable[tuple[object, tuple[str, ...]]]) -> None:
        self._attributes: list[KeysView[str]] = []
        self._absent: list[frozenset[str]] = []
        self._present: list[tuple[Callable[[object], object], object]] = []
        for owner, hooks in owners:
            own = vars(owner).keys()
            self._attributes.append(own)
            self._absent.append(frozenset(hooks) - own)
            self._watch(owner, own & hooks)
            if not type(owner).__module__.startswith(_LIBRARIES):
                self._watch(type(owner), (hook for hook in hooks if hasattr(type(owner), hook)))
        self._values = [hooks_of(owner) for hooks_of, owner in self._present]

    def _watch(self, owner: object, hooks: Iterable[str]) -> None:
        if names := tuple(hooks):
            self._present.append((attrgetter(*names), owner))

    def have_changed(self) -> bool:
        """Whether an object has got one, or another."""
        # without a loop in Python, at 0.1 us an object
        return (
            not all(map(_are_disjoint, self._attributes, self._absent))
            or [hooks_of(owner) for hooks_of, owner in self._present] != self._values
        )


def _is_profiled(trainer: pl.Trainer) -> bool:
    return type(trainer.profiler) is not PassThroughProfiler  # type: ignore[attr-defined]  # set by a connector


def _data_of(trainer: pl.Trainer) -> pl.LightningDataModule | None:
    data: pl.LightningDataModule | None = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
    return data


def _has_batch_hooks(trainer: pl.Trainer) -> bool:
    data = _data_of(trainer)
    hooks = ("on_train_batch_start", "on_train_batch_end", "on_before_batch_transfer")
    return not (
        _is_inherited(trainer.lightning_module, pl.LightningModule, hooks)
        and (data is None or not is_overridden("on_before_batch_transfer", data))
        and _is_inherited(trainer.strategy, Strategy, hooks[:1])
    )


def _has_backward_hooks(trainer: pl.Trainer) -> bool:
    # Lightning's calls take several times as long as the rest of a small micro-batch: two scopes, four hooks of every callback
    hooks, strategy = ("on_before_backward", "on_after_backward", "on_before_zero_grad"), trainer.strategy
    return not (
        all(_is_inherited(callback, pl.Callback, hooks) for callback in callbacks_of(trainer))
        and _is_inherited(trainer.lightning_module, pl.LightningModule, (*hooks, "backward", "optimizer_zero_grad"))
        and _is_inherited(trainer.precision_plugin, Precision, ("pre_backward", "backward", "post_backward"))
        # those of Lightning's DDPStrategy are for manual optimization
        and all(_is_of_libraries(strategy, hook) for hook in ("pre_backward", "post_backward", "post_training_step"))
        and _is_of_this_package(strategy, "backward")
    )


def _has_step_hooks(trainer: pl.Trainer) -> bool:
    hooks = ("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
    own = ("optimizer_step", "_wrap_closure", "_after_closure", "_clip_gradients", "clip_gradients")
    return not (
        isinstance(trainer.strategy, SingleDeviceStrategy)  # those of several ranks may average models after a step
        and _is_of_this_package(trainer.strategy, "optimizer_step")
        and all(_is_inherited(callback, pl.Callback, hooks[:1]) for callback in callbacks_of(trainer))
        and _is_inherited(trainer.lightning_module, pl.LightningModule, hooks)
        and _is_inherited(trainer.precision_plugin, Precision, own)
    )


def _has_own_transfer(trainer: pl.Trainer) -> bool:
    # the module's are called in any case, those of the data only if Lightning finds them overridden
    data, hooks = _data_of(trainer), ("on_after_batch_transfer", "transfer_batch_to_device")
    is_the_modules = not _is_inherited(trainer.lightning_module, pl.LightningModule, hooks)
    return is_the_modules or (data is not None and any(is_overridden(hook, data) for hook in hooks))


def _is_step_bare(trainer: pl.Trainer) -> bool:
    strategy = trainer.strategy
    return (
        _is_inherited(strategy, Strategy, ("training_step",))
        and strategy.model is trainer.lightning_module
        and _is_inherited(trainer.precision_plugin, Precision, ("train_step_context", "forward_context"))
    )


def warn_of_hooks_of_parameters(module: pl.LightningModule, warn: Callable[[str], None]) -> None:
    """Name parameters with hooks that run after every micro-batch. Those of tensors are found by the checks, which run them."""
    hooked = [name for name, parameter in module.named_parameters() if getattr(parameter, "_post_accumulate_grad_hooks", None)]
    if hooked:
        warn(
            f"{listed(hooked)}: register_post_accumulate_grad_hook runs a function after every micro-batch, on what the window has"
            " accumulated so far, before that is normalised. What it changes, or an optimizer that it steps, is not what it would"
            " be in the full batch. Do it in on_before_optimizer_step, which sees the full batch's gradients, once a window."
        )


def gradient_reads(trainer: pl.Trainer, warn: Callable[[str], None]) -> GradientReads | None:
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


def _reads(owner: object, hook: str, name: str) -> bool:
    """Whether a hook of the user's reads an attribute of that name, by itself or in a method of the same object that it calls."""
    libraries = {*pl.LightningModule.__mro__, *pl.Callback.__mro__}
    namespaces = [vars(owner), *(vars(kind) for kind in type(owner).__mro__ if kind not in libraries)]
    left, seen = [hook], set()
    while left:
        called = left.pop()
        if called == name:
            return True
        if called not in seen:
            seen.add(called)
            for function in (namespace.get(called) for namespace in namespaces):
                left += _names_in(getattr(getattr(function, "func", function), "__code__", None))
    return False


def _names_in(code: CodeType | None) -> Iterator[str]:
    """Those of attributes and functions, also in functions inside of it."""
    if code is not None:
        yield from code.co_names
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield from _names_in(inner)


def _is_of_libraries(strategy: Strategy, name: str) -> bool:
    """No strategy that was derived from one of this package's or Lightning's has the method itself.

    Neither before the classes of this package nor behind them: ``class Own(DDPAccumulationStrategy, OwnDDPStrategy)``.
    """
    found = [vars(kind)[name] for kind in type(strategy).__mro__ if name in vars(kind)]
    return name not in vars(strategy) and all(method.__module__.startswith(_LIBRARIES) for method in found)


def _is_of_the_engine(strategy: Strategy, name: str) -> bool:
    """No class that was derived from ``Engine`` has the method itself."""
    return _is_of_libraries(strategy, name) and getattr(type(strategy), name).__module__ in _ENGINES


def _is_of_this_package(strategy: Strategy, name: str) -> bool:
    """No strategy that was derived from one of this package's has the method itself."""
    return _is_of_libraries(strategy, name) and getattr(type(strategy), name).__module__.startswith("lightning_accum.")


def _is_inherited(instance: object, base: type, names: tuple[str, ...]) -> bool:
    own = vars(instance)
    return all(
        (method := getattr(type(instance), name, None)) is getattr(base, name, None)
        and (method is None or method.__module__.startswith(_LIBRARIES))  # somebody may patch the library's class itself
        and name not in own
        for name in names
    )
