"""BalancedBatchSampler: ranks get equal work, and each window the samples that it has with SameOrderSampler. And that one."""

import itertools
import math
import pickle
import random
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Unsized, assert_one_window_one_batch, on
from support import Language, Scalar, ddp, pad, sentences, trainer
from torch.utils.data import DataLoader, DistributedSampler

from lightning_accum import BalancedBatchSampler, GradientAccumulation, SameOrderSampler, Tokens


def log_normal(number: int, seed: int = 0) -> list[int]:  # median 80, longest 512
    generator = random.Random(seed)
    return [max(1, min(512, round(80 * math.exp(0.9 * generator.gauss(0, 1))))) for _ in range(number)]


def by_rank(lengths: Any, batch_size: int, ranks: int, epoch: int = 0, **kwargs: Any) -> list[list[list[int]]]:
    """The loader batches of each rank."""
    found, sampler = [], BalancedBatchSampler(lengths, batch_size, **kwargs)
    sampler.set_epoch(epoch)
    for rank in range(ranks):
        sampler.deal(ranks, rank)
        found.append(list(sampler))
        assert len(sampler) == len(found[-1])
    return found


def same_order(samples: int, size: int, epoch: int, **kwargs: Any) -> list[list[int]]:
    """Windows of ``size`` samples in the order of SameOrderSampler."""
    sampler = SameOrderSampler(range(samples), **kwargs)
    sampler.set_epoch(epoch)
    order = list(sampler)
    return [order[start : start + size] for start in range(0, samples, size)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_windows_hold_the_samples_of_same_order_sampler_in_every_epoch(ranks: int, window: int, shuffle: bool) -> None:
    def windows_of(batches: list[list[list[int]]], window: int) -> list[list[int]]:
        """What all ranks together have in each window, sorted."""
        steps = list(zip_longest(*batches, fillvalue=[]))
        groups = [steps[start : start + window] for start in range(0, len(steps), window)]
        return [sorted(index for step in group for batch in step for index in batch) for group in groups]

    for samples, batch_size, epoch in itertools.product([1, 2, 3, 7, 24, 61], [1, 2, 5], range(2)):
        found = by_rank(log_normal(samples), batch_size, ranks, epoch, window=window, shuffle=shuffle, seed=3)
        assert all(batch for batches in found for batch in batches)
        expected = same_order(samples, window * ranks * batch_size, epoch, shuffle=shuffle, seed=3)
        assert windows_of(found, window) == list(map(sorted, expected))


@pytest.mark.parametrize(("samples", "ranks"), [(5, 2), (16, 4), (100, 4), (61, 5), (9, 4)])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("lengths", [log_normal, lambda number: [0] * number, lambda number: [1000, *[1] * (number - 1)]])
def test_ranks_have_as_many_loader_batches_unless_too_few_samples_are_left(
    lengths: Any, window: int, batch_size: int, samples: int, ranks: int
) -> None:
    numbers = [len(batches) for batches in by_rank(lengths(samples), batch_size, ranks, window=window)]
    left = samples % (window * ranks * batch_size)
    assert max(numbers) - min(numbers) == (1 if 0 < left < ranks else 0)


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("cost", [lambda length: length, lambda length: length**2, lambda length: length + length**2 / 64])
def test_slowest_rank_is_within_a_two_hundredth_of_the_mean(ranks: int, cost: Callable[[int], float]) -> None:
    costs = [cost(length) for length in log_normal(16 * ranks)]
    sums = [sum(costs[i] for batch in own for i in batch) for own in by_rank(costs, 4, ranks, window=4)]
    assert max(sums) <= 1.005 * sum(costs) / ranks


def test_inside_a_rank_batches_are_by_length_and_of_as_many_samples() -> None:
    lengths = log_normal(48)
    for batches in by_rank(lengths, 4, 2, window=6):
        found = [lengths[index] for batch in batches for index in batch]
        assert found == sorted(found, reverse=True)
        assert max(map(len, batches)) - min(map(len, batches)) <= 1


@pytest.mark.parametrize(
    "kind",
    [torch.tensor, lambda numbers: torch.tensor(numbers).float().numpy(), lambda numbers: list(map(torch.tensor, numbers))],
    ids=["tensor", "array", "tensors"],
)
def test_lengths_of_any_kind_are_the_same(kind: Callable[[list[int]], Any]) -> None:
    numbers = log_normal(30)
    assert by_rank(kind(numbers), 3, 2, 1, window=2) == by_rank(numbers, 3, 2, 1, window=2)


@pytest.mark.parametrize(("samples", "stop"), [(48, 6), (10, 2)])
@pytest.mark.parametrize("make", [SameOrderSampler, lambda samples: BalancedBatchSampler(samples, 1)])
@pytest.mark.parametrize("ranks", [(2, 2), (2, 4), (4, 1), (4, 4)], ids=str)
def test_a_sampler_resumes_where_it_was_on_any_number_of_ranks(make: Any, samples: int, stop: int, ranks: tuple[int, int]) -> None:
    seen, states = [], []
    for begun, number in enumerate(ranks):
        for rank in range(number):
            sampler = make(range(samples))
            sampler.set_epoch(3)
            sampler.deal(number, rank)
            if begun:
                sampler.load_state_dict(states[0])  # of rank 0, as Lightning keeps it
            for item in itertools.islice(sampler, None if begun else stop):
                seen += item if isinstance(item, list) else [item]
            states.append(sampler.state_dict())
    assert sorted(seen) == list(range(samples))


ROWS = sentences(37)


def balanced(lengths: list[int], batch_size: int = 4, **kwargs: Any) -> DataLoader:
    return DataLoader(ROWS, batch_sampler=BalancedBatchSampler(lengths, batch_size, **kwargs), collate_fn=pad)


@pytest.mark.some_cases(2, 2)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("engine", "options", "window", "batch_size", "micro_batch"),
    [on("accum", 4, 4, None), on("accum", 4, 4, Tokens(24)), on("ddp", 4, 2, None), on("ddp", 1, 8, Tokens(24)),
     on("ddp of 4", 2, 2, None), on("ddp of 4", 1, 4, Tokens(24))],
)  # fmt: skip
def test_a_window_is_the_full_batch_of_same_order_sampler(engine, options, window, batch_size, micro_batch, optimizer) -> None:
    windows = [[ROWS[i] for i in indices] for epoch in range(2) for indices in same_order(37, 16, epoch, seed=5)]
    data = balanced(list(map(len, ROWS)), batch_size, window=window, seed=5)
    policy = GradientAccumulation(window, micro_batch=micro_batch)
    arguments = {"windows": windows, "epochs": 2, "use_distributed_sampler": True}
    assert_one_window_one_batch(partial(Language, optimizer), data, policy, engine, options, **arguments)


