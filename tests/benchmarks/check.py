"""What the check of the first batch costs: its seconds, and the bytes that autograd holds in it, beside those of a micro-batch.

A small perceptron, a small GPT and a convolutional network are trained in windows of 8 micro-batches of 8 rows. The check runs once
a fit; its time is the least of five fits after a first one, and that of a micro-batch and a window the median of the same fits.

    python tests/benchmarks/check.py
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning.pytorch as pl
import torch
from memory import SavedBytes
from support import TinyGPT, language_loss, loader, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation
from lightning_accum.loops import optimization

ROWS, WINDOW, WINDOWS, FITS = 8, 8, 6, 5

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)), lambda: torch.randn(ROWS, 64)),
    "GPT": (lambda: TinyGPT(256, 128, 64), lambda: torch.randint(0, 256, (ROWS, 64))),
    "convolutions": (
        lambda: nn.Sequential(
            *(layer for i in (3, 32, 32, 32) for layer in (nn.Conv2d(i, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU())),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        ),
        lambda: torch.randn(ROWS, 3, 32, 32),
    ),
}


class Timed(pl.LightningModule):
    """Notes when its batches begin and end."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.net = make()
        self.parameters_seen = [parameter.detach() for parameter in self.parameters()]
        self.marks: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if isinstance(self.net, TinyGPT):
            return language_loss(self.net(batch), batch)
        return F.cross_entropy(self.net(batch), batch.flatten(1).abs().long().sum(1) % 10)

    def on_train_batch_start(self, *args: Any) -> None:
        self.marks.append(time.perf_counter())

    def on_train_batch_end(self, *args: Any) -> None:
        self.marks.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Cost:
    """Stands in for the check, and measures it."""

    def __init__(self, saved: SavedBytes) -> None:
        self.seconds, self.bytes, self._saved, self._check = 0.0, 0, saved, optimization.check_first_batch

    def __call__(self, *args: Any) -> None:
        self._saved.restart()
        begin = time.perf_counter()
        self._check(*args)
        self.seconds, self.bytes = time.perf_counter() - begin, self._saved.peak
        self._saved.restart()

    def __enter__(self) -> Cost:
        optimization.check_first_batch = self
        return self

    def __exit__(self, *exception: Any) -> None:
        optimization.check_first_batch = self._check


def measured(name: str) -> tuple[float, float, float, float, float]:
    """Seconds of the check, a micro-batch and a window; megabytes that autograd held in the check and in a micro-batch."""
    make, draw = MODELS[name]
    checks, micro_batches, windows, in_check, in_micro_batch = [], [], [], 0, 0
    for fit in range(1 + FITS):
        module, counts = Timed(make), fit == FITS  # what counts bytes takes time
        saved = SavedBytes()
        saved.leave_out(module.parameters_seen)
        with Cost(saved) as cost:
            if counts:
                with saved:
                    trainer(callbacks=[GradientAccumulation(WINDOW)]).fit(module, loader([draw()] * WINDOW * WINDOWS))
                in_check, in_micro_batch = cost.bytes, saved.peak
                continue
            trainer(callbacks=[GradientAccumulation(WINDOW)]).fit(module, loader([draw()] * WINDOW * WINDOWS))
        if fit:
            checks.append(cost.seconds)
            starts, ends = module.marks[2 * WINDOW :: 2], module.marks[2 * WINDOW + 1 :: 2]
            micro_batches += [end - start for start, end in zip(starts, ends, strict=True)]
            windows += [end - start for start, end in zip(starts[::WINDOW], ends[WINDOW - 1 :: WINDOW], strict=True)]
    seconds = min(checks), statistics.median(micro_batches), statistics.median(windows)
    return *seconds, in_check / 1e6, in_micro_batch / 1e6


def main() -> None:
    """Print a table."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    print(f"{'':14}{'check, ms':>12}{'micro-batch, ms':>18}{'window, ms':>14}{'check, MB':>12}{'micro-batch, MB':>18}")
    for name in MODELS:
        check, micro_batch, window, in_check, in_micro_batch = measured(name)
        print(
            f"{name:14}{check * 1e3:12.1f}{micro_batch * 1e3:18.2f}{window * 1e3:14.1f}{in_check:12.2f}{in_micro_batch:18.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
