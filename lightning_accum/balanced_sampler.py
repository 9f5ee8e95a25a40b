"""Samples of very different lengths, shared out over ranks so that all have the same to do."""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from heapq import heapreplace
from itertools import islice
from typing import Any

from torch.utils.data import Sampler

from lightning_accum.errors import ArgumentError, WrongTypeError
from lightning_accum.samplers import Place, SameOrderSampler


class BalancedBatchSampler(Place, Sampler[list[int]]):
    """A ``batch_sampler`` that gives the ranks equal work: the windows of :class:`SameOrderSampler`, shared out by length.

    A window is ``window`` loader batches of every rank, ``window * ranks * batch_size`` samples. It holds the same samples as it
    does with a :class:`SameOrderSampler` of the same seed, in every epoch, so a training that is exact in its windows goes the
    same way. Which rank gets which of them is chosen so that the sums of their costs are about even: longest first, each to the
    rank with the least. Inside a rank the longest samples come first, in batches of about equal size when padded.

    Ranks and batches have different numbers of samples, so gradients need weights: use it with the strategies of this package,
    and a ``GradientAccumulation`` of as many loader batches as ``window``. Every rank has the same number of loader batches,
    except in an epoch whose last window has fewer samples than there are ranks: some ranks have none of those.

    With these strategies Lightning leaves the loader alone, and sets the ranks and the epoch. Elsewhere pass
    ``Trainer(use_distributed_sampler=False)``; ranks are those of the process group at the time of the iteration.

    Args:
        lengths: of the samples of the dataset, in its order, the same on all ranks: a list, an array or a tensor; or a function of
            the index, called once for each sample when the sampler is made. This package's strategies compare those of all
            ranks.
        batch_size: samples in a loader batch, in the mean.
        window: loader batches of a rank in a window. Windows begin anew with every epoch.
        cost: a function of a length that returns what such a sample costs, such as ``lambda n: n + n**2 / 1024`` where
            attention counts; None for the length.
        shuffle: whether every epoch (see :meth:`set_epoch`) has an order of its own, or all have the dataset's.
        seed: seed of the shuffling, the same on all ranks.
        num_replicas: ranks that share the samples; None for those of the process group.
        rank: which of them this is; None for that of the process group.
        samples: how many samples there are, where ``lengths`` is a function.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a length or a cost is negative or not finite, or there are none; a size is less than 1; or there is no such
            rank.

    Example:
        >>> lengths = [90, 10, 20, 80, 40, 60, 50, 50]
        >>> left, right = (BalancedBatchSampler(lengths, 4, num_replicas=2, rank=rank, shuffle=False) for rank in range(2))
        >>> [[lengths[index] for index in batch] for batch in left]
        [[90, 50, 50, 10]]
        >>> [[lengths[index] for index in batch] for batch in right]
        [[80, 60, 40, 20]]
    """

    def __init__(
        self,
        lengths: Sequence[float] | Callable[[int], float] | Any,
        batch_size: int,
        *,
        window: int = 1,
        cost: Callable[[Any], float] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        samples: int | None = None,
    ) -> None:
        self.batch_size, self.window = _natural("batch_size", batch_size), _natural("window", window)
        if cost is not None and not callable(cost):
            raise WrongTypeError(f"BalancedBatchSampler(cost={cost!r}): expected a function of a length, or None")
        if (num_replicas is None) != (rank is None):
            raise ArgumentError(
                f"BalancedBatchSampler(num_replicas={num_replicas}, rank={rank}): pass both, or neither for those of the process"
                " group"
            )
        self._lengths = _read_lengths(lengths, samples)
        self._costs = self._lengths if cost is None else _costs_of(self._lengths, cost)
        self.sampler = SameOrderSampler(range(len(self._lengths)), shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        """The order of the samples. Lightning looks for the epoch here."""
        self.sampler.deal(1, rank=0)
        self.num_replicas, self.rank = 1, 0
        self._is_fixed = False
        if num_replicas is not None and rank is not None:
            self.deal(num_replicas, rank)
            self._is_fixed = True

    def deal(self, num_replicas: int, rank: int) -> None:
        """Set the ranks as :class:`SameOrderSampler` does, unless the constructor was given them."""
        if not self._is_fixed:
            super().deal(num_replicas, rank)

    @property
    def epoch(self) -> int:
        """That whose order is next."""
        return self.sampler.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        """The indices of this rank's samples, a list for each of its loader batches."""
        first_window, skipped = divmod(self._begin(), self.window)
        return self._counted(self._batches(first_window, skipped))

    def _batches(self, first_window: int, skipped: int) -> Iterator[list[int]]:
        size, order = self._samples_in_window, list(self.sampler)
        for start in range(first_window * size, len(order), size):
            yield from self._of_this_rank(order[start : start + size])[skipped:]
            skipped = 0

    def _of_this_rank(self, indices: Sequence[int]) -> list[list[int]]:
        """The loader batches that this rank has of a window."""
        batches = self._batches_of(len(indices))
        at_least = batches if len(indices) >= self.num_replicas else 0
        own = share_evenly([self._costs[index] for index in indices], self.num_replicas, at_least)[self.rank]
        by_length = sorted((indices[place] for place in own), key=self._lengths.__getitem__, reverse=True)
        sizes = batch_sizes([self._lengths[index] for index in by_length], batches)
        rest = iter(by_length)
        return [list(islice(rest, size)) for size in sizes]

    def __len__(self) -> int:
        """How many loader batches this rank gets in an epoch."""
        self._find_ranks()
        windows, rest = divmod(len(self._lengths), self._samples_in_window)
        return windows * self.window + (self._batches_of(rest) if self.rank < rest else 0)

    def check_length_of(self, dataset: object) -> None:
        """Refuse a dataset of another number of samples.

        Raises:
            ValueError: there are lengths for more samples, or for fewer.
        """
        if isinstance(dataset, Sized) and len(dataset) != len(self._lengths):
            raise ArgumentError(
                f"BalancedBatchSampler(lengths=...) has the lengths of {len(self._lengths)} samples, but the loader's"
                f" {type(dataset).__name__} has {len(dataset)}: pass the lengths of this dataset"
            )

    @property
    def digest(self) -> int:
        """A number that is the same on two ranks only if they share out the same samples alike."""
        numbers = array("d", [*self._lengths, *self._costs, self.batch_size, self.window, self.sampler.shuffle, self.sampler.seed])
        return zlib.crc32(numbers.tobytes())

    @property
    def _samples_in_window(self) -> int:
        return self.window * self.num_replicas * self.batch_size

    def _batches_of(self, samples: int) -> int:
        """The loader batches that each rank has of a window of so many samples: no more than it can have samples."""
        return min(math.ceil(samples / (self.num_replicas * self.batch_size)), max(1, samples // self.num_replicas))


def _natural(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongTypeError(f"BalancedBatchSampler({name}={value!r}): expected a whole number, found {type(value).__name__}")
    if value < 1:
        raise ArgumentError(f"BalancedBatchSampler({name}={value}): expected 1 or more")
    return value


def _read_lengths(lengths: Any, samples: int | None) -> list[float]:
    if callable(lengths):
        if samples is None:
            raise WrongTypeError(
                "BalancedBatchSampler(lengths=<a function>) does not know how many samples there are: pass samples=len(dataset)"
            )
        read = [lengths(index) for index in range(_natural("samples", samples))]
    else:
        if isinstance(lengths, (str, bytes, Mapping)) or not (hasattr(lengths, "tolist") or hasattr(lengths, "__iter__")):
            raise WrongTypeError(
                f"BalancedBatchSampler(lengths=...): expected a list, an array or a tensor of the lengths of all samples, or a"
                f" function of the index, found {type(lengths).__name__}"
            )
        read = lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
        if not isinstance(read, list) or not read:
            raise ArgumentError("BalancedBatchSampler(lengths=...): expected one length for each sample, found none")
        if samples is not None and samples != len(read):
            raise ArgumentError(f"BalancedBatchSampler(samples={samples}): there are {len(read)} lengths")
    return [_cost(f"lengths[{index}]", value) for index, value in enumerate(read)]


def _costs_of(lengths: Sequence[float], cost: Callable[[Any], float]) -> list[float]:
    known = {length: _cost(f"cost({length})", cost(length)) for length in set(lengths)}
    return [known[length] for length in lengths]


def _cost(name: str, value: Any) -> float:
    """A number that is none of Python's own, such as a tensor with one element, as one that is."""
    number = value
    if hasattr(value, "item"):
        with suppress(RuntimeError, ValueError):  # of a tensor with several elements
            number = value.item()
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise WrongTypeError(f"BalancedBatchSampler: expected one number, found {name} = {value!r}")
    if not 0 <= number < math.inf:
        raise ArgumentError(f"BalancedBatchSampler: expected a finite number from 0, found {name} = {number}")
    return number


def share_evenly(costs: Sequence[float], shares: int, at_least: int = 0) -> list[list[int]]:
    """Shares of the positions in ``costs`` whose sums are about even: R. L. Graham's longest first (1969).

    Example:
        >>> [sorted(share) for share in share_evenly([5, 4, 3, 3, 2], 2)]
        [[0, 3], [1, 2, 4]]
        >>> share_evenly([100, 1, 1, 1, 1], 2, at_least=2)
        [[0, 4], [1, 2, 3]]
    """
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    groups: list[list[int]] = [[] for _ in range(shares)]
    heap = [(0.0, 0, share) for share in range(shares)]  # the cost and the number of what each has
    for position in order:
        load, number, share = heap[0]
        groups[share].append(position)
        heapreplace(heap, (load + costs[position], number + 1, share))
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
