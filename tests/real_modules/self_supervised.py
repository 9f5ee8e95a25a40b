"""Encoders that learn from two views: a contrastive loss, statistics of the batch, and a momentum teacher."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from real_modules.expected import ONE, by
from real_modules.table import Warned, dealt, real_module


def two_views(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Two noisy copies of one row, and its class."""
    row = torch.randn(6, generator=generator)
    views = (row + 0.3 * torch.randn(6, generator=generator) for _ in range(2))
    return (*views, torch.randint(3, (), generator=generator))


def encoder(outputs: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, outputs))


class TwoViews(LightningModule):
    """An encoder, and a loss of what it makes of two views."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(self.encoder(batch[0]), self.encoder(batch[1]))
        self.log("train/loss", loss)
        return loss

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        raise NotImplementedError


@real_module("SimCLR", dealt(two_views), windows=ONE, split=by("encoder"))
class ContrastedViews(TwoViews):
    """Every row tells its other view from all rows of the batch."""

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(torch.cat([a, b]))
        logits = (z @ z.T / 0.2).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(logits, torch.arange(len(z)).roll(len(a)))


@real_module("VICReg with an online classifier", dealt(two_views), windows=ONE, split=by("encoder"))
class VarianceAndClassifier(TwoViews):
    """Variances and covariances of the batch, and beside them a classifier that is a mean over labelled rows."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(5, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        a, b = self.encoder(batch[0]), self.encoder(batch[1])
        loss = 25 * F.mse_loss(a, b)
        for z in (a, b):
            centered = z - z.mean(0)
            covariance = centered.T @ centered / max(1, len(z) - 1)
            spread = F.relu(1 - (covariance.diagonal() + 1e-4).sqrt()).mean()
            loss = loss + 25 * spread + (covariance.square().sum() - covariance.diagonal().square().sum()) / 5
        return loss + F.cross_entropy(self.classifier(a.detach()), batch[2])


@real_module("DINO", dealt(two_views), windows=Warned("center"), split=Warned("center"))
class CenteredTeacher(TwoViews):
    """The loss is of teachings around a center, which each call then moves; the teacher moves with the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("center", torch.zeros(5))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch[1])
        loss = F.cross_entropy(self.encoder(batch[0]) / 0.2, ((wanted - self.center) / 0.1).softmax(1))
        self.center.lerp_(wanted.mean(0), 0.3)
        self.log("train/loss", loss)
        return loss

    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        super().optimizer_step(*arguments, **named)
        for slow, fast in zip(self.teacher.parameters(), self.encoder.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.1)
