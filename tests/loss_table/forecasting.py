"""Forecasts, likelihoods, survival, latent variables, moments."""

from __future__ import annotations

import math

import torch
from torch import Tensor, distributions
from torch.nn import functional as F

from loss_table.rows import Table

# fmt: off
table = Table("forecasting")
add, of_batch, of_mean, terms = table.adds_up, table.batch, table.of_a_mean, table.terms
# --- functions of a mean ---
of_mean("RMSE", "x y", lambda o, b, m: F.mse_loss(o, b.y).sqrt())
of_mean("RMSE by a power", "x y", lambda o, b, m: F.mse_loss(o, b.y) ** 0.5)
of_mean("RMSE by hand", "x y", lambda o, b, m: (o - b.y).square().mean().sqrt())
of_mean("RMSE with epsilon", "x y", lambda o, b, m: (F.mse_loss(o, b.y) + 1e-6).sqrt())
of_mean("RMSE as a percentage", "x y", lambda o, b, m: 100 * F.mse_loss(o, b.y).sqrt())
of_mean("logarithm of the mean squared error", "x y", lambda o, b, m: F.mse_loss(o, b.y).log())
of_mean("log1p of the mean squared error", "x y", lambda o, b, m: F.mse_loss(o, b.y).log1p())
of_mean("exponential of the mean absolute error", "x y", lambda o, b, m: F.l1_loss(o, b.y).exp())
of_mean("square of a mean", "x y", lambda o, b, m: (o - b.y).mean() ** 2)
of_mean("absolute value of a mean", "x y", lambda o, b, m: (o - b.y).mean().abs())
of_mean("reciprocal of a mean", "x y", lambda o, b, m: 1 / (1 + F.mse_loss(o, b.y)))
of_mean("hyperbolic tangent of a mean", "x y", lambda o, b, m: F.mse_loss(o, b.y).tanh())
of_mean("softplus of a mean", "x y", lambda o, b, m: F.softplus(F.mse_loss(o, b.y)))
of_mean("flooding", "x t", lambda o, b, m: (F.cross_entropy(o, b.t) - 0.5).abs() + 0.5)
of_mean("root of a masked mean", "x y positive", lambda o, b, m: (((o - b.y) ** 2 * b.positive).sum() / b.positive.sum()).sqrt())
of_mean("norm of all errors", "x y", lambda o, b, m: (o - b.y).norm())
of_mean("root of a sum", "x y", lambda o, b, m: ((o - b.y) ** 2).sum().sqrt())
of_mean("root of a root", "x y", lambda o, b, m: F.mse_loss(o, b.y).sqrt().sqrt())
of_mean("focal of a mean", "x t", lambda o, b, m: (1 - (-(c := F.cross_entropy(o, b.t))).exp()) ** 2 * c)
of_mean("quotient of two sums", "x y", lambda o, b, m: ((o - b.y) ** 2).sum() / (o**2).sum())
of_mean("RMSE of each column", "x y", lambda o, b, m: (o - b.y).square().mean(0).sqrt().mean())
of_mean("mean of squares of columns' means", "x y", lambda o, b, m: (o - b.y).mean(0).square().sum())
of_mean("RMSE and MAE", "x y", lambda o, b, m: F.mse_loss(o, b.y).sqrt() + F.l1_loss(o, b.y))
of_mean("geometric mean", "x y", lambda o, b, m: ((o - b.y).abs() + 0.1).log().mean().exp())
# --- points ---
add("RMSE of each row", "x y", lambda o, b, m: (o - b.y).square().mean(1).sqrt().mean())
add("logarithm of each row's error", "x y", lambda o, b, m: (o - b.y).square().mean(1).log().mean())
add("log-cosh", "x y", lambda o, b, m: (o - b.y).cosh().log().mean())
add("MAPE", "x pos", lambda o, b, m: ((o - b.pos).abs() / b.pos.abs()).mean())
add("MAPE with a clamped divisor", "x y", lambda o, b, m: ((o - b.y).abs() / b.y.abs().clamp(min=0.3)).mean())
add("SMAPE", "x y", lambda o, b, m: (2 * (o - b.y).abs() / (o.abs() + b.y.abs())).mean())
add("SMAPE, detached", "x y", lambda o, b, m: (200 * (o - b.y).abs() / (o.detach().abs() + b.y.abs())).mean())
add("MASE by each series' own scale", "x y y5", lambda o, b, m:
    ((o - b.y).abs().mean(1) / b.y5[..., 0].diff(dim=1).abs().mean(1)).mean())
