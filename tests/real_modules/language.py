"""Text and speech."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Generator, Tensor, nn

from real_modules.table import dealt, padded, randint, real_module

WORDS = 11


def masked_pair(generator: Generator) -> dict[str, Tensor]:
    """Two sentences of which some words are masked, and whether the second follows the first."""
    tokens = torch.randint(1, WORDS, (randint(3, 8, generator),), generator=generator)
    is_masked = torch.rand(len(tokens), generator=generator) < 0.4
    is_masked[-1] = True
    labels = tokens.where(is_masked, torch.tensor(-100))
    follows = torch.randint(2, (), generator=generator)
    inputs = tokens.masked_fill(is_masked, 1)
    return {"tokens": inputs, "labels": labels, "attention_mask": torch.ones_like(tokens), "follows": follows}


@real_module("BERT pre-training", dealt(masked_pair), collate=padded({"labels": -100}))
class MaskedLanguageModelWithSecondHead(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(WORDS, 6), nn.Linear(6, 6)
        self.words, self.next = nn.Linear(6, WORDS), nn.Linear(6, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = torch.tanh(self.body(self.embedding(batch["tokens"]))) * batch["attention_mask"].unsqueeze(-1)
        of_words = F.cross_entropy(self.words(hidden).flatten(0, 1), batch["labels"].flatten())
        of_pairs = F.cross_entropy(self.next(hidden[:, 0]), batch["follows"])
        self.log("loss", of_words + of_pairs)
        return of_words + of_pairs
