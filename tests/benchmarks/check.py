"""What the check of the first batch costs: its seconds, and the bytes that autograd holds in it, beside those of a micro-batch.

A small perceptron, a small GPT and a convolutional network are trained in windows of 8 micro-batches of 8 rows. The check runs once
a fit: it takes what a fit with it takes longer than one with ``check=False``, up to the end of the first window. The time of a
window is that of the others; medians over the rounds. Bytes are those at the peak, in a fit of its own.

    python tests/benchmarks/check.py --rounds 5
"""

import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from side_by_side import CLOCKS, GPT, Module, SavedBytes, classify, command_line, fit, interleaved, show
from support import language_loss, loader
from torch import Tensor, nn

ROWS, WINDOW, WINDOWS = 8, 8, 6


def convolutions() -> nn.Module:
    layers = [(nn.Conv2d(i, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU()) for i in (3, 32, 32, 32)]
    return nn.Sequential(*(one for layer in layers for one in layer), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def images(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, *shape), torch.randint(10, (ROWS,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[..., Tensor]]] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)), partial(images, 64), classify
    ),
    "GPT": (
        lambda: GPT(256, 128, 2, 64), lambda: torch.randint(256, (ROWS, 64)), lambda net, tokens: language_loss(net(tokens), tokens)
    ),
    "convolutions": (convolutions, partial(images, 3, 32, 32), classify),
}  # fmt: skip


class Windows(pl.Callback):  # reads a meter where training begins, and at the end of each window
    def __init__(self, read: Callable[[], float]) -> None:
        self.read, self.readings = read, [0.0]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.readings = [self.read()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % WINDOW == 0:
            self.readings.append(self.read())


def train(name: str, read: Callable[[], float], check: bool, around: Any = None) -> list[float]:
    """What the meter shows at the start, and after each window."""
    make, draw, loss = MODELS[name]
    module, windows = Module(make(), loss), Windows(read)
    if around is not None:
        around.leave_out([parameter.detach() for parameter in module.parameters()])
    fit(module, loader([draw() for _ in range(WINDOW * WINDOWS)]), callbacks=[windows], window=WINDOW, check=check)
    return windows.readings


def peaks(name: str) -> tuple[int, int]:  # bytes at the peak of the first window, and of a later one
    with SavedBytes() as saved:

        def read() -> int:
            peak = saved.peak
            saved.restart()
            return peak

        _, first, *others = train(name, read, True, saved)
    return int(first), int(max(others))


def main(rounds: int = 5, clock: str = "wall") -> None:  # print a table
    table = []
    for name in MODELS:
        sides = {check: partial(train, name, CLOCKS[clock], check) for check in (True, False)}
        found = interleaved(sides, rounds)  # type: ignore[arg-type]
        first = {check: statistics.median(readings[1] - readings[0] for readings in fits) for check, fits in found.items()}
        window = statistics.median(b - a for readings in found[False] for a, b in pairwise(readings[1:]))
        in_check, in_micro_batch = peaks(name)
        seconds = (first[True] - first[False], window / WINDOW, window)
        table.append([name, *(f"{second * 1e3:.2f}" for second in seconds), f"{in_check / 1e6:.2f}", f"{in_micro_batch / 1e6:.2f}"])
    show(["", "check, ms", "micro-batch, ms", "window, ms", "check, MB", "micro-batch, MB"], table)


if __name__ == "__main__":
    command_line(main)
