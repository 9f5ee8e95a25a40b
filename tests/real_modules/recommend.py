"""Retrieval, recommendation and tables."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lightning_accum import AccumulationError
from real_modules.language import WORDS, words
from real_modules.table import RealModule, Refused, dealt, padded, randint, real_module


def retrieved(generator: Generator) -> dict[str, Tensor]:  # a question, a context that answers it, and one that does not
    return {"query": words(generator), "good": words(generator), "bad": words(generator)}


def two_contexts_a_query(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:  # twice as many contexts as queries
    contexts = [row[name] for row in rows for name in ("good", "bad")]
    queries = padded()([{"query": row["query"]} for row in rows])
    return {**queries, "contexts": pad_sequence(contexts, True), "good": 2 * torch.arange(len(rows))}


IN_THE_BATCH = {
    "windows": Refused(AccumulationError, {"window": 1}),
    "split": Refused(AccumulationError, {"row_wise": ["query", "context"]}),
}


@real_module(*("dense passage retrieval", dealt(retrieved)), collate=two_contexts_a_query, **IN_THE_BATCH)
class TwoContextsAQuery(RealModule):  # each query has to find its own among all contexts of the batch
    def build(self) -> None:
        self.query, self.context = (nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, 6)) for _ in range(2))

    def loss_of(self, queries: Tensor, contexts: Tensor, good: Tensor) -> Tensor:
        of_queries, of_contexts = self.query(queries).tanh(), self.context(contexts).tanh()
        of_queries, of_contexts = (of_queries * (queries > 0)[..., None]).sum(1), (of_contexts * (contexts > 0)[..., None]).sum(1)
        return F.cross_entropy(of_queries @ of_contexts.T, good)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(batch["query"], batch["contexts"], batch["good"])


@real_module("sentence embeddings, pairs", dealt(retrieved), collate=padded(), **IN_THE_BATCH)
class NegativesOfTheBatch(TwoContextsAQuery):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(batch["query"], batch["good"], torch.arange(len(batch["query"]), device=self.device))


def bought(generator: Generator) -> dict[str, Tensor]:  # a user's items in their order, and three that were not bought for each
    items = words(generator, 3, 7)
    return {"items": items, "negatives": torch.randint(1, WORDS, (len(items), 3), generator=generator)}


@real_module("sequential recommendation", dealt(bought), collate=padded())
class SampledNegatives(RealModule):  # binary cross entropies, of the next item over steps, of the others over samples
    def build(self) -> None:
        self.items, self.user = nn.Embedding(WORDS, 6, padding_idx=0), nn.GRU(6, 6, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        users, _ = self.user(self.items(batch["items"][:, :-1]))
        good = (users * self.items(batch["items"][:, 1:])).sum(-1)
        bad = (users.unsqueeze(2) * self.items(batch["negatives"][:, 1:])).sum(-1)
        mask = batch["items"][:, 1:] > 0
        loss = -F.logsigmoid(good[mask]).mean() - F.logsigmoid(-bad[mask]).mean()
        return loss + 1e-2 * users[:, 0].square().sum(-1).mean()


def lived(generator: Generator) -> dict[str, Tensor]:  # until when somebody was seen, and whether something happened then
    time, event = torch.tensor(randint(0, 5, generator)), torch.rand((), generator=generator) < 0.6
    return {"x": torch.randn(5, generator=generator), "time": time, "event": event}


@real_module("survival in discrete time", dealt(lived))
class SurvivalWithCensoring(RealModule):  # a mean over the intervals in which somebody was at risk, and one over the samples
    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, intervals = self.net(batch["x"]), torch.arange(6, device=self.device)
        at_risk = intervals <= batch["time"].unsqueeze(1)
        happened = (intervals == batch["time"].unsqueeze(1)) & batch["event"].unsqueeze(1)
        of_intervals = F.binary_cross_entropy_with_logits(logits, happened.to(logits), reduction="none")
        survival = F.logsigmoid(-logits).cumsum(1).exp()
        brier = (survival - (intervals < batch["time"].unsqueeze(1)).to(logits)).square().mean(1)
        return (of_intervals * at_risk).sum() / at_risk.sum() + 0.5 * brier.mean()


def demand(generator: Generator) -> dict[str, Tensor]:  # sales over five days, of which some are not known, and a weight
    is_known = torch.rand(5, generator=generator) < 0.7
    is_known[0] = True
    weight = torch.rand((), generator=generator) + 0.5
    return {
        "x": torch.randn(5, generator=generator),
        "y": torch.randn(5, generator=generator),
        "is_known": is_known,
        "weight": weight,
    }


@real_module("forecasts of quantiles", dealt(demand))
class QuantilesOfKnownDays(RealModule):  # a pinball loss that is divided by the weights of the days that are known
    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 15))
        self.register_buffer("quantiles", torch.tensor([0.1, 0.5, 0.9]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        errors = batch["y"].unsqueeze(-1) - self.net(batch["x"]).unflatten(1, (5, 3))
        pinball = torch.maximum(self.quantiles * errors, (self.quantiles - 1) * errors).sum(-1)
        weights = batch["weight"].unsqueeze(1) * batch["is_known"]
        return (pinball * weights).sum() / weights.sum()
