"""Micro-batches whose loss or gradient is not finite: left out as if they had never been there, or reported."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from sharded import fsdp2, needs_sharding_on_cpu, shard, whole_parameters
from support import OPTIMIZERS, ddp, loader, relative_error, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_accum import GradientAccumulation, ModelParallelAccumulationStrategy

FINE, NAN_LOSS, INF_LOSS, NAN_GRADIENT, INF_GRADIENT = range(5)
FAULTS = {NAN_LOSS: "nan loss", INF_LOSS: "inf loss", NAN_GRADIENT: "nan gradient", INF_GRADIENT: "inf gradient"}
LAYOUTS, FEATURES, CLASSES, IGNORED = 50, 3, 4, -100
Batch = dict[str, Tensor]


class Poison(torch.autograd.Function):
    """What goes in, with a gradient of which ``added`` has been added."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, added: Tensor) -> Tensor:
        ctx.save_for_backward(added)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient + ctx.saved_tensors[0], None


class Net(nn.Module):
    """Two layers; in the backward, ``added`` goes into the gradient of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        hidden = self.first(x)
        return self.last(torch.tanh(hidden if added is None else Poison.apply(hidden, added)))


class Classifier(pl.LightningModule):
    """Knows nothing of accumulation; rows of a batch may spoil its loss, or the gradients of the first layer."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(11)
        self.net = Net().double()
        self.optimizer = optimizer

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        fault, added = batch["fault"], None
        if (fault >= NAN_GRADIENT).any():
            added = torch.zeros(len(fault), 5, dtype=torch.float64)
            added[fault == NAN_GRADIENT, 0], added[fault == INF_GRADIENT, 0] = math.nan, math.inf
        logits = self.net(batch["x"], added)
        spoilt = torch.zeros_like(logits)
        spoilt[fault == NAN_LOSS], spoilt[fault == INF_LOSS, 0] = math.nan, math.inf
        return F.cross_entropy(logits + spoilt, batch["y"], ignore_index=IGNORED)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelAccumulationStrategy):
            shard(self, [self.net.first, self.net])


@dataclass
class Layout:
    """By rank, the batches of an epoch; and how many of them are a window."""

    by_rank: list[list[Batch]]
    window: int


def batch_of(rows: int, dice: random.Random, fault: int = FINE) -> Batch:
    """Rows some of whose labels are ignored, one of which is spoilt."""
    generator = torch.Generator().manual_seed(dice.randrange(2**31))
    y = torch.randint(0, CLASSES, (rows,), generator=generator)
    faults = torch.zeros(rows, dtype=torch.long)
    spoilt = dice.randrange(rows)
    for row in range(rows):
        if dice.random() < 0.3:
            y[row] = IGNORED
    if fault:
        faults[spoilt] = fault
        y[spoilt] = 1
    return {"x": torch.randn(rows, FEATURES, dtype=torch.float64, generator=generator), "y": y, "fault": faults}


def layout(seed: int, ranks: int, most_rows: int = 4) -> Layout:
    """Faults of all kinds at random batches, more often in some layouts than in others."""
    dice = random.Random(1000 * ranks + seed)
    window, share = dice.randint(1, 4), dice.choice([0.2, 0.5, 0.8])
    by_rank = []
    for _ in range(ranks):
        batches = range(dice.randint(3, 9))
        by_rank.append(
            [batch_of(dice.randint(1, most_rows), dice, dice.choice(list(FAULTS)) if dice.random() < share else FINE) for _ in batches]
        )
    if seed % 5 == 0:  # the first window ends with a fault, on the last rank
        index = min(window, len(by_rank[-1])) - 1
        by_rank[-1][index] = batch_of(2, dice, dice.choice(list(FAULTS)))
    return Layout(by_rank, window)


def pieces_of(batch: Batch, micro_batch: int | None) -> list[Batch]:
    size = micro_batch or len(batch["y"])
    return [{name: value[i : i + size] for name, value in batch.items()} for i in range(0, len(batch["y"]), size)]


def windows_of(plan: Layout, micro_batch: int | None = None) -> list[tuple[list[Batch], int]]:
    """The good micro-batches of each window, over all ranks, and how many are bad."""
    longest = max(map(len, plan.by_rank))
    found = []
    for start in range(0, longest, plan.window):
        all_batches = [batch for rank in plan.by_rank for batch in rank[start : start + plan.window]]
        pieces = [piece for batch in all_batches for piece in pieces_of(batch, micro_batch)]
        found.append(([piece for piece in pieces if not piece["fault"].any()], sum(bool(p["fault"].any()) for p in pieces)))
    return found


def by_hand(plan: Layout, optimizer: str, micro_batch: int | None = None) -> list[Tensor]:
    """Full batches of what is good: the loop that knows neither windows nor faults."""
    module = Classifier(optimizer)
    stepper = module.configure_optimizers()
    for good, _ in windows_of(plan, micro_batch):
        rows = {name: torch.cat([batch[name] for batch in good]) for name in good[0]} if good else {"y": torch.tensor([IGNORED])}
        if (rows["y"] == IGNORED).all():
            continue
        stepper.zero_grad()
        module.training_step(rows, 0).backward()
        stepper.step()
    return [parameter.detach() for parameter in module.parameters()]


