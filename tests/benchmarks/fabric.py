"""What a micro-batch of a hand-written loop costs with the Accumulator, beside the same loop without it.

Both sides, interleaved in one process, train the same model on the same batches; the loop without divides by the window, and steps
after so many micro-batches. In plain torch and on Fabric; on a model of one layer, where all of it is overhead, and on a small GPT.
The machine may be shared and noisy, so what is reported is the ratio of the medians over many short rounds.

    python tests/benchmarks/fabric.py --rounds 20 --window 8
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from side_by_side import CLOCKS, GPT, TimedBatches, command_line, compare, interleaved, labelled, timed
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_accum.fabric import Accumulator


def with_optimizer(model: nn.Module, fabric: Fabric | None) -> Any:
    """What a loop trains, and what steps it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return (model, optimizer) if fabric is None else fabric.setup(model, optimizer)


def by_hand(model: nn.Module, batches: TimedBatches, fabric: Fabric | None, window: int) -> None:
    """The loop of the tutorials."""
    model, optimizer = with_optimizer(model, fabric)
    for number, (inputs, target) in enumerate(batches, 1):
        loss = cross_entropy(model(inputs).flatten(0, -2), target) / window
        if fabric is None:
            loss.backward()
        else:
            fabric.backward(loss)
        if number % window == 0:
            optimizer.step()
            optimizer.zero_grad()


def with_accumulator(model: nn.Module, batches: TimedBatches, fabric: Fabric | None, window: int) -> None:
    """The same, with the Accumulator."""
    model, optimizer = with_optimizer(model, fabric)
    accumulator = Accumulator(fabric, model, optimizer, window=window, log=False)
    for inputs, target in accumulator(batches):
        accumulator.backward(cross_entropy(model(inputs).flatten(0, -2), target))
        accumulator.step()


def main(rounds: int = 20, window: int = 8, clock: str = "wall") -> None:
    """Measure and print."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(256, (4, 33), generator=generator) for _ in range(8)]
    models: dict[str, tuple[Callable[[], nn.Module], list[Any], int]] = {
        "one layer": (lambda: nn.Linear(64, 10), labelled(4, 64, 10, 32), 800),
        "small GPT": (lambda: GPT(256, 64, 2, 32), [(rows[:, :-1], rows[:, 1:].flatten()) for rows in tokens], 80),
    }
    measured = {}
    for name, (make, distinct, micro_batches) in models.items():
        batches = TimedBatches(distinct, 6 * window, micro_batches // window * window, CLOCKS[clock])
        for where, fabric in (("plain torch", None), ("Fabric", Fabric(accelerator="cpu", devices=1))):
            loops = {"by hand": by_hand, "Accumulator": with_accumulator}
            sides = {side: partial(timed, loop, make, batches, fabric=fabric, window=window) for side, loop in loops.items()}
            measured[f"{name}, {where}"] = interleaved(sides, rounds)
    compare(measured, "us per micro-batch", "by hand")


if __name__ == "__main__":
    command_line(main)
