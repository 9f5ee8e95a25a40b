"""Losses that do not add up, but look on few rows as if they did: what a batch of 24 or 96 rows does, 8 rows do not show."""

import math
from collections.abc import Callable
from typing import Any

import torch
from loss_table.rows import Batch, Function, Kind, Loss
from torch import Tensor
from torch.nn import functional as F

D = torch.float64
ROWS, MICRO_BATCH = 96, 24


def data(seed: int) -> Batch:
    """96 rows: inputs, targets, a class, an importance, a reward, whether it is positive, and a sentence's length."""
    g = torch.Generator().manual_seed(seed)
    x, y, r = (torch.randn(ROWS, width, generator=g, dtype=D) for width in (4, 4, 1))
    return {
        "x": x, "y": y, "r": r[:, 0], "t": torch.randint(0, 4, (ROWS,), generator=g), "w": torch.rand(ROWS, generator=g, dtype=D),
        "positive": torch.rand(ROWS, generator=g) < 0.4, "rare": torch.rand(ROWS, generator=g) < 0.03,
        "valid": torch.arange(5) < torch.randint(1, 6, (ROWS, 1), generator=g),
    }  # fmt: skip


# fmt: off
def each(o: Tensor, b: Any) -> Tensor:
    return (o - b.y).square().sum(1)
def ce(o: Tensor, b: Any, **kwargs: Any) -> Tensor:
    return F.cross_entropy(o, b.t, **kwargs)

def of(function: Callable[[Tensor], Tensor]) -> Function:  # of the losses of the rows
    return lambda o, b, m: function(each(o, b))

def beyond(rows: int, function: Callable[[Tensor, Any], Tensor]) -> Function:  # a term that small batches do not have
    return lambda o, b, m: each(o, b).mean() + (function(o, b) if len(o) > rows else 0.0)

def covariance(z: Tensor) -> Tensor:
    c = torch.cov(z.T)
    return (c - torch.diag(c.diagonal())).square().sum()

def hardest(losses: Tensor, least: int, share: float) -> Tensor:
    return losses.topk(min(len(losses), max(least, int(share * len(losses))))).values.mean()

def negatives(o: Tensor, b: Any, ratio: int, least: int) -> Tensor:
    losses, is_positive = F.binary_cross_entropy_with_logits(o[:, 0], b.positive.to(D), reduction="none"), b.positive
    number = max(ratio * int(is_positive.sum()), least)
    kept = losses[~is_positive].topk(min(number, int((~is_positive).sum()))).values
    return (losses[is_positive].sum() + kept.sum()) / len(losses)

def balanced(o: Tensor, b: Any) -> Tensor:
    return (ce(o, b, reduction="none") / torch.bincount(b.t, minlength=4).to(D)[b.t]).mean()

def alike(o: Tensor, b: Any) -> Tensor:  # two terms made by the same operations; either may be absent
    loss = ce(o, b)
    for column, chosen in enumerate((b.rare, b.w > 0.95)):
        if chosen.any():
            loss = loss + (1 + 4 * column) * (o - b.y).square()[chosen].mean()
    return loss

def standardised(values: Tensor, least: int) -> Tensor:
    return (values - values.mean()) / (values.std() + 1e-8) if len(values) >= least else values

def contrastive(z: Tensor, first: int) -> Tensor:  # against the rows of the batch from ``first`` on, and against fixed ones
    z = F.normalize(z)
    logits = torch.cat([z @ torch.eye(4, dtype=D), z @ z[first:].T], 1) / 0.3
    return F.cross_entropy(logits, torch.zeros(len(z), dtype=torch.long))

def running(o: Tensor, b: Any, m: Any) -> Tensor:
    with torch.no_grad():
        m.center.lerp_(o.mean(0), 0.1)
    return (o - m.center).square().mean() + each(o, b).mean()

def neighbours(o: Tensor, b: Any) -> Tensor:
    return o[b.r.argsort()].diff(dim=0).square().mean()
def padded(losses: Tensor, to: int) -> Tensor:
    return F.pad(losses, (0, -len(losses) % to))

