"""The demo: train every mix, then say how far each is from the full batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from lightning_accum.demo.corpus import CorpusError, sample_corpus
from lightning_accum.demo.figure import differences_from, draw
from lightning_accum.demo.mix import FULL_BATCH, LONGEST, MIXES, SAMPLES, SHARDS_ON_CPU_SINCE, Mix, can_run
from lightning_accum.demo.model import new_model
from lightning_accum.demo.report import EXACT, Row, deviation, table, write_csv
from lightning_accum.demo.train import RunError, Trained, train_in_processes


def run_demo(epochs: int, out: Path, mixes: Sequence[Mix] = MIXES) -> int:
    """Train every mix, print the table, write ``loss_curves.png`` and ``runs.csv``.

    Args:
        epochs: passes over the corpus.
        out: an existing folder for the files.
        mixes: the runs, the full batch first.

    Returns:
        0 if every run of this package ended where the full batch did; 1 if one did not, or if a run failed.
    """
    messages = Console(stderr=True, highlight=False)
    if left_out := [mix.shape for mix in mixes if not can_run(mix)]:
        messages.print(f"Left out, since torch shards on a CPU from {SHARDS_ON_CPU_SINCE} on: {', '.join(left_out)}.")
    mixes = [mix for mix in mixes if can_run(mix)]
    try:
        corpus = sample_corpus(SAMPLES, LONGEST)
        results = _train_all(mixes, corpus, epochs, messages)
    except (CorpusError, RunError) as error:
        messages.print(str(error), style="bold red", markup=False)
        return 1
    rows = _rows(results, corpus, epochs)
    draw({mix: trained.losses for mix, trained in results.items()}, epochs, out / "loss_curves.png")
    write_csv(rows, out / "runs.csv")
    Console().print(table(rows))
    messages.print(f"Loss curves: {out / 'loss_curves.png'}. The table: {out / 'runs.csv'}.")
    inexact = [row for row in rows if row.engine == "lightning_accum" and not row.is_exact]
    for row in inexact:
        messages.print(
            f"{row.engine} {row.run} is {row.loss_deviation:.1e} (losses) and {row.deviation:.1e} (parameters) from the full batch,"
            f" expected below {EXACT}.",
            style="bold red",
        )
    return 1 if inexact else 0


def _train_all(mixes: Sequence[Mix], corpus: Sequence[bytes], epochs: int, messages: Console) -> dict[Mix, Trained]:
    results: dict[Mix, Trained] = {}
    with Progress(console=messages) as progress:
        bar = progress.add_task("", total=sum(mix.steps(len(corpus), epochs) for mix in mixes))
        for mix in mixes:
            progress.update(bar, description=str(mix))
            trained = train_in_processes(mix, corpus, epochs, lambda loss: progress.advance(bar))
            progress.print(f"{mix}: {trained.optimizer_steps} steps in {trained.seconds:.1f} s, last loss {trained.losses[-1]:.4f}")
            results[mix] = trained
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
