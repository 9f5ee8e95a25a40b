"""Lightning's strategies with windows: a few lines for each engine. Their names are in ``package.py``."""

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
