"""``lightning-accum verify``: a verification for a continuous integration job."""

from __future__ import annotations

import argparse
import inspect
import os
import pkgutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_accum.callback import GradientAccumulation
from lightning_accum.errors import ArgumentError
from lightning_accum.splitting.joining import JoiningError
from lightning_accum.verification.run import verify
from lightning_accum.verification.step import quiet, trainer_of_one_step


class CommandLineError(ArgumentError):
    """The arguments of the command line are wrong."""


def run_verify(arguments: argparse.Namespace) -> int:
    """Print the report.

    Returns:
        The exit status: 0 where the steps are equal; 1 where not, or where they cannot be compared; 2 where the arguments are
        wrong.
    """
    if str(Path.cwd()) not in sys.path:  # as `python -m` has it
        sys.path.insert(0, str(Path.cwd()))
    trainer = {name: getattr(arguments, name) for name in ("precision", "accelerator", "gradient_clip_val")}
    try:
        policy = {"weight": _weight(arguments.weight)}
        if (arguments.window or 1) * arguments.devices == 1 and arguments.micro_batch is None:
            raise CommandLineError("say how the step is accumulated, by --window or --micro-batch (or both), or over --devices")
        join = None if arguments.join is None else found(arguments.join)
        _check(arguments, policy, trainer)
        module = made(arguments.module)
        data = None if arguments.data is None else made(arguments.data)
    except CommandLineError as error:
        print(f"lightning-accum verify: error: {error}", file=sys.stderr)
        return 2
    try:
        over = {"devices": arguments.devices, "strategy": arguments.strategy}
        report = verify(module, data, arguments.window, arguments.micro_batch, join=join, **over, **trainer, **policy)
    except (MisconfigurationException, JoiningError) as error:
        print(f"{error}\n(micro_batch= is --micro-batch here, and so on.)", file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") == "0" or arguments.devices == 1:  # under torchrun all processes have the same report
        print(report)
    return 0 if report else 1


def _check(arguments: argparse.Namespace, policy: dict[str, Any], trainer: dict[str, Any]) -> None:
    """What the Trainer and the callback do not take is wrong with the arguments, whatever the module."""
    try:
        GradientAccumulation(arguments.window or 1, micro_batch=arguments.micro_batch, **policy)
        with quiet():
            trainer_of_one_step([], devices=1, **trainer)
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        raise CommandLineError(str(error)) from error


def _weight(text: str) -> Any:
    if text in ("auto", "equal"):
        return text
    if ":" not in text:
        raise CommandLineError(f"--weight {text}: expected auto, equal or package.module:name of a callable")
    weight = found(text)
    return weight() if isinstance(weight, type) else weight


def made(name: str) -> Any:
    """What ``package.module:name`` stands for; called, where it is a class or a function.

    Raises:
        CommandLineError: there is no such thing.

    Example:
        >>> made("lightning.pytorch.demos.boring_classes:BoringModel").layer
        Linear(in_features=32, out_features=2, bias=True)
    """
    thing = found(name)
    if not isinstance(thing, (type, partial)) and not inspect.isroutine(thing):
        return thing
    try:
        inspect.signature(thing).bind()
    except TypeError as error:
        raise CommandLineError(f"{name} is called without arguments, but: {error}. Write a function that makes it.") from error
    except ValueError:  # it has no signature
        pass
    return thing()


def found(name: str) -> Any:
    """What ``package.module:name`` stands for.

    Raises:
        CommandLineError: there is no such thing.
    """
    module, _, path = name.partition(":")
    if not (module and path):
        raise CommandLineError(f"{name!r} is not of the form package.module:name")
    try:
        return pkgutil.resolve_name(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of an import inside of it
        raise CommandLineError(f"There is no module {error.name!r} (from {name!r}); run this where it can be imported.") from error
    except AttributeError as error:
        raise CommandLineError(f"{module!r} has no {path!r}: {error}") from error
