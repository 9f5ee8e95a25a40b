"""A weight for each term of a loss: the window of any loader batches takes the step of their full batch, all of its terms too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from rated import EACH
from resumed import Module as Resumed
from resumed import assert_goes_on
from support import Toy, ddp, fit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_accum import GradientAccumulation, SampleCount, TokenCount, Tokens
from lightning_accum.testing import assert_window_equals_batch

Batch = dict[str, Tensor]


class Model(NamedTuple):
    """A loss of several means over different counts, and a row of its batches, of which the first has one of each."""

    net: Callable[[], nn.Module]
    loss: Callable[[Any, Batch], Tensor]
    row: Callable[[bool], Batch]
    weight: list[Callable[[Any], Any]]


def masked_language(net: Any, batch: Batch) -> Tensor:
    """BERT's pretraining: the masked tokens, and whether the second sentence follows."""
    hidden = net[0](batch["ids"]).tanh()
    of_tokens = F.cross_entropy(net[1](hidden).flatten(0, 1), batch["labels"].flatten())
    return of_tokens + F.cross_entropy(net[2](hidden.mean(1)), batch["follows"])


def masked_row(is_first: bool) -> Batch:
    ids = torch.randint(0, 13, (9,))
    labels = torch.where(torch.rand(9) < 0.3, ids, -100)
    labels[0] = ids[0] if is_first else labels[0]
    return {"ids": ids, "labels": labels, "follows": torch.randint(0, 2, ())}


def answers(net: Any, batch: Batch) -> Tensor:
    """Where an answer begins and ends in a text; it may begin before it, or end after it."""
    hidden = net[0](batch["text"]).tanh()
    start, end = net[1](hidden).unbind(-1)
    of_span = F.cross_entropy(start, batch["start"], ignore_index=-100) + F.cross_entropy(end, batch["end"], ignore_index=-100)
    return of_span / 2 + F.binary_cross_entropy_with_logits(net[2](hidden.mean(1))[:, 0], batch["has"])


def answer(is_first: bool) -> Batch:
    start, end = torch.where(torch.rand(2) < 0.4, -100, torch.randint(0, 7, (2,))) if not is_first else torch.ones(2).long()
    return {"text": torch.randint(0, 11, (7,)), "start": start, "end": end, "has": (start >= 0).double()}


