"""``micro_batch="auto"``: an attempt that runs out of memory is as if it had not been, and the step is the one that was due."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from support import OPTIMIZERS, Language, Limit, ddp, loader, pad, relative_error, sentences, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from lightning_accum import GradientAccumulation

EPOCHS, BATCH = 3, 16
ROWS = sentences(101)
BATCHES = [pad(ROWS[i : i + BATCH]) for i in range(0, len(ROWS), BATCH)]

MESSAGES: dict[str, Callable[[], Exception]] = {
    "CUDA": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    "CPU": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried to"),
    "cuDNN": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cuBLAS": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}


class Limited(Language):
    """Runs out of memory above ``most`` rows, in the middle of the network: some gradients are there by then, some are not."""

    def __init__(self, optimizer: str = "sgd", most: int = 4, where: str = "forward", error: str = "CUDA") -> None:
        super().__init__(optimizer)
        self.most, self.where, self.error = most, where, MESSAGES[error]
        self.attempts: list[int] = []
        self.net.blocks[1].register_forward_pre_hook(self.limit)

    def limit(self, block: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        if not self.training:
            return None
        return (Limit.apply(inputs[0], len(inputs[0]), self.limit_here(), self.where, self.error), *inputs[1:])

    def limit_here(self) -> int:
        return self.most


def fit(module: pl.LightningModule, **policy: Any) -> pl.LightningModule:
    settings = {"micro_batch": "auto", **policy}
    trainer(callbacks=[GradientAccumulation(**settings)], max_epochs=EPOCHS).fit(module, loader(BATCHES))
    return module


@pytest.mark.some_cases(2, 5)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", list(MESSAGES))
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_step_is_the_one_that_was_due(optimizer: str, error: str, where: str) -> None:
    whole = Language(optimizer)
    trainer("auto", max_epochs=EPOCHS).fit(whole, loader(BATCHES))
    module = fit(Limited(optimizer, 4, where, error))
    assert relative_error(module.parameters(), whole.parameters()) < 1e-12


def test_auto_equals_the_size_that_it_ends_with_bit_for_bit() -> None:
    module = fit(Limited("adamw", most=4), trim_padding=False)
    expected = Language("adamw")
    fit(expected, micro_batch=4, trim_padding=False)
    for found, wanted in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(found, wanted)


class LaterLimited(Limited):
    """Has room for the first batch of each window of three, and for less in the others."""

    less = 5

    def limit_here(self) -> int:
        return 16 if self.trainer.fit_loop.epoch_loop.batch_idx % 3 == 0 else self.less


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_gradients_of_earlier_batches_of_the_window_are_kept(where: str) -> None:
    whole = Language("adamw")
    trainer("auto", max_epochs=EPOCHS).fit(whole, loader([pad(ROWS[i : i + 3 * BATCH]) for i in range(0, len(ROWS), 3 * BATCH)]))
    module = fit(LaterLimited("adamw", where=where), window=3)
    assert relative_error(module.parameters(), whole.parameters()) < 1e-12


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_attempt_that_runs_out_of_memory_leaves_nothing_in_the_sums(where: str) -> None:
    def fitted(module: pl.LightningModule, **policy: Any) -> pl.LightningModule:
        return fit(module.float(), trim_padding=False, accumulate_dtype=torch.float64, **policy)

    first = fitted(Limited("adamw", 4, where))  # fails in the first batch of a window
    expected = fitted(Language("adamw"), micro_batch=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), expected.parameters(), strict=True))
    found, whole = fitted(LaterLimited("adamw", where=where), window=3), fitted(Language("adamw"), window=3, micro_batch=None)
    # the same rows in other micro-batches: their gradients round otherwise, before they are added up
    assert relative_error(found.parameters(), whole.parameters()) < 1e-5


# --- anything that the attempt changed --------------------------------------------------------------------------------


class Changeable(pl.LightningModule):
    """Draws random numbers, keeps statistics, counts and logs."""

    def __init__(self, most: int, where: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.double()
        self.mean = MeanMetric().double()
        self.most, self.where = most, where
        self.calls, self.seen = 0, []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.calls += 1
        self.seen.append(len(batch))
        hidden = F.dropout(self.norm(self.first(batch)), 0.5)
        noise = torch.rand(()) + random.random() + np.random.rand()
        hidden = Limit.apply(hidden, len(batch), self.most, self.where, MESSAGES["CUDA"])
        loss = (self.last(hidden) * noise).square().mean()
        self.mean(loss)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS["adamw"](self.parameters())


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_randomness_statistics_and_counts_are_as_if_the_size_had_been_known(where: str) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(8, 3, dtype=torch.float64, generator=generator) for _ in range(4)]
    runs = []
    for most, size in [(2, "auto"), (8, 2)]:
        module = Changeable(most, where)
        pl.seed_everything(5, verbose=False)
        run = trainer(callbacks=[GradientAccumulation(micro_batch=size)])
        with pytest.warns(UserWarning, match="BatchNorm"):
            run.fit(module, loader(batches))
        runs.append((module, dict(run.callback_metrics)))
    (found, found_metrics), (wanted, wanted_metrics) = runs
    for name, value in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    assert found.calls == wanted.calls == 16
    assert found.seen == wanted.seen == [2] * 16
    for name in ("loss_step", "loss_epoch", "mean_step", "mean_epoch", "window/loss"):
        assert found_metrics[name] == wanted_metrics[name], name


def test_parameter_that_training_step_changes_is_an_error_not_a_wrong_step() -> None:
    class Teacher(Limited):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                self.net.position.mul_(0.99)
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match=r"net\.position.*fixed micro_batch"):
        fit(Teacher(), trim_padding=False)


# --- what is kept, and said -------------------------------------------------------------------------------------------


class Counting(Limited):
    """Counts the attempts that fail."""

    failures = 0

    def limit(self, block: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        self.failures += self.training and len(inputs[0]) > self.limit_here()
        self.outside.append(len(inputs[0]))
        return super().limit(block, inputs)

    outside: list[int] = []


def test_size_is_kept_and_said_and_saved(caplog, tmp_path) -> None:
    caplog.set_level(logging.INFO, "lightning.pytorch")
    Counting.outside.clear()
    module = Counting(most=4)
    run = trainer(callbacks=[GradientAccumulation(micro_batch="auto", trim_padding=False, check=False)], max_epochs=2)
    run.fit(module, loader(BATCHES))
    assert [rows for rows in Counting.outside if rows > 4] == [16, 8]  # two failures in all, in the first batch
    said = [record.message for record in caplog.records if "do not fit" in record.message]
    assert len(said) == 2
    assert "16 samples" in said[0]
    assert "micro-batches of 8" in said[0]
    assert "micro-batches of 4" in said[1]
    assert run.callback_metrics["window/micro_batch_size"] == 4
    run.save_checkpoint(tmp_path / "a.ckpt")

    Counting.outside.clear()
    resumed = trainer(callbacks=[GradientAccumulation(micro_batch="auto", trim_padding=False)], max_epochs=3)
    resumed.fit(Counting(most=4), loader(BATCHES), ckpt_path=tmp_path / "a.ckpt")
    assert max(Counting.outside) == 4  # known from the checkpoint


@pytest.mark.exhaustive
def test_one_sample_that_does_not_fit_ends_with_an_error_that_says_so() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="one sample.*does not fit"):
        fit(Limited(most=0))


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    class Broken(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fit(Broken(), trim_padding=False)


def test_a_fixed_size_does_not_hide_a_lack_of_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        fit(Limited(most=4), micro_batch=8)


# --- several ranks ----------------------------------------------------------------------------------------------------


class Ranked(Limited):
    """Every rank has half of the rows, and room of its own."""

    def __init__(self, most_by_rank: tuple[int, int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.most_by_rank = most_by_rank

    def limit_here(self) -> int:
        return self.most_by_rank[self.global_rank]

    def train_dataloader(self) -> Any:
        shares = [ROWS[:96][i + 8 * self.global_rank : i + 8 * self.global_rank + 8] for i in range(0, 96, 16)]
        return loader([pad(share) for share in shares])

    def on_train_end(self) -> None:
        sizes = self.trainer.strategy.accumulation.splitting.sizes
        torch.save(sizes.size_for(24, 8), f"size-{self.global_rank}.pt")


@pytest.mark.some_cases(1, 4)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("most", "agreed"), [((8, 2), 2), ((3, 8), 2), ((2, 4), 2), ((1, 1), 1)])
@pytest.mark.parametrize("window", [1, 2])
def test_one_rank_or_both_out_of_memory(most: tuple[int, int], agreed: int, where: str, window: int) -> None:
    whole = Language("adamw")
    size = 16 * window
    trainer("auto", max_epochs=EPOCHS).fit(whole, loader([pad(ROWS[:96][i : i + size]) for i in range(0, 96, size)]))
    module = Ranked(most, optimizer="adamw", where=where)
    policy = GradientAccumulation(window, micro_batch="auto", trim_padding=False)
    trainer(ddp(), devices=2, callbacks=[policy], max_epochs=EPOCHS).fit(module)
    assert relative_error(module.parameters(), whole.parameters()) < 1e-12
    assert [torch.load(f"size-{rank}.pt") for rank in (0, 1)] == [agreed, agreed]
