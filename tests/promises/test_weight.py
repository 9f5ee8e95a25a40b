"""Explicit weights: counts, callables, a list for each term, ``"equal"``; and what weighs nothing."""

import math
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from loss_table import BY_NAME
from loss_table.rows import Trained, data
from support import Hide, Scalar, Toy, fit, labelled, refused, x
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import AccumulationError, AccumulationWarning, DoesNotAddUpError, GradientAccumulation, SampleCount, TokenCount

LABELS = torch.tensor([[5, 6, 7, -100], [8, 9, -100, -100]])
IMAGES = [torch.zeros(3, size, size + 1) for size in (4, 5, 6)]
TARGETS = [{"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)} for n in (1, 0, 5)]
UNEVEN = [x(1), x(1, 2, 3, 4, 5, 6, 7, 8, 9)]


@dataclass
class Batch:
    labels: Tensor


@pytest.mark.parametrize(("count", "batch", "expected"), [
    (TokenCount(), {"labels": LABELS}, 3), (TokenCount(shift=False), {"labels": LABELS}, 5),
    (TokenCount(ignore_index=7, shift=False), {"labels": LABELS}, 7),
    (TokenCount(shift=False), {"labels": torch.tensor([156, 1], dtype=torch.uint8)}, 2), (TokenCount(), UserDict(labels=LABELS), 3),
    (TokenCount(), Batch(LABELS), 3), (TokenCount(key=1), (torch.zeros(2, 4), LABELS), 3),
    (TokenCount(), namedtuple("Pair", "inputs labels")(LABELS, LABELS), 3), (SampleCount(), torch.zeros(7, 2), 7),
    (SampleCount(), {"id": ["a", "b"], "x": torch.zeros(5)}, 5), (SampleCount(), [3, (torch.zeros(4, 1),)], 4),
    (SampleCount(), Batch(LABELS), 2), (SampleCount(), {"images": torch.utils.data.TensorDataset(torch.zeros(6, 2))}, 6),
    (SampleCount(), IMAGES, 3), (SampleCount(), TARGETS, 3), (SampleCount(), TARGETS[:1], 1), (SampleCount(), (IMAGES, TARGETS), 3),
    (SampleCount(), (IMAGES[:1], TARGETS[:1]), 1), (SampleCount(), [(torch.zeros(3, 4, 4), 1), (torch.zeros(3, 4, 4), 0)], 2),
    (SampleCount(), ([{"ids": torch.zeros(8, 5)}, {"ids": torch.zeros(8, 6)}], torch.zeros(8)), 8),
    (SampleCount(), torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)], layout=torch.jagged), 2),
    (SampleCount(), {"x": nn.utils.rnn.pack_sequence([torch.zeros(3), torch.zeros(2), torch.zeros(1)])}, 3),
    (SampleCount(key="y"), {"x": torch.zeros(1, 9), "y": torch.zeros(9)}, 9),
])  # fmt: skip
def test_counts(count: Any, batch: Any, expected: int) -> None:
    assert int(count(batch)) == expected


