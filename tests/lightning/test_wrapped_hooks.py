"""Hooks that ``functools.wraps`` makes look like Lightning's, in the module itself: Lightning calls them, so they are called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import OPTIMIZERS, loader, trainer
from torch import Tensor, nn


class Rows(pl.LightningModule):
    """A mean over rows."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.optimizer = nn.Linear(3, 1, dtype=torch.float64), optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


def backward_without_options(loss: Tensor, **options: Any) -> None:
    loss.backward()


def doubled(batch: Tensor, *others: Any) -> Tensor:
    return 2 * batch


def clip_to_a_tenth(optimizer: Any, **options: Any) -> None:
    for group in optimizer.param_groups:
        nn.utils.clip_grad_value_(group["params"], 0.1)


def step_twice(epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
    optimizer.step(closure)
    optimizer.optimizer.step()


def tick_twice(scheduler: Any, metric: Any) -> None:
    scheduler.step()
    scheduler.step()


HOOKS: dict[str, Callable[..., Any]] = {
    "on_before_batch_transfer": doubled,
    "transfer_batch_to_device": doubled,
    "on_after_batch_transfer": doubled,
    "backward": backward_without_options,
    "configure_gradient_clipping": clip_to_a_tenth,
    "optimizer_step": step_twice,
    "lr_scheduler_step": tick_twice,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", HOOKS)
def test_a_window_is_one_batch_also_with_a_hook_that_wraps_lightnings(name: str, optimizer: str) -> None:
    batches = [torch.randn(rows, 3, dtype=torch.float64) for rows in (1, 4, 2, 3, 5, 1)]
    whole = [torch.cat(batches[first : first + 2]) for first in range(0, len(batches), 2)]
    window, batch, bare = (Rows(optimizer) for _ in range(3))
    for module in (window, batch):
        setattr(module, name, functools.wraps(getattr(module, name))(HOOKS[name]))
    trainer(accumulate_grad_batches=2).fit(window, loader(batches))
    for module in (batch, bare):
        trainer("auto").fit(module, loader(whole))
    torch.testing.assert_close(window.layer.weight, batch.layer.weight, rtol=1e-12, atol=0)
    assert name == "backward" or not torch.equal(batch.layer.weight, bare.layer.weight)
