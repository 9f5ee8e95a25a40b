"""What a CPU cannot show: a real GradScaler, real lack of memory, peak memory, waiting for the device. Skipped without CUDA.

pytest tests/gpu -s      # prints what it measured
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import Language, loader, pad, relative_error, sentences
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation, Tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

BATCHES = [pad(sentences(101)[i : i + 16]) for i in range(0, 101, 16)]


def fit(module: pl.LightningModule, batches: Any, strategy: str = "accum", precision: Any = None, **policy: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [GradientAccumulation(**policy)] if policy else []
    run = pl.Trainer(
        accelerator="gpu", devices=1, strategy=strategy, precision=precision, max_epochs=2, callbacks=callbacks, **quiet
    )
    run.fit(module, loader(batches))
    return run


class Wide(pl.LightningModule):
    """Keeps as many bytes for backward as it is told, for each row."""

    def __init__(self, features: int, layers: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = batch
        for layer in self.layers:
            hidden = F.gelu(layer(hidden)) + hidden
        return hidden.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("size", [1, 3, Tokens(40), "auto"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_split_batches_equal_unsplit_ones(optimizer: str, size: Any) -> None:
    whole, split = Language(optimizer), Language(optimizer)
    fit(whole, BATCHES, "auto")
    fit(split, BATCHES, micro_batch=size)
    assert relative_error(split.parameters(), whole.parameters()) < 1e-12


@pytest.mark.parametrize("window", [{"window": 3}, {"micro_batch": 4}, {"micro_batch": "auto"}])
@pytest.mark.parametrize(("precision", "most"), [("16-mixed", 2e-3), ("bf16-mixed", 2e-2)])  # of 11 and of 8 bits
def test_half_precision_equals_the_full_batch_to_its_bits(precision: str, most: float, window: dict[str, Any]) -> None:
    size = 48 if "window" in window else 16
    rows = sentences(101)
    whole, split = Language().float(), Language().float()
    fit(whole, [pad(rows[i : i + size]) for i in range(0, 101, size)], "auto", precision)
    run = fit(split, BATCHES, "accum", precision, **window)
    assert (run.precision_plugin.scaler is not None) is (precision == "16-mixed")
    error = relative_error(split.parameters(), whole.parameters())
    print(f"{precision} {window}: {error:.1e}")
    assert error < most


def test_real_lack_of_memory_is_recovered_from(capsys: Any) -> None:
    """A quarter of what would be needed is left to this process; the step is the one that would have been taken."""
    rows, features = 1024, 4096
    batch = torch.randn(rows, features, generator=torch.Generator().manual_seed(1))
    whole = Wide(features)
    torch.cuda.reset_peak_memory_stats()
    fit(whole, [batch] * 3, "auto")
    needed = torch.cuda.max_memory_allocated()
    del whole.trainer
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    parameters = sum(p.numel() * 4 for p in whole.parameters())
    allowed = 2 * parameters + (needed - 2 * parameters) // 3 + 4 * rows * features
    split = Wide(features)
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    try:
        run = fit(split, [batch] * 3, micro_batch="auto")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    found = int(run.callback_metrics["window/micro_batch_size"])
    with capsys.disabled():
        print(f"\nneeded {needed / 2**20:.0f} MiB, allowed {allowed / 2**20:.0f} MiB: micro-batches of {found} of {rows} rows")
    assert found < rows
    assert relative_error((p.cpu() for p in split.parameters()), (p.cpu() for p in whole.parameters())) < 1e-5  # float32


def test_peak_memory_is_that_of_one_micro_batch(capsys: Any) -> None:
    peaks = {}
    for number in (1, 2, 4, 16):
        batch = torch.randn(64 * number, 2048)
        module = Wide(2048)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        fit(module, [batch] * 2, micro_batch=64)
        peaks[number] = torch.cuda.max_memory_allocated() - batch.numel() * 4
        del module
    with capsys.disabled():
        print("\npeak MiB by micro-batches of 64 rows, without the batch:", {n: round(p / 2**20, 1) for n, p in peaks.items()})
    assert peaks[16] <= 1.02 * peaks[2]


def test_no_micro_batch_waits_for_the_device() -> None:
    """Copies to the host inside a window raise; the one at its end is made after the last micro-batch."""

    class Watched(Language):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            if self.trainer.global_step > 1:
                torch.cuda.set_sync_debug_mode("error")
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    module = Watched()
    strategy_close = "lightning_accum.accumulation.Accumulation.close"
    with pytest.MonkeyPatch.context() as patch:
        from lightning_accum.accumulation import Accumulation

        original = Accumulation.close

        def close(self: Any, *args: Any) -> Any:
            torch.cuda.set_sync_debug_mode("default")
            return original(self, *args)

        patch.setattr(strategy_close, close)
        try:
            run = fit(module, BATCHES, micro_batch=4)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert run.global_step == 2 * len(BATCHES)