add("MASE of steps and series", "x y y5", lambda o, b, m: ((o - b.y).abs() / b.y5[..., 0].diff(dim=1).abs().mean(1,
    keepdim=True)).mean())
add("MASE by the batch's scale", "x y y5", lambda o, b, m: F.l1_loss(o, b.y) / b.y5[..., 0].diff(dim=1).abs().mean())
add("WAPE", "x y", lambda o, b, m: (o - b.y).abs().sum() / b.y.abs().sum())
of_batch("normalised by the batch's variance", "x y", lambda o, b, m: F.mse_loss(o, b.y) / b.y.var(correction=0))
of_batch("targets normalised in the step", "x y", lambda o, b, m: F.mse_loss(o, (b.y - b.y.mean()) / (b.y.std(correction=0) + 0.1)))
add("series normalised by themselves", "x y", lambda o, b, m:
    F.mse_loss(o, (b.y - b.y.mean(1, keepdim=True)) / (b.y.std(1, keepdim=True) + 0.1)))
add("instance normalisation of the outputs", "x y", lambda o, b, m:
    F.mse_loss((o - o.mean(1, keepdim=True)) / (o.std(1, keepdim=True) + 0.1), b.y))
add("weights of the horizon", "x y", lambda o, b, m: ((o - b.y) ** 2 * torch.tensor([1, 0.5, 0.25, 0.125])).mean())
add("weights of the horizon that add up to one", "x y", lambda o, b, m:
    ((o - b.y) ** 2 * torch.tensor([0.4, 0.3, 0.2, 0.1])).sum(1).mean())
add("weights of samples, mean", "x y w", lambda o, b, m: (b.w[:, None] * (o - b.y) ** 2).mean())
add("weights of samples, divided by them", "x y w", lambda o, b, m: (b.w * (o - b.y).square().mean(1)).sum() / b.w.sum())
add("weights of samples, divided before", "x y w", lambda o, b, m: ((b.w / b.w.sum()) * (o - b.y).square().mean(1)).sum(),
    refused="weights that were normalised in the step are one over a count that the graph does not show")
add("missing values", "x y positive", lambda o, b, m: F.mse_loss(o[b.positive], b.y[b.positive]))
add("missing values by where", "x y positive", lambda o, b, m:
    torch.where(b.positive, (o - b.y) ** 2, 0.0).sum() / b.positive.sum())
add("missing values by nansum", "x y positive", lambda o, b, m:
    (F.mse_loss(o, b.y.masked_fill(~b.positive, math.nan).nan_to_num(0.0), reduction="none") * b.positive).nansum()
    / b.positive.sum())
add("missing values by nanmean", "x y positive", lambda o, b, m: ((o - b.y) ** 2).where(b.positive, math.nan).nanmean())
add("trend and season", "x y", lambda o, b, m: F.mse_loss(o, b.y) + 0.1 * o.diff(dim=1).square().mean())
add("second differences", "x y", lambda o, b, m: F.mse_loss(o, b.y) + 0.1 * o.diff(n=2, dim=1).square().sum(1).mean())
add("direction of changes", "x y", lambda o, b, m: F.softplus(-o.diff(dim=1) * b.y.diff(dim=1).sign()).mean())
add("soft dynamic time warping", "x y", lambda o, b, m: _soft_dtw(o, b.y).mean())
add("frequencies", "x y", lambda o, b, m: (torch.fft.rfft(o) - torch.fft.rfft(b.y)).abs().mean())
add("cumulative sums of a row", "x y", lambda o, b, m: (o.cumsum(1) - b.y.cumsum(1)).abs().mean())
add("sorted rows", "x y", lambda o, b, m: F.l1_loss(o.sort(1).values, b.y.sort(1).values))
of_batch("sorted columns", "x y", lambda o, b, m: F.l1_loss(o.sort(0).values, b.y.sort(0).values))
of_batch("cumulative sums over the batch", "x y", lambda o, b, m: (o.cumsum(0) - b.y.cumsum(0)).square().mean())
add("the largest error of a row", "x y", lambda o, b, m: (o - b.y).abs().amax(1).mean())
of_batch("the largest error of the batch", "x y", lambda o, b, m: (o - b.y).abs().max())
of_batch("the largest error of each column", "x y", lambda o, b, m: (o - b.y).abs().amax(0).mean())
of_batch("the median error", "x y", lambda o, b, m: (o - b.y).abs().flatten().median())
add("the median error of a row", "x y", lambda o, b, m: (o - b.y).abs().median(1).values.mean())
of_batch("trimmed mean", "x y", lambda o, b, m: (c := (o - b.y).square().mean(1)).sort().values[: max(1, len(c) - 1)].mean())
of_batch("errors below a quantile of the batch", "x y", lambda o, b, m: (c := (o - b.y).abs())[c <= c.quantile(0.8)].mean())
of_batch("soft maximum over the batch", "x y", lambda o, b, m: (o - b.y).square().mean(1).logsumexp(0))
add("soft maximum of a row", "x y", lambda o, b, m: (o - b.y).square().logsumexp(1).mean())
of_batch("exponential tilting", "x y", lambda o, b, m: (0.5 * (o - b.y).square().mean(1)).exp().mean().log() / 0.5
    + ((o - b.y).mean(1) - (o - b.y).mean()).square().mean())
