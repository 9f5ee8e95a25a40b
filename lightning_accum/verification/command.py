"""``lightning-accum verify``: a verification for a continuous integration job."""

from __future__ import annotations

import argparse
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_accum.verification.joining import JoiningError
from lightning_accum.verification.run import verify


class NotFoundError(ValueError):
    """What a name on the command line stands for is not there."""


def run_verify(arguments: argparse.Namespace) -> int:
    """Print the report.

    Args:
        arguments: those of the command line.

    Returns:
        The exit status: 0 where the steps are equal; 1 where not, or where they cannot be compared; 2 where a name stands for
        nothing.
    """
    if arguments.figure is not None and find_spec("matplotlib") is None:
        return _say("--figure needs matplotlib: pip install 'lightning-accum[demo]'", 1)
    if str(Path.cwd()) not in sys.path:  # as `python -m` has it
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = made(arguments.module)
        data = None if arguments.data is None else made(arguments.data)
        report = verify(
            module,
            data,
            arguments.window,
            arguments.micro_batch,
            precision=arguments.precision,
            accelerator=arguments.accelerator,
            gradient_clip_val=arguments.gradient_clip_val,
            weight=arguments.weight,
            batch_norm=arguments.batch_norm,
        )
    except NotFoundError as error:
        return _say(str(error), 2)
    except (MisconfigurationException, JoiningError) as error:
        return _say(str(error), 1)
    print(report)
    if arguments.figure is not None:
        report.plot(arguments.figure)
    return 0 if report else 1


def made(name: str) -> Any:
    """What ``package.module:name`` stands for; made, where it is a class or a function.

    Raises:
        NotFoundError: there is no such thing.

    Example:
        >>> made("lightning.pytorch.demos.boring_classes:BoringModel").layer
        Linear(in_features=32, out_features=2, bias=True)
    """
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise NotFoundError(f"{name!r} is not of the form package.module:name")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # of an import inside of it
        raise NotFoundError(f"There is no module {error.name!r} (from {name!r}); run this where it can be imported.") from error
    for step in path.split("."):
        if not hasattr(found, step):
            raise NotFoundError(f"{module_name!r} has no {path!r}.")
        found = getattr(found, step)
    is_factory = isinstance(found, type) or type(found).__name__ in ("function", "method", "builtin_function_or_method", "partial")
    return found() if is_factory else found


def _say(text: str, status: int) -> int:
    print(text, file=sys.stderr)
    return status
