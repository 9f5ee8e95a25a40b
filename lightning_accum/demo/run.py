"""The demo: train every mix, then say how far each is from the full batch."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill

from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]  # Lightning needs it, too

from lightning_accum.demo.corpus import CorpusError, sample_corpus
from lightning_accum.demo.figure import differences_from, draw
from lightning_accum.demo.mix import FULL_BATCH, GLOBAL_BATCH, LONGEST, MIXES, SAMPLES, SHARDS_ON_CPU_SINCE, Mix, can_run
from lightning_accum.demo.model import new_model
from lightning_accum.demo.train import Trained, train_in_processes
from lightning_accum.verification.processes import RanksFailedError
from lightning_accum.verification.report import aligned

EXACT = 1e-12
"""Runs in float64 that take the same steps differ by less than this: in the order of additions alone."""

CAPTION = (
    "Run: ranks x loader batches in a window x samples in a loader batch; 32/4: batches of 32, split into fours. Loss: mean over"
    " every byte of the corpus after training, nats. Losses: the largest difference of a step's loss from the full batch's,"
    " relative to that. Parameters: the norm of their difference from the full batch's after training, relative to that of the"
    " way that those went. Steps: of the optimizer, of the scheduler."
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

    @property
    def in_words(self) -> tuple[str, ...]:
        """The columns of the table."""
        numbers = f"{self.final_loss:.6f}", f"{self.loss_deviation:.1e}", f"{self.deviation:.1e}"
        steps = f"{self.optimizer_steps}, {self.scheduler_steps}"
        return f"{self.engine} {self.run}", *numbers, steps, f"{self.tokens_per_second:,.0f}"


def run_demo(epochs: int, out: Path, mixes: Sequence[Mix] = MIXES) -> int:
    """Train every mix, print the table, write ``loss_curves.png`` and ``runs.csv``.

    Args:
        epochs: passes over the corpus.
        out: an existing folder for the files.
        mixes: the runs, the full batch first.

    Returns:
        0 if every run of this package ended where the full batch did; 1 if one did not, or if a run failed.
    """
    if left_out := [mix.shape for mix in mixes if not can_run(mix)]:
        _say(f"Left out, since torch shards on a CPU from {SHARDS_ON_CPU_SINCE} on: {', '.join(left_out)}.")
    try:
        corpus = sample_corpus(SAMPLES, LONGEST)
        results = _train_all([mix for mix in mixes if can_run(mix)], corpus, epochs)
    except (CorpusError, RanksFailedError) as error:
        _say(str(error))
        return 1
    rows = _rows(results, corpus, epochs)
    draw({mix: trained.losses for mix, trained in results.items()}, epochs, out / "loss_curves.png")
    write_csv(rows, out / "runs.csv")
    print(table(rows))
    _say(f"Loss curves: {out / 'loss_curves.png'}. The table: {out / 'runs.csv'}.")
    inexact = [row for row in rows if row.engine == "lightning_accum" and not row.is_exact]
    for row in inexact:
        name, *_ = row.in_words
        _say(f"{name} is {row.loss_deviation:.1e} (losses) and {row.deviation:.1e} (parameters) off, expected below {EXACT}.")
    return 1 if inexact else 0


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _train_all(mixes: Sequence[Mix], corpus: Sequence[bytes], epochs: int) -> dict[Mix, Trained]:
    results: dict[Mix, Trained] = {}
    with tqdm(total=sum(mix.steps(len(corpus), epochs) for mix in mixes), unit="step") as bar:
        for mix in mixes:
            bar.set_description(str(mix))
            try:
                results[mix] = train_in_processes(mix, corpus, epochs)
            except RanksFailedError as error:
                raise RanksFailedError(f"The run {mix} failed. {error}") from error
            bar.update(mix.steps(len(corpus), epochs))
    return results


def _rows(results: dict[Mix, Trained], corpus: Sequence[bytes], epochs: int) -> list[Row]:
    initial = {name: parameter.detach() for name, parameter in new_model().named_parameters()}
    targets = epochs * sum(len(text) + 1 for text in corpus)  # the byte that ends a text is predicted too
    return [
        Row(
            engine=mix.engine,
            run=mix.shape,
            final_loss=trained.final_loss,
            loss_deviation=max(differences_from(results[FULL_BATCH].losses, trained.losses)),
            deviation=deviation(trained.parameters, results[FULL_BATCH].parameters, initial),
            optimizer_steps=trained.optimizer_steps,
            scheduler_steps=trained.scheduler_steps,
            tokens_per_second=targets / trained.seconds,
        )
        for mix, trained in results.items()
    ]


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


def table(rows: Sequence[Row]) -> str:
    """The rows for a terminal."""
    lines = aligned([("run", "loss", "losses", "parameters", "steps", "tokens/s"), *(row.in_words for row in rows)])
    return "\n".join([f"One global batch of {GLOBAL_BATCH}, one order of the samples", "", *lines, "", fill(CAPTION, 80)])


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """The rows for a program, at full precision."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(Row.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
