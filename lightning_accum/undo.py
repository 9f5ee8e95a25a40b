"""Undo a step: save the state that it may change, and restore it in the same objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_accum.errors import UsageError
from lightning_accum.randomness import RandomState
from lightning_accum.state_kinds import DEEP, GRADIENT, ITERATOR, LARGE, MODULE, SHALLOW, TENSOR, Kind, changed_names

_Path: TypeAlias = "nn.Module | tuple[Any, str] | None"
"""A module, or the path of the holder of a value and its name there; None if the path is not needed."""
_Kept: TypeAlias = tuple[Kind, Any, Any, _Path]
"""A kind, an object of it, its saved state, and its path."""
_Watched: TypeAlias = tuple[Tensor, int, _Path]
"""A tensor, its version, and its path; None for a parameter."""


class Undo:
    """Takes snapshots of all state that a step of a module may change.

    Saved are: random state (torch on the CPU and on ``device``, Python, numpy); buffers; whether each module is in training mode;
    the attributes of modules that are not torch's own, metrics among them; and objects reached from these through containers,
    functions, and objects of the user's classes. Each value is restored in the object that held it. New modules, buffers and
    attributes are removed.

    Streams, locks and iterators (see :meth:`iterators`) cannot be copied, and are saved as references. Parameters, and tensors of
    more than 2**24 elements that are not buffers, are not copied: :meth:`Snapshot.restore` raises if their version has changed. For
    lists of more than 1,000 entries only the references are saved.

    With ``is_deep`` all reachable state is saved: parameters, gradients, hooks, objects of libraries, tensors of any size.
    """

    def __init__(self, module: nn.Module, device: torch.device, is_deep: bool = False) -> None:
        self.module = module
        self.device = device
        self._kinds = DEEP if is_deep else SHALLOW

    @torch.no_grad()
    def take(self, gradients_of: Iterable[Tensor] | None = None, watches_parameters: bool = True) -> Snapshot:
        """Save the present state, and ``gradients_of`` parameters whose gradients the step adds to (None costs no memory).

        ``watches_parameters``: whether to raise if a parameter was changed; False if an optimizer may step in between.
        """
        kept, too_large, _ = self._reached()
        watched: list[_Watched] = [(tensor, version_of(tensor), path) for tensor, path in too_large]
        if watches_parameters:
            watched += [(parameter, version_of(parameter), None) for parameter in self.module.parameters()]
        kept += [(GRADIENT, p, None if p.grad is None else (p.grad, p.grad.clone()), None) for p in gradients_of or ()]
        return Snapshot(self.module, RandomState(self.device), kept, watched)

    def iterators(self) -> list[str]:
        """The paths of iterators. They cannot be restored: items that a step draws are lost."""
        return [_in_words(path, self.module) for path in self._reached()[2]]

    def _reached(self) -> tuple[list[_Kept], list[tuple[Tensor, _Path]], list[_Path]]:
        """The saved objects of the module, the tensors that are too large to copy, and the paths of iterators."""
        kinds = self._kinds
        kept: list[_Kept] = []
        too_large: list[tuple[Tensor, _Path]] = []
        iterators: list[_Path] = []
        seen: dict[int, Any] = {}
        buffers = {id(buffer) for buffer in self.module.buffers()}
        waiting: list[tuple[Any, _Path]] = [(self.module, None)]
        while waiting:
            value, path = waiting.pop()
            kind = kinds[type(value)]
            if kind is None or id(value) in seen:
                continue
            seen[id(value)] = value
            if kind is TENSOR and value.numel() > LARGE and id(value) not in buffers:
                too_large.append((value, path))
                continue
            if kind.save is not None:
                kept.append((kind, value, kind.save(value), path))
            elif kind is ITERATOR:
                iterators.append(path)
            if kind.contents is not None:
                holder = value if kind.is_module else path
                for name, child in kind.contents(kinds, value):
                    waiting.append((child, (holder, name) if name else holder))
        return kept, too_large, iterators


class Snapshot(AbstractContextManager["Snapshot"]):
    """The state at the call of :meth:`Undo.take`. As a context, it restores this state at the end."""

    def __init__(self, module: nn.Module, random_state: RandomState, kept: list[_Kept], watched: list[_Watched]) -> None:
        self._module, self.random_state, self._kept, self._watched = module, random_state, kept, watched

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything, as often as needed. Raises afterwards if a watched tensor was changed in place."""
        failure: Exception | None = None
        for kind, target, saved, _ in self._kept:
            try:
                kind.restore(target, saved)
            except Exception as error:  # an error of the user's object: restore the rest
                failure = failure or error
        self.random_state.restore()
        for tensor, before, path in self._watched:
            if version_of(tensor) != before:
                raise UsageError(f"training_step changed {self._in_words(tensor, path)}")
        if failure is not None:
            raise failure

    def changed_attributes(self) -> list[str]:
        """The paths of attributes that have changed since."""
        found: list[_Path] = []
        for kind, target, saved, path in self._kept:
            if kind is MODULE:
                found += [(target, name) for name in changed_names(target, saved)]
            elif kind.is_changed is not None and isinstance(path, tuple) and kind.is_changed(target, saved):
                found.append(path)
        return [*dict.fromkeys(_in_words(path, self._module) for path in found)]

    def _in_words(self, tensor: Tensor, path: _Path) -> str:
        mend = ", which cannot be undone if a batch is checked or runs again. Make it a buffer of the module."
        if path is not None:
            return f"a tensor in '{_in_words(path, self._module)}' in place{mend}"
        name = next((name for name, parameter in self._module.named_parameters() if parameter is tensor), "?")
        mend = '; micro_batch="auto" cannot undo this if memory runs out; use a fixed micro_batch.'
        return f"the parameter '{name}' in place{mend}"

    @override
    def __exit__(self, *error: object) -> None:
        self.restore()


def _in_words(path: _Path, root: nn.Module) -> str:
    words = ""
    while isinstance(path, tuple):
        path, name = path
        words = (name if name.startswith("[") else f".{name}") + words
    return (next((name for name, module in root.named_modules() if module is path), "") + words).lstrip(".")


def version_of(tensor: Tensor) -> int:
    """The version counter of a tensor; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def versions_in(batch: Any) -> list[tuple[int, int]]:
    """The tensors of a batch, by id, and their versions."""
    return [(id(own), version_of(own)) for own in tree_leaves(batch) if isinstance(own, Tensor)]


@contextmanager
def replacing(owner: Any, **attributes: Any) -> Iterator[None]:
    """Inside, an object has these attributes. ``_current_fx_name`` of a module is the hook that ``module.log`` is called in."""
    own = vars(owner)  # setting an attribute of a Module takes microseconds
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)
