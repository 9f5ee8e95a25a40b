"""A Trainer that is copied while it trains is copied as Lightning's own is: the copy is in no fit, and the fit goes on."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import OPTIMIZERS, loader, trainer
from torch import Tensor, nn

from lightning_accum import GradientAccumulation

BATCHES = [torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (1, 4, 2, 3)]


class Rows(pl.LightningModule):
    """A mean over rows."""

    def __init__(self, optimizer: str, is_manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.optimizer = nn.Linear(3, 1, dtype=torch.float64), optimizer
        self.automatic_optimization = not is_manual

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.layer(batch).square().mean()
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return None

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        assert not self.training

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


class Copying(pl.Callback):
    """Copies the Trainer when a hook is called for the first time."""

    def __init__(self, hook: str) -> None:
        self.copy: pl.Trainer | None = None
        setattr(self, hook, self.copy_once)

    def copy_once(self, trainer: pl.Trainer, *others: Any, **options: Any) -> None:
        self.copy = self.copy or copy.deepcopy(trainer)


def by_hand(optimizer: str, epochs: int) -> Tensor:
    """The weights after the joined batches of each window of two."""
    module = Rows(optimizer)
    step = module.configure_optimizers()
    for first in epochs * [0, 2]:
        step.zero_grad()
        module.layer(torch.cat(BATCHES[first : first + 2])).square().mean().backward()
        step.step()
    return module.layer.weight


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_start", "on_train_batch_start", "on_train_batch_end"])
@pytest.mark.parametrize("is_manual", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_copy_trains_and_so_does_the_trainer_that_was_copied(optimizer: str, is_manual: bool, hook: str) -> None:
    copying, found, of_the_copy = Copying(hook), Rows(optimizer, is_manual), Rows(optimizer, is_manual)
    trainer(callbacks=[GradientAccumulation(2), copying], max_epochs=2).fit(found, loader(BATCHES))
    copying.copy.validate(of_the_copy, loader(BATCHES), verbose=False)
    copying.copy.fit(of_the_copy, loader(BATCHES))
    for module in (found, of_the_copy):
        torch.testing.assert_close(module.layer.weight, by_hand(optimizer, 2), rtol=1e-12, atol=0)


def test_a_callback_that_is_copied_in_a_fit_keeps_what_a_checkpoint_would_hold() -> None:
    copying = Copying("on_train_batch_end")
    accumulation = GradientAccumulation(1)
    trainer(callbacks=[accumulation, copying]).fit(Rows("sgd"), loader(BATCHES))
    (copied,) = (callback for callback in copying.copy.callbacks if isinstance(callback, GradientAccumulation))
    assert copied.state_dict()["optimizer_steps"] == 1
    assert accumulation.state_dict()["optimizer_steps"] == len(BATCHES)
