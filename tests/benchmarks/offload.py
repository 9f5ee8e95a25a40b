"""Batches that run whole while what their backward needs waits on the host: the accuracy that BatchNorm keeps, time and memory.

    python tests/benchmarks/offload.py
    python tests/benchmarks/offload.py --out notebooks/figures/batch_norm.png

The first compares a ResNet's step on the whole batch with gradient checkpointing of every block, and with offloading. The package
moves nothing on a CPU, so a second memory is made up: the peak is that of all tensors alive in a step, above those that stay
(parameters, gradients, optimizer, data), counted by a mode that sees every operator, and copies take the processor's time, which
nothing hides. ``gpu.py`` measures it on a GPU.

``--out`` trains the ResNet on scikit-learn's digits, batches of 96: on whole batches, on micro-batches of 2, and with
``micro_batch="offload"``, and draws the validation accuracy of each epoch.
"""

import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from alive import Alive
from other_memory import other_memory
from side_by_side import Module, classify, command_line, figure, fit, interleaved, show
from support import loader, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CLASSES = 10


def digits(dtype: torch.dtype = torch.float64) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Of scikit-learn: 1797 handwritten digits of 8 x 8 pixels, in a fixed random order: 1440 to train on, and 357 to validate."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = (torch.from_numpy(found.images)[order, None] / 8 - 1).to(dtype)
    labels = torch.from_numpy(found.target)[order]
    return (images[:1440], labels[:1440]), (images[1440:], labels[1440:])


