"""Reinforcement learning: policies, values, and models of the world."""

import copy

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from real_modules.expected import OFFLOAD, ONE
from real_modules.table import RealModule, Warned, dealt, padded, randint, real_module


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def transition(generator: Generator) -> dict[str, Tensor]:
    return {
        "state": torch.randn(4, generator=generator),
        "action": torch.randint(3, (), generator=generator),
        "reward": torch.randn((), generator=generator),
        "next": torch.randn(4, generator=generator),
        "done": (torch.rand((), generator=generator) < 0.2).float(),
        "old": -torch.rand((), generator=generator) - 0.7,
        "weight": 0.2 + torch.rand((), generator=generator),
        "noise": torch.randn(2, generator=generator),
    }


class Policy(RealModule):  # a policy and a value of states
    def build(self) -> None:
        self.actor, self.critic = mlp(4, 3), mlp(4, 1)

    def of_policy(self, log_p: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        ratio = (log_p - old).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


@real_module("PPO with normalised advantages", dealt(transition), windows=ONE, split=OFFLOAD)
class NormalisedAdvantages(Policy):  # advantages are divided by their standard deviation in the batch
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        value = self.critic(batch["state"])[:, 0]
        advantage = (batch["reward"] - value).detach()
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-2)
        chosen = torch.distributions.Categorical(logits=self.actor(batch["state"]))
        losses = {"policy": self.of_policy(chosen.log_prob(batch["action"]), batch["old"], advantage).mean()}
        losses |= {"value": 0.5 * F.mse_loss(value, batch["reward"]), "entropy": -0.01 * chosen.entropy().mean()}
        self.log_dict(losses, prog_bar=True)
        return sum(losses.values())


def episode(generator: Generator) -> dict[str, Tensor]:
    """Of unequal length; the policy acts in some of its steps, and the last may have been cut off."""
    length = randint(2, 7, generator)
    acts = torch.rand(length, generator=generator) < 0.5
    acts[0] = True
    return {
        "state": torch.randn(length, 4, generator=generator),
        "action": torch.randint(3, (length,), generator=generator),
        "old": -torch.rand(length, generator=generator) - 0.7,
        "advantage": torch.randn(length, generator=generator),
        "reward": torch.randn(length, generator=generator),
        "acts": acts.float(),
        "mask": torch.ones(length),
        "success": (torch.rand((), generator=generator) < 0.5).float(),
    }


@real_module("recurrent PPO, padded episodes", dealt(episode), collate=padded())
class PaddedEpisodes(Policy):  # the policy over steps in which it acts, values over all steps, and success over episodes
    def build(self) -> None:
        super().build()
        self.memory, self.success = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        acts, mask = batch["acts"], batch["mask"]
        hidden = self.memory(batch["state"])[0]
        chosen = torch.distributions.Categorical(logits=self.actor(hidden))
        of_policy = self.of_policy(chosen.log_prob(batch["action"]), batch["old"], batch["advantage"]) - 0.01 * chosen.entropy()
        of_values = (self.critic(hidden)[..., 0] - batch["reward"]).square()
        last = hidden[torch.arange(len(hidden)), mask.sum(1).long() - 1]
        of_success = F.binary_cross_entropy_with_logits(self.success(last)[:, 0], batch["success"])
        return (of_policy * acts).sum() / acts.sum() + 0.5 * (of_values * mask).sum() / mask.sum() + 0.2 * of_success


@real_module("DQN with prioritised replay", dealt(transition))
class DoubleQ(RealModule):
    """Errors are weighted by rows, and the mean is over rows; the target is a copy of every second step's network."""

    def build(self) -> None:
        self.q = mlp(4, 3)
        self.target = copy.deepcopy(self.q).requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        found = self.q(batch["state"]).gather(1, batch["action"][:, None])[:, 0]
        with torch.no_grad():
            best = self.q(batch["next"]).argmax(1, keepdim=True)
            wanted = batch["reward"] + 0.9 * (1 - batch["done"]) * self.target(batch["next"]).gather(1, best)[:, 0]
        return (batch["weight"] * F.smooth_l1_loss(found, wanted, reduction="none")).mean()

    def on_train_batch_start(self, *_: object) -> None:
        if self.global_step % 2 == 0:
            self.target.load_state_dict(self.q.state_dict())


