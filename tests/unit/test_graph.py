"""The weight that is read from a loss's graph: against the denominator computed by hand, and against the full batch."""

from __future__ import annotations

import pytest
import torch
from support import relative_error
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_accum.weighing.denominator import UnreadableLossError
from lightning_accum.weighing.graph import read_loss, read_terms, terms_of
from lightning_accum.weighing.safeguards import gradients_of_zero, is_contrastive
from lightning_accum.weighing.weight import Weigher
from lightning_accum.window import Window

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
SIZES = (1, 3, 5, 2)


def fail(message: str) -> None:
    raise AssertionError(message)


def accumulate(net, loss_of, batches) -> float:
    """What the package does in a window, without Lightning. Returns the window's loss; leaves its gradients in ``net``."""
    window, weigher = Window(torch.device("cpu")), Weigher("auto", fail)
    for batch in batches:
        loss = loss_of(net, batch)
        loss.backward(gradient=window.add(loss, weigher(loss, batch)))
    closed = window.close([p.grad for p in net.parameters() if p.grad is not None])
    assert not closed.do_terms_disagree
    assert not closed.do_factors_differ
    return closed.loss


def gradients(net):
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]


@pytest.mark.parametrize("name", LOSSES)
def test_window_of_micro_batches_equals_the_batch(name: str) -> None:
    batches = [make(rows, seed) for seed, rows in enumerate(SIZES)]
    windowed, full = Net(), Net()
    loss = accumulate(windowed, LOSSES[name], batches)
    expected = LOSSES[name](full, join(batches))
    expected.backward()
    # a loss that was rounded to float32 on its way has a gradient that is exact, but a value that is not
    assert loss == pytest.approx(expected.item(), rel=1e-6 if name == "cast" else 1e-12)
    assert relative_error(gradients(windowed), gradients(full)) < 1e-12


@pytest.mark.parametrize(
    "name", ["cross entropy", "label smoothing", "label smoothing and class weights", "2d", "selected mean", "masked mean",
             "masked mean, clamped", "masked mean, safe", "dot product over its mask"]
)  # fmt: skip
def test_micro_batch_with_nothing_but_ignored_labels_adds_nothing(name: str) -> None:
    batches = [make(rows, seed) for seed, rows in enumerate(SIZES)]
    empty = make(4, 9)
    empty["target"][:] = -100
    empty["mask"][:] = False
    windowed, full = Net(), Net()
    loss = accumulate(windowed, LOSSES[name], [batches[0], empty, *batches[1:]])
    expected = LOSSES[name](full, join(batches))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert relative_error(gradients(windowed), gradients(full)) < 1e-12


def test_multilabel_margin_counts_rows() -> None:
    logits = torch.randn(5, 3, requires_grad=True)
    assert read_loss(F.multilabel_margin_loss(logits, torch.zeros(5, 3, dtype=torch.long))).weight == 5


