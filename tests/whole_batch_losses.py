"""Losses over pairs of rows, or statistics of the batch: no weights add the losses of micro-batches up to that of their batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of two views (rows, 6), classes (rows,) of 0 to 2, and a learned number."""


# fmt: off
def off_diagonal(matrix: Tensor) -> Tensor:
    return matrix - torch.diag(matrix.diagonal())

def clip(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    logits = F.normalize(a) @ F.normalize(b).T * scale.exp()
    rows = torch.arange(len(a))
    return (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, rows)) / 2

def siglip(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    logits = F.normalize(a) @ F.normalize(b).T * scale.exp() - 1
    return -F.logsigmoid(logits * (2 * torch.eye(len(a)) - 1).to(a)).sum() / len(a)

def nt_xent(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    z = F.normalize(torch.cat([a, b]))
    similarity = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -math.inf)
    return F.cross_entropy(similarity, torch.arange(len(z)).roll(len(a)))

def sup_con(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    z, t = F.normalize(torch.cat([a, b])), torch.cat([t, t])
    diagonal = torch.eye(len(z), dtype=torch.bool)
    log_p = F.log_softmax((z @ z.T / 0.3).masked_fill(diagonal, -1e9), dim=1)
    same = (t[:, None] == t) & ~diagonal
    return -((log_p * same).sum(1) / same.sum(1)).mean()

def barlow_twins(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    c = ((a - a.mean(0)) / a.std(0)).T @ ((b - b.mean(0)) / b.std(0)) / len(a)
    return (c.diagonal() - 1).square().sum() + 0.05 * off_diagonal(c).square().sum()

def vicreg(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    spread = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in (a, b))
    covariance = sum(off_diagonal(torch.cov(z.T)).square().sum() / z.shape[1] for z in (a, b))
    return 25 * F.mse_loss(a, b) + 25 * spread + covariance

def mined_triplets(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    distance = torch.cdist(a, b)
    same = t[:, None] == t
    hardest = distance.masked_fill(~same, 0).max(1).values - distance.masked_fill(same, math.inf).min(1).values
    return F.relu(hardest.clamp(min=-50) + 1).mean()

def cox(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    risk = a[:, 0][b[:, 0].detach().argsort(descending=True)]
    return -(risk - risk.logcumsumexp(0)).mean()

def mmd(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return (-(x[:, None] - y).square().sum(-1)).exp().mean()

    return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b) + a.square().mean()

def dice(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    p, target = a[:, :3].softmax(1), F.one_hot(t, 3).to(a)
    return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)

def normalised_advantages(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    advantage = b[:, 0] + t
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return -(a.log_softmax(1)[torch.arange(len(t)), t] * advantage).mean()

def experts_balance(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    gates = a.softmax(1)
    share = F.one_hot(gates.argmax(1), gates.shape[1]).to(a).mean(0)
    return F.cross_entropy(b, t) + gates.shape[1] * (share * gates.mean(0)).sum()

def koleo(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    z = F.normalize(a)
    nearest = (z @ z.T).detach().fill_diagonal_(-2).argmax(1)
    return -((z - z[nearest]).norm(dim=1) + 1e-8).log().mean() + b.square().mean()

def swav(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    def codes(z: Tensor) -> Tensor:
        q = (z.detach() / 0.5).exp().T
        for _ in range(3):
            q = q / q.sum(1, keepdim=True) / q.shape[0]
            q = q / q.sum(0, keepdim=True) / q.shape[1]
        return (q * q.shape[1]).T

    a, b = F.normalize(a), F.normalize(b)
    return -((codes(a) * F.log_softmax(b / 0.1, 1)).sum(1) + (codes(b) * F.log_softmax(a / 0.1, 1)).sum(1)).mean() / 2

def decoupled_contrastive(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    logits = F.normalize(a) @ F.normalize(b).T / 0.2
    negatives = logits.masked_fill(torch.eye(len(a), dtype=torch.bool), -math.inf)
    return (negatives.logsumexp(1) - logits.diagonal()).mean()

def hsic(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    centre = torch.eye(len(a)).to(a) - 1 / len(a)
    return F.cross_entropy(a, t) - (a @ a.T @ centre @ (b @ b.T) @ centre).trace() / (len(a) - 1) ** 2

def r_squared(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    target = t + b[:, 1].detach()
    return (a[:, 0] - target).square().sum() / (target - target.mean()).square().sum()

def pairwise_hinge(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    is_above = (t[:, None] > t).to(a)
    return (F.relu(1 - (a[:, 0, None] - a[:, 0])) * is_above).sum() / is_above.sum()

def proxies_of_batch(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    classes = F.one_hot(t, 3).to(a)
    proxies = classes.T @ b / classes.sum(0)[:, None].clamp(min=1)
    return F.cross_entropy(-torch.cdist(a, proxies) * scale.exp(), t)

def whitening(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    def white(z: Tensor) -> Tensor:
        z = z - z.mean(0)
        factor = torch.linalg.cholesky(z.T @ z / len(z) + torch.eye(z.shape[1]).to(z))
        return F.normalize(torch.linalg.solve_triangular(factor, z.T, upper=False).T)

    return (white(a) - white(b)).square().sum(1).mean()

def pearson(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    x, y = a[:, 0] - a[:, 0].mean(), b[:, 0] - b[:, 0].mean()
    return 1 - (x * y).sum() / (x.norm() * y.norm())

def n_pair(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    similarity = a @ b.T
    return F.softplus(off_diagonal(similarity - similarity.diagonal()[:, None]).logsumexp(1)).mean() + a.square().mean()

def entropy_of_the_mean(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    p = a.softmax(1)
    mean = p.mean(0)
    return -(p * p.log()).sum(1).mean() + (mean * mean.log()).sum()

def optimal_transport(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    plan = -torch.cdist(a, b + scale).square()
    for _ in range(5):
        plan = plan - plan.logsumexp(1, keepdim=True)
        plan = plan - plan.logsumexp(0, keepdim=True)
    return (plan.exp() * torch.cdist(a, b + scale).square()).sum() / len(a) ** 2

LOSSES: dict[str, Loss] = {
    name.replace("_", " "): function
    for name, function in list(globals().items())
    if callable(function) and getattr(function, "__module__", "") == __name__ and name != "off_diagonal"
}
LOSSES |= {
    "simsiam": lambda a, b, t, s:
        -(F.cosine_similarity(a, b.detach()) + F.cosine_similarity(b, a.detach())).mean() / 2 + a.mean(0).square().sum(),
    "rmse": lambda a, b, t, s: (a[:, 0] - t).square().mean().sqrt(),
    "list net": lambda a, b, t, s: -(t.to(a).softmax(0) * a[:, 0].log_softmax(0)).sum(),
    "coral": lambda a, b, t, s: F.cross_entropy(a, t) + (torch.cov(a.T) - torch.cov((b * s).T)).square().sum() / 4,
}
