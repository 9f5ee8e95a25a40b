"""What accumulation holds on a rank where parameters are sharded (FSDP2), between the micro-batches of a window and at its peak.

A stack of linear layers of 105 MB is sharded over 2 and 4 processes and trained in windows of 4 loader batches: by Lightning's own
accumulation, which reduces the gradients at every micro-batch, and by this package with ``sync="micro_batch"`` and
``sync="window"``; on 4 processes also as two replicas of shards over 2, with ``sync="shard"`` too. Each layer is a unit of FSDP2,
resharded after its forward, or gathered until its backward (``fully_shard(reshard_after_forward=...)``); the first and the last are
left to the root, as embedding and head of a language model are, which FSDP2 never reshards after its forward. The rows are few, so
activations are small, and the optimizer has no state.

Bytes are of the rank that has the most, in the second window, when all that is made once has been made. After a micro-batch that is
not the last, storages are counted, each once:

shards      the sharded parameters
gathered    parameters that are whole on this rank, beside them
gradients   sharded ones, and those that wait for their reduction: whole ones, or shards that are not summed over replicas yet

buffers     of gathers and reductions that FSDP2 has not let go of

peak        the most that the process had in memory during the window, less what it had beside these when the window began: so with
            activations and all buffers. Linux tells; where there are as many CUDA devices as ranks, their allocator

Every line is measured in processes of its own.

    python tests/benchmarks/sharded_memory.py --features 1024 --layers 25
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_accum import GradientAccumulation, ModelParallelAccumulationStrategy
from lightning_accum.sync.fsdp2 import groups_of
from lightning_accum.sync.reached import partial_sum_of

WINDOW, ROWS = 4, 8
FORGET_PEAK = Path("/proc/self/clear_refs")  # of Linux


class Setting(NamedTuple):
    """One way to train; ``sync`` is None for Lightning's own accumulation."""

    sync: str | None
    do_reshard: bool
    replicas: int = 1

    def __str__(self) -> str:
        name = "Lightning" if self.sync is None else f'sync="{self.sync}"'
        return f"{f'{self.replicas} replicas, ' if self.replicas > 1 else ''}{name}, reshard_after_forward={self.do_reshard}"


def settings(ranks: int) -> list[Setting]:
    """All on so many processes."""
    whole = [Setting(sync, do_reshard) for do_reshard in (True, False) for sync in (None, "micro_batch", "window")]
    return whole + [Setting(sync, True, 2) for sync in (None, "micro_batch", "shard", "window") if ranks >= 4]


# --- what is held ---------------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """Bytes on this rank."""

    shards: int
    gathered: int
    gradients: int
    buffers: int


def held(module: nn.Module) -> Held:
    """Looks into FSDP2: whole parameters and their gradients are out of sight where the module shows the sharded ones."""
    groups = [group for unit in module.modules() if isinstance(unit, FSDPModule) for group in groups_of(unit)]
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    shards = [parameter.sharded_param for parameter in parameters]
    whole = [parameter._unsharded_param for parameter in parameters if hasattr(parameter, "_unsharded_param")]
    waiting = [parameter.unsharded_accumulated_grad for parameter in parameters]  # where they are reduced in another type
    waiting += [partial_sum_of(group) for group in groups]
    gathers = [group._all_gather_result.all_gather_output for group in groups if group._all_gather_result is not None]
    reductions = [state for group in groups for state in getattr(group.comm_ctx, "reduce_scatter_states", ())]
    gradients = _bytes([*(parameter.grad for parameter in (*shards, *whole)), *waiting])
    return Held(_bytes(shards), _bytes(whole), gradients, _bytes([*gathers, *(state.reduce_scatter_input for state in reductions)]))


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None]
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in own}.values())