def test_ctc_mean_counts_samples() -> None:
    log_probabilities = torch.randn(9, 4, 5, requires_grad=True).log_softmax(-1)
    lengths = torch.full((4,), 9), torch.tensor([3, 2, 1, 3])
    assert read_loss(F.ctc_loss(log_probabilities, torch.ones(4, 3, dtype=torch.long), *lengths)).weight == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_walked_through(dtype: torch.dtype) -> None:
    net, batch = nn.Linear(4, 3), make(6, 1)
    with torch.autocast("cpu", dtype=dtype):
        loss = F.cross_entropy(net(batch["x"].float()), batch["target"])
    assert float(read_loss(loss).weight) == (batch["target"] != -100).sum()


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits.square().mean()

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones(2, 3) * gradient


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda t: Hidden.apply(t), "HiddenBackward"),
        (lambda t: t.square().mean().sqrt(), "SqrtBackward"),
        (lambda t: t.square().mean().exp() * t.mean(), "product of losses"),
        (lambda t: t.mean() / t.square().mean(), "quotient of losses"),
        (lambda t: t.square().sum() * (1 / 6), "one over a count"),
        (lambda t: t.square().sum() / 100.5, "cannot be a count"),
        (lambda t: torch.linalg.vector_norm(t), "LinalgVectorNormBackward"),
        (lambda t: t.flatten()[0], "SelectBackward"),
        (lambda t: t.mean(0).square().sum(), "of a function of MeanBackward1 over the batch"),
        (lambda t: torch.relu(1 - t.var(0).sqrt()).mean(), "MeanBackward0 of VarBackward0"),
        (lambda t: (t.mean(0) * t.square().mean(0)).sum(), "combined with a reduction over the batch"),
        (lambda t: (t.mean() + t.square()).sum(), "combined with a reduction over the batch"),
        (lambda t: (torch.stack([t.mean(), t.square().mean()]) * t.flatten()[:2] + t[0, :2]).sum(), "combined with a reduction"),
        (lambda t: F.mse_loss(t.mean(0), torch.ones(3)), "MseLossBackward0 of MeanBackward1 over the batch"),
        (lambda t: torch.stack([t.mean(), t.square().mean()]).view(2, 1).mean(), "put together by StackBackward0"),
        (lambda t: torch.stack([t.sum(), t.square().sum()]).mean(), "a mean of sums"),
        (lambda t: torch.stack([t.mean(), t.square().mean(), t.exp().mean()])[:2].sum(), "put together by StackBackward0"),
        (lambda t: torch.stack([t.mean(), t.square().mean()]).gather(0, torch.tensor([1])).sum(), "put together by StackBackward0"),
        (lambda t: assigned(t.mean(), t.square().mean()).sum(), "combined with a reduction over the batch by .*CopySlices"),
        (lambda t: assigned(t.mean(), t.square().mean())[0], "combined with a reduction over the batch by .*CopySlices"),
        (lambda t: t.mean(0).clamp(min=0.1)[1:].sum(), "of a function of MeanBackward1 over the batch"),
        (lambda t: t.sort(0).values[:1].mean(), "MeanBackward0 of SortBackward0"),
        (lambda t: t.cumsum(0).mean(), "MeanBackward0 of CumsumBackward0"),
        (lambda t: t.max(0).values.mean(), "MeanBackward0 of MaxBackward0"),
        (lambda t: (t / t.max()).mean(), "combined with a reduction over the batch"),
        (lambda t: (t.softmax(0) * torch.rand(2, 3)).sum(1).mean(), "MeanBackward0 of SoftmaxBackward0"),
        (lambda t: (t.square().sum(0) / (t.exp().sum(0) + 1)).mean(), "combined with a reduction over the batch by DivBackward0"),
        (lambda t: (t.square().sum(0) / (t.exp().sum(0) + 1))[1:].sqrt().mean(), "combined with a reduction over the batch by Div"),
    ],
)
def test_what_hides_its_denominator_is_refused_and_named(loss, found: str) -> None:
    t = torch.randn(2, 4) @ torch.randn(4, 3, requires_grad=True)
    with pytest.raises(UnreadableLossError, match=found):
        read_terms(terms_of(loss(t), lambda: 2))


def assigned(*losses: torch.Tensor) -> torch.Tensor:
    vector = torch.zeros(len(losses))
    for place, loss in enumerate(losses):
        vector[place] = loss
    return vector


@pytest.mark.parametrize(
    ("loss", "is_refused"),
    [
        (lambda net, b: each(net, b).sum() * (1 / (9 + int(b["mask"].sum()))), True),
        (lambda net, b: each(net, b).sum() * (1 / (9 + b["mask"].sum())), True),
        (lambda net, b: each(net, b).mean() * len(b["x"]), False),
        (lambda net, b: each(net, b).mean() * b["y"].mean(), False),
        (lambda net, b: (loss := each(net, b).mean()) * loss.detach(), False),
    ],
)
@pytest.mark.parametrize("is_on_host", [True, False])
def test_a_factor_that_changes_inside_a_window_is_found(loss, is_refused: bool, is_on_host: bool) -> None:
    net, window, weigher = Net(), Window(torch.device("cpu")), Weigher("auto", fail)
    window._is_on_host = is_on_host
    for seed, rows in enumerate((7, 5, 7)):
        window.add(micro_batch_loss := loss(net, batch := make(rows, seed)), weigher(micro_batch_loss, batch))
    if is_refused:
        with pytest.raises(ValueError, match="multiplied by another factor in each micro-batch"):
            window.close([])
    else:
        assert window.close([]).do_factors_differ


