"""Reinforcement learning: policies, values, entropies, offline data; and losses of several terms."""

import torch
from torch import Tensor
from torch.nn import functional as F

from loss_table.rows import Table

# fmt: off
table = Table("reinforcement")
add, of_batch, terms = table.adds_up, table.batch, table.terms

def log_p(o: Tensor, t: Tensor) -> Tensor:
    return o.log_softmax(-1).gather(-1, t[..., None]).squeeze(-1)

def entropy(o: Tensor) -> Tensor:
    return -(o.softmax(-1) * o.log_softmax(-1)).sum(-1)

def clipped(o: Tensor, b, advantage: Tensor) -> Tensor:
    ratio = (log_p(o, b.t) - b.old).exp()
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)

def normalised(advantage: Tensor) -> Tensor:
    return (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-2)

add("REINFORCE, sum", "x t advantage", lambda o, b, m: -(log_p(o, b.t) * b.advantage).sum())
add("REINFORCE, sum of stacked losses", "x t advantage", lambda o, b, m:
    torch.stack([-a * p for a, p in zip(b.advantage, log_p(o, b.t), strict=True)]).sum())
of_batch("REINFORCE with the batch's mean as baseline", "x t reward", lambda o, b, m:
    -(log_p(o, b.t) * (b.reward - b.reward.mean())).mean())
of_batch("REINFORCE, advantages normalised", "x t advantage", lambda o, b, m: -(log_p(o, b.t) * normalised(b.advantage)).mean())
add("PPO with values and entropy", "x t old advantage reward", lambda o, b, m: clipped(o, b, b.advantage).mean()
    + 0.5 * F.mse_loss(o[:, 0], b.reward) - 0.01 * entropy(o).mean())
add("PPO with a KL penalty", "x t old advantage", lambda o, b, m: -((log_p(o, b.t) - b.old).exp() * b.advantage).mean()
    + 0.2 * F.kl_div(o.log_softmax(1), m.teacher(b.x).softmax(1), reduction="batchmean"))
add("PPO with a KL estimate", "x t old advantage", lambda o, b, m: clipped(o, b, b.advantage).mean()
    + 0.1 * (b.old - log_p(o, b.t)).mean())
add("PPO over valid steps by selection", "s words valid y5", lambda o, b, m: (-log_p(o, b.words) * b.y5[..., 0])[b.valid].mean())
add("GRPO by a constant length", "s words valid advantage", lambda o, b, m:
    ((-log_p(o, b.words) * b.advantage[:, None]) * b.valid).sum() / (len(o) * 5))
add("A2C", "x t reward", lambda o, b, m: -(log_p(o, b.t) * (b.reward - o[:, 0]).detach()).mean()
    + 0.5 * (b.reward - o[:, 0]).pow(2).mean() - 0.01 * entropy(o).mean())
add("A2C, sums", "x t reward", lambda o, b, m: -(log_p(o, b.t) * (b.reward - o[:, 0]).detach()).sum()
    + 0.5 * (b.reward - o[:, 0]).pow(2).sum())
add("Gaussian policy", "x y advantage", lambda o, b, m: -(torch.distributions.Normal(o,
    m.log_scales.exp().sum()).log_prob(b.y).sum(1) * b.advantage).mean())
add("QR-DQN, sum over quantiles first", "x y", lambda o, b, m: _quantile_huber(o, b.y).sum((1, 2)).mean())
add("soft actor-critic, temperature", "x", lambda o, b, m: -(m.temperature * (o.log_softmax(1).amax(1) + 1.0).detach()).mean()
    + 0 * o.sum())
add("TD3", "x v reward", lambda o, b, m: F.mse_loss(o[:, 0], b.reward + 0.9 * m.teacher(b.v)[:, :2].amin(1))
    + F.mse_loss(o[:, 1], b.reward + 0.9 * m.teacher(b.v)[:, :2].amin(1)))
