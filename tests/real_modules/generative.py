"""Autoencoders, adversaries, diffusion, flows and radiance fields. Noise belongs to rows, unless a module says that it draws."""

import math
from itertools import pairwise
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from real_modules.expected import OFFLOAD, ONE, by
from real_modules.table import RealModule, Warned, dealt, real_module


def image(generator: Generator) -> dict[str, Tensor]:  # some pixels of some images are missing
    seen = torch.rand(10, generator=generator) < 0.2 + 0.8 * torch.rand((), generator=generator)
    return {"x": torch.randn(10, generator=generator), "seen": seen.float(), "noise": torch.randn(5, 3, generator=generator)}


def mlp(*sizes: int) -> nn.Sequential:
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def normal_log_density(x: Tensor, mean: Any = 0.0, log_variance: Any = 0.0) -> Tensor:
    log_variance = torch.as_tensor(log_variance)
    return -0.5 * (math.log(2 * math.pi) + log_variance + (x - mean) ** 2 / log_variance.exp())


class Autoencoder(RealModule):  # what the variational ones share
    def build(self) -> None:
        self.encoder, self.decoder = mlp(10, 8, 6), mlp(3, 8, 10)

    def sample(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(batch["x"]).chunk(2, 1)
        return mean + (0.5 * log_variance).exp() * batch["noise"][:, 0], mean, log_variance

    @staticmethod
    def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
        return -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)


@real_module("VAE collections, beta-VAE", dealt(image))
class BetaAutoencoder(Autoencoder):  # reconstruction is a mean over elements, divergence one over samples: in a constant proportion
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        z, *posterior = self.sample(batch)
        losses = {"reconstruction": F.mse_loss(self.decoder(z), batch["x"]), "kl": self.divergence(*posterior).mean()}
        self.log_dict(losses)
        return {"loss": losses["reconstruction"] + 4 * losses["kl"], **losses}