# --- distributions ---
LEVELS = torch.tensor([0.1, 0.5, 0.75, 0.9])
add("pinball, mean", "x y", lambda o, b, m: _pinball(o, b.y[:, :1]).mean())
add("pinball, sum over quantiles", "x y", lambda o, b, m: _pinball(o, b.y[:, :1]).sum(1).mean())
add("pinball, stacked quantiles", "x y", lambda o, b, m: torch.stack(
    [torch.max(q * (d := b.y[:, 0] - o[:, k]), (q - 1) * d).mean() for k, q in enumerate((0.1, 0.5, 0.75, 0.9))]).mean())
add("pinball, loop over quantiles", "x y", lambda o, b, m: sum(torch.max(q * (d := b.y[:, 0] - o[:, k]), (q - 1) * d).mean()
    for k, q in enumerate((0.1, 0.5, 0.9))))
add("pinball, cat of columns", "x y", lambda o, b, m: torch.cat([torch.max(q * (d := b.y[:, 0] - o[:, k]), (q - 1) * d)[:, None]
    for k, q in enumerate((0.1, 0.5, 0.9))], 1) .sum(1) .mean())
of_batch("weighted quantile loss", "x y", lambda o, b, m: 2 * _pinball(o, b.y[:, :1]).sum() / b.y[:, 0].abs().sum()
    * (b.y[:, 0] - b.y[:, 0].mean()).square().mean())
add("interval score", "x y", lambda o, b, m: ((u := o[:, 0] + F.softplus(o[:, 1])) - o[:, 0] + 20 * F.relu(o[:, 0] - b.y[:, 0])
    + 20 * F.relu(b.y[:, 0] - u)).mean())
add("expectiles", "x y", lambda o, b, m: (torch.where((d := b.y - o) > 0, 0.8, 0.2) * d**2).mean())
for name, family in {
    "normal": lambda o: distributions.Normal(o[:, :2], F.softplus(o[:, 2:]) + 0.1),
    "Laplace": lambda o: distributions.Laplace(o[:, :2], F.softplus(o[:, 2:]) + 0.1),
    "Student's t": lambda o: distributions.StudentT(4.0, o[:, :2], F.softplus(o[:, 2:]) + 0.1),
    "Cauchy": lambda o: distributions.Cauchy(o[:, :2], F.softplus(o[:, 2:]) + 0.1),
    "Gumbel": lambda o: distributions.Gumbel(o[:, :2], F.softplus(o[:, 2:]) + 0.5),
}.items():
    add(f"{name} likelihood, mean", "x y", lambda o, b, m, f=family: -f(o).log_prob(b.y[:, :2]).mean())
    add(f"{name} likelihood, sum over columns", "x y", lambda o, b, m, f=family: -f(o).log_prob(b.y[:, :2]).sum(-1).mean())
    add(f"{name} likelihood, sum", "x y", lambda o, b, m, f=family: -f(o).log_prob(b.y[:, :2]).sum())
for name, family in {
    "log-normal": lambda o: distributions.LogNormal(o[:, :2], F.softplus(o[:, 2:]) + 0.1),
    "gamma": lambda o: distributions.Gamma(F.softplus(o[:, :2]) + 0.1, F.softplus(o[:, 2:]) + 0.1),
    "Weibull": lambda o: distributions.Weibull(F.softplus(o[:, :2]) + 0.1, F.softplus(o[:, 2:]) + 0.1),
}.items():
    add(f"{name} likelihood, mean", "x pos", lambda o, b, m, f=family: -f(o).log_prob(b.pos[:, :2]).mean())
