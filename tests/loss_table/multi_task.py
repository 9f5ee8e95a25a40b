"""Several terms: with one weight, with several, with learned scales, in lists."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from loss_table.rows import Table

# fmt: off
table = Table("multi-task")
add, of_batch, of_mean, terms = table.adds_up, table.batch, table.of_a_mean, table.terms

def ce(o: Tensor, b) -> Tensor:
    return F.cross_entropy(o, b.t)

def mse(o: Tensor, b) -> Tensor:
    return F.mse_loss(o, b.y)

def ignored(o: Tensor, b) -> Tensor:
    return F.cross_entropy(o, b.ignored)

# --- terms that share a weight: rows, and elements of rows ---
add("two terms", "x t y", lambda o, b, m: ce(o, b) + 0.5 * mse(o, b))
add("a difference of terms", "x t y", lambda o, b, m: ce(o, b) - 0.1 * mse(o, b))
add("a convex combination", "x t y", lambda o, b, m: 0.3 * ce(o, b) + (1 - 0.3) * mse(o, b))
add("stacked and summed", "x t y", lambda o, b, m: torch.stack([ce(o, b), mse(o, b)]).sum())
add("stacked and averaged", "x t y", lambda o, b, m: torch.stack([ce(o, b), mse(o, b), F.l1_loss(o, b.y)]).mean())
add("stacked, weighed and summed", "x t y", lambda o, b, m: (torch.stack([ce(o, b), mse(o, b)]) * torch.tensor([0.7, 0.3])).sum())
add("stacked, product with weights", "x t y", lambda o, b, m:
    torch.stack([ce(o, b), mse(o, b)]) @ torch.tensor([0.7, 0.3], dtype=torch.float64))
add("a list and sum()", "x t y", lambda o, b, m: sum([ce(o, b), mse(o, b), 0.2 * F.huber_loss(o, b.y)]))
add("a list and its length", "x t y", lambda o, b, m: sum(losses := [ce(o, b), mse(o, b)]) / len(losses))
add("a dictionary", "x t y", lambda o, b, m: sum({"a": ce(o, b), "b": 2 * mse(o, b)}.values()))
add("a dictionary that is returned", "x t y", lambda o, b, m: {"loss": ce(o, b) + mse(o, b), "error": mse(o, b).detach()})
add("added in place", "x t y", lambda o, b, m: ce(o, b).add_(mse(o, b), alpha=0.5))
add("torch.add with alpha", "x t y", lambda o, b, m: torch.add(ce(o, b), mse(o, b), alpha=3))
add("torch.addcmul", "x t y", lambda o, b, m: torch.addcmul(ce(o, b), mse(o, b), torch.tensor(0.3, dtype=torch.float64)))
add("torch.lerp", "x t y", lambda o, b, m: torch.lerp(ce(o, b), mse(o, b), 0.25))
add("one task a column, mean", "x y", lambda o, b, m: (o - b.y).square().mean(0).mean())
add("one task a column, weighed", "x y", lambda o, b, m: ((o - b.y).square().mean(0) * torch.tensor([1, 2, 3, 4])).sum())
add("one task a column, product with weights", "x y", lambda o, b, m:
    (o - b.y).square().mean(0) @ torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
add("one task a column, a loop", "x y", lambda o, b, m: sum(F.mse_loss(o[:, k], b.y[:, k]) for k in range(4)))
add("one task a column, binary", "x q", lambda o, b, m: sum(F.binary_cross_entropy_with_logits(o[:, k], b.q[:, k])
    for k in range(4)) / 4)
add("one task a column, missing labels over all", "x q positive", lambda o, b, m:
    (F.binary_cross_entropy_with_logits(o, b.q, reduction="none") * b.positive).sum() / b.positive.sum())
terms("one task a column, missing labels of each", "x q positive", lambda o, b, m:
    ((F.binary_cross_entropy_with_logits(o, b.q, reduction="none") * b.positive).sum(0) / b.positive.sum(0).clamp(min=1)).sum())
terms("one task a column, missing labels in a loop", "x q positive", lambda o, b, m:
    sum((F.binary_cross_entropy_with_logits(o[:, k], b.q[:, k], reduction="none") * b.positive[:, k]).sum()
    / b.positive[:, k].sum().clamp(min=1) for k in range(3)))
add("auxiliary heads", "x t", lambda o, b, m: ce(o, b) + 0.3 * F.cross_entropy(o @ m.proxies, b.t)
    + 0.3 * F.cross_entropy(o.flip(1), b.t))
add("exits that grow in weight", "x t", lambda o, b, m: sum((k + 1) / 6 * F.cross_entropy(o * (k + 1), b.t) for k in range(3)))
add("hierarchical labels", "x t", lambda o, b, m: ce(o, b) + F.cross_entropy(o.view(-1, 2, 2).logsumexp(2), b.t // 2))
add("consistency of two heads", "x t v", lambda o, b, m: ce(o, b)
    + F.kl_div(o.log_softmax(1), m(b.v).softmax(1), reduction="batchmean"))
add("a sum of sums", "x t y", lambda o, b, m: F.cross_entropy(o, b.t, reduction="sum") + F.mse_loss(o, b.y, reduction="sum"))
add("a sum of sums over rows", "x t y", lambda o, b, m: (F.cross_entropy(o, b.t, reduction="sum")
    + F.mse_loss(o, b.y, reduction="sum")) / len(b.x))

# --- terms with weights of their own ---
terms("ignored labels and rows", "x ignored y", lambda o, b, m: ignored(o, b) + mse(o, b))
terms("rows and ignored labels", "x ignored y", lambda o, b, m: 0.1 * mse(o, b) + ignored(o, b))
terms("ignored labels and rows, averaged", "x ignored y", lambda o, b, m: torch.stack([ignored(o, b), mse(o, b)]).mean())
terms("ignored labels and a masked mean", "x ignored y mask", lambda o, b, m: ignored(o, b)
    + ((o - b.y).square().mean(1) * b.mask).sum() / b.mask.sum().clamp(min=1))
terms("two masked means", "x y mask positive", lambda o, b, m:
    ((o - b.y).square().mean(1) * b.mask).sum() / b.mask.sum().clamp(min=1)
    + ((o - b.y).abs() * b.positive).sum() / b.positive.sum().clamp(min=1))
terms("three weights", "x t ignored y positive", lambda o, b, m: ce(o, b) + ignored(o, b)
    + ((o - b.y).abs() * b.positive).sum() / b.positive.sum().clamp(min=1))
terms("class weights and rows", "x t y", lambda o, b, m: F.cross_entropy(o, b.t, weight=torch.tensor([0.2, 1, 2, 3]).to(o))
    + mse(o, b))
terms("weights of samples and rows", "x t y w", lambda o, b, m: ce(o, b) + (b.w * (o - b.y).square().mean(1)).sum() / b.w.sum())
terms("a mean beside a sum", "x t y", lambda o, b, m: ce(o, b) + 1e-2 * F.mse_loss(o, b.y, reduction="sum"))
terms("a sum beside a penalty on parameters", "x t", lambda o, b, m: F.cross_entropy(o, b.t, reduction="sum")
    + m.proxies.square().sum())

# --- parameters in the loss ---
add("a penalty on parameters", "x t", lambda o, b, m: ce(o, b)
    + 1e-2 * sum(p.square().sum() for p in m.parameters() if p.requires_grad))
add("a penalty on parameters, mean of absolutes", "x t", lambda o, b, m: ce(o, b) + m.proxies.abs().mean())
add("a penalty on parameters, their largest", "x t", lambda o, b, m: ce(o, b) + m.proxies.abs().max())
add("a penalty on parameters, logarithm of a mean", "x t", lambda o, b, m: ce(o, b) + m.proxies.square().mean().log())
add("a penalty on parameters, their product", "x t", lambda o, b, m: ce(o, b) + (m.temperature * m.bias).square())
add("a penalty on orthogonality", "x t", lambda o, b, m: ce(o, b) + (m.proxies @ m.proxies.T - torch.eye(4)).square().mean())
add("a penalty on parameters with ignored labels", "x ignored", lambda o, b, m: ignored(o, b) + m.proxies.square().mean())
add("a penalty on proximity to a copy", "x t", lambda o, b, m: ce(o, b) + 0.5 * (m.proxies - m.queue[:4]).square().sum())
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
add("learned scales of columns", "x y", lambda o, b, m: ((o - b.y).square() * (-m.center).exp() * m.proxies[0].exp()
    - m.proxies[0]).mean())
add("learned scales of columns' means", "x y", lambda o, b, m:
    ((o - b.y).square().mean(0) * m.proxies[0].exp() - m.proxies[0]).sum())
add("a learned factor of the whole loss", "x t", lambda o, b, m: m.temperature * ce(o, b))
add("a learned softmax of tasks", "x t y", lambda o, b, m: (m.log_scales.softmax(0) * torch.stack([ce(o, b), mse(o, b)])).sum())
add("a learned offset", "x t", lambda o, b, m: ce(o, b) + m.bias)
terms("learned scales of terms with weights of their own", "x ignored y", lambda o, b, m: (-m.log_scales[0]).exp() * ignored(o, b)
    + m.log_scales[0] + (-m.log_scales[1]).exp() * mse(o, b) + m.log_scales[1])
add("learned scales with ignored labels", "x ignored", lambda o, b, m: (-m.log_scales[0]).exp() * ignored(o, b) + m.log_scales[0])

# --- terms by each other ---
of_mean("a product of losses", "x t y", lambda o, b, m: ce(o, b) * mse(o, b))
of_mean("a quotient of losses", "x t y", lambda o, b, m: ce(o, b) / (1 + mse(o, b)))
of_mean("the larger of two losses", "x t y", lambda o, b, m: torch.maximum(ce(o, b), mse(o, b)))
of_mean("a geometric mean of losses", "x t y", lambda o, b, m: (ce(o, b) * mse(o, b)).sqrt())
of_mean("a soft maximum of losses", "x t y", lambda o, b, m: torch.stack([ce(o, b), mse(o, b)]).logsumexp(0))
of_mean("logarithms of losses, added", "x t y", lambda o, b, m: ce(o, b).log() + mse(o, b).log())
of_batch("a loss times itself, detached", "x t", lambda o, b, m: (c := ce(o, b)) * c.detach())
add("a loss over itself, detached", "x t", lambda o, b, m: (c := ce(o, b)) / c.detach())
of_batch("losses of like size, detached", "x t y", lambda o, b, m: ce(o, b) + mse(o, b) * (ce(o, b) / mse(o, b)).detach())
of_batch("weights by losses, softmax, detached", "x t y", lambda o, b, m:
    ((s := torch.stack([ce(o, b), mse(o, b)])).detach().softmax(0) * s).sum())
of_batch("a weight by the batch's accuracy", "x t", lambda o, b, m: (2 - (o.argmax(1) == b.t).double().mean()) * ce(o, b))
of_batch("a weight by the batch's accuracy, item()", "x t", lambda o, b, m:
    (2 - (o.argmax(1) == b.t).double().mean().item()) * ce(o, b))
of_batch("a weight by the batch's largest label", "x t y", lambda o, b, m: ce(o, b) + float(1 + b.t.max()) * mse(o, b))
of_batch("a term only where the batch has a label", "x t y", lambda o, b, m: ce(o, b)
    + (mse(o, b) if b.t.bincount(minlength=4).max() >= 3 else 0.0))
of_batch("a term from three rows on", "x t", lambda o, b, m: ce(o, b) + (o.square().mean() if len(o) >= 3 else 0.0))
of_batch("a penalty only where the batch has a label", "x t", lambda o, b, m: ce(o, b)
    + (m.proxies.square().sum() if 3 in b.t else 0.0))
of_batch("a sign by the batch's error, detached", "x t y", lambda o, b, m: ce(o, b) * torch.sign(mse(o, b).detach() - 1))
of_batch("adaptive scale of a discriminator's gradient", "x y v", lambda o, b, m: mse(o, b)
    - (mse(o, b).detach() / m(b.v).mean().detach().abs().add(0.1)) * m(b.v).mean())
