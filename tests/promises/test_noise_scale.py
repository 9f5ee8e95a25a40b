"""GradientNoiseScale against closed forms, and against the gradients of each micro-batch computed one by one."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from sharded import ShardedLanguage, fsdp1, fsdp2, needs_sharding_on_cpu
from support import NONE_LOSS, Language, ddp, end_profile, fp16_on_cpu, loader, pad, sentences, trainer
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_accum import GradientAccumulation, GradientNoiseScale, SampleCount, TokenCount, Tokens
from lightning_accum.noise.report import report
from lightning_accum.noise.scale import NoiseScale, SmoothedNoise, variance_and_gradient

DIMENSIONS = 20


class Quadratic(pl.LightningModule):
    """Loss ``mean of |w - x|^2 / 2``: the gradient of a sample is w - x, so S is the variance of x and G is w - E x."""

    def __init__(self, batches: Sequence[Any] = (), by_rank: Sequence[Sequence[Any]] | None = None, lr: float = 0.1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(DIMENSIONS, dtype=torch.float64))
        self.batches, self.by_rank, self.lr = batches, by_rank, lr

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if batch is None or batch.isnan().any():
            return None
        return self.loss(batch)

    def loss(self, x: Tensor) -> Tensor:
        return 0.5 * (self.w - x).square().sum(1).mean()

    def train_dataloader(self) -> DataLoader:
        return loader(self.batches if self.by_rank is None else self.by_rank[self.trainer.global_rank])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Kept(GradientNoiseScale):
    """Leaves its estimate in a file, since forked processes take theirs with them."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        torch.save(self.estimate, f"estimate_{trainer.global_rank}.pt")


def estimates(ranks: int = 1) -> list[Any]:
    return [torch.load(f"estimate_{rank}.pt", weights_only=False) for rank in range(ranks)]


def samples(*sizes: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, DIMENSIONS, dtype=torch.float64, generator=generator) for size in sizes]


def by_hand(
    windows: Sequence[Sequence[tuple[Any, float]]], gradient_of: Callable[[Any], Tensor], step: Callable[[Tensor], None]
) -> tuple[float, float]:
    """S and |G|^2, means over the windows, by the paper's formulas for two sizes of batch, from gradients taken one by one.

    The size of the small batches is the mean of those in the window, and each counts by its size.
    """
    found = []
    for window in windows:
        gradients, weights = [gradient_of(batch) for batch, _ in window], [weight for _, weight in window]
        b, s = sum(weights), sum(weights) / len(weights)
        full = sum(g * n for g, n in zip(gradients, weights, strict=True)) / b
        small = sum(n * g.square().sum().item() for g, n in zip(gradients, weights, strict=True)) / b
        large = full.square().sum().item()
        step(full)
        if len(window) > 1:
            found.append(((small - large) / (1 / s - 1 / b), (b * large - s * small) / (b - s)))
    return sum(s for s, _ in found) / len(found), sum(g for _, g in found) / len(found)


def quadratic_by_hand(windows: Sequence[Sequence[Tensor]], lr: float = 0.1, units: float = 1.0) -> tuple[float, float]:
    w = torch.ones(DIMENSIONS, dtype=torch.float64)
    weighed = [[(x, len(x) * units) for x in window] for window in windows]
    return by_hand(weighed, lambda x: w - x.mean(0), lambda full: w.sub_(lr * full))


def assert_agrees(estimate: Any, expected: tuple[float, float], windows: int) -> None:
    variance, gradient = expected
    assert estimate.windows == windows
    assert estimate.variance == pytest.approx(variance, rel=1e-12)
    assert estimate.gradient == pytest.approx(gradient, rel=1e-12)
    assert estimate.weight == pytest.approx(variance / gradient, rel=1e-12)


def fit(module: pl.LightningModule, *callbacks: Any, strategy: Any = "accum", **kwargs: Any) -> Any:
    noise = Kept(smoothing=1)
    trainer(strategy, callbacks=[*callbacks, noise], **kwargs).fit(module)
    ranks = kwargs.get("devices", 1)
    found = estimates(ranks)
    assert all(estimate == found[0] for estimate in found)
    return found[0]


