"""Sharded strategies in forked processes, for tests: FSDP1 and FSDP2 run on the CPU over gloo."""

from collections import Counter
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher, _WorkerOutput
from support import Language, Scalar
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import profile

from lightning_accum import FSDPAccumulationStrategy, ModelParallelAccumulationStrategy

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    fully_shard = None

_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_sharding_on_cpu = pytest.mark.skipif(_VERSION < (2, 9), reason="needs a torch that shards on the CPU")


class _Launcher(_MultiProcessingLauncher):  # Lightning's own, which hands whole parameters back
    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> _WorkerOutput | None:
        state = whole_parameters(trainer.strategy.model)
        if trainer.global_rank == 0:
            torch.save(state, "parameters.pt")
            return _WorkerOutput(None, None, trainer.state, results, self.get_extra_results(trainer))
        return None

    def _recover_results_in_main_process(self, worker_output: _WorkerOutput, trainer: pl.Trainer) -> None:
        super()._recover_results_in_main_process(worker_output, trainer)
        trainer.whole = torch.load("parameters.pt")


def whole_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:  # by name, gathered from all ranks
    if any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
        with FullyShardedDataParallel.summon_full_params(module, writeback=False):
            return {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in module.named_parameters()}
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in module.named_parameters()}


class _Forked:
    def _configure_launcher(self) -> None:
        self._launcher = _Launcher(self, start_method="fork")


class ForkedFSDP2(_Forked, ModelParallelAccumulationStrategy):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.has_replicas = kwargs.get("sync") == "shard"


class ForkedFSDP1(_Forked, FSDPAccumulationStrategy):
    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        if any(isinstance(child, FullyShardedDataParallel) for child in model.modules()):
            return super()._setup_model(model)
        # as Lightning does, which has no device_id for a CPU
        options = {"mixed_precision": self.mixed_precision_config, **self.kwargs}
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


class DoublePrecision(FSDPPrecision):  # Lightning has FSDP1 in single precision at most
    def __init__(self) -> None:
        super().__init__("32-true")

    mixed_precision_config = None  # Lightning's reduces in float32

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def convert_input(self, data: Any) -> Any:
        return data


def fsdp2(data: int = 2, tensor: int = 1, **kwargs: Any) -> ForkedFSDP2:
    kwargs = {"timeout": timedelta(seconds=60), "save_distributed_checkpoint": False, **kwargs}
    return ForkedFSDP2(data_parallel_size=data, tensor_parallel_size=tensor, **kwargs)


def fsdp1(**kwargs: Any) -> ForkedFSDP1:
    return ForkedFSDP1(**{"timeout": timedelta(seconds=60), **kwargs})


def two_replicas(ranks: int) -> DeviceMesh:  # of shards: one on two ranks, two on four
    replicas = min(ranks, 2)
    return init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))


def shard(module: pl.LightningModule, parts: list[torch.nn.Module], **kwargs: Any) -> None:
    """Shard ``parts`` over the ranks of FSDP2; with another strategy, as in the reference on one process, do nothing."""
    if isinstance(module.trainer.strategy, ModelParallelAccumulationStrategy):
        mesh = module.device_mesh["data_parallel"]
        if getattr(module.trainer.strategy, "has_replicas", False):
            mesh = two_replicas(mesh.size())
        for part in parts:
            fully_shard(part, mesh=mesh, **kwargs)


def wrap_for_fsdp1(module: Language, **kind: Any) -> None:
    """Wrap the blocks and the net for FSDP1; with another strategy do nothing."""
    if isinstance(module.trainer.strategy, FSDPAccumulationStrategy):
        wrapped = partial(FullyShardedDataParallel, device_id=torch.device("cpu"), **kind)
        for i, block in enumerate(module.net.blocks):
            module.net.blocks[i] = wrapped(block)
        module.net = wrapped(module.net)


def cut_linear_layers(module: Language) -> None:  # over the ranks of tensor parallelism
    mesh = module.device_mesh["tensor_parallel"]
    for block in module.net.blocks if mesh.size() > 1 else ():
        parallelize_module(block, mesh, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()})


class ShardedLanguage(Language):  # the language model of the tests, cut for FSDP2, with or without tensor parallelism, or for FSDP1
    def __init__(self, optimizer: str = "sgd", reshard_after_forward: bool | None = None) -> None:
        super().__init__(optimizer)
        self.reshard_after_forward = reshard_after_forward

    def configure_model(self) -> None:
        if "auto_wrap_policy" not in getattr(self.trainer.strategy, "kwargs", {}):
            wrap_for_fsdp1(self, use_orig_params=True)
        if isinstance(self.trainer.strategy, ModelParallelAccumulationStrategy):
            cut_linear_layers(self)
        options = {} if self.reshard_after_forward is None else {"reshard_after_forward": self.reshard_after_forward}
        shard(self, [*self.net.blocks, self.net], **options)


class ShardedScalar(Scalar):  # one parameter, in a layer that is sharded: the gradient is the mean of x
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.w
        self.layer = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.zeros_(self.layer.weight)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, FSDPAccumulationStrategy):
            self.layer = FullyShardedDataParallel(self.layer, device_id=torch.device("cpu"), use_orig_params=True)
        shard(self, [self.layer])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(float("nan"))

    def loss(self, x: torch.Tensor) -> torch.Tensor | None:
        if x.isnan().any():
            return None
        return self.layer(x[:, None]).mean()


GATHER, SCATTER, REDUCE = "allgather", "reduce_scatter", "allreduce"


def collectives_in(profiled: profile) -> list[tuple[Counter[str], list[int]]]:
    """Of each micro-batch: how often each kind was asked for, and the sizes that gloo all-reduced.

    Gloo all-reduces to reduce-scatter, so the kinds are read one level above it; the sizes are not known there.
    """
    found: list[tuple[Counter[str], list[int]]] = []
    for event in sorted(profiled.events(), key=lambda event: event.time_range.start):
        if event.name == "next micro-batch":
            found.append((Counter(), []))
        elif event.name.startswith("c10d::"):
            found[-1][0][next((kind for kind in (GATHER, SCATTER, REDUCE) if kind in event.name), event.name)] += 1
        elif event.name == "gloo:all_reduce":
            found[-1][1].append(sum(torch.Size(shape).numel() for shape in event.input_shapes))
    return found


GROUPS = 3  # two blocks, and what is left
