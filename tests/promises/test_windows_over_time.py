"""Windows that change size, by step or by tokens: where they end, and that each is its full batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import ENGINES as HELD
from harness import assert_one_window_one_batch, on
from sharded import ShardedLanguage
from support import Asking, Scalar, fit, sentences, x

from lightning_accum import AccumulationError, GradientAccumulation, Tokens


class Estimates(Asking, Scalar):
    pass


SCHEDULES: dict[str, Callable[[int], int]] = {
    "growing": lambda step: 1 + step,
    "falling": lambda step: max(1, 4 - step),
    "up and down": lambda step: [1, 4, 2][step % 3],
}


def windows_of(batches: int, epochs: int, size: Callable[[int], int], tail: str) -> list[list[int]]:
    """The loader batches of each window, counted by hand."""
    windows, current, needed = [], [], size(0)
    for index in range(batches * epochs):
        current.append(index)
        is_end = (index + 1) % batches == 0
        is_last = index + 1 == batches * epochs
        if len(current) == needed or (is_end and tail == "step") or (is_last and tail == "carry"):
            windows.append(current)
            current, needed = [], size(len(windows))
        elif is_end and tail == "drop":
            current = []
    return windows


@pytest.mark.parametrize("tail", ["step", "drop", "carry"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_function_of_the_optimizer_step_says_how_long_a_window_is(schedule: str, tail: Any) -> None:
    size, values = SCHEDULES[schedule], [float(i) for i in range(7)]
    module = Estimates([x(value) for value in values])
    fit(module, None, GradientAccumulation(size, tail=tail), max_epochs=3)
    windows = windows_of(7, 3, size, tail)
    expected = [sum(values[i % 7] for i in window) / len(window) for window in windows]
    assert module.gradients == pytest.approx(expected, rel=1e-15)
    assert module.estimate == len(windows)


@pytest.mark.parametrize(
    ("batches", "sizes", "expected"), [(3, {0: 2, 1: 1}, [1.5, (3 + 1) / 2, 2, 3]), (4, {0: 3, 1: 5}, [2, (4 + 1 + 2) / 3, 3.5])]
)
def test_a_window_keeps_the_size_that_it_began_with_over_the_end_of_an_epoch(batches: int, sizes: Any, expected: Any) -> None:
    module = Scalar([x(value) for value in range(1, batches + 1)])
    fit(module, None, GradientAccumulation(sizes, tail="carry"), max_epochs=2)
    assert module.gradients == pytest.approx(expected, rel=1e-15)


ROWS = sentences(70)


def shares(ranks: int) -> list[list[list[torch.Tensor]]]:
    """The loader batches of each rank: two rows each, the last of several ranks has fewer."""
    of_ranks = [[ROWS[i : i + 2] for i in range(2 * rank, len(ROWS), 2 * ranks)] for rank in range(ranks)]
    return [*of_ranks[:-1], of_ranks[-1][:-3]] if ranks > 1 else of_ranks


def tokens_of(rows: list[torch.Tensor]) -> int:
    """A row has one prediction less than tokens."""
    return sum(len(row) - 1 for row in rows)


def windows_of_tokens(of_ranks: list[list[list[torch.Tensor]]], size: Callable[[float], int]) -> list[list[torch.Tensor]]:
    """The rows of each window of an epoch, counted by hand: it ends with the loader batch in which it is full."""
    windows: list[list[torch.Tensor]] = []
    current, seen = [], 0
    for index in range(max(map(len, of_ranks))):
        current = current + [row for batches in of_ranks for row in (batches[index] if index < len(batches) else [])]
        if tokens_of(current) >= size(seen):
            windows.append(current)
            current, seen = [], seen + tokens_of(current)
    return [*windows, current] if current else windows


ENGINES = [
    on("accum"),
    on("ddp"),
    on("ddp", sync="micro_batch"),
    on("fsdp2"),
    on("fsdp2 and tensor"),
    on("fsdp1"),
    on("ddp of 3"),
    on("ddp", find_unused_parameters=True),
]


@pytest.mark.some_cases(3, 4)
@pytest.mark.parametrize("has_length", [True, False], ids=["sized", "iterable"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("engine", "options"), ENGINES)
def test_windows_of_tokens_are_their_full_batches(engine: str, options: dict[str, Any], optimizer: str, has_length: bool) -> None:
    by_rank = shares(HELD[engine].ranks)
    windows = windows_of_tokens(by_rank, lambda seen: 70)
    weights = [tokens_of(rows) for rows in windows]
    longest = max(tokens_of(rows) for batches in by_rank for rows in batches)
    assert all(70 <= weight < 70 + len(by_rank) * longest for weight in weights[:-1])
    make, policy = partial(ShardedLanguage, optimizer), GradientAccumulation(Tokens(70))
    arguments = {"windows": windows, "weights": weights, "has_length": has_length}
    assert_one_window_one_batch(make, by_rank, policy, engine, options, **arguments)


def test_a_batch_size_in_tokens_may_grow() -> None:
    def size(seen: float) -> int:
        return 30 if seen < 100 else 90

    windows = windows_of_tokens(shares(1), size)
    weights, policy = [tokens_of(rows) for rows in windows], GradientAccumulation(Tokens(size))
    assert_one_window_one_batch(ShardedLanguage, shares(1), policy, windows=windows, weights=weights)


class Sum(Scalar):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.w * batch).sum()


@pytest.mark.parametrize(
    ("window", "kind", "trainer", "names"),
    [
        (lambda step: 2 - 2 * step, Scalar, {}, "window"),
        (Tokens(3), Sum, {}, "Tokens"),
        (Tokens(3), Scalar, {"accumulate_grad_batches": 4}, "accumulate_grad_batches"),
        (Tokens(lambda seen: 0), Scalar, {}, "count"),
    ],
)
def test_windows_that_have_no_end_are_refused(window: Any, kind: type[Scalar], trainer: dict[str, Any], names: str) -> None:
    with pytest.raises(AccumulationError, match=names):
        fit(kind([x(1)] * 6), None, GradientAccumulation(window), **trainer)
