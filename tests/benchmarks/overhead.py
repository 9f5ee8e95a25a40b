"""What a micro-batch costs on a model of one layer, where all of it is overhead.

Sides, interleaved in one process: a loop written by hand, Lightning's own accumulation, this package, and Accelerate's
``accumulate()`` where it is installed. Every side trains the same layer on the same batches and is timed in the same way, by its
loader: from the batch after the warm-up to the last one, so set-up is left out and only whole windows count. The machine may be
shared and noisy, so what is reported is the ratio of the medians over many short rounds.

    python tests/benchmarks/overhead.py --rounds 20 --micro-batches 1000 --window 8
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

FEATURES, CLASSES, SAMPLES = 64, 10, 4
BY_HAND, LIGHTNING, ACCUM, ACCUM_SILENT = "hand-written loop", "Lightning", "accum, log=True", "accum, log=False"
LIGHTNING_LOGGING, ACCELERATE = "Lightning, self.log(loss)", "Accelerate"

Batch = tuple[Tensor, Tensor]
Clock = Callable[[], float]


class TimedBatches:
    """A loader of batches made beforehand, that notes when the first and the last of those that count are drawn.

    The last batch is drawn only to see the end of the one before it.

    Args:
        warm_up: batches that do not count.
        counted: batches that do.
        clock: seconds.
    """

    def __init__(self, warm_up: int, counted: int, clock: Clock) -> None:
        generator = torch.Generator().manual_seed(0)
        self._distinct: list[Batch] = [
            (
                torch.randn(SAMPLES, FEATURES, generator=generator),
                torch.randint(CLASSES, (SAMPLES,), generator=generator),
            )
            for _ in range(32)
        ]
        self._warm_up, self._counted, self._clock = warm_up, counted, clock
        self._times: list[float] = []

    def __len__(self) -> int:
        return self._warm_up + self._counted + 1

    def __iter__(self) -> Iterator[Batch]:
        self._times = []
        for index in range(len(self)):
            if index in (self._warm_up, self._warm_up + self._counted):
                self._times.append(self._clock())
            yield self._distinct[index % len(self._distinct)]

    def microseconds(self) -> float:
        """Microseconds per micro-batch of the last pass."""
        start, end = self._times
        return (end - start) / self._counted * 1e6


class OneLayer(pl.LightningModule):
    """The smallest model that trains."""

    def __init__(self, is_logging: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self._is_logging = is_logging

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, target = batch
        loss = cross_entropy(self.layer(inputs), target)
        if self._is_logging:
            self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def by_hand(batches: TimedBatches, window: int) -> None:
    """The loop of the tutorials."""
    layer = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    for index, (inputs, target) in enumerate(batches, 1):
        loss = cross_entropy(layer(inputs), target)
        (loss / window).backward()
        if index % window == 0:
            optimizer.step()
            optimizer.zero_grad()


def with_accelerate(batches: TimedBatches, window: int) -> None:
    """Accelerate's ``accumulate()``."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
    layer = nn.Linear(FEATURES, CLASSES)
    layer, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1e-3))
    for inputs, target in batches:
        with accelerator.accumulate(layer):
            loss = cross_entropy(layer(inputs), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def with_trainer(
    batches: TimedBatches, window: int, strategy: str, callbacks: Sequence[Callback] = (), is_logging: bool = False
) -> None:
    """A Trainer with nothing else in it."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        accumulate_grad_batches=window,
        callbacks=list(callbacks),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(OneLayer(is_logging), batches)


def sides(batches: TimedBatches, window: int) -> dict[str, Callable[[], None]]:
    """What is compared, in the order of the table."""

    def accum(log: bool) -> None:
        with_trainer(batches, window, "accum", [GradientAccumulation(window, log=log)])

    compared: dict[str, Callable[[], None]] = {
        BY_HAND: lambda: by_hand(batches, window),
        LIGHTNING: lambda: with_trainer(batches, window, "auto"),
        ACCUM_SILENT: lambda: accum(log=False),
        LIGHTNING_LOGGING: lambda: with_trainer(batches, window, "auto", is_logging=True),
        ACCUM: lambda: accum(log=True),
    }
    if importlib.util.find_spec("accelerate") is not None:
        compared[ACCELERATE] = lambda: with_accelerate(batches, window)
    return compared


def measure(rounds: int, micro_batches: int, window: int, clock: Clock) -> dict[str, list[float]]:
    """Microseconds per micro-batch of every side, one number a round."""
    batches = TimedBatches(warm_up=8 * window, counted=max(1, micro_batches // window) * window, clock=clock)
    compared = sides(batches, window)
    measured: dict[str, list[float]] = {name: [] for name in compared}
    for round_ in range(-1, rounds):  # the first round is a warm-up too: imports, caches, the allocator
        for name in compared if round_ % 2 else reversed(compared):
            gc.collect()
            compared[name]()
            if round_ >= 0:
                measured[name].append(batches.microseconds())
    return measured


def table(measured: dict[str, list[float]]) -> str:
    """The medians, their ratios to the hand-written loop and to Lightning, and quartiles of the latter taken in each round."""
    lines = [f"{'':27}{'us per micro-batch':>20}{'/ hand-written':>16}{'/ Lightning':>13}{'round by round':>27}"]
    medians = {name: statistics.median(times) for name, times in measured.items()}
    for name, median in medians.items():
        low, middle, high = _quartiles([own / other for own, other in zip(measured[name], measured[LIGHTNING], strict=True)])
        by_round = "" if name == LIGHTNING else f"{middle:.3f} ({low:.3f}..{high:.3f})"
        to_hand, to_lightning = median / medians[BY_HAND], median / medians[LIGHTNING]
        lines.append(f"{name:27}{median:20.1f}{to_hand:16.2f}{to_lightning:13.3f}{by_round:>27}")
    return "\n".join(lines)


def _quartiles(numbers: list[float]) -> list[float]:
    return statistics.quantiles(numbers, n=4) if len(numbers) > 1 else numbers * 3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="how often every side is measured (default: 20)")
    parser.add_argument("--micro-batches", type=int, default=1000, help="micro-batches that are timed in a round (default: 1000)")
    parser.add_argument("--window", type=int, default=8, help="micro-batches in a window (default: 8)")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="wall: time that passed (default); cpu: time that this process computed, steadier where others do too",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    measured = measure(arguments.rounds, arguments.micro_batches, arguments.window, clock)
    print(
        f"{arguments.rounds} rounds of {arguments.micro_batches} micro-batches, windows of {arguments.window},"
        f" {arguments.clock} clock, Lightning {pl.__version__}, torch {torch.__version__}"
    )
    print(table(measured))


if __name__ == "__main__":
    main()