for name, family in {
    "Poisson": lambda o: distributions.Poisson(F.softplus(o[:, :2])),
    "negative binomial": lambda o: distributions.NegativeBinomial(F.softplus(o[:, :2]) + 0.1, logits=o[:, 2:]),
    "geometric": lambda o: distributions.Geometric(logits=o[:, :2]),
}.items():
    add(f"{name} likelihood, mean", "x counts", lambda o, b, m, f=family: -f(o).log_prob(b.counts[:, :2]).mean())
    add(f"{name} likelihood, weights of samples", "x counts w", lambda o, b, m, f=family:
        -(f(o).log_prob(b.counts[:, :2]) * b.w[:, None]).sum() / b.w.sum())
add("multivariate normal", "x y", lambda o, b, m: -_multivariate(o).log_prob(b.y[:, :2]).mean())
add("Dirichlet", "x p", lambda o, b, m: -distributions.Dirichlet(F.softplus(o) + 0.1).log_prob(b.p).mean())
add("beta", "x p", lambda o, b, m: -distributions.Beta(F.softplus(o[:, :2]) + 0.1, F.softplus(o[:, 2:])
    + 0.1).log_prob(b.p[:, :2]).mean())
add("zero-inflated Poisson", "x counts", lambda o, b, m: _zero_inflated(o, b.counts[:, 0]).mean())
add("hurdle", "x counts", lambda o, b, m: F.binary_cross_entropy_with_logits(o[:, 0], (b.counts[:, 0] > 0).to(o))
    + ((b.counts[:, 0] > 0) * (o[:, 1] - b.counts[:, 0]) ** 2).mean())
terms("hurdle, positives by their mean", "x counts", lambda o, b, m:
    F.binary_cross_entropy_with_logits(o[:, 0], (b.counts[:, 0] > 0).to(o))
    + ((o[:, 1] - b.counts[:, 0]) ** 2)[b.counts[:, 0] > 0].mean())
add("Tweedie deviance", "x counts", lambda o, b, m: (-b.counts * (-0.5 * o).exp() / -0.5 * -1 + (0.5 * o).exp() / 0.5).mean())
add("mixture density", "x y", lambda o, b, m: -((o[:, :2].log_softmax(1)) - 0.5 * (b.y[:, :1] - o[:, 2:]) ** 2).logsumexp(1).mean())
add("mixture density by distributions", "x y", lambda o, b, m:
    -distributions.MixtureSameFamily(distributions.Categorical(logits=o[:, :2]),
    distributions.Normal(o[:, 2:], 1.0)) .log_prob(b.y[:, 0]) .mean())
add("mixture density of sequences", "s y5", lambda o, b, m: -(o[..., :2].log_softmax(-1)
    - 0.5 * (b.y5[..., :1] - o[..., 2:]) ** 2).logsumexp(-1).sum(1).mean())
add("mixture of logistics", "x y", lambda o, b, m: -(o[:, :2].log_softmax(1) + F.logsigmoid(b.y[:, :1] - o[:, 2:])
    + F.logsigmoid(o[:, 2:] - b.y[:, :1])).logsumexp(1).mean())
add("CRPS of a normal", "x y", lambda o, b, m: _crps(o[:, 0], F.softplus(o[:, 1]) + 0.1, b.y[:, 0]).mean())
add("CRPS of samples", "x y", lambda o, b, m: ((o - b.y[:, :1]).abs().mean(1)
    - 0.5 * (o[:, :, None] - o[:, None]).abs().mean((1, 2))).mean())
add("energy score of samples", "s y", lambda o, b, m: ((o - b.y[:, None]).norm(dim=-1).mean(1)
    - 0.5 * torch.cdist(o, o + 1e-3).mean((1, 2))).mean())
add("evidential regression", "x y", lambda o, b, m: _evidential(o, b.y[:, 0]).mean())
add("beta-NLL", "x y", lambda o, b, m: ((v := F.softplus(o[:, 1]) + 0.1).detach() ** 0.5
    * (0.5 * v.log() + 0.5 * (o[:, 0] - b.y[:, 0]) ** 2 / v)).mean())
