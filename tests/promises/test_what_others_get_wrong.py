"""One test for each situation that is wrong elsewhere; the figure of the right column is what the full batch gives.

References are to Lightning-AI/pytorch-lightning. Figures of Lightning itself were measured on 2.6.6.
"""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import NONE_LOSS, Scalar, ddp, fit, fp16_on_cpu, loader, x
from torch import nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation

# batches, the window, the gradients of the full batches, and Lightning's if they are others
WINDOWS = {
    "micro-batches of 1 and 9 tokens, 20350": ([x(1), x(1, 2, 3, 4, 5, 6, 7, 8, 9)], 2, [4.6], [3.0]),  # the mean of means 1 and 5
    "tail of two batches in a window of four, 19987": ([x(i) for i in range(1, 11)], 4, [2.5, 6.5, 9.5], [2.5, 6.5, 4.75]),
    "epoch shorter than the window": ([x(1), x(2), x(3)], 4, [2.0], [1.5]),
    "no batch at the start": ([*map(x, (1, 2, 3, 4)), None, *map(x, (6, 7, 8))], 4, [2.5, 7.0], [2.5, 7.75]),  # stale gradients
    "no batch in the middle": ([x(1), None, x(3), x(5)], 4, [3.0], [2.25]),
    "no batch at the end": ([*map(x, (1, 2, 3)), None, *map(x, (5, 6, 7, 8))], 4, [2.0, 6.5], [6.5]),  # the first window is lost
    "no batch at the end of the epoch": ([x(1), x(2), None], 4, [1.5], []),
    "no loss at the start": ([NONE_LOSS, x(1), x(3), x(4)], 4, [8 / 3], [2.0]),
    "no loss in the middle": ([x(1), NONE_LOSS, x(3), x(4)], 4, [8 / 3], [2.0]),
    "no loss at the end": ([x(1), x(3), x(4), NONE_LOSS], 4, [8 / 3], None),  # the step before there is a gradient of the last
    "nothing in a window": ([None, NONE_LOSS, x(3), x(5)], 2, [4.0], None),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_is_its_full_batch(name: str) -> None:
    batches, window, expected, lightnings = WINDOWS[name]
    module, plain = Scalar(batches), Scalar(batches)
    fit(module, None, GradientAccumulation(window))
    assert module.gradients == pytest.approx(expected, rel=1e-15)
    if lightnings is not None:
        fit(plain, None, strategy="auto", accumulate_grad_batches=window)
        assert plain.gradients == pytest.approx(lightnings)


@pytest.mark.parametrize("missing", [None, NONE_LOSS], ids=["batch", "loss"])
def test_fp16_and_none_on_the_boundary_is_as_if_it_had_not_been_there(missing: Any) -> None:
    module = Scalar([x(1), x(2), x(3), missing])
    run = fit(module, None, GradientAccumulation(4), plugins=fp16_on_cpu())
    assert module.gradients == [2.0]  # Lightning: 1536, still scaled by 256 x 3, and the step is counted but not made
    assert module.total == 2.0
    assert run.global_step == 1


class WithBuffers(Scalar):
    """DistributedDataParallel broadcasts buffers in its forward: a rank that stays away would be out of step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_buffer("calls", torch.zeros(3))


@pytest.mark.parametrize("kind", [Scalar, WithBuffers])
def test_a_rank_with_nothing_at_all_adds_nothing(kind: type[Scalar]) -> None:
    module = kind(by_rank=[[x(7), x(5), None, None, None, NONE_LOSS], [x(6), x(6), x(2), x(4), x(1), x(3)]])
    fit(module, None, strategy=ddp(), devices=2, accumulate_grad_batches=2)  # Lightning: RuntimeError
    assert module.total == 6.0 + 3.0 + 2.0


# --- schedulers -------------------------------------------------------------------------------------------------------


class Scheduled(Scalar):
    frequency = 1

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10**6)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": self.frequency}]


@pytest.mark.parametrize(("frequency", "steps"), [(1, 4), (2, 2), (4, 1)])
def test_scheduler_frequency_counts_optimizer_steps_17544_12894(frequency: int, steps: int) -> None:
    module = Scheduled([x(i) for i in range(16)])
    module.frequency = frequency
    run = fit(module, None, GradientAccumulation(4))
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == steps  # Lightning: 4 with each frequency


def test_the_scheduler_waits_if_the_scaler_skips_a_step_16228_18828() -> None:
    class PlantedInf(Scheduled):
        """The gradient of the second window overflows, as float16 gradients do."""

        scheduler_seen: tuple[int, ...] = ()

        def on_after_backward(self) -> None:
            if self.trainer.fit_loop.batch_idx // 2 == 1:
                self.w.grad.fill_(math.inf)

        def on_train_batch_end(self, *args: Any) -> None:
            self.scheduler_seen += (self.lr_schedulers().last_epoch,)

    module = PlantedInf([x(i) for i in (1, 3, 5, 7, 9, 11)])
    run = fit(module, None, GradientAccumulation(2), plugins=fp16_on_cpu())
    assert module.scheduler_seen == (0, 1, 1, 1, 1, 2)  # Lightning: (0, 1, 1, 2, 2, 3)
    assert module.total == 2.0 + 10.0
    assert run.callback_metrics["window/optimizer_steps"] == 2


def test_estimated_stepping_batches_of_an_epoch_schedule() -> None:
    class Asks(Scalar):
        def configure_optimizers(self) -> Any:
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module = Asks([x(i) for i in range(8)])
    run = fit(module, None, GradientAccumulation({0: 1, 1: 8}), max_epochs=3)
    assert module.estimate == run.global_step == 10  # Lightning: 24


# --- what callbacks see -----------------------------------------------------------------------------------------------


def test_outputs_carry_the_loss_of_the_micro_batch() -> None:
    seen = []

    class Watches(Scalar):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": (batch - self.w * 0).mean() + self.w, "extra": batch_idx}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((outputs["loss"].item(), outputs["extra"]))

    fit(Watches([x(8), x(4)]), None, GradientAccumulation(2))
    assert seen == [(8.0, 0), (4.0, 1)]  # Lightning: 4.0 and 2.0


# --- DistributedDataParallel ------------------------------------------------------------------------------------------


def test_a_parameter_used_only_before_the_boundary_is_reduced() -> None:
    class TwoBranches(Scalar):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.rare = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
            self.never = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

        def loss(self, x: Any) -> Any:
            return ((self.w + self.rare if x.numel() == 2 else self.w) * x).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0, weight_decay=0.5)

    module = TwoBranches(by_rank=[[x(1, 2), x(3)], [x(4), x(5)]])  # mosaicml/composer #9
    fit(module, None, GradientAccumulation(2, check=False), strategy=ddp(find_unused_parameters=True), devices=2)
    assert module.total == pytest.approx(15 / 5, rel=1e-15)
    assert -module.rare.item() == pytest.approx(3 / 5, rel=1e-15)
    assert module.never.item() == 1.0  # never used: no gradient, so no weight decay either


@pytest.mark.parametrize("sync", ["window", "micro_batch"])
def test_static_graph_works_19354_20704(sync: str) -> None:
    module = Scalar(by_rank=[[x(i) for i in range(8)], [x(i, 2 * i) for i in range(8)]])
    fit(module, None, strategy=ddp(static_graph=True, sync=sync), devices=2, accumulate_grad_batches=4)
    expected = sum(torch.cat([*(x(i) for i in w), *(x(i, 2 * i) for i in w)]).mean().item() for w in (range(4), range(4, 8)))
    assert module.total == pytest.approx(expected, rel=1e-14)  # Lightning: SystemError


def test_labels_shifted_in_the_model_are_counted_as_the_model_counts() -> None:
    """A naive count of ``labels != -100`` takes in position 0 of every row, which predicts nothing."""

    class Shifts(Scalar):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = torch.stack([self.w.expand_as(batch), torch.zeros_like(batch)], -1)
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), (batch[:, 1:] > 0).long().flatten())

    module = Shifts([torch.ones(1, 9, dtype=torch.float64), torch.tensor([[1.0, -1.0]], dtype=torch.float64)])
    fit(module, None, GradientAccumulation(2))
    # 8 predictions of class 1 pull by +1/2 each, one of class 0 by -1/2
    assert module.gradients == pytest.approx([(8 * 0.5 - 1 * 0.5) / 9], rel=1e-15)


def test_manual_optimization_in_windows_5054() -> None:
    """Lightning refuses it; Accelerate's wrapped optimizer lets the gradients of one optimizer's loss leak into the other's."""

    class TwoOptimizers(Scalar):
        def __init__(self, batches: Any) -> None:
            super().__init__(batches)
            self.automatic_optimization = False
            self.v = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([parameter], lr=1.0) for parameter in (self.w, self.v)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer, parameter in zip(self.optimizers(), (self.w, self.v), strict=True):
                optimizer.zero_grad()  # clears what the other's loss has left there
                self.manual_backward(((self.w + self.v) * batch).mean() * (1 if parameter is self.w else 2))
            for optimizer in self.optimizers():
                optimizer.step()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass

    batches = WINDOWS["micro-batches of 1 and 9 tokens, 20350"][0]
    with pytest.raises(Exception, match="not supported for manual optimization"):
        fit(TwoOptimizers(batches), None, strategy="auto", accumulate_grad_batches=2)
    module = TwoOptimizers(batches)
    fit(module, None, accumulate_grad_batches=2)
    assert (-module.w.item(), -module.v.item()) == pytest.approx((3 * 4.6, 2 * 4.6), rel=1e-15)


# --- figures that others have published: Accelerate's guides on gradient accumulation --------------------------------------

ROUNDING = 1e-4  # both the initial and the final weights are published to four decimals, half a unit each


class TokenClassification(pl.LightningModule):
    """Sample i has input_ids 1..i+1; each rank takes every second batch of each window, as Accelerate shards them."""

    def __init__(self, samples: int, batch_size: int, ranks: int = 1) -> None:
        super().__init__()
        self.net = nn.Linear(1, 2, bias=False)
        with torch.no_grad():
            self.net.weight.copy_(torch.tensor([[-0.0075], [0.5364]]))
        self.samples, self.batch_size, self.ranks = samples, batch_size, ranks

    def train_dataloader(self) -> Any:
        batches, pad = [], nn.utils.rnn.pad_sequence
        for first in range(0, self.samples, self.batch_size):
            inputs = [torch.arange(1.0, i + 2) for i in range(first, first + self.batch_size)]
            padded = pad(inputs, batch_first=True, padding_value=-100.0)
            labels = pad([i.long() % 2 for i in inputs], batch_first=True, padding_value=-100)
            batches.append({"input_ids": padded, "labels": labels})
        return loader(batches[self.trainer.global_rank :: self.ranks])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch["input_ids"][..., None]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.08)


@pytest.mark.parametrize(("batch_size", "window"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_token_classification_on_one_rank(batch_size: int, window: int) -> None:
    module = TokenClassification(samples=8, batch_size=batch_size)
    run = fit(module, None, GradientAccumulation(window))
    assert module.net.weight.flatten().tolist() == pytest.approx([0.0953, 0.4337], abs=ROUNDING)
    assert run.callback_metrics["window/total_weight"] == 36


def test_token_classification_on_two_ranks() -> None:
    module = TokenClassification(samples=16, batch_size=4, ranks=2)
    fit(module, None, strategy=ddp(), devices=2, accumulate_grad_batches=2)
    assert module.net.weight.flatten().tolist() == pytest.approx([0.2117, 0.3172], abs=ROUNDING)
