"""Losses whose weight can be read from their graph, of one small net: a row each."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

D = torch.float64


CLASS_WEIGHTS = torch.tensor([0.3, 1.7, 0.9], dtype=D)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logits = nn.Linear(4, 3, dtype=D)
        self.value = nn.Linear(4, 1, dtype=D)
        self.log_scale = nn.Parameter(torch.tensor(0.3, dtype=D))


def make(rows: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 3, (rows,), generator=generator)
    target[1:][torch.rand(rows - 1, generator=generator) < 0.4] = -100
    probabilities = torch.rand(rows, 3, generator=generator, dtype=D)
    return {
        "x": torch.randn(rows, 4, generator=generator, dtype=D),
        "target": target,
        "probabilities": probabilities / probabilities.sum(1, keepdim=True),
        "y": torch.rand(rows, generator=generator, dtype=D),
        "mask": target != -100,
    }


def join(batches):
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def each(net, b):
    return (net.value(b["x"])[:, 0] - b["y"]) ** 2


def each_mean(net, b):
    return each(net, b).mean()


def masked_by_number(net, b):
    return (each(net, b) * b["y"]).sum() / len(b["x"])


def images(net, b):
    return net.logits(b["x"])[:, :, None, None].expand(-1, -1, 2, 2).contiguous(), b["target"][:, None, None].expand(-1, 2, 2)


def safe_divide(numerator, denominator):  # as torchmetrics does it
    return torch.where(denominator != 0, numerator / denominator, 0.0)


def masked(net, b, denominator=lambda mask: mask.sum()):
    return (each(net, b) * b["mask"].to(D)).sum() / denominator(b["mask"])


def log_softmax(net, b):
    return F.log_softmax(net.logits(b["x"]), 1)


def ce(net, b, **kwargs):
    return F.cross_entropy(net.logits(b["x"]), b["target"], **kwargs)


def picked(values):
    return [values[place] for place in range(len(values))]


def dice(net, b, dims):
    p, y = log_softmax(net, b).exp(), b["probabilities"]
    return 1 - 2 * (p * y).sum(dims) / (p.sum(dims) + y.sum(dims) + 1)


def steps(columns):
    return torch.cat([columns, columns.flip(1), columns.cumsum(1)], 1)


def ctc(net, b):
    log_p, rows = torch.stack([log_softmax(net, b)] * 5), len(b["x"])
    lengths = torch.full((rows,), 5), torch.full((rows,), 2)
    return F.ctc_loss(log_p, torch.ones(rows, 2, dtype=torch.long), *lengths, reduction="sum")


def bce(net, b, **kwargs):
    return F.binary_cross_entropy_with_logits(net.value(b["x"])[:, 0], b["y"], **kwargs)


def value_loss(function, **kwargs):
    return lambda net, b: function(net.value(b["x"])[:, 0], b["y"], **kwargs)


LOSSES = {
    "cross entropy": ce,
    "class weights": lambda net, b: ce(net, b, weight=CLASS_WEIGHTS),
    "label smoothing": lambda net, b: ce(net, b, label_smoothing=0.1),
    "label smoothing and class weights": lambda net, b: ce(net, b, label_smoothing=0.1, weight=CLASS_WEIGHTS),
    "class probabilities": lambda net, b: F.cross_entropy(net.logits(b["x"]), b["probabilities"]),
    "nll_loss": lambda net, b: F.nll_loss(log_softmax(net, b), b["target"]),
    "2d": lambda net, b: F.cross_entropy(*images(net, b)),
    "kl_div batchmean": lambda net, b: F.kl_div(log_softmax(net, b), b["probabilities"], reduction="batchmean"),
    "kl_div mean": lambda net, b: F.kl_div(log_softmax(net, b), b["probabilities"], reduction="none").mean(),
    "mse": value_loss(F.mse_loss),
    "l1": value_loss(F.l1_loss),
    "smooth l1": value_loss(F.smooth_l1_loss),
    "huber": value_loss(F.huber_loss),
    "bce with logits": bce,
    "bce": lambda net, b: F.binary_cross_entropy(net.value(b["x"])[:, 0].sigmoid(), b["y"]),
    "soft margin": value_loss(F.soft_margin_loss),
    "multi margin": lambda net, b: F.multi_margin_loss(net.logits(b["x"]), b["target"].clamp(min=0)),
    "gaussian nll": lambda net, b: F.gaussian_nll_loss(net.value(b["x"])[:, 0], b["y"], b["y"] + 0.5),
    "mean": lambda net, b: each(net, b).mean(),
    "mean over dims": lambda net, b: log_softmax(net, b).square().mean(dim=(0, 1)),
    "mean of means": lambda net, b: log_softmax(net, b).square().mean(1).mean(),
    "mean of means over the batch first": lambda net, b: log_softmax(net, b).square().mean(0).mean(),
    "sum of means over the batch": lambda net, b: log_softmax(net, b).square().mean(0).sum(),
    "nanmean": lambda net, b: each(net, b).nanmean(),
    "selected mean": lambda net, b: each(net, b)[b["mask"]].mean(),
    "masked mean": masked,
    "masked mean over a float": lambda net, b: masked(net, b, lambda mask: mask.to(D).sum()),
    "masked mean over an item": lambda net, b: masked(net, b, lambda mask: int(mask.sum())),
    "masked mean, clamped": lambda net, b: masked(net, b, lambda mask: mask.sum().clamp(min=1)),
    "masked mean, safe": lambda net, b: safe_divide((each(net, b) * b["mask"]).sum(), b["mask"].sum()),
    "dot product over its mask": lambda net, b: torch.dot(each(net, b), b["mask"].to(D)) / b["mask"].sum(),
    "sum over the batch size": lambda net, b: each(net, b).sum() / len(b["x"]),
    "constant factor": lambda net, b: 0.25 * ce(net, b) / 3,
    "tensor factor": lambda net, b: torch.tensor(0.7, dtype=D) * ce(net, b),
    "cast": lambda net, b: ce(net, b).to(torch.float32).to(D),
    "mean of one": lambda net, b: ce(net, b).unsqueeze(0).mean(),
    "two of the same count": lambda net, b: bce(net, b) + 0.3 * value_loss(F.mse_loss)(net, b),
    "stacked": lambda net, b: torch.stack([bce(net, b), value_loss(F.mse_loss)(net, b)]).mean(),
    "a list summed": lambda net, b: sum([bce(net, b), value_loss(F.mse_loss)(net, b)]) / 2,
    "question answering": lambda net, b: (ce(net, b) + F.cross_entropy(-net.logits(b["x"]), b["target"])) / 2,
    "weight penalty": lambda net, b: ce(net, b) + 0.1 * sum(p.square().sum() for p in net.parameters()),
    "learnt weighting of tasks": lambda net, b: torch.exp(-net.log_scale) * ce(net, b) + net.log_scale,
    "minus": lambda net, b: 1 - ce(net, b),
    "checkpointed activations": lambda net, b: F.cross_entropy(checkpoint(net.logits, b["x"], use_reentrant=False), b["target"]),
    "checkpointed loss": lambda net, b: checkpoint(lambda: ce(net, b), use_reentrant=False),
    "criterion's sum over a count": lambda net, b: ce(net, b, reduction="sum") / b["mask"].sum(),
    "criterion's sum over the batch size": lambda net, b: bce(net, b, reduction="sum") / len(b["x"]),
    "sum divided twice": lambda net, b: log_softmax(net, b).square().sum() / 3 / len(b["x"]),
    "sums of a variational autoencoder over the batch size": lambda net, b: (
        (bce(net, b, reduction="sum") + log_softmax(net, b).square().sum()) / len(b["x"])
    ),
    "label smoothing by hand": lambda net, b: (
        (0.9 * ce(net, b, reduction="sum") - 0.1 * (log_softmax(net, b) * b["mask"][:, None]).sum()) / b["mask"].sum()
    ),
    "divided before the sum": lambda net, b: (each(net, b) / len(b["x"])).sum(),
    "divided by the mask before the sum": lambda net, b: (each(net, b) * b["mask"] / b["mask"].sum()).sum(),
    "mean over the batch, then a weighted sum": lambda net, b: (CLASS_WEIGHTS * log_softmax(net, b).mean(0)).sum(),
    "mean over the batch, cast, then a sum": lambda net, b: (-log_softmax(net, b).mean(0)).to(D).sum(),
    "mean over the batch, viewed, then a mean": lambda net, b: log_softmax(net, b).mean(0).view(-1).mean(),
    "sum over the batch divided, then a mean": lambda net, b: (log_softmax(net, b).sum(0) / len(b["x"])).mean(),
    "mean over the mask's mean": lambda net, b: (each(net, b) * b["mask"]).mean() / b["mask"].to(D).mean(),
    "logsumexp of a row": lambda net, b: net.logits(b["x"]).logsumexp(-1).mean(),
    "cross entropy and z-loss": lambda net, b: bce(net, b) + 0.01 * net.logits(b["x"]).logsumexp(-1).square().mean(),
    "mixture density": lambda net, b: -torch.logsumexp(log_softmax(net, b) - net.logits(b["x"]).square(), 1).mean(),
    "standard deviation of a row": lambda net, b: net.logits(b["x"]).std(1).mean(),
    "variance of a row, summed over the batch size": lambda net, b: net.logits(b["x"]).var(-1).sum() / len(b["x"]),
    "largest of a row": lambda net, b: net.logits(b["x"]).topk(2, dim=1).values.mean() + net.logits(b["x"]).max(-1).values.mean(),
    "sorted row, trimmed": lambda net, b: log_softmax(net, b).square().sort(1).values[:, :2].mean(),
    "running sum of a row": lambda net, b: log_softmax(net, b).cumsum(1).square().mean(),
    "norm of a row": lambda net, b: (net.logits(b["x"]) - b["probabilities"]).norm(dim=1).mean(),
    "Dice of each sample": lambda net, b: dice(net, b, 1).mean(),
    "column weights that add up to 1": lambda net, b: (log_softmax(net, b).square() * (CLASS_WEIGHTS / CLASS_WEIGHTS.sum())).sum(),
    "column weights of mean 1": lambda net, b: (log_softmax(net, b).square() * (CLASS_WEIGHTS / CLASS_WEIGHTS.mean())).mean(),
    "columns, weighed by a product": lambda net, b: log_softmax(net, b).square().mean(0) @ CLASS_WEIGHTS,
    "tasks, weighed by a product": lambda net, b: torch.stack([bce(net, b), each(net, b).mean()]) @ CLASS_WEIGHTS[:2],
    "two columns": lambda net, b: (columns := log_softmax(net, b).square().mean(0))[0] + 2 * columns[1],
    "some columns": lambda net, b: log_softmax(net, b).square().mean(0)[torch.tensor([0, 2])].sum(),
    "learnt scale under the loss": lambda net, b: ce(net, b) / (2 * net.log_scale**2) + net.log_scale.log(),
    "learnt scale, exponential": lambda net, b: ce(net, b) / net.log_scale.exp() + net.log_scale,
    "loss over its own value": lambda net, b: (loss := ce(net, b)) / loss.detach(),
    "sum of sums of rows over a number": lambda net, b: (
        (log_softmax(net, b).square() * b["mask"][:, None]).sum(1).sum() / max(1, int(3 * b["mask"].sum()))
    ),
    "sum of selected rows over the batch size": lambda net, b: each(net, b)[b["mask"]].sum() / len(b["x"]),
    "halves over one count": lambda net, b: ((e := each(net, b))[:1].sum() + e[1:].sum()) / len(b["x"]),
    "chunks over one count": lambda net, b: (
        sum(F.cross_entropy(o, t, reduction="sum") for o, t in zip(net.logits(b["x"]).split(2), b["target"].split(2), strict=True))
        / max(1, int(b["mask"].sum()))
    ),
    "ctc sum over a count": lambda net, b: ctc(net, b) / (2 * len(b["x"])),
    "weights over their own sum": lambda net, b: (each(net, b) * b["y"]).sum() / float(b["y"].sum()),
    "einsum": lambda net, b: torch.einsum("bd,bd->", log_softmax(net, b), b["probabilities"]) / len(b["x"]),
    "einsum of rows": lambda net, b: torch.einsum("bd,bd->b", log_softmax(net, b), b["probabilities"]).mean(),
    "bmm": lambda net, b: torch.bmm(log_softmax(net, b)[:, None], b["probabilities"][:, :, None]).sum(),
    "time first": lambda net, b: steps(log_softmax(net, b)).square().T.mean(0).sqrt().mean(),
    "time first, masked": lambda net, b: (
        (steps(log_softmax(net, b)) * (mask := steps(b["probabilities"]) > 0.1)).T.sum(0) / mask.T.sum(0).clamp(min=1)
    ).mean(),
    "sum over rows, mean over columns": lambda net, b: log_softmax(net, b).square().sum(0).mean(),
    "loop over samples": lambda net, b: sum(picked(each(net, b))) / len(b["x"]),
    "loop over samples, each over their number": lambda net, b: sum(e / len(b["x"]) for e in each(net, b)),
    "intersection over union of selected samples": lambda net, b: (
        log_softmax(net, b).square().sum(1) / (1 + log_softmax(net, b).abs().sum(1))
    )[b["mask"]].mean(),
    "a sort in each sample": lambda net, b: torch.stack(
        [row.sort(descending=True).values @ CLASS_WEIGHTS.repeat(3) for row in steps(log_softmax(net, b))]
    ).mean(),
    "steps stacked first": lambda net, b: torch.stack([each(net, b), net.value(b["x"])[:, 0]]).sum(0).mean(),
    "nan_to_num of the loss": lambda net, b: ce(net, b).nan_to_num(),
    "nan_to_num of the losses": lambda net, b: each(net, b).nan_to_num().mean(),
    "mask by where": lambda net, b: torch.where(b["mask"], each(net, b), 0.0).sum() / b["mask"].sum().clamp(min=1),
    "mask by filling": lambda net, b: each(net, b).masked_fill(~b["mask"], 0.0).sum() / b["mask"].sum().clamp(min=1),
    "multilabel soft margin sum": lambda net, b: F.multilabel_soft_margin_loss(
        net.logits(b["x"]), (b["probabilities"] > 0.3).to(D), reduction="sum"
    ),
    "sum of means of rows by hand": lambda net, b: (images(net, b)[0].square().flatten(1).sum(1) / 12).sum(),
    "sum times a constant tensor": lambda net, b: each(net, b).sum() * torch.tensor(0.37, dtype=D),
    "penalties of parameters": lambda net, b: (
        ce(net, b) + 0.1 * net.logits.weight.abs().max() + 0.1 * (net.logits.weight @ net.logits.weight.T).square().sum().sqrt()
    ),
    "sum": lambda net, b: ce(net, b, reduction="sum"),
    "sum of squares": lambda net, b: 0.5 * each(net, b).sum(),
    "sums, as of a variational autoencoder": lambda net, b: bce(net, b, reduction="sum") + log_softmax(net, b).square().sum(),
}
