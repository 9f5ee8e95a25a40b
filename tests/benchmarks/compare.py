"""This package beside the others: how far from the full batch, how many steps and collectives, how fast.

One tiny GPT on docstrings of Python's standard library, 101 of them for the deviation (three windows of 32 and a tail of 5 in every
epoch), the same data in the same order, through the sides of ``compared_sides.py``: the classic hand-written loop, Lightning's own
accumulation, Accelerate (``accumulate()``, and its recipe for counted tokens), the HF Trainer (with a model that takes
``num_items_in_batch``, and with one that does not) and this package, on 1 process and on 2 (DistributedDataParallel, gloo).

- deviation: of the parameters after three epochs, in float64: the norm of the difference from the full batch, which a hand-written
  loop over batches of 32 trains in one process, over the norm of what that has changed.
- steps: of the optimizer and of the scheduler in three epochs; the full batch takes 12.
- collectives: all that one process takes part in during a window, by torch's profiler.
- thousands of tokens per second on texts of 1 to 256 bytes, in micro-batches of 4 texts: float32, medians over
  rounds in which all sides take turns in the same processes.

    python tests/benchmarks/compare.py --out notebooks/figures/comparison.png
"""

import datetime
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from compared_sides import GLOBAL_BATCH, REFERENCE, SIDES, Side, Texts, Training, orders, rank, ranks, some_docstrings, window
from processes import free_port
from side_by_side import command_line, figure, interleaved
from support import error_of_updates
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "notebooks" / "site" / "docs" / "how-it-works.md"
EPOCHS, SAMPLES, TIMED_WINDOWS = 3, 101, 12
BEGIN, END = "<!-- comparison -->", "<!-- end of comparison -->"

Figures = dict[str, Any]
"""What is known of a side: deviation, steps, scheduler steps, collectives, tokens per second."""


def examined(side: Side, full: Training, texts: Texts) -> Figures:
    """All that does not depend on time: the side beside the full batch, and its collectives on ``texts`` of four windows."""
    training = side.new_training(full.texts, EPOCHS, torch.float64, full.kind)
    side.train(training)
    start = REFERENCE.new_training(full.texts, 1, torch.float64).model
    return {
        "deviation": error_of_updates(training.model, full.model, start),
        "steps": training.steps,
        "scheduler steps": training.schedule.last_epoch,
        "collectives": collectives(side, texts),
    }


def collectives(side: Side, texts: Texts) -> int:
    """How many of them the third window has: in the second DistributedDataParallel rebuilds its buckets."""
    training = side.new_training(texts, 1, torch.float64)
    watch = profile(activities=[ProfilerActivity.CPU])

    def at(index: int) -> None:
        if index == 2 * window():
            watch.__enter__()
        elif index == 3 * window():
            watch.__exit__(None, None, None)

    training.on_forward = at
    side.train(training)
    return sum(event.name.startswith("gloo:") for event in watch.events() or ())


def seconds(side: Side, texts: Texts) -> float:
    """What all windows but the first and the last take."""
    if ranks() > 1:
        dist.barrier()
    training = side.new_training(texts, 1, torch.float32)
    side.train(training)
    return training.forwards[-window()] - training.forwards[window()]


def timed(sides: list[Side], rounds: int) -> dict[str, Figures]:
    """Tokens per second: medians."""
    samples = GLOBAL_BATCH * TIMED_WINDOWS
    corpus = some_docstrings(samples)
    (order,) = orders(samples, 1)
    tokens = sum(len(corpus[i]) + 1 for i in order[GLOBAL_BATCH:-GLOBAL_BATCH])
    taken = interleaved({side.name: lambda side=side: seconds(side, corpus) for side in sides}, rounds)
    return {name: {"tokens per second": tokens / statistics.median(found)} for name, found in taken.items()}


