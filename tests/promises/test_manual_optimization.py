"""Modules that optimize by themselves, unchanged: windows equal their own run on joined batches."""

from __future__ import annotations

import copy
import inspect
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning_utilities.core import rank_zero
from manual_modules import ALL, F64, GAN, MAML, SIZES, Closures, Dependent, Manual, RawOptimizers, TwoSchedulers, draw, full_batches
from sharded import fsdp2, needs_sharding_on_cpu, whole_parameters
from support import SaveAfter, Scalar, StatefulLoader, ddp, fp16_on_cpu, relative_error, trainer, x
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import AccumulationWarning, GradientAccumulation, ModelParallelAccumulationStrategy


@pytest.mark.some_cases(6)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("ranks", [1, 2])
def test_windows_equal_the_modules_own_run_on_joined_batches(kind: type[Manual], ranks: int, optimizer: str) -> None:
    by_rank = draw(kind, ranks)
    expected = kind([full_batches(by_rank, 3)], optimizer)
    plain = trainer("auto", max_epochs=2)
    plain.fit(expected)

    module = kind(by_rank, optimizer)
    run = trainer(ddp() if ranks == 2 else "accum", devices=ranks, max_epochs=2, accumulate_grad_batches=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*then calls manual_backward.*") if kind is not Closures else None
        run.fit(module)
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12
    steps = 0 if kind is RawOptimizers else 6 if kind is MAML else 12
    assert module.seen.tolist() == expected.seen.tolist() == [steps, 6 if kind is TwoSchedulers else 0]


def fitted(module: Manual, size: int = 3, *, ranks: int = 1, callback: bool = False, **kwargs: Any) -> pl.Trainer:
    arguments = {"callbacks": [GradientAccumulation(size)]} if callback else {"accumulate_grad_batches": size}
    run = trainer(ddp() if ranks == 2 else "accum", devices=ranks, **{**arguments, **kwargs})
    run.fit(module)
    return run


def own_run(kind: type[Manual], by_rank: list[list[Any]], size: int = 3, **kwargs: Any) -> Manual:
    expected = kind([full_batches(by_rank, size)])
    trainer("auto", **kwargs).fit(expected)
    return expected


@needs_sharding_on_cpu
@pytest.mark.parametrize("kind", [GAN, TwoSchedulers])
def test_sharded_modules(kind: type[Manual]) -> None:
    class Sharded(kind):
        def configure_model(self) -> None:
            from torch.distributed.fsdp import fully_shard

            for net in (self.generator, self.discriminator):
                fully_shard(net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # clip_gradients is refused by Lightning on shards
            self.clip_gradients = lambda *args, **kwargs: None
            return super().training_step(batch, batch_idx)

        def on_train_end(self) -> None:
            if self.global_rank == 0:
                torch.save(whole_parameters(self), "whole.pt")
            else:
                whole_parameters(self)

    class Unclipped(kind):
        def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
            pass

    by_rank = draw(kind, 2)
    expected = own_run(Unclipped, by_rank)
    trainer(fsdp2(), devices=2, accumulate_grad_batches=3).fit(Sharded(by_rank))
    whole = torch.load("whole.pt")
    assert relative_error([whole[name] for name, _ in expected.named_parameters()], expected.parameters()) < 1e-12


def test_loss_scale_of_float16() -> None:
    """The sums are kept without the scale, which the first optimizer's step may change before the second's backward."""

    class Wide(GAN):
        def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
            pass

    by_rank = draw(GAN, 1)
    for size, batches in ((3, by_rank), (1, [full_batches(by_rank, 3)])):
        precision = fp16_on_cpu()
        precision.forward_context = precision.train_step_context = lambda: torch.autocast("cpu", enabled=False)
        precision.scaler.set_growth_factor(4.0)
        precision.scaler.set_growth_interval(1)
        module = Wide(batches)
        fitted(module, size, plugins=[precision]) if size > 1 else trainer("auto", plugins=[precision]).fit(module)
        assert precision.scaler.get_scale() == 256 * 4**6
        if size > 1:
            found = module
    assert relative_error(found.parameters(), module.parameters()) < 1e-12


def test_callback_logs_each_loss_once_a_window() -> None:
    by_rank = draw(GAN, 1)
    module = GAN(by_rank)
    run = fitted(module, callback=True)
    full = full_batches(by_rank, 3)[-1:]  # the last window, whose losses depend on the parameters before it
    before = own_run(GAN, [by_rank[0][:6]])
    real, noise = full[0]
    fake = before.generator(noise)
    losses = {
        "window/loss": F.softplus(-before.discriminator(fake)).mean(),
        "window/loss_2": F.softplus(-before.discriminator(real)).mean(),
        "window/loss_3": F.softplus(before.discriminator(fake)).mean(),
    }
    for name, loss in losses.items():
        assert run.callback_metrics[name].item() == pytest.approx(loss.item(), rel=1e-12)
    assert run.callback_metrics["window/optimizer_steps"] == 3
    assert run.callback_metrics["window/total_weight"] == sum(SIZES[0])
    assert run.accumulate_grad_batches == 1  # given back


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_line_says_which_backward_is_which_loss(tmp_path: Path, ranks: int) -> None:
    # Lightning's two packages share what logs on rank zero: the one that was imported last gives it its logger
    logger, log = rank_zero.log, tmp_path / "log"  # a file, which forked ranks write as well
    handler, level = logging.FileHandler(log), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        fitted(GAN(draw(GAN, ranks)), ranks=ranks, callbacks=[GradientAccumulation(3)])
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("GradientAccumulation: ")]
    lines, first = inspect.getsourcelines(GAN.training_step)
    backwards = [first + number for number, line in enumerate(lines) if "manual_backward" in line]
    assert f"a window is 3 loader batches{' on each of 2 ranks' if ranks == 2 else ''}, " in line
    assert "; the module optimizes by itself; " in line
    for name, lineno in zip(("window/loss", "window/loss_2", "window/loss_3"), backwards, strict=True):
        assert f"{name} is that of manual_backward in manual_modules.py:{lineno}, weight: mean, each micro-batch" in line


def test_a_step_before_a_loss_that_depends_on_it_is_named() -> None:
    with pytest.warns(UserWarning, match=r"steps optimizer 1 \(SGD\) and then calls manual_backward again"):
        fitted(Dependent(draw(GAN, 1)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*then calls manual_backward.*")
        fitted(Dependent(draw(GAN, 1)), size=1)


def test_parameters_that_only_some_ranks_use() -> None:
    class Sometimes(GAN):
        def build(self) -> None:
            super().build()
            self.shift, self.never = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

        def configure_optimizers(self) -> Any:
            both = [*self.generator.parameters(), self.shift, self.never]
            return [torch.optim.AdamW(both, lr=0.1, weight_decay=0.5), torch.optim.SGD(self.discriminator.parameters(), lr=0.1)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            noise = batch[1]
            is_large = noise[:, :1] > 0.8  # the joined batch always has some, a micro-batch may have none
            opt_g, opt_d = self.optimizers()
            fake = self.generator(noise)
            if is_large.any():
                fake = fake + is_large * self.shift
            opt_g.zero_grad()
            opt_d.zero_grad()
            self.manual_backward(F.softplus(-self.discriminator(fake)).mean())
            opt_g.step()
            opt_d.step()

    by_rank = draw(GAN, 2)
    assert any(not (batch[1][:, 0] > 0.8).any() for batches in by_rank for batch in batches)
    expected = own_run(Sometimes, by_rank)
    module = Sometimes(by_rank)
    fitted(module, ranks=2)
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12
    assert torch.equal(module.never, torch.ones(2, dtype=F64))  # no gradient, so no weight decay


@pytest.mark.parametrize(("tail", "windows"), [("drop", 2), ("carry", 5)])
def test_tails(tail: str, windows: int) -> None:
    by_rank = draw(GAN, 1)
    module = GAN(by_rank)
    epochs = 1 if tail == "drop" else 2
    run = trainer("accum", max_epochs=epochs, callbacks=[GradientAccumulation(3, tail=tail)])
    run.fit(module)
    seen = (by_rank[0] * epochs)[: None if tail == "carry" else 6]
    expected = own_run(GAN, [seen])
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12
    assert run.global_step == 2 * windows


def test_window_by_epoch_and_step() -> None:
    by_rank = draw(GAN, 1)
    for window in ({0: 3, 1: 2}, lambda step: 3 if step < 3 else 2):
        module = GAN(by_rank)
        trainer("accum", max_epochs=2, callbacks=[GradientAccumulation(window)]).fit(module)
        batches = full_batches(by_rank, 3) + full_batches(by_rank, 2)
        expected = GAN([batches])
        trainer("auto").fit(expected)
        assert relative_error(module.parameters(), expected.parameters()) < 1e-12


def test_a_loader_batch_without_a_backward_has_no_weight() -> None:
    class Skips(GAN):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if len(batch[0]) else None

    by_rank = draw(GAN, 1)
    empty = [torch.zeros(0, 2, dtype=F64), torch.zeros(0, 3, dtype=F64)]
    module = Skips([[by_rank[0][0], empty, by_rank[0][1], None, by_rank[0][2]]])
    with pytest.warns(UserWarning, match="called manual_backward 3 times in the first micro-batch of a window, and 0 times"):
        fitted(module, size=5)
    expected = own_run(GAN, [by_rank[0][:3]])
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("rank", [1, 0])
def test_rank_without_the_last_batch_of_a_window_ends_all(rank: int) -> None:
    by_rank = draw(GAN, 2)
    by_rank[rank][1] = None
    begin = time.monotonic()
    with pytest.raises(Exception, match="None for"):
        fitted(GAN(by_rank), size=2, ranks=2)
    assert time.monotonic() - begin < 15  # and not after the time-out of the group


class LeavesEarly(GAN):
    """One rank leaves ``training_step`` in the last loader batch of a window, where the others go on.

    Args:
        rank: that leaves.
        after: so many calls of ``manual_backward``; it makes all three of them, and steps nothing.
    """

    def __init__(self, by_rank: list[list[Any]], rank: int, after: int) -> None:
        super().__init__(by_rank)
        self.rank, self.after = rank, after

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelAccumulationStrategy):
            from torch.distributed.fsdp import fully_shard

            for net in (self.generator, self.discriminator):
                fully_shard(net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        is_leaving = (self.global_rank, batch_idx) == (self.rank, 1)
        if is_leaving and self.after == 0:
            return
        real, noise = batch
        fake = self.generator(noise)
        self.manual_backward(F.softplus(-self.discriminator(fake)).mean())
        if is_leaving and self.after == 1:
            return
        self.manual_backward(F.softplus(-self.discriminator(real)).mean())
        self.manual_backward(F.softplus(self.discriminator(fake.detach())).mean())
        for optimizer in self.optimizers():
            if not is_leaving:
                optimizer.step()
            optimizer.zero_grad()


@pytest.mark.some_cases(2)
@needs_sharding_on_cpu
@pytest.mark.parametrize(
    ("engine", "rank", "after", "found"),
    [
        ("ddp", 1, 0, "rank 0 has called manual_backward 1 time .*; rank 1 has called manual_backward 0 times, .* and left"),
        ("ddp", 0, 1, "rank 0 has called manual_backward 1 time, .* and left training_step; rank 1 has called .* 2 times"),
        ("ddp", 1, 3, r"rank 0 .* stepped optimizer 0 \(SGD\), optimizer 1 \(SGD\), and left .*; rank 1 .* stepped nothing, and"),
        ("fsdp2", 1, 0, "Rank 1 has called manual_backward 0 times and left training_step, and another rank is still in it"),
        ("fsdp2", 0, 1, "Rank 0 has called manual_backward 1 time and left training_step, and another rank is still in it"),
        ("fsdp2", 1, 3, r"rank 0 .* stepped optimizer 0 \(SGD\), optimizer 1 \(SGD\), and left .*; rank 1 .* stepped nothing, and"),
    ],
)
def test_rank_that_leaves_training_step_early_ends_all(
    engine: str, rank: int, after: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_accum.manual.same_place.PATIENCE", 2.0)
    strategy = ddp() if engine == "ddp" else fsdp2()
    with pytest.raises(Exception, match=found):
        trainer(strategy, devices=2, accumulate_grad_batches=2).fit(LeavesEarly(draw(GAN, 2), rank, after))


def test_ranks_that_all_leave_training_step_early_go_on() -> None:
    module = LeavesEarly(draw(GAN, 2), -1, 0)
    module.training_step = lambda batch, batch_idx: None if batch_idx == 1 else LeavesEarly.training_step(module, batch, batch_idx)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(ddp(), devices=2, accumulate_grad_batches=2).fit(module)
    assert module.seen[0] == 2 * 3  # optimizers, and windows but the first, with the tail


def test_optimizers_and_schedulers_are_left_as_they_were() -> None:
    kept: list[Any] = []

    class Keeps(TwoSchedulers):
        def configure_optimizers(self) -> Any:
            optimizers, schedulers = super().configure_optimizers()
            kept.extend([*optimizers, *schedulers])
            return optimizers, schedulers

        def on_train_end(self) -> None:
            assert "step" not in self.trainer.strategy.lr_scheduler_configs[0].scheduler.state_dict()

    fitted(Keeps(draw(GAN, 1)))
    assert [type(one) for one in kept[2:]] == [torch.optim.lr_scheduler.ExponentialLR, torch.optim.lr_scheduler.LambdaLR]
    before = kept[1].param_groups[0]["params"][0].clone()
    kept[1].step()
    assert not torch.equal(before, kept[1].param_groups[0]["params"][0])  # it does not wait any more


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_inside_a_window_goes_on_to_the_bit(ranks: int) -> None:
    class Stateful(TwoSchedulers):
        def train_dataloader(self) -> Any:
            return StatefulLoader(self.by_rank[self.trainer.global_rank])

    by_rank = draw(GAN, ranks)
    whole, resumed = Stateful(by_rank, "adamw"), Stateful(by_rank, "adamw")
    fitted(whole, ranks=ranks, callbacks=[GradientAccumulation(3), SaveAfter(4)], accumulate_grad_batches=1)  # a third of a window
    run = trainer(ddp() if ranks == 2 else "accum", devices=ranks, callbacks=[GradientAccumulation(3)])
    run.fit(resumed, ckpt_path="inside.ckpt")
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name

    with pytest.warns(UserWarning, match="the gradients in the checkpoint are dropped"):
        trainer("accum", callbacks=[GradientAccumulation(2)]).fit(Stateful(by_rank, "adamw"), ckpt_path="inside.ckpt")


@pytest.mark.parametrize("resumed_on", [1, 2])
def test_a_checkpoint_inside_the_first_window_holds_what_ranks_of_unequal_batches_have_weighed(resumed_on: int) -> None:
    """Before the first window has ended, ranks have agreed on nothing."""

    class Mean(Manual):
        def build(self) -> None:
            self.net = nn.Linear(3, 1)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

        def train_dataloader(self) -> Any:
            return StatefulLoader(self.by_rank[self.trainer.global_rank])

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.net(batch).square().mean())
            optimizer.step()

    generator = torch.Generator().manual_seed(1)
    by_rank = [[torch.randn(rows, 3, generator=generator, dtype=F64) for rows in sizes] for sizes in ((2, 3, 2), (9, 8, 9))]
    whole, resumed = Mean(by_rank), Mean(by_rank)
    run = trainer(ddp(), devices=2, callbacks=[GradientAccumulation(3), SaveAfter(1)])
    run.fit(whole)
    run = trainer(ddp() if resumed_on == 2 else "accum", devices=resumed_on, callbacks=[GradientAccumulation(3)])
    run.fit(resumed, ckpt_path="inside.ckpt")
    if resumed_on == 2:
        assert all(torch.equal(resumed.state_dict()[name], value) for name, value in whole.net.state_dict(prefix="net.").items())
        return
    reference = Mean(by_rank)  # what both ranks had before the checkpoint, and one of them after it
    reference.net(torch.cat([by_rank[0][0], by_rank[1][0], *by_rank[0][1:]])).square().mean().backward()
    for name, parameter in reference.net.named_parameters(prefix="net"):
        expected = parameter - parameter.grad
        assert relative_error([resumed.state_dict()[name]], [expected]) < 1e-14


class Half(Scalar):
    """One optimizer, stepped by the module or by the Trainer."""

    def __init__(self, batches: list[Any], is_automatic: bool = False) -> None:
        super().__init__(batches)
        self.automatic_optimization = is_automatic

    def train_dataloader(self) -> Any:
        return StatefulLoader(self.batches)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        return None


@pytest.mark.parametrize("after", [1, 2, 4, 5])
def test_a_manual_window_goes_on_after_loader_batches_of_none(after: int) -> None:
    batches = [None, x(1), x(2), x(5), None, x(7)]
    whole, resumed = Half(batches), Half(batches)
    callbacks = [GradientAccumulation(lambda step: 3), SaveAfter(after)]
    trainer("accum", callbacks=callbacks).fit(whole)
    trainer("accum", callbacks=[GradientAccumulation(lambda step: 3)]).fit(resumed, ckpt_path="inside.ckpt")
    assert resumed.w.item() == whole.w.item() == -(1.5 + 6)


def test_a_window_of_the_trainers_does_not_go_on_in_manual_optimization() -> None:
    batches = [x(1), x(2), x(3), x(5), x(7), x(9)]
    trainer("accum", callbacks=[GradientAccumulation(3), SaveAfter(4)]).fit(Half(batches, is_automatic=True))
    resumed = Half(batches)
    with pytest.warns(UserWarning, match="of 3 loader batches .*Now it is .* of a module that optimizes by itself: the"):
        trainer("accum", callbacks=[GradientAccumulation(3)]).fit(resumed, ckpt_path="inside.ckpt")
    assert resumed.w.item() == -(2.0 + 8.0)  # the first from the checkpoint, the second on what was left


@pytest.mark.parametrize("after", [2, 4, 5, 6])
def test_a_resumed_manual_training_drops_tails_and_shows_epochs_as_the_whole_one(after: int) -> None:
    class Stepping(Scalar):
        def __init__(self) -> None:
            super().__init__([x(value) for value in (1, 2, 3, 4, 5)])
            self.automatic_optimization = False
            self.epochs: list[float] = []

        def train_dataloader(self) -> Any:
            return StatefulLoader(self.batches)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch) + batch.mean())
            optimizer.step()

        def on_train_start(self) -> None:
            self.trainer.callbacks.append(EpochEnds())

    class EpochEnds(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            pl_module.epochs.append(float(trainer.callback_metrics["window/loss_epoch"]))

    whole, resumed = Stepping(), Stepping()
    policy = {"window": 3, "tail": "drop"}
    trainer("accum", max_epochs=3, callbacks=[GradientAccumulation(**policy), SaveAfter(after)]).fit(whole)
    trainer("accum", max_epochs=3, callbacks=[GradientAccumulation(**policy)]).fit(resumed, ckpt_path="inside.ckpt")
    assert resumed.w.item() == whole.w.item()
    is_in_first_epoch = after < 5
    assert resumed.epochs == whole.epochs[0 if is_in_first_epoch else 1 :]


# --- what a review broke ----------------------------------------------------------------------------------------------


class NeverZero(Manual):
    """Gradients are never cleared: the module's own run adds each batch's to those before."""

    def build(self) -> None:
        self.generator, self.discriminator = nn.Linear(3, 2), nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        opt_g, _ = self.optimizers()
        self.manual_backward(self.discriminator(self.generator(batch[1])).square().mean())
        opt_g.step()


class OwnScheduler(GAN):
    """A scheduler that the Trainer does not know of."""

    def on_train_start(self) -> None:
        self.kept = {"schedule": torch.optim.lr_scheduler.ExponentialLR(self.optimizers(use_pl_optimizer=False)[0], 0.5)}

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return super().optimizers(use_pl_optimizer)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.kept["schedule"].step()
        return loss


class InnerLoop(Manual):
    """An optimizer of the module's own steps fast weights in every batch, from which the outer gradient follows (Reptile)."""

    def build(self) -> None:
        self.generator, self.discriminator = nn.Linear(3, 2), nn.Linear(2, 1)
        self.fast = nn.Linear(2, 1)
        self.inner = torch.optim.SGD(self.fast.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.discriminator.parameters(), lr=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.fast.load_state_dict(self.discriminator.state_dict())
        for _ in range(3):
            self.inner.zero_grad()
            self.fast(batch[0]).square().mean().backward()
            self.inner.step()
        pairs = zip(self.discriminator.parameters(), self.fast.parameters(), strict=True)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        rows = torch.ones(len(batch[0]), dtype=F64)
        self.manual_backward(sum((rows * ((slow - fast.detach()).square().sum() / 2)).mean() for slow, fast in pairs))
        optimizer.step()


def test_an_inner_loop_steps_in_every_micro_batch() -> None:
    batches = [[draw(GAN, 1)[0][2]] * 3]  # of one batch three times, so that a window's outer gradient is that of each
    expected = InnerLoop([batches[0][:1]])
    trainer("auto").fit(expected)
    module = InnerLoop(batches)
    fitted(module)
    assert relative_error(module.discriminator.parameters(), expected.discriminator.parameters()) < 1e-12


@pytest.mark.parametrize("kind", [NeverZero, OwnScheduler])
def test_windows_of_what_a_review_broke(kind: type[Manual]) -> None:
    by_rank = draw(kind, 1)
    expected = own_run(kind, by_rank)
    module = kind(by_rank)
    fitted(module)
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12


class Averages(GAN):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.discriminator[0].bias.mul_(0.99)
        return loss


class Alternates(GAN):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(self.discriminator(self.generator(batch[1])).square().mean())
        optimizer.step()


class Direct(GAN):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[0]
        optimizer.zero_grad()
        self.discriminator(self.generator(batch[1])).square().mean().backward()
        optimizer.step()


class AfterTheBatch(GAN):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.noise = batch[1]

    def on_train_batch_end(self, *_: Any) -> None:
        self.manual_backward(self.generator(self.noise).square().mean())
        self.optimizers()[0].step()


class Follows(GAN):
    """A moving average in a hook, written through ``.data``, which counts no changes."""

    def build(self) -> None:
        super().build()
        self.average = copy.deepcopy(self.generator).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        for mine, its in zip(self.average.parameters(), self.generator.parameters(), strict=True):
            mine.data.mul_(0.9).add_(its.data, alpha=0.1)


class StepsInHook(GAN):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.generator(batch[1]).square().mean())

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer = self.optimizers()[0]
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_in_a_hook_after_the_batch_is_that_of_the_window_and_not_warned_of() -> None:
    by_rank = draw(GAN, 1)
    module = StepsInHook(by_rank)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=AccumulationWarning)
        fitted(module, size=3)
    assert relative_error(module.parameters(), own_run(StepsInHook, by_rank, 3).parameters()) < 1e-12


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Follows, "'average.0.weight' and 3 more change between the micro-batches .* once a window: where trainer.global_step"),
        (Averages, "changes parameters by itself in a micro-batch whose steps wait"),
        (Alternates, "Only what the last one steps is stepped"),
        (Direct, "no micro-batch of the window has called self.manual_backward"),
        (AfterTheBatch, "is called outside of training_step"),
    ],
)
def test_what_cannot_be_equal_is_named(kind: type[Manual], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        fitted(kind(draw(GAN, 1)), size=2)


def test_sparse_gradients_over_ranks() -> None:
    class Embeds(Manual):
        def build(self) -> None:
            self.table = nn.Embedding(9, 2, sparse=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SparseAdam(self.parameters(), lr=0.1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            rows = (batch[0][:, 0].abs() * 4).long().clamp(max=8)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward((self.table(rows) - batch[0]).square().mean())
            optimizer.step()

    by_rank = draw(GAN, 2)
    expected, module = own_run(Embeds, by_rank), Embeds(by_rank)
    fitted(module, ranks=2)
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12
