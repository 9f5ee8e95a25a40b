"""Which of Lightning's two packages this process uses, ``lightning.pytorch`` or ``pytorch_lightning``: decided once.

Each has its own classes, and a Trainer accepts only the classes of its package. Names of strategies are registered with both, since
packages are loaded lazily.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from lightning_accum.errors import WrongTypeError

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_taken: str | None = None


def take(wanted: str | None = None) -> str:
    """The package of this process: the requested one, else the imported one, else the installed one, at the first call."""
    global _taken
    if _taken is None:
        found = [name for name in PACKAGES if sys.modules.get(name) is not None]
        found = found or [name for name in PACKAGES if find_spec(name.partition(".")[0]) is not None]
        if not found:
            raise ModuleNotFoundError("lightning_accum needs Lightning: pip install lightning (or pytorch-lightning).")
        _taken = wanted or found[0]
    if wanted not in (None, _taken):
        raise WrongTypeError(_other("lightning_accum was asked for", wanted))
    return _taken


def check_package(value: object) -> None:
    """Raise a TypeError for an object whose class derives from a class of the other package."""
    (other,) = (name for name in PACKAGES if name != take())
    if any(f"{base.__module__}.".startswith(f"{other}.") for base in type(value).__mro__):
        raise WrongTypeError(_other(f"{type(value).__name__} is of", other))


def _other(what: str, other: str | None) -> str:
    by_hand = "import lightning_accum.pytorch_lightning before all other names of lightning_accum"
    mend = by_hand if other == PACKAGES[1] else f"import {other} before lightning_accum, and not {_taken}"
    return (
        f"{what} {other}, but lightning_accum uses {_taken} in this process. Their classes differ, so import everything from one "
        f"of them. For {other}, {mend}."
    )


# --- the names of the strategies ----------------------------------------------------------------------------------------

_REGISTRIES = {f"{package}.strategies": package for package in PACKAGES}


class _Finder(MetaPathFinder):
    """Adds the strategies to a package of Lightning when it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _REGISTRIES:
            return None
        specs = (finder.find_spec(name, path) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                """Register them, too."""
                load(module)
                _register(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Register the names of the strategies with both packages."""
    sys.meta_path.insert(0, _Finder())
    for name in _REGISTRIES:
        if hasattr(sys.modules.get(name), "StrategyRegistry"):
            _register(sys.modules[name])


def _register(strategies: ModuleType) -> None:
    """Register the strategies with Lightning, by Lightning's names with ``accum`` in front."""
    registry, package = strategies.StrategyRegistry, _REGISTRIES[strategies.__name__]
    entries: list[tuple[str, str, dict[str, Any]]] = [("accum", "AccumulationStrategy", {})]
    entries += [("accum_model_parallel", "ModelParallelAccumulationStrategy", {})]
    for name, entry in registry.items():
        if (kind := name.partition("_")[0]) in ("ddp", "fsdp"):
            entries.append((f"accum_{name}", f"{kind.upper()}AccumulationStrategy", entry["init_params"]))
    for name, strategy, arguments in entries:
        registry.register(name, partial(_make, package, strategy), description=strategy, override=True, **arguments)


def _make(package: str, strategy: str, **arguments: Any) -> Any:
    take(package)
    return getattr(import_module("lightning_accum.names"), strategy)(**arguments)