def work(rounds: int, kind: str, out: Path) -> None:
    """What one process does; the first writes what was found."""
    os.chdir(tempfile.mkdtemp())
    for name in ("transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    full = REFERENCE.new_training(some_docstrings(SAMPLES), EPOCHS, torch.float64, kind)
    REFERENCE.train(full)
    four_windows = some_docstrings(4 * GLOBAL_BATCH)
    sides = [side for side in SIDES if side.is_there]
    found = {side.name: examined(side, full, four_windows) for side in sides}
    for name, figures in timed(sides, rounds).items() if rounds else ():
        found[name].update(figures)
    if rank() == 0:
        out.write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def measured(processes: int, rounds: int, kind: str) -> dict[str, Figures]:
    """Start the processes and read what they found."""
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "KINETO_LOG_LEVEL": "9"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **quiet}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        launcher = []
        if processes > 1:
            launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", str(free_port())]
        command = [sys.executable, *launcher, __file__, "--rounds", str(rounds), "--optimizer", kind, "--worker", str(out)]
        subprocess.run(command, check=True, env=environment, timeout=3600, stdout=subprocess.DEVNULL)
        found: dict[str, Figures] = json.loads(out.read_text())
    return found


def table(found: Mapping[int, Mapping[str, Figures]]) -> str:
    """Markdown; the two numbers of a cell are those of 1 process and of 2."""
    titles = ["", f"deviation after {EPOCHS} epochs", "scheduler steps", "collectives a window", "1000 tokens/s"]
    lines = ["| " + " | ".join(titles) + " |", "| --- |" + " --- |" * (len(titles) - 1)]
    for name in next(iter(found.values())):
        of_all = [figures[name] for figures in found.values()]
        columns = [
            [_short(figures["deviation"]) for figures in of_all],
            *([str(figures[what]) for figures in of_all] for what in ("scheduler steps", "collectives")),
            [f"{figures['tokens per second'] / 1000:.1f}" for figures in of_all if "tokens per second" in figures],
        ]
        lines.append("| " + " | ".join([name, *map(", ".join, columns)]) + " |")
    return "\n".join([*lines, "", conditions()])


def _short(number: float) -> str:
    return f"{number:.0e}".replace("e-0", "e-") if number else "0"


def conditions() -> str:
    """Date and versions."""
    names = [name for name in ("torch", "lightning", "accelerate", "transformers") if importlib.util.find_spec(name) is not None]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    machine = f"Python {platform.python_version()}, {os.cpu_count()} CPU cores"
    return f"Measured on {datetime.date.today()} with {versions}, {machine}."


def draw(found: Mapping[int, Mapping[str, Figures]], path: Path | str) -> None:
    """Write the figure: one bar a side, as long as its largest deviation after the last epoch, of all numbers of processes."""
    floor, names = 1e-16, list(next(iter(found.values())))
    ours = {side.name for side in SIDES if side.is_ours}
    deviations = [[max(floor, figures[name]["deviation"]) for figures in found.values()] for name in names]
    largest = [max(of_side) for of_side in deviations]
    colours = ["#009E73" if name in ours else "#D55E00" for name in names]
    below = f"distance of the parameters from one large batch after {EPOCHS} epochs, relative"
    exact = [name for name, value in zip(names, largest, strict=True) if value < 1e-12]
    said = "only this package" if exact and ours.issuperset(exact) else ", ".join(exact) or "none"
    title = f"Equal to one large batch on {' and '.join(map(str, found))} processes: {said}"
    with figure(path, title, size=(9, 3.9), xlabel=below) as axes:
        axes.barh(range(len(names)), [value - floor for value in largest], left=floor, height=0.66, color=colours)
        for row, (value, of_side) in enumerate(zip(largest, deviations, strict=True)):
            each = ", ".join(f"{_short(own)} on {number}" for own, number in zip(of_side, found, strict=True))
            axes.text(value * 1.6, row, each if value > 1e3 * min(of_side) else _short(value), va="center", fontsize=10)
        axes.set_xscale("log")
        axes.set_xlim(floor, 3e3)
        axes.set_xticks([1e-16, 1e-12, 1e-8, 1e-4, 1], ["1e-16", "1e-12", "1e-8", "1e-4", "1"])
        axes.set_yticks(range(len(names)), [name.replace("**", "").replace("`", "") for name in names])
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)


def main(
    rounds: int = 7,
    processes: tuple[int, ...] = (1, 2),
    optimizer: str = "adamw",
    out: str | None = None,
    worker: str | None = None,
) -> None:
    """Measure, print, draw; with ``--rounds 0`` nothing is timed, and ``--optimizer sgd`` is for the deviations."""
    if worker is not None:
        work(rounds, optimizer, Path(worker))
        return
    found = {number: measured(number, rounds, optimizer) for number in processes}
    print(table(found))
    if out is not None:
        draw(found, out)


if __name__ == "__main__":
    command_line(main)
