"""A loss of terms with different denominators: each term is that of the full batch, where its totals are known in time."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from rated import EACH, ROWS, Rated, on_two_ranks, rated, rows_of
from support import ddp, error_of_updates, loader, relative_error, train_by_hand, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import AccumulationWarning, GradientAccumulation, SampleCount, TokenCount, Tokens, UnreadableLossError
from lightning_accum.weighing.contribution import Contribution
from lightning_accum.weighing.graph import terms_of
from lightning_accum.weighing.term_nodes import TermLister, TermNode, scale_terms
from lightning_accum.weighing.terms import TermsAtOnce
from lightning_accum.weighing.weight import Weigher
from lightning_accum.window import Window

SCALE = nn.Parameter(torch.tensor(0.3))


def assert_full_batches(module: Rated, by_hand: Rated, batches: list[Any], epochs: int = 1) -> None:
    start = copy.deepcopy(by_hand)
    assert error_of_updates(module, train_by_hand(by_hand, batches, epochs), start) <= 1e-12


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("micro_batch", [3, Tokens(64), "auto"])
def test_each_term_of_a_split_batch_is_that_of_the_batch(optimizer: str, micro_batch: Any) -> None:
    batches = rated(3)
    module = Rated(optimizer)
    trainer(callbacks=[GradientAccumulation(micro_batch=micro_batch, weight=EACH)], max_epochs=2).fit(module, loader(batches))
    assert_full_batches(module, Rated(optimizer), batches, epochs=2)


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_each_term_of_a_batch_that_fits_whole_is_its_own_where_it_may_be_left_out(on_nonfinite: Any) -> None:
    batches, module = rated(3), Rated()
    trainer(callbacks=[GradientAccumulation(micro_batch=ROWS, weight=EACH, on_nonfinite=on_nonfinite)]).fit(module, loader(batches))
    assert error_of_updates(module, train_by_hand(Rated(), batches, epochs=1), Rated()) <= 1e-12


def test_each_term_takes_no_second_backward() -> None:
    batches, module = rated(2), Rated()
    trainer(callbacks=[GradientAccumulation(micro_batch=4, weight=EACH, trim_padding=False)]).fit(module, loader(batches))
    assert module.backwards == 2 * ROWS / 4


def test_one_weight_for_all_terms_is_named_with_its_mend() -> None:
    module, by_hand, batches = Rated(), Rated(), rated(2)
    with pytest.warns(UserWarning, match=r"weight=\[TokenCount\(\), SampleCount\(\)\]"):
        trainer(callbacks=[GradientAccumulation(micro_batch=4)]).fit(module, loader(batches))
    assert error_of_updates(module, train_by_hand(by_hand, batches, 1), Rated()) > 0.05


def test_exact_terms_are_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(terms|counts|full batch)")
        trainer(callbacks=[GradientAccumulation(micro_batch=4, weight=EACH)]).fit(Rated(), loader(rated(2)))


def test_a_factor_of_a_term_that_changes_inside_a_window_is_named_as_that() -> None:
    class AnnealedByBatch(Rated):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            cross_entropy, error = self.terms(batch)
            return cross_entropy + 0.1 * (1 + batch_idx) * error

    with pytest.warns(
        AccumulationWarning, match="A factor of the loss changes inside a window.*Anneal a factor by global_step"
    ) as caught:
        trainer(callbacks=[GradientAccumulation(2, check=False)]).fit(AnnealedByBatch(), loader(rated(2)))
    assert not any("weight=[TokenCount()" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("accumulation", [[], [GradientAccumulation(micro_batch="offload")], [GradientAccumulation(1)]])
def test_a_window_of_one_micro_batch_is_not_warned_of(accumulation: list[pl.Callback], caplog: pytest.LogCaptureFixture) -> None:
    class Balanced(Rated):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + self.net(batch["input_ids"]).softmax(-1).mean((0, 1)).square().sum()

    with warnings.catch_warnings(), caplog.at_level("INFO", "lightning.pytorch"):
        warnings.filterwarnings("error", category=AccumulationWarning)
        trainer(callbacks=accumulation).fit(Balanced(), loader(rated(1)))
    (line,) = [line for line in caplog.messages if "a window is" in line]
    assert "weight: cross entropy" in line
    assert "the same weight" not in line


def test_a_loss_with_fewer_terms_in_some_rows_is_refused_by_name() -> None:
    class OnePerRow(Rated):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            scores = self.score(self.net(batch["input_ids"]).mean(1))[:, 0]
            errors = [F.mse_loss(*pair) for pair in zip(scores, batch["score"], strict=True)]
            return self.terms(batch)[0] + torch.stack(errors).sum() / len(errors)

    with pytest.raises(UnreadableLossError, match="2 weights, one for each term of the loss"):
        trainer(callbacks=[GradientAccumulation(2, weight=EACH)]).fit(OnePerRow(), loader(rated(2, rows=4)))


@pytest.mark.parametrize("micro_batch", [3, Tokens(64), "auto"])
def test_each_term_of_split_batches_over_ranks(micro_batch: Any) -> None:
    """The ranks have unequal rows, come to different numbers of micro-batches, and one runs out of batches."""
    batches = rated(3)
    parts = on_two_ranks(batches)
    del parts[1][2]
    whole = [*batches[:2], parts[0][2]]
    module = Rated("adamw", by_rank=parts)
    run = trainer(ddp(), devices=2, callbacks=[GradientAccumulation(micro_batch=micro_batch, weight=EACH)])
    run.fit(module)
    assert_full_batches(module, Rated("adamw"), whole)


class SometimesRated(Rated):
    """Batches without scores have no second term."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        if batch["input_ids"].shape[0] == 1:
            return None
        if batch["score"].isnan().all():
            return self.terms(batch)[0]
        return super().training_step(batch, batch_idx)


