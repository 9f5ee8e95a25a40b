"""sync="shard": what replicas of shards keep between micro-batches, and that they are told of each other's once a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Dealt, assert_one_window_one_batch, dealt, trained, windows_of
from sharded import (
    GROUPS,
    REDUCE,
    SCATTER,
    Profiled,
    ShardedLanguage,
    fsdp1,
    fully_shard,
    needs_sharding_on_cpu,
    shard,
    two_replicas,
)
from support import OPTIMIZERS, ddp, sentences
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_accum import GradientAccumulation

pytestmark = needs_sharding_on_cpu


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

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.extra, self.heads = nn.Linear(4, 6).double(), nn.Linear(6, 6).double(), Heads(3).double()

    def configure_model(self) -> None:
        if self._trainer is not None:
            shard(self, [self.body, self.extra, self.heads])

    def forward(self, x: Tensor, head: int, has_extra: bool) -> Tensor:
        hidden = self.body(x).tanh()
        hidden = self.extra(hidden).tanh() if has_extra else hidden
        return self.heads(hidden, head).square()

    def training_step(self, batches: Any, batch_idx: int) -> Tensor:
        return torch.cat([self(*batch) for batch in batches]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS["adamw"](self.parameters())


def tasks(heads: Sequence[Sequence[int]], extra: Sequence[bool]) -> list[list[Any]]:
    """By rank, the head of each micro-batch; all ranks leave out the layer together, since they gather it together."""
    generator = torch.Generator().manual_seed(5)
    return [
        [[(torch.randn(2 + i % 3, 4, generator=generator, dtype=torch.float64), head, extra[i])] for i, head in enumerate(rank)]
        for rank in heads
    ]


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("sync", ["window", "shard", "micro_batch"])
def test_parameters_that_some_micro_batches_and_ranks_do_not_use_equal_the_full_batch(sync: str) -> None:
    heads = [[0, 1, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0]]
    extra = [True, False, False, True, False, False]  # in the first of a window, at its end, in none
    by_rank, policy = tasks(heads, extra), GradientAccumulation(2, check=False)
    assert_one_window_one_batch(SeveralTasks, by_rank, windows_of(by_rank, 2), policy, "fsdp2 of 4", {"sync": sync}, collate=list)


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_a_window_of_three_has_three_reduce_scatters_and_one_all_reduce_for_each_group() -> None:
    trained(Profiled(), 3, "fsdp2 of 4", {"sync": "shard"}, Dealt(dealt(sentences(72), 2, "fsdp2 of 4")))
    found = torch.load("collectives.pt", weights_only=False)
    counts = [{kind: count[kind] for kind in (SCATTER, REDUCE)} for count, _ in found]
    inside, last = {SCATTER: GROUPS, REDUCE: 0}, {SCATTER: GROUPS, REDUCE: GROUPS + 2}  # the weights, and what was reached
    assert counts == [inside, inside, last] * 2


# --- refusals ---------------------------------------------------------------------------------------------------------


class OverAllRanks(ShardedLanguage):
    def mesh(self) -> DeviceMesh:
        return self.device_mesh["data_parallel"]

    def configure_model(self) -> None:
        for part in (*self.net.blocks, self.net):
            fully_shard(part, mesh=self.mesh())


class OverHalfOfThem(OverAllRanks):
    """Nothing averages over the replicas."""

    def mesh(self) -> DeviceMesh:
        return two_replicas(2)["shard"]


@pytest.mark.parametrize(
    ("module", "sync", "match"),
    [
        (OverAllRanks, "shard", r"net, net.blocks.0, net.blocks.1 is sharded over all ranks, .*Use sync=\"micro_batch\", or in"),
        (OverHalfOfThem, "window", r"averages gradients over ranks [01], but the data-parallel ranks are 0, 1, whose weights"),
    ],
)
def test_shards_of_other_ranks_are_refused(module: type[OverAllRanks], sync: str, match: str) -> None:
    with pytest.raises(Exception, match=f"(?s)MisconfiguredError: .*{match}"):
        trained(module(), 2, "fsdp2", {"sync": sync}, Dealt(dealt(sentences(8), 2, "fsdp2")))


@pytest.mark.parametrize("strategy", [ddp, fsdp1])
def test_other_engines_have_no_replicas_of_shards(strategy: Any) -> None:
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match='"window" or "micro_batch"'):
        strategy(sync="shard")


# --- beside tensor parallelism ------------------------------------------------------------------------------------------


class BesideTensor(ShardedLanguage):
    """Replicas of shards, whose layers are cut over other ranks."""

    def configure_model(self) -> None:
        if self._trainer is None:
            return
        for block in self.net.blocks:
            parallelize_module(
                block, self.device_mesh["tensor_parallel"], {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
            )
        for part in [*self.net.blocks, self.net]:
            fully_shard(part, mesh=self.device_mesh["replicate", "shard"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("sync", ["window", "micro_batch", "shard"])
def test_replicas_of_shards_beside_tensor_parallelism_equal_the_full_batch(sync: str) -> None:
    by_rank = dealt(sentences(20), 2, "fsdp2")
    options = {"mesh": {"replicate": 2, "shard": 1, "tensor_parallel": 2}, "sync": sync}
    assert_one_window_one_batch(BesideTensor, by_rank, windows_of(by_rank, 2), 2, "named mesh", options)
