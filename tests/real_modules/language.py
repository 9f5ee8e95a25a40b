"""Text and speech."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Generator, Tensor, nn

from real_modules.table import dealt, padded, randint, real_module

WORDS = 11


def words(generator: Generator, shortest: int = 3, longest: int = 8) -> Tensor:
    return torch.randint(1, WORDS, (randint(shortest, longest, generator),), generator=generator)


def translated(generator: Generator) -> dict[str, Tensor]:
    return {"source": words(generator), "target": words(generator, 4, 9)}


@real_module("sequence to sequence translation", dealt(translated), collate=padded())
class TranslationWithLabelSmoothing(LightningModule):
    """Attends to the source; 0 is padding in both."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, 6, padding_idx=0), nn.Embedding(WORDS, 6, padding_idx=0)
        self.decoder, self.head = nn.GRU(6, 6, batch_first=True), nn.Linear(12, WORDS)
        self.criterion = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        memory, (queries, _) = self.source(batch["source"]), self.decoder(self.target(batch["target"][:, :-1]))
        scores = (queries @ memory.mT).masked_fill((batch["source"] == 0).unsqueeze(1), -1e9)
        logits = self.head(torch.cat([queries, scores.softmax(-1) @ memory], dim=-1))
        return self.criterion(logits.reshape(-1, WORDS), batch["target"][:, 1:].reshape(-1))


def answered(generator: Generator) -> dict[str, Tensor]:
    """A question, which is not learned, and its answer."""
    tokens = words(generator, 4, 10)
    labels = tokens.clone()
    labels[: randint(1, 3, generator)] = -100
    return {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}


def preferred(generator: Generator) -> dict[str, Tensor]:
    """A better and a worse answer, and what the reference model says of them."""
    reference = torch.randn(2, generator=generator)
    return {"chosen": words(generator), "rejected": words(generator), "reference": reference}


@real_module("preference optimization", dealt(preferred), collate=padded())
class DirectPreferenceOptimization(LightningModule):
    """Pairs, and a likelihood of the better answers over their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)

    def log_probs(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.embedding(tokens[:, :-1]))).log_softmax(-1)
        mask = (tokens[:, 1:] != 0).double()
        return logits.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1) * mask, mask

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (chosen, mask), (rejected, _) = self.log_probs(batch["chosen"]), self.log_probs(batch["rejected"])
        margin = (chosen.sum(1) - batch["reference"][:, 0]) - (rejected.sum(1) - batch["reference"][:, 1])
        of_pairs = -F.logsigmoid(0.1 * margin).mean()
        self.log_dict({"of_pairs": of_pairs, "accuracy": (margin > 0).double().mean()})
        return of_pairs - 0.2 * chosen.sum() / mask.sum()
