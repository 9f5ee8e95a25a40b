"""One source for both of Lightning's packages, ``lightning.pytorch`` and ``pytorch_lightning``.

The two have a class of their own for everything, and a Trainer takes only its own. So whatever of this package imports
``lightning`` is loaded a second time, as ``lightning_accum.pytorch_lightning.<module>``, from the same file with other names in
it: Lightning makes its second package from the first by the same replacement. What does not import it, ``Tokens`` and the weights
among it, is shared.

Classes that are made in functions, for one package or the other, could not be pickled by name, nor read by a type checker. Here
tracebacks, breakpoints, coverage and ``inspect.getsource`` all show the one file. Nothing is loaded before it is used.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source, find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from lightning_accum.errors import WrongTypeError

_FIRST, _SECOND = "lightning_accum", "lightning_accum.pytorch_lightning"
_HOMES = {"lightning.pytorch": _FIRST, "pytorch_lightning": _SECOND}
"""Where this package is, for each of Lightning's."""
_RENAMED = (("lightning.pytorch", "pytorch_lightning"), ("lightning.fabric", "lightning_fabric"))
_OWN_IMPORT = re.compile(r"^([ \t]*(?:from|import)[ \t]+)lightning_accum\b(?!\.pytorch_lightning)", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|.*)|import[ \t]+([\w.]+))", re.MULTILINE)

_T = TypeVar("_T")


# --- the second loading -------------------------------------------------------------------------------------------------


def second(source: str) -> str:
    """The source of a module, for ``pytorch_lightning``. No line moves.

    Example:
        >>> second("import lightning.pytorch as pl"), second("from lightning_accum import loops")
        ('import pytorch_lightning as pl', 'from lightning_accum.pytorch_lightning import loops')
    """
    for name, other in _RENAMED:
        source = source.replace(name, other)
    return _OWN_IMPORT.sub(rf"\1{_SECOND}", source)


def first(source: str) -> str:
    """A source of ``pytorch_lightning``, as it is in ``lightning.pytorch``."""
    for name, other in _RENAMED:
        source = source.replace(other, name)
    return source


def imports(source: str) -> set[str]:
    """What a module imports: modules, and whatever else it takes from them."""
    found: set[str] = set()
    for origin, names, module in _IMPORT.findall(source):
        found |= {module or origin} | {f"{origin}.{name}" for name in re.findall(r"\w+", names)}
    return found


