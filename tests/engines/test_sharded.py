"""FSDP1, FSDP2 and tensor parallelism: the same parameters as those of the full batch, and what is sent for them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from sharded import DoublePrecision, ShardedLanguage, fsdp1, fsdp2, fully_shard, needs_sharding_on_cpu
from support import Language, end_profile, language_loss, loader, pad, relative_error, sentences, train_by_hand, trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from lightning_accum import FSDPAccumulationStrategy, GradientAccumulation, ModelParallelAccumulationStrategy, seams

pytestmark = needs_sharding_on_cpu

EPOCHS = 2
EXACT = 1e-12
SHORT = timedelta(seconds=20)
ENGINES = pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
SYNCS = pytest.mark.parametrize("sync", ["window", "micro_batch"])
Batch = dict[str, Tensor]

# --- data -------------------------------------------------------------------------------------------------------------


def dealt(batches: int, ranks: int = 2) -> list[list[Batch]]:
    """Micro-batches of two sentences of different lengths, so many for each rank."""
    rows = sentences(2 * batches * ranks)
    micro_batches = [pad(rows[i : i + 2]) for i in range(0, len(rows), 2)]
    return [micro_batches[rank::ranks] for rank in range(ranks)]


def joined(batches: Sequence[Batch | None]) -> Batch:
    """One batch of all that have a loss. The model is causal, so padding at the end of a row changes nothing before it."""
    present = [batch for batch in batches if batch is not None and "returns_none" not in batch]
    longest = max(batch["labels"].shape[1] for batch in present)

    def column(key: str, padding: int) -> Tensor:
        return torch.cat([F.pad(batch[key], (0, longest - batch[key].shape[1]), value=padding) for batch in present])

    return {"input_ids": column("input_ids", 0), "labels": column("labels", -100)}


def windows_of(by_rank: Sequence[Sequence[Batch | None]], size: int = 2) -> list[Batch]:
    """The full batches: of windows of ``size`` micro-batches of each rank, with a tail."""
    return [joined([b for rank in by_rank for b in rank[i : i + size]]) for i in range(0, len(by_rank[0]), size)]


# --- running ----------------------------------------------------------------------------------------------------------


class Dealt(ShardedLanguage):
    """Each data-parallel rank has micro-batches of its own. What training ended with is in a file for each rank."""

    def __init__(self, by_rank: Sequence[Sequence[Any]], optimizer: str = "sgd", **kwargs: Any) -> None:
        super().__init__(optimizer, **kwargs)
        self.by_rank = by_rank

    def train_dataloader(self) -> Any:
        strategy, rank = self.trainer.strategy, self.trainer.global_rank
        if isinstance(strategy, ModelParallelAccumulationStrategy):
            rank = self.device_mesh["data_parallel"].get_local_rank()
        return loader(self.by_rank[rank])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if "returns_none" not in batch:
            return super().training_step(batch, batch_idx)
        if batch["returns_none"] == "after the forward":
            self.net(batch["input_ids"])
        return None

    def on_train_end(self) -> None:
        facts = {"global_step": self.trainer.global_step, "epoch": self.trainer.current_epoch}
        torch.save(facts, f"rank{self.global_rank}.pt")


def strategy_of(engine: str, **kwargs: Any) -> dict[str, Any]:
    """Arguments of a Trainer over two ranks."""
    kwargs = {"timeout": SHORT, **kwargs}
    if engine == "fsdp1":
        return {"strategy": fsdp1(**kwargs), "devices": 2, "plugins": [DoublePrecision()]}
    return {"strategy": fsdp2(**kwargs), "devices": 2}


def fit(module: pl.LightningModule, of_strategy: dict[str, Any], window: int = 2, **kwargs: Any) -> pl.Trainer:
    options = {"accumulate_grad_batches": window, "max_epochs": EPOCHS, **of_strategy, **kwargs}
    run = trainer(**options)
    run.fit(module)
    return run


def error(run: pl.Trainer, expected: nn.Module) -> float:
    """Of the parameters that a run ended with, gathered from all ranks."""
    return relative_error([run.whole[name] for name, _ in expected.named_parameters()], expected.parameters())


def by_hand(batches: Sequence[Any], optimizer: str = "sgd", epochs: int = EPOCHS, **kwargs: Any) -> Language:
    return train_by_hand(Language(optimizer), batches, epochs, **kwargs)


# --- the promise ------------------------------------------------------------------------------------------------------


class LeftWhole(Dealt):
    """FSDP1 is left to the strategy, which wraps the whole module."""

    def configure_model(self) -> None:
        if not isinstance(self.trainer.strategy, FSDPAccumulationStrategy):
            super().configure_model()


BY_LAYER = {"auto_wrap_policy": {nn.TransformerEncoderLayer}}


@pytest.mark.some_cases(1)
@SYNCS
def test_fsdp1_that_the_strategy_wraps_equals_the_full_batch(sync: str) -> None:
    by_rank = dealt(5)
    run = fit(LeftWhole(by_rank, "adamw"), strategy_of("fsdp1", sync=sync, **BY_LAYER))
    assert error(run, by_hand(windows_of(by_rank), "adamw")) < EXACT


class OfKind(Dealt):
    """FSDP1 by other rules than those of Lightning."""

    def __init__(self, by_rank: Sequence[Sequence[Any]], **kind: Any) -> None:
        super().__init__(by_rank)
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
    by_rank = dealt(5)
    run = fit(OfKind(by_rank, **kind), strategy_of("fsdp1"))
    assert error(run, by_hand(windows_of(by_rank))) < EXACT


def test_rank_that_stands_in_with_flat_parameters_of_fsdp1() -> None:
    by_rank = dealt(2)
    by_rank[1][1] = None
    run = fit(OfKind(by_rank, use_orig_params=False), strategy_of("fsdp1"))
    assert error(run, by_hand(windows_of(by_rank))) < EXACT


class Recomputed(Dealt):
    """Blocks keep no activations, and run once more in the backward."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.net.blocks:
            layer = getattr(block, "_fsdp_wrapped_module", block)
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("engine", "reshard"), [("fsdp2", None), ("fsdp2", False), ("fsdp1", None)])
def test_activation_checkpointing_equals_the_full_batch(engine: str, reshard: bool | None) -> None:
    by_rank = dealt(3)
    run = fit(Recomputed(by_rank, reshard_after_forward=reshard), strategy_of(engine))
    assert error(run, by_hand(windows_of(by_rank))) < EXACT


