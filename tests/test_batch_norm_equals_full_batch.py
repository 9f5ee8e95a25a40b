"""A ResNet on real images, split with BatchNorm over the whole batch, against plain Lightning on that batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support import ddp, loader, relative_error, trainer
from torch import Tensor

from lightning_accum import GradientAccumulation

pytest.importorskip("sklearn")
from digits import Digits, digits

Batch = tuple[Tensor, Tensor]
BATCH = 96
EXACT = 1e-10


def batches_of(images: Tensor, labels: Tensor, size: int = BATCH) -> list[Batch]:
    return list(zip(images.split(size), labels.split(size), strict=True))


def error(found: Digits, expected: Digits) -> float:
    """The larger of the relative errors of parameters and of running statistics; the counts are to be the same."""
    mine, theirs = dict(found.named_buffers()), dict(expected.named_buffers())
    for name, count in theirs.items():
        if name.endswith("num_batches_tracked"):
            assert mine[name] == count
    names = [name for name in theirs if "running" in name]
    of_statistics = relative_error([mine[n] for n in names], [theirs[n] for n in names])
    return max(relative_error(found.parameters(), expected.parameters()), of_statistics)


@pytest.fixture(scope="module")
def data() -> list[Batch]:
    return batches_of(*digits()[0])


@pytest.fixture(scope="module", params=["sgd", "adamw"])
def whole(request: Any, data: list[Batch]) -> Digits:
    """What plain Lightning makes of the full batches: 3 epochs of 15 steps."""
    module = Digits(request.param, width=4).double()
    trainer("auto", max_epochs=3).fit(module, loader(data))
    return module


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("size", [4, 7, 32])
def test_three_epochs_of_split_batches_equal_the_full_batches(whole: Digits, data: list[Batch], size: int) -> None:
    module = Digits(whole.optimizer, width=4).double()
    run = trainer(max_epochs=3, callbacks=[GradientAccumulation(micro_batch=size, batch_norm="exact")])
    run.fit(module, loader(data))
    assert run.global_step == 45
    assert error(module, whole) < EXACT


@pytest.mark.some_cases(1)
def test_without_it_they_do_not(whole: Digits, data: list[Batch]) -> None:
    module = Digits(whole.optimizer, width=4).double()
    trainer(max_epochs=3, callbacks=[GradientAccumulation(micro_batch=7)]).fit(module, loader(data))
    assert relative_error(module.parameters(), whole.parameters()) > 0.01


# --- over ranks -------------------------------------------------------------------------------------------------------


class Ranked(Digits):
    """Each rank has a part of every batch."""

    def __init__(self, optimizer: str, by_rank: Sequence[Sequence[Any]]) -> None:
        super().__init__(optimizer, width=4)
        self.by_rank = by_rank
        self.double()

    def train_dataloader(self) -> Any:
        return loader(self.by_rank[self.trainer.global_rank])


def shares(data: Sequence[Batch], first: int) -> list[list[Batch]]:
    """The first rows of each batch for rank 0, the others for rank 1."""
    return [[(x[:first], y[:first]) for x, y in data], [(x[first:], y[first:]) for x, y in data]]


def on_two_ranks(
    optimizer: str, by_rank: Sequence[Sequence[Any]], size: Any, epochs: int = 1, is_synced: bool = True, **arguments: Any
) -> Digits:
    module = Ranked(optimizer, by_rank)
    exact = GradientAccumulation(micro_batch=size, batch_norm="exact")
    trainer(ddp(**arguments), devices=2, max_epochs=epochs, sync_batchnorm=is_synced, callbacks=[exact]).fit(module)
    return module


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("size", [pytest.param(4, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow), 32])
def test_statistics_of_two_ranks_equal_the_full_batch(whole: Digits, data: list[Batch], size: int) -> None:
    assert error(on_two_ranks(whole.optimizer, shares(data, BATCH // 2), size, epochs=3), whole) < EXACT


@pytest.fixture(scope="module")
def short(data: list[Batch]) -> Digits:
    """Five steps of plain Lightning."""
    module = Digits("adamw", width=4).double()
    trainer("auto").fit(module, loader(data[:5]))
    return module


@pytest.mark.parametrize("size", [24, 14, 3])  # 4, 7 and 32 micro-batches
def test_numbers_of_micro_batches(short: Digits, data: list[Batch], size: int) -> None:
    module = Digits("adamw", width=4).double()
    exact = GradientAccumulation(micro_batch=size, batch_norm="exact")
    trainer(callbacks=[exact]).fit(module, loader(data[:5]))
    assert error(module, short) < EXACT


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(("first", "size"), [(20, 16), (95, 24)])
@pytest.mark.parametrize("arguments", [{}, {"find_unused_parameters": True}, {"sync": "micro_batch"}], ids=str)
def test_ranks_with_different_numbers_of_micro_batches(
    short: Digits, data: list[Batch], first: int, size: Any, arguments: dict[str, Any]
) -> None:
    assert error(on_two_ranks("adamw", shares(data[:5], first), size, **arguments), short) < EXACT


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_rank_that_has_no_more_batches(data: list[Batch], lacking: int) -> None:
    by_rank = shares(data[:5], 48)
    del by_rank[lacking][3:]
    module = Digits("adamw", width=4).double()
    whole = [*data[:3], *by_rank[1 - lacking][3:]]
    trainer("auto").fit(module, loader(whole))
    assert error(on_two_ranks("adamw", by_rank, 20), module) < EXACT


@pytest.mark.parametrize("lacking", [0, 1])
def test_none_in_the_middle_on_one_rank(data: list[Batch], lacking: int) -> None:
    by_rank: list[list[Any]] = [list(share) for share in shares(data[:4], 48)]
    by_rank[lacking][2] = None
    module = Digits("adamw", width=4).double()
    trainer("auto").fit(module, loader([*data[:2], by_rank[1 - lacking][2], data[3]]))
    assert error(on_two_ranks("adamw", by_rank, 20), module) < EXACT


def test_none_at_the_beginning_on_one_rank_is_an_error_on_all(data: list[Batch]) -> None:
    by_rank: list[list[Any]] = [list(share) for share in shares(data[:4], 48)]
    by_rank[1][0] = None
    with pytest.raises(Exception, match="first loader batch of rank 1 is None"):
        on_two_ranks("sgd", by_rank, 7)


def test_a_rank_whose_labels_are_all_ignored_counts_in_the_statistics(data: list[Batch]) -> None:
    ignored = [(x, torch.where(torch.arange(len(y)) < 40, -100, y)) for x, y in data[:4]]
    module = Digits("adamw", width=4).double()
    trainer("auto").fit(module, loader(ignored))
    assert error(on_two_ranks("adamw", shares(ignored, 40), 20), module) < EXACT


class SometimesNone(Ranked):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if (batch[1] == -100).all() else loss


def test_a_rank_without_any_loss_counts_in_the_statistics(data: list[Batch]) -> None:
    ignored = [(x, torch.where(torch.arange(len(y)) < 40, -100, y)) for x, y in data[:4]]
    whole = Digits("adamw", width=4).double()
    trainer("auto").fit(whole, loader(ignored))
    module = SometimesNone("adamw", shares(ignored, 40))
    exact = GradientAccumulation(micro_batch=20, batch_norm="exact")
    trainer(ddp(), devices=2, sync_batchnorm=True, callbacks=[exact]).fit(module)
    assert error(module, whole) < EXACT


def test_without_sync_batchnorm_each_rank_has_its_own_statistics_as_in_plain_ddp(data: list[Batch]) -> None:
    whole = Ranked("adamw", shares(data[:5], 48))
    trainer("ddp_fork", devices=2).fit(whole)
    assert error(on_two_ranks("adamw", shares(data[:5], 48), 20, is_synced=False), whole) < EXACT
