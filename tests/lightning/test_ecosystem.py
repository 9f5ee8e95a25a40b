"""Lightning's callbacks and tuners beside the strategies, each as without the package."""

from __future__ import annotations

import csv
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from support import Scalar, ddp, loader, trainer, x
from torch import nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation


class Small(pl.LightningModule):
    """Regression on equal micro-batches, where Lightning's own accumulation is right too and can be compared with."""

    def __init__(self, norm: bool = False, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Linear(4, 1)).double()
        self.lr = lr

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = F.mse_loss(self.net(inputs), targets)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx) -> None:
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "epoch"}]


def regression(batches: int = 8, rows: int = 4):
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(batches * rows, 3, generator=generator, dtype=torch.float64)
    targets = inputs.sum(1, keepdim=True) + 0.1 * torch.randn(batches * rows, 1, generator=generator, dtype=torch.float64)
    return loader(list(zip(inputs.split(rows), targets.split(rows), strict=True)))


def both(make_callbacks, module=Small, **kwargs):
    """The same fit with Lightning's accumulation and with the package's."""
    runs = []
    for strategy in ("auto", "accum"):
        trained = module()
        run = trainer(strategy, accumulate_grad_batches=2, callbacks=make_callbacks(), **{"max_epochs": 4, **kwargs})
        run.fit(trained, regression(), regression(2))
        runs.append((trained, run))
    return runs


def assert_same_parameters(runs) -> None:
    (a, _), (b, _) = runs
    for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True):
        assert torch.allclose(p.double(), q.double(), rtol=1e-12, atol=1e-13)


def test_early_stopping() -> None:
    runs = both(lambda: [EarlyStopping("val_loss", patience=0, min_delta=0.3, mode="min")], max_epochs=20)
    assert_same_parameters(runs)
    assert runs[0][1].current_epoch == runs[1][1].current_epoch < 20


def test_stochastic_weight_averaging() -> None:
    runs = both(lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=1)], max_epochs=5)
    assert_same_parameters(runs)


def test_stochastic_weight_averaging_with_batch_norm_passes_over_the_data_without_a_step() -> None:
    """Lightning's own last pass ends in an optimizer step on stale gradients; here there is none, as the callback intends."""

    class Watched(Small):
        def __init__(self) -> None:
            super().__init__(norm=True)
            self.steps: list[int] = []

        def on_before_optimizer_step(self, optimizer) -> None:
            self.steps.append(self.trainer.current_epoch)

    module = Watched()
    callbacks = [StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=1)]
    run = trainer(accumulate_grad_batches=2, callbacks=callbacks, max_epochs=4)
    run.fit(module, regression())
    assert [module.steps.count(epoch) for epoch in range(5)] == [4, 4, 4, 4, 0]
    averaged = callbacks[0]._average_model
    for p, q in zip(module.parameters(), averaged.parameters(), strict=True):
        assert torch.equal(p, q)
    assert run.accumulate_grad_batches == 2


def test_weight_averaging() -> None:
    runs = both(lambda: [EMAWeightAveraging(decay=0.9)])
    assert_same_parameters(runs)


def test_gradient_accumulation_scheduler_of_lightning() -> None:
    module = Scalar([x(1), x(2), x(3), x(4)])
    run = trainer(callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})], max_epochs=2)
    estimates = []
    module.on_train_start = lambda: estimates.append(run.estimated_stepping_batches)
    run.fit(module)
    assert module.gradients == [1, 2, 3, 4, 1.5, 3.5]
    assert estimates == [6]


