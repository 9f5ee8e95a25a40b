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

def barlow_twins(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    c = ((a - a.mean(0)) / a.std(0)).T @ ((b - b.mean(0)) / b.std(0)) / len(a)
    return (c.diagonal() - 1).square().sum() + 0.05 * off_diagonal(c).square().sum()

def vicreg(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    spread = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in (a, b))
    covariance = sum(off_diagonal(torch.cov(z.T)).square().sum() / z.shape[1] for z in (a, b))
    return 25 * F.mse_loss(a, b) + 25 * spread + covariance

def cox(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    risk = a[:, 0][b[:, 0].detach().argsort(descending=True)]
    return -(risk - risk.logcumsumexp(0)).mean()

def normalised_advantages(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    advantage = b[:, 0] + t
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return -(a.log_softmax(1)[torch.arange(len(t)), t] * advantage).mean()

def experts_balance(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    gates = a.softmax(1)
    share = F.one_hot(gates.argmax(1), gates.shape[1]).to(a).mean(0)
    return F.cross_entropy(b, t) + gates.shape[1] * (share * gates.mean(0)).sum()

def proxies_of_batch(a: Tensor, b: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    classes = F.one_hot(t, 3).to(a)
    proxies = classes.T @ b / classes.sum(0)[:, None].clamp(min=1)
    return F.cross_entropy(-torch.cdist(a, proxies) * scale.exp(), t)

LOSSES: dict[str, Loss] = {
    name.replace("_", " "): function
    for name, function in list(globals().items())
    if callable(function) and getattr(function, "__module__", "") == __name__ and name != "off_diagonal"
}
LOSSES |= {
    "simsiam": lambda a, b, t, s:
        -(F.cosine_similarity(a, b.detach()) + F.cosine_similarity(b, a.detach())).mean() / 2 + a.mean(0).square().sum(),
    "rmse": lambda a, b, t, s: (a[:, 0] - t).square().mean().sqrt(),
    "coral": lambda a, b, t, s: F.cross_entropy(a, t) + (torch.cov(a.T) - torch.cov((b * s).T)).square().sum() / 4,
}
