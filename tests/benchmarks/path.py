"""Which files of this package a loader batch goes through: how many, and how often the way changes from one to another.

A tracer sees the calls between two draws from the loader, in a training that has been under way for some windows. Counted are calls
of functions of this package alone; a change is a call from a function in one of its files to a function in another, whatever is
called in between. Returns are not counted.

    python tests/benchmarks/path.py
    python tests/benchmarks/path.py --calls "a batch split in four"
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from side_by_side import Module, classify, command_line, labelled, show
from support import trainer
from torch import Tensor, nn

import lightning_accum
from lightning_accum import GradientAccumulation

PACKAGE = str(Path(lightning_accum.__file__).parent)
ROWS, WINDOW, WINDOWS = 16, 4, 12
INSIDE, BOUNDARY = (WINDOWS - 2) * WINDOW + 1, (WINDOWS - 1) * WINDOW - 1
"""Loader batches, from 0: one inside of a window, and the last of one."""


class Way:
    """The calls between two draws from a loader, each as a file and a function."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.changes = 0

    def trace(self, frame: FrameType, event: str, argument: Any) -> None:
        """Called by the interpreter."""
        if event != "call" or not (file := frame.f_code.co_filename).startswith(PACKAGE):
            return
        self.calls.append((file[len(PACKAGE) + 1 :], frame.f_code.co_name))
        above = frame.f_back
        while above is not None and not above.f_code.co_filename.startswith(PACKAGE):
            above = above.f_back
        self.changes += above is not None and above.f_code.co_filename != file


class TracedBatches:
    """A loader that has the way of some of its batches traced."""

    def __init__(self, *traced: int) -> None:
        self.ways = {number: Way() for number in traced}
        (self._batch,) = labelled(ROWS, 8, 4, 1)

    def __len__(self) -> int:
        return WINDOWS * WINDOW

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(len(self)):
            sys.setprofile(self.ways[number].trace if number in self.ways else None)
            yield self._batch
        sys.setprofile(None)


class Printer(pl.Callback):
    """Prints what was traced, on the first rank."""

    def __init__(self, names: dict[int, str], shown: str | None) -> None:
        self._names, self._shown = names, shown

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            ways = {name: trainer.train_dataloader.ways[number] for number, name in self._names.items()}
            rows = [[name, len({file for file, _ in way.calls}), way.changes, len(way.calls)] for name, way in ways.items()]
            show(["", "files", "changes", "calls"], rows)
            if self._shown in ways:
                show(["file", "function"], ways[self._shown].calls)


def main(calls: str | None = None) -> None:
    """Trace and print; with ``--calls``, the calls of the batch of this name."""
    for devices, where in ((2, "DDP, "), (1, "")):
        for names, policy in (
            ({INSIDE: f"{where}inside a window", BOUNDARY: f"{where}at a boundary"}, {"window": WINDOW}),
            ({BOUNDARY: f"{where}a batch split in four"}, {"micro_batch": ROWS // 4}),
        ):
            strategy = "accum" if devices == 1 else "accum_ddp_fork"
            run = trainer(strategy, devices=devices, callbacks=[GradientAccumulation(**policy), Printer(names, calls)])
            run.fit(Module(nn.Linear(8, 4), classify), TracedBatches(*names))


if __name__ == "__main__":
    command_line(main)
