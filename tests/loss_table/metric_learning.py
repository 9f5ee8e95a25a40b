"""Embeddings: pairs, triplets, views of the same sample; and self-supervised learning."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from loss_table.rows import Table

# fmt: off
table = Table("metric learning")
add, of_batch = table.adds_up, table.batch

def unit(o: Tensor) -> Tensor:
    return F.normalize(o, dim=-1)

def same(t: Tensor) -> Tensor:
    return t[:, None] == t[None]

def clip(a: Tensor, c: Tensor, scale: float = 5.0) -> Tensor:
    logits = scale * unit(a) @ unit(c).T
    places = torch.arange(len(a))
    return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2

# --- every sample is compared with the others of its batch ---
of_batch("CLIP", "x v", lambda o, b, m: clip(o, m(b.v)))
of_batch("CLIP with a learned scale", "x v", lambda o, b, m: clip(o, m(b.v), m.temperature.exp()))
of_batch("all pairs, contrastive", "x t", lambda o, b, m: _pairs(o, b.t).mean())
of_batch("triplets, all of the batch", "x t", lambda o, b, m: _batch_all(o, b.t).mean())
of_batch("cosine of all scores with all targets", "x y", lambda o, b, m: 1 - F.cosine_similarity(o[:, 0], b.y[:, 0], dim=0))
# --- every sample is compared with what belongs to the module ---
add("triplets, mean of those that are violated", "x v z", lambda o, b, m:
    (h := F.relu((o - m(b.v)).norm(dim=1) - (o - m(b.z)).norm(dim=1) + 0.3)).sum() / (h > 0).sum().clamp(min=1))

def _distances(o: Tensor) -> Tensor:
    return ((o[:, None] - o[None]).square().sum(2) + 1e-6).sqrt()

def _pairs(o: Tensor, t: Tensor) -> Tensor:
    return torch.where(same(t), _distances(o).square(), F.relu(2 - _distances(o)).square())

def _batch_all(o: Tensor, t: Tensor) -> Tensor:
    distance = _distances(o)
    all_of_them = distance[:, :, None] - distance[:, None] + 0.5
    is_one = same(t)[:, :, None] & ~same(t)[:, None]
    return F.relu(all_of_them) * is_one + 0.1 * distance[:, :, None]

# === Self-supervised learning: teachers, redundancy, masked reconstruction, prototypes ===
self_supervised = Table("self-supervised")
add, of_batch = self_supervised.adds_up, self_supervised.batch

def standard(o: Tensor) -> Tensor:
    return (o - o.mean(0)) / (o.var(0, correction=0) + 1e-2).sqrt()

add("SimSiam", "x v", lambda o, b, m: -0.5 * (F.cosine_similarity(o, m(b.v).detach()).mean()
    + F.cosine_similarity(m(b.v), o.detach()).mean()))
add("DINO, several crops", "x v z", lambda o, b, m: _crops([o, m(b.v), m(b.z)], [m.teacher(b.x), m.teacher(b.v)], m.center))
of_batch("Barlow Twins", "x v", lambda o, b, m: _barlow(o, m(b.v)))
add("MAE, mean of masked patches", "s y5 chosen", lambda o, b, m: ((o - b.y5).square().mean(-1) * b.chosen).sum() / b.chosen.sum())
add("SimMIM with channels in the divisor", "s y5 chosen", lambda o, b, m:
    (F.l1_loss(o, b.y5, reduction="none") * b.chosen[..., None]).sum() / (b.chosen.to(o).sum() + 1e-5) / 4)
add("CPC within a sequence, by logsumexp", "s y5", lambda o, b, m:
    ((k := o @ b.y5.mT).logsumexp(-1) - k.diagonal(dim1=1, dim2=2)).mean())
add("FixMatch, divided by the confident ones", "x v", lambda o, b, m:
    (F.cross_entropy(o, (y := m.teacher(b.v).softmax(1)).argmax(1), reduction="none") * (k := y.amax(1) > 0.4)).sum()
    / k.sum().clamp(min=1))

def _crops(students: list[Tensor], teachers: list[Tensor], center: Tensor) -> Tensor:
    total, number = 0.0, 0
    for place, teacher in enumerate(teachers):
        target = ((teacher - center) / 0.2).softmax(-1)
        for other, student in enumerate(students):
            if other != place:
                total = total + (-target * student.log_softmax(-1)).sum(-1).mean()
                number += 1
    return total / number

def _barlow(a: Tensor, c: Tensor) -> Tensor:
    correlation = standard(a).T @ standard(c) / len(a)
    on = (correlation.diagonal() - 1).square().sum()
    return on + 0.1 * (correlation - correlation.diag().diag()).square().sum()
