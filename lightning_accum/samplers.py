"""Samplers for several ranks: the same global order on any number of ranks, no sample twice, and equal work."""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from heapq import heapreplace
from itertools import islice, pairwise
from typing import Any, cast

from torch import distributed as dist
from torch.utils.data import Dataset, DistributedSampler, IterableDataset
from typing_extensions import override

from lightning_accum.errors import ArgumentError, WrongTypeError
from lightning_accum.policy import is_natural


class SameOrderSampler(DistributedSampler[Any]):
    """The same global order on any number of ranks, without repeats; a ``StatefulDataLoader`` of torchdata resumes it anywhere.

    An epoch has the order of :class:`torch.utils.data.DistributedSampler` with the same seed, which is also the sampler that
    Lightning injects. Of R ranks, rank r gets the positions r, r + R, r + 2R, ... of it. A window of B samples, B / R from each
    rank, is therefore the same set of samples for every R that divides B. torch repeats samples to make the ranks even; here some
    ranks get one sample fewer, and may end the epoch one batch earlier.

    Lightning keeps this as the ``sampler`` of a loader, but replaces it inside a ``batch_sampler``. The ranks come from the process
    group at the time of the iteration, or from :meth:`deal`; without either there is one rank.

    Args:
        dataset: the dataset to sample from; it needs a length.
        shuffle: whether every epoch (see ``set_epoch``, which Lightning calls) has an order of its own, or all have the dataset's.
        seed: seed of the shuffling, the same on all ranks. Lightning's own sampler takes the seed of ``seed_everything``, or 0.

    Raises:
        TypeError: the dataset has no length, or is an ``IterableDataset``.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> dataset = [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]
        >>> loader = DataLoader(dataset, batch_size=4, sampler=SameOrderSampler(dataset))
        >>> [len(batch) for batch in loader]
        [4, 4, 2]
    """

    _is_dealt = False
    _yielded = _begin_at = 0

    def __init__(self, dataset: Dataset[Any], shuffle: bool = True, seed: int = 0) -> None:
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            found = f"SameOrderSampler(dataset): expected a dataset with __len__, found {type(dataset).__name__}"
            raise WrongTypeError(f"{found}; an IterableDataset chooses the samples of each rank in its __iter__")
        super().__init__(dataset, num_replicas=1, rank=0, shuffle=shuffle, seed=seed, drop_last=False)

    def deal(self, num_replicas: int, rank: int) -> None:
        """Share the samples between ``num_replicas`` ranks, whatever the process group says. This rank is ``rank``, from 0."""
        if not 0 <= rank < num_replicas:
            raise ArgumentError(f"deal(num_replicas={num_replicas}, rank={rank}): expected a rank from 0 to num_replicas - 1")
        self._is_dealt = True
        self.num_replicas, self.rank = num_replicas, rank

    @override
    def __iter__(self) -> Iterator[Any]:
        """The indices of this rank's samples."""
        self._yielded, self._begin_at = self._begin_at, 0
        for item in islice(self._items(), self._yielded, None):
            self._yielded += 1
            yield item

    def _items(self) -> Iterable[Any]:
        """The items of this rank in an epoch."""
        self._find_ranks()
        return super().__iter__()

    @override
    def __len__(self) -> int:
        """The number of samples of this rank."""
        self._find_ranks()
        return self.num_samples

    def _find_ranks(self) -> None:
        """Take the ranks from the process group, unless they were set."""
        if not self._is_dealt:  # each time: the length may have been read before the processes started
            has_group = dist.is_available() and dist.is_initialized()
            self.num_replicas, self.rank = (dist.get_world_size(), dist.get_rank()) if has_group else (1, 0)
        leave_out_repeats(self)

    def state_dict(self) -> dict[str, int]:
        """The position in the data; after an end, the beginning."""
        yielded = self._yielded % max(1, len(self))  # of this rank: others may have one less
        return {"epoch": self.epoch, "yielded": yielded, "ranks": self.num_replicas}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Begin the next iteration at the position of :meth:`state_dict`, on any number of ranks."""
        self.set_epoch(state["epoch"])
        self._find_ranks()
        self._begin_at = state["yielded"] * state.get("ranks", self.num_replicas) // self.num_replicas


def leave_out_repeats(sampler: DistributedSampler[Any]) -> None:
    """Have a sampler of torch give each sample to one rank only, instead of repeating some to make the ranks even."""
    if not sampler.drop_last:
        sampler.total_size = len(cast(Sized, sampler.dataset))
        sampler.num_samples = len(range(sampler.rank, sampler.total_size, sampler.num_replicas))


# --- equal work for all ranks ----------------------------------------------------------------------------------------


class BalancedBatchSampler(SameOrderSampler):
    """A ``batch_sampler`` that gives the ranks equal work: the windows of :class:`SameOrderSampler`, shared out by length.

    A window is ``window`` loader batches of every rank, ``window * ranks * batch_size`` samples: the same samples as with a
    :class:`SameOrderSampler` of the same seed, so an exact training has the same result. They are divided so that the sums of their
    lengths are about even: longest first, each to the rank with the least. Inside a rank the longest samples come first, in batches
    of about equal size.

    Ranks and batches have different numbers of samples, so gradients need weights: use this sampler with the strategies of this
    package, and with a ``GradientAccumulation`` whose window has ``window`` loader batches. Every rank has the same number of
    loader batches, except if the last window of an epoch has fewer samples than there are ranks: some then get no batch for it.

    With these strategies Lightning keeps the loader's sampler, and sets the ranks and the epoch. Elsewhere pass
    ``Trainer(use_distributed_sampler=False)``.

    Args:
        lengths: the length of each sample, in the order of the dataset, as a list, an array or a tensor; or its cost, such as
            ``n + n**2 / 1024`` for attention over n tokens. The same on all ranks: this package's strategies compare them.
        batch_size: how many samples a loader batch has on average.
        window: loader batches of a rank in a window. Each epoch begins a new window.
        shuffle: whether every epoch (see :meth:`set_epoch`) has an order of its own, or all have the dataset's.
        seed: seed of the shuffling, the same on all ranks.

    Raises:
        TypeError: the lengths are not numbers.
        ValueError: a length is negative or not finite, there are no lengths, or a size is not a whole number from 1.

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
        self, lengths: Sequence[float] | Any, batch_size: int, *, window: int = 1, shuffle: bool = True, seed: int = 0
    ) -> None:
        for name, value in (("batch_size", batch_size), ("window", window)):
            if not is_natural(value):
                raise ArgumentError(f"BalancedBatchSampler({name}={value!r}): expected a whole number from 1")
        # not named batch_size: with that and drop_last, Lightning would construct the batch sampler again
        self._batch_size, self.window, self._lengths = batch_size, window, _read_lengths(lengths)
        super().__init__(range(len(self._lengths)), shuffle, seed)  # type: ignore[arg-type]

    @property
    def sampler(self) -> BalancedBatchSampler:
        """The object whose ``set_epoch`` Lightning calls."""
        return self

    @override
    def _items(self) -> Iterator[list[int]]:
        of_all: DistributedSampler[int] = DistributedSampler(self.dataset, 1, 0, self.shuffle, self.seed)
        of_all.set_epoch(self.epoch)
        self._find_ranks()
        order, size = list(of_all), self._samples_in_window
        for start in range(0, len(order), size):
            yield from self._of_this_rank(order[start : start + size])

    def _of_this_rank(self, indices: Sequence[int]) -> list[list[int]]:
        """The loader batches of this rank in a window."""
        batches = self._batches_of(len(indices))
        at_least = batches if len(indices) >= self.num_replicas else 0
        lengths = [self._lengths[index] for index in indices]
        own = share_evenly(lengths, self.num_replicas, at_least)[self.rank]
        by_length = [indices[place] for place in sorted(own, key=lengths.__getitem__, reverse=True)]
        ends = [len(own) * number // batches for number in range(batches + 1)]
        return [by_length[start:end] for start, end in pairwise(ends) if end > start]

    @override
    def __len__(self) -> int:
        """The number of loader batches of this rank in an epoch."""
        self._find_ranks()
        windows, rest = divmod(len(self._lengths), self._samples_in_window)
        return windows * self.window + (self._batches_of(rest) if self.rank < rest else 0)

    def check_length_of(self, dataset: object) -> None:
        """Refuse a dataset with a different number of samples."""
        if isinstance(dataset, Sized) and len(dataset) != len(self._lengths):
            found = f"{len(self._lengths)} samples, but the loader's {type(dataset).__name__} has {len(dataset)}"
            raise ArgumentError(f"BalancedBatchSampler(lengths=...) has the lengths of {found}")

    @property
    def digest(self) -> int:
        """A checksum of the lengths and arguments, for a comparison between ranks."""
        numbers = array("d", [*self._lengths, self._batch_size, self.window, self.shuffle, self.seed])
        return zlib.crc32(numbers.tobytes())

    @property
    def _samples_in_window(self) -> int:
        return self.window * self.num_replicas * self._batch_size

    def _batches_of(self, samples: int) -> int:
        """The loader batches of each rank in a window of this many samples; none may be empty."""
        return min(math.ceil(samples / (self.num_replicas * self._batch_size)), max(1, samples // self.num_replicas))


def _read_lengths(lengths: Any) -> list[float]:
    read = lengths.tolist() if hasattr(lengths, "tolist") else lengths
    try:
        numbers = [] if isinstance(read, (str, Mapping)) else [float(length) for length in read]
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several elements
        numbers = []
    if not numbers:
        raise WrongTypeError(f"BalancedBatchSampler(lengths=...): expected one number for each sample, found {lengths!r:.200}")
    for index, number in enumerate(numbers):
        if not 0 <= number < math.inf:
            raise ArgumentError(f"BalancedBatchSampler: expected a finite number from 0, found lengths[{index}] = {number}")
    return numbers


def share_evenly(costs: Sequence[float], shares: int, at_least: int = 0) -> list[list[int]]:
    """Shares of the positions in ``costs`` whose sums are about even: R. L. Graham's longest first (1969)."""
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    groups: list[list[int]] = [[] for _ in range(shares)]
    heap = [(0.0, 0, share) for share in range(shares)]  # cost, number of samples and index of each share
    for position in order:
        load, number, share = heap[0]
        groups[share].append(position)
        heapreplace(heap, (load + costs[position], number + 1, share))
    for group in groups:
        while len(group) < at_least:  # move the cheapest sample of the largest share
            group.append(max(groups, key=len).pop())
    return groups
