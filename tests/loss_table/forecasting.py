"""Forecasts, likelihoods, survival, latent variables, moments."""

import math

import torch
from torch import Tensor, distributions
from torch.nn import functional as F

from loss_table.rows import Table

# fmt: off
table = Table("forecasting")
add, of_batch, of_mean, terms = table.adds_up, table.batch, table.of_a_mean, table.terms
# --- functions of a mean ---
of_mean("RMSE by hand", "x y", lambda o, b, m: (o - b.y).square().mean().sqrt())
of_mean("RMSE as a percentage", "x y", lambda o, b, m: 100 * F.mse_loss(o, b.y).sqrt())
of_mean("logarithm of the mean squared error", "x y", lambda o, b, m: F.mse_loss(o, b.y).log())
of_mean("square of a mean", "x y", lambda o, b, m: (o - b.y).mean() ** 2)
of_mean("reciprocal of a mean", "x y", lambda o, b, m: 1 / (1 + F.mse_loss(o, b.y)))
of_mean("power of a mean", "x y", lambda o, b, m: F.l1_loss(o, b.y).pow(1.7))
of_mean("a mean, at least", "x y", lambda o, b, m: F.mse_loss(o, b.y).clamp(min=0.01))
of_mean("root of a quotient of two sums", "x y", lambda o, b, m: ((o - b.y) ** 2).sum().div((b.y**2).sum()).sqrt())
of_mean("flooding", "x t", lambda o, b, m: (F.cross_entropy(o, b.t) - 0.5).abs() + 0.5)
of_mean("root of a masked mean", "x y positive", lambda o, b, m: (((o - b.y) ** 2 * b.positive).sum() / b.positive.sum()).sqrt())
of_mean("norm of all errors", "x y", lambda o, b, m: (o - b.y).norm())
of_mean("root of a sum", "x y", lambda o, b, m: (o - b.y).square().sum().sqrt())
of_mean("quotient of two sums", "x y", lambda o, b, m: ((o - b.y) ** 2).sum() / (o**2).sum())
of_mean("RMSE of each column", "x y", lambda o, b, m: (o - b.y).square().mean(0).sqrt().mean())
of_mean("mean of squares of columns' means", "x y", lambda o, b, m: (o - b.y).mean(0).square().sum())
of_mean("RMSE and MAE", "x y", lambda o, b, m: F.mse_loss(o, b.y).sqrt() + F.l1_loss(o, b.y))
# --- points ---
add("MASE by the batch's scale", "x y y5", lambda o, b, m: F.l1_loss(o, b.y) / b.y5[..., 0].diff(dim=1).abs().mean())
add("WAPE", "x y", lambda o, b, m: (o - b.y).abs().sum() / b.y.abs().sum())
of_batch("normalised by the batch's variance", "x y", lambda o, b, m: F.mse_loss(o, b.y) / b.y.var(correction=0))
add("weights of samples, divided by them", "x y w", lambda o, b, m: (b.w * (o - b.y).square().mean(1)).sum() / b.w.sum())
add("weights of samples, divided before", "x y w", lambda o, b, m: ((b.w / b.w.sum()) * (o - b.y).square().mean(1)).sum())
add("missing values by nansum", "x y positive", lambda o, b, m:
    (F.mse_loss(o, b.y.masked_fill(~b.positive, math.nan).nan_to_num(0.0), reduction="none") * b.positive).nansum()
    / b.positive.sum())
add("missing values by nanmean", "x y positive", lambda o, b, m: ((o - b.y) ** 2).where(b.positive, math.nan).nanmean())
add("soft dynamic time warping", "x y", lambda o, b, m: _soft_dtw(o, b.y).mean())
of_batch("trimmed mean", "x y", lambda o, b, m: (c := (o - b.y).square().mean(1)).sort().values[: max(1, len(c) - 1)].mean())
# --- distributions ---
add("pinball, stacked quantiles", "x y", lambda o, b, m: torch.stack(
    [torch.max(q * (d := b.y[:, 0] - o[:, k]), (q - 1) * d).mean() for k, q in enumerate((0.1, 0.5, 0.75, 0.9))]).mean())
add("pinball, cat of columns", "x y", lambda o, b, m: torch.cat([torch.max(q * (d := b.y[:, 0] - o[:, k]), (q - 1) * d)[:, None]
    for k, q in enumerate((0.1, 0.5, 0.9))], 1) .sum(1) .mean())
add("normal likelihood, mean", "x y", lambda o, b, m:
    -distributions.Normal(o[:, :2], F.softplus(o[:, 2:]) + 0.1).log_prob(b.y[:, :2]).mean())
add("Poisson likelihood, weights of samples", "x counts w", lambda o, b, m:
    -(distributions.Poisson(F.softplus(o[:, :2])).log_prob(b.counts[:, :2]) * b.w[:, None]).sum() / b.w.sum())
add("zero-inflated Poisson", "x counts", lambda o, b, m: _zero_inflated(o, b.counts[:, 0]).mean())
add("hurdle", "x counts", lambda o, b, m: F.binary_cross_entropy_with_logits(o[:, 0], (b.counts[:, 0] > 0).to(o))
    + ((b.counts[:, 0] > 0) * (o[:, 1] - b.counts[:, 0]) ** 2).mean())
