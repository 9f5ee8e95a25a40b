"""What a checkpoint holds of a training, and that this version of the package can read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_accum.errors import ArgumentError

FORMAT = 6
"""Of the state of ``GradientAccumulation``. One more whenever a key is added, left out or means something else."""


def check_format(state: Mapping[str, Any]) -> None:
    """Refuse a state that another version of the package has written.

    Raises:
        ValueError: it has another format.
    """
    if state.get("format") == FORMAT:
        return
    raise ArgumentError(
        f"The checkpoint holds a state of GradientAccumulation in format {state.get('format', 0)}, and this version of"
        f" lightning_accum reads format {FORMAT}. {_MEND}"
    )


def check_keys(state: Mapping[str, Any], needed: Iterable[str], optional: Iterable[str], what: str) -> None:
    """Refuse a state that lacks a key, or has one that nobody would read.

    Raises:
        ValueError: it has other keys.
    """
    missing = sorted(set(needed) - state.keys())
    unknown = sorted(state.keys() - set(needed) - set(optional))
    if missing or unknown:
        lacks = f"lacks {', '.join(missing)}" if missing else ""
        has = f"has {', '.join(unknown)}, which this version does not know" if unknown else ""
        raise ArgumentError(f"The state of {what} in the checkpoint {' and '.join(filter(None, (lacks, has)))}. {_MEND}")


_MEND = (
    "Resume with the version of lightning_accum that wrote it; or delete checkpoint['callbacks']['GradientAccumulation'] from the"
    " file: parameters, optimizers and schedulers then go on, and the gradients of an unfinished window are lost."
)
