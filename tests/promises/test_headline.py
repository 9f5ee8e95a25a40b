"""The headline: one global batch of 32, however it is held, gives the curves and the parameters of full batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_one_window_one_batch, on
from sharded import ShardedLanguage
from support import pad, sentences
from torch.utils.data import DataLoader

from lightning_accum import GradientAccumulation, SameOrderSampler

SEQUENCES = sentences(101)
"""Of 2 to 12 tokens: three windows of 32 sequences and a tail of 5 in every epoch."""
EPOCHS, SEED, GLOBAL_BATCH = 2, 5, 32


def windows() -> list[list[torch.Tensor]]:
    """Of all epochs, in an order that knows no sampler."""
    found = []
    for epoch in range(EPOCHS):
        order = torch.randperm(len(SEQUENCES), generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
        found += [[SEQUENCES[i] for i in order[start : start + GLOBAL_BATCH]] for start in range(0, len(order), GLOBAL_BATCH)]
    return found


def same_order(batch: int) -> DataLoader:
    """The one line: whatever the ranks, the same global batches."""
    return DataLoader(SEQUENCES, batch_size=batch, sampler=SameOrderSampler(SEQUENCES, seed=SEED), collate_fn=pad)


MIXES = [  # an engine; the loader batches of a window, and their rows; the rows of a micro-batch
    on("accum", 1, 32, None),
    on("accum", 8, 4, None),
    on("accum", 1, 32, 4),
    on("ddp", 4, 4, None),
    on("ddp", 16, 1, None),
    on("ddp", 1, 16, 4),
    on("ddp of 4", 8, 1, None),  # the first rank has 26 batches an epoch, the others 25
    on("fsdp2", 4, 4, None),
    on("fsdp2 of 4", 2, 4, None),
    on("fsdp2 and tensor", 4, 4, None),
]


@pytest.mark.some_cases(3, 4)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("engine", "options", "window", "batch", "micro_batch"), MIXES)
def test_every_mix_of_ranks_window_and_micro_batch_has_the_curve_and_the_parameters_of_full_batches(
    engine: str, options: dict[str, Any], window: int, batch: int, micro_batch: int | None, optimizer: str
) -> None:
    assert ENGINES[engine].ranks * window * batch == GLOBAL_BATCH
    policy = GradientAccumulation(window, micro_batch=micro_batch)
    arguments = {"max_epochs": EPOCHS, "use_distributed_sampler": True}  # a Trainer that is told nothing of sampling
    make = partial(ShardedLanguage, optimizer)
    assert_one_window_one_batch(make, same_order(batch), windows(), policy, engine, options, **arguments)
