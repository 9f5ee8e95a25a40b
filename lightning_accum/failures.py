"""The first failure of a distributed training, raised on every rank.

When a rank raises, the others end with what follows from it: "Connection closed by peer", or a timeout. So a rank that fails leaves
a note in the key-value store of the process group, and a rank whose communication fails looks for one.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

from lightning_accum.errors import AccumulationError
from lightning_accum.ranks import Ranks

_LONGEST_ANSWER = 5.0  # seconds that the store has, when the host that it is on neither answers nor closes the connection
_PATIENCE = 2.0  # seconds in which another rank's note may follow the end of its connection
_FAREWELL = 0.5  # seconds that rank 0 stays, with whose process the store usually goes, for the others to look into it
_MESSAGES = ("Connection closed", "Connection reset", "Timed out waiting", "timeout caused pair closure", "gloo", "NCCL")
"""Of errors of communication that are RuntimeErrors. Not "timed out" alone: a DataLoader's time-out is a failure of its own."""
_run = 0
"""Runs so far, alike on all ranks. Each has a note of its own: a failure that was caught is not raised as that of a later run."""

_left = 0
"""What ranks did together so far, alike on all."""


@dataclass(frozen=True)
class Failure:
    """A rank, and the type and message of what it failed with."""

    rank: int
    error: str


class RankFailedError(AccumulationError, RuntimeError):
    """Another rank failed first. The error of this rank is its ``__cause__``."""


def failure_of(error: BaseException, rank: int) -> Failure:
    """What rank ``rank`` failed with."""
    return Failure(rank, "".join(traceback.format_exception_only(error)).strip()[:2000])


def note_failure(error: BaseException, rank: int) -> None:
    """Note for all ranks that this one failed, unless another did before.

    Does nothing for an error of communication, which follows from another, and without a process group, or when its store is gone:
    the store is in the process of rank 0, or in torchrun's.
    """
    if not _is_of_communication(error):
        _first(failure_of(error, rank))


def first_failure() -> Failure | None:
    """The failure that was noted first; None where there is none, or no store to ask.

    Example:
        >>> first_failure() is None  # there is no process group
        True
    """
    return _first()


@contextmanager
def reraise_first_rank_error(rank: int | None = None, passing: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Note an error of the body, or raise what another rank failed with before.

    An error passes unchanged if it is the first, if the first was the same, or if none was noted. All ranks enter equally often.

    Args:
        rank: this rank; None for that of the process group, of which there may be none yet.
        passing: exceptions that are not errors, beside KeyboardInterrupt and SystemExit; they pass and are not noted.

    Raises:
        RankFailedError: another rank failed first.
    """
    global _run
    _run += 1
    try:
        yield
    except BaseException as error:  # torch.distributed.checkpoint's CheckpointException is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, RankFailedError, *passing)):
            raise
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        own = failure_of(error, rank)
        is_store_here = rank == 0 and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        first = _first(patience=_PATIENCE) if _is_of_communication(error) else _first(own)
        if is_store_here:
            time.sleep(_FAREWELL)
        if first is None or first.rank == rank or first.error == own.error:
            raise
        first_failure = f"Rank {first.rank} failed first, with {first.error.rstrip('.')}. This rank could not go on without it"
        raise RankFailedError(f"{first_failure} ({own.error.splitlines()[0]}).") from error


def raise_failure_of_loader(own: Exception | None, ranks: Ranks, source: int) -> NoReturn:
    """Raise what the loader of rank ``source`` failed with. Called on all ranks.

    The rank sends it by itself: a note is gone where that was rank 0, and has ended already.

    Raises:
        RankFailedError: the loader of another rank failed, and not that of this one.
    """
    first = ranks.share(None if own is None else failure_of(own, ranks.rank), source)
    if own is not None:
        raise own
    raise RankFailedError(f"The loader of rank {first.rank} failed, with {first.error.rstrip('.')}. No rank goes on without it.")


def have_all_left(has_failed: bool, patience: float) -> bool:
    """Leave what all ranks do together, and may wait for each other in. Called on all of them.

    Args:
        has_failed: this rank leaves before its end.
        patience: seconds that it then waits for the others to leave.

    Returns:
        False where this rank has failed, and another is still there: it waits for this one. True where that is not known.
    """
    global _left
    _left += 1
    with suppress(Exception):
        from torch.distributed.distributed_c10d import _get_default_store

        store, end = _get_default_store(), time.monotonic() + patience
        number = store.add(f"lightning_accum/left/{_left}", 1)
        while has_failed and number < dist.get_world_size():
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
            number = store.add(f"lightning_accum/left/{_left}", 0)
        if number == dist.get_world_size():  # so nobody looks at the one before
            store.delete_key(f"lightning_accum/left/{_left - 1}")
    return True


def _is_of_communication(error: BaseException) -> bool:
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(name in str(error) for name in _MESSAGES)):
        return True
    return error.__cause__ is not None and _is_of_communication(error.__cause__)


def _first(own: Failure | None = None, patience: float = 0.0) -> Failure | None:
    """What was noted first, ``own`` if nothing was. None if the store is gone or slow: an error must not wait for it."""
    key, end, found = f"lightning_accum/first_failure/{_run}", time.monotonic() + patience, []

    def ask() -> None:
        with suppress(Exception):
            # private, but the public ProcessGroup.get_group_store of torch 2.13 is not in 2.6; the same in both
            from torch.distributed.distributed_c10d import _get_default_store

            store = _get_default_store()
            while own is None and not store.check([key]):  # get alone would wait for as long as a collective does
                if time.monotonic() >= end:
                    return
                time.sleep(0.05)
            # compare_set is atomic: it sets what was not there, and returns what is there now
            note = store.get(key) if own is None else store.compare_set(key, "", json.dumps([own.rank, own.error]))
            found.append(Failure(*json.loads(note)))

    with suppress(RuntimeError):  # the interpreter ends, and starts no thread
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_LONGEST_ANSWER)
    return found[0] if found else None
