"""The headline: one global batch of 32, however it is held, gives the curves and the parameters of full batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from sharded import ShardedLanguage, fsdp2, needs_sharding_on_cpu
from support import Language, ddp, pad, relative_error, sentences, train_by_hand, trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accum import GradientAccumulation, SameOrderSampler

SEQUENCES = sentences(101)
"""Of 2 to 12 tokens: three windows of 32 sequences and a tail of 5 in every epoch."""
EPOCHS, SEED, GLOBAL_BATCH = 3, 5, 32
STEPS = 4 * EPOCHS


@dataclass(frozen=True)
class Mix:
    """Ranks x window x batch, and the strategy that holds them; ``tensor`` processes share a rank's batches."""

    strategy: str
    ranks: int
    window: int
    batch: int
    micro_batch: int | None = None
    tensor: int = 1

    def __str__(self) -> str:
        split = f" in {self.micro_batch}s" if self.micro_batch else ""
        return f"{self.strategy} {self.ranks}x{self.window}x{self.batch}{split}"


MIXES = [
    Mix("accum", 1, 1, 32),
    Mix("accum", 1, 8, 4),
    Mix("accum", 1, 1, 32, micro_batch=4),
    Mix("DDP", 2, 4, 4),
    Mix("DDP", 2, 16, 1),
    Mix("DDP", 2, 1, 16, micro_batch=4),
    Mix("DDP", 4, 8, 1),  # the first rank has 26 batches an epoch, the others 25
    Mix("FSDP2", 2, 4, 4),
    Mix("FSDP2", 4, 2, 4),
    Mix("FSDP2 and tensor parallel", 2, 4, 4, tensor=2),
]


class NoteLosses(Callback):
    """Writes the loss of every window to a file, which also a parent process can read."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            if trainer.is_global_zero:
                with Path("losses.txt").open("a") as file:
                    file.write(f"{trainer.callback_metrics['window/loss'].item()!r}\n")


@cache
def full_batches(optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of the hand-written loop, in an order that knows no sampler."""
    module, losses, batches = Language(optimizer), [], []
    for epoch in range(EPOCHS):
        order = torch.randperm(len(SEQUENCES), generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
        windows = [order[start : start + GLOBAL_BATCH] for start in range(0, len(order), GLOBAL_BATCH)]
        batches += [pad([SEQUENCES[i] for i in window]) for window in windows]

    def noted_loss(batch: Any) -> Tensor:
        loss = module.training_step(batch, 0)
        losses.append(loss.item())
        return loss

    train_by_hand(module, batches, epochs=1, loss=noted_loss)
    return losses, {name: parameter.detach() for name, parameter in module.named_parameters()}


def same_order(batch: int) -> DataLoader:
    """The one line: whatever the ranks, the same global batches."""
    return DataLoader(SEQUENCES, batch_size=batch, sampler=SameOrderSampler(SEQUENCES, seed=SEED), collate_fn=pad)


def train(mix: Mix, optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of the package, through a Trainer that is told nothing of sampling."""
    callbacks = [GradientAccumulation(mix.window, micro_batch=mix.micro_batch), NoteLosses()]
    kwargs = {"callbacks": callbacks, "max_epochs": EPOCHS, "use_distributed_sampler": True, "devices": mix.ranks * mix.tensor}
    if mix.strategy.startswith("FSDP2"):
        module: Language = ShardedLanguage(optimizer)
        run = trainer(fsdp2(mix.ranks, mix.tensor), **kwargs)
    else:
        module = Language(optimizer)
        run = trainer("accum" if mix.strategy == "accum" else ddp(), precision="64-true", **kwargs)
    run.fit(module, same_order(mix.batch))
    parameters = run.whole if mix.strategy.startswith("FSDP2") else dict(module.named_parameters())
    return [float(line) for line in Path("losses.txt").read_text().splitlines()], parameters


def by_mix(mix: Mix) -> Any:
    return pytest.param(mix, id=str(mix), marks=needs_sharding_on_cpu if mix.strategy.startswith("FSDP2") else ())


@pytest.mark.some_cases(3, 4)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("mix", [by_mix(mix) for mix in MIXES])
def test_every_mix_of_ranks_window_and_micro_batch_has_the_curve_and_the_parameters_of_full_batches(
    mix: Mix, optimizer: str, record_property: Any
) -> None:
    assert mix.ranks * mix.window * mix.batch == GLOBAL_BATCH
    expected_losses, expected = full_batches(optimizer)
    losses, parameters = train(mix, optimizer)
    assert len(losses) == len(expected_losses) == STEPS
    assert parameters.keys() == expected.keys()
    of_losses = max(abs(loss / full - 1) for loss, full in zip(losses, expected_losses, strict=True))
    of_parameters = relative_error(parameters.values(), expected.values())
    record_property("relative error of the losses", of_losses)
    record_property("relative error of the parameters", of_parameters)
    print(f"{mix}, {optimizer}: losses {of_losses:.1e}, parameters {of_parameters:.1e}")  # pytest -rP shows it
    assert of_losses < 1e-12
    assert of_parameters < 1e-12


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_neither_the_initial_parameters_nor_lightnings_own_accumulation_would_pass(optimizer: str) -> None:
    _, expected = full_batches(optimizer)
    module = Language(optimizer)
    assert relative_error(module.parameters(), expected.values()) > 0.05
    trainer("auto", accumulate_grad_batches=8, max_epochs=EPOCHS, precision="64-true").fit(module, same_order(4))
    error = relative_error(module.parameters(), expected.values())
    print(f"Lightning 1x8x4, {optimizer}: parameters {error:.1e}")
    assert error > 1e-3
