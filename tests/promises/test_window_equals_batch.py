"""The promise: parameters after training with windows equal those of the hand-written loop over full batches."""

from __future__ import annotations

import pytest
import torch
from support import Language, ddp, loader, pad, relative_error, sentences, train_by_hand, trainer

from lightning_accum import GradientAccumulation

EPOCHS = 3
SEQUENCES_IN_WINDOW = 16
MICRO_BATCH = 2


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_small_gpt_on_one_process_equals_the_full_batch(optimizer: str) -> None:
    rows = sentences(101)  # six windows and a tail of 5: two micro-batches and a half
    micro_batches = [pad(rows[i : i + MICRO_BATCH]) for i in range(0, len(rows), MICRO_BATCH)]
    full_batches = [pad(rows[i : i + SEQUENCES_IN_WINDOW]) for i in range(0, len(rows), SEQUENCES_IN_WINDOW)]
    module = Language(optimizer)
    run = trainer(callbacks=[GradientAccumulation(SEQUENCES_IN_WINDOW // MICRO_BATCH)], precision="64-true", max_epochs=EPOCHS)
    run.fit(module, loader(micro_batches))
    expected = train_by_hand(Language(optimizer), full_batches, EPOCHS)
    assert run.global_step == EPOCHS * len(full_batches)
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_small_gpt_on_two_processes_equals_the_full_batch(optimizer: str) -> None:
    rows = sentences(104)  # six windows and a tail of 8
    ranks, size = 2, SEQUENCES_IN_WINDOW // MICRO_BATCH // 2
    micro_batches = [pad(rows[i : i + MICRO_BATCH]) for i in range(0, len(rows), MICRO_BATCH)]
    full_batches = [pad(rows[i : i + SEQUENCES_IN_WINDOW]) for i in range(0, len(rows), SEQUENCES_IN_WINDOW)]

    class Ranked(Language):
        def train_dataloader(self):
            return loader(micro_batches[self.trainer.global_rank :: ranks])

    module = Ranked(optimizer)
    run = trainer(ddp(), devices=ranks, accumulate_grad_batches=size, precision="64-true", max_epochs=EPOCHS)
    run.fit(module)
    expected = train_by_hand(Language(optimizer), full_batches, EPOCHS)
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12
    assert not torch.equal(next(module.parameters()), next(Language(optimizer).parameters()))