@real_module("imputation of missing values", dealt(image))
class MissingValues(Autoencoder):
    """Reconstruction over what was seen, divergence over samples, with a learned scale of the noise and an annealed factor."""

    def build(self) -> None:
        super().build()
        self.log_scale = nn.Parameter(torch.tensor(0.1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        z, *posterior = self.sample(batch)
        distance = (self.decoder(z) - batch["x"]).square() * batch["seen"]
        reconstruction = (-2 * self.log_scale).exp() * distance.sum() / batch["seen"].sum() + self.log_scale
        return reconstruction + 0.1 * (1 + self.global_step) * self.divergence(*posterior).mean()


@real_module("VAE with a counter", dealt(image), windows=Warned("seen_batches"), split=Warned("seen_batches"))
class CountsItsSteps(Autoencoder):  # the factor of the divergence grows with the calls of the step
    def build(self) -> None:
        super().build()
        self.seen_batches = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen_batches += 1
        z, *posterior = self.sample(batch)
        return F.mse_loss(self.decoder(z), batch["x"]) + min(1.0, self.seen_batches / 8) * self.divergence(*posterior).mean()


@real_module("VAE with free bits", dealt(image), windows=ONE, split=by("encoder"))
class FreeBits(Autoencoder):  # each dimension has a divergence that costs nothing: of its mean over the batch
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        z, mean, log_variance = self.sample(batch)
        of_dimensions = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean(0)
        return F.mse_loss(self.decoder(z), batch["x"]) + of_dimensions.clamp(min=0.1).sum()


@real_module("beta-TC-VAE", dealt(image), windows=ONE, split=by("encoder"))
class TotalCorrelation(Autoencoder):  # the density of a code is estimated from all posteriors of the batch
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        z, mean, log_variance = self.sample(batch)
        pairs = normal_log_density(z[:, None], mean, log_variance) - math.log(100 * len(z))
        of_code, of_dimensions = pairs.sum(2).logsumexp(1), pairs.logsumexp(1).sum(1)
        own, prior = normal_log_density(z, mean, log_variance).sum(1), normal_log_density(z).sum(1)
        divergence = (own - of_code) + 6 * (of_code - of_dimensions) + (of_dimensions - prior)
        return F.mse_loss(self.decoder(z), batch["x"]) + divergence.mean()


@real_module("DIP-VAE", dealt(image), windows=ONE, split=by("encoder"))
class DisentangledPrior(Autoencoder):  # the covariance of means over the batch is drawn to the identity
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        z, mean, log_variance = self.sample(batch)
        covariance = (mean - mean.mean(0)).T @ (mean - mean.mean(0)) / len(mean) + log_variance.exp().mean(0).diag()
        off = (covariance - covariance.diagonal().diag()).square().sum() + (covariance.diagonal() - 1).square().sum()
        return F.mse_loss(self.decoder(z), batch["x"]) + self.divergence(mean, log_variance).mean() + off


@real_module("Wasserstein autoencoder, MMD", dealt(image), windows=ONE, split=by("encoder"))
class MeanDiscrepancy(Autoencoder):  # kernels between all codes of the batch and samples of the prior
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        z, prior = self.encoder(batch["x"])[:, :3], batch["noise"][:, 1]
        kernels = [1 / (1 + torch.cdist(a, b).square() / 3) for a, b in ((z, z), (prior, prior), (z, prior))]
        n, (own, other, both) = len(z), kernels
        off_diagonal = (own.sum() - own.trace() + other.sum() - other.trace()) / max(1, n * (n - 1))
        return F.mse_loss(self.decoder(z), batch["x"]) + 10 * (off_diagonal - 2 * both.mean())


@real_module("importance weighted autoencoder", dealt(image))
class ImportanceWeighted(Autoencoder):  # the logarithm of a mean over five codes of each row, which is its own
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        mean, log_variance = (part[:, None] for part in self.encoder(batch["x"]).chunk(2, 1))
        z = mean + (0.5 * log_variance).exp() * batch["noise"]
        log_ratio = normal_log_density(z).sum(2) - normal_log_density(z, mean, log_variance).sum(2)
        log_weight = log_ratio + normal_log_density(batch["x"][:, None], self.decoder(z)).sum(2)
        return -(log_weight.logsumexp(1) - math.log(5)).mean()


@real_module(*("VQ-VAE, k-means", dealt(image)), windows=Warned("is_placed"), split=Warned("is_placed"))
class VectorQuantized(Autoencoder):  # the first forward places the codebook at means of what it sees
    def build(self) -> None:
        super().build()
        self.codebook, self.is_placed = nn.Embedding(3, 6), False
        self.decoder = mlp(6, 8, 10)

    @torch.no_grad()
    def place(self, z: Tensor) -> None:
        means = z[torch.linspace(0, len(z) - 1, 3).round().long()]
        for _ in range(5):
            nearest = F.one_hot(torch.cdist(z, means).argmin(1), 3).to(z)
            means = (nearest.T @ z) / nearest.sum(0)[:, None].clamp(min=1)
        self.codebook.weight.copy_(means)
        self.is_placed = True

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        z = self.encoder(batch["x"])
        if not self.is_placed:
            self.place(z)
        code = self.codebook(torch.cdist(z, self.codebook.weight).argmin(1))
        decoded = self.decoder(z + (code - z).detach())
        return F.mse_loss(decoded, batch["x"]) + F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())


class Adversaries(RealModule):  # a generator and a discriminator, which steps first or with it
    def build(self) -> None:
        self.automatic_optimization = False
        self.generator, self.discriminator = mlp(5, 8, 10), mlp(10, 8, 1)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(net.parameters(), 1e-2, (0.5, 0.9), eps=1e-4) for net in (self.generator, self.discriminator)]

    def losses(self, real: Tensor, fake: Tensor) -> Tensor:
        real, fake = self.discriminator(real), self.discriminator(fake)
        zeros, ones = torch.zeros_like(fake), torch.ones_like(real)
        return F.binary_cross_entropy_with_logits(real, ones) + F.binary_cross_entropy_with_logits(fake, zeros)


@real_module("GAN that steps both at once", dealt(image), optimizers=(None,), split=OFFLOAD)
class Adversarial(Adversaries):  # both gradients are of the parameters before the steps. Manual optimization is not split.
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        fake = self.generator(batch["noise"][:, :, 0])
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.discriminator.requires_grad_(False)
        self.manual_backward(F.softplus(-self.discriminator(fake)).mean())
        self.discriminator.requires_grad_(True)
        self.manual_backward(self.losses(batch["x"], fake.detach()))
        for optimizer in self.optimizers():
            optimizer.step()


