"""What one attempt at a batch may change, kept as it was before, so that a failed attempt leaves nothing behind."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lightning_accum.errors import UsageError
from lightning_accum.randomness import RandomState

_Kept: TypeAlias = tuple[Callable[[Any, Any], Any], Any, Any]
"""A function that restores, the object that it restores, and what that object held."""
_Owner: TypeAlias = tuple[nn.Module, str]
"""A module and one of its attributes."""

_MOST_ELEMENTS = 2**24
"""Tensors and arrays in attributes that have more are taken for data, not for state: they are not copied."""


class StateSnapshotter:
    """Takes snapshots of all that running a batch through a module may change.

    Kept are: random state (torch on the CPU and on ``device``, Python, numpy); buffers; gradients; whether each module is in
    training mode; and the attributes of modules that are not torch's own, metrics among them: references to everything, the
    values of tensors and arrays of up to 2**24 elements, of random generators, and of lists, dicts, sets and deques, two levels
    deep. Each value is restored in the object that held it. Modules, buffers and attributes that are new are removed.

    Not copied but watched, as far as torch counts changes: parameters, larger tensors, and tensors in a list, tuple, set or
    deque. `Snapshot.restore` raises where one was changed in place. Nobody looks inside other objects, inside modules that
    are not registered, or at attributes of torch's own layers.

    Args:
        module: the module, with everything below it. Modules that are added or replaced later are found.
        device: where the module runs.

    Example:
        >>> module = nn.BatchNorm1d(1, momentum=1.0)
        >>> snapshot = StateSnapshotter(module, torch.device("cpu")).take()
        >>> _ = module(torch.tensor([[2.0], [4.0]]))
        >>> module.running_mean
        tensor([3.])
        >>> snapshot.restore()
        >>> module.running_mean
        tensor([0.])
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module
        self.device = device
        self._walk()

    @torch.no_grad()
    def take(self, gradients_of: Iterable[Tensor] | None = None, watches_parameters: bool = True) -> Snapshot:
        """Keep everything as it is now.

        Args:
            gradients_of: parameters whose gradients the attempt adds to. One that is None so far costs no memory.
            watches_parameters: whether to raise where a parameter was changed; not where an optimizer may step meanwhile.
        """
        if self._ids_of_children() != self._child_ids:
            self._walk()
        snapshot = Snapshot(self.module, RandomState(self.device))
        snapshot.kept.append((_restore_modes, self._modules, [module.training for module in self._modules]))
        snapshot.kept += [(_restore_names, held, dict(held)) for held in self._holders]
        buffers = [buffer for held in self._buffers_of for buffer in held.values() if buffer is not None]
        snapshot.kept.append((_restore_tensors, buffers, [buffer.clone() for buffer in buffers]))
        for module in self._with_attributes:
            snapshot.keep_attributes(module)
        if watches_parameters:
            snapshot.watch([parameter for held in self._parameters_of for parameter in held.values() if parameter is not None])
        for parameter in gradients_of or ():
            gradient = parameter.grad
            snapshot.kept.append((_restore_gradient, parameter, None if gradient is None else (gradient, gradient.clone())))
        return snapshot

    def _walk(self) -> None:
        self._modules = list(self.module.modules())
        self._children_of = [module._modules for module in self._modules if isinstance(module._modules, dict)]
        self._child_ids = self._ids_of_children()
        self._with_attributes = [module for module in self._modules if not _is_of_torch(type(module))]
        self._parameters_of = [module._parameters for module in self._modules if module._parameters]
        # a scripted module makes a new dict at each access, of the same tensors
        self._buffers_of = [
            module._buffers if isinstance(module._buffers, dict) else dict(module.named_buffers(recurse=False))
            for module in self._modules
        ]
        self._holders: list[dict[str, Any]] = [*self._children_of, *self._buffers_of]

    def _ids_of_children(self) -> list[int]:
        # not the modules themselves: metrics redefine ==
        return [id(child) for children in self._children_of for child in children.values()]


