"""This package beside the others: how far from the full batch, and how many steps of the scheduler.

One tiny GPT on 101 docstrings of Python's standard library (three windows of 32 and a tail of 5 in every epoch), the same data in
the same order, through the sides of ``compared_sides.py``, on 1 process and on 2 (DistributedDataParallel, gloo).

- deviation: of the parameters after three epochs, in float64: the norm of the difference from the full batch, which a hand-written
  loop over batches of 32 trains in one process, over the norm of what that has changed.
- steps: of the optimizer and of the scheduler in three epochs; the full batch takes 12.

    python tests/benchmarks/compare.py --out notebooks/figures/comparison.png
"""

import datetime
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from compared_sides import REFERENCE, SIDES, rank, some_docstrings
from processes import free_port
from side_by_side import command_line, figure
from support import error_of_updates

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "notebooks" / "site" / "docs" / "how-it-works.md"
EPOCHS, SAMPLES = 3, 101
BEGIN, END = "<!-- comparison -->", "<!-- end of comparison -->"

Figures = dict[str, Any]  # what is known of a side: deviation, steps, scheduler steps


def work(kind: str, out: Path) -> None:  # what one process does; the first writes what was found
    os.chdir(tempfile.mkdtemp())
    for name in ("transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    texts, found = some_docstrings(SAMPLES), {}
    start, full = (REFERENCE.new_training(texts, EPOCHS, kind) for _ in range(2))
    REFERENCE.train(full)
    for side in (side for side in SIDES if side.is_there):
        training = side.new_training(texts, EPOCHS, kind)
        side.train(training)
        deviation = error_of_updates(training.model, full.model, start.model)
        found[side.name] = {"deviation": deviation, "steps": training.steps, "scheduler steps": training.schedule.last_epoch}
    if rank() == 0:
        out.write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def measured(processes: int, kind: str) -> dict[str, Figures]:  # start the processes and read what they found
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **quiet}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        launcher = []
        if processes > 1:
            launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", str(free_port())]
        command = [sys.executable, *launcher, __file__, "--optimizer", kind, "--worker", str(out)]
        subprocess.run(command, check=True, env=environment, timeout=3600, stdout=subprocess.DEVNULL)
        found: dict[str, Figures] = json.loads(out.read_text())
    return found


def table(found: Mapping[int, Mapping[str, Figures]]) -> str:  # Markdown; the two numbers of a cell are those of 1 process and of 2
    titles = ["", f"deviation after {EPOCHS} epochs", "scheduler steps"]
    lines = ["| " + " | ".join(titles) + " |", "| --- |" + " --- |" * (len(titles) - 1)]
    for name in next(iter(found.values())):
        of_all = [figures[name] for figures in found.values()]
        columns = [_short(figures["deviation"]) for figures in of_all], [str(figures["scheduler steps"]) for figures in of_all]
        lines.append("| " + " | ".join([name, *map(", ".join, columns)]) + " |")
    return "\n".join([*lines, "", conditions()])


def _short(number: float) -> str:
    return f"{number:.0e}".replace("e-0", "e-") if number else "0"


def conditions() -> str:  # date and versions
    names = [name for name in ("torch", "lightning", "accelerate", "transformers") if importlib.util.find_spec(name) is not None]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    machine = f"Python {platform.python_version()}, {os.cpu_count()} CPU cores"
    return f"Measured on {datetime.date.today()} with {versions}, {machine}."


def draw(found: Mapping[int, Mapping[str, Figures]], path: Path | str) -> None:
    """Write the figure: one bar a side, as long as its largest deviation after the last epoch, of all numbers of processes."""
    floor, names = 1e-16, list(next(iter(found.values())))
    ours = {side.name for side in SIDES if side.is_ours}
    largest = [max(floor, *(figures[name]["deviation"] for figures in found.values())) for name in names]
    below = f"distance of the parameters from one large batch after {EPOCHS} epochs, relative; the largest"
    exact = [name for name, value in zip(names, largest, strict=True) if value < 1e-12]
    said = "only this package" if exact and ours.issuperset(exact) else ", ".join(exact) or "none"
    title = f"Equal to one large batch on {' and '.join(map(str, found))} processes: {said}"
    with figure(path, title, size=(9, 3.9), xlabel=below) as axes:
        shown = [name.replace("**", "").replace("`", "") for name in names]
        colours = ["#009E73" if name in ours else "#D55E00" for name in names]
        bars = axes.barh(shown, [value - floor for value in largest], left=floor, height=0.66, color=colours)
        axes.bar_label(bars, [f" {_short(value)}" for value in largest])
        axes.set_xscale("log")
        axes.set_xlim(floor, 3e3)
        axes.invert_yaxis()


def main(processes: tuple[int, ...] = (1, 2), optimizer: str = "adamw", out: str | None = None, worker: str | None = None) -> None:
    """Measure, print, draw."""
    if worker is not None:
        work(optimizer, Path(worker))
        return
    found = {number: measured(number, optimizer) for number in processes}
    print(table(found))
    if out is not None:
        draw(found, out)


if __name__ == "__main__":
    command_line(main)
