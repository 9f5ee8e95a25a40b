"""What a micro-batch costs on a model of one layer, where all of it is overhead.

Sides, interleaved in one process: a loop written by hand, Lightning's own accumulation, this package, and Accelerate's
``accumulate()`` where it is installed. Every side trains the same layer on the same batches and is timed in the same way, by its
loader: from the batch after the warm-up to the last one, so set-up is left out and only whole windows count. The machine may be
shared and noisy, so what is reported is the ratio of the medians over many short rounds.

    python tests/benchmarks/overhead.py --rounds 20 --micro-batches 1000 --window 8
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from side_by_side import CLOCKS, Module, TimedBatches, accelerated, classify, command_line, compare, fit, interleaved, labelled
from torch import Tensor, nn

FEATURES, CLASSES, ROWS = 64, 10, 4


class Logging(Module):
    """Logs its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        return loss


def by_hand(net: nn.Module, batches: TimedBatches, window: int) -> None:
    """The loop of the tutorials."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for index, batch in enumerate(batches, 1):
        (classify(net, batch) / window).backward()
        if index % window == 0:
            optimizer.step()
            optimizer.zero_grad()


def main(rounds: int = 20, micro_batches: int = 1000, window: int = 8, clock: str = "wall") -> None:
    """Measure and print."""
    counted = max(1, micro_batches // window) * window
    batches = TimedBatches(labelled(ROWS, FEATURES, CLASSES, 32), 8 * window, counted, CLOCKS[clock])

    def side(train: Callable[..., None], module: type[Module] | None = Module, **arguments: Any) -> Callable[[], float]:
        def run() -> float:
            layer = nn.Linear(FEATURES, CLASSES)
            train(layer if module is None else module(layer, classify), batches, **arguments)
            return batches.microseconds

        return run

    sides = {
        "hand-written loop": side(by_hand, None, window=window),
        "Lightning": side(fit, n=window),
        "accum, log=False": side(fit, window=window, log=False),
        "Lightning, self.log(loss)": side(fit, Logging, n=window),
        "accum, log=True": side(fit, window=window, log=True),
    }
    if importlib.util.find_spec("accelerate") is not None:
        sides["Accelerate"] = side(accelerated, None, window=window)
    compare({"one layer": interleaved(sides, rounds)}, "us per micro-batch", "hand-written loop", "Lightning")


if __name__ == "__main__":
    command_line(main)
