"""What even ranks are worth: the slowest rank of a window over the mean, and tokens per second of 2 and 4 processes.

First a table of what is simulated: 16 samples a rank and window, on 8, 64 and 1,024 ranks, with lengths that are log-normal (median
80, cut at 512) or those of the demo's docstrings (in bytes, cut at 512), where a sample costs its length or the square of it. The
orders are Lightning's (a permutation, every R-th sample), Hugging Face's ``group_by_length`` (megabatches of 50 batches of the
permutation, each sorted by length), and ``BalancedBatchSampler``. Beside it, how long the last takes to share out a window.

Then a causal transformer is trained on the same 512 sequences by each, over DistributedDataParallel in forked processes: by
Lightning's own accumulation in the first two orders, and by this package in those of ``SameOrderSampler`` and
``BalancedBatchSampler``, also with ``micro_batch=Tokens(1024)``. A loader batch is padded to its longest sequence, and one that
is split is trimmed. Gradients are reduced once a window, so a window takes as long as its slowest rank, and what is reported is
tokens per second of processor time of the slowest rank, window by window: what the ranks would take on a core each, also where
there are fewer cores. Data loading is not in it. Beside it stands what a model of the cost of a micro-batch promises, a + b rows
+ c positions + d rows x length x length, fitted in one process; and wall time, which means something where each process has a
core.

    python tests/benchmarks/balance.py
    python tests/benchmarks/balance.py --ranks 2 --rounds 3
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from side_by_side import GPT, IGNORED, Module, command_line, show
from support import ddp, trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

from lightning_accum import BalancedBatchSampler, GradientAccumulation, SameOrderSampler, Tokens
from lightning_accum.demo.corpus import docstrings
from lightning_accum.even_shares import share_evenly

MEDIAN, LONGEST, SIGMA = 80, 512, 0.9
BATCH, WINDOW, SEQUENCES, TOKENS, VOCABULARY = 8, 2, 512, 1024, 256
SIDES = ("Lightning", "group_by_length", "SameOrderSampler", "BalancedBatchSampler", "BalancedBatchSampler, Tokens")

Cost = Callable[[int, int], float]
"""Of a loader batch, by its rows and its length."""


def log_normal(number: int, seed: int) -> list[int]:
    """Lengths of a long-tailed distribution."""
    generator = random.Random(seed)
    return [max(1, min(LONGEST, round(MEDIAN * math.exp(SIGMA * generator.gauss(0, 1))))) for _ in range(number)]


def of_docstrings(number: int, seed: int) -> list[int]:
    """Lengths of the docstrings of the standard library, drawn with replacement."""
    return random.Random(seed).choices(_lengths_of_docstrings(), k=number)


@cache
def _lengths_of_docstrings() -> list[int]:
    texts = docstrings(Path(sysconfig.get_paths()["stdlib"]))
    return [min(LONGEST, len(text.encode("utf-8", errors="replace"))) for text in texts]


def grouped_by_length(lengths: Sequence[int], batch: int) -> list[int]:
    """As ``get_length_grouped_indices`` of transformers has it, the longest sample of all first."""
    times = min(len(lengths) // (batch * 4), 50) or 1
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0)).tolist()
    size = times * batch
    groups = [sorted(order[i : i + size], key=lengths.__getitem__, reverse=True) for i in range(0, len(order), size)]
    first = max(range(len(groups)), key=lambda number: lengths[groups[number][0]])
    groups[0][0], groups[first][0] = groups[first][0], groups[0][0]
    return [index for group in groups for index in group]


class LengthGroupedSampler(Sampler[int]):
    """The ``DistributedLengthGroupedSampler`` of transformers, on a number of samples that the ranks share evenly."""

    def __init__(self, lengths: Sequence[int], ranks: int) -> None:
        self.lengths, self.ranks, self.rank = lengths, ranks, 0

    def __iter__(self) -> Iterator[int]:
        return iter(grouped_by_length(self.lengths, BATCH * WINDOW)[self.rank :: self.ranks])

    def __len__(self) -> int:
        return len(self.lengths) // self.ranks


def simulate(samples: int, windows: int) -> None:
    """Print the slowest rank over the mean rank, in the mean over windows and in the worst of them."""
    print(f"Slowest rank over the mean rank, {samples} samples a rank and window: mean over the windows (worst window)\n")
    table = []
    for draw in (log_normal, of_docstrings):
        for power in (1, 2):
            for ranks in (8, 64, 1024):
                size = samples * ranks
                lengths = draw(windows * size, ranks)
                costs = [length**power for length in lengths]
                orders = (range(len(lengths)), grouped_by_length(lengths, samples))
                found: list[list[float]] = [[], [], []]
                seconds = []
                for start in range(0, len(lengths), size):
                    for order, ratios in zip(orders, found, strict=False):
                        window = [costs[index] for index in order[start : start + size]]
                        ratios.append(_slowest([window[rank::ranks] for rank in range(ranks)]))
                    window = costs[start : start + size]
                    begun = time.perf_counter()
                    shares = share_evenly(window, ranks, at_least=1)
                    seconds.append(time.perf_counter() - begun)
                    found[2].append(_slowest([[window[place] for place in share] for share in shares]))
                shown = [f"{statistics.mean(ratios):.4f} ({max(ratios):.4f})" for ratios in found]
                cost = "length" if power == 1 else "its square"
                table.append([draw.__name__, cost, ranks, *shown, f"{1e3 * statistics.median(seconds):.2f}"])
    show(["lengths", "cost", "ranks", "Lightning", "group_by_length", "BalancedBatchSampler", "ms a window"], table)


def _slowest(costs: Sequence[Sequence[float]]) -> float:
    sums = [sum(cost) for cost in costs]
    return max(sums) * len(sums) / sum(sums)


class Language(Module):
    """Tokens to their successors, causally: padding comes last, so that no token sees it. Notes the shapes of what it sees."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        super().__init__(GPT(VOCABULARY, 128, 2, LONGEST), self.loss_of)

    def loss_of(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.shapes.append(tuple(batch[0].shape))
        return cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED)