# --- equal to the gradients of micro-batches taken one by one -----------------------------------------------------------


@pytest.mark.parametrize("sizes", [(3,) * 9, (1, 5, 2, 4, 4, 7, 3, 1, 2)])
def test_estimates_are_the_papers_from_each_micro_batchs_own_gradient(sizes: tuple[int, ...]) -> None:
    batches = samples(*sizes)
    estimate = fit(Quadratic(batches), GradientAccumulation(3))
    assert_agrees(estimate, quadratic_by_hand([batches[i : i + 3] for i in (0, 3, 6)]), 3)
    assert estimate.samples == estimate.weight
    assert estimate.weight_per_window == sum(sizes) / 3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_over_two_ranks_every_rank_has_the_estimate_from_all_micro_batches(accumulate: int) -> None:
    ranks = [samples(1, 5, 2, 4), samples(3, 3, 6, 1, seed=1)]
    estimate = fit(Quadratic(by_rank=ranks), strategy=ddp(), devices=2, accumulate_grad_batches=accumulate)
    windows = [
        [*ranks[0][i : i + accumulate], *ranks[1][i : i + accumulate]] for i in range(0, 4, accumulate)
    ]  # one micro-batch on each rank is enough
    assert_agrees(estimate, quadratic_by_hand(windows), 4 // accumulate)


def test_over_two_ranks_that_reduce_at_every_micro_batch() -> None:
    ranks = [samples(1, 5, 2, 4), samples(3, 3, 6, 1, seed=1)]
    estimate = fit(Quadratic(by_rank=ranks), strategy=ddp(sync="micro_batch"), devices=2, accumulate_grad_batches=2)
    assert_agrees(estimate, quadratic_by_hand([[*ranks[0][i : i + 2], *ranks[1][i : i + 2]] for i in (0, 2)]), 2)


def test_a_tail_of_one_micro_batch_has_no_estimate_and_changes_none() -> None:
    batches = samples(1, 5, 2, 4, 4)
    estimate = fit(Quadratic(batches), GradientAccumulation(2))
    assert_agrees(estimate, quadratic_by_hand([batches[:2], batches[2:4], batches[4:]]), 2)


def test_dropped_windows_leave_nothing_behind() -> None:
    batches = samples(1, 5, 2)
    estimate = fit(Quadratic(batches), GradientAccumulation(2, tail="drop"), max_epochs=3)
    assert_agrees(estimate, quadratic_by_hand([batches[:2]] * 3), 3)


def test_batches_and_losses_that_are_none_are_left_out() -> None:
    batches = samples(1, 5, 2, 4)
    none = NONE_LOSS.expand(1, DIMENSIONS)
    given = [None, batches[0], batches[1], none, batches[2], none, None, batches[3]]
    estimate = fit(Quadratic(given), GradientAccumulation(4))
    assert_agrees(estimate, quadratic_by_hand([batches[:2], batches[2:]]), 2)


def test_ranks_may_have_nothing_in_a_window() -> None:
    own, none = samples(1, 5, 2, 4), NONE_LOSS.expand(1, DIMENSIONS)
    other = [none, none, own[3], none]
    estimate = fit(Quadratic(by_rank=[own[:4], other]), strategy=ddp(), devices=2, accumulate_grad_batches=2)
    assert_agrees(estimate, quadratic_by_hand([own[:2], [own[2], own[3], own[3]]]), 2)


def test_split_batches() -> None:
    batches = samples(6, 7, 4)
    estimate = fit(Quadratic(batches), GradientAccumulation(micro_batch=3))
    pieces = [list(batch.split(3)) for batch in batches]
    sizes = [[len(piece) for piece in window] for window in pieces]
    assert sizes == [[3, 3], [3, 3, 1], [3, 1]]
    assert_agrees(estimate, quadratic_by_hand(pieces), 3)


def test_windows_of_tokens_that_end_inside_split_batches() -> None:
    batches = samples(6, 6, 6)
    estimate = fit(Quadratic(batches), GradientAccumulation(Tokens(4), micro_batch=2))
    pieces = [piece for batch in batches for piece in batch.split(2)]
    assert_agrees(estimate, quadratic_by_hand([pieces[i : i + 2] for i in range(0, 9, 2)]), 4)


def test_windows_of_tokens_that_end_inside_split_batches_of_two_ranks() -> None:
    ranks = [samples(4, 6), samples(5, 2, seed=1)]
    estimate = fit(Quadratic(by_rank=ranks), GradientAccumulation(Tokens(4), micro_batch=2), strategy=ddp(), devices=2)
    parts = [[list(batch.split(2)) for batch in rank] for rank in ranks]
    rounds = [own for of_ranks in zip(*parts, strict=True) for own in zip_longest(*of_ranks)]
    windows = [[part for part in own if part is not None] for own in rounds]
    windows[2:4] = [windows[2] + windows[3]]  # one row alone does not fill it
    windows[-2:] = [windows[-2] + windows[-1]]
    assert_agrees(estimate, quadratic_by_hand(windows), len(windows))


def test_micro_batches_that_ran_out_of_memory_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []  # not of the module, where a batch that runs again finds all as it was

    def out_of_memory(gradient: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    class Small(Quadratic):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            calls.append(len(batch))
            per_sample = (self.w - batch).square().sum(1)
            if len(batch) > 4 or len(calls) == 3:  # the second micro-batch of the second attempt fails too
                per_sample.register_hook(out_of_memory)
            return 0.5 * per_sample.mean()

    batches = samples(8, 8)
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        estimate = fit(Small(batches), GradientAccumulation(micro_batch="auto", check=False))
    assert calls == [8, 4, 4] + [2] * 8
    assert_agrees(estimate, quadratic_by_hand([batch.split(2) for batch in batches]), 2)
    [said] = [record.message for record in caplog.records if record.message.startswith("GradientNoiseScale")]
    assert "The largest micro-batch that fits into memory is 2 samples" in said


def test_gradients_scaled_for_float16_and_steps_that_the_scaler_skips() -> None:
    batches = samples(1, 5, 2, 4, 3, 3)
    broken = [*batches[:2], batches[2] * math.inf, batches[3], *batches[2:]]
    estimate = fit(Quadratic(broken), GradientAccumulation(2), plugins=[fp16_on_cpu()])
    assert_agrees(estimate, quadratic_by_hand([batches[:2], batches[2:4], batches[4:]]), 3)


def test_norms_are_those_before_clipping() -> None:
    batches = samples(1, 5, 2, 4)
    estimate = fit(Quadratic(batches, lr=0.0), GradientAccumulation(2), gradient_clip_val=1e-3)
    assert_agrees(estimate, quadratic_by_hand([batches[:2], batches[2:]], lr=0.0), 2)


def test_losses_that_are_sums_count_samples() -> None:
    class Summed(Quadratic):
        def loss(self, x: Tensor) -> Tensor:
            return 0.5 * (self.w - x).square().sum()

    ranks = [samples(1, 5, 2, 4), samples(3, 3, 6, 1, seed=1)]
    module = Summed(by_rank=ranks, lr=0.0)
    estimate = fit(module, strategy=ddp(), devices=2, accumulate_grad_batches=2)
    assert_agrees(estimate, quadratic_by_hand([[*ranks[0][i : i + 2], *ranks[1][i : i + 2]] for i in (0, 2)], lr=0.0), 2)


@pytest.mark.parametrize("weight", [SampleCount(), lambda batch: 3.0 * len(batch)])
def test_explicit_weights_are_the_unit(weight: Any) -> None:
    batches = samples(1, 5, 2, 4)
    estimate = fit(Quadratic(batches), GradientAccumulation(2, weight=weight))
    units = weight(batches[0]) / len(batches[0])
    assert_agrees(estimate, quadratic_by_hand([batches[:2], batches[2:]], units=float(units)), 2)
    assert estimate.weight_per_sample == units
    assert estimate.samples == pytest.approx(quadratic_ratio([batches[:2], batches[2:]]), rel=1e-12)


def quadratic_ratio(windows: Sequence[Sequence[Tensor]]) -> float:
    variance, gradient = quadratic_by_hand(windows)
    return variance / gradient


# --- a language model -----------------------------------------------------------------------------------------------------


class OfRank(Language):
    def __init__(self, by_rank: Sequence[Sequence[Any]], optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.by_rank = by_rank

    def train_dataloader(self) -> DataLoader:
        return loader(self.by_rank[self.trainer.global_rank])


class ShardedOfRank(ShardedLanguage, OfRank):
    def __init__(self, by_rank: Sequence[Sequence[Any]], **kwargs: Any) -> None:
        ShardedLanguage.__init__(self, **kwargs)
        self.by_rank = by_rank


def language_by_hand(windows: Sequence[Sequence[Any]]) -> tuple[float, float]:
    module = Language()
    parameters = list(module.parameters())
    optimizer = module.configure_optimizers()

    def gradient_of(batch: Any) -> Tensor:
        gradients = torch.autograd.grad(module.training_step(batch, 0), parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([gradient.flatten() for gradient in gradients])

    def step(full: Tensor) -> None:
        for parameter, gradient in zip(parameters, full.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = gradient.view_as(parameter)
        optimizer.step()

    weighed = [[(batch, float((batch["labels"][:, 1:] != -100).sum())) for batch in window] for window in windows]
    return by_hand(weighed, gradient_of, step)


def batches_of_text(number: int, rows: int) -> list[Any]:
    rows_of_text = sentences(number * rows)
    return [pad(rows_of_text[i * rows : (i + 1) * rows]) for i in range(number)]


def test_a_language_model_is_measured_in_tokens_and_samples() -> None:
    batches = batches_of_text(6, 2)
    estimate = fit(OfRank([batches]), GradientAccumulation(3))
    assert_agrees(estimate, language_by_hand([batches[:3], batches[3:]]), 2)
    tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    assert estimate.weight_per_sample == tokens / 12
    assert estimate.samples == pytest.approx(estimate.weight * 12 / tokens, rel=1e-12)


def test_a_language_model_over_two_ranks_with_labels_that_are_all_ignored() -> None:
    batches = batches_of_text(8, 2)
    nothing = {**batches[0], "labels": torch.full_like(batches[0]["labels"], -100)}
    by_rank = [batches[:4], [batches[4], nothing, *batches[6:]]]
    estimate = fit(OfRank(by_rank), strategy=ddp(), devices=2, accumulate_grad_batches=2)
    expected = language_by_hand([[*batches[:2], batches[4]], [*batches[2:4], *batches[6:]]])
    assert_agrees(estimate, expected, 2)


@pytest.mark.some_cases(1)
@needs_sharding_on_cpu
@pytest.mark.parametrize("sync", ["window", "micro_batch"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_sharded_parameters(sync: str, reshard_after_forward: bool) -> None:
    batches = batches_of_text(8, 2)
    module = ShardedOfRank([batches[:4], batches[4:]], reshard_after_forward=reshard_after_forward)
    estimate = fit(module, strategy=fsdp2(sync=sync), devices=2, accumulate_grad_batches=2)
    assert_agrees(estimate, language_by_hand([[*batches[i : i + 2], *batches[i + 4 : i + 6]] for i in (0, 2)]), 2)


# --- a known noise ----------------------------------------------------------------------------------------------------------


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_quadratic_with_known_noise_is_found_within_its_standard_error(devices: int) -> None:
    sigma, windows, size = 2.0, 400, (1, 2, 3, 6)
    ranks = [[sigma * x for x in samples(*size * windows, seed=rank)] for rank in range(devices)]
    module = Quadratic(by_rank=ranks, lr=0.0)
    estimate = fit(module, strategy=ddp() if devices > 1 else "accum", devices=devices, accumulate_grad_batches=4)
    variance, gradient = DIMENSIONS * sigma**2, float(DIMENSIONS)
    assert estimate.windows == windows
    # S is a chi-squared of d (K - 1) degrees of freedom over these; |g|^2 has the variance 4 G^2 v + 2 d v^2 with v = sigma^2 / N
    of_s = sigma**2 * math.sqrt(2 * DIMENSIONS / (4 * devices - 1) / windows)
    v = sigma**2 / (12 * devices)
    of_g = math.sqrt((4 * gradient * v + 2 * DIMENSIONS * v**2 + (of_s / (12 * devices)) ** 2 * windows) / windows)
    assert abs(estimate.variance - variance) < 3 * of_s
    assert abs(estimate.gradient - gradient) < 3 * of_g
    assert estimate.weight_low < variance / gradient < estimate.weight_high
    # two standard errors to either side, by the delta method
    width = 4 * variance / gradient * math.hypot(of_s / variance, of_g / gradient)
    assert estimate.weight_high - estimate.weight_low == pytest.approx(width, rel=0.25)


@pytest.mark.exhaustive
@pytest.mark.parametrize("smoothing", [1.0, 0.98])
def test_the_interval_covers_the_truth_as_often_as_it_says(smoothing: float) -> None:
    torch.manual_seed(0)
    covered, number = 0, 500
    for _ in range(number):
        noise = SmoothedNoise(smoothing, torch.device("cpu"))
        for s, g in zip((3 + torch.randn(120)).double(), (1 + torch.randn(120)).double(), strict=True):
            one = torch.ones_like(s)
            noise.add(s, g, one, one, one > 0)
        estimate = noise.estimate()
        covered += estimate.weight_low <= 3.0 <= estimate.weight_high
    assert 0.92 <= covered / number <= 0.98  # 0.954 for a normal distribution; a standard error of this count is 0.009


def measured_quadratic(smoothing: float, gradients: Tensor, generator: torch.Generator) -> Any:
    """The estimate from windows of 4 micro-batches of 3 samples with S = 20, where |G|^2 is given for each window.

    Their means are normal, so S has a chi-squared distribution and |g|^2 a noncentral one, both drawn from normal numbers.
    """
    noise, variance = SmoothedNoise(smoothing, torch.device("cpu")), 20.0
    normal = (
        torch.randn(len(gradients), 4, DIMENSIONS, dtype=torch.float64, generator=generator) * (variance / DIMENSIONS / 3) ** 0.5
    )
    normal[..., 0] += gradients.sqrt()[:, None]
    squares, full = (3 * normal.square()).sum((1, 2)), normal.mean(1).square().sum(1)
    for values in zip(*variance_and_gradient(squares, full, torch.tensor(12.0), torch.tensor(4.0)), strict=True):
        noise.add(*values, *torch.tensor([12.0, 12.0], dtype=torch.float64), torch.tensor(True))
    return noise.estimate()


@pytest.mark.parametrize("smoothing", [1.0, 0.99])
@pytest.mark.parametrize(("factor", "trend"), [(58.0, 1), (5.0, 1), (0.2, -1)])
def test_the_interval_covers_a_noise_scale_that_moved_while_it_was_measured(smoothing: float, factor: float, trend: int) -> None:
    """|G|^2 falls geometrically, as in a quadratic with a small rate: the mean over the windows lags far behind."""
    generator, windows, number = torch.Generator().manual_seed(1), 60, 100
    gradients = 2.0 * torch.linspace(0, -math.log(factor), windows, dtype=torch.float64).exp()
    estimates = [measured_quadratic(smoothing, gradients, generator) for _ in range(number)]
    truth = 20 / float(gradients[-1])
    assert sum(e.weight_low <= truth <= e.weight_high for e in estimates) >= 0.92 * number
    assert sum(e.trend == trend for e in estimates) >= 0.92 * number


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("smoothing", [1.0, 0.99])
def test_a_noise_scale_that_stays_is_not_often_said_to_move(smoothing: float) -> None:
    generator, number = torch.Generator().manual_seed(2), 300
    gradients = torch.full((60,), 2.0, dtype=torch.float64)
    estimates = [measured_quadratic(smoothing, gradients, generator) for _ in range(number)]
    assert 0.92 <= sum(e.weight_low <= 10.0 <= e.weight_high for e in estimates) / number <= 0.98
    assert sum(e.trend != 0 for e in estimates) <= 0.08 * number  # 0.046 for a normal distribution; a standard error is 0.012


def test_noise_that_hides_the_gradient_has_no_upper_end() -> None:
    noise = SmoothedNoise(1.0, torch.device("cpu"))
    for gradient in (-1.0, 0.5, -0.6, 1.0):
        values = torch.tensor([5.0, gradient, 1.0, 1.0], dtype=torch.float64)
        noise.add(*values, torch.tensor(True))
    estimate = noise.estimate()
    assert math.isinf(estimate.weight)
    assert math.isinf(estimate.weight_high)
    assert 0 < estimate.weight_low < math.inf


def test_smoothing_forgets() -> None:
    noise = SmoothedNoise(0.5, torch.device("cpu"))
    for variance in (8.0, 4.0, 2.0):
        noise.add(*torch.tensor([variance, 1.0, 1.0, 1.0], dtype=torch.float64), torch.tensor(True))
    assert noise.estimate().variance == pytest.approx((8 / 4 + 4 / 2 + 2) / (1 / 4 + 1 / 2 + 1), rel=1e-15)


# --- beside training ----------------------------------------------------------------------------------------------------------


def test_training_is_the_same_to_the_bit_and_nothing_stays_in_the_module() -> None:
    batches = batches_of_text(6, 2)
    modules = [OfRank([batches], "adamw") for _ in range(2)]
    trainer(callbacks=[GradientAccumulation(3)]).fit(modules[0])
    fit(modules[1], GradientAccumulation(3))
    assert all(torch.equal(a, b) for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True))
    assert not any(parameter._backward_hooks for parameter in modules[1].parameters())


def test_another_fit_begins_anew() -> None:
    batches = samples(1, 5, 2, 4)
    noise = GradientNoiseScale(smoothing=1)
    for _ in range(2):
        trainer(callbacks=[GradientAccumulation(2), noise]).fit(Quadratic(batches))
        assert_agrees(noise.estimate, quadratic_by_hand([batches[:2], batches[2:]]), 2)


def test_one_small_all_reduce_a_measured_window() -> None:
    class Profiled(Quadratic):
        def on_train_batch_start(self, batch, batch_idx) -> None:
            if batch_idx == 4:
                self.profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
                self.profile.__enter__()

        def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
            if batch_idx == 15:
                end_profile(self.profile)
                events = [event for event in self.profile.events() if event.name.startswith("gloo:all_reduce")]
                sizes = [sum(torch.Size(shape).numel() for shape in event.input_shapes) for event in events]
                if self.global_rank == 0:
                    torch.save(sizes, "collectives.pt")

    noise = GradientNoiseScale(every_n_windows=2)
    module = Profiled(by_rank=[samples(*[2] * 20), samples(*[2] * 20, seed=1)])
    trainer(ddp(), devices=2, callbacks=[noise], accumulate_grad_batches=2).fit(module)
    sizes = torch.load("collectives.pt")
    assert sorted(sizes) == [7] * 3 + [8] * 6 + [DIMENSIONS] * 6  # of 6 windows 3 are measured


def test_one_window_in_so_many_is_measured() -> None:
    batches = samples(*range(1, 13))
    noise = GradientNoiseScale(smoothing=1, every_n_windows=2)
    trainer(callbacks=[GradientAccumulation(2), noise]).fit(Quadratic(batches, lr=0.0))
    measured = [batches[i : i + 2] for i in (0, 4, 8)]
    assert_agrees(noise.estimate, quadratic_by_hand(measured, lr=0.0), 3)


def test_parameters_that_thaw_are_measured_too() -> None:
    class Thawing(OfRank):
        def on_fit_start(self) -> None:
            self.net.head.requires_grad_(False)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net.head.requires_grad_(True)

    batches = batches_of_text(4, 2)
    module = Thawing([batches])
    before = None

    class Watching(GradientNoiseScale):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            nonlocal before
            before = copy.deepcopy(pl_module.net.state_dict())

    noise = Watching(smoothing=1e-9)  # the last window alone
    trainer(callbacks=[GradientAccumulation(4), noise], max_epochs=2).fit(module)
    reference = Language()
    reference.net.load_state_dict(before)
    parameters = list(reference.parameters())

    def gradient_of(batch: Any) -> Tensor:
        gradients = torch.autograd.grad(reference.training_step(batch, 0), parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([gradient.flatten() for gradient in gradients])

    weighed = [(batch, float((batch["labels"][:, 1:] != -100).sum())) for batch in batches]
    variance, _ = by_hand([weighed], gradient_of, lambda full: None)
    assert noise.estimate.variance == pytest.approx(variance, rel=1e-8)  # the window before it still counts 1e-9


class Saving(Quadratic):
    """Saves a checkpoint after its first epoch."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.trainer.save_checkpoint("first.ckpt")


@pytest.mark.parametrize("every", [1, 2])
def test_training_that_goes_on_from_a_checkpoint_goes_on_with_the_estimate(every: int) -> None:
    batches = samples(1, 5, 2, 4, 3, 3)
    whole, resumed = [GradientNoiseScale(smoothing=0.9, every_n_windows=every) for _ in range(2)]
    trainer(callbacks=[GradientAccumulation(2), whole], max_epochs=2).fit(Saving(batches))
    trainer(callbacks=[GradientAccumulation(2), resumed], max_epochs=2).fit(Quadratic(batches), ckpt_path="first.ckpt")
    assert resumed.estimate == whole.estimate
    assert whole.estimate.windows == 6 // every


def test_a_window_that_is_resumed_in_its_middle_is_left_out() -> None:
    batches = samples(1, 5, 2)
    whole, resumed = [[GradientAccumulation(2, tail="carry"), GradientNoiseScale(smoothing=1)] for _ in range(2)]
    trainer(callbacks=whole, max_epochs=2).fit(Saving(batches, lr=0.0))
    windows = [batches[:2], [batches[2], batches[0]], batches[1:]]
    assert_agrees(whole[1].estimate, quadratic_by_hand(windows, lr=0.0), 3)
    trainer(callbacks=resumed, max_epochs=2).fit(Quadratic(batches, lr=0.0), ckpt_path="first.ckpt")
    assert_agrees(resumed[1].estimate, quadratic_by_hand([windows[0], windows[2]], lr=0.0), 2)


# --- what one sees ------------------------------------------------------------------------------------------------------------


def test_the_suggestion_is_printed_in_samples_and_tokens(caplog: pytest.LogCaptureFixture) -> None:
    batches = batches_of_text(60, 2)
    noise = GradientNoiseScale()
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        run = trainer(callbacks=[GradientAccumulation(3, weight=TokenCount()), noise])
        run.fit(OfRank([batches]))
    [said] = [record.message for record in caplog.records if record.message.startswith("GradientNoiseScale")]
    for part in ("samples (", " tokens)", "two standard errors", "measured over 20 windows", "arXiv 1812.06162"):
        assert part in said
    shown = run.callback_metrics
    assert shown["noise_scale/weight"].item() == pytest.approx(noise.estimate.weight, rel=1e-12)
    assert shown["noise_scale/samples"].item() == pytest.approx(noise.estimate.samples, rel=1e-12)
    assert shown["noise_scale/variance"].item() == pytest.approx(noise.estimate.variance, rel=1e-12)
    assert shown["noise_scale/gradient"].item() == pytest.approx(noise.estimate.gradient, rel=1e-12)


@pytest.mark.parametrize(
    ("trend", "low", "high", "says"),
    [
        (1, 6.7, math.inf, "noise scale grew while it was measured: now it is 6.7 samples at least"),
        (-1, 0.0, 15.0, "noise scale shrank while it was measured: now it is 15 samples at most"),
    ],
)
def test_the_suggestion_says_that_the_noise_scale_moved(trend: int, low: float, high: float, says: str) -> None:
    text = report(NoiseScale(9.5, low, high, 1.0, 12.0, 19.0, 2.0, 60, trend), False)
    assert "about 9.5 samples was worth having on average" in text
    assert says in text
    assert "smaller smoothing=" in text
    assert "right size" not in text


def test_loggers_get_it_by_the_trainers_interval() -> None:
    class Recording(pl.loggers.CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            recorded.append((step, metrics))

    recorded: list[Any] = []
    run = trainer(callbacks=[GradientAccumulation(2), GradientNoiseScale()], logger=Recording("."), log_every_n_steps=2)
    run.fit(Quadratic(samples(*[3] * 16)))
    assert [step for step, metrics in recorded if "noise_scale/weight" in metrics] == [1, 3, 5, 7]


def test_windows_of_one_micro_batch_on_one_rank_are_warned_of_at_once() -> None:
    noise = GradientNoiseScale()
    with pytest.warns(UserWarning, match=r"will have no estimate.*GradientAccumulation\(4\).*micro_batch="):
        trainer(callbacks=[noise]).fit(Quadratic(samples(2, 2)))
    assert noise.estimate is None


def test_sorted_micro_batches_are_warned_of() -> None:
    rows = pad(sentences(8))
    with pytest.warns(UserWarning, match=r"sorted by length.*trim_padding=False"):
        fit(OfRank([[rows] * 3]), GradientAccumulation(micro_batch=2))


def test_a_gradient_in_several_parts_is_warned_of_and_not_measured() -> None:
    class Reentrant(Quadratic):
        use_reentrant = True

        def loss(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            for _ in range(2):
                x = checkpoint(lambda x: x * self.w, x, use_reentrant=self.use_reentrant)
            return x.sum(1).mean()

    class Whole(Reentrant):
        use_reentrant = False

    with pytest.warns(UserWarning, match=r"several parts.*use_reentrant=False"):
        assert fit(Reentrant(samples(*[2] * 8)), GradientAccumulation(2)) is None
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "GradientNoiseScale")
        assert fit(Whole(samples(*[2] * 8)), GradientAccumulation(2)).windows == 4


# --- what is refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"smoothing": 0}, "smoothing=0"),
        ({"smoothing": 1.5}, "smoothing=1.5"),
        ({"every_n_windows": 0}, "every_n_windows=0"),
        ({"every_n_windows": 2.0}, "every_n_windows=2.0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], names: str) -> None:
    with pytest.raises(MisconfigurationException, match=names):
        GradientNoiseScale(**arguments)


def test_other_strategies_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r'SingleDeviceStrategy.*strategy="accum"'):
        trainer("auto", callbacks=[GradientNoiseScale()]).fit(Quadratic(samples(2)))


def test_manual_optimization_is_refused() -> None:
    module = Quadratic(samples(2))
    module.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="automatic_optimization=False"):
        trainer(callbacks=[GradientNoiseScale()]).fit(module)


@needs_sharding_on_cpu
@pytest.mark.parametrize(
    ("strategy", "says"), [(lambda: fsdp1(), 'FSDP1.*"accum_model_parallel"'), (lambda: fsdp2(1, 2), "tensor_parallel_size=1")]
)
def test_gradients_that_no_rank_has_are_refused_before_training(strategy: Any, says: str) -> None:
    class Untrained(ShardedOfRank):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise AssertionError("training has begun")

    module = Untrained([batches_of_text(2, 2)] * 2)
    with pytest.raises(ProcessRaisedException, match=f"(?s)MisconfiguredError.*{says}"):
        trainer(strategy(), devices=2, callbacks=[GradientNoiseScale()]).fit(module)


class MeanSquares(pl.LightningModule):
    """By a criterion of torch, or by hand."""

    def __init__(self, loss_of: Callable[[Tensor], Tensor], batches: Sequence[Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2).double()
        self._loss_of, self._batches = loss_of, batches

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._loss_of(self.net(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(list(self._batches), batch_size=None)


def test_micro_batches_that_bring_in_the_same_as_the_one_before_are_measured_too() -> None:
    batches = [torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    losses: list[Callable[[Tensor], Tensor]] = [lambda o: F.mse_loss(o, torch.zeros_like(o)), lambda o: o.square().mean()]
    of_torch, by_hand = (fit(MeanSquares(loss_of, batches), GradientAccumulation(3)) for loss_of in losses)
    assert_agrees(of_torch, (by_hand.variance, by_hand.gradient), 2)