# --- a rank with nothing ----------------------------------------------------------------------------------------------

HOLES = ["no batch", "None before the forward", "None after the forward", "all labels ignored"]


def with_hole(batch: Batch, kind: str) -> Batch | None:
    if kind == "no batch":
        return None
    if kind == "all labels ignored":
        return {**batch, "labels": torch.full_like(batch["labels"], -100)}
    return {**batch, "returns_none": kind.removeprefix("None ")}


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    "kind",
    [
        "no batch",
        "None before the forward",
        "None after the forward",
        "all labels ignored",
    ],
)
@SYNCS
def test_nothing_on_one_of_two_ranks_where_the_strategy_wraps_fsdp1(sync: str, kind: str) -> None:
    by_rank = dealt(4)
    by_rank[1][1], by_rank[0][2] = with_hole(by_rank[1][1], kind), with_hole(by_rank[0][2], kind)
    run = fit(LeftWhole(by_rank, "adamw"), strategy_of("fsdp1", sync=sync, **BY_LAYER), max_epochs=1)
    assert error(run, by_hand(windows_of(by_rank), "adamw", epochs=1)) < EXACT


def test_first_row_without_labels_on_one_rank_is_no_break() -> None:
    by_rank = dealt(3)
    by_rank[0][0]["labels"][0] = -100
    assert error(fit(Dealt(by_rank), strategy_of("fsdp2")), by_hand(windows_of(by_rank))) < EXACT


def test_rank_whose_first_batch_is_none_is_told_what_to_do() -> None:
    by_rank = dealt(2)
    by_rank[1][0] = None
    with pytest.raises(Exception, match="Rank 1 has had no batch with a loss yet"):
        fit(Dealt(by_rank), strategy_of("fsdp2"))


# --- where windows end ------------------------------------------------------------------------------------------------


