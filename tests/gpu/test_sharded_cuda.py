"""Sharded modules, DDP and NCCL on GPUs: exactness, waiting for the device, peak memory. Skipped without CUDA.

pytest tests/gpu/test_sharded_cuda.py -s                                          # one GPU
torchrun --nproc_per_node 2 -m pytest tests/gpu/test_sharded_cuda.py -s           # as many as there are
"""

import os
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import support
import torch
from sharded import DoublePrecision, ShardedLanguage, shard, whole_parameters
from support import Language, Toy, pad, relative_error, sentences, train_by_hand
from torch import nn

import lightning_accum as accum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

RANKS = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
ROWS = sentences(101)


STRATEGIES: dict[str, Any] = {
    "ddp": accum.DDPAccumulationStrategy,
    "fsdp1": accum.FSDPAccumulationStrategy,
    "fsdp2": partial(accum.ModelParallelAccumulationStrategy, data_parallel_size=RANKS, tensor_parallel_size=1),
}


def fit(engine: str, sync: str, module: pl.LightningModule, batches: list[Any], window: int) -> pl.Trainer:
    arguments = {"strategy": STRATEGIES[engine](sync=sync), "plugins": [DoublePrecision()] if engine == "fsdp1" else []}
    arguments |= {"accelerator": "gpu", "devices": RANKS, "max_epochs": 2}
    return support.fit(module, batches, accum.GradientAccumulation(window), **arguments)


@pytest.mark.parametrize("sync", ["window", "micro_batch"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_a_window_equals_its_full_batch_over_nccl(engine: str, sync: str) -> None:
    def of_rank(batch: int, window: int) -> list[dict[str, torch.Tensor]]:
        """This rank's loader batches: windows of 32 rows over all ranks."""
        rank, batches = int(os.environ.get("RANK", "0")), []
        for start in range(0, len(ROWS), 32):
            own = ROWS[start : start + 32][rank::RANKS]
            batches += [pad(own[i : i + batch]) for i in range(0, batch * window, batch) if own[i : i + batch]]
        return batches

    class Module(ShardedLanguage):
        def configure_model(self) -> None:
            if engine != "fsdp1":  # which Lightning wraps whole on CUDA
                super().configure_model()

    module = Module("adamw")
    expected = train_by_hand(Language("adamw"), [pad(ROWS[i : i + 32]) for i in range(0, 101, 32)], 2)
    window = 8 // RANKS
    fit(engine, sync, module, of_rank(4, window), window)
    found = whole_parameters(module)
    error = relative_error([found[name].cpu() for name, _ in expected.named_parameters()], expected.parameters())
    print(f"{engine} {sync} on {RANKS}: {error:.1e}")
    assert error < 1e-11  # sums on a GPU have another order


class Deep(Toy):  # parameters that can be seen in memory: 16 layers of 4 MiB
    def __init__(self) -> None:
        layers = [nn.Linear(1024, 1024, bias=False) for _ in range(16)]
        super().__init__(lambda net, batch: net(batch).square().mean(), net=lambda: nn.Sequential(*layers))
        self.float()

    def configure_model(self) -> None:
        shard(self, [*self.net, self.net])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 4:  # buffers are there, and the first windows, which are watched, are over
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_sync_debug_mode("error" if batch_idx % 4 in (1, 2) else "default")

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("sync", ["window", "micro_batch"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_nobody_waits_for_the_device_inside_a_window(engine: str, sync: str) -> None:
    try:
        run = fit(engine, sync, Deep(), [torch.randn(64, 1024) for _ in range(12)], window=4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.global_step == 6  # torch would have raised at the first wait
    print(f"{engine} {sync} on {RANKS}: {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB at the peak")
