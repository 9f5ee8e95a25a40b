"""Losses as recent papers and their code have them: detection, metrics, transforms of torch."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics.functional as metrics
from torch import Tensor
from torch.nn import functional as F

from loss_table.rows import Table

# fmt: off
table = Table("papers")
add, of_batch = table.adds_up, table.batch

# --- detection and segmentation ---
add("quality focal by positives", "x q positive", lambda o, b, m: (F.binary_cross_entropy_with_logits(
    o, 0.7 * b.positive.to(o), reduction="none") * (0.7 * b.positive - o.sigmoid()).abs().square()
    ).sum() / b.positive.sum())
add("all anchors and a penalty of theirs by positives", "s chosen", lambda o, b, m: (
    (F.softplus(-o[..., 0]) * b.chosen).sum() + 0.01 * o.square().sum()) / b.chosen.sum().clamp(min=1))
# --- metrics, and transforms of torch ---
add("metric: divergence", "x p", lambda o, b, m: metrics.kl_divergence(b.p, o.softmax(1)))
of_batch("metric: Pearson", "x y", lambda o, b, m: 1 - metrics.pearson_corrcoef(o[:, 0], b.y[:, 0]) if len(o) > 1 else o.mean())
of_batch("metric: R squared", "x y", lambda o, b, m: 1 - metrics.r2_score(o.flatten(), b.y.flatten()))
add("gradients of rows by vmap", "x t", lambda o, b, m: _by_vmap(b, m))
add("a scripted loss", "x t", lambda o, b, m: _scripted(o, b.t))
add("a compiled loss", "x t", lambda o, b, m: _compiled(o, b.t))
add("a function of its own, mean", "x y", lambda o, b, m: _OwnMean.apply(o, b.y))

def _by_vmap(b: Any, m: Any) -> Tensor:
    def energy(x: Tensor) -> Tensor:
        return m(x)[0]

    return torch.func.vmap(torch.func.grad(energy))(b.x).square().sum(1).mean()

@torch.jit.script
def _scripted(o: Tensor, t: Tensor) -> Tensor:
    losses = torch.nn.functional.cross_entropy(o, t, reduction="none")
    return (losses * (t + 1)).sum() / (t + 1).sum()

@torch.compile(backend="eager")
def _compiled(o: Tensor, t: Tensor) -> Tensor:
    return (F.cross_entropy(o, t, reduction="none") * (t + 1)).sum() / (t + 1).sum()

class _OwnMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(o - y)
        return (o - y).square().mean()

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        (difference,) = ctx.saved_tensors
        return 2 * given * difference / difference.numel(), None
