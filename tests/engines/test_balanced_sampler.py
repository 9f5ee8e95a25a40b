"""Ranks get equal work, and each window the samples that it has with SameOrderSampler."""

from __future__ import annotations

import itertools
import math
import random
from functools import partial
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_one_window_one_batch, on
from support import Language, ddp, pad, sentences, trainer
from torch.utils.data import DataLoader

from lightning_accum import BalancedBatchSampler, GradientAccumulation, SameOrderSampler, Tokens
from lightning_accum.even_shares import batch_sizes, share_evenly


def log_normal(number: int, seed: int = 0) -> list[int]:
    """Median 80, longest 512."""
    generator = random.Random(seed)
    return [max(1, min(512, round(80 * math.exp(0.9 * generator.gauss(0, 1))))) for _ in range(number)]


def by_rank(lengths: Any, batch_size: int, ranks: int, epoch: int = 0, **kwargs: Any) -> list[list[list[int]]]:
    """The loader batches of each rank."""
    found = []
    for rank in range(ranks):
        sampler = BalancedBatchSampler(lengths, batch_size, num_replicas=ranks, rank=rank, **kwargs)
        sampler.set_epoch(epoch)
        found.append(list(sampler))
        assert len(sampler) == len(found[-1])
    return found


def windows_of(batches: list[list[list[int]]], window: int) -> list[list[int]]:
    """What all ranks together have in each window, sorted."""
    steps = list(zip_longest(*batches, fillvalue=[]))
    groups = [steps[start : start + window] for start in range(0, len(steps), window)]
    return [sorted(index for step in group for batch in step for index in batch) for group in groups]


def windows_of_same_order(samples: int, batch_size: int, ranks: int, window: int, epoch: int, **kwargs: Any) -> list[list[int]]:
    shares = []
    for rank in range(ranks):
        sampler = SameOrderSampler(range(samples), **kwargs)
        sampler.set_epoch(epoch)
        sampler.deal(ranks, rank)
        own = list(sampler)
        shares.append([own[start : start + batch_size] for start in range(0, len(own), batch_size)])
    return windows_of(shares, window)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_windows_hold_the_samples_of_same_order_sampler_in_every_epoch(ranks, window, shuffle) -> None:
    for samples, batch_size, epoch in itertools.product([1, 2, 3, 7, 24, 61], [1, 2, 5], range(2)):
        lengths = log_normal(samples)
        found = by_rank(lengths, batch_size, ranks, epoch, window=window, shuffle=shuffle, seed=3)
        assert all(batch for batches in found for batch in batches)
        assert windows_of(found, window) == windows_of_same_order(
            samples, batch_size, ranks, window, epoch, shuffle=shuffle, seed=3
        )


@pytest.mark.parametrize(("samples", "ranks"), [(5, 2), (16, 4), (100, 4), (61, 5), (9, 4)])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("window", [1, 4])
def test_ranks_have_as_many_loader_batches_unless_there_are_fewer_samples_than_ranks(window, batch_size, samples, ranks) -> None:
    numbers = [len(batches) for batches in by_rank(log_normal(samples), batch_size, ranks, window=window)]
    left = samples % (window * ranks * batch_size)
    assert max(numbers) - min(numbers) == (1 if 0 < left < ranks else 0)