@real_module("returns scaled by running statistics", dealt(transition), windows=Warned("spread"), split=Warned("spread"))
class RunningScale(RealModule):  # rewards are divided by a running spread, which each step moves by what it has seen
    def build(self) -> None:
        self.critic = mlp(4, 1)
        self.register_buffer("spread", torch.ones(()))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.critic(batch["state"])[:, 0], batch["reward"] / self.spread)
        self.spread.lerp_(batch["reward"].square().mean().sqrt(), 0.2)
        return loss


@real_module("soft actor-critic", dealt(transition), optimizers=(None,), windows=ONE, split=OFFLOAD)
class SoftActorCritic(RealModule):
    """Three optimizers in manual optimization; the actor's loss uses the critic that has just stepped."""

    def build(self) -> None:
        self.automatic_optimization = False
        self.actor, self.critic, self.log_alpha = mlp(4, 2), mlp(5, 1), nn.Parameter(torch.tensor(-1.0))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        groups = (self.critic.parameters(), self.actor.parameters(), [self.log_alpha])
        return [torch.optim.SGD(group, 0.05) for group in groups]

    def act(self, state: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_deviation = self.actor(state).chunk(2, 1)
        action = torch.tanh(mean + log_deviation.clamp(-3, 1).exp() * noise)
        return action, -log_deviation - 0.5 * noise.square() - (1 - action.square() + 1e-3).log()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        state, alpha = batch["state"], self.log_alpha.exp().detach()
        with torch.no_grad():
            action, log_p = self.act(batch["next"], batch["noise"][:, :1])
            value = self.critic(torch.cat([batch["next"], action], 1)) - alpha * log_p
            wanted = batch["reward"][:, None] + 0.9 * (1 - batch["done"][:, None]) * value
        taken = batch["action"][:, None].to(state) - 1
        self.take(0, F.mse_loss(self.critic(torch.cat([state, taken], 1)), wanted))
        action, log_p = self.act(state, batch["noise"][:, 1:])
        self.take(1, (alpha * log_p - self.critic(torch.cat([state, action], 1))).mean())
        self.take(2, -(self.log_alpha.exp() * (log_p.detach() - 1)).mean())

    def take(self, index: int, loss: Tensor) -> None:
        optimizer = self.optimizers()[index]
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)


@real_module("world model", dealt(episode), collate=padded())
class WorldModel(RealModule):
    """States over elements, divergences of at least 0.1 over steps, rewards where the policy acted, success over episodes."""

    def build(self) -> None:
        self.posterior, self.prior = nn.Linear(4, 3), nn.Linear(3, 3)
        self.decoder, self.reward, self.success = mlp(3, 4), nn.Linear(3, 1), nn.Linear(3, 1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        mask, acts = batch["mask"], batch["acts"]
        z = self.posterior(batch["state"])
        prior = self.prior(F.pad(z, (0, 0, 1, 0))[:, :-1])
        divergence = 0.5 * (z - prior).square().sum(-1).clamp(min=0.1)
        pooled = (z * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        losses = {
            "state": F.mse_loss(self.decoder(z)[mask.bool()], batch["state"][mask.bool()]),
            "divergence": (divergence * mask).sum() / mask.sum(),
            "reward": ((self.reward(z)[..., 0] - batch["reward"]).square() * acts).sum() / acts.sum(),
            "success": F.binary_cross_entropy_with_logits(self.success(pooled)[:, 0], batch["success"]),
        }
        return {"loss": sum(losses.values()), **{name: loss.detach() for name, loss in losses.items()}}
