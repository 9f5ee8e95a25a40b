"""FSDP1, FSDP2 and tensor parallelism: other kinds of them, what goes on inside of windows, what is sent, and what is refused."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import EXACT, Dealt, assert_one_window_one_batch, dealt, trained, windows_of
from sharded import GATHER, GROUPS, REDUCE, SCATTER, Profiled, ShardedLanguage, fsdp1, fsdp2, fully_shard, needs_sharding_on_cpu
from support import Language, SaveAfter, error_of_updates, language_loss, loader, pad, relative_error, sentences, train_by_hand
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.utils.checkpoint import checkpoint

from lightning_accum import GradientAccumulation, seams

pytestmark = needs_sharding_on_cpu

EPOCHS = 2
ROWS = sentences(36)
ENGINES = pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
SYNCS = pytest.mark.parametrize("sync", ["window", "micro_batch"])


def rows_of(batches: int) -> list[list[Any]]:
    """So many loader batches of two rows for each of two ranks."""
    return dealt(ROWS[: 4 * batches], 2, "fsdp2")


def assert_full_batches(make: Any, engine: str, by_rank: Any, size: int = 2, windows: Any = None, **arguments: Any) -> None:
    windows = windows_of(by_rank, size, EPOCHS) if windows is None else windows
    policy = arguments.pop("policy", size)
    assert_one_window_one_batch(make, by_rank, windows, policy, engine, **{"max_epochs": EPOCHS, **arguments})


# --- other kinds --------------------------------------------------------------------------------------------------------


class OfKind(ShardedLanguage):
    """FSDP1 by other rules than those of Lightning."""

    def __init__(self, **kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def configure_model(self) -> None:
        for i, block in enumerate(self.net.blocks):
            self.net.blocks[i] = FullyShardedDataParallel(block, device_id=torch.device("cpu"), **self.kind)
        self.net = FullyShardedDataParallel(self.net, device_id=torch.device("cpu"), **self.kind)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    "kind",
    [
        {"use_orig_params": True, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD},
        {"use_orig_params": False},
    ],
    ids=str,
)
def test_other_kinds_of_fsdp1_equal_the_full_batch(kind: dict[str, Any]) -> None:
    assert_full_batches(partial(OfKind, **kind), "fsdp1", rows_of(5))


def test_rank_that_stands_in_with_flat_parameters_of_fsdp1() -> None:
    by_rank = rows_of(2)
    by_rank[1][1] = None
    assert_full_batches(partial(OfKind, use_orig_params=False), "fsdp1", by_rank)


class Recomputed(ShardedLanguage):
    """Blocks keep no activations, and run once more in the backward."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.net.blocks:
            layer = getattr(block, "_fsdp_wrapped_module", block)
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("engine", "reshard"), [("fsdp2", None), ("fsdp2", False), ("fsdp1", None)])
def test_activation_checkpointing_equals_the_full_batch(engine: str, reshard: bool | None) -> None:
    assert_full_batches(partial(Recomputed, reshard_after_forward=reshard), engine, rows_of(3))


# --- a rank with nothing ----------------------------------------------------------------------------------------------