def test_learning_rate_monitor_and_csv_logger_log_against_optimizer_steps(tmp_path) -> None:
    class Stepwise(Small):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]

    rows = {}
    for strategy in ("auto", "accum"):
        logger = CSVLogger(tmp_path, name=strategy)
        run = trainer(
            strategy, accumulate_grad_batches=2, callbacks=[LearningRateMonitor("step")], logger=logger, log_every_n_steps=1
        )
        run.fit(Stepwise(), regression())
        with (Path(logger.log_dir) / "metrics.csv").open() as file:
            rows[strategy] = list(csv.DictReader(file))
    rates = {strategy: [(row["step"], row["lr-SGD"]) for row in rows[strategy] if row["lr-SGD"]] for strategy in rows}
    assert rates["accum"] == rates["auto"]
    assert sorted({float(rate) for _, rate in rates["accum"]}, reverse=True) == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    ours = [row for row in rows["accum"] if row["window/loss"]]
    assert [row["step"] for row in ours] == ["0", "1", "2", "3"]
    assert [float(row["window/optimizer_steps"]) for row in ours] == [1, 2, 3, 4]


def test_model_checkpoint_every_n_train_steps(tmp_path) -> None:
    callbacks = [ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1), GradientAccumulation(2)]
    run = trainer(callbacks=callbacks, enable_checkpointing=True, max_epochs=2)
    run.fit(Small(), regression())
    names = sorted(path.stem.rpartition("step=")[2] for path in tmp_path.iterdir())
    assert names == ["2", "4", "6", "8"]


@pytest.mark.parametrize("weights_only", [True, False])
def test_checkpoint_resumes_to_the_bit_at_a_boundary(tmp_path, weights_only: bool) -> None:
    def callbacks(directory):
        return [GradientAccumulation(2), ModelCheckpoint(directory, every_n_train_steps=2, save_top_k=-1)]

    whole = Small()
    trainer(callbacks=callbacks(tmp_path), enable_checkpointing=True, max_epochs=2).fit(whole, regression())
    middle = next(path for path in tmp_path.iterdir() if path.stem.endswith("step=6"))
    resumed = Small()
    run = trainer(callbacks=[GradientAccumulation(2)], max_epochs=2)
    saved = torch.load(middle, weights_only=weights_only)
    assert saved["callbacks"]["GradientAccumulation"]["optimizer_steps"] == 6
    batches = regression().dataset.batches
    run.fit(resumed, Remaining(batches, 4), ckpt_path=middle)
    assert run.global_step == 8
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


class Remaining(torch.utils.data.DataLoader):
    """Yields what a first epoch has left after a number of batches, and whole epochs after that."""

    def __init__(self, batches, begin: int) -> None:
        super().__init__(loader(batches).dataset, batch_size=None)
        self.begin = begin

    def __iter__(self):
        begin, self.begin = self.begin, 0
        return iter(list(super().__iter__())[begin:])


def test_resume_inside_a_window_keeps_its_boundaries(tmp_path) -> None:
    batches = [x(i) for i in range(1, 9)]

    class Saves(Scalar):
        def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
            if batch_idx == 5:
                self.trainer.save_checkpoint(tmp_path / "inside.ckpt")

    def window() -> GradientAccumulation:
        return GradientAccumulation({0: 2, 1: 4})

    trainer(callbacks=[window()], max_epochs=2).fit(Saves(batches * 1))
    module = Scalar()
    # saved in epoch 1 last: after batches 1..6 of it, two of them inside the second window of four
    trainer(callbacks=[window()], max_epochs=2).fit(module, Remaining(batches, 6), ckpt_path=tmp_path / "inside.ckpt")
    assert module.gradients == [(5 + 6 + 7 + 8) / 4]


def test_resume_inside_a_window_of_plain_lightning_says_what_is_missing(tmp_path) -> None:
    batches = [x(i) for i in range(1, 9)]

    class Saves(Scalar):
        def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
            if batch_idx == 5:
                self.trainer.save_checkpoint(tmp_path / "inside.ckpt")

    trainer("auto", accumulate_grad_batches=4).fit(Saves(batches))
    module = Scalar()
    run = trainer(callbacks=[GradientAccumulation(4)])
    with pytest.warns(UserWarning, match="inside a window and does not hold its gradients"):
        run.fit(module, Remaining(batches, 6), ckpt_path=tmp_path / "inside.ckpt")
    assert module.gradients == [7.5]


