"""Nested inputs and outputs of a call: lists, tuples, mappings and dataclasses of tensors, and of lists of texts or numbers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_accum.errors import WrongTypeError
from lightning_accum.exact import exact, rounding
from lightning_accum.splitting.rows import holds_tensors


class UnknownObjectError(WrongTypeError):
    """An object of a class that is not known here holds tensors."""


class Tree(NamedTuple):
    """A nested value, taken apart.

    Attributes:
        leaves: tensors, and lists of texts or numbers.
        paths: a name for each leaf, such as ``inputs.attention_mask``.
        others: each other value, and the keys of what they are in.
        make: a copy of the value, with the leaves that the iterator yields.
    """

    leaves: list[Any]
    paths: list[str]
    others: list[Any]
    make: Callable[[Iterator[Any]], Any]


def read(value: Any, path: str = "") -> Tree:
    """Take any nesting of tensors apart.

    Raises:
        UnknownObjectError: there may be tensors in ``value`` that are not found.

    Example:
        >>> import torch
        >>> tree = read({"x": [torch.ones(2), None], "names": ["a", "b"]})
        >>> tree.paths
        ['x.0', 'names']
        >>> tree.make(leaf[:1] for leaf in tree.leaves)
        {'x': [tensor([1.]), None], 'names': ['a']}
    """
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    if isinstance(value, Tensor) or (is_list and all(isinstance(entry, str) for entry in value)) or is_list_of_numbers(value):
        return Tree([value], [path], [], next)
    if isinstance(value, Mapping):  # the outputs of Hugging Face's models too, which keep their entries as attributes as well
        entries = dict(value)
    elif isinstance(value, (list, tuple)):
        entries = dict(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif holds_tensors(value, depth=3):
        raise UnknownObjectError(f"a {type(value).__name__}, which holds tensors")
    else:
        return Tree([], [], [value], lambda found: value)
    trees = {key: read(entry, f"{path}.{key}" if path else str(key)) for key, entry in entries.items()}
    found = Tree(
        [], [], [list(entries)], lambda found: _with_entries(value, {key: tree.make(found) for key, tree in trees.items()})
    )
    for tree in trees.values():
        found.leaves.extend(tree.leaves)
        found.paths.extend(tree.paths)
        found.others.extend(tree.others)
    return found


def is_list_of_numbers(value: Any) -> bool:
    """Whether it is a list that may have one number a row; a tuple is a shape."""
    return type(value) is list and len(value) > 0 and all(isinstance(entry, (int, float)) for entry in value)


def _with_entries(value: Any, entries: dict[Any, Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return getattr(type(value), "_make", type(value))([*entries.values()])
    if isinstance(value, Mapping) and (type(value) is dict or not hasattr(value, "__setitem__")):
        return type(value)(entries)  # type: ignore[call-arg]
    made: Any = copy.copy(value)
    for key, entry in entries.items():
        if isinstance(value, Mapping):
            made[key] = entry
        else:
            object.__setattr__(made, key, entry)  # also where it is frozen
    return made


# --- comparing ------------------------------------------------------------------------------------


def is_same(found: Any, expected: Any) -> bool:
    """Whether two values are equal; tensors but for rounding."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        return found.shape == expected.shape and all(map(bool, differences(found, expected)))
    try:
        return found is expected or bool(found == expected)
    except Exception:  # arrays are neither true nor false
        return False


def differences(found: Tensor, expected: Tensor) -> list[Tensor]:
    """Whether they are equal but for rounding, on their device; empty if they are equal."""
    found = found.detach()
    if found.device.type == "cpu" and torch.equal(found, expected):
        return []
    if found.is_complex():
        found, expected = (torch.view_as_real(one.resolve_conj()) for one in (found, expected))
    if not found.is_floating_point():
        return [(found == expected).all()]
    kind, is_tf32 = expected.device.type, expected.is_cuda and expected.dtype == torch.float32
    dtypes = [expected.dtype, *([torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else [])]
    tolerance = rounding(max(*(torch.finfo(dtype).eps for dtype in dtypes), 2**-10 if is_tf32 else 0.0))
    found, expected = exact(found), exact(expected)
    difference = (found - expected).nan_to_num(0.0, 0.0, 0.0).norm()
    is_near = difference <= tolerance * expected.nan_to_num(0.0, 0.0, 0.0).norm()
    return [is_near & (found.isfinite() == expected.isfinite()).all()]
