"""Embeddings: pairs, triplets, proxies, views of the same sample; and self-supervised learning."""

import torch
from torch import Tensor
from torch.nn import functional as F

from loss_table.rows import Table

# fmt: off
table = Table("metric learning")
add, of_batch, terms = table.adds_up, table.batch, table.terms

def unit(o: Tensor) -> Tensor:
    return F.normalize(o, dim=-1)

def same(t: Tensor) -> Tensor:
    return t[:, None] == t[None]

def itself(o: Tensor) -> Tensor:
    return torch.eye(len(o), dtype=torch.bool)

def clip(a: Tensor, c: Tensor, scale: float = 5.0) -> Tensor:
    logits = scale * unit(a) @ unit(c).T
    places = torch.arange(len(a))
    return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2

# --- every sample is compared with the others of its batch ---
of_batch("CLIP", "x v", lambda o, b, m: clip(o, m(b.v)))
of_batch("CLIP with a learned scale", "x v", lambda o, b, m: clip(o, m(b.v), m.temperature.exp()))
of_batch("NT-Xent by masked_fill", "x v", lambda o, b, m: _nt_xent_masked(o, m(b.v)).mean())
of_batch("all pairs, contrastive", "x t", lambda o, b, m: _pairs(o, b.t).mean())
of_batch("triplets, all of the batch", "x t", lambda o, b, m: _batch_all(o, b.t).mean())
of_batch("RankNet over the batch", "x y", lambda o, b, m: F.softplus(
    -(o[:, :1] - o[None, :, 0]))[b.y[:, :1] > b.y[None, :, 0]].mean())
of_batch("smooth average precision", "x t", lambda o, b, m: 1 - _smooth_ap(o, b.t))
of_batch("cosine of all scores with all targets", "x y", lambda o, b, m: 1 - F.cosine_similarity(o[:, 0], b.y[:, 0], dim=0))
# --- every sample is compared with what belongs to the module ---
add("proxy NCA without the positive", "x t", lambda o, b, m: _proxy_nca(o, b.t, m.proxies).mean())
add("ArcFace", "x t", lambda o, b, m: F.cross_entropy(_arc(o, b.t, m.proxies), b.t))
add("center loss with learned centers", "x t", lambda o, b, m: F.cross_entropy(o, b.t)
    + 0.1 * (o - m.proxies[b.t]).square().sum(1).mean() / 2)
add("triplets, mean of those that are violated", "x v z", lambda o, b, m:
    (h := F.relu((o - m(b.v)).norm(dim=1) - (o - m(b.z)).norm(dim=1) + 0.3)).sum() / (h > 0).sum().clamp(min=1))
add("Bayesian personalised ranking, decayed", "x v z", lambda o, b, m:
    -F.logsigmoid((o * m(b.v)).sum(1) - (o * m(b.z)).sum(1)).mean() + 1e-2 * (o.square().sum() + m(b.v).square().sum()) / len(o))
add("ListMLE of a row's own items", "x y", lambda o, b, m: (o.gather(1, b.y.argsort(1)).logcumsumexp(1)
    - o.gather(1, b.y.argsort(1))).sum(1).mean())

def _nt_xent_masked(a: Tensor, c: Tensor) -> Tensor:
    views = unit(torch.cat((a, c)))
    similarity = views @ views.T / 0.5
    others = similarity.masked_fill(itself(views), -torch.inf).logsumexp(1)
    return others - (unit(a) * unit(c)).sum(1).repeat(2) / 0.5

def _distances(o: Tensor) -> Tensor:
    return ((o[:, None] - o[None]).square().sum(2) + 1e-6).sqrt()

def _pairs(o: Tensor, t: Tensor) -> Tensor:
    return torch.where(same(t), _distances(o).square(), F.relu(2 - _distances(o)).square())

def _batch_all(o: Tensor, t: Tensor) -> Tensor:
    distance = _distances(o)
    all_of_them = distance[:, :, None] - distance[:, None] + 0.5
    is_one = same(t)[:, :, None] & ~same(t)[:, None]
    return F.relu(all_of_them) * is_one + 0.1 * distance[:, :, None]

def _smooth_ap(o: Tensor, t: Tensor) -> Tensor:
    similarity = unit(o) @ unit(o).T
    above = ((similarity[:, None] - similarity[:, :, None]) / 0.1).sigmoid()
    rank, within = above.sum(2), (above * same(t)[:, None]).sum(2)
    return ((within / rank) * same(t)).sum(1).div(same(t).sum(1)).mean()

def _proxy_nca(o: Tensor, t: Tensor, proxies: Tensor) -> Tensor:
    distance = torch.cdist(unit(o), unit(proxies)).square()
    hot = F.one_hot(t, 4).bool()
    return distance[hot] + (-distance).masked_fill(hot, -torch.inf).logsumexp(1)

def _arc(o: Tensor, t: Tensor, proxies: Tensor) -> Tensor:
    angle = (unit(o) @ unit(proxies).T).clamp(-1 + 1e-7, 1 - 1e-7).acos()
    return 5 * (angle + 0.3 * F.one_hot(t, 4)).cos()

# === Self-supervised learning: teachers, redundancy, masked reconstruction, prototypes ===
self_supervised = Table("self-supervised")
add, of_batch, terms = self_supervised.adds_up, self_supervised.batch, self_supervised.terms

def standard(o: Tensor) -> Tensor:
    return (o - o.mean(0)) / (o.var(0, correction=0) + 1e-2).sqrt()

add("SimSiam", "x v", lambda o, b, m: -0.5 * (F.cosine_similarity(o, m(b.v).detach()).mean()
    + F.cosine_similarity(m(b.v), o.detach()).mean()))
add("DINO, several crops", "x v z", lambda o, b, m: _crops([o, m(b.v), m(b.z)], [m.teacher(b.x), m.teacher(b.v)], m.center))
of_batch("Barlow Twins", "x v", lambda o, b, m: _barlow(o, m(b.v)))
add("MAE, mean of masked patches", "s y5 chosen", lambda o, b, m: ((o - b.y5).square().mean(-1) * b.chosen).sum() / b.chosen.sum())
add("SimMIM with channels in the divisor", "s y5 chosen", lambda o, b, m:
    (F.l1_loss(o, b.y5, reduction="none") * b.chosen[..., None]).sum() / (b.chosen.to(o).sum() + 1e-5) / 4)
add("data2vec", "s chosen", lambda o, b, m: F.smooth_l1_loss(o[b.chosen], m.teacher(b.s)[b.chosen], beta=0.5))
add("CPC within a sequence, by logsumexp", "s y5", lambda o, b, m:
    ((k := o @ b.y5.mT).logsumexp(-1) - k.diagonal(dim1=1, dim2=2)).mean())
add("FixMatch, divided by rows", "x v", lambda o, b, m: (F.cross_entropy(o, (y := m.teacher(b.v).softmax(1)).argmax(1),
    reduction="none") * (y.amax(1) > 0.4)).mean())
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
