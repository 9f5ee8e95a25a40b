"""Split batches: whatever the size of the micro-batches, the step is that of the whole batch, on every engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness import assert_one_window_one_batch, dealt, on, windows_of
from sharded import ShardedLanguage
from support import Language, loader, pad, relative_error, sentences, train_by_hand, trainer

from lightning_accum import GradientAccumulation, Tokens

BATCH, EPOCHS = 16, 2
ROWS = sentences(53)  # three batches, and one of 5 rows
SIZES = [1, 3, 4, 16, Tokens(40), Tokens(25)]


class Recorded(ShardedLanguage):
    """Notes the shape of every micro-batch."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.shapes: list[tuple[int, int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.shapes.append(tuple(batch["input_ids"].shape))
        return super().training_step(batch, batch_idx)


@pytest.mark.some_cases(4)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_a_split_batch_takes_the_step_of_the_whole_one(size: Any, trim: bool, optimizer: str) -> None:
    modules: list[Recorded] = []

    def make() -> Recorded:
        modules.append(Recorded(optimizer))
        return modules[-1]

    by_rank = dealt(ROWS, BATCH, "accum")
    policy = GradientAccumulation(micro_batch=size, trim_padding=trim)
    assert_one_window_one_batch(make, by_rank, windows_of(by_rank, 1, EPOCHS), policy, max_epochs=EPOCHS)
    shapes = modules[-1].shapes
    assert sum(rows for rows, _ in shapes) == EPOCHS * len(ROWS)  # every row once, and training_step once for each micro-batch
    if isinstance(size, int):
        assert max(rows for rows, _ in shapes) == size
    else:
        assert all(rows * columns <= size.count for rows, columns in shapes)
    longest = {max(map(len, batch)) for batch in by_rank[0]}
    if size != BATCH:
        assert ({columns for _, columns in shapes} <= longest) is not trim


def test_so_does_plain_lightning_on_one_device() -> None:
    """The other reference: the unsplit module under Lightning's own loops is the loop by hand."""
    module, batches = Language("adamw"), [pad(rows) for rows in dealt(ROWS, BATCH, "accum")[0]]
    trainer("auto", max_epochs=EPOCHS).fit(module, loader(batches))
    assert relative_error(module.parameters(), train_by_hand(Language("adamw"), batches, EPOCHS).parameters()) < 1e-12


CASES = [on(engine, size) for engine in ("ddp", "fsdp2", "fsdp1", "accum") for size in (3, Tokens(40))]
CASES += [on(engine, "auto") for engine in ("ddp", "accum")]
CASES += [on(engine, 3, sync="micro_batch") for engine in ("ddp", "fsdp2", "fsdp1")]
CASES += [on("fsdp2", 3, sync="shard"), on("ddp", 3, static_graph=True)]


@pytest.mark.some_cases(4)
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("engine", "options", "size"), CASES)
def test_so_do_windows_of_split_batches_where_ranks_have_different_numbers_of_micro_batches(
    engine: str, options: dict[str, Any], size: Any, window: int
) -> None:
    shares = [ROWS[i : i + BATCH] for i in range(0, len(ROWS), BATCH)]
    by_rank = [shares] if engine == "accum" else [[rows[:3] for rows in shares], [rows[3:] for rows in shares]]
    policy = GradientAccumulation(window, micro_batch=size)
    windows = windows_of(by_rank, window)
    assert_one_window_one_batch(partial(ShardedLanguage, "adamw"), by_rank, windows, policy, engine, options)
