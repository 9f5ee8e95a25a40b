"""Nested inputs and outputs of a call: lists, tuples, mappings and dataclasses of tensors, and of lists of texts or numbers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_accum.splitting.batch_parts import holds_tensors


class UnknownObjectError(TypeError):
    """An object of a class that is not known here holds tensors."""


def replaced(value: Any, function: Callable[[Any], Any], note: Callable[[Any], None] = lambda other: None) -> Any:
    """A copy of ``value`` with ``function`` of each leaf in its place, always in the same order.

    Args:
        value: any nesting of tensors, and lists of texts or numbers, which are the leaves, and other values.
        function: of a leaf.
        note: takes each other value, and the keys or the length of what they are in.

    Raises:
        UnknownObjectError: there may be tensors in ``value`` that are not found.

    Example:
        >>> import torch
        >>> replaced({"x": [torch.ones(2), None], "names": ["a", "b"]}, lambda leaf: leaf[:1])
        {'x': [tensor([1.]), None], 'names': ['a']}
    """
    if isinstance(value, Tensor) or is_list_of(str, value) or is_list_of_numbers(value):
        return function(value)
    if isinstance(value, Mapping):  # the outputs of Hugging Face's models too, which keep their entries as attributes as well
        note(list(value))
        items = {key: replaced(entry, function, note) for key, entry in value.items()}
        return items if type(value) is dict else _refilled(value, items)
    if isinstance(value, (list, tuple)):
        note(len(value))
        entries = [replaced(entry, function, note) for entry in value]
        return value._make(entries) if hasattr(value, "_make") else type(value)(entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, replaced(getattr(value, field.name), function, note))  # also where it is frozen
        return made
    if holds_tensors(value, depth=3):
        raise UnknownObjectError(f"a {type(value).__name__}, which holds tensors")
    note(value)
    return value


def leaves(value: Any) -> list[Any]:
    """The leaves of ``value``, in the order of :func:`replaced`."""
    found: list[Any] = []

    def keep(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    replaced(value, keep)
    return found


def paths(value: Any, path: str = "") -> list[str]:
    """A name for each of the :func:`leaves`, such as ``inputs.attention_mask``.

    Example:
        >>> import torch
        >>> paths({"x": [torch.ones(2), None], "mask": torch.ones(2)})
        ['x.0', 'mask']
    """
    if isinstance(value, Tensor) or is_list_of(str, value) or is_list_of_numbers(value):
        return [path]
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, (list, tuple)):
        entries = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    return [name for key, entry in entries for name in paths(entry, f"{path}.{key}" if path else str(key))]


def others(value: Any) -> list[Any]:
    """What is no leaf in ``value``, in the order of :func:`replaced`."""
    found: list[Any] = []
    replaced(value, lambda leaf: leaf, found.append)
    return found


def first_that_differs(found: list[Any], expected: list[Any]) -> tuple[Any, Any] | None:
    """The first two of :func:`others` that are not equal; None where all are."""
    if len(found) != len(expected):
        return len(found), len(expected)
    return next(((a, b) for a, b in zip(found, expected, strict=True) if not _are_equal(a, b)), None)


def _are_equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:  # arrays are neither true nor false
        return False


def is_list_of(kind: Any, value: Any) -> bool:
    """Whether it is a list or tuple of objects of a class alone."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(entry, kind) for entry in value)


def is_list_of_numbers(value: Any) -> bool:
    """Whether it is a list that may have one number a row; a tuple is a shape."""
    return type(value) is list and is_list_of((int, float), value)


def _refilled(value: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    if not hasattr(value, "__setitem__"):
        return type(value)(entries)  # type: ignore[call-arg]
    made = copy.copy(value)
    for key, entry in entries.items():
        made[key] = entry
    return made
