"""How far the gradient of a window is from its full batch's, for a loss of terms with different denominators.

A small language model also predicts a score of each sentence: ``cross_entropy + c * mse``, a mean over tokens and one over samples,
of sentences with log-normal lengths and scores that go with them. The step of one batch in micro-batches of 4 rows, in float64.

    python tests/benchmarks/terms.py
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rated import EACH, Rated, rated, rows_of
from support import loader, relative_error, train_by_hand, trainer
from torch import Tensor

from lightning_accum import GradientAccumulation

BATCHES, MICRO_BATCH = 5, 4


class WithCoefficient(Rated):
    def __init__(self, coefficient: float) -> None:
        super().__init__()
        self.coefficient = coefficient

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        cross_entropy, error = self.terms(batch)
        return cross_entropy + self.coefficient * error


def step(coefficient: float, batches: list[Any], **kwargs: Any) -> list[Tensor]:
    """What one optimizer step changes."""
    module = WithCoefficient(coefficient)
    if kwargs:
        trainer(**kwargs).fit(module, loader(batches))
    else:
        train_by_hand(module, batches, 1)
    return [a - b for a, b in zip(module.parameters(), WithCoefficient(coefficient).parameters(), strict=True)]


def main() -> None:
    """Print a table."""
    warnings.filterwarnings("ignore")
    print(f"{'':42}{'Lightning':>12}{'weight=auto':>14}{'one for each':>14}")
    for rows in (64, 256):
        for coefficient in (1.0, 0.1):
            for is_sorted in (False, True):
                errors = []
                for batch in rated(BATCHES, rows):
                    order = torch.arange(rows)
                    if is_sorted:
                        order = (batch["labels"] != -100).sum(1).argsort(descending=True)
                    batch = rows_of(batch, order)
                    parts = [rows_of(batch, slice(i, i + MICRO_BATCH)) for i in range(0, rows, MICRO_BATCH)]
                    full = step(coefficient, [batch])
                    ways: list[tuple[list[Any], dict[str, Any]]] = [
                        (parts, {"strategy": "auto", "accumulate_grad_batches": len(parts)}),
                        (parts, {"accumulate_grad_batches": len(parts)}),
                        ([batch], {"callbacks": [GradientAccumulation(micro_batch=MICRO_BATCH, weight=EACH)]}),
                    ]
                    errors.append([relative_error(step(coefficient, way, **kwargs), full) for way, kwargs in ways])
                mean = torch.tensor(errors).mean(0).tolist()
                order_in_words = "sorted by length" if is_sorted else "as they come"
                what = f"{rows:4} rows, {order_in_words:16}, coefficient {coefficient:3}"
                print(f"{what:42}{mean[0]:12.3f}{mean[1]:14.3f}{mean[2]:14.1e}")


if __name__ == "__main__":
    main()