def parts(*modules: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleList(make() for make in modules)


def counted(name: str) -> Callable[[Any], Any]:
    return lambda batch: (batch[name] != -100).sum()


Embed, Layer = partial(partial, nn.Embedding), partial(partial, nn.Linear)
MODELS = {
    "masked language": Model(
        parts(Embed(13, 8), Layer(8, 13), Layer(8, 2)), masked_language, masked_row, [TokenCount(shift=False), SampleCount()]
    ),
    "answers": Model(
        parts(Embed(11, 6), Layer(6, 2, bias=False), Layer(6, 1)),
        answers,
        answer,
        [counted("start"), counted("end"), SampleCount()],
    ),
}


def rows_of(name: str, batches: int) -> list[list[Batch]]:
    """The rows of batches of 2 to 5, of which no two have the same counts."""
    torch.manual_seed(17)
    return [[MODELS[name].row(i == 0) for i in range(int(torch.randint(2, 6, ())))] for _ in range(batches)]


def toy(name: str) -> Toy:
    return Toy(MODELS[name].loss, net=MODELS[name].net)


def assert_full_batches(name: str, batches: Any, window: Any, windows: Any = None, policy: Any = None, **kwargs: Any) -> None:
    accumulation = GradientAccumulation(window, weight=MODELS[name].weight, trim_padding=False, log=False, **(policy or {}))
    assert_window_equals_batch(partial(toy, name), batches, accumulation, windows=windows, **kwargs)


POLICIES: dict[str, dict[str, Any]] = {
    "whole": {},
    "split": {"micro_batch": 2},
    "offloaded": {"micro_batch": "offload"},
    "watched": {"on_nonfinite": "raise"},
    "dropped tail": {"tail": "drop"},
}


@pytest.mark.some_cases(6)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_each_term_of_a_window_is_that_of_its_full_batch(name: str, policy: str) -> None:
    assert_full_batches(name, rows_of(name, 8), 3, policy=POLICIES[policy])


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("window", [2, "offload"])
@pytest.mark.parametrize("name", MODELS)
def test_over_two_ranks_of_different_lengths(name: str, window: Any) -> None:
    batches = rows_of(name, 9)
    policy = {"micro_batch": "offload"} if window == "offload" else {}
    size = 1 if window == "offload" else window
    by_rank = [batches[:5], batches[5:]]
    assert_full_batches(name, by_rank, size, policy=policy, strategy=ddp, devices=2, by_rank=True)


def full_at(batches: Sequence[list[Batch]], count: Callable[[Batch], int], tokens: int) -> list[list[Batch]]:
    """The rows of each window of so many tokens."""
    full: list[list[Batch]] = [[]]
    for batch in batches:
        full[-1] += batch
        if sum(map(count, full[-1])) >= tokens:
            full.append([])
    return [own for own in full if own]


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_window_of_tokens_is_drawn_until_it_has_them(micro_batch: int | None) -> None:
    batches = rows_of("masked language", 11)
    full = full_at(batches, lambda row: int((row["labels"] != -100).sum()), 25)
    assert len(full) > 3
    assert_full_batches("masked language", batches, Tokens(25), full, {"micro_batch": micro_batch})


def test_tokens_of_all_ranks_end_a_window() -> None:
    batches = rows_of("answers", 10)
    both = [[*batches[i], *(batches[6:][i] if i < 4 else [])] for i in range(6)]
    full = full_at(both, lambda row: int(row["start"] != -100), 6)
    by_rank = [batches[:6], batches[6:]]
    assert_full_batches("answers", by_rank, Tokens(6), full, strategy=ddp, devices=2, by_rank=True)


@pytest.mark.parametrize(
    ("window", "sizes"),
    [
        ({0: 2, 1: 3}, (2, 2, 2, 1, 3, 3, 1)),
        ({0: 1, 1: 4}, (1,) * 7 + (4, 3)),
        (lambda step: 1 + step % 3, (1, 2, 3, 1, 2, 3, 1, 1)),
    ],
)
def test_windows_whose_size_changes(window: Any, sizes: Sequence[int]) -> None:
    batches = rows_of("answers", 7)
    every = iter(batches * 2)
    windows = [[row for _ in range(size) for row in next(every)] for size in sizes]
    assert_full_batches("answers", batches, window, windows, epochs=2)


def test_a_batch_that_is_none_is_in_its_window() -> None:
    batches: list[Any] = rows_of("answers", 7)
    batches[0] = batches[4] = None
    assert_full_batches("answers", batches, 3)


class Endless(IterableDataset):
    """Says how many it has yielded."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches, self.yielded = batches, 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.yielded += 1
            yield self.batches[(self.yielded - 1) % len(self.batches)]


class Seen(Callback):
    """What a callback gets in each loader batch, and what had been drawn by then."""

    def __init__(self, stream: Endless) -> None:
        self.stream = stream
        self.ahead: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int) -> None:
        assert torch.equal(batch["text"], self.stream.batches[batch_idx % 5]["text"])
        self.ahead.append(self.stream.yielded - batch_idx - 1)


@pytest.mark.parametrize(
    ("weight", "ahead"),
    [(MODELS["answers"].weight, [1, 3, 2, 1]), (SampleCount(), [1, 1, 1, 1])],
    ids=["a weight for each term", "one weight"],
)
def test_a_stream_is_drawn_as_far_as_the_window_and_only_with_a_weight_for_each_term(weight: Any, ahead: list[int]) -> None:
    """When its first batch runs, after that batch's hook. And the batch that Lightning draws ahead of a stream."""
    stream = Endless([default_collate(rows) for rows in rows_of("answers", 5)])
    seen, policy = Seen(stream), GradientAccumulation(4, weight=weight, check=False)
    fit(toy("answers"), DataLoader(stream, batch_size=None), policy, seen, max_steps=3, max_epochs=-1)
    assert seen.ahead == ahead * 3


class Scored(Resumed):
    """Of two terms."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        of_tokens = super().training_step(batch, batch_idx)
        return of_tokens + 0.3 * (self.net(batch["input_ids"])[:, 0].mean(-1) - 1).square().mean()


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("policy", [{"window": 3}, {"window": 3, "micro_batch": 2}, {"window": Tokens(60)}], ids=str)
def test_a_checkpoint_inside_a_window_goes_on_to_the_bit(policy: dict[str, Any]) -> None:
    """What was drawn ahead and not trained on comes again."""
    assert_goes_on(lambda: "accum", 1, (1, 5), weight=EACH, module=Scored, **policy)


def test_on_two_ranks_it_goes_on_to_rounding() -> None:
    assert_goes_on(ddp, 2, (4,), weight=EACH, module=Scored, window=3)
