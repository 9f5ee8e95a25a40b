"""Which rank trains on which sample: the same global order on any number of ranks, and no sample twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any, TypeVar, cast

from torch import distributed as dist
from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from lightning_accum.errors import ArgumentError, WrongTypeError

T = TypeVar("T")


class Resumable:
    """A sampler that knows its place in an epoch, for loaders that save it in checkpoints: torchdata's ``StatefulDataLoader``."""

    epoch: int
    _yielded = _begin_at = 0

    def state_dict(self) -> dict[str, int]:
        """The place in the data."""
        return {"epoch": self.epoch, "yielded": self._yielded}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Begin the next iteration where :meth:`state_dict` was taken; at an end, at the beginning."""
        self.set_epoch(state["epoch"])
        self._begin_at = state["yielded"] % max(1, len(self))

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch. Lightning calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        raise NotImplementedError

    def _resumed(self, items: Iterable[T]) -> Iterator[T]:
        """What is left of the items of an epoch."""
        self._yielded, self._begin_at = self._begin_at, 0
        for item in islice(items, self._yielded, None):
            self._yielded += 1
            yield item


class SameOrderSampler(Resumable, DistributedSampler[int]):
    """The same global order on any number of ranks, without repeats.

    An epoch has the order of :class:`torch.utils.data.DistributedSampler` with the same seed, which is also the sampler that
    Lightning injects. Of R ranks, rank r gets the positions r, r + R, r + 2R, ... of it. A window of B samples, B / R from
    each rank, is therefore the same set of samples for every R that divides B. Where torch repeats samples to even out the ranks,
    here some ranks get one sample fewer than others, and may end the epoch one batch earlier.

    Lightning leaves a loader alone that has this as its ``sampler``; inside a ``batch_sampler`` Lightning replaces it. Ranks are
    those of the process group at the time of the iteration, or a single one where there is none, unless :meth:`deal` has set them.
    The attributes ``num_replicas`` and ``rank`` are those of the last iteration, :func:`len` or :meth:`deal`.

    Args:
        dataset: what is sampled; it needs a length.
        shuffle: whether every epoch (see ``set_epoch``, which Lightning calls) has an order of its own, or all have the dataset's.
        seed: seed of the shuffling, the same on all ranks. Lightning's injected sampler takes that of ``seed_everything``, or 0.

    Raises:
        TypeError: the dataset has no length, or is an ``IterableDataset``.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> dataset = [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]
        >>> loader = DataLoader(dataset, batch_size=4, sampler=SameOrderSampler(dataset))
        >>> [len(batch) for batch in loader]
        [4, 4, 2]

        The first window of four, from one rank and from two:

        >>> sampler = SameOrderSampler(dataset)
        >>> window = list(sampler)[:4]
        >>> sampler.deal(2, rank=0)
        >>> left = list(sampler)[:2]
        >>> sampler.deal(2, rank=1)
        >>> right = list(sampler)[:2]
        >>> sorted(left + right) == sorted(window)
        True
    """

    _is_dealt = False

    def __init__(self, dataset: Dataset[Any], shuffle: bool = True, seed: int = 0) -> None:
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise WrongTypeError(
                "SameOrderSampler(dataset): expected a dataset with a __len__ and an order to choose, found"
                f" {type(dataset).__name__}; an IterableDataset orders itself: give it to its DataLoader without a sampler, and let"
                " its __iter__ choose what each rank gets"
            )
        super().__init__(dataset, num_replicas=1, rank=0, shuffle=shuffle, seed=seed, drop_last=False)

    def deal(self, num_replicas: int, rank: int) -> None:
        """Set the ranks, whatever the process group says.

        Args:
            num_replicas: ranks that share the samples.
            rank: which of them this is, from 0.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < num_replicas:
            raise ArgumentError(
                f"deal(num_replicas={num_replicas}, rank={rank}): num_replicas must be 1 or more, and rank from 0 to"
                " num_replicas - 1"
            )
        self._is_dealt = True
        self.num_replicas, self.rank = num_replicas, rank

    def __iter__(self) -> Iterator[int]:
        """The indices of this rank's samples."""
        self.find_ranks()
        return self._resumed(super().__iter__())

    def __len__(self) -> int:
        """How many samples this rank gets."""
        self.find_ranks()
        return self.num_samples

    def find_ranks(self) -> None:
        """Have the ranks be those of the process group, unless :meth:`deal` has set them."""
        if not self._is_dealt:  # each time anew: a length may have been asked for before there were processes
            has_group = dist.is_available() and dist.is_initialized()
            self.num_replicas, self.rank = (dist.get_world_size(), dist.get_rank()) if has_group else (1, 0)
        leave_out_repeats(self)


def leave_out_repeats(sampler: DistributedSampler[Any]) -> None:
    """Make a sampler give every sample to one rank only, in place, where it would repeat some to even out the ranks.

    Ranks then differ by up to one sample. With ``drop_last=True`` nothing is repeated, and nothing changes.

    Args:
        sampler: torch's own, or a subclass that goes by its ``total_size`` and ``num_samples``, as Lightning's wrapper does.

    Example:
        >>> sampler = DistributedSampler([10, 11, 12], num_replicas=2, rank=1, shuffle=False)
        >>> list(sampler)
        [1, 0]
        >>> leave_out_repeats(sampler)
        >>> list(sampler)
        [1]
    """
    if not sampler.drop_last:
        sampler.total_size = len(cast(Sized, sampler.dataset))
        sampler.num_samples = len(range(sampler.rank, sampler.total_size, sampler.num_replicas))
