"""A module and all that it holds, as it is now, to be restored after it was trained."""

from __future__ import annotations

import io
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_accum.arguments import MisconfiguredError
from lightning_accum.errors import UsageError
from lightning_accum.splitting.snapshot import ways_to_restore

_Found = Iterator[tuple[str, Any]]

_OF_THE_MACHINE = (
    "_io",
    "_thread",
    "asyncio",
    "concurrent",
    "logging",
    "multiprocessing",
    "socket",
    "subprocess",
    "threading",
    "weakref",
)
"""Packages whose objects stand for something outside of the module: streams, locks, loggers."""
_OF_LIBRARIES = (
    *(f"torch.{package}." for package in ("_C", "_dynamo", "_functorch", "_inductor", "distributed", "fx")),
    *(f"lightning.pytorch.{package}." for package in ("loggers", "strategies", "trainer")),
    *(f"pytorch_lightning.{package}." for package in ("loggers", "strategies", "trainer")),
)
"""Their objects are shared by all modules, or are none's state."""
_NOTHING = object()
_LEADING_ON = {
    types.FunctionType: ("__closure__", "__defaults__", "__kwdefaults__", "__dict__"),
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinFunctionType: ("__self__",),  # such as list.append of a list
    partial: ("func", "args", "keywords"),
}
"""What is reached through callables."""
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, Enum, types.ModuleType, torch.dtype, torch.device, torch.layout)


class ModuleState:
    """All that is reached from a module: attributes, what is in containers, what functions have captured, tensors, arrays, random
    generators. It is restored in the very objects that held it.

    The module is run itself, since a copy would be another one: without hooks on its tensors, and with functions that have captured
    the original. Files, locks, loggers and the insides of compiled extensions are left as they are.

    Raises:
        MisconfigurationException: the module holds an iterator, which cannot be restored; or it is being trained over several
            ranks, whose reduction is tied to its parameters.

    Example:
        >>> module = pl.LightningModule()
        >>> module.seen = [1]
        >>> with ModuleState(module).restored_afterwards():
        ...     module.seen.append(2)
        >>> module.seen
        [1]
    """

    def __init__(self, module: pl.LightningModule) -> None:
        trainer = module._trainer
        if trainer is not None and trainer.training and trainer.world_size > 1:
            raise MisconfiguredError(
                f"verify runs {type(module).__name__} itself, which is in a training over {trainer.world_size} ranks now: their"
                " reduction of gradients is tied to its parameters. Call verify before trainer.fit or after it."
            )
        self._module = module
        self._undo: list[Callable[[], Any]] = []
        self._seen: dict[int, Any] = {}
        self._tensors: list[Tensor] = []
        waiting: list[tuple[str, Any]] = [("", module)]
        while waiting:
            path, value = waiting.pop()
            if isinstance(value, _ATOMS) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            waiting.extend(self._keep(path, value))

    @contextmanager
    def restored_afterwards(self) -> Iterator[None]:
        """In here the module has no Trainer and no gradients, and may be changed."""
        self._module._trainer = None
        try:
            for tensor in self._tensors:
                if tensor.is_leaf:
                    tensor.grad = None
                _remove_hooks_of_training(tensor)
            yield
        finally:
            self._restore()

    @torch.no_grad()
    def _restore(self) -> None:
        failure: Exception | None = None
        for undo in self._undo:
            try:
                undo()
            except Exception as error:  # the rest has to be restored all the same
                failure = failure or error
        if failure is not None:
            raise UsageError(
                f"verify could not restore all of {type(self._module).__name__} as it was. Make it anew, or load a checkpoint."
            ) from failure

    # --- what is kept of an object, and what it leads to ------------------------------------------------------------------

    def _keep(self, path: str, value: Any) -> _Found:
        names = next((names for kind, names in _LEADING_ON.items() if isinstance(value, kind)), None)
        if names is not None:
            yield from ((path, getattr(value, name)) for name in names)
        elif isinstance(value, Tensor):
            yield from self._keep_tensor(path, value)
        elif isinstance(value, types.CellType):
            with suppress(ValueError):  # it is empty
                self._undo.append(partial(setattr, value, "cell_contents", value.cell_contents))
                yield path, value.cell_contents
        elif isinstance(value, weakref.ref):
            yield path, value()
        elif (ways := ways_to_restore(value)) is not None:
            copy, restore = ways
            self._undo.append(partial(restore, value, copy(value)))
        elif not _is_opaque(value):
            yield from self._keep_contents(path, value)
            yield from self._keep_attributes(path, value)

    def _keep_tensor(self, path: str, tensor: Tensor) -> _Found:
        if is_lazy(tensor):
            raise MisconfiguredError(
                f"{path.lstrip('.')} has no shape yet. Run a batch through {type(self._module).__name__} before verify."
            )
        if tensor.is_inference():  # cannot be changed
            return
        self._tensors.append(tensor)
        values = None
        if not is_traceable_wrapper_subclass(tensor):  # that one is made of the tensors in its attributes
            values = (tensor.data, None if tensor.is_meta else tensor.data.clone())
        of_leaf = (tensor.requires_grad, tensor.grad) if tensor.is_leaf else None
        hooks = _hooks_of(tensor)
        self._undo.append(partial(_restore_tensor, tensor, values, of_leaf, [held is None for held in hooks]))
        yield from ((path, held) for held in (*hooks, of_leaf and of_leaf[1]))
        yield from self._keep_attributes(path, tensor)

    def _keep_contents(self, path: str, value: Any) -> _Found:
        if isinstance(value, (tuple, frozenset)):
            yield from ((path, item) for item in value)
        elif isinstance(value, dict):
            self._undo.append(partial(_restore_dict, value, dict(value)))
            yield from ((path, key) for key in value)
            yield from ((f"{path}[{key!r}]" if isinstance(key, (str, int)) else path, item) for key, item in value.items())
        elif isinstance(value, (list, set, deque)):
            self._undo.append(partial(_restore_items, value, list(value)))
            yield from ((path, item) for item in value if not isinstance(item, _ATOMS))
        elif isinstance(value, Iterator) and not hasattr(value, "__dict__"):
            raise MisconfiguredError(
                f"verify runs the module several times from the same state, but {path.lstrip('.')} is an iterator"
                f" ({type(value).__name__}), which cannot be restored. Leave it out, or make it in setup()."
            )

    def _keep_attributes(self, path: str, value: Any) -> _Found:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._seen[id(attributes)] = attributes
            self._undo.append(partial(_restore_attribute, value, "__class__", type(value)))
            self._undo.append(partial(_restore_dict, attributes, dict(attributes)))
            for name, held in attributes.items():
                yield f"{path}.{name}", held
                if name in ("_modules", "_parameters", "_buffers") and isinstance(held, dict):  # known by the module's path
                    yield from ((f"{path}.{key}", item) for key, item in held.items())
        for name in _slots(type(value)):
            held = getattr(value, name, _NOTHING)
            self._undo.append(partial(_restore_attribute, value, name, held))
            yield f"{path}.{name}", held
        if isinstance(value, torch.jit.ScriptModule):  # its tensors are not in its attributes
            for name, buffer in value.named_buffers(recurse=False):
                self._undo.append(partial(setattr, value, name, buffer))
            yield from ((f"{path}.{name}", held) for name, held in (*value.named_parameters(), *value.named_buffers()))


