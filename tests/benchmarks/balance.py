"""What even ranks are worth: the slowest rank of a window over the mean.

Simulated: 16 samples a rank and window, on 8, 64 and 1,024 ranks, with the lengths of docstrings of Python's standard library (in
bytes, cut at 512), where a sample costs its length. The orders are Lightning's (a permutation, every R-th sample), Hugging Face's
``group_by_length`` (megabatches of 50 batches of the permutation, each sorted by length), and ``BalancedBatchSampler``.

    python tests/benchmarks/balance.py
"""

import random
import statistics
from collections.abc import Sequence

import torch
from side_by_side import command_line, docstrings, show

from lightning_accum.samplers import share_evenly

LONGEST = 512


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
    table, known = [], [min(LONGEST, len(text)) for text in docstrings()]
    for ranks in (8, 64, 1024):
        size = samples * ranks
        lengths = random.Random(ranks).choices(known, k=windows * size)
        orders = (range(len(lengths)), grouped_by_length(lengths, samples))
        found: list[list[float]] = [[], [], []]
        for start in range(0, len(lengths), size):
            for order, ratios in zip(orders, found, strict=False):
                window = [lengths[index] for index in order[start : start + size]]
                ratios.append(_slowest([window[rank::ranks] for rank in range(ranks)]))
            window = lengths[start : start + size]
            found[2].append(_slowest([[window[place] for place in share] for share in share_evenly(window, ranks, at_least=1)]))
        table.append([ranks, *(f"{statistics.mean(ratios):.4f} ({max(ratios):.4f})" for ratios in found)])
    show(["ranks", "Lightning", "group_by_length", "BalancedBatchSampler"], table)


def _slowest(costs: Sequence[Sequence[float]]) -> float:
    sums = [sum(cost) for cost in costs]
    return max(sums) * len(sums) / sum(sums)


def main(samples: int = 16, windows: int = 20) -> None:
    """Simulate so many windows of so many samples a rank."""
    simulate(samples, windows)


if __name__ == "__main__":
    command_line(main)
