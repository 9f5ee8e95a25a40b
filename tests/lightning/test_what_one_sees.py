"""Logged numbers, progress bars, and the line at the start."""

from __future__ import annotations

import csv
import logging
import math
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from support import Language, Scalar, ddp, language_loss, loader, pad, sentences, train_by_hand, trainer, x
from torch import nn

from lightning_accum import GradientAccumulation, SampleCount, TokenCount, Tokens

ROWS = sentences(32)
MICRO = [pad(ROWS[i : i + 2]) for i in range(0, len(ROWS), 2)]
FULL = [pad(ROWS[i : i + 8]) for i in range(0, len(ROWS), 8)]


class Ranked(Language):
    def __init__(self, ranks: int = 1) -> None:
        super().__init__("sgd")
        self.ranks = ranks

    def train_dataloader(self):
        return loader(MICRO[self.trainer.global_rank :: self.ranks])


def by_hand() -> list[dict[str, float]]:
    """What the full batches print: loss, tokens and gradient norm."""
    module, rows = Language("sgd"), []
    optimizer = module.configure_optimizers()
    for batch in FULL:
        optimizer.zero_grad()
        loss = language_loss(module.net(batch["input_ids"]), batch["labels"])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        rows.append({"loss": loss.item(), "weight": (batch["labels"][:, 1:] != -100).sum().item(), "grad_norm": norm.item()})
        optimizer.step()
    return rows


