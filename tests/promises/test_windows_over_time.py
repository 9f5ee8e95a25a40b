"""Windows that change size, by step or by tokens: where they end, and that each is its full batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import ENGINES as HELD
from harness import SHORT, assert_one_window_one_batch, on
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from sharded import ShardedLanguage
from support import Language, Scalar, ddp, loader, pad, sentences, trainer, x
from torch.utils.data import DataLoader

from lightning_accum import GradientAccumulation, TokenCount, Tokens

# --- schedules ---------------------------------------------------------------------------------------------------------

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
def test_a_function_of_the_optimizer_step_says_how_long_a_window_is(schedule: str, tail: str) -> None:
    class Estimates(Scalar):
        def configure_optimizers(self) -> Any:
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    size, values = SCHEDULES[schedule], [float(i) for i in range(7)]
    module = Estimates([x(value) for value in values])
    trainer("accum", max_epochs=3, callbacks=[GradientAccumulation(size, tail=tail)]).fit(module)
    windows = windows_of(7, 3, size, tail)
    expected = [sum(values[i % 7] for i in window) / len(window) for window in windows]
    assert module.gradients == pytest.approx(expected, rel=1e-15)
    assert module.estimate == len(windows)


def test_a_window_keeps_the_size_that_it_began_with_over_the_end_of_an_epoch() -> None:
    module = Scalar([x(1), x(2), x(3)])
    trainer("accum", max_epochs=2, callbacks=[GradientAccumulation({0: 2, 1: 1}, tail="carry")]).fit(module)
    assert module.gradients == pytest.approx([1.5, (3 + 1) / 2, 2, 3], rel=1e-15)


def test_a_function_that_gives_no_size_is_an_error_that_shows_it() -> None:
    run = trainer("accum", callbacks=[GradientAccumulation(lambda step: 2 - 2 * step)])
    with pytest.raises(ValueError, match=r"window\(step\) must be an int of at least 1, but window\(1\) is 0"):
        run.fit(Scalar([x(1)] * 6))


# --- tokens ------------------------------------------------------------------------------------------------------------

ROWS = sentences(70)


def shares(ranks: int, uneven: bool = True) -> list[list[list[torch.Tensor]]]:
    """The loader batches of each rank: two rows each, the last rank has fewer."""
    of_ranks = [[ROWS[i : i + 2] for i in range(2 * rank, len(ROWS), 2 * ranks)] for rank in range(ranks)]
    if uneven and ranks > 1:
        of_ranks[-1] = of_ranks[-1][:-3]
    return of_ranks


def windows_of_tokens(of_ranks: list[list[list[torch.Tensor]]], size: Callable[[float], int]) -> list[list[torch.Tensor]]:
    """The rows of each window of an epoch, counted by hand: a row has one prediction less than tokens."""
    windows: list[list[torch.Tensor]] = []
    current, tokens, seen = [], 0, 0
    for index in range(max(map(len, of_ranks))):
        now = [row for batches in of_ranks for row in (batches[index] if index < len(batches) else [])]
        current, tokens = current + now, tokens + sum(len(row) - 1 for row in now)
        if tokens >= size(seen):
            windows.append(current)
            current, tokens, seen = [], 0, seen + tokens
    return [*windows, current] if current else windows


def weights_of(windows: list[list[torch.Tensor]]) -> list[int]:
    return [sum(len(row) - 1 for row in rows) for rows in windows]


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


@pytest.mark.some_cases(3, 6)
@pytest.mark.parametrize("has_length", [True, False], ids=["sized", "iterable"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("engine", "options"), ENGINES)
def test_windows_of_tokens_are_their_full_batches(engine: str, options: dict[str, Any], optimizer: str, has_length: bool) -> None:
    by_rank = shares(HELD[engine].ranks)
    windows = windows_of_tokens(by_rank, lambda seen: 70)
    weights = weights_of(windows)
    longest = max(sum(len(row) - 1 for row in rows) for batches in by_rank for rows in batches)
    assert all(70 <= weight < 70 + len(by_rank) * longest for weight in weights[:-1])
    make, policy = partial(ShardedLanguage, optimizer), GradientAccumulation(Tokens(70))
    assert_one_window_one_batch(make, by_rank, windows, policy, engine, options, weights=weights, has_length=has_length)


def windows_of_parts(of_ranks: list[list[list[torch.Tensor]]], size: int, tokens: int) -> list[list[torch.Tensor]]:
    """The rows of each window where loader batches are split, and ranks come to different numbers of micro-batches."""
    windows: list[list[torch.Tensor]] = []
    current: list[torch.Tensor] = []
    for batches in zip(*of_ranks, strict=True):
        parts = [[rows[i : i + size] for i in range(0, len(rows), size)] for rows in batches]
        for index in range(max(map(len, parts))):
            for own in parts:
                current = current + (own[index] if index < len(own) else [])
            if sum(len(row) - 1 for row in current) >= tokens:
                windows.append(current)
                current = []
    return [*windows, current] if current else windows


@pytest.mark.some_cases(2, 4)
@pytest.mark.parametrize("tokens", [15, 40, 1000])
@pytest.mark.parametrize(("engine", "options"), ENGINES[:6])
def test_a_window_of_tokens_ends_with_any_micro_batch_of_a_split_batch(engine: str, options: dict[str, Any], tokens: int) -> None:
    """Of loader batches of seven rows on one rank, and four on the other."""
    starts = range(0, 44, 11)
    by_rank = [[ROWS[i : i + 7] for i in starts], [ROWS[i + 7 : i + 11] for i in starts]]
    by_rank = [[ROWS[i : i + 11] for i in starts]] if engine == "accum" else by_rank
    windows = windows_of_parts(by_rank, 2, tokens)
    policy = GradientAccumulation(Tokens(tokens), micro_batch=2, trim_padding=False)
    make = partial(ShardedLanguage, "adamw")
    assert_one_window_one_batch(make, by_rank, windows, policy, engine, options, weights=weights_of(windows))


def test_a_batch_size_in_tokens_that_grows() -> None:
    def size(seen: float) -> int:
        return 30 if seen < 100 else 90

    by_rank = shares(1)
    windows = windows_of_tokens(by_rank, size)
    policy = GradientAccumulation(Tokens(size))
    assert_one_window_one_batch(ShardedLanguage, by_rank, windows, policy, weights=weights_of(windows))


def test_the_number_of_steps_is_an_estimate_that_says_so() -> None:
    class Estimates(Language):
        def configure_optimizers(self) -> Any:
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

        def train_dataloader(self) -> Any:
            return loader([pad(rows) for rows in shares(1)[0]])

    module = Estimates("sgd")
    run = trainer("accum", max_epochs=4, callbacks=[GradientAccumulation(Tokens(70))])
    with pytest.warns(UserWarning, match=r"is an estimate: a window of Tokens\(count=70\) ends when its tokens are there"):
        run.fit(module)
    assert module.estimate == pytest.approx(run.global_step, rel=0.25)


@pytest.mark.parametrize("weight", ["auto", TokenCount(shift=False), lambda batch: len(batch["labels"])])
def test_the_estimated_number_of_steps_counts_a_batch_that_is_none_as_nothing(weight: Any) -> None:
    class Estimates(Scalar):
        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch["labels"])

        def configure_optimizers(self) -> Any:
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    batch = {"labels": x(1, 2, 3, 4)}
    module = Estimates([None, batch, batch, None] * 2)
    run = trainer("accum", callbacks=[GradientAccumulation(Tokens(8), weight=weight)])
    with pytest.warns(UserWarning, match="the first 8 loader batches have 2 on average"):
        run.fit(module)
    assert module.estimate == run.global_step == 2


def test_a_loss_that_is_a_sum_has_no_tokens() -> None:
    class Sum(Scalar):
        def loss(self, batch: torch.Tensor) -> torch.Tensor:
            return (self.w * batch).sum()

    run = trainer("accum", callbacks=[GradientAccumulation(Tokens(3))])
    with pytest.raises(ValueError, match="A window of Tokens ends when the weights of its micro-batches come to that many, but"):
        run.fit(Sum([x(1), x(2)]))


def test_what_cannot_be_said_in_tokens_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="only the Tokens of a window can be a function"):
        GradientAccumulation(micro_batch=Tokens(lambda seen: 3))
    with pytest.raises(
        MisconfigurationException, match=r"accumulate_grad_batches=4\) and GradientAccumulation\(Tokens\(count=3\)\)"
    ):
        trainer("accum", accumulate_grad_batches=4, callbacks=[GradientAccumulation(Tokens(3))]).fit(Scalar([x(1)]))
    with pytest.raises(ValueError, match="asked after 0 tokens, must be an int of at least 1, but count=0"):
        trainer("accum", callbacks=[GradientAccumulation(Tokens(lambda seen: 0))]).fit(Scalar([x(1), x(2)]))


# --- what a window of tokens meets on its way -----------------------------------------------------------------------------


def test_ranks_with_buffers_and_different_numbers_of_micro_batches_do_not_wait_for_each_other() -> None:
    class Buffered(Scalar):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_buffer("buffer", torch.zeros((), dtype=torch.float64))

    by_rank = [[x(1, 2, 3, 4, 5, 6, 7), x(1, 2, 3), x(4, 5)], [x(1), x(3, 3, 3), x(1)]]
    run = trainer(ddp(timeout=SHORT), devices=2, callbacks=[GradientAccumulation(Tokens(3), micro_batch=1)])
    module = Buffered(by_rank=by_rank)
    run.fit(module)
    windows = [[1, 1, 2], [3, 4, 5], [6, 7, 1, 3], [2, 3, 3, 3], [4, 1, 5]]
    assert module.total == pytest.approx(sum(sum(window) / len(window) for window in windows), rel=1e-14)


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_first_batch_is_none_on_one_rank(micro_batch: int | None) -> None:
    module = Scalar(by_rank=[[x(1), x(2), x(3), x(4)], [None, x(5), x(6), x(7)]])
    trainer(ddp(timeout=SHORT), devices=2, callbacks=[GradientAccumulation(Tokens(3), micro_batch=micro_batch)]).fit(module)
    assert module.total == pytest.approx((1 + 2 + 5) / 3 + (3 + 6 + 4 + 7) / 4, rel=1e-14)


def test_max_steps_reached_inside_a_loader_batch_is_kept() -> None:
    module = Scalar([x(1, 2, 3, 4, 5, 6, 7, 8), x(9, 10)])
    run = trainer("accum", max_steps=1, max_epochs=-1, callbacks=[GradientAccumulation(Tokens(2), micro_batch=1)])
    run.fit(module)
    assert module.gradients == [1.5]
    assert run.global_step == 1


def test_schedulers_that_count_loader_batches_count_each_once() -> None:
    class Scheduled(Scalar):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler, "interval": "step"}}

    module = Scheduled([x(*[1.0] * 8)] * 3)
    policy = GradientAccumulation(Tokens(2), micro_batch=1, scheduler_counts="micro_batches")
    trainer("accum", callbacks=[policy]).fit(module)
    assert module.scheduler.last_epoch == 3


def test_the_estimate_knows_of_micro_batches_and_leaves_the_order_alone() -> None:
    class Estimates(Scalar):
        asks = True

        def configure_optimizers(self) -> Any:
            self.estimate = self.trainer.estimated_stepping_batches if self.asks else None
            return super().configure_optimizers()

        def train_dataloader(self) -> DataLoader:
            generator = torch.Generator().manual_seed(3)
            return DataLoader([x(*range(8 * i, 8 * i + 8)) for i in range(4)], batch_size=None, shuffle=True, generator=generator)

    asked, silent = Estimates(), Estimates()
    silent.asks = False
    for module in (asked, silent):
        trainer("accum", callbacks=[GradientAccumulation(Tokens(2), micro_batch=1)]).fit(module)
    assert asked.estimate == len(asked.gradients) == 16
    assert asked.gradients == silent.gradients


def test_what_zero_grad_does_to_the_module_lasts_on_a_rank_that_stands_in() -> None:
    class Averaged(Scalar):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_buffer("average", torch.zeros((), dtype=torch.float64))

        def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
            self.average.mul_(0.5).add_(0.5 * self.w.detach())

        def on_train_end(self) -> None:
            torch.save(self.average, f"average{self.global_rank}.pt")

    by_rank = [[x(10), x(11)], [x(i) for i in range(6)]]
    trainer(ddp(timeout=SHORT, broadcast_buffers=False), devices=2, callbacks=[GradientAccumulation(1)]).fit(
        Averaged(by_rank=by_rank)
    )
    assert torch.load("average0.pt") == torch.load("average1.pt") != 0
