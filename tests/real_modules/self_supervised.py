"""Encoders that learn from two views: contrastive losses, statistics of the batch, and momentum teachers."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from real_modules.expected import ONE, by
from real_modules.table import dealt, real_module


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


@real_module("SimSiam without BatchNorm", dealt(two_views))
class PredictsOtherView(TwoViews):
    """A mean over rows: each view predicts the other's features."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 5))

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        similar = (
            F.cosine_similarity(self.predictor(a), b.detach()).mean() + F.cosine_similarity(self.predictor(b), a.detach()).mean()
        )
        return -0.5 * similar
