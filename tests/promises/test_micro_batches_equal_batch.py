"""The promise for split batches: parameters equal those of the unsplit module under plain Lightning on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support import Language, ddp, loader, pad, relative_error, sentences, trainer

from lightning_accum import GradientAccumulation, Tokens

EPOCHS, BATCH = 3, 16
ROWS = sentences(101)  # six batches and one of 5 rows


def batches_of(rows: Sequence[torch.Tensor], size: int = BATCH) -> list[dict[str, torch.Tensor]]:
    return [pad(rows[i : i + size]) for i in range(0, len(rows), size)]


class Recorded(Language):
    """Notes the shape of every micro-batch."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.shapes: list[tuple[int, int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.shapes.append(tuple(batch["input_ids"].shape))
        return super().training_step(batch, batch_idx)


@pytest.fixture(scope="module", params=["sgd", "adamw"])
def unsplit(request) -> Language:
    """What plain Lightning makes of the whole batches on one device."""
    module = Language(request.param)
    trainer("auto", max_epochs=EPOCHS).fit(module, loader(batches_of(ROWS)))
    return module


def split(optimizer: str, **policy: Any) -> Recorded:
    module = Recorded(optimizer)
    run = trainer(callbacks=[GradientAccumulation(**policy)], max_epochs=EPOCHS)
    run.fit(module, loader(batches_of(ROWS)))
    assert run.global_step == EPOCHS * 7
    return module


@pytest.mark.some_cases(4)
@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize("size", [1, 3, 4, 16, Tokens(40), Tokens(25)])
def test_split_batches_equal_unsplit_ones(unsplit: Language, size: Any, trim: bool) -> None:
    module = split(unsplit.optimizer, micro_batch=size, trim_padding=trim)
    assert relative_error(module.parameters(), unsplit.parameters()) < 1e-12
    rows = [rows for rows, _ in module.shapes]
    assert sum(rows) == EPOCHS * len(ROWS)  # every row once, and training_step once for each micro-batch
    if isinstance(size, int):
        assert max(rows) == size
    else:
        assert all(rows * columns <= size.count for rows, columns in module.shapes)
    longest = {batch["input_ids"].shape[1] for batch in batches_of(ROWS)}
    if size != 16:
        assert ({columns for _, columns in module.shapes} <= longest) is not trim


def test_windows_of_split_batches_equal_one_large_batch() -> None:
    whole = Language("adamw")
    trainer("auto", max_epochs=EPOCHS).fit(whole, loader(batches_of(ROWS, 2 * BATCH)))
    module = split_in_windows = Recorded("adamw")
    run = trainer(callbacks=[GradientAccumulation(2, micro_batch=3)], max_epochs=EPOCHS)
    run.fit(split_in_windows, loader(batches_of(ROWS)))
    assert run.global_step == EPOCHS * 4
    assert relative_error(module.parameters(), whole.parameters()) < 1e-12


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("size", [3, Tokens(40), "auto"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_split_batches_on_two_processes_equal_one_batch(optimizer: str, size: Any) -> None:
    rows = sentences(104)
    whole = Language(optimizer)
    trainer("auto", max_epochs=EPOCHS).fit(whole, loader(batches_of(rows)))

    class Ranked(Language):
        def train_dataloader(self):
            # unequal shares, so that the ranks come to different numbers of micro-batches
            cut = [5, 11][: self.trainer.global_rank + 1]
            first = sum(cut[:-1])
            return loader([pad(rows[i + first : min(i + first + cut[-1], i + BATCH)]) for i in range(0, len(rows), BATCH)])

    module = Ranked(optimizer)
    trainer(ddp(), devices=2, callbacks=[GradientAccumulation(micro_batch=size)], max_epochs=EPOCHS).fit(module)
    assert relative_error(module.parameters(), whole.parameters()) < 1e-12
