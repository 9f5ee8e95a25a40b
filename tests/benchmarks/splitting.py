"""What it costs to split a batch, on a model of one layer: sixteen micro-batches a window.

Sides, interleaved in one process: a hand-written loop that splits the same batch, this package with ``micro_batch=``, a module in
Lightning's manual optimization that splits and weighs by itself, and, from a loader of micro-batches, Lightning's own accumulation
and Accelerate's ``accumulate()``. What is reported is the ratio of the medians over many short rounds; see ``overhead.py``, which
times one micro-batch where all of it is overhead.

    python tests/benchmarks/splitting.py --rounds 20 --windows 40 --features 4096
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from side_by_side import CLOCKS, Module, TimedBatches, accelerated, classify, command_line, compare, fit, interleaved, labelled
from torch import Tensor, nn

MICRO_BATCHES, ROWS, CLASSES, WARM_UP = 16, 16, 10, 3


def parts(batch: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The micro-batches of a batch."""
    return zip(batch[0].split(ROWS), batch[1].split(ROWS), strict=True)


class ByItself(Module):
    """Manual optimization: the module splits its batch, weighs and steps."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in parts(batch):
            self.manual_backward(self.loss(self.net, part) * (len(part[0]) / len(batch[0])))
        optimizer.step()


def by_hand(net: nn.Module, batches: TimedBatches) -> None:
    """Split, weigh, accumulate, step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for batch in batches:
        for part in parts(batch):
            (classify(net, part) * (len(part[0]) / len(batch[0]))).backward()
        optimizer.step()
        optimizer.zero_grad()


def main(rounds: int = 20, windows: int = 40, features: int = 4096, clock: str = "wall") -> None:
    """Measure and print."""
    whole = labelled(MICRO_BATCHES * ROWS, features, CLASSES, 8)
    large = TimedBatches(whole, WARM_UP, windows, CLOCKS[clock])
    pieces = [part for batch in whole for part in parts(batch)]
    small = TimedBatches(pieces, WARM_UP * MICRO_BATCHES, windows * MICRO_BATCHES, CLOCKS[clock])

    def side(train: Callable[..., None], module: type[Module] | None = Module, batches: Any = large, **arguments: Any) -> Any:
        def run() -> float:
            layer = nn.Linear(features, CLASSES)
            train(layer if module is None else module(layer, classify), batches, **arguments)
            return batches.microseconds * batches.counted / windows

        return run

    sides = {
        "hand-written split": side(by_hand, None),
        "micro_batch=, log=False": side(fit, micro_batch=ROWS, log=False),
        "micro_batch=, log=True": side(fit, micro_batch=ROWS, log=True),
        "manual optimization": side(fit, ByItself),
        "Lightning": side(fit, batches=small, n=MICRO_BATCHES),
    }
    if importlib.util.find_spec("accelerate") is not None:
        sides["Accelerate"] = side(accelerated, None, small, window=MICRO_BATCHES)
    compare({"one layer": interleaved(sides, rounds)}, "us per window", "hand-written split")


if __name__ == "__main__":
    command_line(main)
