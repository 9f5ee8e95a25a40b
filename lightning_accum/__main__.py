"""The command line: ``lightning-accum``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any


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
    from lightning_accum.verification.command import run_verify

    return run_verify(arguments)


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
        print("The demo needs matplotlib: pip install matplotlib scikit-learn", file=sys.stderr)
        return 1
    from lightning_accum.demo.run import run_demo

    return run_demo(arguments.epochs, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
