"""Encoders that learn from two views: contrastive losses, statistics of the batch, and momentum teachers."""

import copy
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from real_modules.expected import ONE, by
from real_modules.table import RealModule, Warned, dealt, real_module


def two_views(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:  # two noisy copies of one row, and its class
    row = torch.randn(6, generator=generator)
    views = (row + 0.3 * torch.randn(6, generator=generator) for _ in range(2))
    return (*views, torch.randint(3, (), generator=generator))


def encoder(outputs: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, outputs))


class TwoViews(RealModule):  # an encoder, and a loss of what it makes of two views
    def build(self) -> None:
        self.encoder = encoder()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(self.encoder(batch[0]), self.encoder(batch[1]))
        self.log("train/loss", loss)
        return loss

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        raise NotImplementedError


@real_module("SimCLR", dealt(two_views), windows=ONE, split=by("encoder"))
class ContrastedViews(TwoViews):  # every row tells its other view from all rows of the batch
    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(torch.cat([a, b]))
        logits = (z @ z.T / 0.2).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(logits, torch.arange(len(z)).roll(len(a)))


@real_module("Barlow Twins", dealt(two_views), windows=ONE, split=by("encoder"))
class RedundancyReduced(TwoViews):  # the correlation of the two views' features over the batch is drawn to the identity
    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = ((z - z.mean(0)) / (z.var(0, correction=0) + 1e-2).sqrt() for z in (a, b))
        c = a.T @ b / len(a)
        return (c.diagonal() - 1).square().sum() + 0.05 * (c - c.diagonal().diag()).square().sum()


@real_module("VICReg with an online classifier", dealt(two_views), windows=ONE, split=by("encoder"))
class VarianceAndClassifier(TwoViews):
    """Variances and covariances of the batch, and beside them a classifier that is a mean over labelled rows."""

    def build(self) -> None:
        super().build()
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
class PredictsOtherView(TwoViews):  # a mean over rows: each view predicts the other's features
    def build(self) -> None:
        super().build()
        self.predictor = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 5))

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        similar = (
            F.cosine_similarity(self.predictor(a), b.detach()).mean() + F.cosine_similarity(self.predictor(b), a.detach()).mean()
        )
        return -0.5 * similar


@real_module("Deep SVDD, soft boundary", dealt(two_views), windows=Warned("'radius'"), split=Warned("'radius'"))
class SoftBoundary(TwoViews):  # the distances of rows beyond a radius, which each batch sets from the second step on
    radius = torch.tensor(0.3)

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        distances, radius = a.square().sum(1), self.radius
        if self.global_step:
            self.radius = distances.detach().quantile(0.9).sqrt()
        return radius**2 + 10 * F.relu(distances - radius**2).mean()


@real_module("CLIP", dealt(two_views), windows=ONE, split=by("image", "text"))
class ImagesAndTexts(RealModule):
    """Images tell their texts from all of the batch, and texts their images; the temperature is learned."""

    def build(self) -> None:
        self.image, self.text, self.log_scale = encoder(), encoder(), nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.log_scale.exp() * F.normalize(self.image(batch[0])) @ F.normalize(self.text(batch[1])).T
        own = torch.arange(len(logits))
        return 0.5 * (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own))


class WithTeacher(TwoViews):  # a teacher follows the encoder
    def build(self) -> None:
        super().build()
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)

    @torch.no_grad()
    def follow(self, rate: float = 0.1) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.encoder.parameters(), strict=True):
            slow.lerp_(fast, rate)


@real_module("BYOL", dealt(two_views), windows=Warned("teacher"))
class FollowsAfterBatches(WithTeacher):  # the teacher moves at the end of each loader batch; a split one is one loader batch
    def build(self) -> None:
        super().build()
        self.predictor = nn.Linear(5, 5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch[1])
        return 2 - 2 * F.cosine_similarity(self.predictor(self.encoder(batch[0])), wanted).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.follow()


@real_module("DINO", dealt(two_views), windows=Warned("center"), split=Warned("center"))
class CenteredTeacher(WithTeacher):
    """The loss is of teachings around a center, which each call then moves; the teacher moves with the optimizer."""

    def build(self) -> None:
        super().build()
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
        self.follow()


@real_module("MoCo", dealt(two_views), windows=Warned("queue"), split=Warned("queue"))
class QueueOfKeys(WithTeacher):  # rows are told from the keys of earlier steps
    def build(self) -> None:
        super().build()
        self.register_buffer("queue", F.normalize(torch.randn(9, 5)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            keys = F.normalize(self.teacher(batch[1]))
        queries = F.normalize(self.encoder(batch[0]))
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.T], 1) / 0.2
        self.queue = torch.cat([keys, self.queue])[: len(self.queue)]
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
