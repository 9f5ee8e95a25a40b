"""Real images that come with scikit-learn, and a small ResNet with BatchNorm for them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10


def digits(dtype: torch.dtype = torch.float64) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """1797 handwritten digits of 8 x 8 pixels, in a fixed random order: 1440 to train on, and 357 to validate."""
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


class Digits(pl.LightningModule):
    """Knows nothing of accumulation."""

    def __init__(self, lr: float = 0.1, width: int = 8, blocks: int = 1, stride: int = 1) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.net = ResNet(width, blocks, stride)
        self.lr = lr
        self.accuracies: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-4)
