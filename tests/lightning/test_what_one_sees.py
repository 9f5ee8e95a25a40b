"""Logged numbers, progress bars, and the line at the start."""

import inspect
import logging
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Dealt
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from losses_of_terms import LOSSES, OfTerms, rows
from manual_modules import GAN, draw
from support import Language, Manually, Scalar, csv_logger, fit, language_loss, logged, pad, sentences, trainer, warned, x
from torch import Tensor, nn
from torch.utils.data import default_collate
from torchmetrics.aggregation import RunningMean

import lightning_accum
from lightning_accum import AccumulationWarning, GradientAccumulation, GradientNoiseScale, SampleCount, TokenCount, Tokens

ROWS = sentences(32)
MICRO = [pad(ROWS[i : i + 2]) for i in range(0, len(ROWS), 2)]
FULL = [pad(ROWS[i : i + 8]) for i in range(0, len(ROWS), 8)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_logged_numbers_are_those_of_the_full_batch(ranks: int) -> None:
    options = {"ranks": ranks, "precision": "64-true", "gradient_clip_val": 0.5, **csv_logger()}
    data = Dealt([MICRO[rank::ranks] for rank in range(ranks)], lambda batch: batch)
    fit(Language(), data, GradientAccumulation(4 // ranks), **options)
    rows = [row for row in logged() if "window/loss" in row]
    module, total = Language("sgd"), 0
    optimizer = module.configure_optimizers()
    for step, (row, batch) in enumerate(zip(rows, FULL, strict=True)):
        optimizer.zero_grad()
        loss = language_loss(module.net(batch["input_ids"]), batch["labels"])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        weight = (batch["labels"][:, 1:] != -100).sum().item()
        total += weight
        assert row["window/loss"] == pytest.approx(loss.item(), rel=1e-12)
        assert row["window/grad_norm"] == pytest.approx(norm.item(), rel=1e-12)
        names = ("window/weight", "window/total_weight", "window/micro_batches", "window/optimizer_steps", "step")
        assert [row[name] for name in names] == [weight, total, 4, step + 1, step]
    assert all(row["window/weight_per_second"] > 0 for row in rows[2:])


class LogsLoss(Scalar):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("own", 7.0)
        return loss


LogsManually = type("LogsManually", (Manually, LogsLoss), {})


@pytest.mark.parametrize(
    ("kind", "policy", "joined"),
    [
        (LogsLoss, {"window": 1}, 8),
        (LogsLoss, {"window": 2}, 4),
        (LogsLoss, {"micro_batch": 1}, 8),
        (LogsLoss, {"window": Tokens(6)}, 4),  # a loader batch has 4
        (Scalar, {"window": 2}, 0),
        (LogsManually, {"window": 2}, 4),
    ],
)
def test_rows_of_a_window_have_the_epoch_and_join_the_modules_own_of_the_same_step(kind: Any, policy: Any, joined: int) -> None:
    run = fit(kind([x(1, 2, 3, 4)] * 4), None, GradientAccumulation(**policy), max_epochs=2, **csv_logger())
    rows = [row for row in logged() if "window/loss_epoch" not in row]
    windows, own = ([row for row in rows if name in row] for name in ("window/loss", "own"))
    assert len(windows) == run.callback_metrics["window/optimizer_steps"]
    assert [row["window/optimizer_steps"] for row in windows] == list(range(1, len(windows) + 1))
    assert sum("window/loss" in row for row in own) == joined
    assert all(row["epoch"] in (0, 1) for row in rows)
    assert [row["step"] for row in windows] == list(range(len(windows)))


@pytest.mark.parametrize(
    ("kind", "size", "micro_batch"),
    [*(("automatic", *sizes) for sizes in [(1, 1), (1, 3), (2, None), (2, 2)]), ("manual", 2, None)],
)
def test_metrics_of_a_sum_do_not_depend_on_how_its_batch_is_split(kind: str, size: int, micro_batch: int | None) -> None:
    """Each window counts once in the mean of the epoch, as each batch does in plain Lightning with one `batch_size` for all."""

    class Summed(Scalar):
        def loss(self, x: Tensor) -> Tensor:
            return ((1 + self.w) * x).sum()

    per_batch = [6.0, 4.0, 5.0, 30.0]
    sums = [sum(per_batch[begin : begin + size]) for begin in range(0, 4, size)]
    batches = [x(1, 2, 3), x(4), x(5), x(6, 7, 8, 9)]
    module = type("Module", (Manually, Summed) if kind == "manual" else (Summed,), {})(batches, lr=0.0)
    run = fit(module, None, GradientAccumulation(size, micro_batch=micro_batch))
    found = {name.removeprefix("window/"): value.item() for name, value in run.callback_metrics.items()}
    assert (found["loss"], found["weight"], found["total_weight"]) == (sums[-1], 1, len(sums))
    assert found["loss_epoch"] == pytest.approx(sum(sums) / len(sums), rel=1e-6)  # Lightning keeps what is logged in float32


def test_metrics_are_those_of_the_last_window_whenever_one_looks() -> None:
    seen: list[Any] = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            metrics = (trainer.callback_metrics, trainer.logged_metrics)[batch_idx % 2]
            names = ("window/weight", "window/optimizer_steps", "window/total_weight")
            seen.append(tuple(metrics[name].item() for name in names if name in metrics))
            assert all(value.dtype == torch.float64 for value in metrics.values())

    fit(Scalar([x(2), x(4, 4, 4), x(1), x(3)]), None, GradientAccumulation(2), Looks())
    assert seen == [(), (4, 1, 4), (4, 1, 4), (2, 2, 6)]


def test_log_false_logs_nothing() -> None:
    run = fit(Language(), MICRO, GradientAccumulation(4, log=False))
    assert not [name for name in run.callback_metrics if name.startswith("window/")]


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
@pytest.mark.parametrize("has_own", [False, True])
def test_progress_bars_show_the_window_loss_unless_the_module_has_a_metric_of_that_name(bar: Any, has_own: bool) -> None:
    class Looks(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if has_own:
                self.log("w_loss", 7.0, prog_bar=True)
            return super().training_step(batch, batch_idx)

        def on_train_end(self) -> None:
            self.shown = self.trainer.progress_bar_callback.get_metrics(self.trainer, self)

    module = Looks()
    run = fit(module, MICRO, GradientAccumulation(4), bar(), precision="64-true", enable_progress_bar=True)
    assert module.shown["w_loss"] == (7.0 if has_own else run.callback_metrics["window/loss"].item())
    assert module.shown["w_steps"] == "4"


class Classifies(Scalar):
    def loss(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(torch.stack([self.w * x, -self.w * x], 1), torch.zeros(len(x), dtype=torch.long))


def of_rows(batch: Any) -> int:
    return len(batch)


DATA = {
    Language: MICRO,
    Classifies: [x(1, 2, 3)] * 4,
    OfTerms: [default_collate(rows(size, seed)) for seed, size in enumerate((3, 1, 5, 2))],
    GAN: [default_collate(own) for own in draw(GAN)],
}


@pytest.mark.parametrize(
    ("kind", "policy", "words"),
    [
        (Language, {"window": 4}, ("4 loader batches", "8 samples", "exact, checked to")),
        (Language, {"window": 4, "check": False}, ("8 samples",)),
        (Language, {"window": Tokens(4)}, ("4 tokens",)),
        (Language, {"window": Tokens(4), "micro_batch": 1}, ("4 tokens",)),
        (Language, {"window": Tokens(4), "weight": TokenCount()}, ("4 tokens", "TokenCount")),
        (Classifies, {"window": Tokens(4)}, ("4 samples",)),
        (Classifies, {"window": Tokens(4), "weight": SampleCount()}, ("4 samples", "SampleCount")),
        (Classifies, {"window": Tokens(4), "weight": "equal"}, ("4 micro-batches", "not checked")),
        (Classifies, {"window": Tokens(4), "weight": of_rows}, ("of_rows",)),
        (Classifies, {"micro_batch": 2}, ("3 samples", "micro-batches of 2")),
        (Classifies, {"micro_batch": Tokens(8), "split": lambda b, n: [b]}, ("micro-batches of up to 8",)),
        (Classifies, {"micro_batch": "auto"}, ("micro-batches", "memory")),
        (partial(OfTerms, LOSSES["tokens and samples"].of), {"window": 4}, ("cross entropy", "mean squared error")),
        (partial(OfTerms, LOSSES["samples and tokens"].of), {"window": 4}, ("mean squared error", "cross entropy")),
        (GAN, {"window": 3}, ("3 loader batches", "window/loss ", "manual_modules.py", "window/loss_2", "window/loss_3")),
    ],
)
def test_one_line_says_what_a_window_is_in_what_unit(caplog: Any, kind: Any, policy: Any, words: tuple[str, ...]) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"), warned():
        fit(kind(), DATA[getattr(kind, "func", kind)], GradientAccumulation(**policy), precision="64-true")
    (line,) = [record.message for record in caplog.records if record.message.startswith("accumulating ")]
    assert ("checked" in line) == ("check" not in policy)
    assert re.search(".*".join(map(re.escape, words)), " ".join(line.split())), line
    assert max(map(len, line.splitlines())) <= 120


@pytest.mark.parametrize(
    ("tokens", "tail", "is_told_of"), [(13, "step", True), (13, "drop", True), (13, "carry", False), (12, "step", False)]
)
@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_window_of_tokens_that_no_epoch_can_fill_is_told_of(tokens: int, tail: Any, is_told_of: bool, micro_batch: Any) -> None:
    with warned() as told:
        fit(Classifies(DATA[Classifies]), None, GradientAccumulation(Tokens(tokens), tail=tail, micro_batch=micro_batch))
    assert [message for message in told if 'tail="carry"' in message] == told
    assert bool(told) == is_told_of


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


class Shows(Scalar):
    def __init__(self, batches: Any) -> None:
        super().__init__(batches)
        self.metric = RunningMean(window=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.metric(batch.mean())
        self.log("metric", self.metric)
        return super().training_step(batch, batch_idx)


class Alternates(Scalar):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.manual_backward(self.loss(batch))  # the line


# what warns, and whose line it is
SOURCES: dict[str, tuple[type[Scalar], list[Any], list[Callback], Any]] = {
    "empty window": (Scalar, [x(1), x(2)] * 2, [GradientAccumulation(2, weight=lambda _: 0.0, check=False)], None),
    "non-finite": (Scalar, [x(torch.inf), x(1)], [GradientAccumulation(1, on_nonfinite="skip")], None),
    "metric": (Shows, [x(1, 2), x(3, 4)], [GradientAccumulation(micro_batch=1)], None),
    "noise": (Scalar, [x(1), x(2)], [GradientAccumulation(1), GradientNoiseScale()], None),
    "manual": (Alternates, [x(1), x(2)], [GradientAccumulation(2, check=False)], Alternates.training_step),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_warning_has_the_category_of_the_package_and_points_at_the_users_line(name: str) -> None:
    kind, batches, callbacks, of_user = SOURCES[name]

    def train() -> None:
        trainer("accum", callbacks=callbacks).fit(kind(batches))  # the line

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    own = [warning for warning in caught if issubclass(warning.category, AccumulationWarning)]
    assert {(warning.filename, warning.lineno) for warning in own} == {(__file__, line_of(of_user or train, "# the line"))}
    assert len({str(warning.message) for warning in own}) == len(own)  # each comes once
    package = Path(lightning_accum.__file__).parent
    assert not [w for w in caught if w not in own and (w.filename == __file__ or package in Path(w.filename).parents)]
