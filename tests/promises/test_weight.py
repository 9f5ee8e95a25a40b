"""Explicit weights: counts, callables, a list for each term, ``"equal"``; and what weighs nothing."""

from __future__ import annotations

import math
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from rated import EACH, ROWS, Rated, on_two_ranks, rated, rows_of
from support import Hide, Scalar, Toy, ddp, error_of_updates, fit, labelled, train_by_hand, warned, x
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate
from written_losses import BY_NAME, Net, each, make

from lightning_accum import AccumulationError, DoesNotAddUpError, GradientAccumulation, SampleCount, TokenCount, Tokens
from lightning_accum.testing import adamw, compare_window_with_batch

LABELS = torch.tensor([[5, 6, 7, -100], [8, 9, -100, -100]])
IMAGES = [torch.zeros(3, size, size + 1) for size in (4, 5, 6)]
TARGETS = [{"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)} for n in (1, 0, 5)]
UNEVEN = [x(1), x(1, 2, 3, 4, 5, 6, 7, 8, 9)]


@dataclass
class Batch:
    labels: Tensor


# --- counts -----------------------------------------------------------------------------------------------------------


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
        (SampleCount(), TARGETS, 3),
        (SampleCount(), TARGETS[:1], 1),
        (SampleCount(), (IMAGES, TARGETS), 3),
        (SampleCount(), (IMAGES[:1], TARGETS[:1]), 1),
        (SampleCount(), [(torch.zeros(3, 4, 4), 1), (torch.zeros(3, 4, 4), 0)], 2),
        (SampleCount(), ([{"ids": torch.zeros(8, 5)}, {"ids": torch.zeros(8, 6)}], torch.zeros(8)), 8),
        (SampleCount(), torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)], layout=torch.jagged), 2),
        (SampleCount(key="y"), {"x": torch.zeros(1, 9), "y": torch.zeros(9)}, 9),
    ],
)
def test_counts(count: Any, batch: Any, expected: int) -> None:
    assert int(count(batch)) == expected


@pytest.mark.parametrize(
    ("count", "batch", "error", "match"),
    [
        (TokenCount(key="label"), {"labels": LABELS, "x": LABELS}, KeyError, "labels"),
        (TokenCount(), LABELS, KeyError, "Tensor"),
        (TokenCount(), {"labels": "words"}, TypeError, "str"),
        (TokenCount(), {"labels": LABELS[0]}, ValueError, "shift=False"),
        (SampleCount(), {"x": "words"}, ValueError, "tensor"),
    ],
)
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
    with pytest.raises(DoesNotAddUpError, match="weight="):
        fit(Toy(shifted), data, GradientAccumulation(2, weight=TokenCount(shift=False)))


# --- nothing to weigh -------------------------------------------------------------------------------------------------