FUNCTIONS: dict[str, Function] = {
    # --- selected by what the batch is ---
    "trimmed mean": of(lambda c: c.sort().values[: len(c) - len(c) // 20].mean()),
    "top 16": of(lambda c: c.topk(min(16, len(c))).values.mean()),
    "hard examples, a quarter and at least 8": of(lambda c: hardest(c, 8, 0.25)),
    "hard negatives, at least 10": lambda o, b, m: negatives(o, b, 1, 10),
    "without the largest of more than 8": of(lambda c: (c.sum() - c.max()) / (len(c) - 1) if len(c) > 8 else c.mean()),
    # --- by the number of rows ---
    "if there are 16 rows, a covariance": beyond(15, lambda o, b: covariance(o)),
    "if there are more than 8, pairs of neighbours": beyond(8, neighbours),
    "if there are more than 8, the first is an anchor": beyond(8, lambda o, b: (o - o[:1]).square().mean()),
    "over at least 6 positives": lambda o, b, m: (each(o, b) * b.positive).sum() / b.positive.sum().clamp(min=6),
    "over the root of the rows beyond 16": of(lambda c: c.sum() / (len(c) if len(c) <= 16 else 4 * len(c) ** 0.5)),
    "without what is more than a multiple of 16": of(lambda c: c[: len(c) - len(c) % 16].mean() if len(c) >= 16 else c.mean()),
    "a mean of means of 16": of(lambda c: torch.stack([part.mean() for part in c.split(16)]).mean()),
    "temperature of the number": lambda o, b, m: F.cross_entropy(o * math.log(max(len(o), 8)), b.t),
    # --- statistics of the batch ---
    "targets standardised from 16 on": lambda o, b, m: (o[:, 0] - standardised(b.r, 16)).square().mean(),
    "importances over their largest": lambda o, b, m: (each(o, b) * b.w).mean() / b.w.max(),
    "the mean, at most 5": of(lambda c: c.mean().clamp(max=5)),
    "a sign by the batch's reward": lambda o, b, m: each(o, b).mean() * b.r.mean().sign(),
    "a factor of the batch's reward": lambda o, b, m: each(o, b).mean() * b.r.mean().exp(),
    "a covariance shrunk by the number": lambda o, b, m: each(o, b).mean() + max(0, 1 - 8 / len(o)) * covariance(o),
    "a running mean in a buffer": running,
    "targets from 0 to 1": lambda o, b, m: F.mse_loss(o[:, 0], (b.r - b.r.min()) / (b.r.max() - b.r.min())),
    "distances of means of columns": lambda o, b, m: F.l1_loss(o.softmax(-1).mean(0), torch.eye(4, dtype=D)[0]),
    "the largest mean of a column": lambda o, b, m: (o - 9 * torch.arange(4)).square().mean(0).max(),
    # --- pairs, classes, chance ---
    "negatives of the batch beyond 16": lambda o, b, m: contrastive(o, 16),
    "random pairs": lambda o, b, m: (o - o[torch.randperm(len(o))]).square().mean() + each(o, b).mean(),
    "mixed with the last row first": lambda o, b, m: 0.8 * F.mse_loss(o, b.y) + 0.2 * F.mse_loss(o, b.y.flip(0)),
    "a factor by chance": lambda o, b, m: each(o, b).mean() * torch.rand((), dtype=D),
    "classes balanced by their counts": lambda o, b, m: balanced(o, b),
    "two terms that look alike, each if it is there": lambda o, b, m: alike(o, b),
    "only if the mean is above 5": lambda o, b, m: ce(o, b) + (each(o, b).mean() if each(o, b).mean() > 5 else 0.0),
}
UNSEEN: dict[str, Function] = {  # no micro-batch of 24 shows it, and only who runs the whole batch can know
    "the smallest 30": of(lambda c: c.sort().values[:30].mean()),
    "if there are more than 24, a factor": lambda o, b, m: each(o, b).mean() * (1.1 if len(o) > 24 else 1.0),
    "if there are more than 24, another loss": lambda o, b, m: each(o, b).mean() if len(o) <= 24 else F.l1_loss(o, b.y),
    "over at least 40 rows": of(lambda c: c.sum() / max(len(c), 40)),
    "over at most 32 rows": of(lambda c: c.sum() / min(len(c), 32)),
    "padded to a multiple of 32": of(lambda c: padded(c, 32).mean()),
    "the first 50": of(lambda c: c[:50].mean()),
}


def table(functions: dict[str, Function]) -> list[Loss]:
    return [Loss(name, "adversarial", function, ("x",), Kind.BATCH, limit=1e-10) for name, function in functions.items()]


LOSSES, LOSSES_UNSEEN = table(FUNCTIONS), table(UNSEEN)