add("DDPG, policy", "x", lambda o, b, m: -m.teacher(o.tanh())[:, 0].mean())
terms("TD3 with behaviour cloning", "x y", lambda o, b, m: -(q := m.teacher(o)[:, 0]).mean() * 2.5 / q.abs().mean().detach()
    + F.mse_loss(o, b.y))
add("conservative Q-learning", "x t reward", lambda o, b, m: (o.logsumexp(1) - o.gather(1, b.t[:, None])[:, 0]).mean()
    + 0.5 * F.mse_loss(o.gather(1, b.t[:, None])[:, 0], b.reward))
add("decision transformer", "s y5 valid", lambda o, b, m: F.mse_loss(o[b.valid], b.y5[b.valid]))
add("time first, sum over time", "s y5 words", lambda o, b, m: -(log_p(o, b.words) * b.y5[..., 0]).T.sum(0).mean())
add("curiosity", "x v y", lambda o, b, m: 0.5 * (o - m.teacher(b.v)).pow(2).sum(1).mean() + 0.2 * F.mse_loss(m(b.v), b.y))
add("reward model of ranked answers", "s", lambda o, b, m: -F.logsigmoid(o[..., 0][:, :, None] - o[..., 0][:, None])[:,
    torch.ones(5, 5).triu(1).bool()].mean())
add("GAIL", "x v", lambda o, b, m: F.binary_cross_entropy_with_logits(o[:, 0], torch.ones(len(o)).to(o))
    + F.binary_cross_entropy_with_logits(m(b.v)[:, 0], torch.zeros(len(o)).to(o)))
add("world model with KL balancing", "x p", lambda o, b, m: 0.8 * _kl(m.teacher(b.x).softmax(1), o).mean()
    + 0.2 * (b.p * (b.p.log() - o.log_softmax(1))).sum(1).clamp(min=0.1).mean())

def _quantile_huber(o: Tensor, y: Tensor) -> Tensor:
    difference = y[:, None] - o[:, :, None]
    level = ((torch.arange(4) + 0.5) / 4).to(o)[None, :, None]
    return (level - (difference < 0).double()).abs() * F.huber_loss(
        o[:, :, None].expand_as(difference), y[:, None].expand_as(difference), reduction="none"
    )

def _kl(p: Tensor, o: Tensor) -> Tensor:
    return (p * (p.log() - o.log_softmax(1))).sum(1)

# === Several terms: with one weight, with several, with learned scales, in lists ===
multi_task = Table("multi-task")
add, of_batch, of_mean, terms = multi_task.adds_up, multi_task.batch, multi_task.of_a_mean, multi_task.terms

def ce(o: Tensor, b) -> Tensor:
    return F.cross_entropy(o, b.t)

def mse(o: Tensor, b) -> Tensor:
    return F.mse_loss(o, b.y)

def ignored(o: Tensor, b) -> Tensor:
    return F.cross_entropy(o, b.ignored)

# --- terms that share a weight: rows, and elements of rows ---
add("stacked and averaged", "x t y", lambda o, b, m: torch.stack([ce(o, b), mse(o, b), F.l1_loss(o, b.y)]).mean())
add("stacked, product with weights", "x t y", lambda o, b, m:
    torch.stack([ce(o, b), mse(o, b)]) @ torch.tensor([0.7, 0.3], dtype=torch.float64))
