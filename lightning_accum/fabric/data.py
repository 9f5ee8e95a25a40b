"""The loader batches of a hand-written loop: it is known which of them is the last, and every rank has as many."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from lightning_accum.errors import UsageError
from lightning_accum.failures import raise_failure_of_loader
from lightning_accum.ranks import Ranks, RankStatus

_END: Any = object()


class LoaderBatch(NamedTuple):
    """A loader batch of this rank.

    Attributes:
        batch: what the loader gave; if this rank has run out of data before others, its last batch again.
        ends_data: nothing follows on any rank.
        is_shadow_batch: it is the last batch again, and weighs nothing.
    """

    batch: Any
    ends_data: bool
    is_shadow_batch: bool


class LoaderBatches:
    """The batches of a loader, as many on every rank as on the rank with the most. Used on all ranks.

    If lengths are known, no batch is drawn before it is needed, so that the state of the loader in a checkpoint is that of
    the batches that were yielded. Otherwise one batch is drawn ahead, and ranks tell each other what they have.

    Raises:
        RankFailedError: the loader of another rank failed, and lengths are not known.
        RuntimeError: a loader yields more batches than its length, or writes into a batch that is still to run.

    Example:
        >>> import torch
        >>> [batch[:2] for batch in LoaderBatches(iter("ab"), Ranks(torch.device("cpu")))]
        [('a', False), ('b', True)]
    """

    def __init__(self, loader: Iterable[Any], ranks: Ranks) -> None:
        self.length = length_of(loader)
        longest, shortest = ranks.largest(self.length, -self.length)
        is_known = longest < math.inf and shortest < 0
        self._batches = _of_known_lengths(loader, int(longest), ranks) if is_known else _by_agreement(loader, ranks)
        self._drawn: deque[LoaderBatch] = deque()
        self._last = LoaderBatch(None, False, False)

    def __iter__(self) -> Iterator[LoaderBatch]:
        return self

    def __next__(self) -> LoaderBatch:
        self._last = self._drawn.popleft() if self._drawn else next(self._batches)
        return self._last

    def rest(self, number: float) -> Iterator[tuple[Any, bool]]:
        """Draw as many after the one that was yielded last, or what there is. Each with whether it is a shadow batch."""
        known = deque([self._last, *self._drawn])
        while len(self._drawn) < number and not known[-1].ends_data:
            following = _draw(self._batches, known)
            if following is _END:
                return
            known.append(following)
            self._drawn.append(following)
            yield following.batch, following.is_shadow_batch


def length_of(loader: Iterable[Any]) -> float:
    """Number of batches of a loader, or inf if unknown. The length of a stream is not relied on."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return math.inf
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return math.inf


def _of_known_lengths(loader: Iterable[Any], longest: int, ranks: Ranks) -> Iterator[LoaderBatch]:
    batches, last = iter(loader), None
    for number in range(1, longest + 1):
        batch = next(batches, _END)
        if batch is _END and ranks.world_size == 1:
            return
        own = None if batch is _END else batch
        last = last if own is None else own
        yield _of_this_rank(own, last, number == longest, ranks)
    if ranks.largest(float(next(batches, _END) is not _END))[0]:
        raise UsageError(
            f"The loader has yielded more than the {longest} batches of its length, with the last of which a window has"
            " ended. Correct its __len__, or iterate over itertools.islice(loader, n)."
        )


def _by_agreement(loader: Iterable[Any], ranks: Ranks) -> Iterator[LoaderBatch]:
    """Before each batch the ranks tell each other what they have."""
    batches = chain.from_iterable((loader,))  # calls iter(loader) with the first batch
    last, drawn, failure = None, deque[Any](), None
    while True:
        try:
            while len(drawn) < 2:
                drawn.append(_draw(batches, drawn))
        except Exception as error:
            failure, drawn = error, deque((_END, _END))
        batch = drawn.popleft()
        is_alive, has_more = batch is not _END, drawn[0] is not _END
        own = batch if is_alive else None
        status = ranks.agree(
            RankStatus(
                is_alive=is_alive,
                batch_from=0 if own is None else ranks.rank + 1,
                has_more=has_more,
                lacks_batch=own is None and last is None,
                failed=0 if failure is None else ranks.rank + 1,
            )
        )
        if status.failed:
            raise_failure_of_loader(failure, ranks, status.failed - 1)
        if not status.is_alive:
            return
        if status.lacks_batch and status.batch_from:
            shared = ranks.share(own, status.batch_from - 1)
            last = shared if last is None else last
        last = last if own is None else own
        yield _of_this_rank(own, last, not status.has_more, ranks)


def _of_this_rank(own: Any, last: Any, ends_data: bool, ranks: Ranks) -> LoaderBatch:
    if ranks.world_size == 1:
        return LoaderBatch(own, ends_data, False)
    return LoaderBatch(last, ends_data, own is None and last is not None)


def _draw(batches: Iterator[Any], before: Sequence[Any]) -> Any:
    """The next batch, where those ``before`` are still to run.

    Raises:
        RuntimeError: drawing it has changed one of them.
    """
    versions = _versions(before)
    following = next(batches, _END)
    if _versions(before) != versions:
        raise UsageError(
            "The loader has written its next batch into the tensors of one before, which is still to run: where its length is not"
            " known, or the terms of a window are counted, batches are drawn ahead. Have it yield tensors of their own."
        )
    return following


def _versions(batches: Sequence[Any]) -> list[int]:
    """The changes in place that each tensor has seen."""
    leaves = tree_leaves(list(batches))
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
