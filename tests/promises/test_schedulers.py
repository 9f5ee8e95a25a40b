"""Schedulers follow optimizer steps that really happened."""

from __future__ import annotations

import math

import pytest
import torch
from support import Scalar, ddp, fp16_on_cpu, loader, trainer, x

from lightning_accum import GradientAccumulation, Tokens


class Counting(torch.optim.lr_scheduler.LRScheduler):
    """Notes at which optimizer step it was stepped."""

    def __init__(self, optimizer, module) -> None:
        self.module, self.at = module, []
        super().__init__(optimizer)

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self):
        return {key: value for key, value in super().state_dict().items() if key not in ("module", "at")}

    def step(self, *args) -> None:
        self.at.append(len(self.module.gradients))
        super().step(*args)


class Scheduled(Scalar):
    def __init__(self, *args, schedulers=({},), **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.options = schedulers

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.schedulers = [Counting(optimizer, self) for _ in self.options]
        pairs = zip(self.schedulers, self.options, strict=True)
        return [optimizer], [{"scheduler": s, "interval": "step", **o} for s, o in pairs]

    def stepped_at(self, index: int = 0) -> list[int]:
        return self.schedulers[index].at[1:]  # the first is torch's own, at construction


BATCHES = [x(i) for i in range(7)]


def test_frequency_counts_over_epoch_boundaries() -> None:
    module = Scheduled(BATCHES, schedulers=[{"frequency": 3}])  # 4 optimizer steps an epoch
    trainer(callbacks=[GradientAccumulation(2)], max_epochs=3).fit(module)
    assert module.stepped_at() == [3, 6, 9, 12]


@pytest.mark.parametrize("max_steps", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("rows", [7, 25, 40])
def test_a_scheduler_steps_as_often_as_the_optimizer_where_max_steps_ends_a_window_inside_a_loader_batch(
    max_steps: int, rows: int
) -> None:
    module = Scheduled([x(*range(rows))] * 5, schedulers=[{}, {"frequency": 2}])
    run = trainer(callbacks=[GradientAccumulation(Tokens(10), micro_batch=1)], max_steps=max_steps, max_epochs=-1)
    run.fit(module)
    steps = list(range(1, max_steps + 1))
    assert run.global_step == len(module.gradients) == max_steps
    assert [module.stepped_at(index) for index in range(2)] == [steps, steps[1::2]]


def test_several_schedulers_each_with_its_own_frequency_and_interval() -> None:
    module = Scheduled(BATCHES, schedulers=[{}, {"frequency": 2}, {"interval": "epoch"}, {"interval": "epoch", "frequency": 2}])
    trainer(callbacks=[GradientAccumulation(2)], max_epochs=2).fit(module)
    assert [module.stepped_at(i) for i in range(4)] == [[1, 2, 3, 4, 5, 6, 7, 8], [2, 4, 6, 8], [4, 8], [8]]


def test_micro_batches_span_the_same_data_as_without_accumulation() -> None:
    module = Scheduled(BATCHES, schedulers=[{}, {"frequency": 3}])
    trainer(callbacks=[GradientAccumulation(2, scheduler_counts="micro_batches")], max_epochs=2).fit(module)
    assert module.stepped_at(0) == [1, 1, 2, 2, 3, 3, 4, 5, 5, 6, 6, 7, 7, 8]
    assert module.stepped_at(1) == [2, 3, 5, 7]  # the steps that reach loader batches 3, 6, 9, 12: those after 4, 6, 9, 13


def test_ranks_do_not_multiply_scheduler_steps() -> None:
    class Decays(Scalar):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module = Decays(by_rank=[[x(1)] * 4, [x(1)] * 4])
    trainer(ddp(), devices=2, accumulate_grad_batches=2).fit(module)
    assert module.total == 1.0 + 0.5


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_reduce_lr_on_plateau(interval: str) -> None:
    class Plateau(Scalar):
        def training_step(self, batch, batch_idx):
            self.log("flat", 1.0)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            config = {"scheduler": self.plateau, "interval": interval, "frequency": 1, "monitor": "flat"}
            return {"optimizer": optimizer, "lr_scheduler": config}

    module = Plateau(BATCHES)  # 4 optimizer steps an epoch
    run = trainer(callbacks=[GradientAccumulation(2)], max_epochs=2)
    run.fit(module)
    steps = 8 if interval == "step" else 2
    assert module.plateau.last_epoch == steps
    assert run.optimizers[0].param_groups[0]["lr"] == 0.5 ** (steps - 1)  # the first sight of a metric is its best


def test_lr_scheduler_step_of_the_module() -> None:
    class Own(Scheduled):
        calls = 0

        def lr_scheduler_step(self, scheduler, metric) -> None:
            self.calls += 1
            scheduler.step()

    module = Own(BATCHES, schedulers=[{"frequency": 2}])
    trainer(callbacks=[GradientAccumulation(2)]).fit(module)
    assert module.calls == 2
    assert module.stepped_at() == [2, 4]


def test_one_cycle_over_estimated_stepping_batches_ends_where_training_ends() -> None:
    class OneCycle(Scalar):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            total = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=total)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    run = trainer(callbacks=[GradientAccumulation({0: 1, 1: 4})], max_epochs=3)
    run.fit(OneCycle(BATCHES))
    scheduler = run.lr_scheduler_configs[0].scheduler
    assert scheduler.last_epoch == scheduler.total_steps == run.global_step == 7 + 2 + 2


def test_scheduler_time_goes_on_after_a_checkpoint(tmp_path) -> None:
    def module() -> Scheduled:
        return Scheduled(BATCHES, schedulers=[{"frequency": 3}])

    first = module()
    run = trainer(callbacks=[GradientAccumulation(2)], max_epochs=1)
    run.fit(first)
    run.save_checkpoint(tmp_path / "one.ckpt")
    second = module()
    trainer(callbacks=[GradientAccumulation(2)], max_epochs=3).fit(second, ckpt_path=tmp_path / "one.ckpt")
    assert first.stepped_at() == [3]
    assert second.stepped_at() == [2, 5, 8]  # optimizer steps 6, 9 and 12 of the whole


def test_inf_on_one_rank_holds_the_scheduler_on_all() -> None:
    class Overflows(Scheduled):
        def on_after_backward(self) -> None:
            if self.trainer.global_rank == 1 and self.trainer.fit_loop.batch_idx == 0:
                self.w.grad.fill_(math.inf)  # the reduction at the boundary carries it over

        def on_train_end(self) -> None:
            assert self.lr_schedulers().last_epoch == 2  # an error on any rank fails the fit

    module = Overflows(by_rank=[[x(1)] * 6] * 2, schedulers=[{}])
    trainer(ddp(), devices=2, plugins=fp16_on_cpu(), callbacks=[GradientAccumulation(2)]).fit(module)
    assert module.total == 2.0


def test_windows_of_which_the_loader_gives_none_are_no_steps() -> None:
    module = Scheduled([x(1), x(2), None, None, x(3), x(4)])
    run = trainer(callbacks=[GradientAccumulation(2)])
    run.fit(module, loader(module.batches))
    assert module.stepped_at() == [1, 2]


POLICIES = {
    "whole": {"window": 1},
    "each batch fits": {"micro_batch": 8},
    "some are split": {"micro_batch": 2},
    "all are split": {"micro_batch": 1},
    "guarded": {"window": 1, "on_nonfinite": "skip"},
}


# where all labels are ignored, a window that is one whole batch on one rank is Lightning's own
@pytest.mark.parametrize(
    ("missing", "policy"),
    [*(("loss", name) for name in POLICIES), *(("labels", name) for name, p in POLICIES.items() if "micro_batch" in p)],
)
def test_a_window_without_a_loss_changes_nothing_and_counts_alike_however_its_batch_runs(missing: str, policy: str) -> None:
    class Momentum(Scheduled):
        """Gradients that are zeros, and not None, would be steps of the momentum and the weight decay."""

        def loss(self, x):
            if missing == "loss":
                return super().loss(x)
            logits = torch.stack([self.w * x, -self.w * x], 1).nan_to_num()
            return torch.nn.functional.cross_entropy(logits, torch.where(x.isnan(), -100, 0))

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer) -> None:
            optimizer.zero_grad(set_to_none=False)

        def configure_optimizers(self):
            _, schedulers = super().configure_optimizers()
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
            for config in schedulers:
                config["scheduler"].optimizer = self.optimizer
            return [self.optimizer], schedulers

    nothing, batches = x(math.nan, math.nan), [x(1, 2), x(3, 4, 5), x(6)]
    loaded = [nothing, batches[0], nothing, nothing, *batches[1:], None, nothing]
    expected, module = Momentum([]), Momentum([])
    trainer("auto").fit(expected, loader(batches))
    run = trainer(callbacks=[GradientAccumulation(**POLICIES[policy])])
    run.fit(module, loader(loaded))
    assert module.w.item() == pytest.approx(expected.w.item(), rel=1e-12)
    assert len(module.gradients) == 3
    if missing == "labels":
        assert run.global_step == 3
        assert module.stepped_at() == expected.stepped_at() == [1, 2, 3]
    else:  # training_step returns None

        class Counted(Momentum):
            def on_before_optimizer_step(self, optimizer) -> None:
                """Gradients are None there."""

        lightning, counted = trainer("auto"), Counted([])
        lightning.fit(counted, loader(loaded))
        assert run.global_step == lightning.global_step == module.schedulers[0].last_epoch == 7


@pytest.mark.parametrize("policy", [{}, {"micro_batch": 1}, {"window": 2}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_module_that_never_gives_a_loss_comes_to_its_last_step(ranks: int, policy: dict) -> None:
    class Nothing(Scheduled):
        def training_step(self, batch, batch_idx) -> None:
            return None

        def on_train_end(self) -> None:
            assert self.trainer.global_step == 3  # an error on any rank fails the fit

    module = Nothing([x(1, 2)] * 4)
    strategy, devices = ("accum", 1) if ranks == 1 else (ddp(), 2)
    trainer(strategy, devices=devices, max_epochs=-1, max_steps=3, callbacks=[GradientAccumulation(**policy)]).fit(module)
