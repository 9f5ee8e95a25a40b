"""Nested inputs and outputs of a call: lists, tuples, mappings and dataclasses of tensors, and of lists of texts or numbers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_accum.errors import RowWiseError, WrongTypeError
from lightning_accum.exact import exact, rounding
from lightning_accum.splitting.rows import holds_tensors


class UnknownObjectError(WrongTypeError):
    """An object of a class that is not known here holds tensors."""


class Tree(NamedTuple):
    """A nested value, taken apart.

    Attributes:
        leaves: tensors, and lists of texts or numbers.
        paths: a name for each leaf, such as ``inputs.attention_mask``.
        others: each other value, and the keys or the length of what they are in.
        make: a copy of the value, with the leaves that the iterator yields.
    """

    leaves: list[Any]
    paths: list[str]
    others: list[Any]
    make: Callable[[Iterator[Any]], Any]


def read(value: Any) -> Tree:
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
    leaves: list[Any] = []
    paths: list[str] = []
    others: list[Any] = []

    def take_apart(value: Any, path: str) -> Callable[[Iterator[Any]], Any]:
        if isinstance(value, Tensor) or is_list_of(str, value) or is_list_of_numbers(value):
            leaves.append(value)
            paths.append(path)
            return next
        if isinstance(value, Mapping):  # the outputs of Hugging Face's models too, which keep their entries as attributes as well
            others.append(list(value))
            entries = [(key, take_apart(entry, f"{path}.{key}" if path else str(key))) for key, entry in value.items()]
            if type(value) is dict:
                return lambda found: {key: make(found) for key, make in entries}
            return lambda found: _refilled(value, {key: make(found) for key, make in entries})
        if isinstance(value, (list, tuple)):
            others.append(len(value))
            makers = [take_apart(entry, f"{path}.{place}" if path else str(place)) for place, entry in enumerate(value)]
            kind: Callable[[list[Any]], Any] = getattr(type(value), "_make", type(value))
            return lambda found: kind([make(found) for make in makers])
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            fields = [(name, take_apart(getattr(value, name), f"{path}.{name}" if path else name)) for name in names]
            return lambda found: _with_fields(value, {name: make(found) for name, make in fields})
        if holds_tensors(value, depth=3):
            raise UnknownObjectError(f"a {type(value).__name__}, which holds tensors")
        others.append(value)
        return lambda found: value

    return Tree(leaves, paths, others, take_apart(value, ""))


def leaves(value: Any) -> list[Any]:
    """The leaves of ``value``, in the order of :func:`read`."""
    return read(value).leaves


def is_list_of(kind: Any, value: Any) -> bool:
    """Whether it is a list or tuple of objects of a class alone."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(entry, kind) for entry in value)


def is_list_of_numbers(value: Any) -> bool:
    """Whether it is a list that may have one number a row; a tuple is a shape."""
    return type(value) is list and is_list_of((int, float), value)


def _with_fields(value: Any, entries: dict[str, Any]) -> Any:
    made = copy.copy(value)
    for name, entry in entries.items():
        object.__setattr__(made, name, entry)  # also where it is frozen
    return made


def _refilled(value: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    if not hasattr(value, "__setitem__"):
        return type(value)(entries)  # type: ignore[call-arg]
    made = copy.copy(value)
    for key, entry in entries.items():
        made[key] = entry
    return made


# --- comparing ------------------------------------------------------------------------------------


def check_others(name: str, found: list[Any], expected: list[Any]) -> None:
    """Raise if what is no tensor in the outputs for some rows is not what it is for others."""
    pairs = [*zip(found, expected, strict=False), (len(found), len(expected))]
    differing = next(((a, b) for a, b in pairs if not _are_equal(a, b)), None)
    if differing is not None:
        raise RowWiseError(
            f"row_wise={name!r}: {name!r} returns {differing[0]!r} for some rows and {differing[1]!r} for"
            " others, which cannot be joined: have it return tensors, with one entry a row."
        )


def _are_equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:  # arrays are neither true nor false
        return False


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal but for rounding."""
    return found.shape == expected.shape and all(map(bool, differences(found, expected)))


def differences(found: Tensor, expected: Tensor | None) -> list[Tensor]:
    """Whether they are equal but for rounding, on their device; empty if they are equal."""
    found = found.detach()
    if expected is None or (found.device.type == "cpu" and torch.equal(found, expected)):
        return []
    if found.is_complex():
        found = torch.view_as_real(found.resolve_conj())
        expected = torch.view_as_real(expected.resolve_conj())
    if not found.is_floating_point():
        return [(found == expected).all()]
    tolerance = rounding(_coarsest_eps(expected))
    found, expected = exact(found), exact(expected)
    difference = (found - expected).nan_to_num(0.0, 0.0, 0.0).norm()
    is_near = difference <= tolerance * expected.nan_to_num(0.0, 0.0, 0.0).norm()
    return [is_near & (found.isfinite() == expected.isfinite()).all()]


def _coarsest_eps(tensor: Tensor) -> float:
    """Of the types that a tensor like this one is computed in."""
    kind, dtypes = tensor.device.type, [tensor.dtype]
    if torch.is_autocast_enabled(kind):
        dtypes.append(torch.get_autocast_dtype(kind))
    is_tf32 = tensor.is_cuda and tensor.dtype == torch.float32
    return max(*(torch.finfo(dtype).eps for dtype in dtypes), 2**-10 if is_tf32 else 0.0)
