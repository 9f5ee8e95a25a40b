"""The way of a micro-batch through the package: its files, and how often the next call is in another one.

It is followed from ``on_train_batch_start`` to ``on_train_batch_end`` of one loader batch, after the first windows. This counts
what a reader has to open to understand a step, and is no measure of time.

    python tests/benchmarks/path.py --functions
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from side_by_side import Module, classify, command_line, fit, labelled, show
from torch import nn
from torch.utils.data import DataLoader

import lightning_accum

FEATURES, CLASSES, ROWS, WINDOW, FIRST, PACKAGE = 4, 3, 4, 4, 80, Path(lightning_accum.__file__).parent


class Follows(pl.Callback):  # notes the file and the name of each function of the package that one loader batch calls
    def __init__(self, batch_idx: int) -> None:
        self.batch_idx, self.calls = batch_idx, list[tuple[str, str]]()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch_idx:
            sys.setprofile(self.note)

    def on_train_batch_end(self, *_: Any) -> None:
        sys.setprofile(None)

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.calls.append((path.relative_to(PACKAGE).as_posix(), frame.f_code.co_name))


def main(functions: bool = False) -> None:
    loader, rows = DataLoader(labelled(ROWS, FEATURES, CLASSES, FIRST + WINDOW), batch_size=None), []
    whole, split = {"window": WINDOW}, {"micro_batch": ROWS // 4}
    ways = [("inside a window", 1, whole), ("at a boundary", WINDOW - 1, whole), ("split in four", 0, split)]
    for way, position, policy in ways:
        follows = Follows(FIRST + position)
        fit(Module(nn.Linear(FEATURES, CLASSES), classify), loader, callbacks=[follows], **policy)
        files = [file for file, _ in follows.calls]
        changes = sum(file != before for file, before in zip(files[1:], files, strict=False))
        rows.append([way, len(set(files)), changes, len(files)])
        if functions:
            show([way, ""], follows.calls)
    show(["loader batch", "files", "changes of file", "calls"], rows)


if __name__ == "__main__":
    command_line(main)
