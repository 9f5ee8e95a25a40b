"""Nested inputs and outputs of a call: lists, tuples, mappings and dataclasses, with tensors and texts as their leaves."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_accum.splitting.batch_parts import holds_tensors


class UnknownObjectError(TypeError):
    """An object of a class that is not known here holds tensors."""


def replaced(value: Any, function: Callable[[Any], Any]) -> Any:
    """A copy of ``value`` with ``function`` of each leaf (a tensor, or a list of texts) in its place, always in the same order.

    Raises:
        UnknownObjectError: there may be tensors in ``value`` that are not found.

    Example:
        >>> import torch
        >>> replaced({"x": [torch.ones(2), None], "names": ["a", "b"]}, lambda leaf: leaf[:1])
        {'x': [tensor([1.]), None], 'names': ['a']}
    """
    if isinstance(value, Tensor) or _is_list_of_texts(value):
        return function(value)
    if isinstance(value, Mapping):  # the outputs of Hugging Face's models too, which keep their entries as attributes as well
        items = {key: replaced(entry, function) for key, entry in value.items()}
        return items if type(value) is dict else _refilled(value, items)
    if isinstance(value, (list, tuple)):
        entries = [replaced(entry, function) for entry in value]
        return value._make(entries) if hasattr(value, "_make") else type(value)(entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, replaced(getattr(value, field.name), function))  # also where it is frozen
        return made
    if holds_tensors(value, depth=3):
        raise UnknownObjectError(f"a {type(value).__name__}, which holds tensors")
    return value


def leaves(value: Any) -> list[Any]:
    """The leaves of ``value``, in the order of :func:`replaced`."""
    found: list[Any] = []

    def keep(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    replaced(value, keep)
    return found


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(entry, str) for entry in value)


def _refilled(value: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    if not hasattr(value, "__setitem__"):
        return type(value)(entries)  # type: ignore[call-arg]
    made = copy.copy(value)
    for key, entry in entries.items():
        made[key] = entry
    return made
