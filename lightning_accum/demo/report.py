"""What the runs ended with, as a table for people and for programs."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from lightning_accum.demo.mix import GLOBAL_BATCH

EXACT = 1e-10
"""Runs in float64 that take the same steps end closer together than this; they differ in the order of additions alone."""

CAPTION = (
    "Run: processes x loader batches in a window x samples in a loader batch. Final loss: mean over every byte of the corpus"
    " after training, nats. Deviation: the largest difference of a parameter from the full batch's, relative to the largest"
    " way that a parameter of the full batch went in training."
)


@dataclass(frozen=True)
class Row:
    """One run in the table.

    Attributes:
        engine: who accumulated.
        run: ranks x window x batch.
        final_loss: mean loss of a byte over the whole corpus after training.
        deviation: see :func:`deviation`.
        optimizer_steps: as the optimizer counted them.
        scheduler_steps: as the scheduler counted them.
        tokens_per_second: bytes predicted in a second of training, all ranks together.
    """

    engine: str
    run: str
    final_loss: float
    deviation: float
    optimizer_steps: int
    scheduler_steps: int
    tokens_per_second: float


def deviation(parameters: Mapping[str, Tensor], full_batch: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> float:
    """The largest difference of a parameter from the full batch's, relative to the largest way that one of those went.

    Example:
        >>> start, full = torch.zeros(2), torch.tensor([1.0, -4.0])
        >>> deviation({"w": torch.tensor([1.0, -3.0])}, {"w": full}, {"w": start})
        0.25
    """
    way = torch.stack([(full_batch[name] - initial[name]).abs().max() for name in initial]).max()
    difference = torch.stack([(parameters[name] - full_batch[name]).abs().max() for name in initial]).max()
    return float(difference / way)


def table(rows: Sequence[Row]) -> Table:
    """The rows for a terminal."""
    result = Table(
        title=f"One global batch of {GLOBAL_BATCH}, one data order",
        caption=CAPTION,
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    result.add_column("run", no_wrap=True)
    for name in ("final\nloss", "deviation", "optimizer\nsteps", "scheduler\nsteps", "tokens/s"):
        result.add_column(name, justify="right", no_wrap=True)
    for position, row in enumerate(rows):
        is_last_of_engine = position + 1 == len(rows) or rows[position + 1].engine != row.engine
        result.add_row(
            f"{row.engine} {row.run}",
            f"{row.final_loss:.6f}",
            f"{row.deviation:.1e}" if row.deviation else "0",
            str(row.optimizer_steps),
            str(row.scheduler_steps),
            f"{row.tokens_per_second:,.0f}",
            end_section=is_last_of_engine,
        )
    return result


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """The rows for a program, at full precision."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(Row.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
