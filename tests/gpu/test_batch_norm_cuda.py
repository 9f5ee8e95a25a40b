"""BatchNorm of split batches on CUDA: exact, and with little more memory than a micro-batch needs. Skipped without CUDA.

pytest tests/gpu/test_batch_norm_cuda.py -s      # prints what it measured
"""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import loader, relative_error
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


def batches(rows: int, pixels: int, dtype: torch.dtype, number: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(number, rows, 3, pixels, pixels, generator=generator, dtype=dtype)
    return list(zip(images, torch.randint(0, 10, (number, rows), generator=generator), strict=True))


def fit(module: Deep, data: Any, size: int | None = None, batch_norm: str = "exact", precision: Any = None) -> Deep:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    callbacks = [] if size is None else [GradientAccumulation(micro_batch=size, batch_norm=batch_norm)]
    strategy = "auto" if size is None else "accum"
    run = pl.Trainer(
        accelerator="gpu", devices=1, strategy=strategy, precision=precision, max_epochs=1, callbacks=callbacks, **quiet
    )
    run.fit(module, loader(data))
    return module


@pytest.mark.parametrize("size", [1, 5, 16])
@pytest.mark.parametrize("is_channels_last", [False, True])
def test_split_batches_equal_the_full_batch(size: int, is_channels_last: bool) -> None:
    layout = torch.channels_last if is_channels_last else torch.contiguous_format
    data = batches(23, 8, torch.float64)
    whole = fit(Deep(blocks=3).double().to(memory_format=layout), data)
    split = fit(Deep(blocks=3).double().to(memory_format=layout), data, size)
    assert relative_error(split.parameters(), whole.parameters()) < 1e-11
    assert relative_error([b.double() for b in split.buffers()], [b.double() for b in whole.buffers()]) < 1e-11


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 5e-2), ("16-mixed", 1e-2), (None, 1e-3)])
def test_lower_precision_is_as_good_as_the_full_batch_in_it(precision: Any, tolerance: float) -> None:
    data = batches(23, 8, torch.float32)
    whole = fit(Deep(blocks=3), data, precision=precision)
    assert relative_error(fit(Deep(blocks=3), data, 5, precision=precision).parameters(), whole.parameters()) < tolerance


def test_peak_memory_and_time(capsys: Any) -> None:
    rows, pixels, width, blocks = 256, 64, 64, 24
    data = batches(rows, pixels, torch.float32, number=6)
    runs = [("whole batch", None, "exact", False), ("whole batch, checkpointed", None, "exact", True)]
    runs += [(f"{kind}, {n}", rows // n, kind, False) for n in (2, 4, 8) for kind in ("warn", "exact")]
    peaks, lines = {}, []
    for name, size, batch_norm, is_checkpointed in runs:
        module = fit(Deep(width, blocks, is_checkpointed), data, size, batch_norm)
        peaks[name] = max(module.peaks[2:]) / 2**20
        lines.append(f"{name:28}{peaks[name]:10.0f} MiB{1e3 * sorted(module.times[2:])[1]:10.1f} ms a step")
        del module
        torch.cuda.empty_cache()
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert peaks["exact, 8"] < 0.3 * peaks["whole batch"]
