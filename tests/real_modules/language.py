"""Text and speech."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from real_modules.table import RealModule, dealt, padded, randint, real_module

WORDS = 11


def words(generator: Generator, shortest: int = 3, longest: int = 8) -> Tensor:
    return torch.randint(1, WORDS, (randint(shortest, longest, generator),), generator=generator)


def masked_pair(generator: Generator) -> dict[str, Tensor]:
    """Two sentences of which some words are masked, and whether the second follows the first."""
    tokens = words(generator)
    is_masked = torch.rand(len(tokens), generator=generator) < 0.4
    is_masked[-1] = True
    labels = tokens.where(is_masked, torch.tensor(-100))
    follows = torch.randint(2, (), generator=generator)
    inputs = tokens.masked_fill(is_masked, 1)
    return {"tokens": inputs, "labels": labels, "attention_mask": torch.ones_like(tokens), "follows": follows}


@real_module("BERT pre-training", dealt(masked_pair), collate=padded({"labels": -100}))
class MaskedLanguageModelWithSecondHead(RealModule):
    def build(self) -> None:
        self.embedding, self.body = nn.Embedding(WORDS, 6), nn.Linear(6, 6)
        self.words, self.next = nn.Linear(6, WORDS), nn.Linear(6, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = torch.tanh(self.body(self.embedding(batch["tokens"]))) * batch["attention_mask"].unsqueeze(-1)
        of_words = F.cross_entropy(self.words(hidden).flatten(0, 1), batch["labels"].flatten())
        of_pairs = F.cross_entropy(self.next(hidden[:, 0]), batch["follows"])
        self.log("loss", of_words + of_pairs)
        return of_words + of_pairs


def translated(generator: Generator) -> dict[str, Tensor]:
    return {"source": words(generator), "target": words(generator, 4, 9)}


@real_module("sequence to sequence translation", dealt(translated), collate=padded())
class TranslationWithLabelSmoothing(RealModule):  # attends to the source; 0 is padding in both
    def build(self) -> None:
        self.source, self.target = nn.Embedding(WORDS, 6, padding_idx=0), nn.Embedding(WORDS, 6, padding_idx=0)
        self.decoder, self.head = nn.GRU(6, 6, batch_first=True), nn.Linear(12, WORDS)
        self.criterion = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        memory, (queries, _) = self.source(batch["source"]), self.decoder(self.target(batch["target"][:, :-1]))
        scores = (queries @ memory.mT).masked_fill((batch["source"] == 0).unsqueeze(1), -1e9)
        logits = self.head(torch.cat([queries, scores.softmax(-1) @ memory], dim=-1))
        return self.criterion(logits.reshape(-1, WORDS), batch["target"][:, 1:].reshape(-1))


def spoken(generator: Generator) -> dict[str, Tensor]:  # words, how long each is, and two codes a frame
    text = words(generator)
    codes = torch.randint(1, 7, (randint(4, 12, generator), 2), generator=generator)
    return {"text": text, "durations": torch.rand(len(text), generator=generator) + 0.5, "codes": codes}


@real_module("text to speech over codes", dealt(spoken), collate=padded())
class TextToSpeechWithTwoStreams(RealModule):  # text tokens, code tokens and durations are means over numbers of their own
    def build(self) -> None:
        self.text, self.codes = nn.Embedding(WORDS, 6), nn.Embedding(7, 6)
        self.text_head, self.code_heads = nn.Linear(6, WORDS), nn.ModuleList([nn.Linear(12, 7), nn.Linear(12, 7)])
        self.duration = nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        text, codes, mask = batch["text"], batch["codes"], (batch["text"] != 0).double()
        embedded = torch.tanh(self.text(text)) * mask.unsqueeze(-1)
        summary = embedded.sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        frames = torch.cat([self.codes(codes[:, :-1]).sum(2), summary.expand(-1, codes.shape[1] - 1, -1)], dim=-1)
        of_text = F.cross_entropy(self.text_head(embedded[:, :-1]).mT, text[:, 1:], ignore_index=0)
        streams = [F.cross_entropy(head(frames).mT, codes[:, 1:, i], ignore_index=0) for i, head in enumerate(self.code_heads)]
        errors = (self.duration(embedded).squeeze(-1) - batch["durations"].log().nan_to_num(neginf=0.0)) ** 2
        of_duration = (errors * mask).sum() / mask.sum()
        return {"loss": 0.1 * of_text + sum(streams) / 2 + of_duration, "of_text": of_text.detach()}


def uttered(generator: Generator) -> tuple[Tensor, Tensor]:
    frames = randint(10, 16, generator)
    return torch.randn(frames, 4, generator=generator), torch.randint(1, 6, (randint(2, 4, generator),), generator=generator)


def with_lengths(rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    audio, text = zip(*rows, strict=True)
    lengths = [torch.tensor([len(value) for value in values]) for values in (audio, text)]
    return pad_sequence(audio, True), pad_sequence(text, True), *lengths


@real_module("speech recognition", dealt(uttered), collate=with_lengths)
class ConnectionistTemporalClassification(RealModule):
    """The criterion divides each row by its length and then by the number of rows."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        audio, text, frames, letters = batch
        log_probs = self.net(audio).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, text, frames, letters, zero_infinity=True)