def test_a_factor_may_change_from_window_to_window() -> None:
    net, window, weigher = Net(), Window(torch.device("cpu")), Weigher("auto", fail)
    for annealed in (0.0, 0.1, 0.2, 1.0):
        for seed in range(3):
            batch = make(4, seed)
            loss = ce(net, batch) + annealed * each(net, batch).mean() + annealed * torch.tensor(2.0) * bce(net, batch)
            window.add(loss, weigher(loss, batch))
        assert not window.close([]).do_factors_differ


@pytest.mark.parametrize("is_on_host", [True, False])
def test_a_window_of_losses_that_count_different_things_is_refused(is_on_host: bool) -> None:
    """One task is a mean over samples, the other over elements."""
    net, window, weigher = Net(), Window(torch.device("cpu")), Weigher("auto", fail)
    window._is_on_host = is_on_host
    for seed, loss_of in enumerate((each_mean, ce, lambda net, b: F.mse_loss(net.logits(b["x"]), b["probabilities"]), bce)):
        window.add(loss := loss_of(net, batch := make(4, seed)), weigher(loss, batch))
    with pytest.raises(ValueError, match="divided by its samples and by what its mean squared error counts"):
        window.close([])


def test_tasks_that_are_all_means_over_samples_share_a_window() -> None:
    net, window, weigher = Net(), Window(torch.device("cpu")), Weigher("auto", fail)
    for seed, loss_of in enumerate((each_mean, ce, bce, masked_by_number)):
        window.add(loss := loss_of(net, batch := make(4, seed)), weigher(loss, batch))
    assert window.close([]).weight == 3 * 4 + (make(4, 1)["target"] != -100).sum()


@pytest.mark.parametrize("is_on_host", [True, False])
def test_nothing_times_zero_is_no_other_kind_of_loss_in_a_window_of_sums(is_on_host: bool) -> None:
    net, window, weigher = Net(), Window(torch.device("cpu")), Weigher("auto", fail)
    window._is_on_host = is_on_host
    losses = [each(net, make(3, 1)).sum(), 0.0 * each(net, make(3, 2)).sum(), (net.logits(make(2, 3)["x"]) * 0).mean()]
    for loss in losses:
        window.add(loss, weigher(loss, torch.zeros(3, 1)))
    assert float(window.close([]).loss) == pytest.approx(losses[0].item(), rel=1e-12)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_row_without_any_label_weighs_nothing_and_a_margin_that_is_kept_does(rows: int) -> None:
    o = torch.full((rows, 3), 2.0, requires_grad=True) * torch.ones(3)
    nothing = torch.zeros(rows, dtype=torch.bool)
    weigher = Weigher("auto", fail)
    for masked_sum in (torch.where(nothing, o.sum(1), 0.0), o.sum(1).masked_fill(~nothing, 0.0), o.sum(1) * nothing):
        assert weigher(loss := masked_sum.sum() / nothing.sum().clamp(min=1), o).weight == 0, loss
    assert rows == 1 or weigher(torch.einsum("i,i->", o.sum(1), nothing.float()) / nothing.sum().clamp(min=1), o).weight == 0
    assert weigher(F.relu(1 - o[:, 0]).sum() / rows, o).weight == rows


