"""The accuracy that BatchNorm keeps where batches run whole while what their backward needs waits on the host.

    python tests/benchmarks/offload.py --out notebooks/figures/batch_norm.png

Trains a ResNet on scikit-learn's digits, batches of 96: on whole batches, on micro-batches of 2, and with
``micro_batch="offload"``, and draws the validation accuracy of each epoch. The package moves nothing on a CPU, so a second memory
is made up; ``gpu.py`` measures time and memory on a GPU.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from other_memory import other_memory
from side_by_side import Module, classify, command_line, figure
from support import loader, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation

CLASSES = 10


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Of scikit-learn: 1797 handwritten digits of 8 x 8 pixels, in a fixed random order: 1440 to train on, and 357 to validate."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(found.images)[order, None] / 8 - 1  # in float64: in float32 two runs drift apart
    labels = torch.from_numpy(found.target)[order]
    return (images[:1440], labels[:1440]), (images[1440:], labels[1440:])


class Block(nn.Module):  # two convolutions beside a shortcut, as in He et al. 2016.
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        first = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()
        self.body = nn.Sequential(*first, nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
        self.shortcut: nn.Module = nn.Identity()
        if channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Sequential):  # a block of 8 channels, one of 16 and one of 32, each of which follows on a quarter of the pixels
    def __init__(self, stride: int) -> None:
        stem = nn.Conv2d(1, 8, 3, stride, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        blocks = Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2)
        super().__init__(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


BATCH = 96
WHOLE, SPLIT, OFFLOAD = "whole batch", "micro-batches", "offload"


class Validated(Module):  # a small ResNet with BatchNorm, which notes its accuracy after each epoch
    def __init__(self, seed: int, validation: tuple[Tensor, Tensor], stride: int) -> None:
        torch.manual_seed(seed)
        super().__init__(ResNet(stride), classify)
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
    (images, labels), validation = digits()
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


def draw(found: dict[str, list[list[float]]], size: int, path: str) -> None:  # the mean over seeds
    labels = {WHOLE: f"one batch of {BATCH}", SPLIT: f"micro-batches of {size}, each with its own statistics"}
    means = {name: [100 * statistics.mean(epoch) for epoch in zip(*runs, strict=True)] for name, runs in found.items()}
    last, other, number = means[OFFLOAD][-1], means[SPLIT][-1], len(means[OFFLOAD])
    title = f"BatchNorm over the whole batch: {last:.1f}% instead of {other:.1f}% after {number} epochs"
    below = f"epoch (mean of {len(found[WHOLE])} seeds)"
    with figure(path, title, "ResNet on scikit-learn's digits, SGD", xlabel=below, ylabel="validation accuracy, %") as axes:
        for name, width in ((WHOLE, 9), (SPLIT, 2), (OFFLOAD, 2)):
            label = labels.get(name, 'micro_batch="offload"')
            axes.plot(range(1, number + 1), means[name], linewidth=width, label=label, color="0.75" if name == WHOLE else None)
        axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.55))


def main(seeds: int = 3, epochs: int = 8, size: int = 2, stride: int = 2, out: str = "batch_norm.png") -> None:
    """Train, print and draw."""
    draw(accuracy(seeds, epochs, size, stride), size, out)


if __name__ == "__main__":
    command_line(main)