class Snapshot:
    """How everything was when `StateSnapshotter.take` made it."""

    def __init__(self, module: nn.Module, random_state: RandomState) -> None:
        self.kept: list[_Kept] = []
        self.watched: list[tuple[Sequence[Tensor], list[int], _Owner | None]] = []
        """Tensors, how many changes each had seen, and the attribute that they are in; None for parameters."""
        self._module = module
        self._random_state = random_state

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything, as often as needed.

        Raises:
            RuntimeError: a tensor that is watched was changed in place.
        """
        for tensors, versions, owner in self.watched:
            for tensor, now, before in zip(tensors, _versions(tensors), versions, strict=True):
                if now != before and not self._is_copied(tensor):
                    mend = ", which cannot be undone where a batch is tried out or runs again. Make it a buffer of the module."
                    if owner is None:
                        mend = '; micro_batch="auto" cannot take that back when memory runs out; use a fixed micro_batch.'
                    raise UsageError(f"training_step changed {self._name(tensor, owner)} in place{mend}")
        for restore, target, saved in self.kept:
            restore(target, saved)
        self._random_state.restore()

    def keep_attributes(self, module: nn.Module) -> None:
        """Keep what the module's attributes refer to, and the values of those that can be changed in place."""
        attributes = vars(module)
        self.kept.append((_restore_names, attributes, {n: v for n, v in attributes.items() if not _is_part_of_parameter(v)}))
        for name in _names_of_state(tuple(attributes)):
            value = attributes[name]
            if _is_part_of_parameter(value):
                continue
            if (kind := _KINDS[type(value)]) is not None:
                self._keep(value, kind, (module, name))

    def watch(self, tensors: Sequence[Tensor], owner: _Owner | None = None) -> None:
        """See to it that tensors are not changed in place."""
        self.watched.append((tensors, _versions(tensors), owner))

    def _keep(self, value: Any, kind: _Kind, owner: _Owner, depth: int = 0) -> None:
        if kind.copy is None or (kind is _TENSOR and value.numel() > _MOST_ELEMENTS):
            self.watch([value], owner)
            return
        self.kept.append((kind.restore, value, kind.copy(value)))
        if kind.contents is None or depth == 2 or all(_KINDS[type_] is None for type_ in set(map(type, kind.contents(value)))):
            return
        # a dict has a few tensors by name; a list grows, and copies of all that are in it would cost more each time
        is_copied = depth == 0 and isinstance(value, dict)
        if not is_copied:
            self.watch([item for item in kind.contents(value) if _KINDS[type(item)] is _TENSOR], owner)
        for item in kind.contents(value):
            if (inner := _KINDS[type(item)]) is not None and (is_copied or inner is not _TENSOR):
                self._keep(item, inner, owner, depth + 1)

    def _is_copied(self, tensor: Tensor) -> bool:
        return any(
            any(tensor is original for original in target) if restore is _restore_tensors else tensor is target
            for restore, target, _ in self.kept
            if restore in (_restore_tensors, _restore_tensor)
        )

    def _name(self, tensor: Tensor, owner: _Owner | None) -> str:
        if owner is None:
            return f"the parameter '{next((name for name, p in self._module.named_parameters() if p is tensor), '?')}'"
        path = next((name for name, module in self._module.named_modules() if module is owner[0]), "")
        return f"a tensor in '{path}{'.' if path else ''}{owner[1]}'"


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # made in inference mode: it counts no changes, and cannot be changed in place outside of that
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


class _Kind(NamedTuple):
    """What to do with objects of a type that can be changed in place."""

    copy: Callable[[Any], Any] | None
    """None: watch it instead."""
    restore: Callable[[Any, Any], Any]
    contents: Callable[[Any], Iterable[Any]] | None = None


class _Kinds(dict[type, "_Kind | None"]):
    """The kind of each type that was met; None where a reference is all there is to keep."""

    def __missing__(self, type_: type) -> _Kind | None:
        self[type_] = next((kind for base, kind in _known_types() if issubclass(type_, base)), None)
        return self[type_]


def _restore_nothing(target: Any, saved: Any) -> None:
    pass


def _restore_modes(modules: list[nn.Module], saved: list[bool]) -> None:
    for module, mode in zip(modules, saved, strict=True):
        module.training = mode


def _restore_names(names: dict[str, Any], saved: dict[str, Any]) -> None:
    for name in names.keys() - saved.keys():
        if not _is_part_of_parameter(names[name]):
            del names[name]
    names.update(saved)


