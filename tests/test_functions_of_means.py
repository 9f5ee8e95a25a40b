"""Losses that are a function of a mean (RMSE, a logarithm, a power): a window is its full batch, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import OPTIMIZERS, ddp, loader, relative_error, train_by_hand, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation

Loss = Callable[[Tensor, Tensor], Tensor]
EXACT = 1e-12


def masked(errors: Tensor, y: Tensor) -> Tensor:
    mask = (y > 0).to(errors)
    return (errors * mask).sum() / mask.sum()


FUNCTIONS: dict[str, Loss] = {
    "RMSE": lambda o, y: torch.sqrt(F.mse_loss(o, y)),
    "RMSE by a power": lambda o, y: ((o - y) ** 2).mean() ** 0.5,
    "RMSE with eps": lambda o, y: torch.sqrt(F.mse_loss(o, y) + 1e-6),
    "RMSE of rows": lambda o, y: torch.sqrt((o - y).square().sum(1).mean()),
    "RMSLE": lambda o, y: torch.sqrt(F.mse_loss(torch.log1p(o.square()), torch.log1p(y.square()))),
    "three times RMSE": lambda o, y: 3 * torch.sqrt(F.mse_loss(o, y)) / 2,
    "one minus RMSE": lambda o, y: -(1 - torch.sqrt(F.mse_loss(o, y))),
    "masked RMSE": lambda o, y: torch.sqrt(masked((o - y).square(), y)),
    "logarithm": lambda o, y: torch.log(F.mse_loss(o, y)),
    "logarithm with eps": lambda o, y: 10 * torch.log10(1e-3 + F.l1_loss(o, y)) + 7,
    "logarithm of a mean of exponentials": lambda o, y: torch.log(torch.exp(o - y).mean()),
    "exponential": lambda o, y: torch.exp(F.smooth_l1_loss(o, y)),
    "perplexity": lambda o, y: F.cross_entropy(o, (y[:, 0] > 0).long()).exp(),
    "power": lambda o, y: F.l1_loss(o, y).pow(1.7),
    "reciprocal": lambda o, y: -1 / (1 + F.mse_loss(o, y)),
    "square of a logarithm": lambda o, y: torch.log1p(F.mse_loss(o, y)) ** 2,
    "at least": lambda o, y: F.mse_loss(o, y).clamp(min=0.01),
    "flooding": lambda o, y: (F.mse_loss(o, y) - 0.02).abs() + 0.02,
    "of two means over one count": lambda o, y: torch.sqrt(F.mse_loss(o, y) + 0.5 * (o - y).abs().mean()),
    "norm of all errors": lambda o, y: (o - y).square().sum().sqrt(),
    "relative error": lambda o, y: torch.sqrt((o - y).square().sum() / y.square().sum()),
}


class Regression(pl.LightningModule):
    """Two layers, and any loss; all of ``batches``, or those of its rank."""

    def __init__(self, loss: Loss, optimizer: str = "sgd", by_rank: Sequence[Sequence[Any]] | None = None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.loss, self.optimizer, self.by_rank = loss, optimizer, by_rank
        self.logged: dict[int, float] = {}
        """The loss of each window, by optimizer step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch[0].isnan().any():
            return None
        return self.loss(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        metrics = self.trainer.callback_metrics
        if "window/loss" in metrics:
            self.logged[int(metrics["window/optimizer_steps"])] = float(metrics["window/loss"])

    on_train_end = on_train_batch_end

    def train_dataloader(self) -> Any:
        return loader((self.by_rank or [])[self.trainer.global_rank])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def samples(rows: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    return [inputs, (inputs[:, :2] * (1 + seed % 3) + noise).sin() * (seed % 4 + 1) + 0.1]


def joined(batches: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


BATCHES = [samples(rows, seed) for seed, rows in enumerate([2, 5, 1, 4, 3, 1, 6, 2, 4, 7])]
WINDOWS = [joined(BATCHES[:4]), joined(BATCHES[4:8]), joined(BATCHES[8:])]


OF_RANKS = [[BATCHES[i] for i in (0, 1, 4, 5, 8)], [BATCHES[i] for i in (2, 3, 6, 7, 9)]]


def by_hand(loss: Loss, optimizer: str = "sgd", epochs: int = 2) -> Regression:
    return train_by_hand(Regression(loss, optimizer), WINDOWS, epochs)


# --- one process -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_windows_of_unequal_batches_are_their_full_batches(name: str, optimizer: str) -> None:
    module = Regression(FUNCTIONS[name], optimizer)
    trainer("accum", max_epochs=2, callbacks=[GradientAccumulation(4)]).fit(module, loader(BATCHES))
    assert relative_error(module.parameters(), by_hand(FUNCTIONS[name], optimizer).parameters()) <= EXACT


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_split_batches_are_exact(name: str, window: int) -> None:
    module, batches = Regression(FUNCTIONS[name]), [WINDOWS[0], WINDOWS[1]]
    trainer("accum", max_epochs=2, callbacks=[GradientAccumulation(window, micro_batch=5)]).fit(module, loader(batches))
    expected = train_by_hand(Regression(FUNCTIONS[name]), batches if window == 1 else [joined(batches)], 2)
    assert relative_error(module.parameters(), expected.parameters()) <= EXACT


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["RMSE", "one minus RMSE", "logarithm with eps", "norm of all errors"])
def test_the_loss_of_a_window_is_that_of_its_full_batch(name: str, ranks: int) -> None:
    losses: list[float] = []

    def step(batch: Any) -> Tensor:
        loss = by_itself.training_step(batch, 0)
        losses.append(loss.item())
        return loss

    train_by_hand(by_itself := Regression(FUNCTIONS[name]), WINDOWS, 1, step)
    module = Regression(FUNCTIONS[name], by_rank=OF_RANKS if ranks == 2 else [BATCHES])
    module.on_train_end = lambda: torch.save(module.logged, "logged.pt")
    trainer(ddp() if ranks == 2 else "accum", devices=ranks, callbacks=[GradientAccumulation(4 // ranks)]).fit(module)
    logged = torch.load("logged.pt")
    assert [logged[step] for step in (1, 2)] == pytest.approx(losses[:2], rel=EXACT)