class Block(nn.Module):
    """Two convolutions beside a shortcut, as in He et al. 2016."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))


class ResNet(nn.Sequential):
    """Three stages; ``width`` channels in the first, twice as many in each that follows, of a quarter of the pixels."""

    def __init__(self, width: int = 8, blocks: int = 1, stride: int = 1) -> None:
        layers: list[nn.Module] = [nn.Conv2d(1, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        for stage in range(3):
            for block in range(blocks):
                is_first = block == 0 and stage > 0
                out = width * 2**stage
                layers.append(Block(out // 2 if is_first else out, out, 2 if is_first else 1))
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES))


BATCH = 96
WHOLE, SPLIT, CHECKPOINTED, OFFLOAD = "whole batch", "micro-batches", "checkpointed", "offload"


class Validated(Module):
    """A small ResNet with BatchNorm, which notes its accuracy after each epoch."""

    def __init__(self, seed: int, validation: tuple[Tensor, Tensor], stride: int) -> None:
        torch.manual_seed(seed)
        super().__init__(ResNet(stride=stride), classify)
        self.validation, self.accuracies = validation, list[float]()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def on_train_epoch_end(self) -> None:
        self.eval()
        with torch.no_grad():
            images, labels = self.validation
            self.accuracies.append(float((self.net(images).argmax(1) == labels).float().mean()))
        self.train()


def accuracy(seeds: int, epochs: int, size: int, stride: int) -> dict[str, list[list[float]]]:
    """The validation accuracies of each epoch, for each seed."""
    from lightning_accum import GradientAccumulation

    (images, labels), validation = digits()  # float64: in single precision two runs drift apart, whatever is rounded first
    found: dict[str, list[list[float]]] = {WHOLE: [], SPLIT: [], OFFLOAD: []}
    for seed in range(seeds):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        batches = list(zip(images[order].split(BATCH), labels[order].split(BATCH), strict=True))
        for name, runs in found.items():
            module = Validated(seed, validation, stride).double()
            micro_batch: Any = {SPLIT: size, OFFLOAD: "offload"}.get(name)
            callbacks = [] if micro_batch is None else [GradientAccumulation(micro_batch=micro_batch)]
            with other_memory():
                trainer("accum" if callbacks else "auto", max_epochs=epochs, callbacks=callbacks).fit(module, loader(batches))
            runs.append(module.accuracies)
            print(f"seed {seed}, {name:13}: " + " ".join(f"{100 * a:.1f}" for a in module.accuracies), flush=True)
    return found


def draw(found: dict[str, list[list[float]]], size: int, stride: int, path: str) -> None:
    """Write the figure: the mean over seeds, and a band from the lowest to the highest."""
    styles: dict[str, dict[str, Any]] = {
        WHOLE: {"color": "0.75", "linewidth": 9, "label": f"one batch of {BATCH}"},
        SPLIT: {"color": "#D55E00", "marker": "o", "label": f"micro-batches of {size}, each with its own statistics"},
        OFFLOAD: {"color": "#0072B2", "marker": "s", "label": 'micro_batch="offload"'},
    }
    means = {name: [100 * statistics.mean(epoch) for epoch in zip(*runs, strict=True)] for name, runs in found.items()}
    last, other, number = means[OFFLOAD][-1], means[SPLIT][-1], len(means[OFFLOAD])
    title = f"BatchNorm over the whole batch: {last:.1f}% instead of {other:.1f}% after {number} epochs"
    values = size * (2 // stride) ** 2  # of images of 8 x 8, after two more strides of 2
    told = f"ResNet on scikit-learn's digits, SGD. Its last BatchNorm layers see {values} values a channel in a micro-batch"
    below = f"epoch ({len(found[WHOLE])} seeds: their mean, and their range)"
    with figure(path, title, told, xlabel=below, ylabel="validation accuracy, %") as axes:
        for name, runs in found.items():
            epochs = range(1, number + 1)
            lowest, highest = ([100 * pick(epoch) for epoch in zip(*runs, strict=True)] for pick in (min, max))
            if name != WHOLE:
                axes.fill_between(epochs, lowest, highest, color=styles[name]["color"], alpha=0.15, linewidth=0)
            axes.plot(epochs, means[name], **styles[name])
        axes.grid(axis="y", color="0.9")
        axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.55))
        axes.set_xlim(0.8, number + 0.2)


class Measured(Module):
    """A ResNet of 9 blocks, which takes the time and the peak of steps."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(11)
        super().__init__(ResNet(width, blocks=3), classify)
        self.times: list[float] = []
        self.peaks: list[int] = []
        self.alive: Alive | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.alive is not None:
            self._before = self.alive.peak = self.alive.bytes
        self._began = time.process_time()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.process_time() - self._began)
        if self.alive is not None:
            self.peaks.append(self.alive.peak - self._before)

    def checkpoint_blocks(self) -> None:
        """Have each block run again in the backward, instead of keeping what it computed."""
        for block in self.net.modules():
            if isinstance(block, Block):
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def step(name: str, width: int, pixels: int, steps: int) -> tuple[float, float, float]:
    """Seconds of a step, bytes alive at its peak, and bytes on the host."""
    images, labels = digits(torch.float32)[0]
    images = F.interpolate(images, size=(pixels, pixels)).split(BATCH)
    data = list(zip(images, labels.split(BATCH), strict=True))[: 2 + steps]
    module, policy = Measured(width), {"micro_batch": "offload", "log": False} if name == OFFLOAD else {}
    if name == CHECKPOINTED:
        module.checkpoint_blocks()
    with other_memory() as host:
        with Alive() as module.alive:
            fit(module, loader(data[:4]), **policy)
        module.alive, module.times = None, []
        fit(module, loader(data), **policy)
    return statistics.median(module.times[2:]), float(max(module.peaks[2:])), float(host.most)


def cost(width: int, pixels: int, steps: int, rounds: int) -> None:
    """The table."""
    sides = {name: partial(step, name, width, pixels, steps) for name in (WHOLE, CHECKPOINTED, OFFLOAD)}
    found = interleaved(sides, rounds)
    seconds = {name: statistics.median(one[0] for one in runs) for name, runs in found.items()}
    table = []
    for name, ((_, peak, host), *_) in found.items():
        times = f"{1e3 * seconds[name]:.1f}", f"{seconds[name] / seconds[WHOLE]:.2f}"
        table.append([name, *times, f"{peak / 2**20:.2f}", f"{peak / found[WHOLE][0][1]:.3f}", f"{host / 2**20:.2f}"])
    show(["", "ms a step", "/ whole", "peak, MiB", "/ whole", "on host, MiB"], table)


def main(
    rounds: int = 3, width: int = 16, pixels: int = 8, steps: int = 8, out: str | None = None,
    seeds: int = 3, epochs: int = 8, size: int = 2, stride: int = 2,
) -> None:  # fmt: skip
    """Measure and print, or draw."""
    if out is not None:
        draw(accuracy(seeds, epochs, size, stride), size, stride, out)
    else:
        cost(width, pixels, steps, rounds)


if __name__ == "__main__":
    command_line(main)