def collate(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad to the longest."""
    rows = list(sequences)
    return pad_sequence(rows, batch_first=True), pad_sequence(rows, batch_first=True, padding_value=IGNORED)


class Clock(pl.Callback):
    """Notes the shapes of the micro-batches of each loader batch, and the processor time of the thread that trains."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.batches: list[tuple[float, list[tuple[int, ...]]]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        sampler = trainer.train_dataloader.sampler
        if isinstance(sampler, LengthGroupedSampler):
            sampler.rank = trainer.global_rank
        self.wall = time.perf_counter()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        pl_module.shapes = []
        self.begun = time.thread_time()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, out: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append((time.thread_time() - self.begun, pl_module.shapes))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = {"batches": self.batches, "wall": time.perf_counter() - self.wall}
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))


def train(side: str, sequences: list[Tensor], ranks: int, cost: Callable[[int], float]) -> list[dict[str, Any]]:
    """Train an epoch. Returns what the clock of each rank noted."""
    lengths = [len(sequence) for sequence in sequences]
    options: dict[str, Any] = {"batch_size": BATCH}
    window, micro_batch = (1, Tokens(TOKENS)) if side.endswith("Tokens") else (WINDOW, None)
    if side == "group_by_length":
        options["sampler"] = LengthGroupedSampler(lengths, ranks)
    elif side == "SameOrderSampler":
        options["sampler"] = SameOrderSampler(sequences)
    elif side.startswith("BalancedBatchSampler"):
        options = {"batch_sampler": BalancedBatchSampler(lengths, BATCH * WINDOW // window, window=window, cost=cost)}
    is_ours = "Sampler" in side
    with tempfile.TemporaryDirectory() as folder:
        ours = [GradientAccumulation(window, micro_batch=micro_batch, log=False, check=False)] if is_ours else []
        run = trainer(
            ddp() if is_ours else DDPStrategy(start_method="fork"),
            devices=ranks,
            callbacks=[Clock(folder), *ours],
            accumulate_grad_batches=1 if is_ours else WINDOW,
            use_distributed_sampler=side != "group_by_length",
        )
        run.fit(Language(), DataLoader(sequences, collate_fn=collate, **options))
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def seconds_of(clocks: Sequence[dict[str, Any]], window: int, cost: Cost | None = None) -> float:
    """Of the slowest rank, window by window, but for the first; as measured, or by a cost of rows and length."""
    total = 0.0
    for start in range(window, len(clocks[0]["batches"]), window):
        windows = [clock["batches"][start : start + window] for clock in clocks]
        total += max(
            sum(seconds if cost is None else sum(cost(*shape) for shape in shapes) for seconds, shapes in w) for w in windows
        )
    return total


def calibrate() -> tuple[Cost, Callable[[int], float]]:
    """What a loader batch costs in one process, by rows and length; and what a sample does, by its length."""
    module, shapes, seconds = Language(), [], []
    for rows in (1, 4, 8, 16, 40):
        for length in (16, 48, 96, 192, 320, 512):
            if rows * length > 6000:
                continue
            batch = collate([torch.randint(1, VOCABULARY, (length,)) for _ in range(rows)])
            times = []
            for _ in range(4):
                begun = time.thread_time()
                module.training_step(batch, 0).backward()
                times.append(time.thread_time() - begun)
            shapes.append([1.0, rows, rows * length, rows * length**2])
            seconds.append(min(times))
    weights = 1 / torch.tensor(seconds, dtype=torch.float64)  # relative errors count
    terms = torch.tensor(shapes, dtype=torch.float64)
    a, b, c, d = torch.linalg.lstsq(terms * weights[:, None], torch.ones(len(seconds), 1).double()).solution[:, 0].tolist()
    return (
        lambda rows, length: a + b * rows + c * rows * length + d * rows * length**2,
        lambda length: max(0.0, b) + c * length + max(0.0, d) * length**2,
    )


def measure(ranks: int, rounds: int) -> None:
    """Print tokens per second of each side."""
    of_batch, of_sample = calibrate()
    found: dict[str, list[tuple[float, float, float]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        generator = torch.Generator().manual_seed(number)
        lengths = log_normal(SEQUENCES, number)
        sequences = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]
        for side in SIDES:
            clocks = train(side, sequences, ranks, of_sample)
            window = 1 if side.endswith("Tokens") else WINDOW
            windows = math.ceil(len(clocks[0]["batches"]) / window)
            tokens = sum(lengths) * (windows - 1) / windows  # the first does not count; taken for an even share
            seconds = [seconds_of(clocks, window), seconds_of(clocks, window, of_batch)]
            found[side].append((*(tokens / each for each in seconds), sum(lengths) / max(clock["wall"] for clock in clocks)))
    print(f"\n{ranks} processes, windows of {WINDOW} loader batches of {BATCH}, {SEQUENCES} sequences (medians)\n")
    table = []
    for side in SIDES:
        measured, promised = (
            statistics.median(best[i] / own[i] for best, own in zip(found[SIDES[-1]], found[side], strict=True)) for i in (0, 1)
        )
        speed, wall = (f"{statistics.median(numbers[i] for numbers in found[side]):,.0f}" for i in (0, 2))
        table.append([side, speed, f"{measured:.2f}", f"{promised:.2f}", f"{measured / promised:.3f}", wall])
    columns = ("the last over it", "as simulated", "measured over simulated", "tokens per second of wall time")
    show(["order", "tokens per second of the slowest rank's processor time", *columns], table)


def main(rounds: int = 3, ranks: tuple[int, ...] = (2, 4), samples: int = 16, windows: int = 20) -> None:
    """Simulate so many windows (0: none), and train on so many ranks."""
    if windows:
        simulate(samples, windows)
    for number in ranks:
        measure(number, rounds)


if __name__ == "__main__":
    command_line(main)
