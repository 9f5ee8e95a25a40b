"""Split batches: whatever the size of the micro-batches, the step is that of the whole batch, on every engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from harness import assert_one_window_one_batch, dealt, on, windows_of
from sharded import ShardedLanguage
from support import sentences

from lightning_accum import GradientAccumulation, Tokens

BATCH, EPOCHS = 16, 2
ROWS = sentences(53)  # three batches, and one of 5 rows
SIZES = [1, 3, 4, 16, Tokens(40), Tokens(25)]


@pytest.mark.some_cases(4)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("size", "trim"), [(size, trim) for size in SIZES for trim in (True, False)])
def test_a_split_batch_takes_the_step_of_the_whole_one(size: Any, trim: bool, optimizer: str) -> None:
    policy = GradientAccumulation(micro_batch=size, trim_padding=trim)
    make, by_rank = partial(ShardedLanguage, optimizer), dealt(ROWS, BATCH, "accum")
    assert_one_window_one_batch(make, by_rank, windows_of(by_rank, 1, EPOCHS), policy, max_epochs=EPOCHS)


ENGINES = [on(engine, size) for engine in ("ddp", "fsdp2", "fsdp1", "accum") for size in (3, Tokens(40))]
ENGINES += [on(engine, "auto") for engine in ("ddp", "accum")]
ENGINES += [on(engine, 3, sync="micro_batch") for engine in ("ddp", "fsdp2", "fsdp1")]
ENGINES += [on("fsdp2", 3, sync="shard"), on("ddp", 3, static_graph=True)]


@pytest.mark.some_cases(3, 13)
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("engine", "options", "size"), ENGINES)
def test_so_do_windows_of_split_batches_where_ranks_have_different_numbers_of_micro_batches(
    engine: str, options: dict[str, Any], size: Any, window: int
) -> None:
    shares = [ROWS[i : i + BATCH] for i in range(0, len(ROWS), BATCH)]
    by_rank = [shares] if engine == "accum" else [[rows[:3] for rows in shares], [rows[3:] for rows in shares]]
    policy, make = GradientAccumulation(window, micro_batch=size), partial(ShardedLanguage, "adamw")
    assert_one_window_one_batch(make, by_rank, windows_of(by_rank, window), policy, engine, options)
