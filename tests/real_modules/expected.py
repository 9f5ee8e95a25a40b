"""Outcomes that many rows share."""

from __future__ import annotations

from real_modules.table import Outcome, Refused, Warned

ONE = Refused(mend={"window": 1})
OFFLOAD = Refused(mend={"micro_batch": "offload"})


def by(*names: str) -> Refused:
    """Exact where these submodules run in micro-batches."""
    return Refused(mend={"row_wise": list(names)})


def warned(windows: float, split: float | None = None) -> dict[str, Outcome]:
    """What is warned of today, and how far off it is."""
    today: dict[str, Outcome] = {"windows_today": Warned(deviation=windows)}
    return today if split is None else {**today, "split_today": Warned(deviation=split)}
