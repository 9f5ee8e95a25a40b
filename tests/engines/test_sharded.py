"""FSDP1, FSDP2, tensor parallelism and meshes: what goes on inside of windows, what is sent, and what is refused."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sharded
import torch
from harness import EXACT, Dealt, assert_one_window_one_batch, dealt, trained, windows_of
from sharded import (
    ShardedLanguage,
    cut_linear_layers,
    fsdp1,
    fsdp2,
    fully_shard,
    needs_sharding_on_cpu,
    shard,
    two_replicas,
    wrap_for_fsdp1,
)
from support import Language, Profiled, SaveAfter, Toy, ddp, error_of_updates, language_loss, loader, pad, sentences, train_by_hand
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, default_collate

from lightning_accum import AccumulationError, GradientAccumulation, ModelParallelAccumulationStrategy, SameOrderSampler

pytestmark = needs_sharding_on_cpu

EPOCHS = 2
ROWS = sentences(36)
KINDS: list[tuple[str, bool | None]] = [("fsdp2", None), ("fsdp2", False), ("fsdp1", None)]
ENGINES = pytest.mark.parametrize(("engine", "reshard"), KINDS)


def rows_of(batches: int) -> list[list[Any]]:  # so many loader batches of two rows for each of two ranks
    return dealt(ROWS[: 4 * batches], 2, "fsdp2")


def windows_in(batches: int, size: int, steps: int | None = None) -> list[Any]:
    return windows_of(rows_of(batches), size, EPOCHS)[:steps]


def of_kind(**kind: Any) -> ShardedLanguage:  # FSDP1 by other rules than those of Lightning
    module = ShardedLanguage()
    module.configure_model = lambda: wrap_for_fsdp1(module, **kind)
    return module


@pytest.mark.some_cases(1, 3)
@pytest.mark.parametrize("has_hole", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        {"use_orig_params": True, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD},
        {"use_orig_params": False},
    ],
    ids=str,
)
def test_other_kinds_of_fsdp1_equal_the_full_batch(kind: dict[str, Any], has_hole: bool) -> None:
    by_rank = rows_of(3)
    by_rank[1][1] = None if has_hole else by_rank[1][1]
    assert_one_window_one_batch(partial(of_kind, **kind), by_rank, 2, "fsdp1", epochs=EPOCHS)


class Recomputed(ShardedLanguage):  # blocks keep no activations, and run once more in the backward
    def configure_model(self) -> None:
        super().configure_model()
        for block in self.net.blocks:
            layer = getattr(block, "_fsdp_wrapped_module", block)
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


@pytest.mark.some_cases(1)
@ENGINES
def test_activation_checkpointing_equals_the_full_batch(engine: str, reshard: bool | None) -> None:
    assert_one_window_one_batch(partial(Recomputed, reshard_after_forward=reshard), rows_of(3), 2, engine, epochs=EPOCHS)


class Validated(ShardedLanguage):  # notes the loss of every validation
    def on_fit_start(self) -> None:
        self.validation_losses: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_losses.append(language_loss(self.net(batch["input_ids"]), batch["labels"]).item())

    def on_train_end(self) -> None:
        torch.save(self.validation_losses, f"losses{self.global_rank}.pt")


class WithValidation(Dealt):
    def val_dataloader(self) -> Any:
        return loader([pad(ROWS[:2])])


@pytest.mark.some_cases(1)
@ENGINES
def test_validation_inside_a_window_sees_the_last_step_and_changes_nothing(engine: str, reshard: bool | None) -> None:
    options = {"val_check_interval": 3, "num_sanity_val_steps": 1, "max_epochs": EPOCHS}
    found = trained(Validated(reshard_after_forward=reshard), 2, engine, {}, WithValidation(rows_of(6)), **options)
    # before the check, and after 3 and 6 loader batches of either epoch, when 1, 3, 4 and 6 steps were made
    by_hand = [train_by_hand(Language(), list(map(pad, windows_in(6, 2, steps))), 1) for steps in (0, 1, 3, 4, 6)]
    assert error_of_updates(found, by_hand[-1], Language()) < EXACT
    expected = [module.training_step(pad(ROWS[:2]), 0).item() for module in by_hand]
    for rank in range(2):
        assert torch.load(f"losses{rank}.pt") == pytest.approx(expected, rel=EXACT)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("engine", "options", "is_folder"),
    [
        ("fsdp2", {"save_distributed_checkpoint": True}, True),
        ("fsdp2", {"save_distributed_checkpoint": False}, False),
        ("fsdp1", {"state_dict_type": "sharded"}, True),  # whole ones crash torch itself on a CPU
    ],
    ids=["fsdp2 distributed", "fsdp2 in one file", "fsdp1 distributed"],
)
def test_resumed_from_a_checkpoint_equals_the_full_batch(engine: str, options: dict[str, Any], is_folder: bool) -> None:
    make, at_the_end_of_an_epoch = partial(ShardedLanguage, "adamw"), SaveAfter(5)
    trained(make(), 2, engine, options, Dealt(rows_of(5)), callbacks=[at_the_end_of_an_epoch], max_epochs=EPOCHS)
    assert Path("inside.ckpt").is_dir() == is_folder
    assert [name for name in os.listdir() if "inside" in name] == ["inside.ckpt"]
    path = Path("inside.ckpt").absolute()
    assert_one_window_one_batch(make, rows_of(5), 2, engine, options, epochs=EPOCHS, ckpt_path=path)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("sync", "reshard"), [("window", None), ("window", False), ("shard", None)])
def test_checkpoint_inside_a_window_changes_nothing(sync: str, reshard: bool | None) -> None:
    """Also if gradients, and with reshard_after_forward=False parameters, are held whole."""
    arguments = {"callbacks": [SaveAfter(7, 11, path="inside{}.ckpt")], "max_epochs": EPOCHS}
    found = {4: trained(ShardedLanguage("adamw", reshard), 3, "fsdp2", {"sync": sync}, Dealt(rows_of(6)), **arguments)}
    found |= {steps: torch.load(f"inside{batches}.ckpt")["state_dict"] for batches, steps in ((7, 2), (11, 3))}
    for steps, parameters in found.items():
        by_hand = train_by_hand(Language("adamw"), list(map(pad, windows_in(6, 3, steps))), 1)
        assert error_of_updates(parameters, by_hand, Language()) < EXACT


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("engine", "precision", "clip"),
    [
        ("fsdp2", "32-true", {}),
        ("fsdp2", "bf16-mixed", {}),
        ("fsdp1 by layer", "32-true", {}),
        ("fsdp1 by layer", "bf16-mixed", {}),
        ("fsdp1 by layer", "32-true", {"norm": 0.05}),  # its clip_grad_norm_ refuses float64
    ],
    ids=str,
)
def test_low_precision_is_as_near_to_the_full_batch_in_double_as_on_one_rank(engine: str, precision: str, clip: Any) -> None:
    """Both round alike, but for the order of sums; FSDP1 in bf16-mixed rounds once more, in its reduction."""
    by_rank = rows_of(5)
    exact = train_by_hand(Language(), [pad(window) for window in windows_of(by_rank, 2)], EPOCHS, **clip)
    options = {"plugins": None, "precision": precision, "gradient_clip_val": clip.get("norm"), "max_epochs": EPOCHS}

    def error(engine: str, window: int, by_rank: list[Any]) -> float:
        found = trained(ShardedLanguage().float(), window, engine, data=Dealt(by_rank), **options)
        assert {parameter.dtype for parameter in found.values()} == {torch.float32}
        return error_of_updates({name: parameter.double() for name, parameter in found.items()}, exact, Language())

    limit = 3 if (engine, precision) == ("fsdp1 by layer", "bf16-mixed") else 2
    assert error(engine, 2, by_rank) < limit * error("accum", 4, [[rows for step in zip(*by_rank, strict=True) for rows in step]])


@pytest.mark.some_cases(2, 2)
@pytest.mark.parametrize(
    ("engine", "reshard", "sync"),
    [("fsdp2 of 4", None, "shard"), *((*case, sync) for sync in ("window", "micro_batch") for case in KINDS)],
)
def test_one_reduce_scatter_for_each_group_and_small_all_reduces(engine: str, sync: str, reshard: bool | None) -> None:
    looks = Profiled(3, 8, sharded.collectives_in)  # the second and the third window
    policy = GradientAccumulation(3, check=False)  # which looks once at padding of another length
    data = Dealt(dealt(sentences(72), 2, engine))
    trained(ShardedLanguage(reshard_after_forward=reshard), policy, engine, {"sync": sync}, data, callbacks=[looks])
    kinds, sizes = zip(*torch.load("profiled.pt", weights_only=False), strict=True)
    # the weights; and with FSDP2 which parameters were reached; and over replicas of shards each group
    over_replicas = sharded.GROUPS if sync == "shard" else 0
    inside = {sharded.SCATTER: 0 if sync == "window" else sharded.GROUPS, sharded.REDUCE: 0}
    last = {sharded.SCATTER: sharded.GROUPS, sharded.REDUCE: (1 if engine == "fsdp1" else 2) + over_replicas}
    for window in (0, 3):
        found = [{kind: count[kind] for kind in (sharded.SCATTER, sharded.REDUCE)} for count in kinds[window : window + 3]]
        assert found == [inside, inside, last]
    assert {kind for count in kinds for kind in count} == {sharded.GATHER, *last}  # no broadcast, of Lightning's or torch's
    if sync == "shard":
        return
    # gloo is given the weights, 112 bytes, and nothing smaller
    assert [size.count(14) for size in sizes] == [0, 0, 1, 0, 0, 1]
    assert min(size for window in sizes for size in window) == 14
    if reshard is False and sync == "window":
        assert [count[sharded.GATHER] for count in kinds] == [sharded.GROUPS, 0, 0] * 2


class Unsharded(ShardedLanguage):
    def configure_model(self) -> None:
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])


class DividesByItself(ShardedLanguage):
    def configure_model(self) -> None:
        super().configure_model()
        self.net.set_gradient_divide_factor(3.0)


class OneHead(ShardedLanguage):
    """Of two heads that are alike and each sharded by itself, a rank runs one, and in its next micro-batch the other."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(17, 17, dtype=torch.float64) for _ in range(2))

    def configure_model(self) -> None:
        super().configure_model()
        for head in self.heads:
            fully_shard(head, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return language_loss(self.heads[(batch_idx + self.global_rank) % 2](self.net(batch["input_ids"])), batch["labels"])


class Skips(ShardedLanguage):  # rows of zeros have no loss
    is_early = False  # it returns None before it runs its modules

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_empty = not batch["input_ids"].any()
        if self.is_early and is_empty:
            return None
        loss = super().training_step(batch, batch_idx)
        return None if is_empty else loss


EMPTY = [torch.zeros(3, dtype=torch.int64)] * 2
BEGINS_EMPTY = [[EMPTY, *rows] if rank else rows for rank, rows in enumerate(rows_of(2))]


@pytest.mark.some_cases(2, 2)
@ENGINES
@pytest.mark.parametrize("first", [None, EMPTY], ids=["None", "no loss"])
def test_a_rank_that_begins_without_a_loss_equals_the_full_batch(engine: str, reshard: bool | None, first: Any) -> None:
    by_rank = rows_of(4)
    by_rank[1][0] = None
    windows = windows_of(by_rank, 2, EPOCHS)
    by_rank[1][0] = first
    assert_one_window_one_batch(partial(Skips, reshard_after_forward=reshard), by_rank, 2, engine, windows=windows, epochs=EPOCHS)


@pytest.mark.parametrize(
    ("module", "by_rank", "policy", "named"),
    [
        (Unsharded, rows_of(2), 2, "fully_shard"),  # nothing would average all gradients
        (DividesByItself, rows_of(2), 2, "set_gradient_divide_factor"),
        (type("SkipsEarly", (Skips,), {"is_early": True}), BEGINS_EMPTY, 1, "begin with"),
        (OneHead, rows_of(2), GradientAccumulation(2, check=False), "heads.0, heads.1"),  # each is gathered as if it were the other
        (ShardedLanguage, rows_of(2), GradientAccumulation(micro_batch="auto"), "micro_batch"),
    ],
)
def test_what_would_not_be_exact_is_refused(module: type[ShardedLanguage], by_rank: Any, policy: Any, named: str) -> None:
    with pytest.raises(Exception, match=rf"(?s)lightning_accum\S*Error: .*{named}"):
        trained(module(), policy, "fsdp2", data=Dealt(by_rank))


def test_sync_that_there_is_not_is_refused() -> None:
    for strategy, sync in [(ddp, "never"), (fsdp1, "never"), (fsdp2, "never"), (ddp, "shard"), (fsdp1, "shard")]:
        with pytest.raises(AccumulationError, match="sync"):
            strategy(sync=sync)


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


VOCABULARY, LENGTH, NUMBER = 11, 8, 20


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


def prompted() -> list[dict[str, Tensor]]:
    """Sentences of which only what follows a prompt has labels: in some the prompt is the whole of the first part."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for index in range(NUMBER):
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.roll(-1)
        labels[: LENGTH // 2 + 1 if index % 8 in (0, 2) else index % 4] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def loaded() -> DataLoader:
    return DataLoader(prompted(), batch_size=2, sampler=SameOrderSampler(prompted(), shuffle=False))


@pytest.mark.some_cases(1, 1)
@pytest.mark.parametrize("sync", ["window", "micro_batch", "shard"])
def test_rows_whose_tokens_two_ranks_share_equal_the_full_batch(sync: str) -> None:
    options = {"mesh": {"data_parallel": 2, "context_parallel": 2}, "sync": sync}
    windows = [prompted()[i : i + 8] for i in range(0, NUMBER, 8)]  # 2 batches of 2 prompted on 2 ranks
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