def of_a_speaker(generator: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(12, 4, generator=generator), torch.randint(5, (), generator=generator)


@real_module("speaker verification", dealt(of_a_speaker))
class SpeakerEmbeddingsWithAngularMargin(RealModule):
    def build(self) -> None:
        self.frames, self.embed, self.speakers = nn.Linear(4, 8), nn.Linear(16, 6), nn.Parameter(torch.randn(5, 6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = torch.relu(self.frames(batch[0]))
        pooled = torch.cat([features.mean(1), (features.var(1) + 1e-5).sqrt()], dim=-1)
        cosines = F.normalize(self.embed(pooled)) @ F.normalize(self.speakers).T
        angles = cosines.clamp(-1 + 1e-6, 1 - 1e-6).acos()
        with_margin = torch.cos(angles + 0.2 * F.one_hot(batch[1], 5))
        loss = F.cross_entropy(10 * with_margin, batch[1])
        self.log("accuracy", (cosines.argmax(1) == batch[1]).double().mean(), on_step=False, on_epoch=True)
        return loss


def answered(generator: Generator) -> dict[str, Tensor]:  # a question, which is not learned, and its answer
    tokens = words(generator, 4, 10)
    labels = tokens.clone()
    labels[: randint(1, 3, generator)] = -100
    return {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}


@real_module("instruction tuning", dealt(answered), collate=padded({"labels": -100}))
class CausalLanguageModel(RealModule):
    def build(self) -> None:
        self.embedding, self.body = nn.Embedding(WORDS, 6), nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, WORDS, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.body(self.embedding(batch["input_ids"]))[0])
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), batch["labels"][:, 1:].reshape(-1), ignore_index=-100)
        self.log("perplexity", loss.detach().exp())
        return loss


def preferred(generator: Generator) -> dict[str, Tensor]:  # a better and a worse answer, and what the reference model says of them
    reference = torch.randn(2, generator=generator)
    return {"chosen": words(generator), "rejected": words(generator), "reference": reference}


@real_module("preference optimization", dealt(preferred), collate=padded())
class DirectPreferenceOptimization(RealModule):  # pairs, and a likelihood of the better answers over their tokens
    def build(self) -> None:
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


@real_module("distillation of a tagger", dealt(answered), collate=padded({"labels": -100}))
class Distillation(RealModule):  # divergences from a frozen teacher are a mean over samples, cross entropies over tokens
    def build(self) -> None:
        self.student = nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, WORDS))
        self.teacher = nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, mask = self.student(batch["input_ids"]), batch["attention_mask"].unsqueeze(-1)
        with torch.no_grad():
            wanted = (self.teacher(batch["input_ids"]) / 2).softmax(-1) * mask
        divergence = F.kl_div((logits / 2).log_softmax(-1) * mask, wanted, reduction="batchmean") * 4
        return 0.5 * divergence + 0.5 * F.cross_entropy(logits.mT, batch["labels"])
