"""The demo: train every mix, and say and draw how far each is from the full batch."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch.torch_version import TorchVersion

from lightning_accum.demo.model import new_model, sample_corpus
from lightning_accum.demo.train import FULL_BATCH, GLOBAL_BATCH, MIXES, Mix, Trained, train
from lightning_accum.errors import UsageError
from lightning_accum.testing import distance
from lightning_accum.verification.processes import RanksFailedError

SAMPLES, LONGEST = 101, 256  # bytes
"""Three windows and a tail of 5 samples in an epoch, which two ranks share as 51 and 50, and four as 26 and three times 25."""
EXACT = 1e-12
"""Runs in float64 that take the same steps differ by less than this: in the order of additions alone."""
COLUMNS = "{:<32}{:>10}{:>10}{:>12}{:>8}"
CAPTION = (
    "Run: ranks x loader batches in a window x samples in a loader batch; 32/4: batches of 32, split into fours. Loss: of the last"
    " step's batch, nats. Losses: the largest difference of a step's loss from the full batch's, relative to that. Parameters: the"
    " norm of their difference from the full batch's after training, relative to that of the way that those went. Steps: of the"
    " optimizer, of the scheduler."
)


class Row(NamedTuple):
    """One run in the table, see :data:`CAPTION`."""

    engine: str
    run: str
    final_loss: float
    loss_deviation: float
    deviation: float
    optimizer_steps: int
    scheduler_steps: int

    def __str__(self) -> str:
        numbers = f"{self.final_loss:.6f}", f"{self.loss_deviation:.1e}", f"{self.deviation:.1e}"
        return COLUMNS.format(f"{self.engine} {self.run}", *numbers, f"{self.optimizer_steps}, {self.scheduler_steps}")


def run_demo(epochs: int, out: Path) -> int:
    """Train every mix, the full batch first; print, draw and write how far each is from that. Returns the exit status."""
    mixes: Sequence[Mix] = MIXES
    if TorchVersion(torch.__version__) < "2.9":
        print("Runs with FSDP2 are left out: torch shards on a CPU from 2.9 on.", file=sys.stderr)
        mixes = [mix for mix in MIXES if not mix.is_sharded]
    print(COLUMNS.format("run", "loss", "losses", "parameters", "steps"), flush=True)
    results: dict[Mix, Trained] = {}
    rows: list[Row] = []
    try:
        corpus = sample_corpus(SAMPLES, LONGEST)
        for mix in mixes:
            results[mix] = train(mix, corpus, epochs)
            rows.append(_row(mix, results[mix], results[FULL_BATCH]))
            print(rows[-1], flush=True)
    except (UsageError, RanksFailedError) as error:
        print(f"{error} ({len(rows)} of {len(mixes)} runs are done.)", file=sys.stderr)
        return 1
    mine, theirs = ([row for row in rows if row.engine == engine] for engine in ("lightning_accum", "Lightning"))
    largest, of_theirs = (max(row.loss_deviation for row in of) for of in (mine, theirs))
    verdict = f"this package: {largest:.0e} from the full batch in {len(mine)} mixes; Lightning's own: up to {of_theirs:.0e}"
    _draw({mix: trained.losses for mix, trained in results.items()}, verdict, out / "loss_curves.png")
    with (out / "runs.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([Row._fields, *rows])
    print(f"The losses: {out / 'loss_curves.png'}. The table: {out / 'runs.csv'}.", file=sys.stderr)
    print(f"\n{fill(CAPTION, 80)}\n\n{verdict}")
    return 0 if all(row.loss_deviation < EXACT and row.deviation < EXACT for row in mine) else 1


def _row(mix: Mix, trained: Trained, full: Trained) -> Row:
    moved = distance(full.parameters, new_model().state_dict())
    deviation, losses = distance(trained.parameters, full.parameters) / moved, _differences(trained.losses, full.losses)
    steps = trained.optimizer_steps, trained.scheduler_steps
    return Row(mix.engine, mix.shape, trained.losses[-1], max(losses), deviation, *steps)


def _differences(losses: Sequence[float], full: Sequence[float]) -> list[float]:
    """Of each step's loss from the full batch's, relative to that."""
    return [abs(loss - other) / abs(other) for loss, other in zip(losses, full, strict=True)]


# --- the figure -------------------------------------------------------------------------------------------------------

COLOURS = {"Lightning": ("#D55E00", "#E69F00"), "lightning_accum": ("#0072B2", "#009E73", "#CC79A7")}
"""Okabe and Ito's, which the colour-blind can tell from each other: warm for Lightning, cool for this package."""
MARKERS = "osD^v<P*"


def _draw(curves: Mapping[Mix, Sequence[float]], verdict: str, path: Path) -> None:
    """Two panels: the loss of every optimizer step of all runs, and its difference from the full batch."""
    full, steps = curves[FULL_BATCH], range(1, len(curves[FULL_BATCH]) + 1)
    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(f"The same {GLOBAL_BATCH} samples a step, accumulated on 1, 2 and 4 ranks:\n{verdict}", fontweight="bold")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    losses.plot(steps, full, color="0.8", linewidth=9, label=f"{FULL_BATCH.shape}, one batch")
    for engine, colours in COLOURS.items():
        runs = [mix for mix in curves if mix.engine == engine]
        for place, mix in enumerate(runs):
            # those of this package lie on each other: no line, and side by side
            line, aside = ("-", 0.0) if engine == "Lightning" else ("none", 0.1 * (place - (len(runs) - 1) / 2))
            style: dict[str, Any] = {"marker": MARKERS[place], "markerfacecolor": "none", "linestyle": line}
            style["color"] = colours[("", "DDP", "FSDP2").index(mix.parallelism)]
            losses.plot(steps, curves[mix], **style)
            shifted, apart = [step + aside for step in steps], _differences(curves[mix], full)
            differences.plot(shifted, apart, **style, label=f"{engine} {mix.shape}")
    differences.set_yscale("symlog", linthresh=1e-17, linscale=0.3)
    differences.set(ylim=(-2e-17, 10), yticks=[0, *(10.0**exponent for exponent in range(-15, 1, 3))], xlabel="optimizer step")
    titles = "Loss of the step's batch, nats", "|loss - loss of one batch| / loss of one batch"
    for axes, title in zip((losses, differences), titles, strict=True):
        axes.set_title(title, loc="left")
        axes.grid(axis="y", color="0.9")
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    losses.get_legend().set_title("ranks x batches in a window\nx samples in a batch;\n32/4: of 32, split into fours")
    figure.savefig(path, dpi=130)
