"""What a micro-batch of a hand-written loop costs with the Accumulator, beside the same loop without it.

Both sides, interleaved in one process, train the same model on the same batches; the loop without divides by the window, and steps
after so many micro-batches. In plain torch and on Fabric; on a model of one layer, where all of it is overhead, and on a small GPT.
The machine may be shared and noisy, so what is reported is the ratio of the medians over many short rounds.

    python tests/benchmarks/fabric.py --rounds 20 --window 8
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_accum.fabric import Accumulator

Batch = tuple[Tensor, Tensor]


class OneLayer(nn.Module):
    """The smallest model that trains."""

    micro_batches = 800

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)

    @staticmethod
    def batches() -> list[Batch]:
        return [(torch.randn(4, 64), torch.randint(10, (4,))) for _ in range(32)]


class SmallGPT(nn.Module):
    """Two blocks of width 64, on 4 sequences of 32 tokens."""

    micro_batches = 80

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(32))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(tokens), mask=self.mask, is_causal=True)).flatten(0, 1)

    @staticmethod
    def batches() -> list[Batch]:
        tokens = [torch.randint(256, (4, 33)) for _ in range(8)]
        return [(rows[:, :-1], rows[:, 1:].flatten()) for rows in tokens]


def by_hand(fabric: Fabric | None, model: nn.Module, optimizer: Any, batches: list[Batch], window: int) -> None:
    """The loop of the tutorials."""
    for number, (inputs, target) in enumerate(batches, 1):
        loss = cross_entropy(model(inputs), target) / window
        if fabric is None:
            loss.backward()
        else:
            fabric.backward(loss)
        if number % window == 0:
            optimizer.step()
            optimizer.zero_grad()


def with_accumulator(fabric: Fabric | None, model: nn.Module, optimizer: Any, batches: list[Batch], window: int) -> None:
    """The same, with the Accumulator."""
    accumulator = Accumulator(fabric, model, optimizer, window=window, log=False)
    for inputs, target in accumulator(batches):
        accumulator.backward(cross_entropy(model(inputs), target))
        accumulator.step()


class TimedBatches(list):
    """Batches that note when the first after the warm-up is drawn, and the last: in between are whole windows."""

    def __init__(self, batches: list[Batch], warm_up: int, clock: Callable[[], float]) -> None:
        super().__init__(batches)
        self._warm_up, self._clock = warm_up, clock
        self.times: list[float] = []

    def __iter__(self) -> Iterator[Batch]:
        for index, batch in enumerate(super().__iter__()):
            if index in (self._warm_up, len(self) - 1):
                self.times.append(self._clock())
            yield batch


def microseconds(loop: Callable[..., None], kind: Any, fabric: Fabric | None, window: int, clock: Callable[[], float]) -> float:
    """Per micro-batch, after a warm-up of some windows."""
    torch.manual_seed(0)
    model = kind()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    if fabric is not None:
        model, optimizer = fabric.setup(model, optimizer)
    distinct = kind.batches()
    warm_up, number = 6 * window, kind.micro_batches // window * window
    batches = TimedBatches([distinct[index % len(distinct)] for index in range(warm_up + number + 1)], warm_up, clock)
    gc.collect()
    loop(fabric, model, optimizer, batches, window)
    start, end = batches.times
    return (end - start) / number * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="how often every side is measured (default: 20)")
    parser.add_argument("--window", type=int, default=8, help="micro-batches in a window (default: 8)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="time that passed (default), or of this process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    fabrics = {"plain torch": None, "Fabric": Fabric(accelerator="cpu", devices=1)}
    print(f"{arguments.rounds} rounds, windows of {arguments.window}, {arguments.clock} clock, torch {torch.__version__}")
    print(f"{'us per micro-batch':27}{'by hand':>12}{'Accumulator':>14}{'ratio':>8}")
    for kind in (OneLayer, SmallGPT):
        for name, fabric in fabrics.items():
            measured: dict[Callable[..., None], list[float]] = {by_hand: [], with_accumulator: []}
            for round_ in range(-1, arguments.rounds):
                for loop in measured if round_ % 2 else reversed(measured):
                    found = microseconds(loop, kind, fabric, arguments.window, clock)
                    if round_ >= 0:  # the first is a warm-up
                        measured[loop].append(found)
            hand, ours = (statistics.median(times) for times in measured.values())
            print(f"{kind.__name__ + ', ' + name:27}{hand:12.1f}{ours:14.1f}{ours / hand:8.3f}")


if __name__ == "__main__":
    main()
