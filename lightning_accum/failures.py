"""The first failure of a distributed training, raised on every rank.

If a rank raises, the others fail with an error that follows from it: "Connection closed by peer", or a timeout. So a failing rank
writes a note into the key-value store of the process group, and a rank whose communication fails reads it.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_accum.errors import AccumulationError

_LONGEST_ANSWER = 5.0  # seconds to wait for the store, if its host neither answers nor closes the connection
_PATIENCE = 2.0  # seconds in which another rank's note may follow the end of its connection
_FAREWELL = 0.5  # seconds that rank 0 waits for the others to read, since its process usually holds the store
_MESSAGES = ("Connection closed", "Connection reset", "Timed out waiting", "timeout caused pair closure", "gloo", "NCCL")
"""Parts of the messages of communication errors that are RuntimeErrors. Not "timed out" alone, which a DataLoader raises, too."""
_run = _left = 0
"""Counts runs and joint actions so far, the same on all ranks. Each run has its own note."""


class RankFailedError(AccumulationError, RuntimeError):
    """Another rank failed first. The error of this rank is its ``__cause__``."""


@contextmanager
def reraise_first_rank_error(passing: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Note an error of the body, or raise a RankFailedError if another rank failed first. All ranks must enter equally often.

    An error passes unchanged if it is the first, the first was the same, none was noted, or it does not count as a failure
    (``passing``).
    """
    global _run
    _run += 1
    try:
        yield
    except BaseException as error:  # torch.distributed.checkpoint's CheckpointException is not an Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, RankFailedError, *passing)):
            raise
        is_distributed = dist.is_available() and dist.is_initialized()
        own = dist.get_rank() if is_distributed else 0, "".join(traceback.format_exception_only(error)).strip()[:2000]
        rank, message = (_first(patience=_PATIENCE) if _is_of_communication(error) else _first(own)) or own
        if own[0] == 0 and is_distributed and dist.get_world_size() > 1:
            time.sleep(_FAREWELL)
        if rank == own[0] or message == own[1]:
            raise
        found = f"Rank {rank} failed first, with {message.rstrip('.')}. This rank cannot continue without it"
        raise RankFailedError(f"{found} ({own[1].splitlines()[0]}).") from error


def have_all_left(has_failed: bool, patience: float) -> bool:
    """Leave a joint action of all ranks. False if this rank has failed, and another still waits for it after ``patience``
    seconds."""
    global _left
    _left += 1
    with suppress(Exception):
        store, end = _store(), time.monotonic() + patience
        number = store.add(f"lightning_accum/left/{_left}", 1)
        while has_failed and number < dist.get_world_size():
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
            number = store.add(f"lightning_accum/left/{_left}", 0)
        if number == dist.get_world_size():  # so no rank reads the key before
            store.delete_key(f"lightning_accum/left/{_left - 1}")
    return True


def _store() -> Any:
    # private, but the public ProcessGroup.get_group_store of torch 2.13 is not in 2.6; the same in both
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _is_of_communication(error: BaseException) -> bool:
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(name in str(error) for name in _MESSAGES)):
        return True
    return error.__cause__ is not None and _is_of_communication(error.__cause__)


def _first(own: tuple[int, str] | None = None, patience: float = 0.0) -> tuple[int, str] | None:
    """The rank and the error noted first, ``own`` if none was. None if the store is gone or slow: an error must not wait for it."""
    key, found = f"lightning_accum/first_failure/{_run}", list[tuple[int, str]]()

    def ask() -> None:
        """Ask the store, in a separate thread."""
        with suppress(Exception):
            store = _store()
            if own is None:
                store.wait([key], timedelta(seconds=patience))  # get alone would wait as long as a collective
            # compare_set is atomic: it sets a missing key, and returns the present value
            rank, error = json.loads(store.compare_set(key, "", json.dumps(own)))
            found.append((rank, error))

    with suppress(RuntimeError):  # the interpreter is exiting, and cannot start a thread
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_LONGEST_ANSWER)
    return found[0] if found else None
