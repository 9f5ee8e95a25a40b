"""The loader batches of a hand-written loop: which is the last is known, and there are as many on every rank."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from lightning_accum.errors import UsageError
from lightning_accum.failures import raise_failure_of_loader
from lightning_accum.ranks import Ranks, RankStatus

LoaderBatch: TypeAlias = "tuple[Any, bool, bool]"
"""What a loader gave; whether nothing follows on any rank; and whether this rank has run out of data, and others have not: it is
the last batch again then, and weighs nothing.
"""

_END: Any = object()


def loader_batches(loader: Iterable[Any], ranks: Ranks) -> Iterator[LoaderBatch]:
    """The batches of a loader, as many on every rank as that with the most has. Used on all ranks.

    A loader whose length is known is not drawn from before its batch is needed, so that its own state, in a checkpoint, is that of
    the batches that were yielded. Of others one batch is drawn ahead.

    Raises:
        RankFailedError: the loader of another rank failed, where lengths are not known.
        UsageError: a loader yields more batches than its length, in the pass that does.

    Example:
        >>> import torch
        >>> list(loader_batches(iter("ab"), Ranks(torch.device("cpu"))))
        [('a', False, False), ('b', True, False)]
    """
    length = length_of(loader)
    if ranks.world_size == 1:
        return _of_one_rank(loader, length)
    longest, shortest = ranks.largest(length, -length)
    if longest == math.inf or shortest == 0:
        return _by_agreement(loader, ranks)
    return _of_known_lengths(loader, int(longest), ranks)


class Ahead:
    """The batches of a loader, of which some may be drawn before it is their turn."""

    def __init__(self, batches: Iterator[LoaderBatch]) -> None:
        self._batches = batches
        self._drawn: deque[LoaderBatch] = deque()
        self._last: LoaderBatch | None = None

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> LoaderBatch:
        self._last = self._drawn.popleft() if self._drawn else next(self._batches)
        return self._last

    def rest(self, number: float) -> Iterator[LoaderBatch]:
        """Draw so many more after the one that was yielded last, or what there is.

        Raises:
            RuntimeError: drawing one has changed another.
        """
        assert self._last is not None
        ends_data = self._last[1]
        while len(self._drawn) < number and not ends_data:
            before = [batch for batch, *_ in (self._last, *self._drawn)]
            versions = list(map(_versions, before))
            following = next(self._batches, None)
            if following is None:
                return
            for batch, own in zip(before, versions, strict=True):
                _refuse_overwritten(batch, own)
            self._drawn.append(following)
            ends_data = following[1]
            yield following


def length_of(loader: Iterable[Any]) -> float:
    """Of a loader, in batches; inf where it is not known. Streams may give other than they tell."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return math.inf
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return math.inf


def _of_one_rank(loader: Iterable[Any], length: float) -> Iterator[LoaderBatch]:
    if length != math.inf:
        for number, batch in enumerate(loader, 1):
            if number > length:
                raise _longer_than(length)
            yield batch, number == length, False
        return
    batches = iter(loader)
    batch = next(batches, _END)
    while batch is not _END:
        versions = _versions(batch)
        following = next(batches, _END)
        _refuse_overwritten(batch, versions)
        yield batch, following is _END, False
        batch = following


def _versions(batch: Any) -> list[int]:
    """How often each tensor in a batch has been changed in place."""
    return [leaf._version for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and not leaf.is_inference()]


def _refuse_overwritten(batch: Any, versions: list[int]) -> None:
    """Refuse a loader that reuses its memory, of which a batch was drawn ahead.

    Raises:
        RuntimeError: drawing the next batch has changed this one.
    """
    if _versions(batch) != versions:
        raise UsageError(
            "The loader has written its next batch into the tensors of one before, which is still to run: where its length is not"
            " known, or the terms of a window are counted, batches are drawn ahead. Have it yield tensors of their own."
        )


def _of_known_lengths(loader: Iterable[Any], longest: int, ranks: Ranks) -> Iterator[LoaderBatch]:
    batches, last = iter(loader), None
    for number in range(1, longest + 1):
        batch = next(batches, None)  # one that is None takes part in what the others do, too
        last = last if batch is None else batch
        yield last, number == longest, batch is None and last is not None
    if ranks.largest(float(next(batches, _END) is not _END))[0]:
        raise _longer_than(longest)


def _longer_than(length: float) -> UsageError:
    return UsageError(
        f"The loader has yielded more than the {length:.0f} batches of its length, with the last of which a window has ended."
        " Correct its __len__, or iterate over itertools.islice(loader, n)."
    )


def _by_agreement(loader: Iterable[Any], ranks: Ranks) -> Iterator[LoaderBatch]:
    """Before each batch the ranks tell each other what they have."""
    last, batches, following, failure = None, None, _END, None
    try:
        batches = iter(loader)
        following = next(batches, _END)
    except Exception as error:
        failure = error
    while True:
        batch, following = following, _END
        if batch is not _END and batches is not None:
            try:
                versions = _versions(batch)
                following = next(batches, _END)
                _refuse_overwritten(batch, versions)
            except Exception as error:
                failure = error
        own = None if batch is _END else batch
        status = ranks.agree(
            RankStatus(
                is_alive=batch is not _END,
                batch_from=0 if own is None else ranks.rank + 1,
                has_more=following is not _END,
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
            last = shared if own is None and last is None else last
        last = last if own is None else own
        yield last, not status.has_more, own is None and last is not None
