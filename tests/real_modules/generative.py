"""Autoencoders, adversaries, diffusion, flows and radiance fields. Noise belongs to rows, unless a module says that it draws."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningModule
from scipy.optimize import linear_sum_assignment
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from real_modules.expected import OFFLOAD, ONE, by
from real_modules.table import dealt, real_module


def image(generator: Generator) -> dict[str, Tensor]:
    """Some pixels of some images are missing."""
    seen = torch.rand(10, generator=generator) < 0.2 + 0.8 * torch.rand((), generator=generator)
    return {"x": torch.randn(10, generator=generator), "seen": seen.float(), "noise": torch.randn(5, 3, generator=generator)}


def mlp(*sizes: int) -> nn.Sequential:
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def normal_log_density(x: Tensor, mean: Any = 0.0, log_variance: Any = 0.0) -> Tensor:
    log_variance = torch.as_tensor(log_variance)
    return -0.5 * (math.log(2 * math.pi) + log_variance + (x - mean) ** 2 / log_variance.exp())


class Autoencoder(LightningModule):
    """What the variational ones share."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(10, 8, 6), mlp(3, 8, 10)

    def sample(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(batch["x"]).chunk(2, 1)
        return mean + (0.5 * log_variance).exp() * batch["noise"][:, 0], mean, log_variance

    @staticmethod
    def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
        return -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)


@real_module("VAE collections, beta-VAE", dealt(image))
class BetaAutoencoder(Autoencoder):
    """Reconstruction is a mean over elements, divergence one over samples: in a constant proportion."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        z, *posterior = self.sample(batch)
        losses = {"reconstruction": F.mse_loss(self.decoder(z), batch["x"]), "kl": self.divergence(*posterior).mean()}
        self.log_dict(losses)
        return {"loss": losses["reconstruction"] + 4 * losses["kl"], **losses}


@real_module("beta-TC-VAE", dealt(image), windows=ONE, split=by("encoder"))
class TotalCorrelation(Autoencoder):
    """The density of a code is estimated from all posteriors of the batch."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        z, mean, log_variance = self.sample(batch)
        pairs = normal_log_density(z[:, None], mean, log_variance) - math.log(100 * len(z))
        of_code, of_dimensions = pairs.sum(2).logsumexp(1), pairs.logsumexp(1).sum(1)
        own, prior = normal_log_density(z, mean, log_variance).sum(1), normal_log_density(z).sum(1)
        divergence = (own - of_code) + 6 * (of_code - of_dimensions) + (of_dimensions - prior)
        return F.mse_loss(self.decoder(z), batch["x"]) + divergence.mean()


class Adversaries(LightningModule):
    """A generator and a discriminator, which steps first or with it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = mlp(5, 8, 10), mlp(10, 8, 1)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(net.parameters(), 1e-2, (0.5, 0.9), eps=1e-4) for net in (self.generator, self.discriminator)]

    def losses(self, real: Tensor, fake: Tensor) -> Tensor:
        real, fake = self.discriminator(real), self.discriminator(fake)
        zeros, ones = torch.zeros_like(fake), torch.ones_like(real)
        return F.binary_cross_entropy_with_logits(real, ones) + F.binary_cross_entropy_with_logits(fake, zeros)


@real_module("WGAN-GP", dealt(image), optimizers=(None,), windows=ONE, split=OFFLOAD)
class WassersteinWithPenalty(Adversaries):
    """The critic steps before the generator's loss uses it."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()
        fake, real, critic = self.generator(batch["noise"][:, :, 0]), batch["x"], self.discriminator
        part = batch["noise"][:, :1, 1].sigmoid()
        between = (part * real + (1 - part) * fake).detach().requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        of_critic.zero_grad()
        distance = critic(fake.detach()).mean() - critic(real).mean()
        self.manual_backward(distance + 10 * (slope.norm(dim=1) - 1).square().mean())
        of_critic.step()
        of_generator.zero_grad()
        self.manual_backward(-critic(fake).mean())
        of_generator.step()


def noised(generator: Generator) -> dict[str, Tensor]:
    time = torch.rand(1, generator=generator)
    return {"x": torch.randn(6, generator=generator), "noise": torch.randn(6, generator=generator), "time": time}


class OnPaths(LightningModule):
    """A network of points and times; what a step draws is the same in each training."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(7, 10, 6)

    def on_train_start(self) -> None:
        torch.manual_seed(0)


class Denoiser(OnPaths):
    """Predicts the noise in a mixture of a row and noise."""

    def errors(self, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        angle = 0.5 * math.pi * time
        return (self.net(torch.cat([angle.cos() * x + angle.sin() * noise, time], 1)) - noise).square()


@real_module("DDPM with min-SNR weights", dealt(noised))
class Diffusion(Denoiser):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        errors = self.errors(batch["x"], batch["noise"], batch["time"]).mean(1)
        weight = (5 * (0.5 * math.pi * batch["time"][:, 0]).tan().square()).clamp(max=1)
        return (weight * errors).mean()


@real_module("diffusion with antithetic times", dealt(noised), windows=ONE, split=OFFLOAD)
class AntitheticTimes(Denoiser):
    """Draws one time for two rows, whose times add up to 1."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        half = torch.rand(len(batch["x"]) // 2 + 1, 1)
        time = torch.cat([half, 1 - half])[: len(batch["x"])]
        return self.errors(batch["x"], batch["noise"], time).mean()


class FlowMatching(OnPaths):
    """Pairs ends of paths so that the batch's paths are short, and learns the velocity on them."""

    def of_paths(self, start: Tensor, end: Tensor, time: Tensor) -> Tensor:
        rows, columns = map(torch.as_tensor, linear_sum_assignment(torch.cdist(start, end).square().numpy()))
        start, end = start[rows], end[columns]
        return (self.net(torch.cat([start + time * (end - start), time], 1)) - (end - start)).square().mean()


@real_module("flow matching, transport from noise", dealt(noised), windows=ONE, split=by("net"))
class TransportFromNoise(FlowMatching):
    """Draws the noise that it pairs with rows, and the times."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["x"]
        return self.of_paths(torch.randn_like(x), x, torch.rand(len(x), 1))