def test_windows_of_one_micro_batch_on_each_rank_are_exact_without_being_told() -> None:
    """Plain distributed training, where the mean over ranks is a mean of means."""
    batches = rated(3)
    parts = on_two_ranks(batches)
    module = Rated("adamw", by_rank=parts)
    trainer(ddp(), devices=2, max_epochs=2).fit(module)
    assert_full_batches(module, Rated("adamw"), batches, epochs=2)


class Balanced(Rated):
    """Tasks that a learnt uncertainty weighs: Kendall, Gal and Cipolla, arXiv 1705.07115, in the ways in which it is written."""

    def __init__(self, writing: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.scales = nn.Parameter(torch.tensor([0.7, 1.3], dtype=torch.float64))
        self.writing = writing

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        cross_entropy, error = self.terms(batch)
        s, t = self.scales
        if self.writing == 0:
            return torch.exp(-self.scales[0]) * cross_entropy + self.scales[0] + torch.exp(-self.scales[1]) * error + self.scales[1]
        if self.writing == 1:
            return cross_entropy / (2 * s**2) + error / t.exp() + s.log() + t
        return torch.stack([(-s).exp() * cross_entropy, (-t).exp() * error]).sum() + s + t


@pytest.mark.some_cases(4)
@pytest.mark.parametrize("writing", [0, 1, 2])
@pytest.mark.parametrize("is_over_ranks", [False, True])
def test_the_learnt_scale_of_a_term_has_the_weight_of_the_term(writing: int, is_over_ranks: bool) -> None:
    batches = rated(2)
    if is_over_ranks:
        parts = on_two_ranks(batches)
        module = Balanced(writing, by_rank=parts)
        trainer(ddp(), devices=2).fit(module)
    else:
        module = Balanced(writing)
        trainer(callbacks=[GradientAccumulation(micro_batch=5, weight=EACH)]).fit(module, loader(batches))
    by_hand = Balanced(writing)
    assert_full_batches(module, by_hand, batches)
    assert relative_error([module.scales], [by_hand.scales]) <= 1e-12


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_terms_share_one_weight_where_ranks_may_leave_a_micro_batch_out(on_nonfinite: Any) -> None:
    """What it is left out of would be the totals, which have to be known before its backward."""
    batches = rated(3)
    parts = on_two_ranks(batches)
    module, by_hand = Rated(by_rank=parts), Rated()
    trainer(ddp(), devices=2, callbacks=[GradientAccumulation(on_nonfinite=on_nonfinite)]).fit(module)

    def of_one_weight(index: int) -> Tensor:
        own = [rank[index] for rank in parts]
        weights = [(batch["labels"][:, 1:] != -100).sum() for batch in own]
        return sum(n * by_hand.training_step(batch, 0) for n, batch in zip(weights, own, strict=True)) / sum(weights)

    train_by_hand(by_hand, range(3), epochs=1, loss=of_one_weight)
    assert error_of_updates(module, by_hand, Rated()) <= 1e-12


def test_a_rank_without_a_term_or_without_a_loss_holds_nobody_up() -> None:
    batches = rated(3)
    parts = on_two_ranks(batches)
    parts[1][0] = {**parts[1][0], "score": torch.full_like(parts[1][0]["score"], math.nan)}  # its loss has one term
    parts[1][1] = rows_of(parts[1][1], slice(0, 1))  # it returns None
    module = SometimesRated(by_rank=parts)
    trainer(ddp(find_unused_parameters=True), devices=2).fit(module)

    expected = Rated()

    def full_batch(index: int) -> Tensor:
        if index == 1:
            return expected.training_step(parts[0][1], 0)
        cross_entropy, error = expected.terms(batches[index])
        return cross_entropy + 0.5 * (expected.terms(parts[0][0])[1] if index == 0 else error)

    train_by_hand(expected, range(3), epochs=1, loss=full_batch)
    assert error_of_updates(module, expected, Rated()) <= 1e-12


class Selected(pl.LightningModule):
    """Two losses with learned factors, the second a mean of selected rows: NaN where there are none."""

    def __init__(self, by_rank: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.factors = nn.Linear(4, 4).double(), nn.Parameter(torch.tensor([0.7, 1.3], dtype=torch.float64))
        self.by_rank = by_rank

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        errors = (self.net(batch["x"]) - batch["y"]).square().mean(1)
        return self.factors[0] * errors.mean() + self.factors[1] * errors[batch["chosen"]].mean()

    def train_dataloader(self) -> Any:
        return loader(self.by_rank[self.global_rank])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("is_over_ranks", [False, True])
def test_a_learned_factor_of_the_mean_of_nothing_is_that_of_the_full_batch(is_over_ranks: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [
        {
            "x": torch.randn(rows, 4, generator=generator).double(),
            "y": torch.randn(rows, 4, generator=generator).double(),
            "chosen": (torch.rand(rows, generator=generator) < 0.6) & (rows != 5),
        }
        for rows in (6, 5, 7, 4) * 2
    ]
    whole = [{name: torch.cat([batch[name] for batch in data[start : start + 4]]) for name in data[0]} for start in (0, 4)]
    module, each = Selected([data[::2], data[1::2]]), [SampleCount(), lambda batch: batch["chosen"].sum()]
    with warnings.catch_warnings():
        warnings.simplefilter("error", AccumulationWarning)
        if is_over_ranks:
            trainer(ddp(), devices=2, callbacks=[GradientAccumulation(2, weight=each)]).fit(module)
        else:
            trainer(callbacks=[GradientAccumulation(4, weight=each)]).fit(module, loader(data))
    assert error_of_updates(module, train_by_hand(Selected(), whole, epochs=1), Selected()) <= 1e-12


def test_ranks_with_other_terms_share_the_main_weight() -> None:
    terms, contribution = TermsAtOnce(), Contribution(2.0, (4.0,), signature=7)
    other = Contribution(3.0, (5.0,), signature=8)
    sums = [a + b for a, b in zip(terms.numbers([contribution]), terms.numbers([other]), strict=True)]
    assert terms.factors(contribution, 1.0, 5.0, sums) == [2.0, 2.0]
    alike = [a + b for a, b in zip(terms.numbers([contribution]), terms.numbers([contribution]), strict=True)]
    assert terms.factors(contribution, 1.0, 4.0, alike) == [2.0, 2.0]
    assert terms.are_exact(alike)
    assert not terms.are_exact(sums)


def test_on_a_device_nothing_is_copied_to_the_host() -> None:
    """A meta tensor has no value: whatever asks for one raises."""
    meta = torch.device("meta")
    weigher, window = Weigher("auto", print, hands_out_terms=True), Window(meta)
    window._weight_scale, window.terms = 1.0, TermsAtOnce()
    logits, target = torch.randn(6, 5, device=meta, requires_grad=True), torch.zeros(6, dtype=torch.long, device=meta)
    loss = F.cross_entropy(logits, target) + F.mse_loss(logits[:2], torch.zeros(2, 5, device=meta))
    window.add(loss, weigher(loss, None))
    window.reduce()
    factors = window.factors_of_terms()
    assert factors is not None
    scale_terms(weigher.take_terms(), factors)
    loss.backward()
    assert [factor.device for factor in factors] == [meta, meta]
    assert weigher.take_terms() == []


def test_a_micro_batch_without_loss_is_named() -> None:
    """What it would have had was counted ahead."""
    with pytest.warns(UserWarning, match="does not add up to what they counted in the whole batch"):
        trainer(callbacks=[GradientAccumulation(micro_batch=5, weight=EACH)]).fit(SometimesRated(), loader(rated(1)))


def test_a_weight_that_counts_something_else_is_named() -> None:
    def run(**check: bool) -> None:
        accumulation = GradientAccumulation(micro_batch=4, weight=[TokenCount(), TokenCount()], **check)
        trainer(callbacks=[accumulation]).fit(Rated(), loader(rated(1)))

    with pytest.raises(ValueError, match="do not add up.*the gradient is"):
        run()
    with pytest.warns(UserWarning, match="mean squared error.*only where the two are proportional"):
        run(check=False)


def test_terms_without_weight_and_penalties_keep_their_share() -> None:
    """A micro-batch without tokens still has samples; a penalty on parameters is the same in all micro-batches."""

    class Penalised(Rated):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + 0.01 * self.score.weight.square().sum()

    batch = rated(1)[0]
    batch["labels"] = batch["labels"].clone()
    batch["labels"][4:8, 1:] = -100  # one token, which predicts nothing
    module = Penalised()
    run = trainer(callbacks=[GradientAccumulation(micro_batch=4, weight=EACH, trim_padding=False)])
    run.fit(module, loader([batch]))
    by_hand = train_by_hand(Penalised(), [batch], epochs=1)
    assert error_of_updates(module, by_hand, Penalised()) <= 1e-12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": ["auto", SampleCount()], "micro_batch": 4}, "a callable of the batch for each term"),
        ({"weight": [], "micro_batch": 4}, "a callable of the batch for each term"),
    ],
)
def test_what_cannot_count_terms_is_an_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        GradientAccumulation(**arguments)


def test_as_many_weights_as_terms() -> None:
    callback = GradientAccumulation(micro_batch=4, weight=[*EACH, SampleCount()])
    with pytest.raises(UnreadableLossError, match=r"3 weights.*2 terms that depend on the batch \(cross entropy, mean squared"):
        trainer(callbacks=[callback]).fit(Rated(), loader(rated(1)))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda x: x.square().mean() + x.sum(), "divided by nothing"),
        (lambda x: SCALE.exp() * (x.square().mean() + x.exp().mean()), "a parameter multiplies a sum of them"),
    ],
)
def test_terms_that_cannot_be_told_apart_are_an_error(loss: Callable[[Tensor], Tensor], message: str) -> None:
    terms = terms_of(loss(torch.ones(3, requires_grad=True) * torch.ones(3)))
    with pytest.raises(UnreadableLossError, match=message):
        TermLister([SampleCount(), SampleCount()], print).read(terms, [3.0, 3.0])


@pytest.mark.parametrize("other", [lambda mean: mean, lambda mean: mean.exp(), lambda mean: 3 * mean.square().squeeze()])
def test_terms_that_are_computed_from_one_another_are_scaled_each_by_itself(other: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
    rows = torch.ones(3, dtype=torch.float64)
    loss = (mean := (x * rows).square().mean()) + other(mean)
    scale_terms(TermLister([SampleCount(), SampleCount()], print).read(terms_of(loss), [3.0, 3.0]), [5.0, 7.0])
    loss.backward()
    (expected,) = torch.autograd.grad(5 * (mean := x.square().mean()) + 7 * other(mean), x)
    assert relative_error([x.grad], [expected]) < 1e-15


def test_scaling_is_by_term() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    first, second = x.square().mean(), x.sum()
    scale_terms([TermNode(first.grad_fn, 0), TermNode(second.grad_fn, 1)], [torch.tensor(10.0, dtype=torch.float64), 3.0])
    (first + second).backward()
    assert x.grad.tolist() == [13.0, 23.0]
