"""What accumulation costs over ranks: tokens per second of two processes, beside Lightning's own accumulation.

Two processes train a small causal transformer in windows of 8 loader batches, over DistributedDataParallel and over ``fully_shard``
(FSDP2: each block, and the rest), on the CPU over gloo. The micro-batches are small, so that communication shows. They are started
once and run every side in turn; every fit has a process group of its own, the same batches and the same number of optimizer steps
(checked). The first windows do not count: DDP rebuilds its buckets there, and FSDP2 finds its root. What is reported is the tokens
of both ranks per second of the slower one, or, with ``--clock cpu``, per second that the two have computed in all.

    python tests/benchmarks/ranks.py --rounds 10 --windows 4
    python tests/benchmarks/ranks.py --rounds 20 --windows 20 --features 32 --layers 2 --length 16
"""

import gc
import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from side_by_side import CLOCKS, GPT, IGNORED, Module, TimedBatches, be_quiet, command_line, compare, interleaved
from support import language_loss, trainer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_accum import DDPAccumulationStrategy, GradientAccumulation, ModelParallelAccumulationStrategy

RANKS, WINDOW, WARM_UP, VOCABULARY = 2, 8, 2, 1000
OF_BOTH = {"wall": dist.ReduceOp.MAX, "cpu": dist.ReduceOp.SUM}
MESH = {"data_parallel_size": RANKS, "tensor_parallel_size": 1}
FSDP2 = partial(ModelParallelAccumulationStrategy, **MESH)
SIDES: dict[str, dict[str, tuple[Callable[..., Any], bool | None]]] = {  # whether it logs; None for Lightning's own accumulation
    "ddp": {
        "Lightning": (DDPStrategy, None),
        "log=False": (DDPAccumulationStrategy, False),
    },
    "fsdp2": {
        "Lightning": (partial(ModelParallelStrategy, **MESH), None),
        'sync="window", log=False': (FSDP2, False),
        'sync="micro_batch", log=False': (partial(FSDP2, sync="micro_batch"), False),
    },
}


def batch_of(samples: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Whole sequences. The labels of a prompt are ignored, so micro-batches weigh differently."""
    inputs = torch.randint(VOCABULARY, (samples, length), generator=generator)
    prompts = torch.randint(length // 2, (samples, 1), generator=generator)
    return {"input_ids": inputs, "labels": inputs.masked_fill(torch.arange(length) < prompts, IGNORED)}


def loss_of(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return language_loss(net(batch["input_ids"]), batch["labels"])


class Sharded(Module):  # where there is a mesh, it shards itself
    keeps_gathered = False

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh["data_parallel"]
            for block in self.net.blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=not self.keeps_gathered)
            fully_shard(self.net, mesh=mesh)


def measure(rank: int, folder: str, options: dict[str, Any]) -> None:  # one of the processes. The first prints the table.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), GROUP_RANK="0")
    be_quiet()
    generator, clock, samples, length = torch.Generator().manual_seed(rank), options["clock"], options["samples"], options["length"]
    Sharded.keeps_gathered = options["keep_gathered"]

    def read() -> float:
        dist.barrier()
        return CLOCKS[clock]()

    distinct = [batch_of(samples, length, generator) for _ in range(2 * WINDOW)]
    batches = TimedBatches(distinct, WARM_UP * WINDOW, options["windows"] * WINDOW, read)
    fits = 0

    def train(strategy: Callable[..., Any], log: bool | None) -> float:
        nonlocal fits
        fits += 1
        dist.init_process_group("gloo", init_method=f"file://{folder}/{fits}", rank=rank, world_size=RANKS)
        ours = log is not None
        run = trainer(
            strategy(),
            devices=RANKS,
            plugins=[TorchElasticEnvironment()],  # the processes are there
            accumulate_grad_batches=1 if ours else WINDOW,
            callbacks=[GradientAccumulation(WINDOW, log=log)] if ours else [],
        )
        run.fit(Sharded(GPT(VOCABULARY, options["features"], options["layers"], length), loss_of), batches)
        expected = WARM_UP + options["windows"] + 1
        if run.global_step != expected:
            raise AssertionError(f"{run.global_step} optimizer steps instead of {expected}")
        start, end = batches.readings
        seconds = torch.tensor(end - start, dtype=torch.float64)
        dist.all_reduce(seconds, OF_BOTH[clock])
        del run
        gc.collect()  # the Trainer, before the groups that it holds
        dist.destroy_process_group()
        return RANKS * batches.counted * samples * length / seconds.item()

    measured = {}
    for engine in options["engines"]:
        measured[engine] = interleaved({name: partial(train, *side) for name, side in SIDES[engine].items()}, options["rounds"])
    if rank == 0:
        compare(measured, "tokens per second", "Lightning")


def main(
    rounds: int = 10, windows: int = 4, features: int = 256, layers: int = 4, length: int = 64, samples: int = 4,
    keep_gathered: bool = False, engines: tuple[str, ...] = ("ddp", "fsdp2"), clock: str = "wall",
) -> None:  # fmt: skip
    """Start the processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (folder, dict(locals())), nprocs=RANKS)


if __name__ == "__main__":
    command_line(main)
