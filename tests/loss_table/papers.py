"""Losses as recent papers and their code have them: preferences, policies, distillation, detection, physics, torch."""

from typing import Any

import torch
import torchmetrics.functional as metrics
from torch import Tensor
from torch.nn import functional as F

from loss_table.rows import Table

# fmt: off
table = Table("papers")
add, of_batch, of_mean, terms = table.adds_up, table.batch, table.of_a_mean, table.terms

def _of_words(o: Tensor, b: Any) -> Tensor:  # the log-probability of each word
    return o.log_softmax(2).gather(2, b.words[..., None])[..., 0]

def _ratio(o: Tensor, b: Any) -> Tensor:
    return (_of_words(o, b) - b.y5[..., 0].clamp(-1, 1) + 1.2).clamp(-2, 2).exp()

def _sequences(o: Tensor, b: Any) -> Tensor:
    return (_of_words(o, b) * b.valid).sum(1)

# --- preferences ---
terms("RPO: DPO and the chosen tokens", "s words valid old", lambda o, b, m: -F.logsigmoid(_sequences(o, b) - b.old).mean()
      - (_of_words(o, b) * b.valid).sum() / b.valid.sum())
add("KTO, both sides put together", "s words valid old mask", lambda o, b, m: torch.cat(
    [1 - (_sequences(o, b) - b.old)[b.mask].sigmoid(), 1 - (b.old - _sequences(o, b))[~b.mask].sigmoid()]).mean())
# --- policies ---
add("CISPO: clipped ratios, detached", "s words valid advantage y5", lambda o, b, m: -(
    _ratio(o, b).clamp(max=1.2).detach() * _of_words(o, b) * b.advantage[:, None] * b.valid).sum() / b.valid.sum())
add("GRPO with a KL of tokens", "s words valid advantage p5 y5", lambda o, b, m: (
    ((-_ratio(o, b) * b.advantage[:, None] + 0.04 * _k3(o, b)) * b.valid).sum(1) / b.valid.sum(1).clamp(min=1)).mean())
terms("VAPO: positives beside it", "s words valid advantage y5", lambda o, b, m: -(
    _ratio(o, b) * b.advantage[:, None] * b.valid).sum() / b.valid.sum() - 0.1 * _of_positives(o, b))
# --- distillation and language ---
add("the two likeliest of the teacher", "s p5 valid", lambda o, b, m: _two_likeliest(o, b))
add("AugMix: divergence of three views", "x v z t", lambda o, b, m: _three_views(o, b, m))
add("packed rows, each document by its mean", "s words chosen", lambda o, b, m: _of_documents(o, b, by_documents=True))
add("smoothing with ignored labels by hand", "x ignored", lambda o, b, m: _smoothed(o, b.ignored))
add("token weights of a reference over their sum", "s words valid p5", lambda o, b, m: (
    -_of_words(o, b) * (w := b.p5[..., 0] * b.valid)).sum() / w.sum())
# --- detection and segmentation ---
add("SSD: hard negatives of each row by all positives", "s y5 chosen words", lambda o, b, m: _ssd(o, b))
terms("DETR: weighed classes and boxes by their number", "s words chosen y5", lambda o, b, m: F.cross_entropy(
    o.transpose(1, 2), b.words, weight=torch.tensor([0.1, 1.0, 1.0, 1.0]).to(o))
    + ((o - b.y5).abs().sum(2) * b.chosen).sum() / b.chosen.sum())
add("quality focal by positives", "x q positive", lambda o, b, m: (F.binary_cross_entropy_with_logits(
    o, 0.7 * b.positive.to(o), reduction="none") * (0.7 * b.positive - o.sigmoid()).abs().square()
    ).sum() / b.positive.sum())
add("task-aligned by the sum of scores", "x q pos", lambda o, b, m: F.binary_cross_entropy_with_logits(
    o, b.pos / 2, reduction="sum") / b.pos.sum().clamp(min=1))
add("all anchors and a penalty of theirs by positives", "s chosen", lambda o, b, m: (
    (F.softplus(-o[..., 0]) * b.chosen).sum() + 0.01 * o.square().sum()) / b.chosen.sum().clamp(min=1))