def first_without_labels(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    batch = pad(rows)
    if rows[0] is ROWS[0]:
        batch["labels"][0] = -100
    return batch


def test_first_row_without_labels_on_one_rank_is_no_break() -> None:
    assert_full_batches(ShardedLanguage, "fsdp2", rows_of(3), collate=first_without_labels)


def test_rank_whose_first_batch_is_none_is_told_what_to_do() -> None:
    by_rank = rows_of(2)
    by_rank[1][0] = None
    with pytest.raises(Exception, match="Rank 1 has had no batch with a loss yet"):
        assert_full_batches(ShardedLanguage, "fsdp2", by_rank)


# --- where windows end ------------------------------------------------------------------------------------------------


class StopsInside(pl.Callback):
    """In the middle of the second window."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            trainer.should_stop = True


@pytest.mark.some_cases(1)
@ENGINES
def test_early_stop_inside_a_window_steps_on_what_is_there(engine: str) -> None:
    seen = windows_of([rank[:5] for rank in rows_of(8)], 3)  # a window of three and one of two
    assert_full_batches(ShardedLanguage, engine, rows_of(8), 3, seen, callbacks=[StopsInside()])


class Validated(ShardedLanguage):
    """Notes the loss of every validation."""

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
@pytest.mark.parametrize(("engine", "reshard"), [("fsdp2", None), ("fsdp2", False), ("fsdp2", True), ("fsdp1", None)])
def test_validation_inside_a_window_sees_the_last_step_and_changes_nothing(engine: str, reshard: bool | None) -> None:
    windows, data = windows_of(rows_of(6), 2, EPOCHS), WithValidation(rows_of(6))
    make = partial(Validated, reshard_after_forward=reshard)
    assert_full_batches(make, engine, data, 2, windows, val_check_interval=3, num_sanity_val_steps=0)
    # after 3 and 6 loader batches of either epoch, when 1, 3, 4 and 6 steps were made
    trained_by_hand = [train_by_hand(Language(), list(map(pad, windows[:steps])), 1) for steps in (1, 3, 4, 6)]
    expected = [module.training_step(pad(ROWS[:2]), 0).item() for module in trained_by_hand]
    for rank in range(2):
        assert torch.load(f"losses{rank}.pt") == pytest.approx(expected, rel=1e-12)


@pytest.mark.some_cases(1)
@ENGINES
def test_max_steps_counts_optimizer_steps(engine: str) -> None:
    assert_full_batches(ShardedLanguage, engine, rows_of(6), 2, windows_of(rows_of(6), 2)[:2], max_steps=2)


# --- checkpoints ------------------------------------------------------------------------------------------------------


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
    run = partial(assert_full_batches, partial(ShardedLanguage, "adamw"), engine, rows_of(5), options=options)
    run(callbacks=[SaveAfter(5)])  # at the end of an epoch
    assert Path("inside.ckpt").is_dir() == is_folder
    assert [name for name in os.listdir() if "inside" in name] == ["inside.ckpt"]
    run(ckpt_path=Path("inside.ckpt").absolute())


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("sync", "reshard"), [("window", None), ("window", False), ("shard", None)])
def test_checkpoint_inside_a_window_changes_nothing(sync: str, reshard: bool | None) -> None:
    """Where gradients, and with reshard_after_forward=False parameters, are held whole."""
    make, saves = partial(ShardedLanguage, "adamw", reshard), SaveAfter(7, 11, path="inside{}.ckpt")
    assert_full_batches(make, "fsdp2", rows_of(6), 3, options={"sync": sync}, callbacks=[saves])
    for batches, steps in ((7, 2), (11, 3)):
        state = torch.load(f"inside{batches}.ckpt")["state_dict"]
        at_hand = train_by_hand(Language("adamw"), list(map(pad, windows_of(rows_of(6), 3, EPOCHS)[:steps])), 1)
        assert relative_error([state[name] for name, _ in at_hand.named_parameters()], at_hand.parameters()) < EXACT


# --- weights and precision --------------------------------------------------------------------------------------------


class MeanOfMeans(ShardedLanguage):
    """Of a list of batches, takes the mean of their losses."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batches = batch if isinstance(batch, list) else [batch]
        return torch.stack([super(MeanOfMeans, self).training_step(one, 0) for one in batches]).mean()


@pytest.mark.some_cases(1)
@ENGINES
def test_equal_weights_are_the_mean_of_the_means(engine: str) -> None:
    by_rank = rows_of(3)
    windows = [[rows for rank in by_rank for rows in rank[i : i + 2]] for i in (0, 2)] * EPOCHS

    def collate(rows: Any) -> Any:
        return [pad(own) for own in rows] if isinstance(rows[0], list) else pad(rows)

    policy = GradientAccumulation(2, weight="equal")
    assert_full_batches(MeanOfMeans, engine, by_rank, 2, windows, policy=policy, collate=collate)


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
def test_low_precision_is_as_near_to_the_full_batch_in_double_as_a_hand_written_loop(
    engine: str, precision: str, clip: dict[str, float]
) -> None:
    """In low precision a loop over the same micro-batches has roundings of its own in every operation: 2**-24 of float32, 2**-9 of
    bfloat16, of which one may change a slope of ReLU. So there are three, whose losses are scaled otherwise. Windows have the same
    roundings, and FSDP1 in bf16-mixed one more in its reduction: at most twice as far."""
    by_rank, full = rows_of(5), [pad(window) for window in windows_of(rows_of(5), 2)]
    exact = train_by_hand(Language(), full, EPOCHS, **clip)
    parts = [[pad(rows) for rank in by_rank for rows in rank[i : i + 2]] for i in range(0, 5, 2)]

    def tokens(batch: dict[str, Tensor]) -> int:
        return int((batch["labels"][:, 1:] != -100).sum())

    def error(parameters: Iterable[tuple[str, Tensor]]) -> float:
        return error_of_updates({name: parameter.double() for name, parameter in parameters}, exact, Language())

    def error_by_hand(scale: float) -> float:
        low = Language().float()
        for parameter in low.parameters():
            parameter.register_hook(lambda gradient: gradient / scale)

        def loss(micro_batches: list[dict[str, Tensor]]) -> Tensor:
            total = torch.tensor(0.0)
            for batch in micro_batches:
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):  # casts parameters anew for each
                    total = total + scale * low.training_step(batch, 0) * tokens(batch)
            return total / sum(map(tokens, micro_batches))

        return error(train_by_hand(low, parts, EPOCHS, loss, **clip).named_parameters())

    options = {"plugins": None, "precision": precision, "gradient_clip_val": clip.get("norm"), "max_epochs": EPOCHS}
    found = trained(ShardedLanguage().float(), 2, engine, data=Dealt(by_rank), **options)
    assert {parameter.dtype for parameter in found.values()} == {torch.float32}
    assert error(found.items()) < 2 * max(map(error_by_hand, (1.0, 1.3, 1.9)))