class Layouts(Classifier):
    """One layout an epoch, each from the same parameters. What it came to is in a file."""

    def __init__(self, layouts: Sequence[Layout] = (), optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.layouts = layouts

    def train_dataloader(self) -> DataLoader:
        epoch = self.layouts[self.trainer.current_epoch]
        return loader(epoch.by_rank[self.global_rank])

    def on_train_start(self) -> None:
        self.initial = [parameter.detach().clone() for parameter in self.parameters()]
        self.after: list[list[Tensor]] = []

    def on_train_epoch_start(self) -> None:
        optimizer = self.optimizers().optimizer
        optimizer.state.clear()
        with torch.no_grad():
            for parameter, initial in zip(self.parameters(), self.initial, strict=True):
                parameter.copy_(initial)

    def on_train_epoch_end(self) -> None:
        self.after.append(list(whole_parameters(self).values()))

    def on_train_end(self) -> None:
        skipped = self.trainer.callback_metrics["window/total_skipped_micro_batches"].item()
        torch.save((self.after, skipped), f"rank{self.global_rank}.pt")


def run_layouts(
    engine: str, optimizer: str, layouts: Sequence[Layout], ranks: int, **policy: Any
) -> tuple[list[list[Tensor]], float]:
    windows = {epoch: plan.window for epoch, plan in enumerate(layouts)}
    strategy = {"accum": lambda: "accum", "ddp": ddp, "fsdp2": lambda: fsdp2(ranks)}[engine]()
    run = trainer(
        strategy,
        devices=ranks,
        max_epochs=len(layouts),
        reload_dataloaders_every_n_epochs=1,
        callbacks=[GradientAccumulation(windows, on_nonfinite="skip", **policy)],
    )
    run.fit(Layouts(layouts, optimizer))
    found = torch.load("rank0.pt")
    if ranks > 1:
        other = torch.load("rank1.pt")
        assert all(torch.equal(a, b) for mine, its in zip(found[0], other[0], strict=True) for a, b in zip(mine, its, strict=True))
        assert found[1] == other[1]
    return found


def compare(found: list[list[Tensor]], layouts: Sequence[Layout], optimizer: str, micro_batch: int | None = None) -> None:
    assert len(found) == len(layouts)
    initial = list(Classifier(optimizer).parameters())
    errors, moved = [], 0
    for parameters, plan in zip(found, layouts, strict=True):
        expected = by_hand(plan, optimizer, micro_batch)
        errors.append(relative_error(parameters, expected))
        moved += relative_error(expected, initial) > 1e-3
    print(f"{optimizer}: {len(errors)} layouts, {moved} with steps, largest error {max(errors):.1e}")  # pytest -rP shows it
    assert moved > 0.6 * len(layouts)
    assert max(errors) <= 1e-12


# --- skip -------------------------------------------------------------------------------------------------------------


@cache
def layouts_of(ranks: int, most_rows: int = 4) -> list[Layout]:
    return [layout(seed, ranks, most_rows) for seed in range(LAYOUTS)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("engine", "ranks"), [("accum", 1), ("ddp", 2), pytest.param("fsdp2", 2, marks=needs_sharding_on_cpu)], ids=str
)
def test_training_equals_the_one_without_the_bad_micro_batches(engine: str, ranks: int, optimizer: str) -> None:
    layouts = layouts_of(ranks)
    found, skipped = run_layouts(engine, optimizer, layouts, ranks)
    compare(found, layouts, optimizer)
    assert skipped == sum(bad for plan in layouts for _, bad in windows_of(plan)) > 2 * LAYOUTS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("engine", "ranks"), [("accum", 1), ("ddp", 2), pytest.param("fsdp2", 2, marks=needs_sharding_on_cpu)], ids=str
)
def test_of_a_split_batch_only_the_bad_micro_batches_are_left_out(engine: str, ranks: int, optimizer: str) -> None:
    layouts = layouts_of(ranks, 9)
    found, skipped = run_layouts(engine, optimizer, layouts, ranks, micro_batch=2, trim_padding=False)
    compare(found, layouts, optimizer, 2)
    assert skipped == sum(bad for plan in layouts for _, bad in windows_of(plan, 2)) > 2 * LAYOUTS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("engine", "ranks"), [("accum", 1), ("ddp", 2)], ids=str)
def test_with_the_size_found_by_trying_a_bad_micro_batch_is_left_out(engine: str, ranks: int) -> None:
    layouts = layouts_of(ranks)[:10]
    found, _ = run_layouts(engine, "adamw", layouts, ranks, micro_batch="auto", trim_padding=False)
    compare(found, layouts, "adamw")
