"""Modules of other packages, each with a little data of its kind. ``tests/third_party.py`` trains them.

A file here is a few fields. It imports its packages, and torch, inside of functions: each has an environment of its own.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FIELDS = ("forecasting", "chemistry", "recommenders", "vision")


@dataclass(frozen=True)
class Case:
    name: str
    module: Callable[[], Any]  # makes it anew, with the same parameters where torch's seed is the same
    rows: Sequence[Any] = ()
    collate: Callable[[list[Any]], Any] | None = None  # joins rows into a batch
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of GradientAccumulation where batches are split
    learning_rate: float = 0.01


@dataclass(frozen=True)
class Package:  # what is installed, and the cases that it has. ``imports`` is the Lightning that its modules are of.
    name: str
    field: str
    imports: str
    cases: Callable[[], list[Case]]
    requirements: Sequence[str]


_PACKAGES: dict[str, Package] = {}


def packages() -> dict[str, Package]:  # all of them, by name on PyPI
    for field_ in FIELDS:
        importlib.import_module(f"{__name__}.{field_}")
    return _PACKAGES


def package(name: str, field: str, imports: str, *requirements: str) -> Callable[[Callable[[], list[Case]]], None]:
    """Put the cases that the decorated function returns into :func:`packages`; without ``requirements`` the name is installed."""
    return lambda cases: _PACKAGES.update({name: Package(name, field, imports, cases, requirements or (name,))})
