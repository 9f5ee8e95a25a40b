"""SameOrderSampler: every sample once, in an order that does not know how many ranks there are."""

from __future__ import annotations

import pickle
from itertools import zip_longest
from typing import Any

import pytest
import torch
from support import Scalar, trainer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_accum import SameOrderSampler


def dealt(sampler: SameOrderSampler, num_replicas: int) -> list[list[int]]:
    """What each rank gets, after its length was asked."""
    shares = []
    for rank in range(num_replicas):
        sampler.deal(num_replicas, rank)
        shares.append(list(sampler))
        assert (len(sampler), sampler.num_replicas, sampler.rank) == (len(shares[-1]), num_replicas, rank)
    return shares


def permutation(samples: int, seed: int) -> list[int]:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("samples", [0, 1, 2, 3, 7, 12, 60, 61])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
def test_ranks_together_get_every_sample_once_in_torchs_order_where_torch_repeats_nothing(
    num_replicas: int, samples: int, shuffle: bool
) -> None:
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


@pytest.mark.parametrize("samples", [3, 24, 29])
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_windows_are_slices_of_one_permutation_on_any_number_of_ranks(num_replicas: int, samples: int) -> None:
    dataset, window = range(samples), 8
    sampler = SameOrderSampler(dataset, seed=5)
    sampler.set_epoch(3)
    by_rank = []
    for rank in range(num_replicas):
        sampler.deal(num_replicas, rank)
        by_rank.append([batch.tolist() for batch in DataLoader(dataset, batch_size=window // num_replicas, sampler=sampler)])
    windows = [sorted(i for batch in batches for i in batch) for batches in zip_longest(*by_rank, fillvalue=[])]
    order = permutation(samples, seed=5 + 3)
    assert windows == [sorted(order[start : start + window]) for start in range(0, samples, window)]


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


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize("dataset", [Stream(), iter([1, 2])])
def test_a_dataset_without_an_order_to_choose_is_named(dataset: Any) -> None:
    with pytest.raises(TypeError, match=type(dataset).__name__):
        SameOrderSampler(dataset)


@pytest.mark.parametrize(("num_replicas", "rank"), [(0, 0), (-1, 0), (2, 2), (2, -1)])
def test_a_rank_that_does_not_exist_is_named_and_changes_nothing(num_replicas: int, rank: int) -> None:
    sampler = SameOrderSampler(range(3))
    with pytest.raises(ValueError, match="num_replicas"):
        sampler.deal(num_replicas, rank)
    assert sorted(sampler) == [0, 1, 2]
