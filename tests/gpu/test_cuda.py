"""What a CPU cannot show: a GradScaler, lack of memory, peak memory, waiting for the device, CUDA graphs. Skipped without CUDA.

torch.compile(mode="reduce-overhead") replays graphs into buffers of its own, and gradients that were accumulated in these have been
overwritten in silence (pytorch/pytorch#96693, #181723).

pytest tests/gpu -s      # prints what it measured
"""

import gc
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import pytest
import support
import torch
from support import Language, Toy, classified, pad, relative_error, sentences, train_by_hand
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation, Tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

BATCHES = [pad(sentences(101)[i : i + 16]) for i in range(0, 101, 16)]


def fit(module: Any, batches: Any, strategy: str = "accum", precision: Any = None, **policy: Any) -> pl.Trainer:
    callbacks = [GradientAccumulation(**policy)] if policy else []
    arguments = {"strategy": strategy, "precision": precision, "accelerator": "gpu", "max_epochs": 2}
    return support.fit(module, batches, *callbacks, **arguments)


def error(found: nn.Module, expected: nn.Module) -> float:
    return relative_error(found.cpu().parameters(), expected.cpu().parameters())


@pytest.mark.parametrize("size", [1, 3, Tokens(40), "auto"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_split_batches_equal_unsplit_ones(optimizer: str, size: Any) -> None:
    whole, split = Language(optimizer), Language(optimizer)
    fit(whole, BATCHES, "auto")
    fit(split, BATCHES, micro_batch=size)
    assert error(split, whole) < 1e-12


@pytest.mark.parametrize("window", [{"window": 3}, {"micro_batch": 4}, {"micro_batch": "auto"}])
@pytest.mark.parametrize(("precision", "most"), [("16-mixed", 2e-3), ("bf16-mixed", 2e-2)])  # of 11 and of 8 bits
def test_half_precision_equals_the_full_batch_to_its_bits(precision: str, most: float, window: dict[str, Any]) -> None:
    size, rows = 48 if "window" in window else 16, sentences(101)
    whole, split = Language().float(), Language().float()
    fit(whole, [pad(rows[i : i + size]) for i in range(0, 101, size)], "auto", precision)
    run = fit(split, BATCHES, "accum", precision, **window)
    assert (run.precision_plugin.scaler is not None) is (precision == "16-mixed")
    print(f"{precision} {window}: {error(split, whole):.1e}")
    assert error(split, whole) < most


class Wide(nn.ModuleList):  # keeps as many bytes for backward as it is told, for each row
    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self:
            hidden = F.gelu(layer(hidden)) + hidden
        return hidden


def wide(features: int) -> Toy:
    net = lambda: Wide(nn.Linear(features, features) for _ in range(8))  # noqa: E731
    module = Toy(lambda net, batch: net(batch).square().mean(), net=net).float()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1e-3)
    return module


def test_real_lack_of_memory_is_recovered_from(capsys: Any) -> None:
    """A third of what activations would need is left to this process; the step is the one that would have been taken."""
    rows, features = 16384, 1024  # activations are many times the parameters
    batch = torch.randn(rows, features, generator=torch.Generator().manual_seed(1))
    whole, split = wide(features), wide(features)
    torch.cuda.reset_peak_memory_stats()
    fit(whole, [batch] * 3, "auto")
    needed = torch.cuda.max_memory_allocated()
    whole.trainer = None
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    held = 2 * sum(p.numel() * 4 for p in whole.parameters())  # parameters and gradients
    allowed = held + (needed - held) // 3 + 4 * rows * features
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    try:
        run = fit(split, [batch] * 3, micro_batch="auto")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    found = int(run.callback_metrics["window/micro_batch_size"])
    with capsys.disabled():
        print(f"\nneeded {needed / 2**20:.0f} MiB, allowed {allowed / 2**20:.0f} MiB: micro-batches of {found} of {rows} rows")
    assert found < rows
    assert error(split, whole) < 1e-5  # float32


def test_peak_memory_is_that_of_one_micro_batch(capsys: Any) -> None:
    peaks = {}
    for number in (1, 2, 4, 16):
        batch = torch.randn(64 * number, 2048)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        fit(wide(2048), [batch] * 2, micro_batch=64)
        peaks[number] = torch.cuda.max_memory_allocated() - batch.numel() * 4
    with capsys.disabled():
        print("\npeak MiB by micro-batches of 64 rows, without the batch:", {n: round(p / 2**20, 1) for n, p in peaks.items()})
    assert peaks[16] <= 1.02 * peaks[2]


def test_no_micro_batch_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to the host inside a window raise; the one at its end is made after the last micro-batch."""

    class Watched(Language):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            if self.trainer.global_step > 3:  # the first windows are watched
                torch.cuda.set_sync_debug_mode("error")
            return super().training_step(batch, batch_idx)

    windows = import_module("lightning_accum.accumulation").Accumulation
    original = windows.close

    def close(self: Any, *args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return original(self, *args)

    monkeypatch.setattr(windows, "close", close)
    try:
        run = fit(Watched(), BATCHES, micro_batch=4, trim_padding=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.global_step == 2 * len(BATCHES)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("policy", [{"window": 4}, {"micro_batch": 4, "trim_padding": False}], ids=["window", "split"])
@pytest.mark.parametrize("is_whole", [False, True], ids=["network", "module"])
def test_compiled_modules_take_the_step_of_the_full_batch(mode: str, policy: dict[str, Any], is_whole: bool) -> None:
    def count_targets(batch: dict[str, Tensor]) -> Tensor:  # where training_step is compiled, its graph is hidden
        return (batch["labels"][:, 1:] != -100).sum()

    torch._dynamo.reset()
    rows, module, size = sentences(96), Language("adamw").cuda(), 4 if "window" in policy else 16
    batches = [{key: value.cuda() for key, value in pad(rows[i : i + 16]).items()} for i in range(0, 96, 16)]
    expected = train_by_hand(Language("adamw").cuda(), batches, 2)
    if not is_whole:
        module.net.compile(mode=mode)
    compiled = torch.compile(module, mode=mode) if is_whole else module
    run = fit(compiled, [pad(rows[i : i + size]) for i in range(0, 96, size)], weight=count_targets, **policy)
    print(f"{mode} {policy}: {error(module, expected):.1e}")
    assert run.global_step == 12
    assert error(module, expected) < 1e-9  # fused kernels have another order


@pytest.fixture
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(32, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + super().forward(hidden)


def blocks() -> nn.Module:
    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), *(Block() for _ in range(8)), *pooled)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("precision", [None, "64-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("rows", [16, 200])
def test_an_offloaded_step_is_that_of_the_whole_batch_to_the_bit(precision: Any, layout: Any, rows: int) -> None:
    """``benchmarks/gpu.py`` measures its time and its peak."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(6, rows, 3, 24, 24, generator=generator)
    batches = list(zip(data, torch.randint(0, 10, (6, rows), generator=generator), strict=True))
    whole, module = (Toy(classified, net=blocks).float().to(memory_format=layout) for _ in range(2))
    fit(whole, batches, "auto", precision)
    fit(module, batches, "accum", precision, micro_batch="offload", log=False)
    expected = whole.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
