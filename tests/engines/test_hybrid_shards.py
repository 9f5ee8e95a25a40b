"""sync="shard": replicas of shards take the step of the full batch, and are told of each other's gradients once a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from sharded import ShardedLanguage, fsdp1, fsdp2, fully_shard, needs_sharding_on_cpu, shard, two_replicas
from support import OPTIMIZERS, ddp, loader, relative_error
from test_sharded import (
    EXACT,
    GROUPS,
    HOLES,
    REDUCE,
    SCATTER,
    SHORT,
    Dealt,
    Profiled,
    SavesInside,
    by_hand,
    dealt,
    error,
    fit,
    joined,
    with_hole,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_accum import GradientAccumulation

pytestmark = needs_sharding_on_cpu


def hybrid(ranks: int = 4, sync: str = "shard") -> dict[str, Any]:
    return {"strategy": fsdp2(ranks, sync=sync, timeout=SHORT), "devices": ranks}


def windows_of(by_rank: Sequence[Sequence[Any]], size: int = 2) -> list[Any]:
    """The full batches of ranks that may end at different times."""
    longest = max(map(len, by_rank))
    return [joined([batch for rank in by_rank for batch in rank[i : i + size]]) for i in range(0, longest, size)]


# --- the promise ------------------------------------------------------------------------------------------------------


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_two_replicas_of_two_shards_equal_the_full_batch(optimizer: str) -> None:
    by_rank = dealt(5, ranks=4)  # two windows and a tail of one
    run = fit(Dealt(by_rank, optimizer), hybrid())
    assert error(run, by_hand(windows_of(by_rank), optimizer)) < EXACT


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_uneven_ranks_with_nothing_in_some_of_their_batches_equal_the_full_batch(optimizer: str) -> None:
    by_rank = dealt(7, ranks=4)
    for position, kind in enumerate(HOLES):
        by_rank[position][position + 1] = with_hole(by_rank[position][position + 1], kind)
    by_rank[1], by_rank[2] = by_rank[1][:5], by_rank[2][:4]
    run = fit(Dealt(by_rank, optimizer), hybrid())
    assert error(run, by_hand(windows_of(by_rank), optimizer)) < EXACT


def test_split_batches_of_different_numbers_of_micro_batches_equal_the_full_batch() -> None:
    small, large = dealt(4)
    by_rank = [small, [joined([a, b]) if i % 2 else a for i, (a, b) in enumerate(zip(large, small[::-1], strict=True))]]
    run = fit(Dealt(by_rank), hybrid(2), window=1, callbacks=[GradientAccumulation(2, micro_batch=1)])
    assert error(run, by_hand(windows_of(by_rank))) < EXACT


# --- what fully_shard keeps between micro-batches ---------------------------------------------------------------------


class Heads(nn.Module):
    """One group of parameters, of which a batch takes one head."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(6, 1) for _ in range(number))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.each[head](x)