add("a list and sum()", "x t y", lambda o, b, m: sum([ce(o, b), mse(o, b), 0.2 * F.huber_loss(o, b.y)]))
add("a list and its length", "x t y", lambda o, b, m: sum(losses := [ce(o, b), mse(o, b)]) / len(losses))
add("a dictionary that is returned", "x t y", lambda o, b, m: {"loss": ce(o, b) + mse(o, b), "error": mse(o, b).detach()})
add("added in place", "x t y", lambda o, b, m: ce(o, b).add_(mse(o, b), alpha=0.5))
add("torch.addcmul", "x t y", lambda o, b, m: torch.addcmul(ce(o, b), mse(o, b), torch.tensor(0.3, dtype=torch.float64)))
add("one task a column, weighed", "x y", lambda o, b, m: ((o - b.y).square().mean(0) * torch.tensor([1, 2, 3, 4])).sum())
add("one task a column, product with weights", "x y", lambda o, b, m:
    (o - b.y).square().mean(0) @ torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
add("one task a column, a loop", "x y", lambda o, b, m: sum(F.mse_loss(o[:, k], b.y[:, k]) for k in range(4)))
add("one task a column, binary", "x q", lambda o, b, m: sum(F.binary_cross_entropy_with_logits(o[:, k], b.q[:, k])
    for k in range(4)) / 4)
terms("one task a column, missing labels of each", "x q positive", lambda o, b, m:
    ((F.binary_cross_entropy_with_logits(o, b.q, reduction="none") * b.positive).sum(0) / b.positive.sum(0).clamp(min=1)).sum())
terms("one task a column, missing labels in a loop", "x q positive", lambda o, b, m:
    sum((F.binary_cross_entropy_with_logits(o[:, k], b.q[:, k], reduction="none") * b.positive[:, k]).sum()
    / b.positive[:, k].sum().clamp(min=1) for k in range(3)))
add("exits that grow in weight", "x t", lambda o, b, m: sum((k + 1) / 6 * F.cross_entropy(o * (k + 1), b.t) for k in range(3)))
add("consistency of two heads", "x t v", lambda o, b, m: ce(o, b)
    + F.kl_div(o.log_softmax(1), m(b.v).softmax(1), reduction="batchmean"))
add("a sum of sums", "x t y", lambda o, b, m: F.cross_entropy(o, b.t, reduction="sum") + F.mse_loss(o, b.y, reduction="sum"))
add("a sum of sums over rows", "x t y", lambda o, b, m: (F.cross_entropy(o, b.t, reduction="sum")
    + F.mse_loss(o, b.y, reduction="sum")) / len(b.x))
# --- terms with weights of their own ---
terms("rows and ignored labels", "x ignored y", lambda o, b, m: 0.1 * mse(o, b) + ignored(o, b))
terms("ignored labels and a masked mean", "x ignored y mask", lambda o, b, m: ignored(o, b)
    + ((o - b.y).square().mean(1) * b.mask).sum() / b.mask.sum().clamp(min=1))
terms("two masked means", "x y mask positive", lambda o, b, m:
    ((o - b.y).square().mean(1) * b.mask).sum() / b.mask.sum().clamp(min=1)
    + ((o - b.y).abs() * b.positive).sum() / b.positive.sum().clamp(min=1))
terms("three weights", "x t ignored y positive", lambda o, b, m: ce(o, b) + ignored(o, b)
    + ((o - b.y).abs() * b.positive).sum() / b.positive.sum().clamp(min=1))
terms("weights of samples and rows", "x t y w", lambda o, b, m: ce(o, b) + (b.w * (o - b.y).square().mean(1)).sum() / b.w.sum())
terms("a mean beside a sum", "x t y", lambda o, b, m: ce(o, b) + 1e-2 * F.mse_loss(o, b.y, reduction="sum"))
# --- parameters in the loss ---
add("a penalty on parameters", "x t", lambda o, b, m: ce(o, b)
    + 1e-2 * sum(p.square().sum() for p in m.parameters() if p.requires_grad))
add("a penalty on parameters, mean of absolutes", "x t", lambda o, b, m: ce(o, b) + m.proxies.abs().mean())
add("a penalty on orthogonality", "x t", lambda o, b, m: ce(o, b) + (m.proxies @ m.proxies.T - torch.eye(4)).square().mean())
add("a penalty on parameters with ignored labels", "x ignored", lambda o, b, m: ignored(o, b) + m.proxies.square().mean())
add("elastic weights", "x t", lambda o, b, m: ce(o, b) + 10 * (m.queue[:4].square() * (m.proxies - m.queue[:4]).square()).sum())
add("learned scales by their logarithms", "x t y", lambda o, b, m: (-m.log_scales[0]).exp() * ce(o, b) + m.log_scales[0]
    + (-m.log_scales[1]).exp() * mse(o, b) + m.log_scales[1])
add("learned scales by precision, halved", "x t y", lambda o, b, m: 0.5 * (-m.log_scales[0]).exp() * mse(o, b)
    + 0.5 * m.log_scales[0] + (-m.log_scales[1]).exp() * ce(o, b))
add("learned scales that divide", "x t y", lambda o, b, m: mse(o, b) / (2 * m.temperature**2) + m.temperature.log()
    + ce(o, b) / m.temperature)
add("learned scales that divide by exp", "x t y", lambda o, b, m: ce(o, b) / m.log_scales[0].exp()
    + mse(o, b) / (2 * m.log_scales[1].exp()) + m.log_scales.sum() / 2)
add("learned scales, a product of vectors", "x t y", lambda o, b, m:
    ((-m.log_scales).exp() * torch.stack([ce(o, b), mse(o, b)]) + m.log_scales).sum())
add("learned scales, log(1 + s^2)", "x t y", lambda o, b, m: ce(o, b) / m.temperature**2 + mse(o, b) / m.bias**2
    + (1 + m.temperature**2).log() + (1 + m.bias**2).log())
add("learned scales of columns' means", "x y", lambda o, b, m:
    ((o - b.y).square().mean(0) * m.proxies[0].exp() - m.proxies[0]).sum())
add("a learned factor of the whole loss", "x t", lambda o, b, m: m.temperature * ce(o, b))
add("a learned softmax of tasks", "x t y", lambda o, b, m: (m.log_scales.softmax(0) * torch.stack([ce(o, b), mse(o, b)])).sum())
add("a learned offset", "x t", lambda o, b, m: ce(o, b) + m.bias)
add("learned scales with ignored labels", "x ignored", lambda o, b, m: (-m.log_scales[0]).exp() * ignored(o, b) + m.log_scales[0])
# --- terms by each other ---
of_mean("a product of losses", "x t y", lambda o, b, m: ce(o, b) * mse(o, b))
of_mean("a quotient of losses", "x t y", lambda o, b, m: ce(o, b) / (1 + mse(o, b)))
of_mean("the larger of two losses", "x t y", lambda o, b, m: torch.maximum(ce(o, b), mse(o, b)))
of_mean("a geometric mean of losses", "x t y", lambda o, b, m: (ce(o, b) * mse(o, b)).sqrt())
add("a loss over itself, detached", "x t", lambda o, b, m: (c := ce(o, b)) / c.detach())
of_batch("losses of like size, detached", "x t y", lambda o, b, m: ce(o, b) + mse(o, b) * (ce(o, b) / mse(o, b)).detach())
of_batch("weights by losses, softmax, detached", "x t y", lambda o, b, m:
    ((s := torch.stack([ce(o, b), mse(o, b)])).detach().softmax(0) * s).sum())
of_batch("a weight by the batch's accuracy", "x t", lambda o, b, m: (2 - (o.argmax(1) == b.t).double().mean()) * ce(o, b))
of_batch("a weight by the batch's largest label", "x t y", lambda o, b, m: ce(o, b) + float(1 + b.t.max()) * mse(o, b))
of_batch("a term from three rows on", "x t", lambda o, b, m: ce(o, b) + (o.square().mean() if len(o) >= 3 else 0.0))
of_batch("a penalty only where the batch has a label", "x t", lambda o, b, m: ce(o, b)
    + (m.proxies.square().sum() if 3 in b.t else 0.0))
of_batch("a sign by the batch's error, detached", "x t y", lambda o, b, m: ce(o, b) * torch.sign(mse(o, b).detach() - 1))
of_batch("adaptive scale of a discriminator's gradient", "x y v", lambda o, b, m: mse(o, b)
    - (mse(o, b).detach() / m(b.v).mean().detach().abs().add(0.1)) * m(b.v).mean())
