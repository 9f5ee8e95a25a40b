"""A language model with a loss of two terms, a mean over tokens and one over samples, and batches where these go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from support import OPTIMIZERS, TinyGPT, language_loss, loader, pad
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_accum import SampleCount, TokenCount

EACH = [TokenCount(), SampleCount()]


ROWS = 16


class Rated(pl.LightningModule):
    """Predicts the next token, and the score of each sentence: a mean over tokens and one over samples."""

    def __init__(self, optimizer: str = "sgd", by_rank: Sequence[Sequence[Any]] | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net, self.score = TinyGPT(length=32).double(), nn.Linear(17, 1).double()
        self.optimizer, self.by_rank = optimizer, by_rank
        self.backwards = 0

    def terms(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self.net(batch["input_ids"])
        mask = (batch["labels"] != -100).double()[..., None]
        pooled = (logits * mask).sum(1) / mask.sum(1)
        return language_loss(logits, batch["labels"]), F.mse_loss(self.score(pooled)[:, 0], batch["score"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        cross_entropy, error = self.terms(batch)
        return cross_entropy + 0.5 * error

    def on_after_backward(self) -> None:
        self.backwards += 1

    def train_dataloader(self) -> DataLoader:
        return loader(self.by_rank[self.trainer.global_rank])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def rated(windows: int, rows: int = ROWS) -> list[dict[str, Tensor]]:
    """Batches whose scores go with the lengths of their sentences, as ratings and rewards do."""
    generator = torch.Generator().manual_seed(11)
    batches = []
    for _ in range(windows):
        lengths = torch.exp(torch.randn(rows, generator=generator) * 0.8 + 2).clamp(2, 32).long()
        sentences = [torch.randint(0, 17, (int(length),), generator=generator) for length in lengths]
        score = lengths.double().log() + 0.3 * torch.randn(rows, generator=generator, dtype=torch.float64)
        batches.append({**pad(sentences), "score": score})
    return batches


def rows_of(batch: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {key: value[rows] for key, value in batch.items()}


def on_two_ranks(batches: Sequence[dict[str, Tensor]]) -> list[list[dict[str, Tensor]]]:
    """The first has five rows of each, the second the others."""
    return [[rows_of(batch, rows) for batch in batches] for rows in (slice(0, 5), slice(5, None))]
