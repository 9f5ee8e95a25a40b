"""Self-supervised learning: teachers, redundancy, masked reconstruction, prototypes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from loss_table.rows import Table

# fmt: off
table = Table("self-supervised")
add, of_batch, terms = table.adds_up, table.batch, table.terms

def unit(o: Tensor) -> Tensor:
    return F.normalize(o, dim=-1)

def standard(o: Tensor) -> Tensor:
    return (o - o.mean(0)) / (o.var(0, correction=0) + 1e-2).sqrt()

add("BYOL", "x v", lambda o, b, m: 2 - 2 * (unit(o) * unit(m.teacher(b.v))).sum(-1).mean())
add("BYOL in both directions", "x v", lambda o, b, m: (2 - 2 * (unit(o) * unit(m.teacher(b.v))).sum(-1)).mean()
    + (2 - 2 * (unit(m(b.v)) * unit(m.teacher(b.x))).sum(-1)).mean())
add("SimSiam", "x v", lambda o, b, m: -0.5 * (F.cosine_similarity(o, m(b.v).detach()).mean()
    + F.cosine_similarity(m(b.v), o.detach()).mean()))
add("SimSiam, mean of a sum", "x v", lambda o, b, m: -(F.cosine_similarity(o, m(b.v).detach())
    + F.cosine_similarity(m(b.v), o.detach())).mean() / 2)
add("DINO with a center", "x v", lambda o, b, m: -(((m.teacher(b.v) - m.center) / 0.1).softmax(-1)
    * (o / 0.3).log_softmax(-1)).sum(-1).mean())
add("DINO, several crops", "x v z", lambda o, b, m: _crops([o, m(b.v), m(b.z)], [m.teacher(b.x), m.teacher(b.v)], m.center))
of_batch("DINO with the batch's own center", "x v", lambda o, b, m:
    -((((y := m.teacher(b.v)) - y.mean(0)) / 0.1).softmax(-1) * o.log_softmax(-1)).sum(-1).mean())
of_batch("DINO with Sinkhorn", "x v", lambda o, b, m: -(_sinkhorn(m.teacher(b.v)) * o.log_softmax(-1)).sum(-1).mean())
of_batch("SwAV", "x v", lambda o, b, m: -(_sinkhorn((m(b.v) @ m.proxies.T).detach()) * (o @ m.proxies.T).log_softmax(1)).sum(
    1).mean())
of_batch("Barlow Twins", "x v", lambda o, b, m: _barlow(o, m(b.v)))
of_batch("Barlow Twins by cross covariance of raw features", "x v", lambda o, b, m:
    ((o.T @ m(b.v)) / len(o) - torch.eye(4)).square().sum())
of_batch("VICReg", "x v", lambda o, b, m: _vicreg(o, m(b.v)))
of_batch("VICReg's variance alone", "x", lambda o, b, m: F.relu(2 - (o.var(0, correction=0) + 1e-4).sqrt()).mean())
of_batch("VICReg's covariance alone", "x", lambda o, b, m: _covariance(o))
of_batch("W-MSE by standardised views", "x v", lambda o, b, m: F.mse_loss(standard(o), standard(m(b.v))))
of_batch("mean entropy of the batch's clusters", "x v", lambda o, b, m:
    -(m.teacher(b.v).softmax(1) * o.log_softmax(1)).sum(1).mean() + ((p := o.softmax(1).mean(0)) * p.log()).sum())
of_batch("invariant information clustering", "x v", lambda o, b, m: _iic(o, m(b.v)))
of_batch("maximal coding rate", "x", lambda o, b, m: -torch.logdet(torch.eye(4) + 2 / len(o) * unit(o).T @ unit(o)))
of_batch("t-ReX", "x v", lambda o, b, m: (standard(o) * standard(m(b.v))).mean().neg())
of_batch("momentum center in the step", "x v", lambda o, b, m:
    F.cross_entropy(o - 0.5 * o.mean(0).detach(), m.teacher(b.v).softmax(1)))
of_batch("deep clustering by soft frequencies", "x", lambda o, b, m: _deep_clustering(o, m.proxies))
of_batch("relative to the batch's others", "x v", lambda o, b, m:
    F.kl_div((m(b.v) @ o.T).log_softmax(1), (m.teacher(b.x) @ m.teacher(b.x).T).softmax(1), reduction="batchmean"))
add("ReSSL over a queue", "x v", lambda o, b, m: -((unit(m.teacher(b.v)) @ m.queue.T / 0.1).softmax(1)
    * (unit(o) @ m.queue.T / 0.2).log_softmax(1)).sum(1).mean())
add("MSN without its regulariser", "x v", lambda o, b, m: F.cross_entropy(o @ m.proxies.T,
    (m.teacher(b.v) @ m.proxies.T * 4).softmax(1).detach()))
add("MAE, mean of masked patches", "s y5 chosen", lambda o, b, m: ((o - b.y5).square().mean(-1) * b.chosen).sum() / b.chosen.sum())
add("MAE by selection", "s y5 chosen", lambda o, b, m: (o - b.y5).square().mean(-1)[b.chosen].mean())
add("MAE with patches that are normalised", "s y5 chosen", lambda o, b, m:
    ((o - (b.y5 - b.y5.mean(-1, keepdim=True)) / b.y5.std(-1, keepdim=True)).square().mean(-1) * b.chosen).sum() / b.chosen.sum())
add("SimMIM with channels in the divisor", "s y5 chosen", lambda o, b, m:
    (F.l1_loss(o, b.y5, reduction="none") * b.chosen[..., None]).sum() / (b.chosen.to(o).sum() + 1e-5) / 4)
add("BEiT", "s words chosen", lambda o, b, m: F.cross_entropy(o[b.chosen], b.words[b.chosen]))
add("data2vec", "s chosen", lambda o, b, m: F.smooth_l1_loss(o[b.chosen], m.teacher(b.s)[b.chosen], beta=0.5))
add("iBOT by each image's number of patches", "s y5 chosen", lambda o, b, m:
    (-(b.y5.softmax(-1) * o.log_softmax(-1)).sum(-1) * b.chosen).sum(-1).div(b.chosen.sum(-1).clamp(min=1)).mean())
add("JEPA", "s v", lambda o, b, m: F.smooth_l1_loss(o.mean(1), m.teacher(b.v)))
add("wav2vec with distractors of its own sequence", "s y5", lambda o, b, m:
    F.cross_entropy((o @ b.y5.mT).flatten(0, 1), torch.arange(5).repeat(len(o))))
add("CPC within a sequence, by logsumexp", "s y5", lambda o, b, m:
    ((k := o @ b.y5.mT).logsumexp(-1) - k.diagonal(dim1=1, dim2=2)).mean())
of_batch("CPC, negatives of other sequences", "s y5", lambda o, b, m: F.cross_entropy(o[:, 2] @ b.y5[:, 4].T, torch.arange(len(o))))
add("rotation of images", "x words", lambda o, b, m: F.cross_entropy(o, b.words[:, 0]))
add("order of two patches", "s sign", lambda o, b, m: F.soft_margin_loss(o[:, 0, 0] - o[:, 1, 0], b.sign))
add("colours by bins", "i masks", lambda o, b, m: F.cross_entropy(o, b.masks.mul(2).softmax(1)))
add("mean teacher of probabilities", "x v", lambda o, b, m: F.mse_loss(o.softmax(1), m.teacher(b.v).softmax(1)))
add("FixMatch, divided by rows", "x v", lambda o, b, m: (F.cross_entropy(o, (y := m.teacher(b.v).softmax(1)).argmax(1),
    reduction="none") * (y.amax(1) > 0.4)).mean())
add("FixMatch, divided by the confident ones", "x v", lambda o, b, m:
    (F.cross_entropy(o, (y := m.teacher(b.v).softmax(1)).argmax(1), reduction="none") * (k := y.amax(1) > 0.4)).sum()
    / k.sum().clamp(min=1))
add("entropy minimisation", "x", lambda o, b, m: -(o.softmax(1) * o.log_softmax(1)).sum(1).mean())
add("virtual adversarial by a fixed direction", "x v", lambda o, b, m:
    F.kl_div(m(b.x + 0.1 * b.v).log_softmax(1), o.softmax(1).detach(), reduction="batchmean"))
terms("labelled by ignored labels and unlabelled by rows", "x ignored v", lambda o, b, m: F.cross_entropy(o, b.ignored)
    + F.mse_loss(o.softmax(1), m(b.v).softmax(1)))

def _crops(students: list[Tensor], teachers: list[Tensor], center: Tensor) -> Tensor:
    total, number = 0.0, 0
    for place, teacher in enumerate(teachers):
        target = ((teacher - center) / 0.2).softmax(-1)
        for other, student in enumerate(students):
            if other != place:
                total = total + (-target * student.log_softmax(-1)).sum(-1).mean()
                number += 1
    return total / number

def _sinkhorn(scores: Tensor) -> Tensor:
    q = (scores / 0.5).exp()
    for _ in range(3):
        q = q / q.sum(0, keepdim=True)
        q = q / q.sum(1, keepdim=True)
    return q

def _barlow(a: Tensor, c: Tensor) -> Tensor:
    correlation = standard(a).T @ standard(c) / len(a)
    on = (correlation.diagonal() - 1).square().sum()
    return on + 0.1 * (correlation - correlation.diag().diag()).square().sum()

def _covariance(o: Tensor) -> Tensor:
    centred = o - o.mean(0)
    covariance = centred.T @ centred / len(o)
    return (covariance - covariance.diag().diag()).square().sum() / 4 + 0.1 * covariance.diagonal().sub(1).square().mean()

def _vicreg(a: Tensor, c: Tensor) -> Tensor:
    spread = sum(F.relu(2 - (view.var(0, correction=0) + 1e-4).sqrt()).mean() for view in (a, c))
    return 25 * F.mse_loss(a, c) + 25 * spread + _covariance(a) + _covariance(c)

def _iic(a: Tensor, c: Tensor) -> Tensor:
    joint = a.softmax(1).T @ c.softmax(1) / len(a)
    joint = (joint + joint.T) / 2
    return (joint * (joint.sum(0).log() + joint.sum(1, keepdim=True).log() - joint.log())).sum()

def _deep_clustering(o: Tensor, centers: Tensor) -> Tensor:
    q = 1 / (1 + torch.cdist(o, centers).square())
    q = q / q.sum(1, keepdim=True)
    sharp = q**2 / q.sum(0)
    return F.kl_div(q.log(), (sharp / sharp.sum(1, keepdim=True)).detach(), reduction="batchmean")