class SeveralTasks(pl.LightningModule):
    """Of three heads of the same size, batches take the first or the second; some leave out a whole layer."""

    def __init__(self, by_rank: Sequence[Sequence[Any]], optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.extra, self.heads = nn.Linear(4, 6).double(), nn.Linear(6, 6).double(), Heads(3).double()
        self.by_rank, self.optimizer = by_rank, optimizer

    def configure_model(self) -> None:
        if self._trainer is not None:
            shard(self, [self.body, self.extra, self.heads])

    def forward(self, batch: Any) -> Tensor:
        x, head, has_extra = batch
        hidden = self.body(x).tanh()
        hidden = self.extra(hidden).tanh() if has_extra else hidden
        return self.heads(hidden, head).square()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch).mean()

    def train_dataloader(self) -> Any:
        return loader(self.by_rank[self.trainer.global_rank])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def tasks(heads: Sequence[Sequence[int]], extra: Sequence[bool]) -> list[list[Any]]:
    """By rank, the head of each micro-batch; all ranks leave out the layer together, since they gather it together."""
    generator = torch.Generator().manual_seed(5)
    return [
        [(torch.randn(2 + i % 3, 4, generator=generator, dtype=torch.float64), head, extra[i]) for i, head in enumerate(rank)]
        for rank in heads
    ]


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("sync", ["window", "shard", "micro_batch"])
def test_parameters_that_some_micro_batches_and_ranks_do_not_use_equal_the_full_batch(sync: str) -> None:
    heads = [[0, 1, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0]]
    extra = [True, False, False, True, False, False]  # in the first of a window, at its end, in none
    by_rank = tasks(heads, extra)
    module = SeveralTasks(by_rank)
    windows = [[batch for rank in by_rank for batch in rank[i : i + 2]] for i in (0, 2, 4)]
    optimizer = module.configure_optimizers()
    for window in windows:
        optimizer.zero_grad()
        torch.cat([module(batch) for batch in window]).mean().backward()
        optimizer.step()
    run = fit(SeveralTasks(by_rank), hybrid(sync=sync), max_epochs=1, callbacks=[GradientAccumulation(2, check=False)], window=1)
    assert error(run, module) < EXACT
    assert relative_error(module.heads.each[2].parameters(), SeveralTasks([]).heads.each[2].parameters()) == 0  # no weight decay


@pytest.mark.exhaustive
def test_dropped_tail_leaves_nothing_in_the_next_window() -> None:
    by_rank = dealt(5)
    run = fit(Dealt(by_rank), hybrid(2), window=1, callbacks=[GradientAccumulation(2, tail="drop")])
    assert error(run, by_hand(windows_of([rank[:4] for rank in by_rank]))) < EXACT


@pytest.mark.exhaustive
def test_checkpoint_inside_a_window_changes_nothing() -> None:
    by_rank = dealt(6)
    run = fit(Dealt(by_rank, "adamw"), hybrid(2), window=3, callbacks=[SavesInside()])
    assert error(run, by_hand(windows_of(by_rank, 3), "adamw")) < EXACT


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_a_window_of_three_has_three_reduce_scatters_and_one_all_reduce_for_each_group() -> None:
    fit(Profiled(dealt(9, ranks=4)), hybrid(), window=3, max_epochs=1)
    found = torch.load("collectives.pt", weights_only=False)
    counts = [{kind: count[kind] for kind in (SCATTER, REDUCE)} for count, _ in found]
    inside, last = {SCATTER: GROUPS, REDUCE: 0}, {SCATTER: GROUPS, REDUCE: GROUPS + 2}  # the weights, and what was reached
    assert counts == [inside, inside, last] * 2


# --- refusals ---------------------------------------------------------------------------------------------------------


class OverAllRanks(ShardedLanguage):
    def train_dataloader(self) -> Any:
        return loader(dealt(1, 1)[0])

    def mesh(self) -> DeviceMesh:
        return self.device_mesh["data_parallel"]

    def configure_model(self) -> None:
        for part in (*self.net.blocks, self.net):
            fully_shard(part, mesh=self.mesh())


class OverHalfOfThem(OverAllRanks):
    """Nothing averages over the replicas."""

    def mesh(self) -> DeviceMesh:
        return two_replicas(2)["shard"]


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("module", "sync", "match"),
    [
        (OverAllRanks, "shard", r"net, net.blocks.0, net.blocks.1 is sharded over all ranks, .*Use sync=\"micro_batch\", or in"),
        (OverHalfOfThem, "window", r"averages gradients over ranks [01], but the data-parallel ranks are 0, 1, whose weights"),
    ],
)
def test_shards_of_other_ranks_are_refused(module: type[OverAllRanks], sync: str, match: str) -> None:
    with pytest.raises(Exception, match=f"(?s)MisconfigurationException: .*{match}"):
        fit(module(), {"strategy": fsdp2(sync=sync, timeout=SHORT), "devices": 2})


@pytest.mark.parametrize("strategy", [ddp, fsdp1])
def test_other_engines_have_no_replicas_of_shards(strategy: Any) -> None:
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match='"window" or "micro_batch"'):
        strategy(sync="shard")
