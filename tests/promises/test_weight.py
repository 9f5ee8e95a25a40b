"""Explicit weights, and what is refused or warned of before the first optimizer step."""

from __future__ import annotations

import math
import warnings
import weakref
from collections import UserDict, namedtuple
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from support import Scalar, ddp, loader, trainer, x
from torch import nn
from torch.nn import functional as F

from lightning_accum import AccumulationWarning, GradientAccumulation, SampleCount, TokenCount, UnreadableLossError

LABELS = torch.tensor([[5, 6, 7, -100], [8, 9, -100, -100]])


IMAGES = [torch.zeros(3, size, size + 1) for size in (4, 5, 6)]
TARGETS = [{"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)} for n in (1, 0, 5)]


@dataclass
class Batch:
    labels: torch.Tensor


@dataclass(slots=True)
class Slotted:
    labels: torch.Tensor


@pytest.mark.parametrize(
    ("count", "batch", "expected"),
    [
        (TokenCount(), {"labels": LABELS}, 3),
        (TokenCount(shift=False), {"labels": LABELS}, 5),
        (TokenCount(ignore_index=7, shift=False), {"labels": LABELS}, 7),
        (TokenCount(), UserDict(labels=LABELS), 3),
        (TokenCount(), Batch(LABELS), 3),
        (TokenCount(key=1), (torch.zeros(2, 4), LABELS), 3),
        (TokenCount(), namedtuple("Pair", "inputs labels")(LABELS, LABELS), 3),
        (SampleCount(), torch.zeros(7, 2), 7),
        (SampleCount(), {"id": ["a", "b"], "x": torch.zeros(5)}, 5),
        (SampleCount(), [3, (torch.zeros(4, 1),)], 4),
        (SampleCount(), Batch(LABELS), 2),
        (SampleCount(), IMAGES, 3),
        (SampleCount(), [torch.zeros(3, 4, 4)] * 3, 3),
        (SampleCount(), TARGETS, 3),
        (SampleCount(), TARGETS[:1], 1),
        (SampleCount(), (IMAGES, TARGETS), 3),
        (SampleCount(), (tuple(TARGETS), tuple(IMAGES)), 3),
        (SampleCount(), (IMAGES[:1], TARGETS[:1]), 1),
        (SampleCount(), [IMAGES[:1], TARGETS[:1]], 1),
        (SampleCount(), [target["boxes"] for target in TARGETS], 3),
        (SampleCount(), [(torch.zeros(3, 4, 4), 1), (torch.zeros(3, 4, 4), 0)], 2),
        (SampleCount(), ([{"ids": torch.zeros(8, 5)}, {"ids": torch.zeros(8, 6)}], torch.zeros(8)), 8),
        (SampleCount(), Slotted(LABELS), 2),
        (SampleCount(), torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)], layout=torch.jagged), 2),
        (SampleCount(key="y"), {"x": torch.zeros(1, 9), "y": torch.zeros(9)}, 9),
    ],
)
def test_counts(count, batch, expected: int) -> None:
    assert int(count(batch)) == expected


@pytest.mark.parametrize(
    ("count", "batch", "error", "match"),
    [
        (TokenCount(key="label"), {"labels": LABELS, "x": LABELS}, KeyError, r"no entry 'label'.*\['labels', 'x'\]"),
        (TokenCount(key=2), (LABELS, LABELS), KeyError, "tuple of 2"),
        (TokenCount(), LABELS, KeyError, "it is a Tensor"),
        (TokenCount(), {"labels": "words"}, TypeError, "found str"),
        (TokenCount(), {"labels": LABELS[0]}, ValueError, "pass shift=False"),
        (SampleCount(), {"x": "words"}, ValueError, "no tensor"),
        (SampleCount(), IMAGES[:2], ValueError, "two samples, or an input and its target: pass the `key` of one, or len"),
    ],
)
def test_wrong_batches_are_named(count, batch, error, match: str) -> None:
    with pytest.raises(error, match=match):
        count(batch)


class Hidden(torch.autograd.Function):
    """A mean whose graph shows no denominator."""

    @staticmethod
    def forward(ctx, t):
        ctx.size = t.shape
        return t.mean()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.size) / math.prod(ctx.size)


class HidesIt(Scalar):
    def loss(self, x):
        return Hidden.apply(self.w * x)


