"""Losses that are a function of a mean (RMSE, a logarithm, a power): a window is its full batch, or it is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_one_window_one_batch, windows_of
from sharded import ShardedLanguage, fsdp2, needs_sharding_on_cpu
from support import (
    OPTIMIZERS,
    SaveAfter,
    StatefulLoader,
    ddp,
    fp16_on_cpu,
    loader,
    pad,
    relative_error,
    sentences,
    train_by_hand,
    trainer,
)
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import DoesNotAddUpError, GradientAccumulation, GradientNoiseScale, SampleCount, UnreadableLossError, verify

Loss = Callable[[Tensor, Tensor], Tensor]
EXACT = 1e-12


def masked(errors: Tensor, y: Tensor) -> Tensor:
    mask = (y > 0).to(errors)
    return (errors * mask).sum() / mask.sum()


FUNCTIONS: dict[str, Loss] = {
    "RMSE": lambda o, y: torch.sqrt(F.mse_loss(o, y)),
    "RMSE by a power": lambda o, y: ((o - y) ** 2).mean() ** 0.5,
    "RMSE with eps": lambda o, y: torch.sqrt(F.mse_loss(o, y) + 1e-6),
    "RMSE of rows": lambda o, y: torch.sqrt((o - y).square().sum(1).mean()),
    "RMSLE": lambda o, y: torch.sqrt(F.mse_loss(torch.log1p(o.square()), torch.log1p(y.square()))),
    "three times RMSE": lambda o, y: 3 * torch.sqrt(F.mse_loss(o, y)) / 2,
    "one minus RMSE": lambda o, y: -(1 - torch.sqrt(F.mse_loss(o, y))),
    "masked RMSE": lambda o, y: torch.sqrt(masked((o - y).square(), y)),
    "logarithm": lambda o, y: torch.log(F.mse_loss(o, y)),
    "logarithm with eps": lambda o, y: 10 * torch.log10(1e-3 + F.l1_loss(o, y)) + 7,
    "logarithm of a mean of exponentials": lambda o, y: torch.log(torch.exp(o - y).mean()),
    "exponential": lambda o, y: torch.exp(F.smooth_l1_loss(o, y)),
    "perplexity": lambda o, y: F.cross_entropy(o, (y[:, 0] > 0).long()).exp(),
    "power": lambda o, y: F.l1_loss(o, y).pow(1.7),
    "reciprocal": lambda o, y: -1 / (1 + F.mse_loss(o, y)),
    "square of a logarithm": lambda o, y: torch.log1p(F.mse_loss(o, y)) ** 2,
    "at least": lambda o, y: F.mse_loss(o, y).clamp(min=0.01),
    "flooding": lambda o, y: (F.mse_loss(o, y) - 0.02).abs() + 0.02,
    "of two means over one count": lambda o, y: torch.sqrt(F.mse_loss(o, y) + 0.5 * (o - y).abs().mean()),
    "norm of all errors": lambda o, y: (o - y).square().sum().sqrt(),
    "relative error": lambda o, y: torch.sqrt((o - y).square().sum() / y.square().sum()),
}


class Regression(pl.LightningModule):
    """Two layers, and any loss; all of ``batches``, or those of its rank."""

    def __init__(self, loss: Loss, optimizer: str = "sgd", by_rank: Sequence[Sequence[Any]] | None = None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.loss, self.optimizer, self.by_rank = loss, optimizer, by_rank
        self.logged: dict[int, float] = {}
        """The loss of each window, by optimizer step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch[0].isnan().any():
            return None
        return self.loss(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        metrics = self.trainer.callback_metrics
        if "window/loss" in metrics:
            self.logged[int(metrics["window/optimizer_steps"])] = float(metrics["window/loss"])

    on_train_end = on_train_batch_end

    def train_dataloader(self) -> Any:
        return loader((self.by_rank or [])[self.trainer.global_rank])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def samples(rows: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    return [inputs, (inputs[:, :2] * (1 + seed % 3) + noise).sin() * (seed % 4 + 1) + 0.1]


def joined(batches: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


BATCHES = [samples(rows, seed) for seed, rows in enumerate([2, 5, 1, 4, 3, 1, 6, 2, 4, 7])]
WINDOWS = [joined(BATCHES[:4]), joined(BATCHES[4:8]), joined(BATCHES[8:])]


OF_RANKS = [[BATCHES[i] for i in (0, 1, 4, 5, 8)], [BATCHES[i] for i in (2, 3, 6, 7, 9)]]


def by_hand(loss: Loss, optimizer: str = "sgd", epochs: int = 2) -> Regression:
    return train_by_hand(Regression(loss, optimizer), WINDOWS, epochs)


# --- one process -----------------------------------------------------------------------------------------------------------


@pytest.mark.some_cases(22)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_windows_of_unequal_batches_are_their_full_batches(name: str, optimizer: str) -> None:
    by_rank = [[[batch] for batch in BATCHES]]
    make, windows = partial(Regression, FUNCTIONS[name], optimizer), windows_of(by_rank, 4, 2)
    assert_one_window_one_batch(make, by_rank, windows, GradientAccumulation(4), collate=joined, max_epochs=2)


@pytest.mark.some_cases(22)
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_split_batches_are_exact(name: str, window: int) -> None:
    by_rank, policy = [[BATCHES[:4], BATCHES[4:8]]], GradientAccumulation(window, micro_batch=5)
    make, windows = partial(Regression, FUNCTIONS[name]), windows_of(by_rank, window, 2)
    assert_one_window_one_batch(make, by_rank, windows, policy, collate=joined, max_epochs=2)


# --- ranks, checkpoints, hooks ---------------------------------------------------------------------------------------------


@pytest.mark.some_cases(5)
@pytest.mark.parametrize("name", ["RMSE", "masked RMSE", "one minus RMSE", "logarithm with eps", "norm of all errors"])
@pytest.mark.parametrize("window", [1, 2])
def test_over_ranks_a_window_is_its_full_batch(name: str, window: int) -> None:
    by_rank = [[[batch] for batch in own] for own in OF_RANKS]
    make, windows = partial(Regression, FUNCTIONS[name], "adamw"), windows_of(by_rank, window, 2)
    assert_one_window_one_batch(make, by_rank, windows, GradientAccumulation(window), "ddp", collate=joined, max_epochs=2)


class Perplexity(ShardedLanguage):
    """Its loss is the exponential of a cross entropy; the sentences are dealt out to the ranks."""

    def __init__(self, by_rank: Sequence[Sequence[Any]] = ()) -> None:
        super().__init__("sgd")
        self.by_rank = by_rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (0.1 * super().training_step(batch, batch_idx)).exp()

    def train_dataloader(self) -> Any:
        return loader(self.by_rank[self.trainer.global_rank])


@needs_sharding_on_cpu
def test_over_shards_a_window_is_its_full_batch() -> None:
    rows = sentences(24)
    by_rank = [[pad(rows[start : start + 3]) for start in range(3 * rank, 24, 6)] for rank in (0, 1)]
    run = trainer(fsdp2(), devices=2, callbacks=[GradientAccumulation(2)])
    run.fit(Perplexity(by_rank))
    expected = train_by_hand(Perplexity(), [pad(rows[:12]), pad(rows[12:])], 1)
    assert relative_error(run.whole.values(), [parameter for _, parameter in expected.named_parameters()]) <= EXACT


NO_LOSS = [torch.full((1, 3), math.nan, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)]
"""For it training_step returns None."""


def test_a_rank_that_never_had_a_loss_learns_the_slope_from_the_others() -> None:
    module = Regression(FUNCTIONS["one minus RMSE"], by_rank=[BATCHES[:4], [NO_LOSS] * 3 + [BATCHES[4]]])
    module.on_train_end = lambda: torch.save(module.logged, "logged.pt")
    trainer(ddp(), devices=2, callbacks=[GradientAccumulation(2)]).fit(module)
    expected = Regression(FUNCTIONS["one minus RMSE"])
    first = joined(BATCHES[:2])
    loss = expected.training_step(first, 0).item()
    train_by_hand(expected, [first, joined(BATCHES[2:5])], 1)
    assert relative_error(module.parameters(), expected.parameters()) <= EXACT
    assert torch.load("logged.pt")[1] == pytest.approx(loss, rel=EXACT)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_inside_a_window_goes_on_to_the_bit(ranks: int) -> None:
    def run(after: int | None = None, resumes: bool = False) -> Any:
        module = Regression(FUNCTIONS["logarithm with eps"], "adamw")
        module.on_train_end = lambda: torch.save([list(module.parameters()), module.logged], "end.pt")
        batches = OF_RANKS if ranks == 2 else [BATCHES]
        module.train_dataloader = lambda: StatefulLoader(batches[module.trainer.global_rank])
        callbacks = [GradientAccumulation(4 // ranks), SaveAfter(after)]
        run = trainer(ddp() if ranks == 2 else "accum", devices=ranks, callbacks=callbacks)
        run.fit(module, ckpt_path="inside.ckpt" if resumes else None)
        return torch.load("end.pt", weights_only=False)

    parameters, logged = run(after=6 // ranks)
    resumed, logged_resumed = run(resumes=True)
    assert all(torch.equal(a, b) for a, b in zip(parameters, resumed, strict=True))
    assert logged[2] == logged_resumed[2]


def test_clipping_and_hooks_see_the_gradient_of_the_full_batch() -> None:
    seen: list[Tensor] = []

    class Hooked(Regression):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            seen.append(torch.cat([p.grad.flatten() for p in self.parameters()]))

    module = Hooked(FUNCTIONS["RMSE"])
    trainer("accum", gradient_clip_val=0.05, callbacks=[GradientAccumulation(4)]).fit(module, loader(BATCHES))
    expected = train_by_hand(Regression(FUNCTIONS["RMSE"]), WINDOWS, 1, norm=0.05)
    assert relative_error(module.parameters(), expected.parameters()) <= EXACT
    (first := Regression(FUNCTIONS["RMSE"])).training_step(WINDOWS[0], 0).backward()
    assert relative_error(seen[:1], [torch.cat([p.grad.flatten() for p in first.parameters()])]) <= EXACT


def test_a_window_of_one_micro_batch_is_lightnings_own_step_to_the_bit() -> None:
    module, plain = Regression(FUNCTIONS["RMSE with eps"]), Regression(FUNCTIONS["RMSE with eps"])
    trainer("accum", callbacks=[GradientAccumulation(1)]).fit(module, loader(BATCHES))
    trainer("auto").fit(plain, loader(BATCHES))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("name", ["RMSE", "logarithm"])
def test_half_precision_with_a_loss_scale_is_as_near_as_the_full_batch_in_it(name: str) -> None:
    def train(batches: Sequence[Any], window: int) -> Regression:
        module = Regression(FUNCTIONS[name]).float()
        plugin = fp16_on_cpu(init_scale=64.0)
        data = [[tensor.float() for tensor in batch] for batch in batches]
        trainer("accum", plugins=[plugin], callbacks=[GradientAccumulation(window)]).fit(module, loader(data))
        return module

    exact = by_hand(FUNCTIONS[name], epochs=1)
    assert relative_error(train(BATCHES, 4).parameters(), exact.parameters()) <= 1e-2  # float16 has 11 bits
    assert relative_error(train(WINDOWS, 1).parameters(), exact.parameters()) <= 1e-2


def test_bfloat16_autocast_and_wide_sums_take_the_step_of_the_full_batch() -> None:
    module = Regression(FUNCTIONS["RMSE"]).float()
    data = [[tensor.float() for tensor in batch] for batch in BATCHES]
    trainer("accum", precision="bf16-mixed", callbacks=[GradientAccumulation(4)]).fit(module, loader(data))
    assert relative_error(module.parameters(), by_hand(FUNCTIONS["RMSE"], epochs=1).parameters()) <= 2e-2  # 8 bits
    module = Regression(FUNCTIONS["RMSE"]).float()
    callbacks = [GradientAccumulation(4, accumulate_dtype=torch.float64)]
    trainer("accum", callbacks=callbacks).fit(module, loader(data))
    assert relative_error(module.parameters(), by_hand(FUNCTIONS["RMSE"], epochs=1).parameters()) <= 1e-6  # float32


class Manual(Regression):
    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(self.net(batch[0]), batch[1]))
        self.optimizers().step()


def test_manual_optimization_is_exact() -> None:
    module = Manual(FUNCTIONS["RMSE"])
    trainer("accum", max_epochs=2, callbacks=[GradientAccumulation(4)]).fit(module, loader(BATCHES))
    assert relative_error(module.parameters(), by_hand(FUNCTIONS["RMSE"]).parameters()) <= EXACT


# --- what one sees ---------------------------------------------------------------------------------------------------------


class Logs(Regression):
    """Logs its loss, and another function of a mean, and returns them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net(batch[0])
        loss = self.loss(outputs, batch[1])
        self.log("loss", loss)
        self.log("detached", loss.detach())
        self.log("other", 2 - F.l1_loss(outputs, batch[1]).log())
        return {"loss": loss}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = {**self.trainer.callback_metrics, "output": outputs["loss"]}


@pytest.mark.parametrize("window", [1, 2])
def test_what_a_split_batch_logs_and_returns_is_that_of_the_batch(window: int) -> None:
    module, whole = Logs(FUNCTIONS["three times RMSE"]), Logs(FUNCTIONS["three times RMSE"])
    for logs, micro_batch in ((module, 5), (whole, None)):
        trainer("accum", callbacks=[GradientAccumulation(window, micro_batch=micro_batch)]).fit(logs, loader(WINDOWS[:1]))
    names = ("loss", "detached", "other", "output")  # Lightning keeps what is logged in float32
    assert [float(module.seen[name]) for name in names] == pytest.approx([float(whole.seen[name]) for name in names], rel=1e-6)


def test_the_start_line_names_the_function(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        trainer("accum", callbacks=[GradientAccumulation(4)]).fit(Regression(FUNCTIONS["RMSE with eps"]), loader(BATCHES))
    assert "weight: sqrt(mean squared error), each micro-batch weighed by" in caplog.text
    assert "checked: adds up to" in caplog.text


@pytest.mark.parametrize("policy", [{"window": 4}, {"micro_batch": 2}], ids=["window", "split"])
def test_verify_calls_it_exact(policy: dict[str, int]) -> None:
    report = verify(Regression(FUNCTIONS["one minus RMSE"]), loader(WINDOWS if "micro_batch" in policy else BATCHES), **policy)
    assert report, report
    assert not report.breaks


# --- zeros and infinities --------------------------------------------------------------------------------------------------


def right(batch: Sequence[Tensor]) -> list[Tensor]:
    """A batch that the module has no error on, before its first step."""
    with torch.no_grad():
        return [batch[0], Regression(FUNCTIONS["RMSE"]).net(batch[0])]


def test_a_micro_batch_without_error_has_a_gradient_as_in_the_full_batch() -> None:
    batches = [BATCHES[0], right(BATCHES[1]), BATCHES[2], right(BATCHES[3])]
    module = Regression(FUNCTIONS["RMSE"])
    trainer("accum", callbacks=[GradientAccumulation(4, on_nonfinite="raise")]).fit(module, loader(batches))
    expected = train_by_hand(Regression(FUNCTIONS["RMSE"]), [joined(batches)], 1)
    assert relative_error(module.parameters(), expected.parameters()) <= EXACT


class WithoutRounding(Regression):
    """Whose output for large inputs is a sum of few binary digits: the same in batches of any size, whatever kernel runs them."""

    def __init__(self) -> None:
        super().__init__(FUNCTIONS["RMSE"])
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(1024).round_().div_(1024)


def test_a_window_without_error_has_no_gradient_as_its_full_batch_has_none() -> None:
    large = [batch[0] * 1e6 for batch in BATCHES[:4]]
    with torch.no_grad():
        batches = [[inputs, WithoutRounding().net(inputs)] for inputs in large]
    module = WithoutRounding()
    trainer("accum", callbacks=[GradientAccumulation(4, check=False)]).fit(module, loader(batches))
    by_itself = train_by_hand(WithoutRounding(), [joined(batches)], 1)
    assert all(parameter.isnan().all() for parameter in (*module.parameters(), *by_itself.parameters()))
    with pytest.raises(FloatingPointError, match=r"sqrt\(mean squared error\).* has the slope inf"):
        trainer("accum", callbacks=[GradientAccumulation(4, on_nonfinite="raise", check=False)]).fit(
            WithoutRounding(), loader(batches)
        )
    module = WithoutRounding()
    run = trainer("accum", callbacks=[GradientAccumulation(4, on_nonfinite="skip", check=False)])
    run.fit(module, loader([*batches, *BATCHES[4:8]]))
    assert relative_error(module.parameters(), train_by_hand(WithoutRounding(), WINDOWS[1:2], 1).parameters()) <= EXACT
    assert run.callback_metrics["window/total_skipped_micro_batches"] == 4


# --- explicit weights, and what is refused ---------------------------------------------------------------------------------


def test_an_explicit_weight_counts_the_mean() -> None:
    module = Regression(FUNCTIONS["RMSE"])
    trainer("accum", max_epochs=2, callbacks=[GradientAccumulation(4, weight=SampleCount())]).fit(module, loader(BATCHES))
    assert relative_error(module.parameters(), by_hand(FUNCTIONS["RMSE"]).parameters()) <= EXACT


def test_equal_weights_are_the_mean_of_the_micro_batches_losses() -> None:
    module, mean = Regression(FUNCTIONS["RMSE"]), Regression(FUNCTIONS["RMSE"])
    trainer("accum", callbacks=[GradientAccumulation(4, weight="equal")]).fit(module, loader(BATCHES[:4]))
    train_by_hand(mean, [BATCHES[:4]], 1, lambda four: sum(mean.training_step(batch, 0) for batch in four) / 4)
    assert relative_error(module.parameters(), mean.parameters()) <= EXACT


REFUSED: dict[str, Loss] = {
    "a mean of the RMSE of columns": lambda o, y: (o - y).square().mean(0).sqrt().mean(),
    "a mean of two RMSE": lambda o, y: torch.stack([F.mse_loss(o[:, i], y[:, i]).sqrt() for i in range(2)]).mean(),
    "a sum of two functions": lambda o, y: F.mse_loss(o, y).sqrt() + F.l1_loss(o, y).log(),
    "a function of two counts": lambda o, y: torch.sqrt(F.mse_loss(o, y) + masked((o - y).square(), y)),
    "a constant inside": lambda o, y: torch.log(1 + F.mse_loss(o, y).sqrt()),
    "a product of a mean with itself": lambda o, y: (m := F.mse_loss(o, y)) * m,
    "a focal loss of a mean": lambda o, y: (1 - torch.exp(-(m := F.mse_loss(o, y)))) ** 2 * m,
    "a quotient of means": lambda o, y: F.mse_loss(o, y) / F.l1_loss(o, y),
}


@pytest.mark.some_cases(8)
@pytest.mark.parametrize("weight", ["auto", SampleCount()], ids=["auto", "samples"])
@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_with_the_word_that_no_weight_helps(name: str, weight: Any) -> None:
    run = trainer("accum", callbacks=[GradientAccumulation(4, weight=weight, check=False)])
    with pytest.raises(UnreadableLossError, match='No weight makes micro-batches.*micro_batch="offload".*weight="equal"') as raised:
        run.fit(Regression(REFUSED[name]), loader(BATCHES))
    assert "SampleCount" not in str(raised.value)


def test_a_function_beside_a_mean_is_an_error_of_the_check_or_a_warning() -> None:
    both: Loss = lambda o, y: F.mse_loss(o, y).sqrt() + F.l1_loss(o, y)  # noqa: E731
    with pytest.warns(UserWarning, match="terms that are no plain mean"):
        trainer("accum", callbacks=[GradientAccumulation(4)]).fit(Regression(both), loader(BATCHES))
    with pytest.raises(UnreadableLossError, match="No weight makes micro-batches"):
        trainer("accum", callbacks=[GradientAccumulation(4, weight=SampleCount())]).fit(Regression(both), loader(BATCHES))


def test_weights_for_terms_inside_a_function_are_refused() -> None:
    run = trainer("accum", callbacks=[GradientAccumulation(1, micro_batch=3, weight=[SampleCount(), SampleCount()])])
    with pytest.raises(UnreadableLossError, match="a sum of terms, each with its own weight"):
        run.fit(Regression(FUNCTIONS["of two means over one count"]), loader(WINDOWS))


class Changes(Regression):
    """Another function in every second batch, or on every second rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mean = F.mse_loss(self.net(batch[0]), batch[1])
        return mean.sqrt() if (self.trainer.global_rank if self.by_rank else batch_idx) % 2 else self.loss(mean, mean)


@pytest.mark.parametrize(
    ("other", "words"), [(lambda m, _: m, "a mean"), (lambda m, _: m.log(), r"log\(mean\)")], ids=["mean", "log"]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_window_of_two_functions_is_an_error_that_names_both(ranks: int, other: Loss, words: str) -> None:
    module = Changes(other, by_rank=OF_RANKS if ranks == 2 else None)
    run = trainer(ddp() if ranks == 2 else "accum", devices=ranks, callbacks=[GradientAccumulation(2, check=False)])
    found = rf"is sqrt\(mean\) in a micro-batch, and was {words}" if ranks == 1 else "another function of its mean on one rank"
    with pytest.raises(Exception, match=found):
        run.fit(module, None if ranks == 2 else loader(BATCHES))


def test_functions_may_change_from_window_to_window() -> None:
    class Annealed(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (1 + self.global_step) * super().training_step(batch, batch_idx)

    module = Annealed(FUNCTIONS["RMSE"])
    trainer("accum", callbacks=[GradientAccumulation(4)]).fit(module, loader(BATCHES))
    steps = iter(range(3))
    expected = Regression(FUNCTIONS["RMSE"])
    train_by_hand(expected, WINDOWS, 1, lambda batch: (1 + next(steps)) * expected.training_step(batch, 0))
    assert relative_error(module.parameters(), expected.parameters()) <= EXACT


def test_a_mean_over_rows_of_their_own_functions_is_no_function_of_a_mean() -> None:
    """Also where a micro-batch is a single row, and both look alike."""
    rows: Loss = lambda o, y: (o - y).square().mean(1).sqrt().squeeze().mean()  # noqa: E731
    module = Regression(rows)
    trainer("accum", max_epochs=2, callbacks=[GradientAccumulation(1, micro_batch=1)]).fit(module, loader(WINDOWS))
    assert relative_error(module.parameters(), by_hand(rows).parameters()) <= EXACT
    looped: Loss = lambda o, y: sum(F.mse_loss(a, b).sqrt() for a, b in zip(o, y, strict=True)) / len(o)  # noqa: E731
    with pytest.raises(DoesNotAddUpError):
        trainer("accum", callbacks=[GradientAccumulation(1, micro_batch=1)]).fit(Regression(looped), loader(WINDOWS))


def test_the_noise_scale_is_that_of_the_loss() -> None:
    """Of 2 * m, as a function of m or as its multiple: with a clamp that does nothing, or without it."""
    shown = []
    for loss in (lambda o, y: 2 * F.mse_loss(o, y), lambda o, y: 2 * F.mse_loss(o, y).clamp(min=0.0)):
        run = trainer("accum", callbacks=[GradientAccumulation(4), GradientNoiseScale()])
        run.fit(Regression(loss), loader(BATCHES))
        shown.append({name: float(value) for name, value in run.callback_metrics.items() if "noise" in name})
    assert shown[0]
    assert shown[1] == pytest.approx(shown[0], rel=1e-9)