# --- refusals ---------------------------------------------------------------------------------------------------------


class Unsharded(ShardedLanguage):
    def configure_model(self) -> None:
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])


class DividesByItself(ShardedLanguage):
    def configure_model(self) -> None:
        super().configure_model()
        self.net.set_gradient_divide_factor(3.0)


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (Unsharded, "Nothing averages the gradients of .* over the 2 data-parallel ranks: apply fully_shard"),
        (DividesByItself, "Gradients are divided by 3 .set_gradient_divide_factor.*the average over 2"),
    ],
)
def test_module_whose_gradients_would_not_be_averaged_is_refused(module: type[ShardedLanguage], match: str) -> None:
    with pytest.raises(Exception, match=f"(?s)MisconfiguredError: {match}"):
        trained(module(), 2, "fsdp2", data=Dealt(rows_of(2)))


def test_torch_that_keeps_the_gradients_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (seam for seam in seams.FSDP2 if seam.name == "_unsharded_param")
    monkeypatch.setattr(seams, "FSDP2", (*seams.FSDP2, row._replace(name="_unsharded_parameter")))
    with pytest.raises(Exception, match=r"torch 2.* does not have FSDPParam._unsharded_parameter \(relied on: its grad is what"):
        trained(ShardedLanguage(), 2, "fsdp2", data=Dealt(rows_of(2)))


@pytest.mark.parametrize("strategy", [fsdp1, fsdp2])
def test_unknown_sync_is_refused(strategy: Any) -> None:
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="sync='nonsense': expected \"window\""):
        strategy(sync="nonsense")


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("engine", "reshard"), [("fsdp2", None), ("fsdp2", False), ("fsdp1", None)])
@SYNCS
def test_one_reduce_scatter_for_each_group_and_small_all_reduces(engine: str, sync: str, reshard: bool | None) -> None:
    trained(Profiled(reshard_after_forward=reshard), 3, engine, {"sync": sync}, Dealt(rows_of(9)))
    kinds, sizes = zip(*torch.load("collectives.pt", weights_only=False), strict=True)
    # the weights; and with FSDP2 which parameters were reached
    inside, last = {SCATTER: 0, REDUCE: 0}, {SCATTER: GROUPS, REDUCE: 2 if engine == "fsdp2" else 1}
    if sync == "micro_batch":
        inside[SCATTER] = GROUPS
    for window in (0, 3):
        found = [{kind: count[kind] for kind in (SCATTER, REDUCE)} for count in kinds[window : window + 3]]
        assert found == [inside, inside, last]
    assert {kind for count in kinds for kind in count} == {GATHER, SCATTER, REDUCE}  # no broadcast, of Lightning's or torch's
    # gloo is given the weights, 64 bytes, and nothing smaller
    assert [size.count(8) for size in sizes] == [0, 0, 1, 0, 0, 1]
    assert min(size for window in sizes for size in window) == 8
    if reshard is False and sync == "window":
        assert [count[GATHER] for count in kinds] == [GROUPS, 0, 0] * 2


# --- failures -----------------------------------------------------------------------------------------------------------


class Failing(ShardedLanguage):
    """Its step fails on one rank before it has called a sharded module."""

    failing = 1

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        if self.global_rank == self.failing:
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)


@pytest.mark.some_cases(1)
@ENGINES
@pytest.mark.parametrize("rank", [1, 0])
def test_step_that_fails_on_one_rank_ends_all(engine: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_accum.weighing.trial.PATIENCE", 0.5)
    module = Failing()
    module.failing = rank
    begin = time.monotonic()
    with pytest.raises(Exception, match="boom"):
        trained(module, 2, engine, {}, Dealt(rows_of(2)))
    assert time.monotonic() - begin < 15  # and not after the time-out of the group
