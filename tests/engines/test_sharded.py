"""FSDP1, FSDP2 and tensor parallelism: other kinds of them, what goes on inside of windows, what is sent, and what is refused."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import EXACT, Dealt, assert_one_window_one_batch, dealt, trained, windows_of
from sharded import (
    GATHER,
    GROUPS,
    REDUCE,
    SCATTER,
    ShardedLanguage,
    collectives_in,
    fsdp1,
    fsdp2,
    fully_shard,
    needs_sharding_on_cpu,
    wrap_for_fsdp1,
)
from support import Language, Profiled, SaveAfter, ddp, error_of_updates, language_loss, loader, pad, sentences, train_by_hand
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.checkpoint import checkpoint

from lightning_accum import AccumulationError, GradientAccumulation

pytestmark = needs_sharding_on_cpu

EPOCHS = 2
ROWS = sentences(36)
KINDS: list[tuple[str, bool | None]] = [("fsdp2", None), ("fsdp2", False), ("fsdp1", None)]
ENGINES = pytest.mark.parametrize(("engine", "reshard"), KINDS)


def rows_of(batches: int) -> list[list[Any]]:
    """So many loader batches of two rows for each of two ranks."""
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
    looks = Profiled(3, 8, collectives_in)  # the second and the third window
    policy = GradientAccumulation(3, check=False)  # which looks once at padding of another length
    data = Dealt(dealt(sentences(72), 2, engine))
    trained(ShardedLanguage(reshard_after_forward=reshard), policy, engine, {"sync": sync}, data, callbacks=[looks])
    kinds, sizes = zip(*torch.load("profiled.pt", weights_only=False), strict=True)
    # the weights; and with FSDP2 which parameters were reached; and over replicas of shards each group
    over_replicas = GROUPS if sync == "shard" else 0
    inside = {SCATTER: 0 if sync == "window" else GROUPS, REDUCE: 0}
    last = {SCATTER: GROUPS, REDUCE: (1 if engine == "fsdp1" else 2) + over_replicas}
    for window in (0, 3):
        found = [{kind: count[kind] for kind in (SCATTER, REDUCE)} for count in kinds[window : window + 3]]
        assert found == [inside, inside, last]
    assert {kind for count in kinds for kind in count} == {GATHER, SCATTER, REDUCE}  # no broadcast, of Lightning's or torch's
    if sync == "shard":
        return
    # gloo is given the weights, 112 bytes, and nothing smaller
    assert [size.count(14) for size in sizes] == [0, 0, 1, 0, 0, 1]
    assert min(size for window in sizes for size in window) == 14
    if reshard is False and sync == "window":
        assert [count[GATHER] for count in kinds] == [GROUPS, 0, 0] * 2


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
