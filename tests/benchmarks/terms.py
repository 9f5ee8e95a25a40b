"""How far the gradient of a window is from its full batch's, for a loss of terms with different denominators.

A small language model also predicts a score of each sentence: ``cross_entropy + c * mse``, a mean over tokens and one over samples,
of sentences with log-normal lengths and scores that go with them. The step of one batch in micro-batches of 4 rows, in float64.

    python tests/benchmarks/terms.py --batches 5
"""

from __future__ import annotations

from typing import Any

import torch
from side_by_side import command_line, fit, show
from support import loader, relative_error, train_by_hand
from torch import Tensor

from lightning_accum import SampleCount, TokenCount

MICRO_BATCH = 4


def step(coefficient: float, batches: list[Any], **policy: Any) -> list[Tensor]:
    """What one optimizer step changes: of the full batch, without a policy."""
    from rated import Rated

    class WithCoefficient(Rated):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            cross_entropy, error = self.terms(batch)
            return cross_entropy + coefficient * error

    module = WithCoefficient()
    if policy:
        fit(module, loader(batches), **policy)
    else:
        train_by_hand(module, batches, 1)
    return [after - before for after, before in zip(module.parameters(), WithCoefficient().parameters(), strict=True)]


def main(batches: int = 5, rows: tuple[int, ...] = (64, 256)) -> None:
    """Print the mean over the batches."""
    from rated import rated, rows_of

    table = []
    for number in rows:
        for coefficient in (1.0, 0.1):
            for order in ("as they come", "sorted by length"):
                errors = []
                for batch in rated(batches, number):
                    if order == "sorted by length":
                        batch = rows_of(batch, (batch["labels"] != -100).sum(1).argsort(descending=True))
                    parts = [rows_of(batch, slice(start, start + MICRO_BATCH)) for start in range(0, number, MICRO_BATCH)]
                    found = (
                        step(coefficient, parts, n=len(parts)),
                        step(coefficient, parts, window=len(parts)),
                        step(coefficient, [batch], micro_batch=MICRO_BATCH, weight=[TokenCount(), SampleCount()]),
                    )
                    full = step(coefficient, [batch])
                    errors.append([relative_error(one, full) for one in found])
                means = torch.tensor(errors).mean(0).tolist()
                table.append([number, order, coefficient, *(f"{mean:.2g}" for mean in means)])
    show(["rows", "order", "coefficient", "Lightning", 'weight="auto"', "one for each"], table)


if __name__ == "__main__":
    command_line(main)
