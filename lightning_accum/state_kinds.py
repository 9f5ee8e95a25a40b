"""The state of objects that a step may change: how it is saved, restored in place, and searched."""

from __future__ import annotations

import io
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import DataLoader, Dataset

from lightning_accum.exact import is_dense

_MANY = 1000
"""Longest list whose entries are searched."""
LARGE = 2**24
"""Most elements of a tensor or array that is copied; a larger one is treated as data, unless it is a buffer."""
_NOTHING = object()
_EMPTY: dict[str, Any] = {}
_Contents: TypeAlias = Iterable[tuple[str, Any]]
"""Names and values."""


class Kind(NamedTuple):
    """How objects of a type are saved, restored and searched."""

    save: Callable[[Any], Any] | None
    restore: Any  # a function of the object and its saved state
    contents: Callable[[Kinds, Any], _Contents] | None = None
    is_module: bool = False
    is_changed: Callable[[Any, Any], bool] | None = None  # for MODULE see changed_names


class Kinds(dict[type, "Kind | None"]):
    """The kind of each type; None if there is nothing to save."""

    def __init__(self, is_deep: bool) -> None:
        super().__init__()
        self.is_deep = is_deep

    def __missing__(self, type_: type) -> Kind | None:
        self[type_] = next(kind for base, kind in self._of_types(type_) if issubclass(type_, base))
        return self[type_]

    def _of_types(self, type_: type) -> Iterator[tuple[Any, Kind | None]]:
        yield from _OF_TYPES
        if self.is_deep:
            yield Tensor, _LEAF
            yield weakref.ref, Kind(None, None, lambda kinds, value: [("", value())])
        yield (nn.Parameter, weakref.ref, torch.optim.Optimizer, Dataset, DataLoader) if not self.is_deep else (), None
        yield Tensor, TENSOR
        yield torch.jit.ScriptModule, Kind(lambda module: module.training, nn.Module.train, _contents_of_script, is_module=True)
        is_of_torch = all(base.__module__.partition(".")[0] in ("torch", "builtins", "typing", "abc") for base in type_.__mro__)
        yield nn.Module, _OBJECT._replace(is_module=True) if self.is_deep else _REGISTRY if is_of_torch else MODULE
        if (numpy := sys.modules.get("numpy")) is not None:
            yield numpy.memmap, None
            yield numpy.ndarray, Kind(_save_array, lambda array, saved: saved is None or array.__setitem__(..., saved))
            yield numpy.random.RandomState, Kind(numpy.random.RandomState.get_state, numpy.random.RandomState.set_state)
            yield numpy.random.Generator, Kind(lambda g: g.bit_generator.state, lambda g, s: setattr(g.bit_generator, "state", s))
        is_outside = any(f"{base.__module__}.".startswith(_OUTSIDE) for base in type_.__mro__)
        has_attributes = type_.__dictoffset__ or _slots(type_)
        is_opened = has_attributes and (self.is_deep or not is_of_library(type_.__module__))
        yield object, None if is_outside else _OBJECT if is_opened else ITERATOR if issubclass(type_, Iterator) else None


def _contents_of_registry(kinds: Kinds, module: nn.Module) -> _Contents:
    if not (module._modules or module._buffers):
        return []
    named = (*(("", child) for child in module._modules.values()), *module._buffers.items())
    return [(name, held) for name, held in named if held is not None]


def _contents_of_module(kinds: Kinds, module: nn.Module) -> _Contents:
    state = [
        (name, value)
        for name, value in vars(module).items()
        if name not in _NO_STATE and kinds[type(value)] is not None and not _is_part_of_parameter(value)
    ]
    return [*state, *_contents_of_registry(kinds, module)]  # the last entry is searched first


def _contents_of_script(kinds: Kinds, module: torch.jit.ScriptModule) -> _Contents:
    return chain(module.named_children(), module.named_buffers(recurse=False), module.named_parameters(recurse=False))


