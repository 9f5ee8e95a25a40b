"""GradientNoiseScale against closed forms, and against the gradients of each micro-batch computed one by one."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Dealt
from sharded import ShardedLanguage, fsdp1, fsdp2, needs_sharding_on_cpu
from support import NONE_LOSS, Language, SaveAfter, Scalar, ddp, fit, fp16_on_cpu, pad, predictions, sentences, x
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_accum import AccumulationError, AccumulationWarning, GradientAccumulation, GradientNoiseScale, Tokens

DIMENSIONS = 20


class Quadratic(Scalar):
    """Loss ``mean of |w - x|^2 / 2``: the gradient of a sample is w - x, so S is the variance of x and G is w - E x."""

    def __init__(self, *by_rank: Sequence[Any], lr: float = 0.1) -> None:
        super().__init__(by_rank=by_rank, lr=lr)
        self.w = nn.Parameter(torch.ones(DIMENSIONS, dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if batch.isnan().any() else self.loss(batch)

    def loss(self, x: Tensor) -> Tensor:
        return 0.5 * (self.w - x).square().sum(1).mean()


class Kept(GradientNoiseScale):  # leaves its estimate in a file, since forked processes take theirs with them
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        torch.save(self.estimate, f"estimate_{trainer.global_rank}.pt")


def measured(module: pl.LightningModule, policy: Any, ranks: int = 1, strategy: Any = None, data: Any = None, **kwargs: Any) -> Any:
    """The estimate, which is the same on all ranks."""
    fit(module, data, policy, Kept(smoothing=1), strategy=strategy or "accum", ranks=ranks, **kwargs)
    found = [torch.load(f"estimate_{rank}.pt", weights_only=False) for rank in range(ranks)]
    assert found == found[:1] * ranks
    return found[0]


def samples(*sizes: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, DIMENSIONS, dtype=torch.float64, generator=generator) for size in sizes]


def by_hand(windows: Any, gradient_of: Callable[[Any], Tensor], step: Callable[[Tensor], Any]) -> tuple[float, float]:
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
    found = estimate.variance, estimate.gradient, estimate.weight
    assert found == pytest.approx((*expected, expected[0] / expected[1]), rel=1e-12)
    assert estimate.windows == windows


A, B = samples(1, 5, 2, 4), samples(3, 3, 6, 1, seed=1)
NOTHING = NONE_LOSS.expand(1, DIMENSIONS)
EQUAL, SPLIT = samples(*[3] * 9), samples(6, 7, 4)
BROKEN = [*A[:2], A[2] * math.inf, *A[1:]]
CASES: dict[str, tuple[Any, ...]] = {
    "equal sizes": ([EQUAL], {"window": 3}, [EQUAL[:3], EQUAL[3:6], EQUAL[6:]]),
    "other sizes": ([A], {"window": 2}, [A[:2], A[2:]]),
    "a tail of one micro-batch": ([[*A, A[0]]], {"window": 2}, [A[:2], A[2:], A[:1]]),
    "dropped tails": ([A[:3]], {"window": 2, "tail": "drop"}, [A[:2]] * 3, {"max_epochs": 3}),
    "batches and losses that are none": ([[None, *A[:2], NOTHING, A[2], NOTHING, None, A[3]]], {"window": 4}, [A[:2], A[2:]]),
    "split": ([SPLIT], {"micro_batch": 3}, [list(batch.split(3)) for batch in SPLIT]),
    "tokens": ([A], {"window": Tokens(6)}, [A[:2], A[2:]]),
    "skipped by a scaler": ([BROKEN], {"window": 2}, [A[:2], A[2:]], {"plugins": fp16_on_cpu}),
    "two ranks": ([A, B], {"window": 2}, [[*A[:2], *B[:2]], [*A[2:], *B[2:]]]),
    "two ranks, one micro-batch on each": ([A, B], {"window": 1}, [list(pair) for pair in zip(A, B, strict=True)]),
    "a rank with nothing": ([A, [NOTHING, NOTHING, B[0], NOTHING]], {"window": 2}, [A[:2], [*A[2:], B[0]]]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_the_papers_from_each_micro_batchs_own_gradient(name: str) -> None:
    by_rank, policy, windows, *arguments = CASES[name]
    kwargs = {key: [value()] if callable(value) else value for key, value in (arguments[0] if arguments else {}).items()}
    estimate = measured(Quadratic(*by_rank), GradientAccumulation(**policy), len(by_rank), **kwargs)
    assert_agrees(estimate, quadratic_by_hand(windows), sum(len(window) > 1 for window in windows))
    assert estimate.samples == estimate.weight


@pytest.mark.parametrize("is_sum", [False, True])
def test_before_clipping_reduced_at_every_micro_batch_and_of_sums_too(is_sum: bool) -> None:
    module = Quadratic(A, B, lr=0.0)
    module.loss = (lambda x: 0.5 * (module.w - x).square().sum()) if is_sum else module.loss
    estimate = measured(module, GradientAccumulation(2), 2, ddp(sync="micro_batch"), gradient_clip_val=1e-3)
    assert_agrees(estimate, quadratic_by_hand([[*A[:2], *B[:2]], [*A[2:], *B[2:]]], lr=0.0), 2)


@pytest.mark.parametrize("strategy", [ddp, pytest.param(fsdp2, marks=needs_sharding_on_cpu)], ids=["ddp", "fsdp2"])
def test_a_language_model_is_measured_in_tokens_and_samples(strategy: Any) -> None:
    batches = [pad(sentences(16)[i : i + 2]) for i in range(0, 16, 2)]
    module = Language()
    parameters, optimizer = list(module.parameters()), module.configure_optimizers()

    def gradient_of(batch: Any) -> Tensor:
        gradients = torch.autograd.grad(module.training_step(batch, 0), parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([gradient.flatten() for gradient in gradients])

    def step(full: Tensor) -> None:
        for parameter, gradient in zip(parameters, full.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = gradient.view_as(parameter)
        optimizer.step()

    weights = list(map(predictions, batches))
    weighed = list(zip(batches, weights, strict=True))
    by_rank = [*batches[:2], *batches[4:6]], [*batches[2:4], *batches[6:]]
    estimate = measured(ShardedLanguage(), GradientAccumulation(2), 2, strategy(), Dealt(by_rank, lambda batch: batch))
    assert_agrees(estimate, by_hand([weighed[:4], weighed[4:]], gradient_of, step), 2)
    assert estimate.samples == pytest.approx(estimate.weight * 16 / sum(weights), rel=1e-12)


@pytest.mark.some_cases(0, 1)
@pytest.mark.parametrize("ranks", [2, 1])
def test_a_quadratic_with_known_noise_is_found_within_its_standard_error(ranks: int) -> None:
    sigma, windows, size = 2.0, 400, (1, 2, 3, 6)
    by_rank = [[sigma * x for x in samples(*size * windows, seed=rank)] for rank in range(ranks)]
    estimate = measured(Quadratic(*by_rank, lr=0.0), GradientAccumulation(4), ranks)
    variance, gradient = DIMENSIONS * sigma**2, float(DIMENSIONS)
    assert estimate.windows == windows
    # S is a chi-squared of d (K - 1) degrees of freedom over these; |g|^2 has the variance 4 G^2 v + 2 d v^2 with v = sigma^2 / N
    of_s = sigma**2 * math.sqrt(2 * DIMENSIONS / (4 * ranks - 1) / windows)
    v = sigma**2 / (12 * ranks)
    of_g = math.sqrt((4 * gradient * v + 2 * DIMENSIONS * v**2 + (of_s / (12 * ranks)) ** 2 * windows) / windows)
    assert abs(estimate.variance - variance) < 3 * of_s
    assert abs(estimate.gradient - gradient) < 3 * of_g
    # the interval is two standard errors of the logarithm of their ratio, which hardly depend on each other here
    of_ratio = math.exp(2 * math.hypot(of_s / variance, of_g / gradient))
    above, below = estimate.weight_high / estimate.weight, estimate.weight / estimate.weight_low
    assert above == pytest.approx(below) == pytest.approx(of_ratio, rel=0.05)
    assert estimate.samples_low < variance / gradient < estimate.samples_high


def test_the_interval_is_open_if_noise_hides_the_gradient() -> None:
    estimate = measured(Quadratic([10 * x for x in samples(*[1, 2] * 4)], lr=0.0), GradientAccumulation(2))
    assert (estimate.samples_low, estimate.samples_high) == (0, math.inf)


def test_training_that_goes_on_from_a_checkpoint_goes_on_with_the_estimate() -> None:
    whole, resumed = GradientNoiseScale(smoothing=0.9), GradientNoiseScale(smoothing=0.9)
    fit(Quadratic(A), None, GradientAccumulation(2), whole, SaveAfter(4), max_epochs=2)
    fit(Quadratic(A), None, GradientAccumulation(2), resumed, max_epochs=2, ckpt_path="inside.ckpt")
    assert resumed.estimate == whole.estimate
    assert whole.estimate.windows == 4


def test_the_suggestion_is_logged_and_printed_and_training_is_the_same_to_the_bit(caplog: pytest.LogCaptureFixture) -> None:
    noise, module, plain = GradientNoiseScale(), Quadratic(EQUAL * 4), Quadratic(EQUAL * 4)
    fit(plain, None, GradientAccumulation(3))
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        run = fit(module, None, GradientAccumulation(3), noise)
    assert torch.equal(module.w, plain.w)
    assert sum(record.message.startswith("GradientNoiseScale") for record in caplog.records) == 1
    for name in ("weight", "samples", "variance", "gradient"):
        assert run.callback_metrics[f"noise_scale/{name}"].item() == pytest.approx(getattr(noise.estimate, name), rel=1e-12)


def test_what_cannot_be_measured_well_is_warned_of() -> None:
    class Reentrant(Quadratic):
        def loss(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            for _ in range(2):
                x = checkpoint(lambda x: x * self.w, x, use_reentrant=True)
            return x.sum(1).mean()

    rows = pad(sentences(8))
    with pytest.warns(AccumulationWarning, match="use_reentrant=False"):
        assert measured(Reentrant(EQUAL), GradientAccumulation(3)) is None
    with pytest.warns(AccumulationWarning, match="micro_batch="):  # windows of one micro-batch on one rank
        fit(Quadratic(A), None, GradientNoiseScale())
    with pytest.warns(AccumulationWarning, match="trim_padding=False"):  # sorted by length
        fit(Language(), [rows] * 3, GradientAccumulation(micro_batch=2), GradientNoiseScale())


def test_a_smoothing_out_of_range_other_strategies_and_manual_optimization_are_refused() -> None:
    module = Quadratic(A)
    for smoothing in (0, 1.5):
        with pytest.raises(AccumulationError, match="smoothing"):
            GradientNoiseScale(smoothing=smoothing)
    with pytest.raises(AccumulationError, match="accum"):
        fit(module, None, GradientNoiseScale(), strategy="auto")
    module.automatic_optimization = False
    with pytest.raises(AccumulationError, match="automatic_optimization"):
        fit(module, None, GradientNoiseScale())


@needs_sharding_on_cpu
@pytest.mark.parametrize("strategy", [fsdp1, lambda: fsdp2(1, 2)], ids=["FSDP1", "tensor parallelism"])
def test_gradients_that_no_rank_has_are_refused_before_training(strategy: Any) -> None:
    with pytest.raises(Exception, match="MisconfiguredError"):  # and not of the batch, which is no text
        fit(ShardedLanguage(), [x(1)], GradientNoiseScale(), strategy=strategy(), devices=2)
