"""What even ranks are worth: the slowest rank of a window over the mean.

Simulated: 16 samples a rank and window, on 8, 64 and 1,024 ranks, with the lengths of docstrings of Python's standard library (in
bytes, cut at 512), where a sample costs its length. The orders are Lightning's (a permutation, every R-th sample), Hugging Face's
``group_by_length`` (megabatches of 50 batches of the permutation, each sorted by length), and ``BalancedBatchSampler``.

    python tests/benchmarks/balance.py
"""

import random
import statistics
from collections.abc import Iterable, Iterator, Sequence

import torch
from side_by_side import command_line, docstrings, show

from lightning_accum import BalancedBatchSampler

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


def balanced(window: Sequence[int], ranks: int, samples: int) -> Iterator[list[int]]:
    """What each rank has of a window."""
    sampler = BalancedBatchSampler(window, samples, shuffle=False)
    for rank in range(ranks):
        sampler.deal(ranks, rank)
        yield [window[index] for batch in sampler for index in batch]


def slowest(shares: Iterable[Sequence[int]]) -> float:
    """The slowest rank over the mean rank."""
    sums = list(map(sum, shares))
    return max(sums) * len(sums) / sum(sums)


def main(samples: int = 16, windows: int = 20) -> None:
    """Print it for so many windows of so many samples a rank, fewer on many ranks: in the mean, and in the worst of them."""
    print(f"Slowest rank over the mean rank, {samples} samples a rank and window: mean over the windows (worst window)\n")
    table, known = [], [min(LONGEST, len(text)) for text in docstrings()]
    for ranks in (8, 64, 1024):
        size = samples * ranks
        lengths = random.Random(ranks).choices(known, k=max(1, windows * 8 // ranks) * size)
        found: list[list[float]] = [[], [], []]
        for start in range(0, len(lengths), size):
            for order, ratios in zip((range(len(lengths)), grouped_by_length(lengths, samples)), found, strict=False):
                window = [lengths[index] for index in order[start : start + size]]
                ratios.append(slowest(window[rank::ranks] for rank in range(ranks)))
            found[2].append(slowest(balanced(lengths[start : start + size], ranks, samples)))
        table.append([ranks, *(f"{statistics.mean(ratios):.4f} ({max(ratios):.4f})" for ratios in found)])
    show(["ranks", "Lightning", "group_by_length", "BalancedBatchSampler"], table)


if __name__ == "__main__":
    command_line(main)