def _contents_of_tensor(kinds: Kinds, tensor: Tensor) -> _Contents:
    if is_traceable_wrapper_subclass(tensor):  # it consists of other tensors
        yield from ((name, getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    if kinds.is_deep and not tensor.is_inference():
        yield from (("", held) for held in (*hooks_of(tensor), tensor.grad if tensor.is_leaf else None))
        yield from _attributes(kinds, tensor)


def _attributes(kinds: Kinds, value: Any) -> _Contents:
    yield from ((name, held) for name, held in getattr(value, "__dict__", {}).items())
    yield from ((name, getattr(value, name, None)) for name in _slots(type(value)))


def _items(kinds: Kinds, values: Any) -> _Contents:
    is_small = kinds.is_deep or (len(values) <= _MANY and any(kinds[type_] is not None for type_ in set(map(type, values))))
    return (("", value) for value in values) if is_small else ()


def _entries(kinds: Kinds, values: dict[Any, Any]) -> _Contents:
    if kinds.is_deep:
        yield from (("", key) for key in values)
    if kinds.is_deep or len(values) <= _MANY:
        yield from ((f"[{key!r}]", value) for key, value in values.items() if kinds[type(value)] is not None)


def _leads_on(*names: str) -> Kind:
    """The kind of a callable, which refers to other objects."""

    def contents(kinds: Kinds, value: Any) -> _Contents:
        package = f"{getattr(value, '__module__', None)}."
        if not (package.startswith(_OUTSIDE) if kinds.is_deep else is_of_library(package)):
            yield from (("", getattr(value, name)) for name in names)

    return Kind(None, None, contents)


# --- classes ------------------------------------------------------------------------------------------------------------

_MACHINE = ("_io", "_thread", "asyncio", "concurrent", "io", "logging", "multiprocessing", "socket", "subprocess", "threading")
_OUTSIDE = (
    *(f"{name}." for name in (*_MACHINE, "lightning_accum")),
    *(f"torch.{name}." for name in ("_C", "_dynamo", "_functorch", "_inductor", "distributed", "fx")),
    *(f"{name}.{part}." for name in ("lightning.pytorch", "pytorch_lightning") for part in ("loggers", "strategies", "trainer")),
)
"""Packages whose objects do not belong to the module (streams, locks, loggers, a training), or are shared by all modules."""


@lru_cache
def is_of_library(package: Any) -> bool:
    """Whether a package is a part of Python, this package, or an installed one, and not code of the user."""
    top = str(package).partition(".")[0]
    found = sys.modules.get(top)
    where = f"{getattr(found, '__file__', None)} {getattr(found, '__path__', None)}"
    return top in sys.stdlib_module_names or top in ("lightning_accum", "torch") or "-packages" in where


def _slots(type_: type) -> list[str]:
    found = []
    for base in type_.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                found.append(f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name)
    return found


def _is_part_of_parameter(value: Any) -> bool:
    """Whether it is a view of an FSDP1 flat parameter, whose memory is freed between forwards."""
    return isinstance(value, Tensor) and isinstance(value._base, nn.Parameter)


def hooks_of(tensor: Tensor) -> tuple[Any, Any]:
    """The hooks on the gradient of a tensor; None if it never had any."""
    return tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)


# --- each is restored in the object that held it --------------------------------------------------------------------------


def _save_registry(module: nn.Module) -> Any:
    # without parameters, which engines may replace
    return module.training, *(dict(held) if held else _EMPTY for held in (module._modules, module._buffers))


def _restore_registry(module: nn.Module, saved: Any) -> None:
    mode, modules, buffers = saved
    if module.training != mode:
        module.training = mode
    for target, held in ((module._modules, modules), (module._buffers, buffers)):
        if target or held:
            _restore_dict(target, held)


def _save_module(module: nn.Module) -> Any:
    return _save_registry(module), {name: value for name, value in vars(module).items() if not _is_part_of_parameter(value)}


def _restore_module(module: nn.Module, saved: Any) -> None:
    registry, names = saved
    _restore_registry(module, registry)
    attributes = vars(module)
    for name in attributes.keys() - names.keys():
        if not _is_part_of_parameter(attributes[name]):
            del attributes[name]
    attributes.update(names)


def changed_names(module: nn.Module, saved: Any) -> list[str]:
    """The names of a module's attributes and buffers that are other objects than the saved ones."""
    pairs = ((vars(module), saved[1]), (module._buffers, saved[0][2]))
    changed = [name for now, before in pairs for name, value in now.items() if value is not before.get(name, _NOTHING)]
    return [name for name in changed if name != "_param_requires_grad_state"]  # Lightning's, of toggle_optimizer


def _is_other_object(value: Any, saved: Any) -> bool:
    held, attributes = saved
    now = [getattr(value, name, _NOTHING) for name, _ in attributes]
    return _are_others(now, [before for _, before in attributes]) or (held is not None and _are_others(vars(value), held))


def _are_others(now: Any, saved: Any) -> bool:
    if isinstance(saved, dict):  # values are compared by identity
        now, saved = [*now, *now.values()], [*saved, *saved.values()]
    return len(now) != len(saved) or any(a is not b for a, b in zip(now, saved, strict=True))


def _save_object(value: Any) -> Any:
    held = getattr(value, "__dict__", None)
    slots = [(name, getattr(value, name, _NOTHING)) for name in _slots(type(value))]
    return dict(held) if isinstance(held, dict) else None, [("__class__", type(value)), *slots]


def _restore_object(target: Any, saved: Any) -> None:
    held, attributes = saved
    for name, value in attributes:
        if getattr(target, name, _NOTHING) is not value:
            object.__delattr__(target, name) if value is _NOTHING else object.__setattr__(target, name, value)
    if held is not None:
        _restore_dict(vars(target), held)


def _restore_dict(target: dict[Any, Any], saved: dict[Any, Any]) -> None:
    if not _are_others(target, saved):
        return
    base = OrderedDict if isinstance(target, OrderedDict) else dict  # Counter.update adds, other subclasses forbid update
    base.clear(target)
    base.update(target, saved)


def _restore_items(target: Any, saved: list[Any]) -> None:
    if _are_others(target, saved):
        target.clear()
        (target.update if isinstance(target, set) else target.extend)(saved)


def _save_cell(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it is empty
        return []


def _restore_cell(cell: types.CellType, saved: list[Any]) -> None:
    if saved:
        cell.cell_contents = saved[0]


def _save_tensor(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    is_expanded = is_dense(tensor) and 0 in tensor.stride() and tensor.numel() > 1
    # it cannot be written to, or consists of other tensors
    if is_expanded or tensor.is_inference() or is_traceable_wrapper_subclass(tensor):
        return None
    alias = tensor.data  # restoring through this alias changes no version, so an earlier graph that needs the tensor stays valid
    return alias, alias.clone()


def _restore_tensor(tensor: Tensor, saved: tuple[Tensor, Tensor] | None) -> None:
    if saved is None:
        return
    alias, value = saved
    tensor.data = alias
    alias.copy_(value)


def _save_leaf(tensor: Tensor) -> Any:
    of_leaf = (tensor.requires_grad, tensor.grad) if tensor.is_leaf and not tensor.is_inference() else None
    return _save_tensor(tensor), of_leaf, [held is None for held in hooks_of(tensor)], _save_object(tensor)


def _restore_leaf(tensor: Tensor, saved: Any) -> None:
    values, of_leaf, had_no_hooks, attributes = saved
    _restore_tensor(tensor, values)
    if of_leaf is not None:
        if not tensor.is_leaf:  # it was changed in place by something with a graph
            tensor.detach_()
        tensor.requires_grad_(of_leaf[0])
        tensor.grad = of_leaf[1]
    for hooks, had_none in zip(hooks_of(tensor), had_no_hooks, strict=True):
        if had_none and hooks:
            hooks.clear()
    _restore_object(tensor, attributes)


def _restore_gradient(parameter: Tensor, saved: tuple[Tensor, Tensor] | None) -> None:
    """Restore the gradient of a parameter from the object and a copy of its values; None for no gradient."""
    if saved is not None:
        gradient, value = saved
        target = gradient if parameter.grad is None else parameter.grad  # DDP may have put a view of its bucket there meanwhile
        if target.layout is value.layout is torch.strided and target.shape == value.shape:
            target.data.copy_(value)
        else:
            target = value.clone()
    parameter.grad = None if saved is None else target


def _save_array(array: Any) -> Any:
    return array.copy() if array.flags.writeable and array.size <= LARGE else None


_NO_STATE = frozenset(vars(nn.Module()))
"""Attributes of every module: registered state is saved separately; the rest are hooks."""
TENSOR = Kind(
    _save_tensor, _restore_tensor, _contents_of_tensor, False, lambda own, kept: kept and is_dense(own) and not torch.equal(*kept)
)
_LEAF = Kind(_save_leaf, _restore_leaf, _contents_of_tensor)
_REGISTRY = Kind(_save_registry, _restore_registry, _contents_of_registry, is_module=True)
MODULE = Kind(_save_module, _restore_module, _contents_of_module, is_module=True)
_OBJECT = Kind(_save_object, _restore_object, _attributes, is_changed=_is_other_object)
ITERATOR, GRADIENT = Kind(None, None), Kind(None, _restore_gradient)
_OF_TYPES: tuple[tuple[Any, Kind | None], ...] = (
    ((type(None), bool, int, float, complex, str, bytes, type, Enum, types.ModuleType, io.IOBase), None),
    ((torch.dtype, torch.device, torch.layout, random.SystemRandom, *weakref.ProxyTypes), None),
    (dict, Kind(dict, _restore_dict, _entries, is_changed=_are_others)),
    ((list, set, deque), Kind(list, _restore_items, _items, is_changed=_are_others)),
    ((tuple, frozenset), Kind(None, None, _items)),
    (bytearray, Kind(bytes, lambda target, saved: target.__setitem__(slice(None), saved))),
    (torch.Generator, Kind(torch.Generator.get_state, torch.Generator.set_state)),
    (random.Random, Kind(random.Random.getstate, random.Random.setstate)),
    (types.CellType, Kind(_save_cell, _restore_cell, lambda kinds, cell: [("", held) for held in _save_cell(cell)])),
    (types.FunctionType, _leads_on("__closure__", "__defaults__", "__kwdefaults__", "__dict__")),
    (types.MethodType, _leads_on("__self__", "__func__")),
    (types.BuiltinFunctionType, _leads_on("__self__")),  # such as list.append of a list
    (partial, _leads_on("func", "args", "keywords")),
)
SHALLOW, DEEP = Kinds(is_deep=False), Kinds(is_deep=True)
