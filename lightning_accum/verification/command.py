"""``lightning-accum verify``: a verification for a continuous integration job."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_accum.callback import GradientAccumulation
from lightning_accum.verification.joining import JoiningError
from lightning_accum.verification.run import verify
from lightning_accum.verification.step import quiet

_ARGUMENTS = "data|window|micro_batch|weight|precision|accelerator|gradient_clip_val|join"


class UsageError(ValueError):
    """The arguments of the command line are wrong."""


def run_verify(arguments: argparse.Namespace) -> int:
    """Print the report.

    Args:
        arguments: those of the command line.

    Returns:
        The exit status: 0 where the steps are equal; 1 where not, or where they cannot be compared; 2 where the arguments are
        wrong.
    """
    if arguments.figure is not None and find_spec("matplotlib") is None:
        return _say("--figure needs matplotlib: pip install 'lightning-accum[demo]'", 1)
    if str(Path.cwd()) not in sys.path:  # as `python -m` has it
        sys.path.insert(0, str(Path.cwd()))
    trainer = {name: getattr(arguments, name) for name in ("precision", "accelerator", "gradient_clip_val")}
    try:
        if arguments.figure is not None:
            _check_figure(arguments.figure)
        policy = {"weight": _weight(arguments.weight)}
        if (arguments.window or 1) == 1 and arguments.micro_batch is None:
            raise UsageError("say how the step is accumulated, by --window or --micro-batch (or both)")
        join = None if arguments.join is None else found(arguments.join)
        _check(arguments, policy, trainer)
        module = made(arguments.module)
        data = None if arguments.data is None else made(arguments.data)
    except UsageError as error:
        return _say(f"lightning-accum verify: error: {error}", 2)
    try:
        report = verify(module, data, arguments.window, arguments.micro_batch, join=join, **trainer, **policy)
    except (MisconfigurationException, JoiningError) as error:
        return _say(in_options(str(error)), 1)
    print(report)
    if arguments.figure is not None:
        report.plot(arguments.figure)
    return 0 if report else 1


def _check(arguments: argparse.Namespace, policy: dict[str, Any], trainer: dict[str, Any]) -> None:
    """What the Trainer and the callback do not take is wrong with the arguments, whatever the module."""
    try:
        GradientAccumulation(arguments.window or 1, micro_batch=arguments.micro_batch, **policy)
        with quiet():
            pl.Trainer(**trainer, devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        raise UsageError(in_options(str(error))) from error


def _check_figure(path: Path) -> None:
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().lstrip(".") not in known:
        raise UsageError(f"--figure {path}: the file has to end in one of {', '.join(sorted(known))}")


def _weight(text: str) -> Any:
    if text in ("auto", "equal"):
        return text
    if ":" not in text:
        raise UsageError(f"--weight {text}: expected auto, equal or package.module:name of a callable")
    weight = found(text)
    return weight() if isinstance(weight, type) else weight


def in_options(text: str) -> str:
    """A message about arguments of Python, with the options that they are here.

    Example:
        >>> in_options('pass verify(precision="32-true"), or window= instead of micro_batch=')
        'pass --precision 32-true, or --window instead of --micro-batch'
    """
    call = rf"verify\(({_ARGUMENTS})=([^()]*(?:\([^()]*\))?)\)"
    parts = re.split(r"(GradientAccumulation\([^()]*\))", text)  # that is written in Python here, too
    for place, part in enumerate(parts[::2]):
        part = re.sub(call, lambda found: f"{_option(found[1])} {found[2]}".replace('"', "").removesuffix(" ..."), part)
        part = re.sub(rf"(?<![\w(.-])({_ARGUMENTS})=(?=[<\w'\"])", lambda found: f"{_option(found[1])} ", part)
        parts[2 * place] = re.sub(rf"(?<![\w(.-])({_ARGUMENTS})=(\.\.\.)?", lambda found: _option(found[1]), part)
    return "".join(parts)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def made(name: str) -> Any:
    """What ``package.module:name`` stands for; made, where it is a class or a function.

    Raises:
        UsageError: there is no such thing.

    Example:
        >>> made("lightning.pytorch.demos.boring_classes:BoringModel").layer
        Linear(in_features=32, out_features=2, bias=True)
    """
    thing = found(name)
    is_factory = isinstance(thing, type) or type(thing).__name__ in ("function", "method", "builtin_function_or_method", "partial")
    if not is_factory:
        return thing
    try:
        inspect.signature(thing).bind()
    except TypeError as error:
        raise UsageError(f"{name} is called without arguments, but: {error}. Write a function that makes it.") from error
    except ValueError:  # it has no signature
        pass
    return thing()


def found(name: str) -> Any:
    """What ``package.module:name`` stands for.

    Raises:
        UsageError: there is no such thing.
    """
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise UsageError(f"{name!r} is not of the form package.module:name")
    try:
        thing: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # of an import inside of it
        raise UsageError(f"There is no module {error.name!r} (from {name!r}); run this where it can be imported.") from error
    for step in path.split("."):
        if not hasattr(thing, step):
            raise UsageError(f"{module_name!r} has no {path!r}.")
        thing = getattr(thing, step)
    return thing


def _say(text: str, status: int) -> int:
    print(text, file=sys.stderr)
    return status