class OfRank(Language):
    def train_dataloader(self) -> DataLoader:
        return balanced([len(row) + self.trainer.global_rank for row in ROWS])


@pytest.mark.parametrize(
    ("module", "data", "strategy", "names"),
    [
        (Language, balanced([1] * 36), ddp, "lengths"),  # of another dataset
        (OfRank, None, ddp, "lengths"),  # other ones on each rank
        (Language, balanced([1] * 37), partial(pl.strategies.DDPStrategy, start_method="fork"), "use_distributed_sampler=False"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_before_training(module: Any, data: Any, strategy: Any, names: str) -> None:
    with pytest.raises(Exception, match=rf"(?s)(Type|Value|Argument)\w*Error.*{names}"):
        trainer(strategy(), devices=2, use_distributed_sampler=True).fit(module(), data)


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "named"),
    [
        (BalancedBatchSampler, ([1, 2], 0), ValueError, "batch_size=0"),
        (BalancedBatchSampler, ([1, 2], 2.0), ValueError, "batch_size=2.0"),
        (partial(BalancedBatchSampler, window=Tokens(8)), ([1, 2], 2), ValueError, "window="),
        (BalancedBatchSampler, ([1, -2], 2), ValueError, r"lengths\[1\]"),
        (BalancedBatchSampler, ([1, math.nan], 2), ValueError, r"lengths\[1\]"),
        *((BalancedBatchSampler, (lengths, 2), TypeError, "length")
          for lengths in ([1, None], [[1, 2], [3, 4]], torch.ones(2, 2), [], "123", 7, {0: 1})),
        (SameOrderSampler, (Unsized([1]),), TypeError, "Unsized"),
        (SameOrderSampler, (iter([1, 2]),), TypeError, "list_iterator"),
    ],
)  # fmt: skip
def test_bad_argument_is_named(kind: Any, arguments: tuple[Any, ...], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        kind(*arguments)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("samples", [0, 1, 2, 3, 7, 12, 60, 61])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
def test_ranks_together_get_every_sample_once_in_torchs_order(num_replicas: int, samples: int, shuffle: bool) -> None:
    def dealt(sampler: SameOrderSampler, num_replicas: int) -> list[list[int]]:  # what each rank gets, after its length was asked
        shares = []
        for rank in range(num_replicas):
            sampler.deal(num_replicas, rank)
            shares.append(list(sampler))
            assert (len(sampler), sampler.num_replicas, sampler.rank) == (len(shares[-1]), num_replicas, rank)
        return shares

    sampler = SameOrderSampler(range(samples), shuffle=shuffle, seed=11)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        shares = dealt(sampler, num_replicas)
        assert sorted(sample for share in shares for sample in share) == list(range(samples))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        for rank in range(num_replicas if samples and samples % num_replicas == 0 else 0):
            peer = DistributedSampler(range(samples), num_replicas, rank, shuffle=shuffle, seed=11)
            peer.set_epoch(epoch)
            assert shares[rank] == list(peer)


def test_the_length_follows_a_dataset_that_grows_and_a_pickled_sampler_goes_on_alike() -> None:
    dataset = [0, 1, 2]
    sampler = SameOrderSampler(dataset, seed=2)
    dataset += [3, 4]
    assert len(sampler) == 5
    sampler.set_epoch(4)
    sampler.deal(2, rank=1)
    copy = pickle.loads(pickle.dumps(sampler))
    assert (list(copy), len(copy), copy.num_replicas, copy.rank) == (list(sampler), 2, 2, 1)


def test_lightning_leaves_the_loader_alone() -> None:
    class Sees(Scalar):
        def train_dataloader(self) -> DataLoader:
            dataset = torch.arange(8, dtype=torch.float64)
            return DataLoader(dataset, batch_size=2, sampler=SameOrderSampler(dataset, shuffle=False))

        def on_train_start(self) -> None:
            assert type(self.trainer.train_dataloader.sampler) is SameOrderSampler

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert batch.tolist() == [4 * batch_idx + self.trainer.global_rank + 2 * i for i in range(2)]
            return self.loss(batch)

    module = Sees()
    trainer("ddp_fork", devices=2, use_distributed_sampler=True).fit(module)
    assert module.total == (0 + 1 + 2 + 3) / 4 + (4 + 5 + 6 + 7) / 4


@pytest.mark.parametrize(("num_replicas", "rank"), [(0, 0), (-1, 0), (2, 2), (2, -1)])
def test_a_rank_that_does_not_exist_is_named_and_changes_nothing(num_replicas: int, rank: int) -> None:
    sampler = SameOrderSampler(range(3))
    with pytest.raises(ValueError, match="num_replicas"):
        sampler.deal(num_replicas, rank)
    assert sorted(sampler) == [0, 1, 2]
