"""What accumulation costs over ranks: tokens per second of two processes, beside Lightning's own accumulation.

Two processes train a small causal transformer in windows of 8 loader batches, over DistributedDataParallel and over ``fully_shard``
(FSDP2: each block, and the rest), on the CPU over gloo. The micro-batches are small, so that communication shows. Lightning's own
accumulation reduces the gradients once a window over DDP, and at every micro-batch over FSDP2.

The processes are started once and run every side in turn, so all share the state of the machine. Every fit has a process group
of its own, the same batches in the same order, the same number of optimizer steps (checked), and no logger, progress bar or
checkpoint. The first windows do not count: DDP rebuilds its buckets there, and FSDP2 finds its root. Both ranks wait for each other
before the first batch that counts, and after the last window. What is reported is the tokens of both ranks per second of the slower
one, or, with ``--clock cpu``, per second that the two have computed in all: medians over the rounds, their ratios, and quartiles of
the ratio taken in each round.

    python tests/benchmarks/ranks.py --rounds 10 --windows 4
    python tests/benchmarks/ranks.py --rounds 20 --windows 20 --features 32 --layers 2 --length 16
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from lightning_accum import DDPAccumulationStrategy, GradientAccumulation, ModelParallelAccumulationStrategy

RANKS, WINDOW, WARM_UP, HEADS, VOCABULARY, IGNORED = 2, 8, 2, 4, 1000, -100

Batch = dict[str, Tensor]

CLOCKS = {"wall": (time.perf_counter, dist.ReduceOp.MAX), "cpu": (time.process_time, dist.ReduceOp.SUM)}
"""By name: seconds of one process, and how both make one number."""


class Size(NamedTuple):
    """What is trained, and for how long; the command line explains the fields."""

    features: int
    layers: int
    length: int
    samples: int
    windows: int
    keep_gathered: bool


# --- what is trained ------------------------------------------------------------------------------------------------------


class TimedBatches:
    """A loader of the batches of one rank. Before the first that counts and after the last, the ranks meet and note the time.

    The last batch is drawn only to see the end of the window before it.
    """

    def __init__(self, size: Size, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self._distinct = [_batch(size, generator) for _ in range(2 * WINDOW)]
        self._marks = (WARM_UP * WINDOW, (WARM_UP + size.windows) * WINDOW)
        self._times: list[dict[str, float]] = []

    def __len__(self) -> int:
        return self._marks[1] + 1

    def __iter__(self) -> Iterator[Batch]:
        self._times = []
        for index in range(len(self)):
            if index in self._marks:
                dist.barrier()
                self._times.append({name: clock() for name, (clock, _) in CLOCKS.items()})
            yield self._distinct[index % len(self._distinct)]

    def seconds(self, clock: str) -> float:
        """What the batches that count took in the last pass, on both ranks. Called on both."""
        start, end = self._times
        seconds = torch.tensor(end[clock] - start[clock], dtype=torch.float64)
        dist.all_reduce(seconds, CLOCKS[clock][1])
        return seconds.item()


def _batch(size: Size, generator: torch.Generator) -> Batch:
    """Whole sequences. The labels of a prompt are ignored, so micro-batches weigh differently."""
    inputs = torch.randint(VOCABULARY, (size.samples, size.length), generator=generator)
    prompts = torch.randint(size.length // 2, (size.samples, 1), generator=generator)
    return {"input_ids": inputs, "labels": inputs.masked_fill(torch.arange(size.length) < prompts, IGNORED)}


class Transformer(nn.Module):
    """Tokens to logits, causally."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.features)
        self.positions = nn.Embedding(size.length, size.features)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(size.features, HEADS, 4 * size.features, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(size.layers)
        )
        self.head = nn.Linear(size.features, VOCABULARY, bias=False)
        self.register_buffer("mask", torch.full((size.length, size.length), -math.inf).triu(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        return self.head(hidden)


class Language(pl.LightningModule):
    """A language model that knows nothing of accumulation. Where there is a mesh, it shards itself."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Transformer(size)
        self._keep_gathered = size.keep_gathered

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh["data_parallel"]
            for block in self.net.blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=not self._keep_gathered)
            fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.net(batch["input_ids"])
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


# --- what is compared -----------------------------------------------------------------------------------------------------


class Side(NamedTuple):
    """A strategy, and whether this package logs; None for Lightning's own accumulation."""

    strategy: Callable[[], Strategy]
    log: bool | None = None


_MESH = {"data_parallel_size": RANKS, "tensor_parallel_size": 1}

SIDES: dict[str, dict[str, Side]] = {  # by engine; Lightning's own first
    "ddp": {
        "ddp, Lightning": Side(DDPStrategy),
        "ddp, log=False": Side(DDPAccumulationStrategy, log=False),
        "ddp, log=True": Side(DDPAccumulationStrategy, log=True),
    },
    "fsdp2": {
        "fsdp2, Lightning": Side(partial(ModelParallelStrategy, **_MESH)),
        'fsdp2, sync="window", log=False': Side(partial(ModelParallelAccumulationStrategy, **_MESH), log=False),
        'fsdp2, sync="window", log=True': Side(partial(ModelParallelAccumulationStrategy, **_MESH), log=True),
        'fsdp2, sync="micro_batch", log=False': Side(
            partial(ModelParallelAccumulationStrategy, sync="micro_batch", **_MESH), log=False
        ),
    },
}


def train(side: Side, size: Size, batches: TimedBatches) -> None:
    """A Trainer with nothing else in it."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=side.strategy(),
        plugins=[TorchElasticEnvironment()],  # the processes are there
        accumulate_grad_batches=WINDOW if side.log is None else 1,
        callbacks=None if side.log is None else [GradientAccumulation(WINDOW, log=side.log)],
        max_epochs=1,
        use_distributed_sampler=False,
        **quiet,
    )
    trainer.fit(Language(size), batches)
    expected = WARM_UP + size.windows + 1
    if trainer.global_step != expected:
        raise AssertionError(f"{trainer.global_step} optimizer steps instead of {expected}")


def measure(rank: int, engines: list[str], rounds: int, size: Size, clocks: list[str], folder: str) -> None:
    """One of the processes: tokens per second of every side, one number a round. The first prints them."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), GROUP_RANK="0")
    torch.set_num_threads(1)
    _be_quiet()
    batches = TimedBatches(size, rank)
    tokens = RANKS * size.windows * WINDOW * size.samples * size.length
    sides = {name: side for engine in engines for name, side in SIDES[engine].items()}
    measured: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in sides} for clock in clocks}
    for round_ in range(-1, rounds):  # the first round is a warm-up too: imports, caches, the allocator
        for name in sides if round_ % 2 else reversed(sides):
            store = f"file://{folder}/{round_}-{list(sides).index(name)}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
            train(sides[name], size, batches)
            speeds = {clock: tokens / batches.seconds(clock) for clock in clocks}
            if round_ >= 0:
                for clock, speed in speeds.items():
                    measured[clock][name].append(speed)
            gc.collect()  # the Trainer, before the groups that it holds
            dist.destroy_process_group()
    if rank == 0:
        for clock, found in measured.items():
            for engine in engines:
                print(table({name: found[name] for name in SIDES[engine]}, clock))


