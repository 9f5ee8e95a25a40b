"""One window, one batch: windows train what plain Lightning trains on their full batches, on every engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from harness import assert_one_window_one_batch, dealt, on, windows_of
from sharded import ShardedLanguage
from support import OPTIMIZERS, fit, pad, relative_error, sentences, train_by_hand

from lightning_accum import GradientAccumulation

ROWS, MICRO_BATCH, EPOCHS = sentences(44), 2, 2
SMALL = 4096 / 2**20  # 4 KiB, of some 40 that the parameters take: several buckets
ENGINES = [
    on("accum"),
    on("ddp"),
    on("fsdp2"),
    on("fsdp1"),
    on("fsdp2 and tensor"),
    on("ddp of 4"),
    on("fsdp2 of 4"),
    *(on(engine, sync="micro_batch") for engine in ("ddp", "fsdp2", "fsdp1", "fsdp2 and tensor", "fsdp1 by layer")),
    on("fsdp1 by layer"),
    on("fsdp2 of 4", sync="shard"),
    on("named mesh", mesh={"data_parallel": 2, "tensor_parallel": 2}),
    on("ddp", bucket_cap_mb=SMALL),
    on("ddp", gradient_as_bucket_view=True),
    on("ddp", bucket_cap_mb=SMALL, gradient_as_bucket_view=True, sync="micro_batch"),
    on("ddp", find_unused_parameters=True, bucket_cap_mb=SMALL),
    on("ddp", find_unused_parameters=True, gradient_as_bucket_view=True),
    on("ddp", static_graph=True),
    on("ddp", static_graph=True, bucket_cap_mb=SMALL, gradient_as_bucket_view=True),
    on("ddp", broadcast_buffers=False),
]


@pytest.mark.some_cases(5)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("engine", "options"), ENGINES[:4])
def test_a_window_takes_the_step_of_its_full_batch(engine: str, options: dict[str, Any], optimizer: str) -> None:
    by_rank = dealt(ROWS, MICRO_BATCH, engine)
    size = 8 // len(by_rank)  # windows of 16 rows: two in an epoch, and a tail of 12
    windows = windows_of(by_rank, size, EPOCHS)
    assert_one_window_one_batch(partial(ShardedLanguage, optimizer), by_rank, windows, size, engine, options, max_epochs=EPOCHS)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(("engine", "options"), ENGINES[4:])
def test_so_it_does_with_every_option_of_a_strategy(engine: str, options: dict[str, Any]) -> None:
    by_rank = dealt(ROWS[:20], MICRO_BATCH, engine)
    assert_one_window_one_batch(partial(ShardedLanguage, "adamw"), by_rank, windows_of(by_rank, 2), 2, engine, options)


CLIPS = {"norm": 0.05, "value": 1e-3}
CLIPPED = [
    *(on(engine, kind) for engine in ("accum", "ddp", "fsdp2 and tensor") for kind in ("norm", "value")),
    on("fsdp2", "norm"),
]


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(("engine", "options", "algorithm"), CLIPPED)
def test_a_clipped_step_is_that_of_the_full_batch(engine: str, options: dict[str, Any], algorithm: str) -> None:
    by_rank, clip = dealt(ROWS[:20], MICRO_BATCH, engine), {algorithm: CLIPS[algorithm]}
    assert_one_window_one_batch(ShardedLanguage, by_rank, windows_of(by_rank, 2), 2, engine, options, clip=clip)


@pytest.mark.parametrize("algorithm", CLIPS)
def test_these_limits_change_the_steps(algorithm: str) -> None:
    batches = [pad(rows) for rows in windows_of(dealt(ROWS[:20], MICRO_BATCH, "accum"), 2)]
    clipped, whole = (train_by_hand(ShardedLanguage(), batches, 1, **clip) for clip in ({algorithm: CLIPS[algorithm]}, {}))
    assert relative_error(clipped.parameters(), whole.parameters()) > 1e-3


@pytest.mark.some_cases(3, 9)
@pytest.mark.parametrize("tail", ["step", "drop", "carry"])
@pytest.mark.parametrize(
    ("engine", "options"),
    [
        *(on(engine) for engine in ("accum", "fsdp2", "ddp", "fsdp1")),
        *(on(engine, sync="micro_batch") for engine in ("fsdp2", "fsdp1")),
        on("fsdp2", sync="shard"),
    ],
)
def test_the_tail_of_an_epoch_is_a_window_or_dropped_or_carried(engine: str, options: dict[str, Any], tail: Any) -> None:
    by_rank, policy = dealt(ROWS[:20], MICRO_BATCH, engine), GradientAccumulation(3, tail=tail)
    windows = windows_of(by_rank, 3, EPOCHS, tail)
    assert_one_window_one_batch(ShardedLanguage, by_rank, windows, policy, engine, options, max_epochs=EPOCHS)


def test_the_reference_is_the_loop_by_hand_and_lightnings_own_accumulation_would_not_pass() -> None:
    by_rank = dealt(ROWS, MICRO_BATCH, "accum")
    full = [pad(rows) for rows in windows_of(by_rank, 2)]
    module = ShardedLanguage("adamw")
    fit(module, full, strategy="auto", max_epochs=EPOCHS)
    assert relative_error(module.parameters(), train_by_hand(ShardedLanguage("adamw"), full, EPOCHS).parameters()) < 1e-12
    policy = GradientAccumulation(2, weight="equal", check=False)  # the mean of means, as Lightning's
    with pytest.raises(AssertionError):
        assert_one_window_one_batch(ShardedLanguage, by_rank, None, policy)
