"""BatchNorm in split batches: the accuracy that exact statistics keep, and what they cost in time and memory.

    python tests/benchmarks/batch_norm.py accuracy --out notebooks/figures/batch_norm.png
    python tests/benchmarks/batch_norm.py cost

A ResNet on scikit-learn's digits, batches of 96. ``accuracy`` trains on whole batches, on micro-batches of 2 as they are, and on
micro-batches of 2 with ``batch_norm="exact"``, and draws the validation accuracy of each epoch.

``cost`` compares a step on the whole batch with 2, 4 and 8 micro-batches, each as they are and exact, and with gradient
checkpointing of every block. Time is that of the processor, in one thread. Memory is the peak of all tensors alive in a step, above
those that stay (parameters, gradients, optimizer, data), counted by a mode that sees every operator: what a device would hold. For
exact micro-batches what waits on the host is not counted, but shown beside it; on a CPU the package moves nothing, so the counter
stands in for a device.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import lightning.pytorch as pl
import torch
from alive import Alive, Elsewhere
from digits import Block, Digits, digits
from support import loader, trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_accum import GradientAccumulation
from lightning_accum.batch_norm import joint_run

BATCH = 96
WHOLE, AS_THEY_ARE, EXACT, CHECKPOINTED = "whole batch", "as they are", "exact", "whole batch, checkpointed"


# --- accuracy ---------------------------------------------------------------------------------------------------------


class Validated(Digits):
    """Notes its accuracy after each epoch."""

    def __init__(self, seed: int, validation: tuple[Tensor, Tensor], stride: int) -> None:
        super().__init__(lr=0.1, stride=stride)
        torch.manual_seed(seed)
        for layer in self.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                layer.reset_parameters()
        self.validation = validation

    def on_train_epoch_end(self) -> None:
        self.eval()
        with torch.no_grad():
            images, labels = self.validation
            self.accuracies.append(float((self.net(images).argmax(1) == labels).float().mean()))
        self.train()


def accuracy(seeds: int, epochs: int, size: int, stride: int) -> dict[str, list[list[float]]]:
    """The validation accuracies of each epoch, for each seed."""
    (images, labels), validation = digits()  # float64: in single precision two runs drift apart, whatever is rounded first
    found: dict[str, list[list[float]]] = {WHOLE: [], AS_THEY_ARE: [], EXACT: []}
    for seed in range(seeds):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        batches = list(zip(images[order].split(BATCH), labels[order].split(BATCH), strict=True))
        for name, runs in found.items():
            module = Validated(seed, validation, stride).double()
            policy = {AS_THEY_ARE: {"batch_norm": "warn"}, EXACT: {"batch_norm": "exact"}}.get(name)
            callbacks = [] if policy is None else [GradientAccumulation(micro_batch=size, **policy)]
            trainer("accum" if callbacks else "auto", max_epochs=epochs, callbacks=callbacks).fit(module, loader(batches))
            runs.append(module.accuracies)
            print(f"seed {seed}, {name:12}: " + " ".join(f"{100 * a:.1f}" for a in module.accuracies), flush=True)
    return found


def draw(found: dict[str, list[list[float]]], size: int, stride: int, path: Path) -> None:
    """Write the figure: the mean over seeds, and a band from the lowest to the highest."""
    from matplotlib.figure import Figure

    styles: dict[str, dict[str, Any]] = {
        WHOLE: {"color": "0.75", "linewidth": 9, "label": f"one batch of {BATCH}"},
        AS_THEY_ARE: {"color": "#D55E00", "marker": "o", "label": f"micro-batches of {size}, each with its own statistics"},
        EXACT: {"color": "#0072B2", "marker": "s", "label": f'micro-batches of {size}, batch_norm="exact"'},
    }
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    means = {name: [100 * statistics.mean(epoch) for epoch in zip(*runs, strict=True)] for name, runs in found.items()}
    for name, runs in found.items():
        epochs = range(1, len(runs[0]) + 1)
        lowest, highest = ([100 * pick(epoch) for epoch in zip(*runs, strict=True)] for pick in (min, max))
        if name != WHOLE:
            axes.fill_between(epochs, lowest, highest, color=styles[name]["color"], alpha=0.15, linewidth=0)
        axes.plot(epochs, means[name], **styles[name])
    last, other = means[EXACT][-1], means[AS_THEY_ARE][-1]
    figure.suptitle(
        f"BatchNorm over the whole batch: {last:.1f}% instead of {other:.1f}% after {len(means[EXACT])} epochs",
        fontsize=13, fontweight="bold", x=0.01, horizontalalignment="left",
    )  # fmt: skip
    axes.set_xlabel(f"epoch ({len(found[WHOLE])} seeds: their mean, and their range)")
    axes.set_ylabel("validation accuracy, %")
    values = size * (2 // stride) ** 2  # of images of 8 x 8, after two more strides of 2
    told = f"ResNet on scikit-learn's digits, SGD. Its last BatchNorm layers see {values} values a channel in a micro-batch"
    axes.set_title(told, loc="left", fontsize=9.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.55))
    axes.set_xlim(0.8, len(means[EXACT]) + 0.2)
    figure.savefig(path, dpi=130)


# --- time and memory ----------------------------------------------------------------------------------------------------


class Measured(Digits):
    """Takes the time, or the peak, of steps."""

    def __init__(self, width: int, blocks: int, warm_up: int) -> None:
        super().__init__(width=width, blocks=blocks)
        self.warm_up, self.times, self.peaks, self.alive = warm_up, [], [], None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.alive is not None:
            self._before = self.alive.peak = self.alive.bytes
        self._began = time.process_time()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= self.warm_up:
            self.times.append(time.process_time() - self._began)
            if self.alive is not None:
                self.peaks.append(self.alive.peak - self._before)


@contextmanager
def checkpointed(module: nn.Module) -> Iterator[None]:
    """Each block runs again in the backward, instead of keeping what it computed."""
    for block in module.modules():
        if isinstance(block, Block):
            block.forward = lambda x, own=block.forward: checkpoint(own, x, use_reentrant=False)  # type: ignore[method-assign]
    yield


def step(name: str, number: int, width: int, blocks: int, steps: int, counts: bool) -> tuple[float, float, float]:
    """Seconds of a step; or bytes alive at its peak, and bytes on the host."""
    images, labels = digits(torch.float32)[0]
    warm_up = 2
    batches = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))
    data = [batches[i % len(batches)] for i in range(warm_up + steps)]
    module = Measured(width, blocks, warm_up)
    policy = {AS_THEY_ARE: "warn", EXACT: "exact"}.get(name)
    callbacks: list[pl.Callback] = []
    if policy is not None:
        callbacks = [GradientAccumulation(micro_batch=BATCH // number, batch_norm=policy, log=False)]  # type: ignore[arg-type]
    run = trainer("accum" if callbacks else "auto", callbacks=callbacks)
    with checkpointed(module) if name == CHECKPOINTED else nullcontext():
        if not counts:
            run.fit(module, loader(data))
            return statistics.median(module.times), 0.0, 0.0
        own, host = joint_run.memory_for, Elsewhere(torch.device("cpu"))
        joint_run.memory_for = lambda device: host
        try:
            with Alive() as alive:
                module.alive = alive
                run.fit(module, loader(data))
        finally:
            joint_run.memory_for = own
    return 0.0, max(module.peaks), float(host.most)


def cost(width: int, blocks: int, steps: int, rounds: int) -> str:
    """The table."""
    rows = [(WHOLE, 1), (CHECKPOINTED, 1)] + [(name, number) for number in (2, 4, 8) for name in (AS_THEY_ARE, EXACT)]
    times: dict[tuple[str, int], list[float]] = {row: [] for row in rows}
    for round_ in range(rounds):
        for row in rows if round_ % 2 else reversed(rows):
            times[row].append(step(*row, width, blocks, steps, counts=False)[0])
    lines = [f"{'':30}{'micro-batches':>14}{'ms a step':>12}{'/ whole':>9}{'peak MiB':>11}{'/ whole':>9}{'on host':>9}"]
    whole_time = whole_peak = 1.0
    for row in rows:
        seconds = statistics.median(times[row])
        _, peak, host = step(*row, width, blocks, 3, counts=True)
        if row == (WHOLE, 1):
            whole_time, whole_peak = seconds, peak
        name, number = row
        lines.append(
            f"{name:30}{number:14}{1e3 * seconds:12.1f}{seconds / whole_time:9.2f}{peak / 2**20:11.2f}{peak / whole_peak:9.2f}"
            f"{host / 2**20:9.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print, or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    of_accuracy = kinds.add_parser("accuracy")
    of_accuracy.add_argument("--seeds", type=int, default=3)
    of_accuracy.add_argument("--epochs", type=int, default=8)
    of_accuracy.add_argument("--size", type=int, default=2, help="of a micro-batch")
    of_accuracy.add_argument(
        "--stride", type=int, choices=(1, 2), default=2, help="of the first layer; 1: four times as many pixels"
    )
    of_accuracy.add_argument("--out", type=Path, default=Path("notebooks/figures/batch_norm.png"))
    of_cost = kinds.add_parser("cost")
    of_cost.add_argument("--width", type=int, default=16, help="channels of the first stage")
    of_cost.add_argument("--blocks", type=int, default=3, help="in each of three stages")
    of_cost.add_argument("--steps", type=int, default=8)
    of_cost.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if arguments.kind == "accuracy":
        found = accuracy(arguments.seeds, arguments.epochs, arguments.size, arguments.stride)
        draw(found, arguments.size, arguments.stride, arguments.out)
    else:
        print(cost(arguments.width, arguments.blocks, arguments.steps, arguments.rounds))


if __name__ == "__main__":
    main()