@pytest.mark.parametrize(("count", "batch", "error", "match"), [
    (TokenCount(key="label"), {"labels": LABELS, "x": LABELS}, KeyError, "labels"), (TokenCount(), LABELS, KeyError, "Tensor"),
    (TokenCount(), {"labels": "words"}, TypeError, "str"), (TokenCount(), {"labels": LABELS[0]}, ValueError, "shift=False"),
    (SampleCount(), {"x": "words"}, ValueError, "tensor"),
])  # fmt: skip
def test_wrong_batches_are_named(count: Any, batch: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as raised:
        count(batch)
    assert isinstance(raised.value, AccumulationError)


@pytest.mark.parametrize("kind", [Decimal, Fraction, np.float32, np.int64, float, int, torch.tensor, lambda n: n / 3])
def test_any_number_is_a_weight_also_where_the_graph_hides_it(kind: Callable[[int], Any]) -> None:
    module = Scalar(UNEVEN)
    module.loss = lambda x: Hide.apply((module.w * x).mean())
    fit(module, None, GradientAccumulation(2, weight=lambda batch: kind(len(batch))))
    assert module.gradients == pytest.approx([4.6], rel=1e-15)


def test_equal_is_the_classic_mean_of_means_and_does_not_count_what_returned_none() -> None:
    module = Scalar([x(1), x(math.nan), None, x(5, 5, 5)])
    fit(module, None, GradientAccumulation(4, weight="equal"))
    assert module.gradients == [3.0]


@pytest.mark.parametrize(
    ("weight", "error"),
    [
        (lambda batch: -1, ValueError),
        (lambda batch: math.nan, ValueError),
        (lambda batch: torch.tensor(math.inf), ValueError),
        (lambda batch: torch.tensor(12.0 - 2 * len(batch)), ValueError),  # -6 and 10
        (lambda batch: batch, ValueError),
        (lambda batch: None, TypeError),
        (lambda batch: True, TypeError),
        (lambda batch: 1j, TypeError),
        (TokenCount(key="label"), KeyError),
    ],
)
def test_wrong_weights_are_refused_before_the_first_step(weight: Any, error: type[Exception]) -> None:
    module = Scalar([x(*range(9)), x(1)])
    with pytest.raises(error) as raised:
        fit(module, None, GradientAccumulation(2, weight=weight, check=False))
    assert isinstance(raised.value, AccumulationError)
    assert module.gradients == []


def test_token_counts_that_forget_the_shift_are_refused_and_the_weight_that_adds_up_is_named() -> None:
    def shifted(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch["x"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (6, 5), generator=generator)
    for row in range(6):
        labels[row, 1 + row % 4 :] = -100
    data = [{"x": torch.randn(6, 5, 4, generator=generator, dtype=torch.float64), "labels": labels}] * 4
    fit(module := Toy(shifted), data, GradientAccumulation(2, weight=TokenCount()))
    assert module.trainer.global_step == 2
    refused(Toy(shifted), data, GradientAccumulation(2, weight=TokenCount(shift=False)), error=DoesNotAddUpError, match="weight=")


def test_an_explicit_weight_of_zero_keeps_a_nan_out() -> None:
    module = Scalar(by_rank=[[x(-1), x(3)], [x(1), x(-5)]])
    module.loss = lambda x: Hide.apply((module.w * x).mean()) / (0.0 if x[0] < 0 else 1.0)
    policy = GradientAccumulation(2, weight=lambda batch: (batch >= 0).sum())
    fit(module, None, policy, ranks=2)
    assert module.total == 2.0


@pytest.mark.parametrize("nothing", [lambda w, x: (w * x).sum() * 0.0, lambda w, x: torch.zeros((), requires_grad=True)])
def test_a_loss_of_nothing_has_no_weight(nothing: Callable[..., Tensor]) -> None:
    module = Scalar([x(1), x(-1), x(2, 6)])
    module.loss = lambda x: nothing(module.w, x) if x[0] < 0 else (module.w * x).mean()
    fit(module, None, GradientAccumulation(3))
    assert module.gradients == pytest.approx([3.0], rel=1e-15)


def test_a_sum_in_one_micro_batch_and_a_mean_in_the_other_is_refused() -> None:
    module = Scalar([x(1, 2), x(1, 2, 3, 4, 5, 6, 7, 8, 9)])
    module.loss = lambda x: (module.w * x).sum() if len(x) == 2 else (module.w * x).mean()
    refused(module, None, GradientAccumulation(2, check=False))
    assert module.gradients == []


@pytest.mark.parametrize(
    "mean", [lambda t: t.mean(), lambda t: t.values().mean(), lambda t: t.values().sum() / t.offsets()[-1] / 2]
)
def test_a_mean_over_a_jagged_tensor_is_weighed_by_its_entries(mean: Callable[[Tensor], Tensor]) -> None:
    rows = [torch.rand(n, 2, dtype=torch.float64) for n in (3, 5, 1, 2, 4)]
    module = Scalar([torch.nested.nested_tensor(rows[part], layout=torch.jagged) for part in (slice(2), slice(2, 5))])
    module.loss = lambda batch: mean(module.w * batch)
    module.training_step = lambda batch, batch_idx: module.loss(batch)
    fit(module, None, GradientAccumulation(2, check=False))
    assert module.gradients[0] == pytest.approx(torch.cat(rows).mean().item(), rel=1e-12)


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        ("multi-task: rows and ignored labels", [SampleCount(), SampleCount()]),  # one counts labels
        ("multi-task: rows and ignored labels", [SampleCount()] * 3),
        ("multi-task: a geometric mean of losses", [SampleCount(), SampleCount()]),  # a function of terms
    ],
)
def test_weights_of_other_terms_than_the_loss_has_are_refused(loss: str, weight: list[Any]) -> None:
    refused(Trained(BY_NAME[loss]), [data(BY_NAME[loss])], GradientAccumulation(micro_batch=5, weight=weight))


def test_a_micro_batch_without_loss_whose_terms_were_counted_ahead_is_refused_and_without_the_check_warned_of() -> None:
    module = Toy(
        lambda net, batch: None if (batch[1] < 0).all() else F.cross_entropy(net(batch[0]), batch[1]) + net(batch[0]).mean()
    )
    (batch,) = labelled(12)
    batch[1][10:] = -100
    labels = lambda batch: (batch[1] >= 0).sum()  # noqa: E731
    refused(module, [batch], GradientAccumulation(micro_batch=5, weight=[labels, SampleCount()]), match="do not add up")
    with pytest.warns(AccumulationWarning, match="had no loss"):
        fit(module, [batch], GradientAccumulation(micro_batch=5, weight=[labels, SampleCount()], check=False))
