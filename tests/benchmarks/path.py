"""Which files of this package a loader batch goes through: how many, and how often the way changes from one to another.

A tracer sees the calls between two draws from the loader, in a training that has been under way for some windows. Counted are calls
of functions of this package alone; a change is a call from a function in one of its files to a function in another, whatever is
called in between. Returns are not counted.

    python tests/benchmarks/path.py
    python tests/benchmarks/path.py --show "a batch split in four"
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import lightning_accum
from lightning_accum import GradientAccumulation

PACKAGE = str(Path(lightning_accum.__file__).parent)
SAMPLES, WINDOW, WINDOWS = 16, 4, 12
INSIDE, BOUNDARY = (WINDOWS - 2) * WINDOW + 1, (WINDOWS - 1) * WINDOW - 1
"""Loader batches, from 0: one inside of a window, and the last of one."""


@dataclass
class Way:
    """The calls between two draws from a loader, each as a file and a function."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    changes: int = 0

    def __str__(self) -> str:
        return f"{len({file for file, _ in self.calls}):4} files {self.changes:5} changes {len(self.calls):5} calls"

    def trace(self, frame: FrameType, event: str, argument: Any) -> None:
        """Called by the interpreter."""
        if event != "call" or not (file := frame.f_code.co_filename).startswith(PACKAGE):
            return
        self.calls.append((file[len(PACKAGE) + 1 :], frame.f_code.co_qualname))
        above = frame.f_back
        while above is not None and not above.f_code.co_filename.startswith(PACKAGE):
            above = above.f_back
        self.changes += above is not None and above.f_code.co_filename != file


class TracedBatches:
    """A loader that has the way of some of its batches traced."""

    def __init__(self, traced: tuple[int, ...]) -> None:
        self.ways = {number: Way() for number in traced}
        self._batch = torch.randn(SAMPLES, 8), torch.randint(4, (SAMPLES,))

    def __len__(self) -> int:
        return WINDOWS * WINDOW

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(len(self)):
            sys.setprofile(self.ways[number].trace if number in self.ways else None)
            yield self._batch
        sys.setprofile(None)


class OneLayer(pl.LightningModule):
    """The smallest model that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, target = batch
        return cross_entropy(self.layer(inputs), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Printer(pl.Callback):
    """Prints what was traced, on the first rank."""

    def __init__(self, names: dict[int, str], shown: str) -> None:
        self._names, self._shown = names, shown

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        for number, name in self._names.items():
            way = trainer.train_dataloader.ways[number]
            print(f"{name:36}{way}", flush=True)
            if name == self._shown:
                print(*(f"    {file:36}{function}" for file, function in way.calls), sep="\n")


def train(names: dict[int, str], shown: str, devices: int, **policy: Any) -> None:
    """Train, and print the ways of the batches that have a name."""
    strategy = "accum" if devices == 1 else "accum_ddp_fork"
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    callbacks = [GradientAccumulation(**policy), Printer(names, shown)]
    trainer = pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, callbacks=callbacks, max_epochs=1, **quiet)
    trainer.fit(OneLayer(), TracedBatches(tuple(names)))


def main() -> None:
    """Trace and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", default="", help="print the calls of the batch of this name")
    shown = parser.parse_args().show
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for devices, where in ((2, "DDP, "), (1, "")):
        train({INSIDE: f"{where}inside a window", BOUNDARY: f"{where}at a boundary"}, shown, devices, window=WINDOW)
        train({BOUNDARY: f"{where}a batch split in four"}, shown, devices, micro_batch=SAMPLES // 4)


if __name__ == "__main__":
    main()