def table(measured: dict[str, list[float]], clock: str) -> str:
    """The medians and their quartiles, and both for the ratio to the first side: of the medians, and taken in each round."""
    lines = [f"{'':38}{f'tokens per second, {clock}':>28}{'/ Lightning':>13}{'round by round':>27}"]
    lightning = next(iter(measured.values()))
    for name, speeds in measured.items():
        slow, median, quick = _quartiles(speeds)
        low, middle, high = _quartiles([own / other for own, other in zip(speeds, lightning, strict=True)])
        speed = f"{median:.0f} ({slow:.0f}..{quick:.0f})"
        by_round = "" if speeds is lightning else f"{middle:.3f} ({low:.3f}..{high:.3f})"
        lines.append(f"{name:38}{speed:>28}{median / statistics.median(lightning):13.3f}{by_round:>27}")
    return "\n".join(lines)


def _quartiles(numbers: list[float]) -> list[float]:
    return statistics.quantiles(numbers, n=4) if len(numbers) > 1 else numbers * 3


def _be_quiet() -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=tuple(SIDES), default=list(SIDES), help="what is compared (default: both)")
    parser.add_argument("--rounds", type=int, default=10, help="how often every side is measured (default: 10)")
    parser.add_argument("--windows", type=int, default=4, help="windows that are timed in a round (default: 4)")
    parser.add_argument("--features", type=int, default=256, help="of the transformer (default: 256)")
    parser.add_argument("--layers", type=int, default=4, help="of the transformer (default: 4)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence (default: 64)")
    parser.add_argument("--samples", type=int, default=4, help="sequences of a micro-batch (default: 4)")
    parser.add_argument("--keep-gathered", action="store_true", help="fully_shard(reshard_after_forward=False)")
    parser.add_argument(
        "--clock",
        nargs="+",
        choices=tuple(CLOCKS),
        default=["wall"],
        help="wall: time that passed (default); cpu: time that both processes computed, steadier where others do too; or both",
    )
    arguments = parser.parse_args()
    a = arguments
    size = Size(a.features, a.layers, a.length, a.samples, a.windows, a.keep_gathered)
    print(
        f"{a.rounds} rounds of {a.windows} windows of {WINDOW} micro-batches of {a.samples} x {a.length} tokens on each of {RANKS}"
        f" ranks, {a.features} features, {a.layers} layers, Lightning {pl.__version__}, torch {torch.__version__}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (a.engines, a.rounds, size, a.clock, folder), nprocs=RANKS)


if __name__ == "__main__":
    main()
