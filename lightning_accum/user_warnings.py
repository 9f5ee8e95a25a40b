"""Warnings with their own category, reported at the line of the user's code that caused them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

_PASSED_OVER = {
    "lightning", "lightning_accum", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torch", "torchmetrics",
    *sys.stdlib_module_names,
}  # fmt: skip


class AccumulationWarning(UserWarning):
    """The category of all warnings of this package.

    Example:
        >>> import warnings
        >>> warnings.filterwarnings("ignore", category=AccumulationWarning)
    """


def warn(message: str) -> None:
    """Warn, on any rank."""
    _, depth = _users_frame()
    warnings.warn(message, AccumulationWarning, stacklevel=depth)


def rank_zero_warn(message: str) -> None:
    """Warn on rank zero, according to Lightning if it is imported, else to torch.distributed."""
    rank = getattr(rank_zero_only, "rank", None)
    if rank is None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if rank == 0:
        warn(message)


def users_line() -> str:
    """The line of the user's code that is running, as ``"file.py:12"``; empty if there is none."""
    frame, _ = _users_frame()
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _users_frame() -> tuple[FrameType | None, int]:
    """The innermost frame of the user's code, and its ``stacklevel`` for the caller."""
    frame: FrameType | None = sys._getframe(2)
    depth = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        frame, depth = frame.f_back, depth + 1
    return frame, 2 if frame is None else depth


def listed(names: Sequence[str], what: str = "") -> str:
    """The first three names, and the number of further ones."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more{what}" if len(names) > 3 else "")