def test_checkpoint_of_plain_lightning_goes_on(tmp_path) -> None:
    batches = [x(i) for i in range(1, 5)]
    run = trainer("auto", accumulate_grad_batches=2)
    run.fit(Scalar(batches))
    run.save_checkpoint(tmp_path / "plain.ckpt")
    counts, module = GradientAccumulation(2), Scalar(batches)
    run = trainer(callbacks=[counts], max_epochs=2)
    run.fit(module, ckpt_path=tmp_path / "plain.ckpt")
    assert module.gradients == [1.5, 3.5]
    assert counts.state_dict()["optimizer_steps"] == run.global_step == 4
    other = Scalar(batches)
    run.save_checkpoint(tmp_path / "ours.ckpt")
    trainer("auto", accumulate_grad_batches=2, max_epochs=3).fit(other, ckpt_path=tmp_path / "ours.ckpt")
    assert other.gradients == [1.5, 3.5]  # equal micro-batches: a mean of means is right


def test_lr_finder() -> None:
    found = []
    for strategy in ("auto", "accum"):
        module = Small(lr=1e-3)
        run = trainer(strategy, accumulate_grad_batches=2, max_epochs=-1, max_steps=40)
        finder = Tuner(run).lr_find(module, train_dataloaders=regression(16), num_training=20, update_attr=False)
        found.append(finder.results)
        run.fit(module, regression())
        assert run.global_step == 40
    lightning, ours = found
    assert ours["lr"] == lightning["lr"]
    assert len(ours["lr"]) == 20
    # the same losses, where Lightning shows them divided by the window
    assert ours["loss"] == pytest.approx([2 * loss for loss in lightning["loss"]], rel=1e-10)


def test_batch_size_finder() -> None:
    class Sized(Small):
        batch_size = 2

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=self.batch_size)

        def val_dataloader(self):
            return regression(1)

    generator = torch.Generator().manual_seed(2)
    data = [torch.randn(64, 3, generator=generator).double(), torch.randn(64, 1, generator=generator).double()]
    found = []
    for strategy in ("auto", "accum"):
        module = Sized()
        run = trainer(strategy, accumulate_grad_batches=2)
        found.append(Tuner(run).scale_batch_size(module, max_trials=2, steps_per_trial=2))
        run.fit(module)
        assert run.global_step == 64 // found[-1] // 2
    assert found[0] == found[1] > 2


def test_validate_test_and_predict_with_the_strategies() -> None:
    class All(Small):
        def test_step(self, batch, batch_idx) -> None:
            self.log("test_loss", F.mse_loss(self.net(batch[0]), batch[1]))

        def predict_step(self, batch, batch_idx):
            return self.net(batch[0])

    run, module = trainer(callbacks=[GradientAccumulation(2)]), All()
    before = run.validate(module, regression(), verbose=False)[0]["val_loss"]
    run.fit(module, regression())
    assert run.validate(module, regression(), verbose=False)[0]["val_loss"] < before
    assert run.test(module, regression(), verbose=False)[0]["test_loss"] > 0
    assert len(run.predict(module, regression())) == 8
    run = trainer(ddp(), devices=2)
    assert run.validate(module, regression(), verbose=False)[0]["val_loss"] < before


def test_manual_optimization_is_left_alone_without_a_window_and_accumulates_with_one() -> None:
    class Manual(Scalar):
        def __init__(self, batches) -> None:
            super().__init__(batches)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx) -> None:
            self.optimizers().zero_grad()
            self.manual_backward((self.w * batch).mean())
            self.optimizers().step()

    module = Manual([x(1), x(2)])
    trainer().fit(module)
    assert module.total == 3.0
    module = Manual([x(1), x(2, 6)])
    trainer(callbacks=[GradientAccumulation(2)]).fit(module)
    assert module.total == 3.0  # (1 + 2 + 6) / 3, where steps one by one would come to 1 + 4