def logged(directory: Path) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get("window/loss")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_logged_numbers_are_those_of_the_full_batch(tmp_path, ranks: int) -> None:
    run = trainer(
        "accum" if ranks == 1 else ddp(),
        devices=ranks,
        callbacks=[GradientAccumulation(4 // ranks)],
        precision="64-true",
        gradient_clip_val=0.5,
        logger=CSVLogger(tmp_path, name="run", version=0),
        log_every_n_steps=1,
    )
    run.fit(Ranked(ranks))
    rows, expected = logged(tmp_path / "run" / "version_0"), by_hand()
    assert len(rows) == len(expected) == 4
    total = 0.0
    for step, (row, full) in enumerate(zip(rows, expected, strict=True)):
        total += full["weight"]
        assert float(row["window/loss"]) == pytest.approx(full["loss"], rel=1e-12)
        assert float(row["window/grad_norm"]) == pytest.approx(full["grad_norm"], rel=1e-12)
        assert float(row["window/weight"]) == full["weight"]
        assert float(row["window/total_weight"]) == total
        assert float(row["window/micro_batches"]) == 4
        assert float(row["window/optimizer_steps"]) == step + 1
        assert int(row["step"]) == step
    assert all(float(row["window/weight_per_second"]) > 0 for row in rows[2:])


class LogsLoss(Scalar):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("own", 7.0)
        return loss


class LogsManually(LogsLoss):
    automatic_optimization = False

    def loss(self, x):
        loss = super().loss(x)
        self.manual_backward(loss)
        self.optimizers().step()
        return loss


@pytest.mark.parametrize(
    ("kind", "policy", "joined"),
    [
        (LogsLoss, {"window": 1}, 8),
        (LogsLoss, {"window": 2}, 4),
        (LogsLoss, {"micro_batch": 1}, 8),
        (LogsLoss, {"window": Tokens(6)}, 4),  # a loader batch has 4
        (LogsLoss, {"window": Tokens(2), "micro_batch": 1}, 8),  # two in each loader batch, and the second joins its row
        (Scalar, {"window": 2}, 0),
        (LogsManually, {"window": 2}, 4),
    ],
)
def test_rows_of_a_window_have_the_epoch_and_join_the_modules_own_of_the_same_step(tmp_path, kind, policy, joined: int) -> None:
    logger = CSVLogger(tmp_path, name="run", version=0)
    run = trainer(callbacks=[GradientAccumulation(**policy)], logger=logger, log_every_n_steps=1, max_epochs=2)
    run.fit(kind([x(1, 2, 3, 4)] * 4))
    with (tmp_path / "run" / "version_0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if not row["window/loss_epoch"]]
    windows, own = [row for row in rows if row["window/loss"]], [row for row in rows if row.get("own")]
    assert len(windows) == run.callback_metrics["window/optimizer_steps"]
    assert [float(row["window/optimizer_steps"]) for row in windows] == list(range(1, len(windows) + 1))
    assert sum(bool(row["window/loss"]) for row in own) == joined
    assert all(row["epoch"] in ("0", "1") for row in rows)
    assert [int(row["step"]) for row in windows] == list(range(len(windows)))


@pytest.mark.parametrize("weights", [[1e-9] * 4, [0.3] * 4, [0.1] * 4, [2.0, 0.0, 1.0, 0.0], [0.0] * 4])
@pytest.mark.parametrize("windows", [1, 2])
def test_windows_of_little_or_no_weight_are_logged(tmp_path, weights: list[float], windows: int) -> None:
    module, left = Scalar([x(1), x(2), x(3), x(4)], lr=0.0), list(weights)
    count = GradientAccumulation(windows, weight=lambda batch: left.pop(0), check=False)
    trainer(callbacks=[count], logger=CSVLogger(tmp_path, name="run", version=0), log_every_n_steps=1).fit(module)
    assert not left
    if any(weights):
        rows = logged(tmp_path / "run" / "version_0")
        rates = [float(row["window/weight_per_second"]) for row in rows if row["window/weight_per_second"]]
        assert rates
        assert all((rate > 0) == (float(row["window/weight"]) > 0) for rate, row in zip(rates, rows[1:], strict=True))


def test_class_weights_that_add_up_to_less_than_a_half_train_as_without_accumulation() -> None:
    class Classes(Scalar):
        def loss(self, x):
            logits = torch.stack([self.w * x, -self.w * x], 1)
            target = torch.zeros(len(x), dtype=torch.long)
            return nn.functional.cross_entropy(logits, target, torch.tensor([0.01, 0.02], dtype=logits.dtype))

    module, plain = Classes([x(1, 2), x(3), x(4)]), Classes([x(1, 2), x(3), x(4)])
    trainer(callbacks=[GradientAccumulation(1)]).fit(module)
    trainer("auto").fit(plain)
    assert module.w.item() == pytest.approx(plain.w.item(), rel=1e-12)


def test_epoch_loss_weighs_each_window() -> None:
    module = Scalar([x(1), x(3), x(5, 6, 7, 8)], lr=0.0)
    module.loss = lambda x: ((1 + module.w) * x).mean()
    run = trainer(callbacks=[GradientAccumulation(2)])
    run.fit(module)
    assert run.callback_metrics["window/loss_epoch"].item() == pytest.approx(30 / 6)


@pytest.mark.parametrize(
    ("kind", "size", "micro_batch"),
    [*(("automatic", *sizes) for sizes in [(1, 1), (1, 3), (2, None), (2, 2)]), ("manual", 2, None)],
)
def test_metrics_of_a_sum_do_not_depend_on_how_its_batch_is_split(kind: str, size: int, micro_batch: int | None) -> None:
    """Each window counts once in the mean of the epoch, as each batch does in plain Lightning with one `batch_size` for all."""

    class Summed(Scalar):
        automatic_optimization = kind != "manual"

        def loss(self, x):
            loss = ((1 + self.w) * x).sum()
            if kind == "manual":
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

    batches = [x(1, 2, 3), x(4), x(5), x(6, 7, 8, 9)]
    per_batch = [6.0, 4.0, 5.0, 30.0]
    sums = [sum(per_batch[begin : begin + size]) for begin in range(0, 4, size)]
    run = trainer(callbacks=[GradientAccumulation(size, micro_batch=micro_batch)])
    run.fit(Summed(batches, lr=0.0))
    found = {name.removeprefix("window/"): value.item() for name, value in run.callback_metrics.items()}
    assert found["loss"] == sums[-1]
    assert found["weight"] == 1
    assert found["total_weight"] == len(sums)
    assert found["loss_epoch"] == pytest.approx(sum(sums) / len(sums), rel=1e-6)  # Lightning keeps what is logged in float32


def test_window_metrics_can_be_monitored(tmp_path) -> None:
    module = Ranked()
    trainer(callbacks=[GradientAccumulation(4)], precision="64-true", logger=TensorBoardLogger(tmp_path)).fit(module)
    assert module.trainer.callback_metrics["window/loss"] > 0


def test_metrics_are_those_of_the_last_window_whenever_one_looks() -> None:
    module, seen = Scalar([x(2), x(4, 4, 4), x(1), x(3)]), []

    class Looks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            metrics = (trainer.callback_metrics, trainer.logged_metrics)[batch_idx % 2]
            seen.append({name: value.item() for name, value in metrics.items() if name != "window/weight_per_second"})
            assert all(value.dtype == torch.float64 for value in metrics.values())

    trainer(callbacks=[GradientAccumulation(2), Looks()]).fit(module)
    assert seen[0] == {}
    assert [(now["window/weight"], now["window/optimizer_steps"], now["window/total_weight"]) for now in seen[1:]] == [
        (4, 1, 4),
        (4, 1, 4),
        (2, 2, 6),
    ]


def test_metrics_of_a_training_do_not_come_back_in_a_validation() -> None:
    class Validates(Scalar):
        def validation_step(self, batch, batch_idx):
            self.log("validated", batch.sum())

    module = Validates([x(2), x(4)])
    run = trainer(callbacks=[GradientAccumulation(2)])
    run.fit(module)
    run.validate(module, loader([x(1)]), verbose=False)
    assert set(run.callback_metrics) == {"validated"}
    run.fit_loop.max_epochs = 2
    run.fit(module)
    assert run.callback_metrics["window/optimizer_steps"].item() == 2


def test_log_false_logs_nothing() -> None:
    run = trainer(callbacks=[GradientAccumulation(4, log=False)], precision="64-true")
    run.fit(Ranked())
    assert not [name for name in run.callback_metrics if name.startswith("window/")]


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars_show_the_window_loss_and_whole_steps(bar) -> None:
    shown = []

    class Looks(Ranked):
        def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
            progress = self.trainer.progress_bar_callback
            shown.append(progress.get_metrics(self.trainer, self))

    callback = bar()
    run = trainer(callbacks=[GradientAccumulation(4), callback], precision="64-true", enable_progress_bar=True)
    run.fit(Looks())
    assert shown[-1]["w_loss"] == run.callback_metrics["window/loss"].item()
    assert f"{shown[-1]['w_steps']:.3f}" == "4"
    assert "get_metrics" not in vars(callback)


def test_the_modules_own_metric_keeps_its_name_in_the_progress_bar() -> None:
    class Own(Scalar):
        def training_step(self, batch, batch_idx):
            self.log("w_loss", 7.0, prog_bar=True)
            return super().training_step(batch, batch_idx)

        def on_train_end(self) -> None:
            self.shown = self.trainer.progress_bar_callback.get_metrics(self.trainer, self)

    module = Own([x(1), x(2)])
    trainer(callbacks=[GradientAccumulation(2), TQDMProgressBar()], enable_progress_bar=True).fit(module)
    assert module.shown["w_loss"] == 7.0


def start_lines(caplog, module, *callbacks, **kwargs) -> list[str]:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        trainer(callbacks=list(callbacks), **kwargs).fit(module)
    return [record.message for record in caplog.records if record.message.startswith("GradientAccumulation: ")]


def test_one_line_says_what_was_understood(caplog) -> None:
    line, *later = start_lines(caplog, Ranked(), GradientAccumulation(4), precision="64-true", max_epochs=2)
    assert "a window is 4 loader batches, 8 samples with loader batches like the first (2)" in line
    assert "weight: cross entropy, each micro-batch weighed by what its loss was divided by" in line
    assert all(line.startswith("GradientAccumulation: checked: adds up to") for line in later)


class Classifies(Scalar):
    def loss(self, x):
        return nn.functional.cross_entropy(torch.stack([self.w * x, -self.w * x], 1), torch.zeros(len(x), dtype=torch.long))


class Regresses(Scalar):
    def loss(self, x):
        return nn.functional.mse_loss(self.w * torch.stack([x, x], 1), torch.zeros(len(x), 2, dtype=x.dtype))


def of_rows(batch) -> int:
    return len(batch)


@pytest.mark.parametrize(
    ("module", "options", "unit"),
    [
        (lambda: Ranked(), {}, "tokens"),
        (lambda: Ranked(), {"micro_batch": 1}, "tokens"),
        (lambda: Ranked(), {"weight": TokenCount()}, "tokens"),
        (lambda: Classifies([x(1, 2, 3)] * 4), {}, "samples (the loss has no tokens)"),
        (lambda: Classifies([x(1, 2, 3)] * 4), {"micro_batch": 2}, "samples (the loss has no tokens)"),
        (lambda: Classifies([x(1, 2, 3)] * 4), {"weight": SampleCount()}, "samples"),
        (lambda: Classifies([x(1, 2, 3)] * 4), {"weight": "equal"}, 'micro-batches (weight="equal")'),
        (lambda: Classifies([x(1, 2, 3)] * 4), {"weight": of_rows}, "of weight=of_rows"),
        (lambda: Regresses([x(1, 2, 3)] * 4), {}, "of what the loss is divided by"),
    ],
)
def test_line_says_what_a_window_of_tokens_counts(caplog, module, options: dict, unit: str) -> None:
    line, *_ = start_lines(caplog, module(), GradientAccumulation(Tokens(4), **options))
    assert f"a window is as many loader batches as come to 4 {unit} over all ranks;" in line


@pytest.mark.parametrize(
    ("tokens", "tail", "is_warned_of"), [(13, "step", True), (13, "drop", True), (13, "carry", False), (12, "step", False)]
)
@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_window_of_tokens_that_no_epoch_can_fill_is_warned_of(tokens: int, tail: str, is_warned_of: bool, micro_batch) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        policy = GradientAccumulation(Tokens(tokens), tail=tail, micro_batch=micro_batch)
        trainer(callbacks=[policy]).fit(Classifies([x(1, 2, 3)] * 4))
    told = [str(warning.message) for warning in caught if "is never full" in str(warning.message)]
    assert bool(told) == is_warned_of
    assert all("an epoch has about 12 of them" in message and 'tail="carry"' in message for message in told)


def test_line_names_an_explicit_weight(caplog) -> None:
    (line,) = start_lines(caplog, Scalar([x(1), x(2)]), GradientAccumulation(2, weight=SampleCount()))
    assert "weight: SampleCount(key=None)" in line


def test_line_names_terms_without_a_weight_of_their_own(caplog) -> None:
    class Routes(Scalar):
        def loss(self, x):
            return (self.w * x).mean() + (self.w * x).mean(0).square().sqrt()

    (line,) = start_lines(caplog, Routes([x(1), x(2)]), GradientAccumulation(2))
    assert "the same weight for: SqrtBackward0" in line


def test_loss_of_a_window_ignores_the_nan_of_an_empty_micro_batch() -> None:
    empty = pad([torch.tensor([1]), torch.tensor([2])])  # no token has a next one
    module = Language("sgd")
    run = trainer(callbacks=[GradientAccumulation(2)], precision="64-true")
    run.fit(module, loader([MICRO[0], empty]))
    expected = train_by_hand(Language("sgd"), [MICRO[0]], 1)
    assert math.isfinite(run.callback_metrics["window/loss"].item())
    for p, q in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-12, atol=0)