UNEVEN = [x(1), x(1, 2, 3, 4, 5, 6, 7, 8, 9)]


def fit(module, weight="auto", window: int = 2, check: bool = True, **kwargs):
    run = trainer(callbacks=[GradientAccumulation(window, weight=weight, check=check)], **kwargs)
    run.fit(module)
    return run


@pytest.mark.parametrize(
    "weight", [SampleCount(), lambda batch: torch.tensor(len(batch)), lambda batch: len(batch), lambda batch: batch.numel() / 3]
)
def test_explicit_weight_where_the_graph_hides_it(weight) -> None:
    module = HidesIt(UNEVEN)
    fit(module, weight)
    assert module.gradients == pytest.approx([4.6], rel=1e-15)


def test_equal_is_the_classic_mean_of_means() -> None:
    module = HidesIt(UNEVEN)
    fit(module, "equal")
    assert module.gradients == pytest.approx([3.0], rel=1e-15)


@pytest.mark.parametrize("kind", [Decimal, Fraction, np.float32, np.int64, float, int])
def test_any_number_is_a_weight(kind) -> None:
    module = Scalar([x(1), x(2, 3, 4)])
    trainer(callbacks=[GradientAccumulation(2, weight=lambda batch: kind(len(batch)))]).fit(module)
    assert module.gradients == [2.5]


def test_equal_does_not_count_what_returned_none() -> None:
    module = Scalar([x(1), x(math.nan), None, x(5)])
    fit(module, "equal", window=4)
    assert module.gradients == [3.0]


def test_hidden_denominator_stops_the_first_window_with_what_was_found_and_how_to_mend_it() -> None:
    module = HidesIt(UNEVEN)
    with pytest.raises(UnreadableLossError, match=r"ends in HiddenBackward.*TokenCount\(\.\.\.\).*SampleCount\(\)"):
        fit(module)
    assert module.gradients == []


def test_compiled_training_step_is_named() -> None:
    module = Scalar([x(1, 2), x(3, 4)])
    module.loss = torch.compile(lambda x: (module.w * x).mean(), backend="aot_eager")
    with pytest.raises(UnreadableLossError, match="CompiledFunctionBackward.*compiling only the network inside keeps it readable"):
        fit(module)


@pytest.mark.parametrize(
    ("weight", "error", "match"),
    [
        (lambda batch: -1, ValueError, "not negative, but returned -1"),
        (lambda batch: math.nan, ValueError, "returned nan"),
        (lambda batch: torch.tensor(math.inf), ValueError, "returned inf"),
        (lambda batch: batch, ValueError, r"one number per batch, but returned a tensor of \(9,\)"),
        (lambda batch: None, TypeError, "returned NoneType"),
        (lambda batch: True, TypeError, "returned bool"),
        (lambda batch: 1j, TypeError, "returned complex"),
        (TokenCount(key="label"), KeyError, "no entry 'label'"),
    ],
)
def test_wrong_weights_are_refused_before_the_first_step(weight, error, match: str) -> None:
    module = HidesIt([x(*range(9)), x(1)])
    with pytest.raises(error, match=match):
        fit(module, weight)
    assert module.gradients == []


def test_weight_without_a_batch_is_explained() -> None:
    class Draws(Scalar):
        def training_step(self, dataloader_iter):
            return (self.w * next(dataloader_iter)[0]).mean()

    with pytest.raises(TypeError, match="draws its batches by itself"):
        fit(Draws([x(1), x(2)]), SampleCount())


