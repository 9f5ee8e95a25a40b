"""Meshes: replicas of shards (sync="shard"), and named dimensions (mesh=) whose ranks have parts of the same rows."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness import Dealt, assert_one_window_one_batch, dealt, trained
from sharded import ShardedLanguage, cut_linear_layers, fully_shard, needs_sharding_on_cpu, shard, two_replicas
from support import Toy, sentences
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

from lightning_accum import AccumulationError, GradientAccumulation, ModelParallelAccumulationStrategy, SameOrderSampler

pytestmark = needs_sharding_on_cpu


class Heads(nn.ModuleList):  # one group of parameters, of which a batch takes one head
    def forward(self, x: Tensor, head: int) -> Tensor:
        return self[head](x)


class Tasks(nn.ModuleDict):  # of three heads of the same size, batches take the first or the second; some leave out a whole layer
    def __init__(self) -> None:
        super().__init__({"body": nn.Linear(4, 6), "extra": nn.Linear(6, 6), "heads": Heads(nn.Linear(6, 1) for _ in range(3))})

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


@pytest.mark.some_cases(1, 1)
@pytest.mark.parametrize("sync", ["window", "shard", "micro_batch"])
def test_parameters_that_some_micro_batches_and_ranks_do_not_use_equal_the_full_batch(sync: str) -> None:
    heads = [[0, 1, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0]]
    extra = [True, False, False, True, False, False]  # in the first of a window, at its end, in none
    by_rank, policy = tasks(heads, extra), GradientAccumulation(2, check=False)
    assert_one_window_one_batch(SeveralTasks, by_rank, policy, "fsdp2 of 4", {"sync": sync}, collate=list)


@pytest.mark.parametrize(
    ("over", "sync", "named"),
    [
        (lambda mesh: mesh["data_parallel"], "shard", "sync="),
        (lambda mesh: two_replicas(2)["shard"], "window", "ranks"),  # nothing averages over the replicas
    ],
)
def test_shards_of_other_ranks_are_refused(over: Any, sync: str, named: str) -> None:
    class Over(ShardedLanguage):
        def configure_model(self) -> None:
            for part in (*self.net.blocks, self.net):
                fully_shard(part, mesh=over(self.device_mesh))

    with pytest.raises(Exception, match=f"(?s)MisconfiguredError: .*{named}"):
        trained(Over(), 2, "fsdp2", {"sync": sync}, Dealt(dealt(sentences(8), 2, "fsdp2")))


class BesideTensor(ShardedLanguage):  # replicas of shards, whose layers are cut over other ranks
    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelAccumulationStrategy):
            cut_linear_layers(self)
            for part in [*self.net.blocks, self.net]:
                fully_shard(part, mesh=self.device_mesh["replicate", "shard"])


@pytest.mark.some_cases(0, 1)
@pytest.mark.parametrize("sync", ["shard", "window", "micro_batch"])
def test_replicas_of_shards_beside_tensor_parallelism_equal_the_full_batch(sync: str) -> None:
    options = {"mesh": {"replicate": 2, "shard": 1, "tensor_parallel": 2}, "sync": sync}
    assert_one_window_one_batch(BesideTensor, dealt(sentences(20), 2, "fsdp2"), 2, "named mesh", options)


VOCABULARY, LENGTH, ROWS = 11, 8, 20


class Attending(nn.Module):  # each token sees those before it, which other ranks may have
    def __init__(self) -> None:
        super().__init__()
        self.token, self.before, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, 6), nn.Linear(6, VOCABULARY)

    def forward(self, tokens: Tensor, mesh: DeviceMesh | None) -> Tensor:
        own = self.token(tokens)
        every = own if mesh is None else DTensor.from_local(own, mesh, [Shard(1)]).full_tensor(grad_placements=[Partial()])
        means = every.cumsum(1) / torch.arange(1, every.shape[1] + 1)[:, None]
        if mesh is not None:
            means = means.chunk(mesh.size(), 1)[mesh.get_local_rank()]
        return self.head((own + self.before(means)).tanh())


class Parts(Toy):  # a rank has the part of each row that it has in the mesh; one process has all of it
    def __init__(self) -> None:
        super().__init__(self.loss_of_tokens, "adamw", Attending)

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is not None:
            fully_shard(self.net, mesh=mesh[tuple(n for n, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True) if size > 1)])

    def part(self, net: Attending, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        mesh = None if self.device_mesh is None else self.device_mesh["context_parallel"]
        tokens, labels = batch["input_ids"], batch["labels"]
        if mesh is not None:
            tokens, labels = (value.chunk(mesh.size(), 1)[mesh.get_local_rank()] for value in (tokens, labels))
        return net(tokens, mesh), labels

    def loss_of_tokens(self, net: Attending, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self.part(net, batch)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def rows() -> list[dict[str, Tensor]]:
    """Sentences of which only what follows a prompt has labels: in some the prompt is the whole of the first part."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for index in range(ROWS):
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.roll(-1)
        labels[: LENGTH // 2 + 1 if index % 8 in (0, 2) else index % 4] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def loaded() -> DataLoader:
    return DataLoader(rows(), batch_size=2, sampler=SameOrderSampler(rows(), shuffle=False))


@pytest.mark.some_cases(1, 1)
@pytest.mark.parametrize("sync", ["window", "micro_batch", "shard"])
def test_rows_whose_tokens_two_ranks_share_equal_the_full_batch(sync: str) -> None:
    options = {"mesh": {"data_parallel": 2, "context_parallel": 2}, "sync": sync}
    windows = [rows()[i : i + 8] for i in range(0, ROWS, 8)]  # 2 batches of 2 rows on 2 ranks
    assert_one_window_one_batch(Parts, loaded(), 2, "named mesh", options, windows=windows, collate=default_collate)


class LacksLoss(Parts):  # of the second batch, the rank that has the first part returns none
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 and self.global_rank == 0 else loss


class OfRows(Parts):  # a sum over the tokens of each row, and the mean of these
    def loss_of_tokens(self, net: Attending, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self.part(net, batch)
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1).mean()


@pytest.mark.parametrize(
    ("module", "mesh", "named"),
    [
        (LacksLoss, {"context_parallel": 2}, "loss"),
        (OfRows, {"context_parallel": 2}, "mesh="),
        (Parts, {"data_parallel": 2, "context_parallel": 2}, "4 devices"),
    ],
)
def test_what_two_ranks_cannot_have_parts_of_is_an_error_on_all(module: type[Parts], mesh: dict[str, int], named: str) -> None:
    with pytest.raises(Exception, match=rf"(?s)lightning_accum\S*Error: .*{named}"):
        trained(module(), 2, "named mesh", {"mesh": mesh}, loaded(), devices=2)


@pytest.mark.parametrize(
    ("mesh", "options", "named"),
    [
        ({"data_parallel": 2, "pipeline": 2}, {}, "pipeline"),
        ({"tensor_parallel": 2, "data_parallel": 2}, {}, "tensor_parallel"),
        ({"data_parallel": 2}, {"data_parallel_size": 2}, "data_parallel_size"),
    ],
)
def test_mesh_that_does_not_say_what_ranks_share_is_refused(mesh: dict[str, int], options: dict[str, int], named: str) -> None:
    with pytest.raises(AccumulationError, match=named):
        ModelParallelAccumulationStrategy(mesh=mesh, **options)