class Classifies(Scalar):
    """Cross entropy over two classes; a label of -100 is ignored."""

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(torch.stack([self.w.expand(len(batch)), 0 * self.w.expand(len(batch))], -1), batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_ignored_labels_on_one_rank_add_nothing(options: dict[str, Any]) -> None:
    ignored, some = torch.tensor([-100, -100]), [torch.tensor([0]), torch.tensor([0, 0, 0]), torch.tensor([1])]
    module = Classifies(by_rank=[[ignored, some[0]], some[1:]])
    fit(module, None, GradientAccumulation(2), strategy=ddp(**options), devices=2)
    assert module.total == pytest.approx(-(4 - 1) / 5 / 2, rel=1e-15)


def test_an_explicit_weight_of_zero_keeps_a_nan_out() -> None:
    module = Scalar(by_rank=[[x(-1), x(3)], [x(1), x(-5)]])
    module.loss = lambda x: Hide.apply((module.w * x).mean()) / (0.0 if x[0] < 0 else 1.0)
    policy = GradientAccumulation(2, weight=lambda batch: (batch >= 0).sum())
    fit(module, None, policy, strategy=ddp(), devices=2)
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
    with pytest.raises(AccumulationError):
        fit(module, None, GradientAccumulation(2, check=False))
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


# --- a weight for each term -------------------------------------------------------------------------------------------


def assert_full_batches(module: Rated, batches: list[Any], epochs: int = 1) -> None:
    make = type(module)
    assert error_of_updates(module, train_by_hand(make(module.optimizer), batches, epochs), make()) <= 1e-12


@pytest.mark.parametrize(
    "policy",
    [{"micro_batch": 3}, {"micro_batch": Tokens(64)}, {"micro_batch": "auto"}, {"micro_batch": ROWS, "on_nonfinite": "skip"}],
)
def test_each_term_of_a_split_batch_is_that_of_the_batch_and_nothing_is_warned_of(policy: dict[str, Any]) -> None:
    module = Rated("adamw")
    with warned() as messages:
        fit(module, rated(3), GradientAccumulation(weight=EACH, **policy), max_epochs=2)
    assert messages == []
    assert_full_batches(module, rated(3), epochs=2)


def test_each_term_takes_no_second_backward() -> None:
    fit(module := Rated(), rated(2), GradientAccumulation(micro_batch=4, weight=EACH, trim_padding=False))
    assert module.backwards == 2 * ROWS / 4


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("micro_batch", [Tokens(64), 3, "auto"])
def test_each_term_of_split_batches_over_ranks(micro_batch: Any) -> None:
    """The ranks have unequal rows, come to different numbers of micro-batches, and one runs out of batches."""
    batches = rated(3)
    parts = on_two_ranks(batches)
    del parts[1][2]
    module = Rated("adamw", by_rank=parts)
    fit(module, None, GradientAccumulation(micro_batch=micro_batch, weight=EACH), strategy=ddp(), devices=2)
    assert_full_batches(module, [*batches[:2], parts[0][2]])


def test_windows_of_one_micro_batch_on_each_rank_are_exact_without_being_told() -> None:
    """Plain distributed training, where the mean over ranks is a mean of means."""
    module = Rated("adamw", by_rank=on_two_ranks(rated(3)))
    fit(module, strategy=ddp(), devices=2, max_epochs=2)
    assert_full_batches(module, rated(3), epochs=2)


def test_a_rank_without_a_term_or_without_a_loss_holds_nobody_up() -> None:
    class SometimesRated(Rated):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
            if len(batch["score"]) == 1:
                return None
            return self.terms(batch)[0] if batch["score"].isnan().all() else super().training_step(batch, batch_idx)

    batches = rated(3)
    parts = on_two_ranks(batches)
    parts[1][0] = {**parts[1][0], "score": torch.full_like(parts[1][0]["score"], math.nan)}  # its loss has one term
    parts[1][1] = rows_of(parts[1][1], slice(0, 1))  # it returns None
    module, expected = SometimesRated(by_rank=parts), Rated()
    fit(module, strategy=ddp(find_unused_parameters=True), devices=2)

    def full_batch(index: int) -> Tensor:
        cross_entropy, error = expected.terms(parts[0][1] if index == 1 else batches[index])
        return cross_entropy + 0.5 * (expected.terms(parts[0][0])[1] if index == 0 else error)

    train_by_hand(expected, range(3), epochs=1, loss=full_batch)
    assert error_of_updates(module, expected, Rated()) <= 1e-12


# Kendall, Gal and Cipolla, arXiv 1705.07115, in the ways in which it is written
SCALED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "exp": lambda m, a, b: (-m.scales[0]).exp() * a + m.scales[0] + (-m.scales[1]).exp() * b + m.scales[1],
    "squares": lambda m, a, b: a / (2 * m.scales[0] ** 2) + b / m.scales[1].exp() + m.scales[0].log() + m.scales[1],
    "a stack": lambda m, a, b: torch.stack([(-m.scales[0]).exp() * a, (-m.scales[1]).exp() * b]).sum() + m.scales.sum(),
    "a penalty": lambda m, a, b: a + 0.5 * b + 0.01 * m.score.weight.square().sum() + 0 * m.scales.sum(),
}


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("is_over_ranks", [False, True])
@pytest.mark.parametrize("kind", SCALED)
def test_a_learnt_scale_has_the_weight_of_its_term_and_a_penalty_counts_once(kind: str, is_over_ranks: bool) -> None:
    class Scaled(Rated):
        def __init__(self, optimizer: str = "sgd", **arguments: Any) -> None:
            super().__init__(optimizer, **arguments)
            self.scales = nn.Parameter(torch.tensor([0.7, 1.3], dtype=torch.float64))

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return SCALED[kind](self, *self.terms(batch))

    if is_over_ranks:
        fit(module := Scaled(by_rank=on_two_ranks(rated(2))), strategy=ddp(), devices=2)
    else:
        fit(module := Scaled(), rated(2), GradientAccumulation(micro_batch=5, weight=EACH))
    assert_full_batches(module, rated(2))