def _is_opaque(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return False
    if isinstance(value, io.IOBase):
        return True
    packages = [str(base.__module__) for base in type(value).__mro__]
    return any(name.partition(".")[0] in _OF_THE_MACHINE or f"{name}.".startswith(_OF_LIBRARIES) for name in packages)


def _slots(type_: type) -> Iterator[str]:
    for base in type_.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name


def _remove_hooks_of_training(tensor: Tensor) -> None:
    """What watches the gradients of a training that goes on around this must not see those in here."""
    for hooks in _hooks_of(tensor):
        for number, hook in list((hooks or {}).items()):
            while isinstance(hook, (partial, types.MethodType)):
                hook = hook.func if isinstance(hook, partial) else hook.__func__
            if str(getattr(hook, "__module__", "")).partition(".")[0] == "lightning_accum":
                del hooks[number]


# --- each is restored in the object that held it, and only where it is another now ------------------------------------------


def _restore_tensor(
    tensor: Tensor,
    values: tuple[Tensor, Tensor | None] | None,
    of_leaf: tuple[bool, Tensor | None] | None,
    had_no_hooks: list[bool],
) -> None:
    if values is not None:
        alias, value = values
        if not _are_in_one_place(tensor, alias):
            tensor.data = alias
        is_strided = alias.layout is torch.strided
        is_expanded = is_strided and any(s == 0 and n > 1 for s, n in zip(alias.stride(), alias.shape, strict=True))
        if value is not None and not is_expanded:  # what is expanded cannot be written to
            alias.copy_(value)
    if of_leaf is not None:
        if not tensor.is_leaf:  # it was changed in place by something with a graph
            tensor.detach_()
        if tensor.requires_grad != of_leaf[0]:
            tensor.requires_grad_(of_leaf[0])
        if tensor.grad is not of_leaf[1]:
            tensor.grad = of_leaf[1]
    for hooks, had_none in zip(_hooks_of(tensor), had_no_hooks, strict=True):
        if had_none and hooks:
            hooks.clear()


def _hooks_of(tensor: Tensor) -> tuple[Any, Any]:
    return tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)


def _are_in_one_place(tensor: Tensor, alias: Tensor) -> bool:
    if (tensor.shape, tensor.dtype, tensor.device, tensor.layout) != (alias.shape, alias.dtype, alias.device, alias.layout):
        return False
    return alias.layout is torch.strided and tensor.data_ptr() == alias.data_ptr() and tensor.stride() == alias.stride()


def _restore_dict(target: dict[Any, Any], saved: dict[Any, Any]) -> None:
    if len(target) == len(saved) and all(a is b and v is w for (a, v), (b, w) in zip(target.items(), saved.items(), strict=True)):
        return
    base = OrderedDict if isinstance(target, OrderedDict) else dict  # subclasses may add or forbid
    base.clear(target)
    base.update(target, saved)


def _restore_items(target: Any, saved: list[Any]) -> None:
    if len(target) == len(saved) and all(a is b for a, b in zip(target, saved, strict=True)):
        return
    target.clear()
    (target.update if isinstance(target, set) else target.extend)(saved)


def _restore_attribute(target: Any, name: str, value: Any) -> None:
    if getattr(target, name, _NOTHING) is value:
        return
    if value is _NOTHING:
        object.__delattr__(target, name)
    else:
        object.__setattr__(target, name, value)
