"""The public names of the package, loaded when the first is used; see ``package.py``."""

from lightning_accum.errors import (
    AccumulationError,
    DoesNotAddUpError,
    RowWiseError,
    SeamError,
    UnreadableLossError,
    UnsplittableBatchError,
)
from lightning_accum.policy import Tokens
from lightning_accum.samplers import BalancedBatchSampler, SameOrderSampler
from lightning_accum.splitting.few_rows import split_lists
from lightning_accum.trainer.callback import GradientAccumulation
from lightning_accum.trainer.engines import *  # noqa: F403
from lightning_accum.trainer.engines import __all__ as strategies
from lightning_accum.trainer.model_parallel import ModelParallelAccumulationStrategy
from lightning_accum.trainer.noise import GradientNoiseScale
from lightning_accum.user_warnings import AccumulationWarning
from lightning_accum.verification.run import verify
from lightning_accum.weighing.counts import SampleCount, TokenCount

__all__ = [
    "AccumulationError",
    "AccumulationWarning",
    "BalancedBatchSampler",
    "DoesNotAddUpError",
    "GradientAccumulation",
    "GradientNoiseScale",
    "ModelParallelAccumulationStrategy",
    "RowWiseError",
    "SameOrderSampler",
    "SampleCount",
    "SeamError",
    "TokenCount",
    "Tokens",
    "UnreadableLossError",
    "UnsplittableBatchError",
    "split_lists",
    "verify",
]
__all__ += strategies