def _restore_dict(target: dict[Any, Any], saved: dict[Any, Any]) -> None:
    base = OrderedDict if isinstance(target, OrderedDict) else dict  # Counter.update adds, others forbid it
    base.clear(target)
    base.update(target, saved)


def _refill(target: Any, saved: Any, add: Callable[[Any, Any], None]) -> None:
    target.clear()
    add(target, saved)


def _is_part_of_parameter(value: Any) -> bool:
    """FSDP1 has the parts of a flat parameter as attributes, in memory that it frees between forwards."""
    return isinstance(value, Tensor) and isinstance(value._base, nn.Parameter)


def _restore_tensors(targets: list[Tensor], saved: list[Tensor]) -> None:
    for tensor, value in zip(targets, saved, strict=True):
        _restore_tensor(tensor, value)


def _restore_tensor(tensor: Tensor, saved: Tensor) -> None:
    if tensor.layout is not torch.strided:
        tensor.copy_(saved)
    elif tensor.shape != saved.shape:
        tensor.data = saved.clone()
    # what is expanded cannot be written to, by the attempt neither
    elif all(stride > 0 or size == 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        tensor.data.copy_(saved)  # .data: no change in the eyes of a graph from before that needs the tensor


def _restore_gradient(parameter: Tensor, saved: tuple[Tensor, Tensor] | None) -> None:
    if saved is None:
        parameter.grad = None
        return
    gradient, value = saved
    target = gradient if parameter.grad is None else parameter.grad  # DDP may have put a view of its bucket there meanwhile
    if target.layout is value.layout is torch.strided and target.shape == value.shape:
        target.data.copy_(value)
        parameter.grad = target
    else:
        parameter.grad = value.clone()


def _copy_array(array: Any) -> Any:
    return array.copy() if array.flags.writeable and array.size <= _MOST_ELEMENTS else None


def _restore_array(array: Any, saved: Any) -> None:
    if saved is not None:
        array[...] = saved


_TENSOR = _Kind(Tensor.clone, _restore_tensor)
_TYPES: tuple[tuple[type, _Kind | None], ...] = (
    (nn.Parameter, _Kind(None, _restore_nothing)),
    (Tensor, _TENSOR),
    (dict, _Kind(dict, _restore_dict, dict.values)),
    (list, _Kind(list, partial(_refill, add=list.extend), iter)),
    (tuple, _Kind(tuple, _restore_nothing, iter)),
    (set, _Kind(set, partial(_refill, add=set.update), iter)),
    (deque, _Kind(list, partial(_refill, add=deque.extend), iter)),
    (bytearray, _Kind(bytes, partial(_refill, add=bytearray.extend))),
    (torch.Generator, _Kind(torch.Generator.get_state, torch.Generator.set_state)),
    (random.SystemRandom, None),
    (random.Random, _Kind(random.Random.getstate, random.Random.setstate)),
)


def _known_types() -> Iterable[tuple[type, _Kind | None]]:
    yield from _TYPES
    if (numpy := sys.modules.get("numpy")) is not None:
        yield numpy.memmap, None
        yield numpy.ndarray, _Kind(_copy_array, _restore_array)
        yield numpy.random.RandomState, _Kind(numpy.random.RandomState.get_state, numpy.random.RandomState.set_state)
        yield (
            numpy.random.Generator,
            _Kind(lambda g: g.bit_generator.state, lambda g, state: setattr(g.bit_generator, "state", state)),
        )


_KINDS = _Kinds()


def ways_to_restore(value: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None:
    """How to copy, and how to restore, what an object holds that has neither attributes nor items: a random generator, an array."""
    kind = _KINDS[type(value)]
    return None if kind is None or kind.copy is None or kind.contents is not None else (kind.copy, kind.restore)


_NO_STATE = frozenset(vars(nn.Module()))
"""Parameters, buffers and children are looked at elsewhere; the rest are hooks."""


@lru_cache
def _names_of_state(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in _NO_STATE)


def _is_of_torch(type_: type) -> bool:
    # with all its bases, as wrappers make classes of their own that derive from the user's
    return all(base.__module__.partition(".")[0] in ("torch", "builtins", "typing", "abc") for base in type_.__mro__)
