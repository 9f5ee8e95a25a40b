"""Figures from public documentation (Hugging Face Accelerate's guides on gradient accumulation)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import ddp, fit, loader
from torch import nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation

ROUNDING = 1e-4  # both the initial and the final weights are published to four decimals, half a unit each


class TokenClassification(pl.LightningModule):
    """Sample i has input_ids 1..i+1; each rank takes every second batch of each window, as Accelerate shards them."""

    def __init__(self, samples: int, batch_size: int, ranks: int = 1) -> None:
        super().__init__()
        self.net = nn.Linear(1, 2, bias=False)
        with torch.no_grad():
            self.net.weight.copy_(torch.tensor([[-0.0075], [0.5364]]))
        self.samples, self.batch_size, self.ranks = samples, batch_size, ranks

    def train_dataloader(self) -> Any:
        batches, pad = [], nn.utils.rnn.pad_sequence
        for first in range(0, self.samples, self.batch_size):
            inputs = [torch.arange(1.0, i + 2) for i in range(first, first + self.batch_size)]
            padded = pad(inputs, batch_first=True, padding_value=-100.0)
            labels = pad([i.long() % 2 for i in inputs], batch_first=True, padding_value=-100)
            batches.append({"input_ids": padded, "labels": labels})
        return loader(batches[self.trainer.global_rank :: self.ranks])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch["input_ids"][..., None]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.08)


@pytest.mark.parametrize(("batch_size", "window"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_token_classification_on_one_rank(batch_size: int, window: int) -> None:
    module = TokenClassification(samples=8, batch_size=batch_size)
    run = fit(module, None, GradientAccumulation(window))
    assert module.net.weight.flatten().tolist() == pytest.approx([0.0953, 0.4337], abs=ROUNDING)
    assert run.callback_metrics["window/total_weight"] == 36


def test_token_classification_on_two_ranks() -> None:
    module = TokenClassification(samples=16, batch_size=4, ranks=2)
    fit(module, None, strategy=ddp(), devices=2, accumulate_grad_batches=2)
    assert module.net.weight.flatten().tolist() == pytest.approx([0.2117, 0.3172], abs=ROUNDING)