@cache
def loaded_twice() -> frozenset[str]:
    """The modules of this package that import ``lightning``, or one that does: they know which of its packages is used."""
    root = Path(__file__).parent
    left = {}
    for file in root.rglob("*.py"):
        name = ".".join((_FIRST, *file.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        left[name] = imports(file.read_text(encoding="utf-8")) | {name.rpartition(".")[0]}  # importing it imports its package
    del left[_FIRST]  # which imports nothing before it is used
    found = {name for name, names in left.items() if any(other.partition(".")[0] == "lightning" for other in names)}
    new = found
    while new:
        new = {name for name, names in left.items() if name not in found and names & new}
        found = found | new
    return frozenset(found)


class _Finder(MetaPathFinder):
    """Finds ``lightning_accum.pytorch_lightning.<module>``, and adds the strategies to a package of Lightning's as it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in _REGISTRIES:
            return _registered_when_loaded(name, path)
        if not name.startswith(f"{_SECOND}."):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None:
            return spec
        original = _FIRST + name.removeprefix(_SECOND)
        if original not in loaded_twice() and not spec.submodule_search_locations:  # a package holds modules of either kind
            return ModuleSpec(name, _Shared(original), origin=spec.origin)
        spec.loader = _Second(name, spec.origin)
        return spec


class _Second(SourceFileLoader):
    """Loads a module for ``pytorch_lightning``."""

    def source_to_code(self, data: Any, *args: Any, **kwargs: Any) -> CodeType:  # type: ignore[override]  # as the version has it
        return super().source_to_code(second(decode_source(data)), *args, **kwargs)

    def get_data(self, path: str) -> bytes:
        return super().get_data(_kept_at(path))

    def set_data(self, path: str, data: Any, **arguments: Any) -> None:
        super().set_data(_kept_at(path), data, **arguments)


def _kept_at(path: str) -> str:
    return f"{path.removesuffix('.pyc')}.pytorch_lightning.pyc" if path.endswith(".pyc") else path


class _Shared(Loader):
    """Gives a module that is the same for both."""

    def __init__(self, name: str) -> None:
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(self._name)  # which is what the import system then returns


# --- the names of the strategies ----------------------------------------------------------------------------------------

_REGISTRIES = {f"{family}.strategies": home for family, home in _HOMES.items()}


def install() -> None:
    """Have strategies found by their names, and the modules of this package under both of theirs."""
    sys.meta_path.insert(0, _Finder())
    for name in _REGISTRIES:
        if hasattr(sys.modules.get(name), "StrategyRegistry"):
            _register(name)


def _registered_when_loaded(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    specs = (finder.find_spec(name, path) for finder in sys.meta_path if not isinstance(finder, _Finder))
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is not None and spec.loader is not None:
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _register(name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


def _register(registry: str) -> None:
    """Add the strategies to Lightning's, under the names of its own with ``accum`` in front. They are loaded when they are used."""
    entries: list[tuple[str, str, dict[str, Any]]] = [
        ("accum", "AccumulationStrategy", {}),
        ("accum_fsdp", "FSDPAccumulationStrategy", {}),
        ("accum_fsdp_cpu_offload", "FSDPAccumulationStrategy", {"cpu_offload": True}),
        ("accum_model_parallel", "ModelParallelAccumulationStrategy", {}),
    ]
    for launcher, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
        entries.append((f"accum_ddp{launcher}", "DDPAccumulationStrategy", {"start_method": start_method}))
        for find_unused in (True, False):
            name = f"accum_ddp{launcher}_find_unused_parameters_{str(find_unused).lower()}"
            arguments = {"start_method": start_method, "find_unused_parameters": find_unused}
            entries.append((name, "DDPAccumulationStrategy", arguments))
    for name, strategy, arguments in entries:
        make = functools.partial(_make, f"{_REGISTRIES[registry]}.strategies", strategy)
        sys.modules[registry].StrategyRegistry.register(name, make, description=strategy, override=True, **arguments)


def _make(module: str, strategy: str, **arguments: Any) -> Any:
    return getattr(import_module(module), strategy)(**arguments)


# --- objects of the one and the other -----------------------------------------------------------------------------------


def public(name: str, home: str | None = None) -> Any:
    """What ``lightning_accum`` has under a name.

    Args:
        name: one of those in ``names.py``.
        home: ``"lightning_accum.pytorch_lightning"`` for its own; by default those for ``lightning.pytorch``, or for the other
            where only that is installed.

    Raises:
        AttributeError: there is nothing of that name.
        ModuleNotFoundError: neither is installed.
    """
    is_module = PathFinder.find_spec(name, sys.modules[_FIRST].__path__) is not None  # `from lightning_accum import seams`
    if is_module or (name.startswith("__") and name != "__all__"):
        raise AttributeError(f"module {home or _FIRST!r} has no attribute {name!r}")
    installed = [home for family, home in _HOMES.items() if find_spec(family.partition(".")[0]) is not None]
    if not installed:
        raise ModuleNotFoundError("lightning_accum needs Lightning: pip install lightning (or pytorch-lightning).")
    return getattr(import_module(f"{home or installed[0]}.names"), name)


def family_of(value: object) -> str | None:
    """Which of Lightning's packages the class of an object is derived from."""
    modules = (f"{base.__module__}." for base in type(value).__mro__)
    return next((family for module in modules for family in _HOMES if module.startswith(f"{family}.")), None)


def counterpart(thing: _T, family: str) -> _T:
    """A class or function of this package, as it is for one of Lightning's."""
    module, name = thing.__module__, thing.__name__  # type: ignore[attr-defined]
    inside = module.removeprefix(_SECOND) if module.startswith(_SECOND) else module.removeprefix(_FIRST)
    found: _T = getattr(import_module(_HOMES[family] + inside), name)
    return found


def adopt(callback: object, trainer: object) -> bool:
    """Make a callback of this package one of the Trainer's: it gets the class of the same name there. Whether it was another.

    Raises:
        TypeError: its class is the user's, derived from one for another Trainer.
    """
    family, given = family_of(trainer), family_of(callback)
    base = _own_class(callback)
    if base is None or family is None or family == given:
        return False
    if base is not type(callback):
        raise WrongTypeError(
            f"{type(callback).__name__} is derived from {base.__name__} of {given}, but the Trainer is of {family}. Derive it from"
            f" that of the Trainer: from {_HOMES[family]} import {base.__name__}"
        )
    callback.__class__ = counterpart(base, family)
    return True


def _own_class(value: object) -> type | None:
    """The class of this package that an object is of, or that its class is derived from."""
    return next((base for base in type(value).__mro__ if base.__module__.startswith(f"{_FIRST}.")), None)


def by_module(function: Callable[..., _T]) -> Callable[..., _T]:
    """Let a function, whose first argument is a LightningModule, take those of both: each goes to its own.

    Raises:
        TypeError: (the function) the second argument is of another than the first.
    """

    @functools.wraps(function)
    def of_its_family(module: Any, *args: Any, **kwargs: Any) -> _T:
        family = family_of(getattr(module, "_orig_mod", module))
        data = args[0] if args else kwargs.get("data")
        if None not in (family, family_of(data)) and family != family_of(data):
            raise WrongTypeError(
                f"{type(data).__name__} is of {family_of(data)}, but {type(module).__name__} of {family}: import both from one"
                " of them."
            )
        if family is None:
            return function(module, *args, **kwargs)
        theirs: Any = counterpart(function, family)
        return theirs.__wrapped__(module, *args, **kwargs)  # type: ignore[no-any-return]

    return of_its_family


def in_words(strategy: object) -> str:
    """A strategy, and what to use with the other Trainer: Lightning shows it where it refuses an object that is none of its own."""
    given, own = family_of(strategy), _own_class(strategy)
    (other,) = (f"with `import {other}`: from {home} import" for other, home in _HOMES.items() if other != given)
    return f"<{type(strategy).__name__} for `import {given}`; {other} {own.__name__ if own else ''}>"
