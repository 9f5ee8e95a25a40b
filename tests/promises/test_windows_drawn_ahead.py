"""A list with a weight for each term of a loss: the window of any loader batches is counted in them, and takes their step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_one_window_one_batch, windows_of
from lightning.pytorch.callbacks import Callback
from losses_of_terms import COUNTS, LOSSES, OfTerms, rows, windows_of_tokens
from resumed import Module as Resumed
from resumed import assert_goes_on
from support import ddp, fit, warned
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_accum import GradientAccumulation, SampleCount, TokenCount, Tokens

NAME = "nodes, edges and graphs"
WEIGHT = [COUNTS[count] for count in LOSSES[NAME].counts.split(", ")]
BATCHES = [rows(size, seed) for seed, size in enumerate((3, 2, 5, 2, 4, 2, 3, 2, 5, 2))]


def assert_full_batches(by_rank: Any, windows: Any, engine: str = "accum", epochs: int = 1, **policy: Any) -> None:
    make, accumulation = partial(OfTerms, LOSSES[NAME].of, "adamw"), GradientAccumulation(**policy, weight=WEIGHT, log=False)
    arguments = {"options": {"find_unused_parameters": True} if engine == "ddp" else {}, "max_epochs": epochs}
    with warned() as messages:
        assert_one_window_one_batch(make, by_rank, windows, accumulation, engine, collate=default_collate, **arguments)
    assert [message for message in messages if not message.startswith("Padding")] == []


POLICIES: list[dict[str, Any]] = [
    {"window": 3}, {"window": 3, "tail": "drop"}, {"window": 3, "micro_batch": 2}, {"window": 3, "micro_batch": "offload"},
    {"window": 3, "on_nonfinite": "raise"}, {"micro_batch": Tokens(12)}, {"micro_batch": "auto"},
    {"micro_batch": 2, "on_nonfinite": "skip"},
]  # fmt: skip


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_each_term_of_a_window_is_that_of_its_full_batch(policy: dict[str, Any]) -> None:
    assert_full_batches([BATCHES], windows_of([BATCHES], policy.get("window", 1), tail=policy.get("tail", "step")), **policy)


def test_each_term_takes_no_second_backward() -> None:
    module, backwards = OfTerms(LOSSES[NAME].of), []
    module.on_after_backward = lambda: backwards.append(1)
    fit(module, [default_collate(rows(8, seed)) for seed in (1, 2)], GradientAccumulation(micro_batch=2, weight=WEIGHT))
    assert len(backwards) == 2 * 8 / 2


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_window_of_tokens_is_drawn_until_it_has_them(micro_batch: int | None) -> None:
    assert len(windows_of_tokens(BATCHES, 25)) > 3
    assert_full_batches([BATCHES], windows_of_tokens(BATCHES, 25), window=Tokens(25), micro_batch=micro_batch)


def test_tokens_of_all_ranks_end_a_window() -> None:
    by_rank = [BATCHES[:6], BATCHES[6:]]
    both = [[*by_rank[0][i], *(by_rank[1][i] if i < 4 else [])] for i in range(6)]
    assert_full_batches(by_rank, windows_of_tokens(both, 30), "ddp", window=Tokens(30))


@pytest.mark.parametrize(
    ("window", "sizes"),
    [({0: 2, 1: 3}, (2, 2, 2, 1, 3, 3, 1)), (lambda step: 1 + step % 3, (1, 2, 3, 1, 2, 3, 1, 1))],
    ids=["by epoch", "by step"],
)
def test_windows_whose_size_changes(window: Any, sizes: Sequence[int]) -> None:
    every = iter(BATCHES[:7] * 2)
    windows = [[row for _ in range(size) for row in next(every)] for size in sizes]
    assert_full_batches([BATCHES[:7]], windows, epochs=2, window=window)


class Endless(IterableDataset):
    """Says how many it has yielded."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches, self.yielded = batches, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.yielded += 1
            yield self.batches[(self.yielded - 1) % len(self.batches)]


class Seen(Callback):
    """What a callback gets in each loader batch, and what had been drawn by then."""

    def __init__(self, stream: Endless) -> None:
        self.stream = stream
        self.ahead: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        assert torch.equal(batch["ids"], self.stream.batches[batch_idx % 5]["ids"])
        self.ahead.append(self.stream.yielded - batch_idx - 1)


@pytest.mark.parametrize(("weight", "ahead"), [(WEIGHT, [1, 3, 2, 1]), (SampleCount(), [1, 1, 1, 1])], ids=["a list", "one weight"])
def test_a_stream_is_drawn_as_far_as_the_window_and_only_with_a_weight_for_each_term(weight: Any, ahead: list[int]) -> None:
    """When its first batch runs, after that batch's hook. And the batch that Lightning draws ahead of a stream."""
    stream = Endless(list(map(default_collate, BATCHES[:5])))
    seen, policy = Seen(stream), GradientAccumulation(4, weight=weight, check=False)
    fit(OfTerms(LOSSES[NAME].of), DataLoader(stream, batch_size=None), policy, seen, max_steps=3, max_epochs=-1)
    assert seen.ahead == ahead * 3


class Scored(Resumed):
    """Of two terms."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        of_tokens = super().training_step(batch, batch_idx)
        return of_tokens + 0.3 * (self.net(batch["input_ids"])[:, 0].mean(-1) - 1).square().mean()


@pytest.mark.exhaustive
def test_on_two_ranks_a_checkpoint_inside_a_window_goes_on_to_rounding() -> None:
    """What was drawn ahead and not trained on comes again."""
    assert_goes_on(ddp, 2, (4,), weight=[TokenCount(), SampleCount()], module=Scored, window=3)
