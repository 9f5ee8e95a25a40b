"""The weight that is read from a loss's graph: against the denominator computed by hand, and against the full batch."""

from __future__ import annotations

import pytest
import torch
from readable_losses import LOSSES, D, Net, bce, ce, each, each_mean, join, log_softmax, make, masked_by_number
from support import relative_error
from torch import nn
from torch.nn import functional as F

from lightning_accum import UnreadableLossError
from lightning_accum.weighing.graph import read_loss, read_terms, terms_of
from lightning_accum.weighing.safeguards import gradients_of_zero, is_contrastive
from lightning_accum.weighing.weight import Weigher
from lightning_accum.window import Window

SIZES = (1, 3, 5, 2)


def fail(message: str) -> None:
    raise AssertionError(message)


def accumulate(net, loss_of, batches) -> float:
    """What the package does in a window, without Lightning. Returns the window's loss; leaves its gradients in ``net``."""
    window, weigher = Window(torch.device("cpu")), Weigher("auto", fail)
    for batch in batches:
        loss = loss_of(net, batch)
        loss.backward(gradient=window.add(loss, weigher(loss, batch)))
    closed = window.close(lambda: [p.grad for p in net.parameters() if p.grad is not None])
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
            window.close(list)
    else:
        assert window.close(list).do_factors_differ


def test_a_factor_may_change_from_window_to_window() -> None:
    net, window, weigher = Net(), Window(torch.device("cpu")), Weigher("auto", fail)
    for annealed in (0.0, 0.1, 0.2, 1.0):
        for seed in range(3):
            batch = make(4, seed)
            loss = ce(net, batch) + annealed * each(net, batch).mean() + annealed * torch.tensor(2.0) * bce(net, batch)
            window.add(loss, weigher(loss, batch))
        assert not window.close(list).do_factors_differ


@pytest.mark.parametrize("is_on_host", [True, False])
def test_a_window_of_losses_that_count_different_things_is_refused(is_on_host: bool) -> None:
    """One task is a mean over samples, the other over elements."""
    net, window, weigher = Net(), Window(torch.device("cpu")), Weigher("auto", fail)
    window._is_on_host = is_on_host
    for seed, loss_of in enumerate((each_mean, ce, lambda net, b: F.mse_loss(net.logits(b["x"]), b["probabilities"]), bce)):
        window.add(loss := loss_of(net, batch := make(4, seed)), weigher(loss, batch))
    with pytest.raises(ValueError, match="divided by its samples and by what its mean squared error counts"):
        window.close(list)


def test_tasks_that_are_all_means_over_samples_share_a_window() -> None:
    net, window, weigher = Net(), Window(torch.device("cpu")), Weigher("auto", fail)
    for seed, loss_of in enumerate((each_mean, ce, bce, masked_by_number)):
        window.add(loss := loss_of(net, batch := make(4, seed)), weigher(loss, batch))
    assert window.close(list).weight == 3 * 4 + (make(4, 1)["target"] != -100).sum()


@pytest.mark.parametrize("is_on_host", [True, False])
def test_nothing_times_zero_is_no_other_kind_of_loss_in_a_window_of_sums(is_on_host: bool) -> None:
    net, window, weigher = Net(), Window(torch.device("cpu")), Weigher("auto", fail)
    window._is_on_host = is_on_host
    losses = [each(net, make(3, 1)).sum(), 0.0 * each(net, make(3, 2)).sum(), (net.logits(make(2, 3)["x"]) * 0).mean()]
    for loss in losses:
        window.add(loss, weigher(loss, torch.zeros(3, 1)))
    assert float(window.close(list).loss) == pytest.approx(losses[0].item(), rel=1e-12)


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
    assert window.close(list).do_terms_disagree


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
