"""Offloading on CUDA: the step to the bit, with copies beside the computation. Skipped without CUDA.

pytest tests/gpu/test_offload_cuda.py -s      # prints what it measured
"""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import loader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_accum import GradientAccumulation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


class Deep(pl.LightningModule):
    """Blocks of one width, each with a BatchNorm layer."""

    def __init__(self, width: int = 16, blocks: int = 8, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)
        self.is_checkpointed = is_checkpointed
        self.peaks: list[int] = []
        self.times: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.stem(batch[0])
        for block in self.blocks:
            hidden = hidden + (checkpoint(block, hidden, use_reentrant=False) if self.is_checkpointed else block(hidden))
        return F.cross_entropy(self.head(hidden.mean((2, 3))), batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.before, self.began = torch.cuda.memory_allocated(), time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.synchronize()
        self.times.append(time.perf_counter() - self.began)
        self.peaks.append(torch.cuda.max_memory_allocated() - self.before)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@pytest.fixture(autouse=True)
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def batches(rows: int, pixels: int, number: int = 6) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(number, rows, 3, pixels, pixels, generator=generator)
    return list(zip(data, torch.randint(0, 10, (number, rows), generator=generator), strict=True))


def fit(module: Deep, data: Any, is_offloaded: bool, precision: Any = None) -> Deep:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    callbacks = [GradientAccumulation(micro_batch="offload", log=False)] if is_offloaded else []
    strategy = "accum" if is_offloaded else "auto"
    run = pl.Trainer(
        accelerator="gpu", devices=1, strategy=strategy, precision=precision, max_epochs=1, callbacks=callbacks, **quiet
    )
    run.fit(module, loader(data))
    return module


@pytest.mark.parametrize("precision", [None, "64-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("is_channels_last", [False, True])
@pytest.mark.parametrize("rows", [16, 200])
def test_the_step_is_that_of_the_whole_batch_to_the_bit(precision: Any, is_channels_last: bool, rows: int) -> None:
    layout, data = torch.channels_last if is_channels_last else torch.contiguous_format, batches(rows, 24)
    whole, module = (
        fit(Deep(32).to(memory_format=layout), data, is_offloaded, precision).state_dict() for is_offloaded in (False, True)
    )
    assert all(torch.equal(module[name], value) for name, value in whole.items())


def test_peak_memory_and_time(capsys: Any) -> None:
    data = batches(256, 64)
    peaks, lines = {}, []
    for name in ("whole batch", "whole batch, checkpointed", "offload"):
        module = fit(Deep(64, 24, is_checkpointed="checkpointed" in name), data, name == "offload")
        peaks[name] = max(module.peaks[2:]) / 2**20
        lines.append(f"{name:28}{peaks[name]:10.0f} MiB{1e3 * sorted(module.times[2:])[1]:10.1f} ms a step")
        del module
        torch.cuda.empty_cache()
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert peaks["offload"] < 0.4 * peaks["whole batch"]
