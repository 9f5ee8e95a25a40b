"""The command line: ``lightning-accum``."""

from __future__ import annotations

import argparse
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_accum.errors import ArgumentError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status: 0 for success, 1 where the command ran and failed, 130 where it was interrupted.

    Raises:
        SystemExit: with status 2 if the arguments are wrong, with 0 for ``--help``.

    Example:
        >>> main(["demo", "--epochs", "0"])
        Traceback (most recent call last):
        SystemExit: 2
    """
    parser = argparse.ArgumentParser(prog="lightning-accum", description="Exact gradient accumulation for PyTorch Lightning.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('lightning-accum')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="see what exact accumulation changes", description=DEMO))
    _add_verify(commands.add_parser("verify", help="prove a module of yours", description=VERIFY))
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.command(arguments))
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


DEMO = """Train a small language model on 101 docstrings of Python's standard library, shuffled in every epoch, with the same 32
samples in every optimizer step: as one batch, with Lightning's own accumulation, and with lightning_accum in eight mixes of
ranks (1, 2, 4; DDP and FSDP2), window and micro-batch. Needs no download and no GPU; takes about a minute. The exit status is 0
if every run of lightning_accum has the losses and parameters of the full batch, to 1e-12; 1 if one has not, or if the demo
cannot run; 2 if the arguments are wrong."""


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epochs", type=_natural, default=3, metavar="N", help="passes over the corpus (default: %(default)s)")
    parser.add_argument(
        "--out", type=_folder, default="accum_demo", metavar="FOLDER",
        help="where to write loss_curves.png and runs.csv (default: %(default)s)",
    )  # fmt: skip
    parser.set_defaults(command=_demo)


VERIFY = """Take one optimizer step of a LightningModule as a full batch and one accumulated, compare them, and name what breaks
equality. MODULE and DATA are written package.module:name; a class or a function is called without arguments. The exit status is
0 only if the steps are equal; 1 if not, or if they cannot be compared; 2 if the arguments are wrong. One of --window,
--micro-batch and --devices is needed, or several."""


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("module", metavar="MODULE", help="a LightningModule, or what makes one: package.module:name")
    add = parser.add_argument
    add("--data", metavar="DATA", help="a LightningDataModule, a loader or a batch (default: the module's own train_dataloader)")
    add("--window", type=_natural, metavar="N", help="loader batches in a window")
    add(
        "--micro-batch", type=_micro_batch, metavar="N",
        help="samples in the micro-batches that each loader batch is split into; 8192tokens, or 'Tokens(8192)', for as many tokens",
    )  # fmt: skip
    add(
        "--weight", default="auto", metavar="WEIGHT",
        help="of GradientAccumulation: auto, equal, or package.module:name of a callable (default: %(default)s)",
    )  # fmt: skip
    add("--devices", type=_natural, default=1, metavar="N", help="ranks that share the window; under torchrun, its processes")
    add("--strategy", default="accum_ddp", metavar="NAME", help="of the Trainer, over several devices (default: %(default)s)")
    add("--join", metavar="FUNCTION", help="package.module:name of a function that makes one batch of several")
    add("--precision", default="64-true", help="of the Trainer (default: %(default)s)")
    add("--accelerator", default="cpu", help="of the Trainer (default: %(default)s)")
    add("--gradient-clip-val", type=float, metavar="NORM", help="of the Trainer")
    parser.set_defaults(command=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    if str(Path.cwd()) not in sys.path:  # as `python -m` has it
        sys.path.insert(0, str(Path.cwd()))
    with suppress(Exception):  # what is wrong with it is said below; its Lightning is the one that is used
        import_module(arguments.module.partition(":")[0])

    from lightning_accum import AccumulationError, GradientAccumulation, verify
    from lightning_accum.from_lightning import MisconfigurationException
    from lightning_accum.verification.step import quiet, trainer_of_one_step

    trainer = {name: getattr(arguments, name) for name in ("precision", "accelerator", "gradient_clip_val")}
    try:
        weight = arguments.weight
        if weight not in ("auto", "equal"):
            weight = _found(weight, "auto, equal or package.module:name of a callable")
        policy = {"micro_batch": arguments.micro_batch, "weight": weight() if isinstance(weight, type) else weight}
        if (arguments.window or 1) * arguments.devices == 1 and arguments.micro_batch is None:
            raise ArgumentError("say how the step is accumulated, by --window or --micro-batch (or both), or over --devices")
        join = None if arguments.join is None else _found(arguments.join)
        with quiet():  # what these do not take is wrong with the arguments, whatever the module
            GradientAccumulation(arguments.window or 1, **policy)
            trainer_of_one_step([], devices=1, **trainer)
        module = _made(arguments.module)
        data = None if arguments.data is None else _made(arguments.data)
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        print(f"lightning-accum verify: error: {error}", file=sys.stderr)
        return 2
    try:
        over = {"devices": arguments.devices, "strategy": arguments.strategy, "window": arguments.window}
        report = verify(module, data, join=join, **over, **trainer, **policy)
    except (MisconfigurationException, AccumulationError) as error:
        print(f"{error}\n(micro_batch= is --micro-batch here, and so on.)", file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") == "0" or arguments.devices == 1:  # under torchrun all processes have the same report
        print(report)
    return 0 if report else 1


def _made(name: str) -> Any:
    """What ``package.module:name`` stands for; called if it is a class or a function."""
    thing = _found(name)
    if not isinstance(thing, (type, partial)) and not inspect.isroutine(thing):
        return thing
    try:
        inspect.signature(thing).bind()
    except TypeError as error:
        raise ArgumentError(f"{name} is called without arguments, but: {error}. Write a function that makes it.") from error
    except ValueError:  # it has no signature
        pass
    return thing()


def _found(name: str, expected: str = "package.module:name") -> Any:
    if not all(name.partition(":")):
        raise ArgumentError(f"{name!r}: expected {expected}")
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"{name!r} cannot be imported here: {error}") from error


def _natural(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _micro_batch(text: str) -> Any:
    found = re.fullmatch(r"(\d+) *tokens?|Tokens\((\d+)\)", text)
    if found is None:
        return _natural(text)
    from lightning_accum.splitting.micro_batch import Tokens

    return Tokens(_natural(found[1] or found[2]))


def _folder(text: str) -> Path:
    """Make the folder now: not to learn after minutes of training that there is none."""
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be a folder: {error.strerror}") from error
    return folder


def _demo(arguments: argparse.Namespace) -> int:
    if find_spec("matplotlib") is None:
        print("The demo needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    print("One small language model, trained 11 times with 32 samples a step: a minute.\n", flush=True)
    from lightning_accum.demo.run import run_demo

    return run_demo(arguments.epochs, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
