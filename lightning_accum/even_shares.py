"""Numbers in shares whose sums are as even as possible."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace


def share_evenly(costs: Sequence[float], shares: int, at_least: int = 0) -> list[list[int]]:
    """Shares of the positions in ``costs`` whose sums are about even: R. L. Graham's longest first (1969).

    Example:
        >>> [sorted(share) for share in share_evenly([5, 4, 3, 3, 2], 2)]
        [[0, 3], [1, 2, 4]]
        >>> share_evenly([100, 1, 1, 1, 1], 2, at_least=2)
        [[0, 4], [1, 2, 3]]
    """
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    groups = [order[share : share + 1] for share in range(shares)]
    heap = [(costs[group[0]] if group else 0.0, share) for share, group in enumerate(groups)]
    heapify(heap)
    for position in order[shares:]:
        load, share = heap[0]
        groups[share].append(position)
        heapreplace(heap, (load + costs[position], share))
    for group in groups:
        while len(group) < at_least:  # the cheapest of the share that has the most
            group.append(max(groups, key=len).pop())
    return groups


def batch_sizes(lengths: Sequence[float], batches: int) -> list[int]:
    """How many samples each batch gets, so that the largest batch, padded to its longest sample, is as small as possible.

    Args:
        lengths: the longest first.
        batches: how many; none is empty, where there are as many samples.

    Example:
        >>> batch_sizes([8, 2, 2, 2, 2], 2)
        [1, 4]
        >>> batch_sizes([5, 5, 5, 5], 3)
        [2, 1, 1]
    """
    low, high = 0.0, (lengths[0] if lengths else 0) * float(len(lengths))
    sizes = _sizes_below(lengths, batches, high) or []
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        found = _sizes_below(lengths, batches, middle)
        if found is None:
            low = middle
        else:
            sizes, high = found, middle
    return sizes


def _sizes_below(lengths: Sequence[float], batches: int, largest: float) -> list[int] | None:
    """Sizes of batches that are no larger when padded; None where that takes more batches."""
    sizes: list[int] = []
    start = 0
    while start < len(lengths):
        others = batches - len(sizes) - 1
        if others < 0 or lengths[start] > largest:
            return None
        room = len(lengths) - start - others  # the others have one each
        size = room if lengths[start] * room <= largest else max(1, int(largest / lengths[start]))
        sizes.append(size)
        start += size
    return sizes
