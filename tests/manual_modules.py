"""Modules that optimize by themselves, and batches for them. Nothing in them knows of windows."""

from typing import Any

import lightning.pytorch as pl
import torch
from support import OPTIMIZERS
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from lightning_accum import ModelParallelAccumulationStrategy

F64 = torch.float64


def gan_loss(logits: Tensor) -> Tensor:
    return F.softplus(logits).mean()


class Manual(pl.LightningModule):  # what the modules here share: two networks, two optimizers
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(7)
        self.automatic_optimization, self.optimizer = False, optimizer
        self.build()
        self.to(F64)

    def build(self) -> None:
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelAccumulationStrategy):
            from torch.distributed.fsdp import fully_shard

            for net in (self.generator, self.discriminator):
                fully_shard(net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        return [OPTIMIZERS[self.optimizer](net.parameters()) for net in (self.generator, self.discriminator)]


class GAN(Manual):
    """Both backwards, then both steps. The generator's backward leaves gradients in the discriminator, which zero_grad clears."""

    clip = 0.2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        real, noise = batch
        opt_g, opt_d = self.optimizers()
        fake = self.generator(noise)
        loss_g = gan_loss(-self.discriminator(fake))
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_d.zero_grad()
        self.manual_backward(gan_loss(-self.discriminator(real)))
        self.manual_backward(gan_loss(self.discriminator(fake.detach())))
        if self.clip:
            self.clip_gradients(opt_d, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
        opt_g.step()
        opt_d.step()
        self.log("loss_g", loss_g)
        return loss_g


class Unclipped(GAN):  # Lightning clips no shards
    clip = 0.0


class Toggled(Manual):  # each optimizer's turn in toggle_optimizer; zero_grad after the step
    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch
        opt_g, opt_d = self.optimizers()
        self.toggle_optimizer(opt_g)
        self.manual_backward(gan_loss(-self.discriminator(self.generator(noise))))
        self.untoggle_optimizer(opt_g)
        self.toggle_optimizer(opt_d)
        with torch.no_grad():
            fake = self.generator(noise)
        both = self.discriminator(torch.cat((real, fake))).flatten()
        labels = torch.cat((torch.ones(len(real)), torch.zeros(len(fake)))).to(both)
        self.manual_backward(F.binary_cross_entropy_with_logits(both, labels))
        self.untoggle_optimizer(opt_d)
        for optimizer in (opt_d, opt_g):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


class Closures(Manual):  # steps by closures, each of which runs its own backward. The two networks do not depend on each other.
    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch
        opt_g, opt_d = self.optimizers()

        def closure_g() -> Tensor:
            opt_g.zero_grad()
            loss = self.generator(noise).square().mean()
            self.manual_backward(loss)
            return loss

        def closure_d() -> Tensor:
            opt_d.zero_grad()
            loss = (self.discriminator(real) - 1).abs().mean()
            self.manual_backward(loss)
            return loss

        opt_g.step(closure=closure_g)
        opt_d.step(closure=closure_d)


class MAML(Manual):  # an inner step through which the outer loss is differentiated: a gradient of a gradient
    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        support, query = batch.split((5, 4), dim=1)  # each (tasks, samples, 3): two inputs and a target
        losses = []
        for task_support, task_query in zip(support, query, strict=True):
            weights = dict(self.net.named_parameters())
            for _ in range(2):
                found = functional_call(self.net, weights, (task_support[:, :2],))
                inner = F.mse_loss(found[:, 0], task_support[:, 2])
                gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
                weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
            found = functional_call(self.net, weights, (task_query[:, :2],))
            losses.append((found[:, 0] - task_query[:, 2]).square())
        loss = torch.cat(losses).mean()
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class TwoSchedulers(GAN):  # each optimizer has a scheduler, which the module steps after every step
    def configure_optimizers(self) -> Any:
        optimizers = super().configure_optimizers()
        exponential = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.7)
        return optimizers, [exponential, torch.optim.lr_scheduler.LambdaLR(optimizers[1], lambda step: 1 / (1 + step))]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        return loss


class RawOptimizers(GAN):  # the module's own references to its optimizers, without Lightning's wrapper
    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return super().optimizers(use_pl_optimizer=False)


ALL = [GAN, Toggled, Closures, MAML, TwoSchedulers, RawOptimizers]


class Dependent(Manual):  # the discriminator steps, then the generator's loss is computed with the new discriminator
    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch
        opt_g, opt_d = self.optimizers()
        fake = self.generator(noise)
        opt_d.zero_grad()
        self.manual_backward(gan_loss(-self.discriminator(real)) + gan_loss(self.discriminator(fake.detach())))
        opt_d.step()
        opt_g.zero_grad()
        self.manual_backward(gan_loss(-self.discriminator(fake)))
        opt_g.step()


SIZES = [[3, 1, 4, 2, 2, 5, 1], [2, 2, 6, 1, 3, 1, 4]]  # of the loader batches of two ranks; of windows of 3, the last is a tail


def draw(module: type[Manual], rank: int = 0, seed: int = 3) -> list[list[Any]]:  # the rows of each loader batch of a rank
    generator = torch.Generator().manual_seed(seed + rank)

    def row() -> Any:
        shapes = [(9, 3)] if module is MAML else [(2,), (3,)]
        parts = [torch.randn(*shape, generator=generator, dtype=F64) for shape in shapes]
        return parts[0] if module is MAML else tuple(parts)

    return [[row() for _ in range(size)] for size in SIZES[rank]]