class StopsInside(pl.Callback):
    """In the middle of the second window."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if batch_idx == 4:
            trainer.should_stop = True


@pytest.mark.some_cases(1)
@ENGINES
def test_early_stop_inside_a_window_steps_on_what_is_there(engine: str) -> None:
    by_rank = dealt(8)
    run = fit(Dealt(by_rank), strategy_of(engine), window=3, callbacks=[StopsInside()])
    seen = [rank[:5] for rank in by_rank]  # a window of three and one of two
    assert error(run, by_hand(windows_of(seen, 3), epochs=1)) < EXACT
    assert torch.load("rank1.pt")["global_step"] == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("tail", ["drop", "carry"])
def test_tail_that_is_dropped_or_carried_where_parameters_stay_gathered(tail: Any) -> None:
    by_rank = dealt(5)
    policy = GradientAccumulation(3, tail=tail)
    run = fit(Dealt(by_rank, "adamw", reshard_after_forward=False), strategy_of("fsdp2"), window=1, callbacks=[policy])
    in_windows = [rank[:3] * EPOCHS if tail == "drop" else rank * EPOCHS for rank in by_rank]
    assert error(run, by_hand(windows_of(in_windows, 3), "adamw", epochs=1)) < EXACT


class Validated(Dealt):
    """Notes the loss of every validation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.validation_losses: list[float] = []

    def val_dataloader(self) -> Any:
        return loader(dealt(1, 1)[0])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validation_losses.append(language_loss(self.net(batch["input_ids"]), batch["labels"]).item())

    def on_train_end(self) -> None:
        torch.save(self.validation_losses, f"losses{self.global_rank}.pt")


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("engine", "reshard"), [("fsdp2", None), ("fsdp2", False), ("fsdp2", True), ("fsdp1", None)])
def test_validation_inside_a_window_sees_the_last_step_and_changes_nothing(engine: str, reshard: bool | None) -> None:
    by_rank = dealt(6)
    run = fit(Validated(by_rank, reshard_after_forward=reshard), strategy_of(engine), val_check_interval=3, num_sanity_val_steps=0)
    module = Language()
    optimizer, expected = module.configure_optimizers(), []
    for batch in windows_of(by_rank) * EPOCHS:
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()
        expected.append(module.training_step(dealt(1, 1)[0][0], 0).item())
    assert error(run, module) < EXACT
    # after 3 and 6 loader batches of either epoch, when 1, 3, 4 and 6 steps were made
    for rank in range(2):
        assert torch.load(f"losses{rank}.pt") == pytest.approx([expected[0], expected[2], expected[3], expected[5]], rel=1e-12)


@pytest.mark.some_cases(1)
@ENGINES
def test_max_steps_counts_optimizer_steps(engine: str) -> None:
    by_rank = dealt(6)
    run = fit(Dealt(by_rank), strategy_of(engine), max_steps=2)
    assert error(run, by_hand(windows_of(by_rank)[:2], epochs=1)) < EXACT
    assert torch.load("rank0.pt")["global_step"] == 2


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Saves(pl.Callback):
    """After the first epoch, at a boundary."""

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint("middle.ckpt")


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
    by_rank = dealt(5)
    expected = by_hand(windows_of(by_rank), "adamw")
    run = fit(Dealt(by_rank, "adamw"), strategy_of(engine, **options), callbacks=[Saves()])
    assert error(run, expected) < EXACT
    path = Path("middle.ckpt").absolute()
    assert path.is_dir() == is_folder
    assert [name for name in os.listdir() if "middle" in name] == ["middle.ckpt"]
    module = Dealt(by_rank, "adamw")
    torch.nn.init.zeros_(module.net.position)  # whatever it was, the checkpoint has it
    resumed = trainer(accumulate_grad_batches=2, max_epochs=EPOCHS, **strategy_of(engine, **options))
    resumed.fit(module, ckpt_path=path)
    assert error(resumed, expected) < EXACT
    assert torch.load("rank1.pt") == {"global_step": 3 * EPOCHS, "epoch": EPOCHS}


