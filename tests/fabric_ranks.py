"""Two ranks of Lightning Fabric, in processes that are forked."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from torch import nn
from torch.distributed.fsdp import fully_shard


class ForkedFSDP2(ModelParallelStrategy):
    def _configure_launcher(self) -> None:
        self._launcher = _MultiProcessingLauncher(self, start_method="fork")


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh["data_parallel"])
    return model


def on_two(
    run: Callable[[Fabric], Any], strategy: str = "ddp", shard: Callable[[Any, Any], nn.Module] = sharded, **kwargs: Any
) -> Any:
    """What ``run`` returns on the first of two ranks."""

    def to_file(fabric: Fabric) -> None:
        found = run(fabric)
        if fabric.global_rank == 0:
            torch.save(found, "found.pt")

    timeout = timedelta(seconds=60)
    if strategy == "ddp":
        chosen = DDPStrategy(start_method="fork", timeout=timeout, **kwargs)
    else:
        chosen = ForkedFSDP2(parallelize_fn=shard, timeout=timeout, data_parallel_size=2, tensor_parallel_size=1)
    Fabric(accelerator="cpu", devices=2, strategy=chosen).launch(to_file)
    return torch.load("found.pt")
