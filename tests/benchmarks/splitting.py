"""What it costs to split a batch, on a model of one layer: sixteen micro-batches a window.

Sides, interleaved in one process: a hand-written loop that splits the same batch, this package with ``micro_batch=``, a module in
Lightning's manual optimization that splits and weighs by itself, and, from a loader of micro-batches, Lightning's own accumulation
and Accelerate's ``accumulate()``. What is reported is the ratio of the medians over many short rounds; see ``overhead.py``, which
times one micro-batch where all of it is overhead.

    python tests/benchmarks/splitting.py --rounds 20 --windows 40 --features 4096
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_accum import GradientAccumulation

MICRO_BATCHES, SAMPLES, CLASSES, WARM_UP = 16, 16, 10, 3
BY_HAND, SPLIT, SPLIT_SILENT = "hand-written split", "micro_batch=, log=True", "micro_batch=, log=False"
MANUAL, LIGHTNING, ACCELERATE = "manual optimization", "Lightning", "Accelerate"

Batch = tuple[Tensor, Tensor]


class TimedBatches:
    """A loader that notes the time of the first batch after the warm-up, and of the last, which is drawn only for that."""

    def __init__(self, batches: Sequence[Batch], warm_up: int, clock: Callable[[], float]) -> None:
        self._batches, self._warm_up, self._clock = batches, warm_up, clock
        self.times: list[float] = []

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        self.times = []
        for index, batch in enumerate(self._batches):
            if index in (self._warm_up, len(self) - 1):
                self.times.append(self._clock())
            yield batch


class OneLayer(pl.LightningModule):
    """The smallest model that trains."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layer = nn.Linear(features, CLASSES)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, target = batch
        return cross_entropy(self.layer(inputs), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class ByItself(OneLayer):
    """Manual optimization: the module splits its batch, weighs and steps."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        inputs, target = batch
        for x, y in zip(inputs.split(SAMPLES), target.split(SAMPLES), strict=True):
            self.manual_backward(cross_entropy(self.layer(x), y) * (len(x) / len(inputs)))
        optimizer.step()


def by_hand(batches: TimedBatches, features: int) -> None:
    """Split, weigh, accumulate, step."""
    layer = nn.Linear(features, CLASSES)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    for inputs, target in batches:
        for x, y in zip(inputs.split(SAMPLES), target.split(SAMPLES), strict=True):
            loss = cross_entropy(layer(x), y)
            (loss * (len(x) / len(inputs))).backward()
        optimizer.step()
        optimizer.zero_grad()


def with_trainer(
    batches: TimedBatches,
    features: int,
    strategy: str,
    window: int = 1,
    callbacks: Sequence[Callback] = (),
    module: type[OneLayer] = OneLayer,
) -> None:
    """A Trainer with nothing else in it."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    arguments = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "accumulate_grad_batches": window, **quiet}
    pl.Trainer(strategy=strategy, callbacks=list(callbacks), **arguments).fit(module(features), batches)


def with_accelerate(batches: TimedBatches, features: int) -> None:
    """Accelerate's ``accumulate()``."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    layer = nn.Linear(features, CLASSES)
    layer, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1e-3))
    for inputs, target in batches:
        with accelerator.accumulate(layer):
            accelerator.backward(cross_entropy(layer(inputs), target))
            optimizer.step()
            optimizer.zero_grad()


def measure(rounds: int, windows: int, features: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Microseconds a window of every side, one number a round."""
    generator = torch.Generator().manual_seed(0)
    size = MICRO_BATCHES * SAMPLES
    whole = [
        (torch.randn(size, features, generator=generator), torch.randint(CLASSES, (size,), generator=generator)) for _ in range(8)
    ]
    number = WARM_UP + windows + 1
    large = TimedBatches([whole[index % 8] for index in range(number)], WARM_UP, clock)
    pieces = [list(zip(x.split(SAMPLES), y.split(SAMPLES), strict=True)) for x, y in whole]
    in_pieces = [piece for index in range(number - 1) for piece in pieces[index % 8]] + pieces[0][:1]
    small = TimedBatches(in_pieces, WARM_UP * MICRO_BATCHES, clock)

    def split(log: bool) -> None:
        with_trainer(large, features, "accum", callbacks=[GradientAccumulation(micro_batch=SAMPLES, log=log)])

    sides: dict[str, tuple[TimedBatches, Callable[[], None]]] = {
        BY_HAND: (large, lambda: by_hand(large, features)),
        SPLIT_SILENT: (large, lambda: split(log=False)),
        SPLIT: (large, lambda: split(log=True)),
        MANUAL: (large, lambda: with_trainer(large, features, "auto", module=ByItself)),
        LIGHTNING: (small, lambda: with_trainer(small, features, "auto", window=MICRO_BATCHES)),
    }
    if importlib.util.find_spec("accelerate") is not None:
        sides[ACCELERATE] = (small, lambda: with_accelerate(small, features))
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(-1, rounds):  # the first round is a warm-up too: imports, caches, the allocator
        for name in sides if round_ % 2 else reversed(sides):
            gc.collect()
            batches, run = sides[name]
            run()
            if round_ >= 0:
                measured[name].append((batches.times[1] - batches.times[0]) / windows * 1e6)
    return measured


def table(measured: dict[str, list[float]]) -> str:
    """The medians, their ratios to the hand-written loop, and quartiles of the ratio taken in each round."""
    lines = [f"{'':26}{'us per window':>16}{'/ hand-written':>16}{'round by round':>27}"]
    medians = {name: statistics.median(times) for name, times in measured.items()}
    for name, median in medians.items():
        ratios = [own / other for own, other in zip(measured[name], measured[BY_HAND], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        by_round = f"{middle:.3f} ({low:.3f}..{high:.3f})"
        lines.append(f"{name:26}{median:16.0f}{median / medians[BY_HAND]:16.2f}{by_round:>27}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="how often every side is measured (default: 20)")
    parser.add_argument("--windows", type=int, default=40, help="windows that are timed in a round (default: 40)")
    parser.add_argument("--features", type=int, default=4096, help="inputs of the layer (default: 4096)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="time that passed, or that this process computed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    measured = measure(arguments.rounds, arguments.windows, arguments.features, clock)
    print(
        f"{arguments.rounds} rounds of {arguments.windows} windows of {MICRO_BATCHES} micro-batches, {arguments.features} features,"
        f" {arguments.clock} clock, Lightning {pl.__version__}, torch {torch.__version__}"
    )
    print(table(measured))


if __name__ == "__main__":
    main()
