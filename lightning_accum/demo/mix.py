"""What the demo compares: one global batch, cut in different ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Engine: TypeAlias = Literal["full batch", "Lightning", "lightning_accum"]

GLOBAL_BATCH = 32
SAMPLES = 296
"""Nine windows and a tail of 8 samples in an epoch, which every mix below shares out evenly."""
LONGEST = 512
"""Bytes at which a docstring is cut."""


@dataclass(frozen=True)
class Mix:
    """One training run.

    Attributes:
        engine: who accumulates.
        ranks: processes.
        window: loader batches that a rank contributes to an optimizer step.
        batch: samples in a loader batch.
    """

    engine: Engine
    ranks: int
    window: int
    batch: int

    @property
    def shape(self) -> str:
        """Ranks x window x batch.

        Example:
            >>> Mix("lightning_accum", ranks=2, window=4, batch=4).shape
            '2 x 4 x 4'
        """
        return f"{self.ranks} x {self.window} x {self.batch}"

    def steps(self, samples: int, epochs: int) -> int:
        """Optimizer steps in a training that steps on its tails as well."""
        return epochs * -(-samples // (self.ranks * self.window * self.batch))


FULL_BATCH = Mix("full batch", ranks=1, window=1, batch=GLOBAL_BATCH)
MIXES = (
    FULL_BATCH,
    Mix("Lightning", ranks=1, window=8, batch=4),
    Mix("Lightning", ranks=2, window=4, batch=4),
    Mix("lightning_accum", ranks=1, window=8, batch=4),
    Mix("lightning_accum", ranks=1, window=16, batch=2),
    Mix("lightning_accum", ranks=2, window=4, batch=4),
    Mix("lightning_accum", ranks=2, window=8, batch=2),
)