add("images that have any, each by its mean", "s chosen", lambda o, b, m: _images_that_have(o, b))
# --- physics, graphs, generation ---
terms("inside and at the boundary", "x y mask", lambda o, b, m: (o - b.y).square().mean()
      + 10 * (o[:, 0].square() * b.mask).sum() / b.mask.sum())
add("score matching by a trace", "x", lambda o, b, m: _trace(b, m).mean())
# --- metrics, and transforms of torch ---
add("metric: divergence", "x p", lambda o, b, m: metrics.kl_divergence(b.p, o.softmax(1)))
of_batch("metric: Pearson", "x y", lambda o, b, m: 1 - metrics.pearson_corrcoef(o[:, 0], b.y[:, 0]) if len(o) > 1 else o.mean())
of_batch("metric: R squared", "x y", lambda o, b, m: 1 - metrics.r2_score(o.flatten(), b.y.flatten()))
add("gradients of rows by vmap", "x t", lambda o, b, m: _by_vmap(b, m))
add("a scripted loss", "x t", lambda o, b, m: _scripted(o, b.t))
add("a compiled loss", "x t", lambda o, b, m: _compiled(o, b.t))
add("a function of its own, mean", "x y", lambda o, b, m: _OwnMean.apply(o, b.y))

def _k3(o: Tensor, b: Any) -> Tensor:
    difference = b.p5.log().gather(2, b.words[..., None])[..., 0] - _of_words(o, b)
    return difference.exp() - difference - 1

def _of_positives(o: Tensor, b: Any) -> Tensor:
    tokens = b.valid & (b.advantage > 0)[:, None]
    return (_of_words(o, b) * tokens).sum() / tokens.sum().clamp(min=1)

def _two_likeliest(o: Tensor, b: Any) -> Tensor:
    probabilities, places = b.p5.topk(2, dim=2)
    return -((probabilities * o.log_softmax(2).gather(2, places)).sum(2) * b.valid).sum() / b.valid.sum()

def _three_views(o: Tensor, b: Any, m: Any) -> Tensor:
    views = [o.softmax(1), m(b.v).softmax(1), m(b.z).softmax(1)]
    middle = (sum(views) / 3).clamp(1e-7, 1).log()
    return F.cross_entropy(o, b.t) + sum(F.kl_div(middle, view, reduction="batchmean") for view in views) / 3

def _of_documents(o: Tensor, b: Any, by_documents: bool) -> Tensor:
    """A document begins at each chosen place of a row, and at its first."""
    begins = b.chosen.clone()
    begins[:, 0] = True
    document = begins.flatten().cumsum(0) - 1
    losses = -_of_words(o, b).flatten()
    if not by_documents:
        return losses.mean()
    number = int(document[-1]) + 1
    sums = losses.new_zeros(number).index_add(0, document, losses)
    return (sums / document.bincount()).mean()

def _smoothed(o: Tensor, labels: Tensor) -> Tensor:
    logs, counted = o.log_softmax(1), labels != -100
    of_label = -logs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return ((0.9 * of_label - 0.1 * logs.mean(1)) * counted).sum() / counted.sum().clamp(min=1)

def _ssd(o: Tensor, b: Any) -> Tensor:
    losses = F.cross_entropy(o.transpose(1, 2), b.words, reduction="none")
    of_negatives = losses.masked_fill(b.chosen, 0.0)
    ranks = of_negatives.argsort(1, descending=True).argsort(1)
    is_hard = (ranks < 3 * b.chosen.sum(1, keepdim=True)) & ~b.chosen
    boxes = (F.smooth_l1_loss(o, b.y5, reduction="none").sum(2) * b.chosen).sum()
    return ((losses * (b.chosen | is_hard)).sum() + boxes) / b.chosen.sum()

def _images_that_have(o: Tensor, b: Any) -> Tensor:
    of_images = (o[..., 0].square() * b.chosen).sum(1) / b.chosen.sum(1).clamp(min=1)
    return of_images.sum() / b.chosen.any(1).sum().clamp(min=1)

def _trace(b: Any, m: Any) -> Tensor:
    x = b.x.clone().requires_grad_()
    score = m(x)
    slopes = [torch.autograd.grad(score[:, k].sum(), x, create_graph=True)[0][:, k] for k in range(4)]
    return sum(slopes) + score.square().sum(1) / 2

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