@pytest.mark.parametrize(
    "loss",
    [
        lambda t: F.cross_entropy(t, torch.tensor([0, 1])),
        lambda t: F.mse_loss(t, torch.zeros(2, 3)),
        lambda t: (t.square().mean() + F.cross_entropy(t, torch.tensor([0, 1]))) / 2,
        lambda t: t.mean() + 10 * t.square().mean(),
        lambda t: t.sum() / torch.tensor(6.0),
    ],
)
def test_a_graph_that_a_backward_has_freed_is_not_readable(loss) -> None:
    t = loss(torch.randn(2, 4) @ torch.randn(4, 3, requires_grad=True))
    t.backward()
    with pytest.raises(UnreadableLossError, match="already been freed"):
        read_loss(t)


def test_compiled_loss_is_refused() -> None:
    compiled = torch.compile(lambda logits, target: F.cross_entropy(logits, target), backend="aot_eager")
    with pytest.raises(UnreadableLossError, match="CompiledFunctionBackward"):
        read_loss(compiled(torch.randn(3, 4, requires_grad=True), torch.tensor([0, 1, 2])))


def test_router_term_takes_the_weight_of_the_cross_entropy_and_is_named() -> None:
    net, batch = Net(), make(5, 1)
    router = log_softmax(net, batch).exp()
    reading = read_loss(ce(net, batch) + 0.01 * (router.mean(0) * router.square().mean(0)).sum())
    assert reading.criterion == "cross entropy"
    assert [term.criterion for term in reading.others] == [
        "SumBackward0 of what is combined with a reduction over the batch by MulBackward0"
    ]


def test_penalty_beside_a_sum_is_named_since_it_would_be_added_in_every_micro_batch() -> None:
    net, batch = Net(), make(5, 1)
    reading = read_loss(ce(net, batch, reduction="sum") + net.value.weight.square().sum())
    assert reading.weight is None
    assert len(reading.others) == 1


def test_terms_of_different_counts_are_found_to_disagree() -> None:
    net, window, weigher = Net(), Window(torch.device("cpu")), Weigher("auto", fail)
    for seed, rows in enumerate(SIZES):
        batch = make(rows, seed)
        loss = ce(net, batch) + each(net, batch).mean()
        window.add(loss, weigher(loss, batch))
    assert window.close([]).do_terms_disagree


@pytest.mark.parametrize(
    "mean", [lambda t: t.mean(), lambda t: t.sum() / 16, lambda t: t.values().mean(), lambda t: t.values().sum() / t.offsets()[-1]]
)
def test_a_mean_over_a_jagged_tensor_is_weighed_by_its_entries(mean) -> None:
    w = torch.ones((), dtype=D, requires_grad=True)
    jagged = torch.nested.nested_tensor([torch.rand(3, 2, dtype=D), torch.rand(5, 2, dtype=D)], layout=torch.jagged)
    loss = mean(w * jagged)
    weight = read_loss(loss).weight
    (gradient,) = torch.autograd.grad(loss * weight, w)
    expected = jagged.values().sum()
    assert gradient.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("scale", [1.0, 0.07])
def test_clip_is_found_contrastive(scale: float) -> None:
    images, texts = torch.randn(6, 8, requires_grad=True), torch.randn(6, 8)
    logits, labels = images @ texts.T / scale, torch.arange(6)
    assert is_contrastive(terms_of((F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2))


def test_ten_classes_in_a_batch_of_ten_are_not_contrastive() -> None:
    logits = torch.randn(10, 10, requires_grad=True)
    assert is_contrastive(terms_of(F.cross_entropy(logits, torch.arange(10).flip(0)))) is False
    assert is_contrastive(terms_of(F.cross_entropy(logits[:4], torch.arange(4)))) is None


def test_a_loss_without_weight_reaches_its_parameters_and_adds_zeros() -> None:
    net, batch = Net(), make(3, 1)
    with torch.no_grad():
        net.logits.weight[0, 0] = torch.inf
    loss = ce(net, batch)
    with gradients_of_zero(loss):
        loss.backward(retain_graph=True)
    assert torch.equal(net.logits.weight.grad, torch.zeros(3, 4, dtype=D))
    assert torch.equal(net.logits.bias.grad, torch.zeros(3, dtype=D))
    assert net.value.weight.grad is None
    loss.backward()
    assert net.logits.weight.grad.isnan().any()  # as without
