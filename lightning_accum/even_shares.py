"""Numbers in shares whose sums are as even as possible."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from heapq import heapify, heapreplace

_EVEN_ENOUGH = 1e-3
"""Of the mean: where the largest share is above it by less, no more samples are exchanged."""
_EXCHANGES = 4
"""For each share, at most."""


def share_evenly(costs: Sequence[float], shares: int, at_least: int = 0) -> list[list[int]]:
    """Shares of the positions in ``costs`` whose sums are as even as possible: R. L. Graham's longest first (1969), and exchanges.

    Example:
        >>> [sorted(share) for share in share_evenly([5, 4, 3, 3, 3], 2)]  # longest first alone has sums of 8 and 10
        [[0, 1], [2, 3, 4]]
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
    by_load = sorted(heap)
    if at_least > 1 and min(map(len, groups)) < at_least:
        _fill_up(groups, at_least)
        by_load = sorted((sum(costs[position] for position in group), share) for share, group in enumerate(groups))
    _exchange(costs, groups, by_load, at_least)
    return groups


def _fill_up(groups: list[list[int]], at_least: int) -> None:
    """Hand the cheapest positions of the shares that have the most to those that have too few. Each is sorted, dearest first."""
    for group in groups:
        while len(group) < at_least:
            group.append(max(groups, key=len).pop())


def _exchange(costs: Sequence[float], groups: list[list[int]], by_load: list[tuple[float, int]], at_least: int) -> None:
    """Move what evens the largest and the smallest share best, or exchange it for something cheaper, until they are even."""
    limit = (1 + _EVEN_ENOUGH) * sum(load for load, _ in by_load) / len(by_load)
    for _ in range(_EXCHANGES * len(groups)):
        (most, dear), (least, cheap) = by_load[-1], by_load[0]
        if most <= limit:
            return
        best = _best_exchange(costs, groups[dear], groups[cheap], most - least, len(groups[dear]) > at_least)
        if best is None:
            return
        moved, back = best
        groups[dear].remove(moved)
        groups[cheap].append(moved)
        step = costs[moved]
        if back is not None:
            groups[cheap].remove(back)
            groups[dear].append(back)
            step -= costs[back]
        by_load.pop()
        by_load.pop(0)
        insort(by_load, (most - step, dear))
        insort(by_load, (least + step, cheap))


def _best_exchange(
    costs: Sequence[float], dear: Sequence[int], cheap: Sequence[int], gap: float, may_move: bool
) -> tuple[int, int | None] | None:
    """What goes from one share to the other, and what comes back; None where nothing makes them more even."""
    best = gap / 2  # how far they are from even now
    found: tuple[int, int | None] | None = None
    back_by_cost = sorted(cheap, key=costs.__getitem__, reverse=True)
    place = 0
    for moved in sorted(dear, key=costs.__getitem__, reverse=True):
        wanted = costs[moved] - gap / 2
        if may_move and abs(wanted) < best:
            best, found = abs(wanted), (moved, None)
        while place < len(back_by_cost) and costs[back_by_cost[place]] > wanted:
            place += 1
        for back in back_by_cost[max(0, place - 1) : place + 1]:
            if abs(costs[back] - wanted) < best:
                best, found = abs(costs[back] - wanted), (moved, back)
    return found if best < gap / 2 * (1 - 1e-9) else None


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
