"""The demo: train every mix in processes of its own, then say how far each is from the full batch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from lightning_accum.demo.corpus import CorpusError, sample_corpus
from lightning_accum.demo.figure import differences_from, draw
from lightning_accum.demo.mix import FULL_BATCH, LONGEST, MIXES, SAMPLES, SHARDS_ON_CPU_SINCE, Mix, can_run
from lightning_accum.demo.model import new_model
from lightning_accum.demo.report import EXACT, Row, deviation, table, write_csv
from lightning_accum.demo.train import Trained, command

LAUNCHER_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher around the demo may have set: the runs are on this machine."""

SECONDS_TO_START, SECONDS_AN_EPOCH = 180, 60
"""When a run is given up: some ten times what it takes on two slow cores."""


class RunError(RuntimeError):
    """A training run failed, or did not end."""


def run_demo(epochs: int, out: Path, mixes: Sequence[Mix] = MIXES) -> int:
    """Train every mix, print the table, write ``loss_curves.png`` and ``runs.csv``.

    Args:
        epochs: passes over the corpus.
        out: an existing folder for the files.
        mixes: the runs, the full batch first.

    Returns:
        0 if every run of this package ended where the full batch did; 1 if one did not, or if a run failed.
    """
    messages = Console(stderr=True)
    if left_out := [mix.shape for mix in mixes if not can_run(mix)]:
        needed = ".".join(map(str, SHARDS_ON_CPU_SINCE))
        messages.print(f"Left out, since torch shards on a CPU from {needed} on: {', '.join(left_out)}.", highlight=False)
    mixes = [mix for mix in mixes if can_run(mix)]
    try:
        with messages.status("Reading the docstrings of the standard library"):
            corpus = sample_corpus(SAMPLES, LONGEST)
        results = _train_all(mixes, corpus, epochs, messages)
    except (CorpusError, RunError) as error:
        messages.print(str(error), style="bold red", markup=False, highlight=False)
        return 1
    rows = _rows(results, corpus, epochs)
    draw({mix: trained.losses for mix, trained in results.items()}, epochs, out / "loss_curves.png")
    write_csv(rows, out / "runs.csv")
    Console().print(table(rows))
    messages.print(f"Loss curves: {out / 'loss_curves.png'}. The table: {out / 'runs.csv'}.", highlight=False)
    inexact = [row for row in rows if row.engine == "lightning_accum" and not row.is_exact]
    for row in inexact:
        messages.print(
            f"{row.engine} {row.run} is {row.loss_deviation:.1e} (losses) and {row.deviation:.1e} (parameters) from the full batch,"
            f" expected below {EXACT}.",
            style="bold red",
        )
    return 1 if inexact else 0


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


def _train_all(mixes: Sequence[Mix], corpus: Sequence[bytes], epochs: int, messages: Console) -> dict[Mix, Trained]:
    steps = {mix: mix.steps(len(corpus), epochs) for mix in mixes}
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        console=messages,
    )
    results: dict[Mix, Trained] = {}
    with tempfile.TemporaryDirectory(prefix="lightning_accum_demo_") as name, progress:
        bar = progress.add_task("", total=sum(steps.values()), loss="")
        folder, errors = Path(name), Path(name) / "errors.txt"
        torch.save(list(corpus), folder / "corpus.pt")
        arguments = command(mixes, folder / "corpus.pt", epochs, folder)
        with errors.open("w") as stderr, _process(arguments, stderr) as process:
            for mix in mixes:
                progress.update(bar, description=f"{mix.engine} {mix.shape}", loss="starting")
                results[mix] = trained = _follow(process, mix, epochs, errors, progress, bar)
                messages.print(
                    f"{mix.engine} {mix.shape}: {trained.optimizer_steps} steps in {trained.seconds:.1f} s,"
                    f" last loss {trained.losses[-1]:.4f}",
                    highlight=False,
                )
    return results


def _follow(process: subprocess.Popen[str], mix: Mix, epochs: int, errors: Path, progress: Progress, bar: TaskID) -> Trained:
    """Show the steps of a run until it has ended.

    Raises:
        RunError: it failed, or did not end.
    """
    limit = SECONDS_TO_START + SECONDS_AN_EPOCH * epochs
    is_given_up = threading.Event()

    def give_up() -> None:
        is_given_up.set()
        _end(process)

    watchdog = threading.Timer(limit, give_up)
    watchdog.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            told = json.loads(line)
            if "result" in told:
                return Trained(**torch.load(told["result"], weights_only=True))
            progress.update(bar, advance=1, loss=f"loss {told['loss']:.3f}")
        status = process.wait()
    finally:
        watchdog.cancel()
    tail = "\n".join(errors.read_text(errors="replace").splitlines()[-20:])
    reason = f"did not end in {limit} s" if is_given_up.is_set() else f"failed with status {status}"
    raise RunError(f"The run {mix.engine} {mix.shape} {reason}.\n{tail}")


@contextmanager
def _process(command: Sequence[str], stderr: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, which ends with the block: the process and the ranks that it started."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment["OMP_NUM_THREADS"] = "1"  # a rank: matrices this small are no faster on more
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True)
    try:
        yield process
    finally:
        _end(process)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _end(process: subprocess.Popen[str]) -> None:
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError, PermissionError):  # all of the group have ended; macOS says it the second way
            os.killpg(process.pid, signal.SIGKILL)
