"""What ``accumulate_dtype=torch.float32`` holds in memory, takes in time and is worth, under parameters in bfloat16.

A stack of linear layers is trained on one row at a time, so that gradients are nearly all that is allocated. Bytes are those that
torch's allocator for the CPU gave out, above what there was before the first window: at most inside the second window, and at
most at its end, where its gradients are normalised and the optimizer steps. The error is that of the sum of as many gradients of
one sign, against their sum in float64.

    python tests/benchmarks/accumulate_dtype.py --width 512 --layers 16 --window 256
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_accum import GradientAccumulation


class Stack(pl.LightningModule):
    """Linear layers, and a vector whose gradients are the numbers of its batches."""

    def __init__(self, width: int, layers: int, window: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.vector = nn.Parameter(torch.zeros(1000))
        generator = torch.Generator().manual_seed(1)
        self.numbers = (1 + torch.rand(1000, generator=generator)) * (0.99 + 0.02 * torch.rand(window, 1000, generator=generator))
        self.numbers = self.numbers.bfloat16()
        self.errors: list[float] = []
        self.marks: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        numbers = self.numbers[batch_idx % len(self.numbers)]
        return self.net(batch).sum() / 1.0 + (self.vector * numbers).sum() / 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.marks.append(time.time_ns() // 1000)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        expected = self.numbers.double().mean(0)
        assert self.vector.grad is not None
        self.errors.append(float((self.vector.grad.double() - expected).norm() / expected.norm()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(options: argparse.Namespace, dtype: torch.dtype | None, window: int, windows: int) -> Stack:
    """Train for some windows."""
    module = Stack(options.width, options.layers, window)
    batches: Any = DataLoader(torch.ones(window * windows, 1, options.width), batch_size=None)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    callback = GradientAccumulation(window, weight="equal", accumulate_dtype=dtype)
    trainer = pl.Trainer(accelerator="cpu", strategy="accum", precision="bf16-true", max_epochs=1, callbacks=[callback], **quiet)
    trainer.fit(module, batches)
    return module


def bytes_a_parameter(options: argparse.Namespace, dtype: torch.dtype | None, window: int = 4) -> tuple[float, float]:
    """Inside the second of two windows, and at its end."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        module = fit(options, dtype, window, 2)
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        trace = json.loads(Path(f"{folder}/trace.json").read_text())
    start = trace.get("baseTimeNanoseconds", 0) / 1000
    events = sorted((e["ts"] + start, e["args"]["Bytes"]) for e in trace["traceEvents"] if e["name"] == "[memory]")
    at_first, last = module.marks[0], module.marks[2 * window - 1]
    second = module.marks[window + 1]  # its first micro-batch began with the gradients of the window before
    now, before, inside, end = 0, None, 0, 0
    for at, change in events:
        if before is None and at >= at_first:
            before = now
        now += change
        if second <= at < last:
            inside = max(inside, now)
        elif at >= last:
            end = max(end, now)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return (inside - (before or 0)) / parameters, (end - (before or 0)) / parameters


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--window", type=int, default=256)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"{options.layers} layers of {options.width} x {options.width}, windows of {options.window}\n")
    print("| accumulate_dtype | bytes a parameter inside a window | at its end | ms a micro-batch | relative error |")
    print("| --- | --- | --- | --- | --- |")
    for dtype in (None, torch.float32):
        inside, end = bytes_a_parameter(options, dtype)
        fit(options, dtype, 4, 1)
        module = fit(options, dtype, options.window, 1)
        seconds = (module.marks[-1] - module.marks[0]) / 1e6 / (len(module.marks) - 1)
        print(f"| {dtype} | {inside:.2f} | {end:.2f} | {1000 * seconds:.2f} | {100 * module.errors[-1]:.3f}% |", flush=True)


if __name__ == "__main__":
    main()
