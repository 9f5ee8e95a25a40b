"""The command line: ``lightning-accum``."""

from __future__ import annotations

import argparse
import inspect
import pkgutil
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_accum.errors import ArgumentError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0 for success, 1 if the command failed; exits with 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="lightning-accum", description="Exact gradient accumulation for PyTorch Lightning.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('lightning-accum')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="show the effect of exact accumulation", description=DEMO))
    _add_verify(commands.add_parser("verify", help="verify your module", description=VERIFY))
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.command(arguments))
    except ArgumentError as error:
        parser.error(str(error))


DEMO = """Train a small language model on 101 paragraphs of Python's own reference, shuffled in every epoch, with the same 32
samples in every optimizer step: as one batch, with Lightning's own accumulation, and with lightning_accum in eight mixes of
ranks (1, 2, 4; DDP and FSDP2), window and micro-batch. Needs no download and no GPU; takes about a minute. The exit status is 0
if every run of lightning_accum has the losses and parameters of the full batch, to 1e-12; 1 if one has not, or if the demo
cannot run; 2 if the arguments are wrong."""


def _add_demo(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--epochs", type=_natural, default=3, metavar="N", help="passes over the corpus (default: %(default)s)")
    add("--out", type=Path, default="accum_demo", metavar="FOLDER", help="for loss_curves.png (default: %(default)s)")
    parser.set_defaults(command=_demo)


VERIFY = """Take one optimizer step of a module as a full batch and one accumulated, compare them, and name the cause
of a difference. MODULE and DATA are written package.module:name; a class or a function is called without arguments. The exit
status is 0 only if the steps are equal; 1 if not, or if they cannot be compared; 2 if the arguments are wrong. One of --window,
--micro-batch and --devices is needed, or several. The function lightning_accum.verify takes more."""


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("module", metavar="MODULE", help="a LightningModule, its class or a function: package.module:name")
    add = parser.add_argument
    add("--data", metavar="DATA", help="a LightningDataModule, a loader or a batch (default: the module's own train_dataloader)")
    add("--loss-of", metavar="FUNCTION", help="loss_of(module, batch), for any other module: package.module:name")
    add("--window", type=_natural, metavar="N", help="loader batches in a window")
    add("--micro-batch", type=_natural, metavar="N", help="samples in the micro-batches that each loader batch is split into")
    add("--devices", type=_natural, default=1, metavar="N", help="ranks that share the window")
    add("--strategy", default="accum_ddp", metavar="NAME", help="of the Trainer, over several devices (default: %(default)s)")
    add("--precision", default="64-true", help="of the Trainer (default: %(default)s)")
    parser.set_defaults(command=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    if str(Path.cwd()) not in sys.path:  # `python -m` adds it, too
        sys.path.insert(0, str(Path.cwd()))
    module = _made(arguments.module)  # before Lightning is imported here: the module decides which package
    data = None if arguments.data is None else _made(arguments.data)
    loss_of = None if arguments.loss_of is None else _named(arguments.loss_of)

    from lightning_accum import AccumulationError, verify
    from lightning_accum.trainer.from_lightning import MisconfigurationException

    how = {name: getattr(arguments, name) for name in ("window", "micro_batch", "devices", "strategy", "precision")}
    try:
        report = verify(module, data, loss_of=loss_of, **how)
    except (MisconfigurationException, AccumulationError) as error:
        print(f"{error}\n(micro_batch= is --micro-batch here, and so on.)", file=sys.stderr)
        return 1
    print(report)
    return 0 if report else 1


def _made(name: str) -> Any:
    """The object named by ``package.module:name``; a class or a function is called."""
    thing = _named(name)
    return thing() if isinstance(thing, (type, partial)) or inspect.isroutine(thing) else thing


def _named(name: str) -> Any:
    if not all(name.partition(":")):
        raise ArgumentError(f"{name!r}: expected package.module:name")
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(f"{name!r} cannot be imported here: {error}") from error


def _natural(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _demo(arguments: argparse.Namespace) -> int:
    if find_spec("matplotlib") is None:
        print("The demo needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)  # fail now, not after a minute of training
    print("Trains a small language model 11 times, 32 samples a step, for about a minute.\n", flush=True)
    from lightning_accum.demo import run_demo

    return run_demo(arguments.epochs, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