class SavesInside(pl.Callback):
    """In the middle of a window, where gradients and with reshard_after_forward=False parameters are held whole."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if batch_idx in (0, 4):
            trainer.save_checkpoint(f"inside{batch_idx}.ckpt")


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("reshard", [None, False])
def test_checkpoint_inside_a_window_changes_nothing(reshard: bool | None) -> None:
    by_rank = dealt(6)
    run = fit(Dealt(by_rank, reshard_after_forward=reshard), strategy_of("fsdp2"), window=3, callbacks=[SavesInside()])
    assert error(run, by_hand(windows_of(by_rank, 3))) < EXACT
    saved = [torch.load(f"inside{batch_idx}.ckpt")["state_dict"] for batch_idx in (0, 4)]  # from the second epoch
    for state, steps in zip(saved, (2, 3), strict=True):
        at_hand = by_hand((windows_of(by_rank, 3) * EPOCHS)[:steps], epochs=1)
        assert relative_error([state[name] for name, _ in at_hand.named_parameters()], at_hand.parameters()) < EXACT


# --- weights and precision --------------------------------------------------------------------------------------------


@pytest.mark.some_cases(1)
@ENGINES
def test_equal_weights_are_the_mean_of_the_means(engine: str) -> None:
    by_rank = dealt(3)
    run = fit(Dealt(by_rank), strategy_of(engine), window=1, callbacks=[GradientAccumulation(2, weight="equal")])
    module = Language()

    def mean_of_means(batches: list[Batch]) -> Tensor:
        return torch.stack([module.training_step(batch, 0) for batch in batches]).mean()

    windows = [[batch for rank in by_rank for batch in rank[i : i + 2]] for i in (0, 2)]
    train_by_hand(module, windows, EPOCHS, mean_of_means)
    assert error(run, module) < EXACT
    assert error(run, by_hand(windows_of(by_rank))) > 1e-3


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("engine", "precision", "clip"),
    [
        ("fsdp2", "32-true", {}),
        ("fsdp2", "bf16-mixed", {}),
        ("fsdp1", "32-true", {}),
        ("fsdp1", "bf16-mixed", {}),
        ("fsdp1", "32-true", {"norm": 0.05}),  # its clip_grad_norm_ refuses float64
    ],
    ids=str,
)
def test_low_precision_is_as_near_to_the_full_batch_in_double_as_the_full_batch_itself(
    engine: str, precision: str, clip: dict[str, float]
) -> None:
    """In low precision the full batch has roundings of its own in every operation: 2**-24 of float32, 2**-9 of bfloat16. Windows
    have the same, one more in each addition of gradients, and FSDP1 in bf16-mixed one in its reduction: at most twice as far."""
    by_rank, names = dealt(5), [name for name, _ in Language().named_parameters()]
    start, exact, low = Language(), by_hand(windows_of(by_rank), **clip), Language().float()

    def loss(batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            return low.training_step(batch, 0)

    train_by_hand(low, windows_of(by_rank), EPOCHS, loss, **clip)
    options = {**strategy_of(engine, **(BY_LAYER if engine == "fsdp1" else {})), "plugins": None, "precision": precision}
    run = fit(LeftWhole(by_rank).float(), options, gradient_clip_val=clip.get("norm"))

    def error_of_update(parameters: Iterable[Tensor]) -> float:
        pairs = zip(parameters, exact.parameters(), start.parameters(), strict=True)
        found, expected = zip(*((p.double() - s, e - s) for p, e, s in pairs), strict=True)
        return relative_error(found, expected)

    assert {run.whole[name].dtype for name in names} == {torch.float32}
    assert error_of_update(run.whole[name] for name in names) < 2 * error_of_update(low.parameters())


# --- split batches ----------------------------------------------------------------------------------------------------


@pytest.mark.some_cases(1)
@SYNCS
@ENGINES
def test_nothing_on_one_of_two_ranks_where_batches_are_split(engine: str, sync: str) -> None:
    by_rank = dealt(9)
    for position, kind in enumerate(HOLES):
        by_rank[position % 2][2 * position + 1] = with_hole(by_rank[position % 2][2 * position + 1], kind)
    policy = GradientAccumulation(2, micro_batch=1)
    run = fit(Dealt(by_rank), strategy_of(engine, sync=sync), window=1, callbacks=[policy])
    assert error(run, by_hand(windows_of(by_rank))) < EXACT


# --- refusals ---------------------------------------------------------------------------------------------------------


class Unsharded(Dealt):
    def configure_model(self) -> None:
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])


class DividesByItself(Dealt):
    def configure_model(self) -> None:
        super().configure_model()
        self.net.set_gradient_divide_factor(3.0)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("module", "match"),
    [
        (Unsharded, "Nothing averages the gradients of .* over the 2 data-parallel ranks: apply fully_shard"),
        (DividesByItself, "Gradients are divided by 3 .set_gradient_divide_factor.*the average over 2"),
    ],
)
def test_module_whose_gradients_would_not_be_averaged_is_refused(module: type[Dealt], match: str) -> None:
    with pytest.raises(Exception, match=f"(?s)MisconfigurationException: {match}"):
        fit(module(dealt(2)), strategy_of("fsdp2"))


def test_torch_that_keeps_the_gradients_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (seam for seam in seams.FSDP2 if seam.name == "_unsharded_param")
    monkeypatch.setattr(seams, "FSDP2", (*seams.FSDP2, row._replace(name="_unsharded_parameter")))
    with pytest.raises(Exception, match=r"torch 2.* does not have FSDPParam._unsharded_parameter \(relied on: its grad is what"):
        fit(Dealt(dealt(2)), strategy_of("fsdp2"))


@pytest.mark.some_cases(2)
@ENGINES
def test_unknown_sync_is_refused(engine: str) -> None:
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="sync='nonsense': expected \"window\""):
        strategy_of(engine, sync="nonsense")


# --- what is sent -----------------------------------------------------------------------------------------------------


class Profiled(Dealt):
    """Records what rank 0 sends in its second and third window of three."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self.profile.__enter__()
        with record_function("next micro-batch"):
            pass

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 8:
            end_profile(self.profile)
            if self.global_rank == 0:
                torch.save(collectives_in(self.profile), "collectives.pt")