@real_module("WGAN-GP", dealt(image), optimizers=(None,), windows=ONE, split=OFFLOAD)
class WassersteinWithPenalty(Adversaries):  # the critic steps before the generator's loss uses it
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


class OnPaths(RealModule):  # a network of points and times; what a step draws is the same in each training
    def build(self) -> None:
        self.net = mlp(7, 10, 6)

    def on_train_start(self) -> None:
        torch.manual_seed(0)


class Denoiser(OnPaths):  # predicts the noise in a mixture of a row and noise
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
class AntitheticTimes(Denoiser):  # draws one time for two rows, whose times add up to 1
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        half = torch.rand(len(batch["x"]) // 2 + 1, 1)
        time = torch.cat([half, 1 - half])[: len(batch["x"])]
        return self.errors(batch["x"], batch["noise"], time).mean()


@real_module("variational diffusion, stratified times", dealt(noised), windows=ONE, split=OFFLOAD)
class StratifiedTimes(Denoiser):  # draws one number, and spreads the times of the batch evenly from there
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        count = len(batch["x"])
        time = (torch.rand(1, 1) + torch.arange(count)[:, None] / count) % 1
        return self.errors(batch["x"], batch["noise"], time).mean()


class FlowMatching(OnPaths):  # pairs ends of paths so that the batch's paths are short, and learns the velocity on them
    def of_paths(self, start: Tensor, end: Tensor, time: Tensor) -> Tensor:
        rows, columns = map(torch.as_tensor, linear_sum_assignment(torch.cdist(start, end).square().numpy()))
        start, end = start[rows], end[columns]
        return (self.net(torch.cat([start + time * (end - start), time], 1)) - (end - start)).square().mean()


@real_module("flow matching, transport from noise", dealt(noised), windows=ONE, split=by("net"))
class TransportFromNoise(FlowMatching):  # draws the noise that it pairs with rows, and the times
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["x"]
        return self.of_paths(torch.randn_like(x), x, torch.rand(len(x), 1))


@real_module("flow matching, transport between data", dealt(noised), windows=ONE, split=by("net"))
class TransportBetweenData(FlowMatching):  # both ends are rows of the loader
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.of_paths(batch["noise"], batch["x"], batch["time"])


def ray(generator: Generator) -> dict[str, Tensor]:  # some rays have a depth; more in some batches than in others
    has_depth = torch.rand((), generator=generator) < 0.6
    return {
        "origin": torch.randn(3, generator=generator),
        "direction": F.normalize(torch.randn(3, generator=generator), dim=0),
        "color": torch.rand(3, generator=generator),
        "depth": torch.rand((), generator=generator).where(has_depth, torch.tensor(math.nan)),
        "jitter": torch.rand(6, generator=generator),
    }


@real_module("NeRF, coarse and fine, with depths of some rays", dealt(ray))
class RadianceField(RealModule):  # colors of two renderings are means over rays, and the depth one over the rays that have it
    def build(self) -> None:
        self.coarse, self.fine = mlp(3, 8, 4), mlp(3, 8, 4)

    def render(self, net: nn.Module, batch: dict[str, Tensor], at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = net(batch["origin"][:, None] + at[..., None] * batch["direction"][:, None])
        passed = (-F.softplus(out[..., 3]) * 0.3).exp()
        before = torch.cat([torch.ones_like(passed[:, :1]), passed[:, :-1].cumprod(1)], 1)
        weight = before * (1 - passed)
        return (weight[..., None] * out[..., :3].sigmoid()).sum(1), (weight * at).sum(1), weight

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        at = (torch.arange(6) + batch["jitter"]) / 6
        coarse, _, weight = self.render(self.coarse, batch, at)
        cumulated = (weight.detach() + 0.01).cumsum(1)
        drawn = torch.searchsorted(cumulated / cumulated[:, -1:], at.contiguous()).clamp(max=5)
        fine, depth, _ = self.render(self.fine, batch, torch.cat([at, at.gather(1, drawn) + 0.05], 1).sort(1).values)
        has_depth = ~batch["depth"].isnan()
        of_depth = (depth - batch["depth"])[has_depth].abs().sum() / has_depth.sum().clamp(min=1)
        return F.mse_loss(coarse, batch["color"]) + F.mse_loss(fine, batch["color"]) + 0.1 * of_depth