terms("hurdle, positives by their mean", "x counts", lambda o, b, m:
    F.binary_cross_entropy_with_logits(o[:, 0], (b.counts[:, 0] > 0).to(o))
    + ((o[:, 1] - b.counts[:, 0]) ** 2)[b.counts[:, 0] > 0].mean())
add("normalising flow, bits per dimension", "x", lambda o, b, m: (0.5 * o.square() - m.log_scales.sum()).sum(1).mean()
    / (4 * math.log(2)))
# --- survival ---
of_batch("Cox", "x time event", lambda o, b, m: _cox(o[:, 0], b.time, b.event).sum() / len(o))
# every micro-batch has an event here: one that has none divides by 0, which is an error (see test_check.py)
add("exponential survival, by events", "x time event", lambda o, b, m:
    (b.time * o[:, 0].exp() - b.event * o[:, 0]).sum() / b.event.sum())
add("accelerated failure times", "x time event", lambda o, b, m:
    -(b.event * distributions.Normal(o[:, 0], 1.0).log_prob(b.time.log())
    + (1 - b.event) * torch.special.log_ndtr(o[:, 0] - b.time.log())).mean())
# --- latent variables ---
add("ELBO by rows", "x y", lambda o, b, m: ((o - b.y).square().sum(1) + _kl(o)).mean())
add("ELBO, sums over rows", "x y", lambda o, b, m: (F.mse_loss(o, b.y, reduction="sum") + _kl(o).sum()) / len(o))
add("ELBO, mean and sum over rows", "x y", lambda o, b, m: F.mse_loss(o, b.y) + 0.1 * _kl(o).sum() / len(o))
add("ELBO, mean and mean of sums", "x y", lambda o, b, m: F.mse_loss(o, b.y) + 0.1 * _kl(o).sum(-1).mean() if _kl(o).dim() > 1
    else F.mse_loss(o, b.y) + 0.1 * _kl(o).mean())
terms("ELBO, sum beside a mean", "x y", lambda o, b, m: F.mse_loss(o, b.y, reduction="sum") + F.l1_loss(o, b.y))
terms("ELBO, mean beside a sum", "x y", lambda o, b, m: F.mse_loss(o, b.y) + 0.1 * _kl(o).sum())
add("beta-VAE by binary cross entropy", "x q", lambda o, b, m:
    F.binary_cross_entropy_with_logits(o, b.q, reduction="none").sum(1).mean() + 4 * _kl(o).mean())
add("free bits of each row", "x y", lambda o, b, m: F.mse_loss(o, b.y) + _kl(o).clamp(min=0.5).mean())
of_mean("free bits of the batch's mean", "x y", lambda o, b, m: F.mse_loss(o, b.y) + _kl(o).mean().clamp(min=0.5))
add("vector quantisation", "x y", lambda o, b, m: F.mse_loss(o, b.y)
    + (o - m.proxies[torch.cdist(o, m.proxies).argmin(1)].detach()).square().mean()
    + (m.proxies[torch.cdist(o, m.proxies).argmin(1)] - o.detach()).square().mean())
add("Bayesian weights: KL of parameters", "x t", lambda o, b, m: F.cross_entropy(o, b.t)
    + 1e-2 * (0.5 * m.proxies.square() - m.log_scales.sum()).mean())
add("Bayesian weights: KL of parameters over a data set", "x t", lambda o, b, m: F.cross_entropy(o, b.t)
    + (m.proxies.square().sum() / 2 - m.log_scales.sum()) / 1000)
# --- moments ---
of_batch("MMD of two samples", "x y", lambda o, b, m: _mmd(o, b.y))
of_batch("fairness: difference of two groups' means", "x y mask", lambda o, b, m: F.mse_loss(o, b.y)
    + ((o[:, 0] * b.mask).sum() / b.mask.sum().clamp(min=1) - (o[:, 0] * ~b.mask).sum() / (~b.mask).sum().clamp(min=1)).abs())

def _soft_dtw(o: Tensor, y: Tensor) -> Tensor:
    cost = (o[:, :, None] - y[:, None]).square()
    best: dict[tuple[int, int], Tensor] = {}
    for i in range(4):
        for j in range(4):
            before = [best[place] for place in ((i - 1, j), (i, j - 1), (i - 1, j - 1)) if place in best]
            least = -torch.stack([-value for value in before]).logsumexp(0) if before else 0.0
            best[i, j] = cost[:, i, j] + least
    return best[3, 3]

def _zero_inflated(o: Tensor, counts: Tensor) -> Tensor:
    of_poisson = counts * o[:, 1] - o[:, 1].exp() - torch.lgamma(counts + 1)
    at_zero = torch.logaddexp(F.logsigmoid(o[:, 0]), F.logsigmoid(-o[:, 0]) + of_poisson)
    return -torch.where(counts == 0, at_zero, F.logsigmoid(-o[:, 0]) + of_poisson)

def _cox(risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    order = time.argsort(descending=True)
    risk, event = risk[order], event[order]
    return -(risk - risk.logcumsumexp(0)) * event

def _kl(o: Tensor) -> Tensor:
    mean, log_variance = o[:, :2], o[:, 2:]
    return -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)

def _mmd(a: Tensor, c: Tensor, bandwidth: float | Tensor = 2.0) -> Tensor:
    def kernel(p: Tensor, q: Tensor) -> Tensor:
        return (-(p[:, None] - q[None]).square().sum(2) / bandwidth).exp()

    return kernel(a, a).mean() + kernel(c, c).mean() - 2 * kernel(a, c).mean()
