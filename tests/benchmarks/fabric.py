"""What a micro-batch of a hand-written loop costs with the Accumulator, beside the same loop without it.

Both sides, interleaved in one process, train the same model on the same batches; the loop without divides by the window, and steps
after so many micro-batches. In plain torch and on Fabric; on a model of one layer, where all of it is overhead, and on a small GPT.
The machine may be shared and noisy, so what is reported is the ratio of the medians over many short rounds.

    python tests/benchmarks/fabric.py --rounds 20 --window 8
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from side_by_side import CLOCKS, GPT, Module, TimedBatches, by_hand, command_line, compare, interleaved, labelled, timed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_accum.fabric import Accumulator


def of_rows(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy of labels, or of tokens one after the other."""
    return cross_entropy(net(batch[0]).flatten(0, -2), batch[1])


def with_accumulator(module: Module, batches: TimedBatches, fabric: Fabric | None, window: int) -> None:
    """The loop by hand, with the Accumulator."""
    net, optimizer = module.net, module.configure_optimizers()
    if fabric is not None:
        net, optimizer = fabric.setup(net, optimizer)
    accumulator = Accumulator(fabric, net, optimizer, window=window, log=False)
    for batch in accumulator(batches):
        accumulator.backward(of_rows(net, batch))
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
            new, how = (lambda make=make: Module(make(), of_rows)), {"fabric": fabric, "window": window}
            sides = {side: partial(timed, loop, new, batches, **how) for side, loop in loops.items()}
            measured[f"{name}, {where}"] = interleaved(sides, rounds)
    compare(measured, "us per micro-batch", "by hand")


if __name__ == "__main__":
    command_line(main)