def test_a_micro_batch_without_tokens_still_has_samples() -> None:
    (batch,) = rated(1)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][4:8, 1:] = -100  # one token, which predicts nothing
    fit(module := Rated(), [batch], GradientAccumulation(micro_batch=4, weight=EACH, trim_padding=False))
    assert_full_batches(module, [batch])


def _selected(net: Any, batch: dict[str, Tensor]) -> Tensor:
    """With learned factors; the second mean is NaN where no row is selected."""
    return net.log_scale * each(net, batch).mean() + net.log_scale.exp() * each(net, batch)[batch["chosen"]].mean()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_learned_factor_of_the_mean_of_nothing_is_that_of_the_full_batch(ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for number in (6, 5, 7, 4) * 2:
        columns = torch.randn(number, 4, generator=generator).double(), torch.rand(number, generator=generator).double()
        chosen = (torch.rand(number, generator=generator) < 0.6) & (number != 5)
        batches.append([{"x": row, "y": y, "chosen": c} for row, y, c in zip(*columns, chosen, strict=True)])
    policy = GradientAccumulation(4 // ranks, weight=[SampleCount(), lambda batch: batch["chosen"].sum()])
    engine = {"strategy": partial(ddp, find_unused_parameters=True), "devices": 2} if ranks == 2 else {}
    found = compare_window_with_batch(Toy(_selected, net=Net), batches, policy, optimizer=adamw, **engine)
    assert found.parameters <= 1e-12


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        ("tokens and samples", [SampleCount(), SampleCount()]),  # the first counts labels
        ("tokens and samples", [SampleCount()] * 3),
        ("of two means over one count", [SampleCount(), SampleCount()]),  # a function of a sum of terms
    ],
)
def test_weights_of_other_terms_than_the_loss_has_are_refused(loss: str, weight: list[Any]) -> None:
    module = Toy(BY_NAME[loss].of, net=Net)
    with pytest.raises(AccumulationError):
        fit(module, [default_collate(make(12))], GradientAccumulation(micro_batch=5, weight=weight))
    assert module.trainer.global_step == 0


@pytest.mark.parametrize("weight", [["auto", SampleCount()], []])
def test_what_cannot_count_terms_is_an_error(weight: list[Any]) -> None:
    with pytest.raises(AccumulationError, match="weight"):
        GradientAccumulation(micro_batch=4, weight=weight)


def test_a_micro_batch_without_loss_whose_terms_were_counted_ahead_is_warned_of() -> None:
    module = Toy(
        lambda net, batch: None if (batch[1] < 0).all() else F.cross_entropy(net(batch[0]), batch[1]) + net(batch[0]).mean()
    )
    (batch,) = labelled(12)
    batch[1][10:] = -100
    labels = lambda batch: (batch[1] >= 0).sum()  # noqa: E731
    with warned() as messages:
        fit(module, [batch], GradientAccumulation(micro_batch=5, weight=[labels, SampleCount()]))
    assert messages
