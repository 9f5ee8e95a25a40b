"""What even ranks are worth: the slowest rank of a window over the mean.

A table of what is simulated: 16 samples a rank and window, on 8, 64 and 1,024 ranks, with lengths that are log-normal (median
80, cut at 512) or those of docstrings of Python's standard library (in bytes, cut at 512), where a sample costs its length or the
square of it. The orders are Lightning's (a permutation, every R-th sample), Hugging Face's ``group_by_length`` (megabatches of 50
batches of the permutation, each sorted by length), and ``BalancedBatchSampler``. Beside it, how long the last takes to share out
a window.

    python tests/benchmarks/balance.py
"""

import math
import random
import statistics
import time
from collections.abc import Sequence
from functools import cache

import torch
from side_by_side import command_line, docstrings, show

from lightning_accum.samplers import share_evenly

MEDIAN, LONGEST, SIGMA = 80, 512, 0.9


def log_normal(number: int, seed: int) -> list[int]:
    """Lengths of a long-tailed distribution."""
    generator = random.Random(seed)
    return [max(1, min(LONGEST, round(MEDIAN * math.exp(SIGMA * generator.gauss(0, 1))))) for _ in range(number)]


def of_docstrings(number: int, seed: int) -> list[int]:
    """Lengths of the docstrings of the standard library, drawn with replacement."""
    return random.Random(seed).choices(_lengths_of_docstrings(), k=number)


@cache
def _lengths_of_docstrings() -> list[int]:
    return [min(LONGEST, len(text)) for text in docstrings()]


def grouped_by_length(lengths: Sequence[int], batch: int) -> list[int]:
    """As ``get_length_grouped_indices`` of transformers has it, the longest sample of all first."""
    times = min(len(lengths) // (batch * 4), 50) or 1
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0)).tolist()
    size = times * batch
    groups = [sorted(order[i : i + size], key=lengths.__getitem__, reverse=True) for i in range(0, len(order), size)]
    first = max(range(len(groups)), key=lambda number: lengths[groups[number][0]])
    groups[0][0], groups[first][0] = groups[first][0], groups[0][0]
    return [index for group in groups for index in group]


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


def main(samples: int = 16, windows: int = 20) -> None:
    """Simulate so many windows of so many samples a rank."""
    simulate(samples, windows)


if __name__ == "__main__":
    command_line(main)
