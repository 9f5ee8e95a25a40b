"""Lightning's strategies with windows: a few lines for each engine."""

from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_accum.strategies.ddp import DDPAccumulationStrategy
from lightning_accum.strategies.fsdp import FSDPAccumulationStrategy
from lightning_accum.strategies.model_parallel import ModelParallelAccumulationStrategy
from lightning_accum.strategies.one_device import AccumulationStrategy

__all__ = [
    "AccumulationStrategy",
    "DDPAccumulationStrategy",
    "FSDPAccumulationStrategy",
    "ModelParallelAccumulationStrategy",
]


def register() -> None:
    """Add the strategies to Lightning's registry, under the names of Lightning's own with ``accum`` in front."""
    entries: list[tuple[str, type[Strategy], dict[str, Any]]] = [
        ("accum", AccumulationStrategy, {}),
        ("accum_fsdp", FSDPAccumulationStrategy, {}),
        ("accum_fsdp_cpu_offload", FSDPAccumulationStrategy, {"cpu_offload": True}),
        ("accum_model_parallel", ModelParallelAccumulationStrategy, {}),
    ]
    for launcher, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
        entries.append((f"accum_ddp{launcher}", DDPAccumulationStrategy, {"start_method": start_method}))
        for find_unused in (True, False):
            name = f"accum_ddp{launcher}_find_unused_parameters_{str(find_unused).lower()}"
            arguments = {"start_method": start_method, "find_unused_parameters": find_unused}
            entries.append((name, DDPAccumulationStrategy, arguments))
    for name, strategy, arguments in entries:
        StrategyRegistry.register(name, strategy, description=strategy.__name__, override=True, **arguments)


register()
