"""Gradient accumulation for PyTorch Lightning that is right: one window, one batch."""

from lightning_accum.callback import GradientAccumulation
from lightning_accum.noise.callback import GradientNoiseScale
from lightning_accum.samplers import SameOrderSampler
from lightning_accum.splitting.micro_batch import Tokens
from lightning_accum.strategies import (
    AccumulationStrategy,
    DDPAccumulationStrategy,
    FSDPAccumulationStrategy,
    ModelParallelAccumulationStrategy,
)
from lightning_accum.user_warnings import AccumulationWarning
from lightning_accum.verification import verify
from lightning_accum.weighing.counts import SampleCount, TokenCount

__version__ = "0.1.0"

__all__ = [
    "AccumulationStrategy",
    "AccumulationWarning",
    "DDPAccumulationStrategy",
    "FSDPAccumulationStrategy",
    "GradientAccumulation",
    "GradientNoiseScale",
    "ModelParallelAccumulationStrategy",
    "SameOrderSampler",
    "SampleCount",
    "TokenCount",
    "Tokens",
    "verify",
]