add("normalising flow", "x", lambda o, b, m: (0.5 * o.square().sum(1) + 2 * math.log(2 * math.pi) - m.log_scales.sum()).mean())
add("normalising flow, bits per dimension", "x", lambda o, b, m: (0.5 * o.square() - m.log_scales.sum()).sum(1).mean()
    / (4 * math.log(2)))
add("denoising score matching", "x y", lambda o, b, m: 0.5 * (o + b.y / 0.5).square().sum(1).mean(0))
# --- survival ---
of_batch("Cox", "x time event", lambda o, b, m: _cox(o[:, 0], b.time, b.event).sum() / len(o))
of_batch("Cox by events", "x time event", lambda o, b, m: _cox(o[:, 0], b.time, b.event).sum() / b.event.sum().clamp(min=1))
of_batch("Cox by risk sets", "x time event", lambda o, b, m:
    -(b.event * (o[:, 0] - (o[None, :, 0] + torch.where(b.time[None] >= b.time[:, None], 0.0, -1e3)).logsumexp(1))).mean())
of_batch("ranking of survival times", "x time event", lambda o, b, m:
    ((b.time[:, None] < b.time[None]) * b.event[:, None] * (-(o[:, :1] - o[None, :, 0])).exp()).mean())
add("discrete hazards", "x t event", lambda o, b, m: _hazards(o, b.t, b.event).mean())
add("discrete hazards, sum over intervals", "x t event", lambda o, b, m: _hazards(o, b.t, b.event).sum(1).mean())
add("Weibull survival", "x time event", lambda o, b, m: ((b.time * o[:, 0].exp()) ** 1.5
    - b.event * (1.5 * o[:, 0] + 0.5 * b.time.log())).mean())
# every micro-batch has an event here: one that has none divides by 0, which is an error (see test_check.py)
add("exponential survival, by events", "x time event", lambda o, b, m:
    (b.time * o[:, 0].exp() - b.event * o[:, 0]).sum() / b.event.sum())
add("accelerated failure times", "x time event", lambda o, b, m:
    -(b.event * distributions.Normal(o[:, 0], 1.0).log_prob(b.time.log())
    + (1 - b.event) * torch.special.log_ndtr(o[:, 0] - b.time.log())).mean())
add("censored quantiles", "x time event", lambda o, b, m: (torch.where(b.event > 0, (o[:, 0] - b.time).abs(),
    F.relu(b.time - o[:, 0]))).mean())
# --- latent variables ---
add("ELBO by rows", "x y", lambda o, b, m: ((o - b.y).square().sum(1) + _kl(o)).mean())
add("ELBO, sums", "x y", lambda o, b, m: F.mse_loss(o, b.y, reduction="sum") + _kl(o).sum())
add("ELBO, sums over rows", "x y", lambda o, b, m: (F.mse_loss(o, b.y, reduction="sum") + _kl(o).sum()) / len(o))
add("ELBO, sums each over rows", "x y", lambda o, b, m: F.mse_loss(o, b.y, reduction="sum") / len(o)
    + 0.5 * _kl(o).sum() / o.shape[0])
add("ELBO, mean and sum over rows", "x y", lambda o, b, m: F.mse_loss(o, b.y) + 0.1 * _kl(o).sum() / len(o))
add("ELBO, mean and mean of sums", "x y", lambda o, b, m: F.mse_loss(o, b.y) + 0.1 * _kl(o).sum(-1).mean() if _kl(o).dim() > 1
    else F.mse_loss(o, b.y) + 0.1 * _kl(o).mean())
terms("ELBO, sum beside a mean", "x y", lambda o, b, m: F.mse_loss(o, b.y, reduction="sum") + F.l1_loss(o, b.y))
terms("ELBO, mean beside a sum", "x y", lambda o, b, m: F.mse_loss(o, b.y) + 0.1 * _kl(o).sum())
add("beta-VAE by binary cross entropy", "x q", lambda o, b, m:
    F.binary_cross_entropy_with_logits(o, b.q, reduction="none").sum(1).mean() + 4 * _kl(o).mean())
add("free bits of each row", "x y", lambda o, b, m: F.mse_loss(o, b.y) + _kl(o).clamp(min=0.5).mean())
add("free bits of each row and dimension", "x y", lambda o, b, m: F.mse_loss(o, b.y)
    + (0.5 * o.square()).clamp(min=0.1).sum(1).mean())
