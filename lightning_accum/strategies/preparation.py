"""The argument ``sync`` of the strategies."""

from __future__ import annotations

from typing import TypeVar

from lightning_accum.arguments import MisconfiguredError

_Policy = TypeVar("_Policy", bound=str)


def checked(sync: _Policy, *others: str) -> _Policy:
    """The argument ``sync`` of a strategy.

    Raises:
        MisconfigurationException: it is none of them.
    """
    known = ("window", "micro_batch", *others)
    if sync not in known:
        raise MisconfiguredError(f"sync={sync!r}: expected {', '.join(map(_quoted, known[:-1]))} or {_quoted(known[-1])}")
    return sync


def _quoted(value: str) -> str:
    return f'"{value}"'
