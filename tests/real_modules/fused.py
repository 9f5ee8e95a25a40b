"""Language models whose loss does not show what it was divided by."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_accum import AccumulationError, TokenCount
from real_modules.language import WORDS, answered
from real_modules.table import RealModule, Refused, dealt, padded, real_module

BATCHES, COLLATE = dealt(answered), padded({"labels": -100})


class FusedCrossEntropy(torch.autograd.Function):
    """Projection and mean cross entropy in one, whose forward computes the gradients and keeps nothing else."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        kept = labels != -100
        log_probs = (hidden @ weight.T).log_softmax(-1)
        targets = F.one_hot(labels.where(kept, torch.zeros_like(labels)), weight.shape[0]).to(hidden)
        of_logits = (log_probs.exp() - targets) * kept.unsqueeze(-1) / kept.sum()
        ctx.save_for_backward(of_logits @ weight, of_logits.T @ hidden)
        return -(log_probs * targets).sum(-1)[kept].mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_hidden, of_weight = ctx.saved_tensors
        return gradient * of_hidden, gradient * of_weight, None


class LanguageModel(RealModule):  # what the rows below share
    def build(self) -> None:
        self.embedding, self.body, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, 6), nn.Linear(6, WORDS, bias=False)

    def hidden_and_labels(self, batch: Any) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(self.embedding(batch["input_ids"][:, :-1])))
        return hidden.flatten(0, 1), batch["labels"][:, 1:].flatten()


@real_module("fused linear cross entropy, saves gradients only", BATCHES, collate=COLLATE)
class FusedLoss(LanguageModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, labels = self.hidden_and_labels(batch)
        return FusedCrossEntropy.apply(hidden, self.head.weight, labels)


def shifted(rows: Sequence[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    batch = COLLATE(rows)
    return batch["input_ids"][:, :-1], batch["labels"][:, 1:]


@real_module("fused linear cross entropy, labels shifted by the dataset", BATCHES, collate=shifted)
class FusedLossOfTuples(LanguageModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = torch.tanh(self.body(self.embedding(batch[0])))
        return FusedCrossEntropy.apply(hidden.flatten(0, 1), self.head.weight, batch[1].flatten())


def words_but_the_first(batch: Any) -> int:
    return int(batch["attention_mask"][:, 1:].sum())


BY_TERM = {"weight": [TokenCount(), words_but_the_first]}


@real_module(
    *("fused cross entropy and a z-loss of all words", BATCHES),
    collate=COLLATE,
    windows=Refused(AccumulationError, BY_TERM),
    split=Refused(AccumulationError, BY_TERM),
)
class FusedLossBesideZLoss(LanguageModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, labels = self.hidden_and_labels(batch)
        z_loss = self.head(hidden).logsumexp(-1).square()[batch["attention_mask"][:, 1:].flatten() == 1].mean()
        return FusedCrossEntropy.apply(hidden, self.head.weight, labels) + 0.01 * z_loss


if hasattr(F, "linear_cross_entropy"):  # torch 2.13

    @real_module("torch's own fused loss, in chunks", BATCHES, collate=COLLATE)
    class FusedLossOfTorch(LanguageModel):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            hidden, labels = self.hidden_and_labels(batch)
            options = nn.LinearCrossEntropyOptions()
            return F.linear_cross_entropy(hidden, self.head.weight, labels, options=options)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=-100)


@real_module("compiled loss", BATCHES, collate=COLLATE)
class CompiledLoss(LanguageModel):
    def build(self) -> None:
        super().build()
        self.criterion = torch.compile(token_loss, backend="aot_eager", dynamic=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, labels = self.hidden_and_labels(batch)
        return self.criterion(self.head(hidden), labels)


@real_module("logits recomputed in the backward", BATCHES, collate=COLLATE)
class CheckpointedLoss(LanguageModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, labels = self.hidden_and_labels(batch)
        return checkpoint(lambda hidden: token_loss(self.head(hidden), labels), hidden, use_reentrant=False)