of_mean("free bits of the batch's mean", "x y", lambda o, b, m: F.mse_loss(o, b.y) + _kl(o).mean().clamp(min=0.5))
add("KL by distributions", "x y", lambda o, b, m: distributions.kl_divergence(distributions.Normal(o[:, :2], F.softplus(o[:, 2:])
    + 0.1), distributions.Normal(0.0, 1.0)) .sum(-1) .mean())
add("vector quantisation", "x y", lambda o, b, m: F.mse_loss(o, b.y)
    + (o - m.proxies[torch.cdist(o, m.proxies).argmin(1)].detach()).square().mean()
    + (m.proxies[torch.cdist(o, m.proxies).argmin(1)] - o.detach()).square().mean())
add("importance-weighted bound", "s y5", lambda o, b, m: -((-(o - b.y5).square().sum(-1)).logsumexp(1) - math.log(5)).mean())
add("wake-sleep weights of a row", "s y5", lambda o, b, m: ((-(o - b.y5).square().sum(-1)).softmax(1).detach()
    * (o - b.y5).abs().sum(-1)).sum(1).mean())
add("Bayesian weights: KL of parameters", "x t", lambda o, b, m: F.cross_entropy(o, b.t)
    + 1e-2 * (0.5 * m.proxies.square() - m.log_scales.sum()).mean())
add("Bayesian weights: KL of parameters over a data set", "x t", lambda o, b, m: F.cross_entropy(o, b.t)
    + (m.proxies.square().sum() / 2 - m.log_scales.sum()) / 1000)
of_batch("total correlation over the batch", "x y", lambda o, b, m: F.mse_loss(o, b.y)
    + 0.1 * (-(o[:, None] - o[None]).square().sum(2)).logsumexp(1).mean())
of_batch("InfoVAE by MMD", "x y", lambda o, b, m: F.mse_loss(o, b.y) + _mmd(o, b.y))
# --- moments ---
of_batch("MMD of two samples", "x y", lambda o, b, m: _mmd(o, b.y))
of_batch("MMD with a median bandwidth", "x y", lambda o, b, m: _mmd(o, b.y, (o - b.y).square().sum(1).median().detach() + 0.5))
of_batch("CORAL", "x y", lambda o, b, m: (_covariance(o) - _covariance(b.y)).square().sum() / (4 * 16)
    + (o.mean(0) - b.y.mean(0)).square().sum())
of_batch("moments of order 2", "x y", lambda o, b, m: ((o**2).mean(0) - (b.y**2).mean(0)).square().mean())
of_batch("Wasserstein distance of columns", "x y", lambda o, b, m: (o.sort(0).values - b.y.sort(0).values).abs().mean())
of_batch("sliced Wasserstein distance", "x y", lambda o, b, m:
    ((o @ m.center).sort().values - (b.y @ m.center).sort().values).square().mean())
of_batch("Sinkhorn distance", "x y", lambda o, b, m: _transport(o, b.y))
of_batch("energy distance", "x y", lambda o, b, m: 2 * _norms(o, b.y).mean() - _norms(o, o).mean() - _norms(b.y, b.y).mean())
of_batch("Chamfer distance over the batch", "x y", lambda o, b, m: _norms(o, b.y).amin(1).mean() + _norms(o, b.y).amin(0).mean())
add("Chamfer distance of each cloud", "s y5", lambda o, b, m:
    (torch.cdist(o, b.y5).amin(2).mean(1) + torch.cdist(o, b.y5).amin(1).mean(1)).mean())
of_batch("independence by HSIC", "x y", lambda o, b, m: _hsic(o, b.y))
of_batch("decorrelation of outputs", "x", lambda o, b, m: (_covariance(o) - torch.eye(4)).square().mean())
of_batch("FID of two samples' diagonals", "x y", lambda o, b, m: (o.mean(0) - b.y.mean(0)).square().sum()
    + (o.var(0, correction=0).add(0.01).sqrt() - b.y.var(0, correction=0).add(0.01).sqrt()).square().sum())
of_batch("fairness: difference of two groups' means", "x y mask", lambda o, b, m: F.mse_loss(o, b.y)
    + ((o[:, 0] * b.mask).sum() / b.mask.sum().clamp(min=1) - (o[:, 0] * ~b.mask).sum() / (~b.mask).sum().clamp(min=1)).abs())
of_batch("risks of environments, their variance", "x y", lambda o, b, m: (o - b.y).square().mean(1).var(correction=0)
    + F.mse_loss(o, b.y))
