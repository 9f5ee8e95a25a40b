"""One place where another library is held: a name that is not for everybody, and whether it is what was read."""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pkgutil import resolve_name
from typing import Any, NamedTuple

from lightning_accum import families

_NO_SOURCE = "-"


class Seam(NamedTuple):
    """A method, a function or an attribute of another library's.

    Attributes:
        owner: the class or module that has it, by its whole name.
        name: its own.
        replaced_by: the class or function here that stands in for it; empty where it is only relied on.
        why: what the replacement does otherwise, or what is relied on.
        read: fingerprints of those that were read; ``"-"`` for an attribute, or what is written in C++.

    Example:
        >>> seam = Seam("torch.nn.Module", "_call_impl", "", "runs forward and its hooks", "-")
        >>> str(seam), seam.is_read(), seam._replace(name="_call_forward").is_read()
        ('Module._call_impl', True, False)
    """

    owner: str
    name: str
    replaced_by: str
    why: str
    read: str

    def __str__(self) -> str:
        return f"{self.owner.rpartition('.')[2]}.{self.name}"

    def holder(self) -> Any:
        """The class or module that has it; None where there is none of that name."""
        return _resolved(self.owner)

    def found(self) -> Any:
        """What is there now, as the class has it; None where there is nothing. Of an attribute its name."""
        holder = self.holder()
        if holder is not None and self.read == _NO_SOURCE:
            return self.name if has_attribute(holder, self.name) else None
        return None if holder is None else vars(holder).get(self.name)

    def is_read(self) -> bool:
        """Whether it is one of those that were read. One that is optional may be absent."""
        found = self.found()
        if found is None:
            return self.is_optional
        return self.read == _NO_SOURCE or fingerprint(found) in self.read.split()

    @property
    def is_optional(self) -> bool:
        """Some versions that were read do not have it."""
        return self.why.startswith("where it is: ")


def table(below: str, rows: str) -> tuple[Seam, ...]:
    """Seams, from lines of an owner and, indented, of what is held there: name | replaced by | why | read."""
    return tuple(_read(below, rows))


def _read(below: str, rows: str) -> Iterator[Seam]:
    owner = ""
    for line in rows.strip().splitlines():
        if not line.startswith(" "):
            owner = below + line
            continue
        names, replaced_by, why, read = (column.strip() for column in line.split("|"))
        for name in names.split():
            yield Seam(owner, name, replaced_by.strip("-"), why, read)


@cache
def _resolved(owner: str) -> Any:
    try:
        return resolve_name(owner)
    except (ImportError, AttributeError):
        return None


@cache
def has_attribute(holder: Any, name: str) -> bool:
    """Whether it is there: as an attribute of a class or module, or on objects, where a class annotates it or some code sets it."""
    return hasattr(holder, name) or any(
        name in inspect.get_annotations(base) or any(_sets(inspect.unwrap(value), name) for value in vars(base).values())
        for base in getattr(holder, "__mro__", (holder,))
    )


def _sets(function: Any, name: str) -> bool:
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_names:
        return False
    return any(line.opname == "STORE_ATTR" and line.argval == name for line in dis.get_instructions(code))


def fingerprint(function: Any) -> str:
    """Eight hexadecimal digits that change with what a function does, and not with its comments, annotations or line breaks.

    Empty where there is no source. The same in all versions of Python.

    Example:
        >>> fingerprint(fingerprint) == fingerprint(table)
        False
    """
    function = getattr(function, "fget", function)  # a property
    return _of_source(inspect.unwrap(getattr(function, "__func__", function)))


@cache
def _of_source(function: Any) -> str:
    try:
        (tree,) = ast.parse(families.first(textwrap.dedent(inspect.getsource(function)))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""
    return of_tree(tree)


def of_tree(tree: ast.AST) -> str:
    """The :func:`fingerprint` of a function that was parsed."""
    return sha256(_in_words(tree).encode()).hexdigest()[:8]


_LEFT_OUT = ("ctx", "kind", "type_comment", "type_params", "annotation", "returns")


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        is_docstring = [isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) for item in value]
        return f"[{','.join(_in_words(item) for item, is_left_out in zip(value, is_docstring, strict=True) if not is_left_out)}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = [(name, field) for name, field in ast.iter_fields(value) if name not in _LEFT_OUT and field not in (None, [])]
    return f"{type(value).__name__}({','.join(f'{name}={_in_words(field)}' for name, field in fields)})"
