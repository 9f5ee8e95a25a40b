"""Every sample once, in an order that does not know how many ranks there are."""

from __future__ import annotations

import json
import pickle
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from support import Scalar, trainer
from torch import distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from lightning_accum.samplers import SameOrderSampler, leave_out_repeats


def dealt(sampler: SameOrderSampler, num_replicas: int) -> list[list[int]]:
    """What each rank gets."""
    shares = []
    for rank in range(num_replicas):
        sampler.deal(num_replicas, rank)
        shares.append(list(sampler))
    return shares


def together(shares: list[list[int]]) -> list[int]:
    return sorted(sample for share in shares for sample in share)


def permutation(samples: int, seed: int) -> list[int]:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()


NUMBERS = [0, 1, 2, 3, 7, 12, 60, 61]


# --- SameOrderSampler -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("samples", NUMBERS)
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 5])
def test_ranks_together_get_every_sample_once(num_replicas: int, samples: int, shuffle: bool) -> None:
    shares = dealt(SameOrderSampler(range(samples), shuffle=shuffle), num_replicas)
    assert together(shares) == list(range(samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


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
    windows = [together(batches) for batches in zip_longest(*by_rank, fillvalue=[])]
    order = permutation(samples, seed=5 + 3)
    assert windows == [sorted(order[start : start + window]) for start in range(0, samples, window)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("samples", "num_replicas"), [(12, 1), (12, 2), (12, 3), (12, 4), (60, 5)])
def test_order_is_that_of_torch_where_torch_repeats_nothing(samples: int, num_replicas: int, shuffle: bool) -> None:
    sampler = SameOrderSampler(range(samples), shuffle=shuffle, seed=11)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for rank, share in enumerate(dealt(sampler, num_replicas)):
            peer = DistributedSampler(range(samples), num_replicas, rank, shuffle=shuffle, seed=11)
            peer.set_epoch(epoch)
            assert share == list(peer)


def test_every_epoch_has_its_own_order_and_always_the_same() -> None:
    sampler = SameOrderSampler(range(60))
    orders = []
    for epoch in (0, 1, 2, 0, 1, 2):
        sampler.set_epoch(epoch)
        orders.append(tuple(sampler))
    assert len(set(orders)) == 3
    assert orders[:3] == orders[3:]


def test_without_shuffling_every_epoch_is_in_the_order_of_the_dataset() -> None:
    sampler = SameOrderSampler(range(7), shuffle=False)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert dealt(sampler, 3) == [[0, 3, 6], [1, 4], [2, 5]]


@pytest.mark.parametrize(("num_replicas", "lengths"), [(1, [7]), (2, [4, 3]), (3, [3, 2, 2]), (8, [1, 1, 1, 1, 1, 1, 1, 0])])
def test_length_is_the_number_of_this_ranks_samples(num_replicas: int, lengths: list[int]) -> None:
    sampler, found = SameOrderSampler(range(7)), []
    for rank in range(num_replicas):
        sampler.deal(num_replicas, rank)
        found.append((len(sampler), len(list(sampler)), sampler.num_replicas, sampler.rank))
    assert found == [(length, length, num_replicas, rank) for rank, length in enumerate(lengths)]


def test_length_follows_a_dataset_that_grows() -> None:
    dataset = [0, 1, 2]
    sampler = SameOrderSampler(dataset)
    dataset += [3, 4]
    assert len(sampler) == 5
    assert sorted(sampler) == [0, 1, 2, 3, 4]


def test_pickled_sampler_goes_on_alike() -> None:
    sampler = SameOrderSampler(range(9), seed=2)
    sampler.set_epoch(4)
    sampler.deal(2, rank=1)
    copy = pickle.loads(pickle.dumps(sampler))
    assert (list(copy), len(copy), copy.num_replicas, copy.rank) == (list(sampler), 4, 2, 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_gives_the_samples_of_its_rank_and_epoch(workers: int) -> None:
    dataset = [10 * i for i in range(11)]
    sampler = SameOrderSampler(dataset)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
    sampler.deal(2, rank=1)
    assert len(loader) == 3
    for epoch in range(2):
        sampler.set_epoch(epoch)
        samples = [10 * i for i in permutation(11, seed=epoch)[1::2]]
        assert [batch.tolist() for batch in loader] == [samples[:2], samples[2:4], samples[4:]]


def note_what_a_rank_gets(rank: int, folder: Path, sampler: SameOrderSampler) -> None:
    alone = (len(sampler), sampler.num_replicas, sampler.rank)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2, timeout=timeout)
    grouped = (len(sampler), sampler.num_replicas, sampler.rank, list(sampler))
    sampler.deal(3, rank=2)
    (folder / f"{rank}.json").write_text(json.dumps([alone, grouped, list(sampler)]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.exhaustive
def test_ranks_are_those_of_the_process_group_until_they_are_dealt(tmp_path: Path) -> None:
    sampler = SameOrderSampler(range(7), shuffle=False)
    assert len(sampler) == 7  # asked for before there is a process group
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=note_what_a_rank_gets, args=(rank, tmp_path, sampler)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    left, right = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert left == [[7, 1, 0], [4, 2, 0, [0, 2, 4, 6]], [2, 5]]
    assert right == [[7, 1, 0], [3, 2, 1, [1, 3, 5]], [2, 5]]


def test_lightning_leaves_the_loader_alone() -> None:
    class Sees(Scalar):
        def train_dataloader(self) -> DataLoader:
            dataset = torch.arange(8, dtype=torch.float64)
            return DataLoader(dataset, batch_size=2, sampler=SameOrderSampler(dataset, shuffle=False))

        def on_train_start(self) -> None:
            assert type(self.trainer.train_dataloader.sampler) is SameOrderSampler

        def training_step(self, batch, batch_idx):
            assert batch.tolist() == [4 * batch_idx + self.trainer.global_rank + 2 * i for i in range(2)]
            return self.loss(batch)

    module = Sees()
    trainer("ddp_fork", devices=2, use_distributed_sampler=True).fit(module)
    assert module.total == (0 + 1 + 2 + 3) / 4 + (4 + 5 + 6 + 7) / 4


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class SizedStream(Stream):
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("dataset", [Stream(), SizedStream(), iter([1, 2])])
def test_dataset_without_an_order_to_choose_is_named(dataset) -> None:
    found = type(dataset).__name__
    with pytest.raises(TypeError, match=rf"SameOrderSampler.*found {found}; an IterableDataset orders itself: give it .* without"):
        SameOrderSampler(dataset)


@pytest.mark.parametrize(("num_replicas", "rank"), [(0, 0), (-1, 0), (2, 2), (2, -1)])
def test_rank_that_does_not_exist_is_named_and_changes_nothing(num_replicas: int, rank: int) -> None:
    sampler = SameOrderSampler(range(3))
    with pytest.raises(ValueError, match=rf"num_replicas={num_replicas}, rank={rank}\): num_replicas must be 1 or more"):
        sampler.deal(num_replicas, rank)
    assert sorted(sampler) == [0, 1, 2]


# --- leave_out_repeats ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("samples", NUMBERS)
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 5])
def test_torchs_sampler_loses_its_repeats_and_nothing_else(num_replicas: int, samples: int, shuffle: bool) -> None:
    shares = []
    for rank in range(num_replicas):
        sampler = DistributedSampler(range(samples), num_replicas, rank, shuffle=shuffle, seed=1)
        padded = list(sampler)
        leave_out_repeats(sampler)
        shares.append(list(sampler))
        assert len(sampler) == len(shares[-1])
        assert shares[-1] == padded[: len(sampler)]
        assert len(padded) - len(sampler) <= 1
    assert together(shares) == list(range(samples))


@pytest.mark.parametrize("samples", [1, 7, 12])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 5])
def test_lightnings_wrapper_loses_its_repeats_and_samples_anew_every_epoch(num_replicas: int, samples: int) -> None:
    def wrap(rank: int) -> DistributedSamplerWrapper:
        inner = RandomSampler(range(100, 100 + samples), generator=torch.Generator().manual_seed(6))
        wrapper = DistributedSamplerWrapper(inner, num_replicas=num_replicas, rank=rank, shuffle=False)
        leave_out_repeats(wrapper)
        return wrapper

    alone = RandomSampler(range(samples), generator=torch.Generator().manual_seed(6))
    wrappers = [wrap(rank) for rank in range(num_replicas)]
    for epoch in range(2):
        for wrapper in wrappers:
            wrapper.set_epoch(epoch)
        order = list(alone)
        shares = [list(wrapper) for wrapper in wrappers]
        assert shares == [order[rank::num_replicas] for rank in range(num_replicas)]
        assert [len(wrapper) for wrapper in wrappers] == [len(share) for share in shares]


@pytest.mark.parametrize(("samples", "num_replicas"), [(7, 2), (12, 4), (13, 5)])
def test_sampler_that_drops_the_tail_is_left_as_it_is(samples: int, num_replicas: int) -> None:
    for rank in range(num_replicas):
        sampler, untouched = (DistributedSampler(range(samples), num_replicas, rank, drop_last=True) for _ in range(2))
        leave_out_repeats(sampler)
        assert vars(sampler) == vars(untouched)
        assert list(sampler) == list(untouched)


def test_leaving_out_what_is_not_there_changes_nothing() -> None:
    sampler = SameOrderSampler(range(7), shuffle=False)
    leave_out_repeats(sampler)
    assert dealt(sampler, 2) == [[0, 2, 4, 6], [1, 3, 5]]
