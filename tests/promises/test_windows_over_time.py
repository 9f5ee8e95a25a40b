"""Windows of tokens are their full batches on every engine, and windows that have no end are refused."""

from functools import partial
from typing import Any

import pytest
import torch
from harness import ENGINES as HELD
from harness import assert_one_window_one_batch, on, on_each
from sharded import ShardedLanguage
from support import Scalar, fit, sentences, x

from lightning_accum import AccumulationError, GradientAccumulation, Tokens

ROWS = sentences(70)


ENGINES = [
    *on_each("accum, ddp, fsdp2, fsdp2 and tensor, fsdp1, ddp of 3"),
    *(on("ddp", sync="micro_batch"), on("ddp", find_unused_parameters=True)),
]


@pytest.mark.some_cases(3, 4)
@pytest.mark.parametrize("has_length", [True, False], ids=["sized", "iterable"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("engine", "options"), ENGINES)
def test_windows_of_tokens_are_their_full_batches(engine: str, options: dict[str, Any], optimizer: str, has_length: bool) -> None:
    def tokens_of(rows: list[torch.Tensor]) -> int:  # a row has one prediction less than tokens
        return sum(len(row) - 1 for row in rows)

    def windows_of_tokens(of_ranks: list[list[list[torch.Tensor]]], size: int) -> list[list[torch.Tensor]]:
        """The rows of each window of an epoch, counted by hand: it ends with the loader batch in which it is full."""
        windows: list[list[torch.Tensor]] = [[]]
        for index in range(max(map(len, of_ranks))):
            windows[-1] += [row for batches in of_ranks if index < len(batches) for row in batches[index]]
            if tokens_of(windows[-1]) >= size:
                windows.append([])
        return [window for window in windows if window]

    def shares(ranks: int) -> list[list[list[torch.Tensor]]]:
        """The loader batches of each rank: two rows each, the last of several ranks has fewer."""
        of_ranks = [[ROWS[i : i + 2] for i in range(2 * rank, len(ROWS), 2 * ranks)] for rank in range(ranks)]
        return [*of_ranks[:-1], of_ranks[-1][:-3]] if ranks > 1 else of_ranks

    by_rank = shares(HELD[engine].ranks)
    windows = windows_of_tokens(by_rank, 70)
    weights = [tokens_of(rows) for rows in windows]
    longest = max(tokens_of(rows) for batches in by_rank for rows in batches)
    assert all(70 <= weight < 70 + len(by_rank) * longest for weight in weights[:-1])
    make, policy = partial(ShardedLanguage, optimizer), GradientAccumulation(Tokens(70))
    arguments = {"windows": windows, "weights": weights, "has_length": has_length}
    assert_one_window_one_batch(make, by_rank, policy, engine, options, **arguments)


class Sum(Scalar):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.w * batch).sum()


@pytest.mark.parametrize(
    ("policy", "kind", "trainer", "names"),
    [
        (GradientAccumulation(lambda step: 2 - 2 * step), Scalar, {}, "window"),
        (GradientAccumulation(Tokens(3)), Sum, {}, "Tokens"),
        (GradientAccumulation(Tokens(3)), Scalar, {"accumulate_grad_batches": 4}, "accumulate_grad_batches"),
        (GradientAccumulation(Tokens(lambda seen: 0)), Scalar, {}, "count"),
        (GradientAccumulation(7, tail="drop"), Scalar, {}, "window"),  # the tail of every epoch
        (GradientAccumulation({0: 8, 2: 1}, tail="drop"), Scalar, {}, "window"),
    ],
)
def test_windows_that_have_no_end_are_refused(policy: GradientAccumulation, kind: type[Scalar], trainer: Any, names: str) -> None:
    with pytest.raises(AccumulationError, match=names):
        fit(kind([x(1)] * 6), None, policy, **trainer)