of_batch("group robustness by the worst class", "x t", lambda o, b, m:
    ((c := F.one_hot(b.t, 4).to(o)).T @ F.cross_entropy(o, b.t, reduction="none") / c.sum(0).clamp(min=1)).max())

def _pinball(o: Tensor, y: Tensor) -> Tensor:
    levels = LEVELS.to(o)
    return torch.max(levels * (y - o), (levels - 1) * (y - o))

def _soft_dtw(o: Tensor, y: Tensor) -> Tensor:
    cost = (o[:, :, None] - y[:, None]).square()
    best: dict[tuple[int, int], Tensor] = {}
    for i in range(4):
        for j in range(4):
            before = [best[place] for place in ((i - 1, j), (i, j - 1), (i - 1, j - 1)) if place in best]
            least = -torch.stack([-value for value in before]).logsumexp(0) if before else 0.0
            best[i, j] = cost[:, i, j] + least
    return best[3, 3]

def _multivariate(o: Tensor) -> distributions.MultivariateNormal:
    scale = torch.diag_embed(F.softplus(o[:, 2:]) + 0.2)
    return distributions.MultivariateNormal(o[:, :2], scale_tril=scale)

def _zero_inflated(o: Tensor, counts: Tensor) -> Tensor:
    of_poisson = counts * o[:, 1] - o[:, 1].exp() - torch.lgamma(counts + 1)
    at_zero = torch.logaddexp(F.logsigmoid(o[:, 0]), F.logsigmoid(-o[:, 0]) + of_poisson)
    return -torch.where(counts == 0, at_zero, F.logsigmoid(-o[:, 0]) + of_poisson)

def _crps(mean: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    z = (y - mean) / scale
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    return scale * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))

def _evidential(o: Tensor, y: Tensor) -> Tensor:
    v, alpha, beta = F.softplus(o[:, 1]) + 0.1, F.softplus(o[:, 2]) + 1.1, F.softplus(o[:, 3]) + 0.1
    omega = 2 * beta * (1 + v)
    difference = y - o[:, 0]
    likelihood = 0.5 * (math.pi / v).log() - alpha * omega.log() + (alpha + 0.5) * (difference**2 * v + omega).log()
    return likelihood + alpha.lgamma() - (alpha + 0.5).lgamma() + 0.1 * difference.abs() * (2 * v + alpha)

def _cox(risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    order = time.argsort(descending=True)
    risk, event = risk[order], event[order]
    return -(risk - risk.logcumsumexp(0)) * event

def _hazards(o: Tensor, t: Tensor, event: Tensor) -> Tensor:
    steps = torch.arange(4)
    happens = (steps == t[:, None]) * event[:, None]
    at_risk = steps <= t[:, None]
    return F.binary_cross_entropy_with_logits(o, happens, reduction="none") * at_risk

def _kl(o: Tensor) -> Tensor:
    mean, log_variance = o[:, :2], o[:, 2:]
    return -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)

def _mmd(a: Tensor, c: Tensor, bandwidth: float | Tensor = 2.0) -> Tensor:
    def kernel(p: Tensor, q: Tensor) -> Tensor:
        return (-(p[:, None] - q[None]).square().sum(2) / bandwidth).exp()

    return kernel(a, a).mean() + kernel(c, c).mean() - 2 * kernel(a, c).mean()

def _covariance(o: Tensor) -> Tensor:
    centred = o - o.mean(0)
    return centred.T @ centred / len(o)

def _norms(a: Tensor, c: Tensor) -> Tensor:
    return ((a[:, None] - c[None]).square().sum(2) + 1e-4).sqrt()

def _transport(a: Tensor, c: Tensor) -> Tensor:
    cost = (a[:, None] - c[None]).square().sum(2)
    kernel = (-cost / 4).exp()
    u = v = torch.ones(len(a)).to(a) / len(a)
    for _ in range(4):
        u = 1 / len(a) / (kernel @ v)
        v = 1 / len(a) / (kernel.T @ u)
    return (u[:, None] * kernel * v * cost).sum()

def _hsic(a: Tensor, c: Tensor) -> Tensor:
    centre = torch.eye(len(a)) - 1 / len(a)
    k, j = ((-(p[:, None] - p[None]).square().sum(2)).exp() for p in (a, c))
    return torch.trace(k @ centre.to(a) @ j @ centre.to(a)) / len(a) ** 2 + 0.1 * (k * j).mean()
