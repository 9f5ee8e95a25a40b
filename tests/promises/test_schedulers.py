"""Schedulers follow optimizer steps that really happened."""

import math
from typing import Any

import pytest
import torch
from support import Scalar, fit, fp16_on_cpu, x

from lightning_accum import GradientAccumulation


class Counting(torch.optim.lr_scheduler.LRScheduler):  # notes at which optimizer step it was stepped
    def __init__(self, optimizer: Any, module: Any) -> None:
        self.module, self.at = module, []
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, *args: Any) -> None:
        self.at.append(len(self.module.gradients))
        super().step(*args)


class Scheduled(Scalar):
    options: Any = ({},)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.schedulers = [Counting(optimizer, self) for _ in self.options]
        return [optimizer], [{"scheduler": s, "interval": "step", **o} for s, o in zip(self.schedulers, self.options, strict=True)]

    def stepped_at(self, index: int = 0) -> list[int]:
        return self.schedulers[index].at[1:]  # the first is torch's own, at construction


SEVEN = [x(i) for i in range(7)]
EPOCH = {"interval": "epoch"}
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[list[int]]]] = {
    "frequency over the ends of epochs": ({}, [{"frequency": 3}], [[3, 6]]),
    "several": ({}, [{}, {"frequency": 2}, EPOCH, {**EPOCH, "frequency": 2}], [[*range(1, 9)], [2, 4, 6, 8], [4, 8], [8]]),
    # as often as without accumulation; the steps that reach loader batches 3, 6, 9, 12 are those after 4, 6, 9, 13
    "micro-batches": (
        {"scheduler_counts": "micro_batches"},
        [{}, {"frequency": 3}],
        [[1, 1, 2, 2, 3, 3, 4, 5, 5, 6, 6, 7, 7, 8], [2, 3, 5, 7]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_scheduler_steps_at_its_own_frequency_and_interval(name: str) -> None:
    policy, schedulers, expected = CASES[name]
    module = Scheduled(SEVEN)  # 4 optimizer steps an epoch
    module.options = schedulers
    fit(module, None, GradientAccumulation(2, **policy), max_epochs=2)
    assert [module.stepped_at(i) for i in range(len(schedulers))] == expected


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_reduce_lr_on_plateau_steps_at_its_interval(interval: str) -> None:
    class Plateau(Scalar):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("flat", 1.0)
            return super().training_step(batch, batch_idx)

    module, steps = Plateau(SEVEN), 8 if interval == "step" else 2
    optimizer = module.configure_optimizers()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    config = {"scheduler": plateau, "interval": interval, "frequency": 1, "monitor": "flat"}
    module.configure_optimizers = lambda: {"optimizer": optimizer, "lr_scheduler": config}
    fit(module, None, GradientAccumulation(2), max_epochs=2)
    assert plateau.last_epoch == steps
    assert optimizer.param_groups[0]["lr"] == 0.5 ** (steps - 1)  # the first sight of a metric is its best


def test_inf_on_one_rank_holds_the_scheduler_on_all_and_ranks_do_not_multiply_its_steps() -> None:
    class Overflows(Scheduled):
        def on_after_backward(self) -> None:
            if self.trainer.global_rank == 1 and self.trainer.fit_loop.batch_idx == 0:
                self.w.grad.fill_(math.inf)  # the reduction at the boundary carries it over

        def on_train_end(self) -> None:
            assert self.lr_schedulers().last_epoch == 2  # an error on any rank fails the fit

    module = Overflows(by_rank=[[x(1)] * 6] * 2)
    fit(module, None, GradientAccumulation(2), ranks=2, plugins=fp16_on_cpu())
    assert module.total == 2.0


POLICIES: dict[str, dict[str, Any]] = {
    "whole": {"window": 1},
    "each batch fits": {"micro_batch": 8},
    "some are split": {"micro_batch": 2},
    "all are split": {"micro_batch": 1},
    "guarded": {"window": 1, "on_nonfinite": "skip"},
}


# if all labels are ignored, a window that is one whole batch on one rank is Lightning's own
@pytest.mark.parametrize(
    ("missing", "policy"),
    [*(("loss", name) for name in POLICIES), *(("labels", name) for name, p in POLICIES.items() if "micro_batch" in p)],
)
def test_a_window_without_a_loss_changes_nothing_and_counts_alike_however_its_batch_runs(missing: str, policy: str) -> None:
    class Momentum(Scheduled):  # gradients that are zeros, and not None, would be steps of the momentum and the weight decay
        def loss(self, x: Any) -> Any:
            if missing == "loss":
                return super().loss(x)
            logits = torch.stack([self.w * x, -self.w * x], 1).nan_to_num()
            return torch.nn.functional.cross_entropy(logits, torch.where(x.isnan(), -100, 0))

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.w.grad is not None:  # it is in Lightning, if training_step returns None
                super().on_before_optimizer_step(optimizer)

        def on_fit_start(self) -> None:
            self.optimizers(use_pl_optimizer=False).param_groups[0].update(momentum=0.9, weight_decay=0.1)

    nothing, batches = x(math.nan, math.nan), [x(1, 2), x(3, 4, 5), x(6)]
    loaded = [nothing, batches[0], nothing, nothing, *batches[1:], None, nothing]
    expected, module = Momentum(lr=0.1), Momentum(lr=0.1)
    fit(expected, batches, strategy="auto")
    run = fit(module, loaded, GradientAccumulation(**POLICIES[policy]))
    assert module.w.item() == pytest.approx(expected.w.item(), rel=1e-12)
    assert len(module.gradients) == 3
    if missing == "labels":
        assert run.global_step == 3
        assert module.stepped_at() == expected.stepped_at() == [1, 2, 3]
    else:  # training_step returns None
        assert run.global_step == fit(Momentum(lr=0.1), loaded, strategy="auto").global_step == module.schedulers[0].last_epoch == 7


@pytest.mark.parametrize("policy", [{}, {"micro_batch": 1}, {"window": 2}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_module_that_never_gives_a_loss_comes_to_its_last_step(ranks: int, policy: dict[str, Any]) -> None:
    class Nothing(Scheduled):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            return None

        def on_train_end(self) -> None:
            assert self.trainer.global_step == 3  # an error on any rank fails the fit

    fit(Nothing([x(1, 2)] * 4), None, GradientAccumulation(**policy), ranks=ranks, max_epochs=-1, max_steps=3)