def _resident(name: str) -> int:
    """Bytes that Linux says this process has in memory: VmRSS now, VmHWM at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class Meters(Callback):
    """Reads the second window."""

    def __init__(self) -> None:
        self.between: list[Held] = []
        """After each micro-batch but the last."""
        self.peak = 0
        """Bytes; 0 where nothing tells."""
        self._others = 0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Tensor, batch_idx: int) -> None:
        if batch_idx != WINDOW:
            return
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif FORGET_PEAK.exists():
            time.sleep(0.2)  # gloo's threads let go of what they have sent
            self._others = _resident("VmRSS") - sum(held(pl_module))
            FORGET_PEAK.write_text("5")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        if WINDOW <= batch_idx < 2 * WINDOW - 1:
            self.between.append(held(pl_module))
        if batch_idx != 2 * WINDOW - 1:
            return
        if pl_module.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated()
        elif FORGET_PEAK.exists():
            self.peak = _resident("VmHWM") - self._others


# --- what is trained ------------------------------------------------------------------------------------------------------


class Stack(pl.LightningModule):
    """Linear layers that are sharded. It knows nothing of accumulation."""

    def __init__(self, features: int, layers: int, do_reshard: bool, replicas: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(features, features, bias=False), nn.GELU()) for _ in range(layers)))
        self._do_reshard, self._replicas = do_reshard, replicas

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        if self._replicas > 1:
            sizes = (self._replicas, mesh.size() // self._replicas)
            mesh = init_device_mesh(mesh.device_type, sizes, mesh_dim_names=("replicate", "shard"))
        for layer in self.net[1:-1]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=self._do_reshard)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Batches:
    """A loader of two windows."""

    def __init__(self, features: int) -> None:
        self._features = features

    def __len__(self) -> int:
        return 2 * WINDOW

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(len(self)):
            yield torch.ones(ROWS, self._features)


# --- how it is measured ---------------------------------------------------------------------------------------------------


def measure(rank: int, ranks: int, setting: Setting, features: int, layers: int, folder: str) -> None:
    """One of the processes. Leaves what it found in a file."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    is_cuda = torch.cuda.device_count() >= ranks
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("nccl" if is_cuda else "gloo", init_method=store, rank=rank, world_size=ranks)
    mesh, meters = {"data_parallel_size": ranks, "tensor_parallel_size": 1}, Meters()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    is_ours = setting.sync is not None
    trainer = pl.Trainer(
        accelerator="gpu" if is_cuda else "cpu",
        devices=ranks,
        strategy=ModelParallelAccumulationStrategy(sync=setting.sync, **mesh) if is_ours else ModelParallelStrategy(**mesh),
        plugins=[TorchElasticEnvironment()],  # the processes are there
        accumulate_grad_batches=1 if is_ours else WINDOW,
        callbacks=[GradientAccumulation(WINDOW), meters] if is_ours else [meters],
        max_epochs=1,
        use_distributed_sampler=False,
        **quiet,
    )
    trainer.fit(Stack(features, layers, setting.do_reshard, setting.replicas), Batches(features))
    most = {name: max(getattr(found, name) for found in meters.between) for name in Held._fields}
    Path(folder, f"{rank}.json").write_text(json.dumps({**most, "peak": meters.peak}))
    del trainer
    gc.collect()  # it holds process groups
    torch.distributed.destroy_process_group()


def most_of_any_rank(ranks: int, setting: Setting, features: int, layers: int) -> dict[str, int]:
    """Bytes by what is held, from processes that do nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (ranks, setting, features, layers, folder), nprocs=ranks)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    return {name: max(rank[name] for rank in found) for name in found[0]}


def table(measured: dict[Setting, dict[str, int]], model: int, ranks: int) -> str:
    """Bytes, and how many times what the model's parameters take."""
    columns = (*Held._fields, "peak")
    lines = [f"{f'{ranks} ranks':60}" + "".join(f"{column:>21}" for column in columns)]
    for setting, found in measured.items():
        numbers = (f"{found[name]:,d} ({found[name] / model:.2f})" for name in columns)
        lines.append(f"{setting!s:60}" + "".join(f"{number:>21}" for number in numbers))
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, default=1024, help="of each layer (default: 1024)")
    parser.add_argument("--layers", type=int, default=25, help="of features x features (default: 25)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes (default: 2 4)")
    arguments = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # for the processes: what tensors took goes back to the system at once
    features, layers = arguments.features, arguments.layers
    model = layers * features**2 * 4
    print(
        f"{layers} layers of {features} x {features}, {model:,d} bytes; (times that). Windows of {WINDOW} micro-batches of {ROWS}"
        f" rows. Lightning {pl.__version__}, torch {torch.__version__}"
    )
    for ranks in arguments.ranks:
        measured = {setting: most_of_any_rank(ranks, setting, features, layers) for setting in settings(ranks)}
        print(table(measured, model, ranks), flush=True)


if __name__ == "__main__":
    main()