def test_denominators_of_terms_that_differ_by_rounding_are_one() -> None:
    class Weighted(Scalar):  # torch adds up the class weights of the smoothed term in another order
        def training_step(self, batch, batch_idx):
            logits = torch.stack([self.w.expand(len(batch)), torch.zeros(len(batch), dtype=self.w.dtype)], -1)
            return F.cross_entropy(logits, batch, weight=x(0.1, 0.7), label_smoothing=0.1)

    batches = [torch.tensor(labels) for labels in ([0, 0, 0, 0, 0, 1, 1], [0, 1, 1], [1, 0, 0, 0], [0])]
    module, whole = Weighted(batches), Weighted([torch.cat(batches)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", AccumulationWarning)
        fit(module, window=4)
    fit(whole, window=1)
    assert module.gradients == pytest.approx(whole.gradients, rel=1e-12)


# --- weights of zero --------------------------------------------------------------------------------------------------


class Classifies(Scalar):
    """Cross entropy over two classes; a label of -100 is ignored."""

    def __init__(self, batches=(), by_rank=None, smoothing: float = 0.0) -> None:
        super().__init__(batches, by_rank)
        self.smoothing = smoothing

    def training_step(self, batch, batch_idx):
        logits = torch.stack([self.w.expand(len(batch)), torch.zeros(len(batch), dtype=self.w.dtype)], -1)
        return F.cross_entropy(logits, batch, label_smoothing=self.smoothing)


IGNORED = torch.tensor([-100, -100])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_micro_batch_of_ignored_labels_adds_nothing_though_its_loss_is_nan(smoothing: float, position: int) -> None:
    some = [torch.tensor([0, 1, 0]), torch.tensor([0, -100])]
    module, alone = Classifies([*some[:position], IGNORED, *some[position:]], smoothing=smoothing), Classifies(some)
    alone.smoothing = smoothing
    fit(module, window=3)
    fit(alone, window=2)
    assert module.gradients == alone.gradients
    assert math.isfinite(module.gradients[0])


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_ignored_labels_on_one_rank(options: dict) -> None:
    module = Classifies(by_rank=[[IGNORED, torch.tensor([0])], [torch.tensor([0, 0, 0]), torch.tensor([1])]])
    trainer(ddp(**options), devices=2, accumulate_grad_batches=2).fit(module)
    assert module.total == pytest.approx(-(4 - 1) / 5 / 2, rel=1e-15)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_explicit_weight_of_zero_keeps_a_nan_out(options: dict) -> None:
    class Nan(Scalar):
        def loss(self, x):
            return Hidden.apply(self.w * x) / (0.0 if x[0] < 0 else 1.0)

    module = Nan(by_rank=[[x(-1), x(3)], [x(1), x(-5)]])
    callback = GradientAccumulation(2, weight=lambda batch: (batch >= 0).sum())
    trainer(ddp(**options), devices=2, callbacks=[callback]).fit(module)
    assert module.total == 2.0


# --- warnings ---------------------------------------------------------------------------------------------------------


def warnings_of(module, recwarn, weight="auto", check: bool = True) -> str:
    fit(module, weight, check=check)
    return "\n".join(str(warning.message) for warning in recwarn.list)


class Contrasts(Scalar):
    def loss(self, x):
        return F.cross_entropy(self.w * torch.outer(x, x), torch.arange(len(x)))


@pytest.mark.parametrize("weight", ["auto", SampleCount()])
def test_contrastive_loss_is_refused(weight) -> None:
    with pytest.raises(ValueError, match="do not add up"):
        fit(Contrasts([x(1, 2, 3), x(4, 5, 6)]), weight)


def test_batch_norm_is_warned_of_by_name(recwarn) -> None:
    class Normalises(Scalar):
        def __init__(self, batches) -> None:
            super().__init__(batches)
            self.layers = nn.Sequential(*(nn.BatchNorm1d(1) for _ in range(5))).double()

        def loss(self, x):
            return self.layers(self.w * x[:, None]).mean()

    said = warnings_of(Normalises([x(1, 2), x(3, 4)]), recwarn)
    assert "BatchNorm (layers.0, layers.1, layers.2 and 2 more) normalises each micro-batch by its own statistics" in said


def test_router_term_is_warned_of_by_name(recwarn) -> None:
    class Routes(Scalar):
        def loss(self, x):
            return F.mse_loss(self.w * x, x) + 0.1 * (self.w * x).mean(0).square().sqrt()

    assert "no plain mean over the same count as its mean squared error: SqrtBackward0" in warnings_of(
        Routes(UNEVEN), recwarn, check=False
    )


def test_terms_with_other_counts_are_warned_of_once(recwarn) -> None:
    class TwoCounts(Scalar):
        def loss(self, x):
            return (self.w * x).mean() + F.cross_entropy(self.w * torch.eye(2, dtype=x.dtype), torch.tensor([0, 1]))

    said = warnings_of(TwoCounts([*UNEVEN, *UNEVEN]), recwarn)
    assert said.count("The terms of the loss") == said.count("do not add up by one weight") == 1  # the check has said so
    said = warnings_of(TwoCounts([*UNEVEN, *UNEVEN]), recwarn, check=False)
    assert said.count("counts that are not proportional") == 1


def test_terms_with_the_same_counts_are_not(recwarn) -> None:
    class SameCounts(Scalar):
        def loss(self, x):
            return (self.w * x).mean() + F.mse_loss(self.w * x, x) + 0.01 * self.w.square()

    said = warnings_of(SameCounts(UNEVEN), recwarn)
    assert "proportional" not in said
    assert "plain mean" not in said


def test_mean_weight_for_a_sum_is_refused() -> None:
    class Sums(Scalar):
        def loss(self, x):
            return (self.w * x).sum()

    with pytest.raises(ValueError, match=r'Pass GradientAccumulation\(weight="auto"\): with it they add up'):
        fit(Sums(UNEVEN), SampleCount())


def test_sums_are_added() -> None:
    class Sums(Scalar):
        def loss(self, x):
            return (self.w * x).sum()

    module = Sums(UNEVEN)
    fit(module)
    assert module.gradients == [46.0]
    ranked = Sums(by_rank=[UNEVEN, [x(2), x(3, 4)]])
    trainer(ddp(), devices=2, accumulate_grad_batches=2).fit(ranked)
    assert ranked.total == 55.0


def test_sum_in_one_micro_batch_and_mean_in_the_other_is_refused() -> None:
    class Mixes(Scalar):
        def loss(self, x):
            return (self.w * x).sum() if len(x) == 1 else (self.w * x).mean()

    with pytest.raises(ValueError, match="In 1 of the window's 2 micro-batches the loss is a sum"):
        fit(Mixes(UNEVEN), check=False)
    with pytest.raises(ValueError, match="the loss is a sum in some parts, and a mean in others"):
        fit(Mixes(UNEVEN))


def test_device_weights_are_checked_when_the_window_ends() -> None:
    from lightning_accum.weighing.contribution import Contribution
    from lightning_accum.window import Window

    window = Window(torch.device("cpu"))
    w = nn.Parameter(torch.tensor(1.0))
    window.add(w * 1, Contribution(torch.tensor(-2.0)))
    with pytest.raises(ValueError, match="negative, infinite or NaN"):
        window.close(list)


def test_loader_keeps_the_order_of_its_batches() -> None:
    assert [batch.tolist() for batch in loader(UNEVEN[:1])] == [[1.0]]


def test_factor_that_goes_with_the_batch_is_warned_of(recwarn) -> None:
    class Scales(Scalar):
        def loss(self, x):
            return (self.w * x).mean() * len(x)

    with pytest.raises(ValueError, match="do not add up"):
        fit(Scales(UNEVEN))
    fit(Scales(UNEVEN), check=False)
    assert "A factor of the loss changes inside a window" in "".join(str(warning.message) for warning in recwarn)


def test_no_graph_is_kept_until_the_window_ends() -> None:
    alive = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            alive.append(weakref.ref(ctx))
            return t * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class TwoTerms(Scalar):
        def loss(self, x):
            assert sum(reference() is not None for reference in alive) == 0
            kept = Keeps.apply(self.w * x)
            return F.mse_loss(kept, x) + F.l1_loss(kept, x)

    fit(TwoTerms([x(1), x(2), x(3), x(4)]), window=4, check=False)
    assert len(alive) == 4


@pytest.mark.parametrize(
    "nothing", [lambda module, x: (module.w * x).sum() * 0.0, lambda module, x: torch.zeros((), requires_grad=True)]
)
def test_loss_of_nothing_has_no_weight(nothing) -> None:
    class Idle(Scalar):
        def loss(self, x):
            return nothing(self, x) if x[0] < 0 else (self.w * x).mean()

    module = Idle([x(1), x(-1), x(2, 6)])
    fit(module, window=3)
    assert module.gradients == pytest.approx([3.0], rel=1e-15)


def test_zero_times_what_is_unused_is_no_term(recwarn) -> None:
    class Touches(Scalar):
        def loss(self, x):
            return (self.w * x).mean() + 0.0 * (self.w * x.flip(0)).exp().sum()

    assert "no plain mean" not in warnings_of(Touches(UNEVEN), recwarn)