GATHER, SCATTER, REDUCE = "allgather", "reduce_scatter", "allreduce"


def collectives_in(profiled: profile) -> list[tuple[Counter[str], list[int]]]:
    """Of each micro-batch: how often each kind was asked for, and the sizes that gloo all-reduced.

    Gloo all-reduces to reduce-scatter, so the kinds are read one level above it; the sizes are not known there.
    """
    found: list[tuple[Counter[str], list[int]]] = []
    for event in sorted(profiled.events(), key=lambda event: event.time_range.start):
        if event.name == "next micro-batch":
            found.append((Counter(), []))
        elif event.name.startswith("c10d::"):
            found[-1][0][next((kind for kind in (GATHER, SCATTER, REDUCE) if kind in event.name), event.name)] += 1
        elif event.name == "gloo:all_reduce":
            found[-1][1].append(sum(torch.Size(shape).numel() for shape in event.input_shapes))
    return found


GROUPS = 3  # two blocks, and what is left


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("engine", "reshard"), [("fsdp2", None), ("fsdp2", False), ("fsdp1", None)])
@SYNCS
def test_one_reduce_scatter_for_each_group_and_small_all_reduces(engine: str, sync: str, reshard: bool | None) -> None:
    fit(Profiled(dealt(9), reshard_after_forward=reshard), strategy_of(engine, sync=sync), window=3, max_epochs=1)
    kinds, sizes = zip(*torch.load("collectives.pt", weights_only=False), strict=True)
    # the weights; and with FSDP2 which parameters were reached
    inside, last = {SCATTER: 0, REDUCE: 0}, {SCATTER: GROUPS, REDUCE: 2 if engine == "fsdp2" else 1}
    if sync == "micro_batch":
        inside[SCATTER] = GROUPS
    for window in (0, 3):
        found = [{kind: count[kind] for kind in (SCATTER, REDUCE)} for count in kinds[window : window + 3]]
        assert found == [inside, inside, last]
    assert {kind for count in kinds for kind in count} == {GATHER, SCATTER, REDUCE}  # no broadcast, of Lightning's or torch's
    assert [size.count(8) for size in sizes] == [0, 0, 1, 0, 0, 1]  # the weights
    assert min(size for window in sizes for size in window) == 8
    if reshard is False and sync == "window":
        assert [count[GATHER] for count in kinds] == [GROUPS, 0, 0] * 2


class Sizes(list):
    """Of what is all-reduced, in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        all_reduce = torch.distributed.all_reduce

        def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.append(tensor.numel() * tensor.element_size())
            Path(f"bytes{torch.distributed.get_rank()}.txt").write_text(" ".join(map(str, self)))
            return all_reduce(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.distributed, "all_reduce", noting)


@pytest.mark.some_cases(1)
@ENGINES
def test_weights_of_a_window_are_64_bytes(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Sizes(monkeypatch)
    fit(Dealt(dealt(5)), strategy_of(engine), max_epochs=1)
    for rank in range(2):
        own = [int(size) for size in Path(f"bytes{rank}.txt").read_text().split()]
        assert own.count(64) == 3