@pytest.mark.parametrize("ranks", [8, 64, pytest.param(1024, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("cost", [lambda length: length, lambda length: length**2, lambda length: length + length**2 / 64])
def test_slowest_rank_is_within_a_two_hundredth_of_the_mean(ranks: int, cost) -> None:
    for seed in range(4):
        costs = [cost(length) for length in log_normal(16 * ranks, seed)]
        sums = [sum(costs[position] for position in share) for share in share_evenly(costs, ranks, at_least=4)]
        assert max(sums) <= 1.005 * sum(costs) / ranks


@pytest.mark.parametrize("shares", [2, 3])
def test_few_samples_are_shared_almost_as_evenly_as_can_be(shares: int) -> None:
    for seed in range(20):
        costs = log_normal(8, seed)
        best = min(
            max(sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == share) for share in range(shares))
            for owners in itertools.product(range(shares), repeat=len(costs))
        )
        found = share_evenly(costs, shares)
        assert sorted(position for share in found for position in share) == list(range(8))
        assert max(sum(costs[position] for position in share) for share in found) <= 1.1 * best


@pytest.mark.parametrize("cost", [[1000, 1, 1, 1, 1, 1, 1, 1], [0] * 8, [0, 0, 0, 0, 0, 0, 5, 5], [7] * 8])
def test_every_share_has_as_many_as_it_needs(cost: list[int]) -> None:
    for shares, at_least in [(1, 8), (2, 4), (2, 2), (4, 2), (8, 1), (3, 2)]:
        found = share_evenly(cost, shares, at_least)
        assert sorted(position for share in found for position in share) == list(range(8))
        assert min(map(len, found)) >= at_least


def test_inside_a_rank_batches_are_by_length_and_the_largest_padded_one_is_the_smallest_possible() -> None:
    lengths = log_normal(48)
    for batches in by_rank(lengths, 4, 2, window=6):
        found = [lengths[index] for batch in batches for index in batch]
        assert found == sorted(found, reverse=True)
    for seed in range(10):
        ordered = sorted(log_normal(9, seed), reverse=True)
        best = min(
            max(ordered[a] * (b - a) for a, b in itertools.pairwise([0, *cuts, 9]))
            for cuts in itertools.combinations(range(1, 9), 3)
        )
        sizes = batch_sizes(ordered, 4)
        starts = [0, *itertools.accumulate(sizes)]
        assert (len(sizes), sum(sizes), min(sizes) > 0) == (4, 9, True)
        assert max(ordered[a] * (b - a) for a, b in itertools.pairwise(starts)) <= best * 1.002


@pytest.mark.parametrize("given", ["list", "tensor", "floats", "function", "entries"])
def test_lengths_of_any_kind_are_the_same(given: str) -> None:
    numbers, calls = log_normal(30), []

    def length_of(index: int) -> int:
        calls.append(index)
        return numbers[index]

    kinds: dict[str, Any] = {
        "list": numbers,
        "tensor": torch.tensor(numbers),
        "floats": torch.tensor(numbers, dtype=torch.float32).numpy(),
        "function": length_of,
        "entries": [torch.tensor(number) for number in numbers],
    }
    extra = {"samples": 30} if given == "function" else {}
    sampler = BalancedBatchSampler(kinds[given], 3, window=2, num_replicas=2, rank=1, **extra)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert list(sampler) == by_rank(numbers, 3, 2, epoch, window=2)[1]
    assert calls == (list(range(30)) if given == "function" else [])


def test_it_goes_on_where_it_was_stopped() -> None:
    lengths = log_normal(50)
    whole = by_rank(lengths, 3, 2, epoch=4, window=4)[0]
    for stop in range(len(whole)):
        first = BalancedBatchSampler(lengths, 3, window=4, num_replicas=2, rank=0)
        first.set_epoch(4)
        begun = list(itertools.islice(first, stop))
        second = BalancedBatchSampler(lengths, 3, window=4, num_replicas=2, rank=0)
        second.load_state_dict(first.state_dict())
        assert begun + list(second) == whole
        assert list(second) == whole  # and the next epoch is whole again


def test_stateful_loader_goes_on_inside_an_epoch() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    lengths = log_normal(20)

    def loader() -> Any:
        sampler = BalancedBatchSampler(lengths, 2, window=2, num_replicas=2, rank=1)
        sampler.set_epoch(1)
        return stateful(range(20), batch_sampler=sampler)

    whole = [batch.tolist() for batch in loader()]
    first, second = loader(), loader()
    begun = [batch.tolist() for batch in itertools.islice(first, 3)]
    second.load_state_dict(first.state_dict())
    assert begun + [batch.tolist() for batch in second] == whole


# --- in a training ----------------------------------------------------------------------------------------------------

ROWS = sentences(37)


class Trained(Language):
    """Lightning is left to inject its sampler, if it does."""

    def __init__(self, optimizer: str, sampler: BalancedBatchSampler) -> None:
        super().__init__(optimizer)
        self.sampler = sampler

    def on_train_epoch_start(self) -> None:
        assert self.trainer.train_dataloader.batch_sampler is self.sampler
        assert (self.sampler.num_replicas, self.sampler.rank) == (self.trainer.world_size, self.trainer.global_rank)


@pytest.mark.some_cases(4)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("engine", "options", "window", "batch_size", "micro_batch"),
    [on("accum", 4, 4, None), on("accum", 4, 4, Tokens(24)), on("ddp", 4, 2, None), on("ddp", 1, 8, Tokens(24)),
     on("ddp of 4", 2, 2, None), on("ddp of 4", 1, 4, Tokens(24))],
)  # fmt: skip
def test_a_window_is_the_full_batch_of_same_order_sampler(engine, options, window, batch_size, micro_batch, optimizer) -> None:
    sampler, windows = BalancedBatchSampler([len(row) for row in ROWS], batch_size, window=window, seed=5), []
    for epoch in range(2):
        order = SameOrderSampler(ROWS, seed=5)
        order.set_epoch(epoch)
        indices = list(order)
        windows += [[ROWS[i] for i in indices[start : start + 16]] for start in range(0, 37, 16)]
    data, policy = DataLoader(ROWS, batch_sampler=sampler, collate_fn=pad), GradientAccumulation(window, micro_batch=micro_batch)
    arguments = {"max_epochs": 2, "use_distributed_sampler": True}
    assert_one_window_one_batch(partial(Trained, optimizer, sampler), data, windows, policy, engine, options, **arguments)


def test_lengths_of_another_dataset_are_refused_before_training() -> None:
    loader = DataLoader(ROWS, batch_sampler=BalancedBatchSampler([1] * 36, 4), collate_fn=pad)
    with pytest.raises(ValueError, match=r"lengths of 36 samples, but the loader's list has 37: pass the lengths of this dataset"):
        trainer().fit(Language(), loader)


def test_ranks_with_other_lengths_are_refused_before_training() -> None:
    class OfRank(Language):
        def train_dataloader(self) -> DataLoader:
            lengths = [len(row) + self.trainer.global_rank for row in ROWS]
            return DataLoader(ROWS, batch_sampler=BalancedBatchSampler(lengths, 4), collate_fn=pad)

    with pytest.raises(Exception, match="has other lengths, costs or arguments on one rank than on another"):
        trainer(ddp(), devices=2).fit(OfRank())


def test_lightnings_own_strategy_says_how_to_use_it() -> None:
    loader = DataLoader(ROWS, batch_sampler=BalancedBatchSampler([len(row) for row in ROWS], 4), collate_fn=pad)
    with pytest.raises(Exception, match=r"(?s)TypeError.*set `Trainer\(use_distributed_sampler=False\)`"):
        trainer(pl.strategies.DDPStrategy(start_method="fork"), devices=2, use_distributed_sampler=True).fit(Language(), loader)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "arguments", "error", "found"),
    [
        ([1, 2], {"batch_size": 0}, ValueError, r"batch_size=0\): expected 1 or more"),
        ([1, 2], {"batch_size": 2.0}, TypeError, r"batch_size=2.0\): expected a whole number, found float"),
        ([1, 2], {"window": True}, TypeError, r"window=True"),
        ([1, 2], {"window": Tokens(8)}, TypeError, r"window=.*expected a whole number, found Tokens"),
        ([1, -2], {}, ValueError, r"finite number from 0, found lengths\[1\] = -2"),
        ([1, math.nan], {}, ValueError, r"found lengths\[1\] = nan"),
        ([1, None], {}, TypeError, r"found lengths\[1\] = None"),
        ([[1, 2], [3, 4]], {}, TypeError, r"found lengths\[0\] = \[1, 2\]"),
        (torch.ones(2, 2), {}, TypeError, r"expected a number, found lengths\[0\]"),
        (torch.tensor(3), {}, ValueError, "one length for each sample, found none"),
        ([], {}, ValueError, "one length for each sample, found none"),
        ("abc", {}, TypeError, "found str"),
        (7, {}, TypeError, "found int"),
        (len, {}, TypeError, r"pass samples=len\(dataset\)"),
        (len, {"samples": 0}, ValueError, r"samples=0\): expected 1 or more"),
        ([1, 2], {"samples": 3}, ValueError, r"samples=3\): there are 2 lengths"),
        ([1, 2], {"cost": lambda length: 1 - length}, ValueError, r"found cost\(2\) = -1"),
        ([1, 2], {"cost": lambda length: None}, TypeError, r"found cost\([12]\) = None"),
        ([1, 2], {"cost": 3}, TypeError, r"cost=3\): expected a function"),
        ([1, 2], {"num_replicas": 2}, ValueError, r"rank=None\): pass both, or neither"),
        ([1, 2], {"num_replicas": 2, "rank": 2}, ValueError, r"rank from 0 to num_replicas - 1"),
    ],
)
def test_bad_argument_is_named(lengths, arguments, error, found) -> None:
    with pytest.raises(error, match=found):
        BalancedBatchSampler(lengths, **{"batch_size": 2, **arguments})
