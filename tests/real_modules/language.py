"""Text and speech."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import pad_sequence

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


def uttered(generator: Generator) -> tuple[Tensor, Tensor]:
    frames = randint(10, 16, generator)
    return torch.randn(frames, 4, generator=generator), torch.randint(1, 6, (randint(2, 4, generator),), generator=generator)


def with_lengths(rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    audio, text = zip(*rows, strict=True)
    lengths = [torch.tensor([len(value) for value in values]) for values in (audio, text)]
    return pad_sequence(audio, True), pad_sequence(text, True), *lengths


@real_module("speech recognition", dealt(uttered), collate=with_lengths)
class ConnectionistTemporalClassification(LightningModule):
    """The criterion divides each row by its length and then by the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        audio, text, frames, letters = batch
        log_probs = self.net(audio).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, text, frames, letters, zero_infinity=True)
