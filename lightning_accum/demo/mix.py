"""What the demo compares: one global batch, cut in different ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

GLOBAL_BATCH = 32
SAMPLES = 101
"""Three windows and a tail of 5 samples in an epoch, which two ranks share as 51 and 50, and four as 26 and three times 25."""
LONGEST = 256
"""Bytes at which a docstring is cut."""


@dataclass(frozen=True)
class Mix:
    """One training run.

    Attributes:
        engine: who accumulates.
        ranks: processes.
        window: loader batches that a rank contributes to an optimizer step.
        batch: samples in a loader batch.
        micro_batch: samples in each of the parts that a loader batch is split into; None where it is not split.
        is_sharded: whether the model is sharded over the ranks by FSDP2, rather than replicated by DDP.
    """

    engine: Literal["full batch", "Lightning", "lightning_accum"]
    ranks: int
    window: int
    batch: int
    micro_batch: int | None = None
    is_sharded: bool = False

    @property
    def parallelism(self) -> Literal["one process", "DDP", "FSDP2"]:
        """What keeps the ranks at one model."""
        return "FSDP2" if self.is_sharded else "DDP" if self.ranks > 1 else "one process"

    @property
    def shape(self) -> str:
        """Ranks x window x batch, and what keeps the ranks at one model: ``"2 x 4 x 4 DDP"``, ``"1 x 1 x 32/4"``."""
        split = "" if self.micro_batch is None else f"/{self.micro_batch}"
        return f"{self.ranks} x {self.window} x {self.batch}{split}" + (f" {self.parallelism}" if self.ranks > 1 else "")

    def steps(self, samples: int, epochs: int) -> int:
        """Optimizer steps in a training that steps on its tails as well."""
        return epochs * -(-samples // (self.ranks * self.window * self.batch))

    def __str__(self) -> str:
        return f"{self.engine} {self.shape}"


FULL_BATCH = Mix("full batch", ranks=1, window=1, batch=GLOBAL_BATCH)
MIXES = (
    FULL_BATCH,
    Mix("Lightning", ranks=1, window=8, batch=4),
    Mix("Lightning", ranks=2, window=4, batch=4),
    Mix("lightning_accum", ranks=1, window=8, batch=4),
    Mix("lightning_accum", ranks=1, window=32, batch=1),
    Mix("lightning_accum", ranks=1, window=1, batch=32, micro_batch=4),
    Mix("lightning_accum", ranks=2, window=4, batch=4),
    Mix("lightning_accum", ranks=2, window=16, batch=1),
    Mix("lightning_accum", ranks=4, window=8, batch=1),
    Mix("lightning_accum", ranks=2, window=4, batch=4, is_sharded=True),
    Mix("lightning_accum", ranks=4, window=2, batch=4, is_sharded=True),
)

SHARDS_ON_CPU_SINCE = "2.9"
"""The torch from which FSDP2 runs without a GPU."""


def can_run(mix: Mix) -> bool:
    """Whether the installed torch has what the mix needs."""
    return not mix.is_sharded or torch.torch_version.TorchVersion(torch.__version__) >= SHARDS_ON_CPU_SINCE
