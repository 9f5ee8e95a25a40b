"""sync="shard": what replicas of shards keep between micro-batches, and that they are told of each other's once a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness import Dealt, assert_one_window_one_batch, dealt, trained, windows_of
from sharded import (
    GROUPS,
    REDUCE,
    SCATTER,
    Profiled,
    ShardedLanguage,
    cut_linear_layers,
    fully_shard,
    needs_sharding_on_cpu,
    shard,
    two_replicas,
)
from support import Toy, sentences
from torch import Tensor, nn

from lightning_accum import GradientAccumulation, ModelParallelAccumulationStrategy

pytestmark = needs_sharding_on_cpu


# --- what fully_shard keeps between micro-batches ---------------------------------------------------------------------


class Heads(nn.Module):
    """One group of parameters, of which a batch takes one head."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(6, 1) for _ in range(number))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.each[head](x)


class Tasks(nn.ModuleDict):
    """Of three heads of the same size, batches take the first or the second; some leave out a whole layer."""

    def __init__(self) -> None:
        super().__init__({"body": nn.Linear(4, 6), "extra": nn.Linear(6, 6), "heads": Heads(3)})

    def forward(self, x: Tensor, head: int, has_extra: bool) -> Tensor:
        hidden = self["body"](x).tanh()
        hidden = self["extra"](hidden).tanh() if has_extra else hidden
        return self["heads"](hidden, head).square()


class SeveralTasks(Toy):
    def __init__(self) -> None:
        super().__init__(lambda net, batches: torch.cat([net(*batch) for batch in batches]).mean(), "adamw", Tasks)

    def configure_model(self) -> None:
        shard(self, list(self.net.values()))


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
    data = Dealt(dealt(sentences(72), 2, "fsdp2 of 4"))
    trained(Profiled(), GradientAccumulation(3, check=False), "fsdp2 of 4", {"sync": "shard"}, data)
    found = torch.load("collectives.pt", weights_only=False)
    counts = [{kind: count[kind] for kind in (SCATTER, REDUCE)} for count, _ in found]
    inside, last = {SCATTER: GROUPS, REDUCE: 0}, {SCATTER: GROUPS, REDUCE: GROUPS + 2}  # the weights, and what was reached
    assert counts == [inside, inside, last] * 2


# --- refusals ---------------------------------------------------------------------------------------------------------


class OverAllRanks(ShardedLanguage):
    def configure_model(self) -> None:
        for part in (*self.net.blocks, self.net):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


class OverHalfOfThem(ShardedLanguage):
    """Nothing averages over the replicas."""

    def configure_model(self) -> None:
        for part in (*self.net.blocks, self.net):
            fully_shard(part, mesh=two_replicas(2)["shard"])


@pytest.mark.parametrize(("module", "sync", "named"), [(OverAllRanks, "shard", "sync="), (OverHalfOfThem, "window", "ranks")])
def test_shards_of_other_ranks_are_refused(module: type[ShardedLanguage], sync: str, named: str) -> None:
    with pytest.raises(Exception, match=f"(?s)MisconfiguredError: .*{named}"):
        trained(module(), 2, "fsdp2", {"sync": sync}, Dealt(dealt(sentences(8), 2, "fsdp2")))


# --- beside tensor parallelism ------------------------------------------------------------------------------------------


class BesideTensor(ShardedLanguage):
    """Replicas of shards, whose layers are cut over other ranks."""

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelAccumulationStrategy):
            cut_linear_layers(self)
            for part in [*self.net.blocks, self.net]:
                fully_shard(part, mesh=self.device_mesh["replicate", "shard"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("sync", ["window", "micro_batch", "shard"])
def test_replicas_of_shards_beside_tensor_parallelism_equal_the_full_batch(sync: str) -> None:
    by_rank = dealt(sentences(20), 2, "fsdp2")
    options = {"mesh": {"replicate": 2, "shard": 1, "tensor_parallel": 2}, "sync": sync}
    assert_one_window_one_batch(BesideTensor, by_rank, windows_of(by_rank, 2), 2, "named mesh", options)
