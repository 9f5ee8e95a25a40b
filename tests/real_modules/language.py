"""Text: preferences and retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from real_modules.expected import ONE, by
from real_modules.table import dealt, padded, randint, real_module

WORDS = 11


def words(generator: Generator, shortest: int = 3, longest: int = 8) -> Tensor:
    return torch.randint(1, WORDS, (randint(shortest, longest, generator),), generator=generator)


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


def retrieved(generator: Generator) -> dict[str, Tensor]:
    """A question, a context that answers it, and one that does not."""
    return {"query": words(generator), "good": words(generator), "bad": words(generator)}


def two_contexts_a_query(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Twice as many contexts as queries."""
    contexts = [row[name] for row in rows for name in ("good", "bad")]
    queries = padded()([{"query": row["query"]} for row in rows])
    return {**queries, "contexts": pad_sequence(contexts, True), "good": 2 * torch.arange(len(rows))}


@real_module(
    *("dense passage retrieval", dealt(retrieved)), collate=two_contexts_a_query, windows=ONE, split=by("query", "context")
)
class TwoContextsAQuery(LightningModule):
    """Each query has to find its own among all contexts of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.context = (nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, 6)) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        queries, contexts = batch["query"], batch["contexts"]
        of_queries = (self.query(queries).tanh() * (queries > 0)[..., None]).sum(1)
        of_contexts = (self.context(contexts).tanh() * (contexts > 0)[..., None]).sum(1)
        return F.cross_entropy(of_queries @ of_contexts.T, batch["good"])
