"""What the runs ended with, as a table for people and for programs."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from lightning_accum.demo.mix import GLOBAL_BATCH

EXACT = 1e-12
"""Runs in float64 that take the same steps differ by less than this: in the order of additions alone."""

CAPTION = (
    "Run: ranks x loader batches in a window x samples in a loader batch; 32/4: batches of 32, split into fours. Final loss: mean"
    " over every byte of the corpus after training, nats. Losses off by: the largest difference of a step's loss from the full"
    " batch's, relative to that. Parameters off by: the norm of their difference from the full batch's after training, relative"
    " to that of the way that those went. Steps: of the optimizer, of the scheduler."
)


@dataclass(frozen=True)
class Row:
    """One run in the table.

    Attributes:
        engine: who accumulated.
        run: ranks x window x batch, and what keeps the ranks at one model.
        final_loss: mean loss of a byte over the whole corpus after training.
        loss_deviation: the largest difference of a step's loss from the full batch's, relative to that.
        deviation: that of the parameters, see :func:`deviation`.
        optimizer_steps: as the optimizer counted them.
        scheduler_steps: as the scheduler counted them.
        tokens_per_second: bytes predicted in a second of training, all ranks together.
    """

    engine: str
    run: str
    final_loss: float
    loss_deviation: float
    deviation: float
    optimizer_steps: int
    scheduler_steps: int
    tokens_per_second: float

    @property
    def is_exact(self) -> bool:
        """Whether the run is the full batch's to rounding; NaN is not."""
        return self.loss_deviation < EXACT and self.deviation < EXACT


def deviation(parameters: Mapping[str, Tensor], full_batch: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> float:
    """The norm of the parameters' difference from the full batch's, relative to that of the way that those went.

    Example:
        >>> import torch
        >>> start, full = torch.zeros(2), torch.tensor([3.0, -4.0])
        >>> deviation({"w": torch.tensor([3.0, -3.0])}, {"w": full}, {"w": start})
        0.2
    """

    def distance(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
        return math.hypot(*(float((some[name] - others[name]).norm()) for name in others))

    return distance(parameters, full_batch) / distance(full_batch, initial)


def table(rows: Sequence[Row]) -> Table:
    """The rows for a terminal."""
    title = f"One global batch of {GLOBAL_BATCH}, one order of the samples"
    result = Table(title=title, caption=CAPTION, caption_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=0)
    result.add_column("run", no_wrap=True)
    for name in ("final\nloss", "losses\noff by", "parameters\noff by", "steps", "tokens/s"):
        result.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        result.add_row(
            f"{row.engine} {row.run}",
            f"{row.final_loss:.6f}",
            f"{row.loss_deviation:.1e}",
            f"{row.deviation:.1e}",
            f"{row.optimizer_steps}, {row.scheduler_steps}",
            f"{row.tokens_per_second:,.0f}",
        )
    return result


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """The rows for a program, at full precision."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(Row.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
