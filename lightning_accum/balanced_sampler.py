"""Samples of very different lengths, shared out over ranks so that all have the same to do."""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from copy import copy
from heapq import heapreplace
from itertools import islice
from typing import Any

from torch.utils.data import Sampler
from typing_extensions import override

from lightning_accum.errors import ArgumentError, WrongTypeError
from lightning_accum.samplers import Resumable, SameOrderSampler


class BalancedBatchSampler(Resumable, Sampler[list[int]]):
    """A ``batch_sampler`` that gives the ranks equal work: the windows of :class:`SameOrderSampler`, shared out by length.

    A window is ``window`` loader batches of every rank, ``window * ranks * batch_size`` samples. It holds the same samples as it
    does with a :class:`SameOrderSampler` of the same seed, in every epoch, so a training that is exact in its windows goes the
    same way. Which rank gets which of them is chosen so that the sums of their costs are about even: longest first, each to the
    rank with the least. Inside a rank the longest samples come first, in batches of about equal size when padded.

    Ranks and batches have different numbers of samples, so gradients need weights: use it with the strategies of this package,
    and a ``GradientAccumulation`` of as many loader batches as ``window``. Every rank has the same number of loader batches,
    except in an epoch whose last window has fewer samples than there are ranks: some ranks have none of those.

    With these strategies Lightning leaves the loader alone, and sets the ranks and the epoch. Elsewhere pass
    ``Trainer(use_distributed_sampler=False)``; ranks are those of the process group at the time of the iteration, unless
    :meth:`deal` has set them.

    Args:
        lengths: of the samples of the dataset, in its order, the same on all ranks: a list, an array or a tensor. This package's
            strategies compare those of all ranks.
        batch_size: samples in a loader batch, in the mean.
        window: loader batches of a rank in a window. Windows begin anew with every epoch.
        cost: a function of a length that returns what such a sample costs, such as ``lambda n: n + n**2 / 1024`` where
            attention counts; None for the length.
        shuffle: whether every epoch (see :meth:`set_epoch`) has an order of its own, or all have the dataset's.
        seed: seed of the shuffling, the same on all ranks.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a length or a cost is negative or not finite, or there are none; or a size is less than 1.

    Example:
        >>> lengths = [90, 10, 20, 80, 40, 60, 50, 50]
        >>> sampler = BalancedBatchSampler(lengths, batch_size=4, shuffle=False)
        >>> sampler.deal(2, rank=0)
        >>> [[lengths[index] for index in batch] for batch in sampler]
        [[90, 50, 50, 10]]
        >>> sampler.deal(2, rank=1)
        >>> [[lengths[index] for index in batch] for batch in sampler]
        [[80, 60, 40, 20]]
    """

    def __init__(
        self,
        lengths: Sequence[float] | Any,
        batch_size: int,
        *,
        window: int = 1,
        cost: Callable[[Any], float] | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.batch_size, self.window = _natural("batch_size", batch_size), _natural("window", window)
        if cost is not None and not callable(cost):
            raise WrongTypeError(f"BalancedBatchSampler(cost={cost!r}): expected a function of a length, or None")
        self._lengths = _read_lengths(lengths)
        self._costs = self._lengths if cost is None else _costs_of(self._lengths, cost)
        self.sampler = SameOrderSampler(range(len(self._lengths)), shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        """Has the order of the samples, the ranks, and the epoch, for which Lightning looks here."""

    def deal(self, num_replicas: int, rank: int) -> None:
        """Set the ranks, as :meth:`SameOrderSampler.deal` does."""
        self.sampler.deal(num_replicas, rank)

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """That whose order is next."""
        return self.sampler.epoch

    @override
    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        """The indices of this rank's samples, a list for each of its loader batches."""
        return self._resumed(self._of_epoch())

    def _of_epoch(self) -> Iterator[list[int]]:
        of_all = copy(self.sampler)
        of_all.deal(1, rank=0)
        self.sampler.find_ranks()
        order, size = list(of_all), self._samples_in_window
        for start in range(0, len(order), size):
            yield from self._of_this_rank(order[start : start + size])

    def _of_this_rank(self, indices: Sequence[int]) -> list[list[int]]:
        """The loader batches that this rank has of a window."""
        batches = self._batches_of(len(indices))
        at_least = batches if len(indices) >= self.sampler.num_replicas else 0
        costs = [self._costs[index] for index in indices]
        own = share_evenly(costs, self.sampler.num_replicas, at_least)[self.sampler.rank]
        by_length = sorted((indices[place] for place in own), key=self._lengths.__getitem__, reverse=True)
        sizes = batch_sizes([self._lengths[index] for index in by_length], batches)
        rest = iter(by_length)
        return [list(islice(rest, size)) for size in sizes]

    def __len__(self) -> int:
        """How many loader batches this rank gets in an epoch."""
        self.sampler.find_ranks()
        windows, rest = divmod(len(self._lengths), self._samples_in_window)
        return windows * self.window + (self._batches_of(rest) if self.sampler.rank < rest else 0)

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
        return self.window * self.sampler.num_replicas * self.batch_size

    def _batches_of(self, samples: int) -> int:
        """The loader batches that each rank has of a window of so many samples: no more than it can have samples."""
        ranks = self.sampler.num_replicas
        return min(math.ceil(samples / (ranks * self.batch_size)), max(1, samples // ranks))


def _natural(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongTypeError(f"BalancedBatchSampler({name}={value!r}): expected a whole number, found {type(value).__name__}")
    if value < 1:
        raise ArgumentError(f"BalancedBatchSampler({name}={value}): expected 1 or more")
    return value


def _read_lengths(lengths: Any) -> list[float]:
    read = lengths.tolist() if hasattr(lengths, "tolist") else lengths
    if not isinstance(read, Iterable) or isinstance(read, (str, bytes, Mapping)):
        raise WrongTypeError(
            "BalancedBatchSampler(lengths=...): expected a list, an array or a tensor of the lengths of all samples, found"
            f" {type(lengths).__name__}"
        )
    numbers = [_number(f"lengths[{index}]", value) for index, value in enumerate(read)]
    if not numbers:
        raise ArgumentError("BalancedBatchSampler(lengths=...): expected one length for each sample, found none")
    return numbers


def _costs_of(lengths: Sequence[float], cost: Callable[[Any], float]) -> list[float]:
    known = {length: _number(f"cost({length})", cost(length)) for length in set(lengths)}
    return [known[length] for length in lengths]


def _number(name: str, value: Any) -> float:
    try:
        number: float = value if isinstance(value, int) else float(value)
    except (TypeError, ValueError, RuntimeError):  # the last of a tensor with several elements
        raise WrongTypeError(f"BalancedBatchSampler: expected one number, found {name} = {value!r}") from None
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
