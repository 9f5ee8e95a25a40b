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
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from sharded import fsdp2, needs_sharding_on_cpu, shard, whole_parameters
from support import OPTIMIZERS, SaveAfter, StatefulLoader, ddp, fp16_on_cpu, loader, relative_error, trainer
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_accum import GradientAccumulation, ModelParallelAccumulationStrategy, Tokens, nonfinite
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.splitting.snapshot import StateSnapshotter
from lightning_accum.sync import GradientSync

FINE, NAN_LOSS, INF_LOSS, NAN_GRADIENT, INF_GRADIENT = range(5)
FAULTS = {NAN_LOSS: "nan loss", INF_LOSS: "inf loss", NAN_GRADIENT: "nan gradient", INF_GRADIENT: "inf gradient"}
LAYOUTS, FEATURES, WIDTH, CLASSES, IGNORED = 50, 3, 6, 4, -100
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
        self.first = nn.Linear(FEATURES, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

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
            added = torch.zeros(len(fault), WIDTH, dtype=torch.float64)
            added[fault == NAN_GRADIENT, 0], added[fault == INF_GRADIENT, 0] = math.nan, math.inf
        logits = self.net(batch["x"], added)
        spoilt = torch.zeros_like(logits)
        spoilt[fault == NAN_LOSS] = math.nan
        spoilt[fault == INF_LOSS, batch["y"][fault == INF_LOSS]] = -math.inf  # the gradient is finite
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
            [
                batch_of(dice.randint(1, most_rows), dice, dice.choice(list(FAULTS)) if dice.random() < share else FINE)
                for _ in batches
            ]
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


@pytest.mark.some_cases(2, 4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("micro_batch", "most_rows"), [(None, 4), (2, 9)], ids=["whole", "split"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("engine", "ranks"), [("accum", 1), ("ddp", 2), pytest.param("fsdp2", 2, marks=needs_sharding_on_cpu)], ids=str
)
def test_training_equals_the_one_without_the_bad_micro_batches(
    engine: str, ranks: int, optimizer: str, micro_batch: int | None, most_rows: int
) -> None:
    layouts = layouts_of(ranks, most_rows)
    found, skipped = run_layouts(engine, optimizer, layouts, ranks, micro_batch=micro_batch, trim_padding=micro_batch is None)
    compare(found, layouts, optimizer, micro_batch)
    assert skipped == sum(bad for plan in layouts for _, bad in windows_of(plan, micro_batch)) > 2 * LAYOUTS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("engine", "ranks"), [("accum", 1), ("ddp", 2)], ids=str)
def test_with_the_size_found_by_trying_a_bad_micro_batch_is_left_out(engine: str, ranks: int) -> None:
    layouts = layouts_of(ranks)[:10]
    found, _ = run_layouts(engine, "adamw", layouts, ranks, micro_batch="auto", trim_padding=False)
    compare(found, layouts, "adamw")


def labels(*ys: int, fault: int = FINE, seed: int = 0) -> Batch:
    """Rows of these labels, the last of them spoilt."""
    x = torch.randn(len(ys), FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": torch.tensor(ys), "fault": torch.tensor([FINE] * (len(ys) - 1) + [fault])}


class OfBatches(Classifier):
    """Each rank has batches of its own; what the optimizer saw is kept."""

    def __init__(self, *by_rank: Sequence[Any], optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.by_rank = by_rank
        self.steps = 0

    def train_dataloader(self) -> DataLoader:
        return loader(self.by_rank[self.global_rank])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps += 1


def fit(module: pl.LightningModule, strategy: Any = "accum", *args: Any, **kwargs: Any) -> pl.Trainer:
    options = {name: kwargs.pop(name) for name in list(kwargs) if name in ("devices", "max_epochs", "plugins", "callbacks")}
    own = [GradientAccumulation(*args, **{"on_nonfinite": "skip", **kwargs})]
    run = trainer(strategy, **{**options, "callbacks": own + options.get("callbacks", [])})
    run.fit(module)
    return run


def full_batches(*windows: Sequence[Batch], optimizer: str = "adamw") -> Classifier:
    module = Classifier(optimizer)
    stepper = module.configure_optimizers()
    for window in windows:
        stepper.zero_grad()
        module.training_step({name: torch.cat([batch[name] for batch in window]) for name in window[0]}, 0).backward()
        stepper.step()
    return module


def assert_equal(found: nn.Module, expected: nn.Module) -> None:
    assert relative_error(found.parameters(), expected.parameters()) <= 1e-12


def test_window_of_which_nothing_is_left_takes_no_step() -> None:
    good, bad = labels(0, 1), [labels(0, 1, fault=NAN_LOSS), labels(2, 3, fault=INF_GRADIENT)]
    module = OfBatches([*bad, good, labels(1, 2, seed=1)])
    with pytest.warns(UserWarning, match="ended without any weight .*nothing finite"):
        run = fit(module, "accum", 2)
    assert (module.steps, run.global_step) == (1, 1)
    assert_equal(module, full_batches([good, labels(1, 2, seed=1)]))
    alone = OfBatches(bad)
    run = fit(alone, "accum", 2)
    assert (alone.steps, run.global_step) == (0, 0)
    assert_equal(alone, Classifier())
    assert run.callback_metrics["window/skipped_micro_batches"] == 2


@pytest.mark.parametrize("fault", FAULTS, ids=FAULTS.get)
def test_window_of_one_batch_is_skipped_too_whatever_its_weight(fault: int) -> None:
    class Hidden(OfBatches):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx).sinh()  # whose graph shows no denominator

    batches = [labels(0, 1), labels(1, 2, fault=fault), labels(2, 3, seed=2)]
    module, plain = Hidden(batches), Hidden(batches[::2])
    fit(module, "accum", 1)
    trainer("auto").fit(plain)
    assert module.steps == 2
    assert_equal(module, plain)


@pytest.mark.parametrize("fault", FAULTS, ids=FAULTS.get)
def test_one_warning_names_batch_rank_and_reason(fault: int, recwarn: pytest.WarningsRecorder) -> None:
    module = OfBatches([labels(0, 1), labels(1, 2, fault=fault), labels(2, 3, fault=fault)])
    run = fit(module, "accum", 3)
    told = [str(w.message) for w in recwarn if "left out" in str(w.message)]
    reasons = ["its loss is nan", "its loss is inf"]
    reasons += [f"the gradient of 'net.first.weight' has {what} in it" for what in ("NaN", "an infinity")]
    assert len(told) == 1
    assert told[0].startswith(f"Batch 1 of epoch 0 on rank 0 is left out, as it is not finite: {reasons[fault - 1]}.")
    assert run.callback_metrics["window/skipped_micro_batches"] == 2
    assert run.callback_metrics["window/micro_batches"] == 1
    assert run.callback_metrics["window/weight"] == 2


@pytest.mark.parametrize("split", [None, 2], ids=["whole", "split"])
def test_window_of_tokens_counts_those_of_good_micro_batches(split: int | None) -> None:
    good = [labels(*range(4), seed=seed) for seed in range(4)]
    batches = [good[0], labels(0, 1, 2, 3, fault=NAN_GRADIENT), good[1], good[2], labels(0, 1, 2, 3, fault=NAN_LOSS), good[3]]
    if split:
        kept = [{name: value[:2] for name, value in batches[i].items()} for i in (1, 4)]
        windows = [[good[0], kept[0], pieces_of(good[1], 2)[0]], [pieces_of(good[1], 2)[1], good[2], kept[1]], [good[3]]]
    else:
        windows = [good[:2], good[2:]]
    module = OfBatches(batches)
    fit(module, "accum", Tokens(8), micro_batch=split, trim_padding=False)
    assert_equal(module, full_batches(*windows))


class Logging(OfBatches):
    """Logs its loss in several ways, returns what it computed, and counts what it has seen."""

    def __init__(self, *by_rank: Sequence[Any]) -> None:
        super().__init__(*by_rank)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))
        self.returned: list[Any] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.rows += len(batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch["y"]), sync_dist=self.trainer.world_size > 1)
        self.log("largest", loss.detach(), on_epoch=True, reduce_fx="max", batch_size=1, sync_dist=self.trainer.world_size > 1)
        self.accuracy(self.net(batch["x"]), batch["y"])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, batch_size=len(batch["y"]))
        return {"loss": loss, "y": batch["y"], "scaled": loss.detach() * 2}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.returned.append(outputs)

    def on_train_end(self) -> None:
        torch.save({name: value.item() for name, value in self.trainer.callback_metrics.items()}, f"rank{self.global_rank}.pt")


SHOWN = ("loss_epoch", "largest", "accuracy_epoch", "window/loss_epoch", "window/total_weight")


@pytest.mark.filterwarnings("ignore")
def test_what_is_shown_is_that_of_the_good_batches() -> None:
    good = [labels(0, 1, 2, seed=1), labels(3, 0, seed=2), labels(2, 2, 1, 0, seed=3), labels(1, seed=4)]
    module, expected = (
        Logging([good[0], labels(1, 2, fault=NAN_LOSS), *good[1:3], labels(0, fault=INF_GRADIENT), good[3]]),
        Logging(good),
    )
    run, clean = fit(module, "accum", 3), fit(expected, "accum", 2)
    for name in SHOWN:
        assert run.callback_metrics[name].item() == pytest.approx(clean.callback_metrics[name].item(), rel=1e-12)
    assert module.rows == expected.rows == 10
    assert len(module.returned) == 6
    assert not module.returned[1]
    assert not module.returned[4]
    assert run.callback_metrics["window/total_skipped_micro_batches"] == 2


@pytest.mark.filterwarnings("ignore")
def test_what_a_split_batch_shows_and_returns_is_that_of_its_good_micro_batches() -> None:
    whole = labels(0, 1, 2, 3, 1, 2, 0, seed=5)
    whole["fault"][2], whole["fault"][4] = NAN_GRADIENT, FINE
    rows = [0, 1, 4, 5, 6]
    left = {name: value[rows] for name, value in whole.items()}
    module, expected = Logging([whole]), Logging([left])
    run, clean = fit(module, "accum", micro_batch=2, trim_padding=False), fit(expected, "accum", on_nonfinite="propagate")
    for name in ("loss_epoch", "loss_step", "accuracy_epoch", "window/loss", "window/loss_epoch", "window/total_weight"):
        assert run.callback_metrics[name].item() == pytest.approx(clean.callback_metrics[name].item(), rel=1e-12)
    assert module.rows == 5
    assert module.returned[0]["loss"].item() == pytest.approx(expected.returned[0]["loss"].item(), rel=1e-12)
    assert module.returned[0]["y"].tolist() == left["y"].tolist()
    assert module.returned[0]["scaled"].item() == pytest.approx(2 * expected.returned[0]["loss"].item(), rel=1e-12)
    assert run.callback_metrics["window/skipped_micro_batches"] == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("micro_batch", [None, 2], ids=["whole", "split"])
def test_ranks_that_skip_and_ranks_that_do_not_log_together(micro_batch: int | None) -> None:
    first = [labels(0, 1, seed=1), labels(2, 3, seed=2), labels(1, 0, fault=NAN_GRADIENT)]
    second = [labels(0, 1, fault=NAN_LOSS), labels(3, 1, seed=3), None, labels(2, 2, seed=4)]
    fit(Logging(first, second), ddp(), 2, devices=2, micro_batch=micro_batch, trim_padding=False)
    of_ranks = [torch.load(f"rank{rank}.pt") for rank in range(2)]
    expected = Logging([first[0], first[1], second[1], second[3]])
    clean = fit(expected, "accum", 3)
    for found in of_ranks:
        for name in ("loss_epoch", "largest", "accuracy_epoch", "window/total_weight"):
            assert found[name] == pytest.approx(clean.callback_metrics[name].item(), rel=1e-12)
        assert found["window/total_skipped_micro_batches"] == 2


@pytest.mark.filterwarnings("ignore")
def test_what_a_skipped_micro_batch_changed_is_put_back() -> None:
    class Stateful(OfBatches):
        def __init__(self, *by_rank: Sequence[Any]) -> None:
            super().__init__(*by_rank)
            self.norm, self.dropout, self.seen = nn.BatchNorm1d(FEATURES).double(), nn.Dropout(0.5), []

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            self.seen.append(batch["y"].tolist())
            return super().training_step({**batch, "x": self.dropout(self.norm(batch["x"]))}, batch_idx)

    good = [labels(0, 1, 2, seed=1), labels(3, 0, seed=2), labels(2, 1, seed=3)]
    bad = [labels(0, 1, fault=fault) for fault in (NAN_LOSS, INF_GRADIENT)]
    bad[0]["x"][0] = math.nan
    module, expected = Stateful([good[0], bad[0], good[1], bad[1], good[2]]), Stateful(good)
    for each, window in ((module, 5), (expected, 3)):
        torch.manual_seed(3)
        fit(each, "accum", window)
    assert module.seen == expected.seen
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), expected.state_dict().values(), strict=True))


def test_parameter_that_only_a_skipped_micro_batch_used_does_not_move() -> None:
    class Branching(OfBatches):
        def __init__(self, *by_rank: Sequence[Any]) -> None:
            super().__init__(*by_rank)
            self.rare = nn.Parameter(torch.ones((), dtype=torch.float64))

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            x = batch["x"] * self.rare if batch["fault"].any() else batch["x"]
            return super().training_step({**batch, "x": x}, batch_idx)

    module = Branching([labels(0, 1), labels(1, 2, fault=NAN_GRADIENT), labels(2, 3, seed=2)])
    fit(module, "accum", 3)
    assert module.rare == 1
    assert module.rare.grad is None
    assert_equal(module.net, full_batches([labels(0, 1), labels(2, 3, seed=2)]).net)


def test_sparse_gradients() -> None:
    class Sparse(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 2, sparse=True).double()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.table(batch.abs().long()).square().mean() * (math.nan if batch.min() < 0 else 1.0)

        def train_dataloader(self) -> DataLoader:
            return loader([torch.tensor([1, 2]), torch.tensor([-3, 1]), torch.tensor([1, 1, 4, 0])])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    module = Sparse()
    rows = module.table.weight.detach().clone().requires_grad_()
    rows[torch.tensor([1, 2, 1, 1, 4, 0])].square().mean().backward()
    fit(module, "accum", 3)
    assert relative_error([module.table.weight], [rows - 0.5 * rows.grad]) <= 1e-12


def test_checkpoint_inside_a_window_knows_what_was_skipped() -> None:
    class Resumable(OfBatches):
        def train_dataloader(self) -> Any:
            return StatefulLoader(self.by_rank[0])

    bad = labels(0, 1, fault=NAN_LOSS)
    batches = [labels(0, 1), bad, labels(1, seed=1), bad, labels(2, seed=2), bad]
    whole = Resumable(batches)
    fit(whole, "accum", 3, callbacks=[SaveAfter(5)])
    state = torch.load("inside.ckpt", weights_only=False)["callbacks"]["GradientAccumulation"]
    assert (state["skipped_micro_batches"], state["window"]["left_out"]) == (1, 1)
    resumed = Resumable(batches)
    run = trainer("accum", callbacks=[GradientAccumulation(3, on_nonfinite="skip")])
    run.fit(resumed, ckpt_path="inside.ckpt")
    assert relative_error(resumed.parameters(), whole.parameters()) == 0
    assert run.callback_metrics["window/skipped_micro_batches"] == 2
    assert run.callback_metrics["window/total_skipped_micro_batches"] == 3


def test_with_a_grad_scaler_a_loss_is_skipped_and_a_gradient_is_left_to_the_scaler() -> None:
    bad_loss = OfBatches([labels(0, 1), labels(1, 2, fault=NAN_LOSS)], optimizer="sgd")
    plugin = fp16_on_cpu()
    run = fit(bad_loss, "accum", 2, plugins=[plugin])
    assert (run.global_step, plugin.scaler.get_scale()) == (1, 256)
    assert run.callback_metrics["window/skipped_micro_batches"] == 1
    assert all(parameter.isfinite().all() for parameter in bad_loss.parameters())
    bad_gradient, plugin = OfBatches([labels(0, 1), labels(1, 2, fault=INF_GRADIENT)], optimizer="sgd"), fp16_on_cpu()
    run = fit(bad_gradient, "accum", 2, plugins=[plugin])
    assert plugin.scaler.get_scale() == 128
    assert run.callback_metrics["window/skipped_micro_batches"] == 0
    assert_equal(bad_gradient, Classifier())


@pytest.mark.some_cases(1)
@needs_sharding_on_cpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("data", [1, 2])
def test_ranks_of_tensor_parallelism_find_the_same(data: int) -> None:
    class Parallel(OfBatches):
        def configure_model(self) -> None:
            tensor = self.device_mesh["tensor_parallel"]
            parallelize_module(self.net, tensor, {"first": ColwiseParallel(), "last": RowwiseParallel()})
            if self.device_mesh["data_parallel"].size() > 1:
                shard(self, [self.net.first, self.net])

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            added = None
            if batch["fault"].any():  # in the gradient of one shard alone
                own = math.nan if self.device_mesh["tensor_parallel"].get_local_rank() == 1 else 0.0
                added = torch.full((len(batch["y"]), WIDTH // 2), own, dtype=torch.float64)
            return F.cross_entropy(self.net(batch["x"], added), batch["y"])

        def train_dataloader(self) -> DataLoader:
            return loader(self.by_rank[self.device_mesh["data_parallel"].get_local_rank()])

    first = [labels(0, 1, seed=1), labels(2, 3, fault=NAN_GRADIENT), labels(1, 2, 3, seed=2)]
    second = [labels(3, 1, seed=3), labels(2, seed=4), labels(0, 1, fault=NAN_GRADIENT)]
    run = fit(Parallel(first, second), fsdp2(data, 2), 3, devices=2 * data)
    good = [first[0], first[2]] + (second[:2] if data == 2 else [])
    assert relative_error(run.whole.values(), full_batches(good).parameters()) <= 1e-12


# --- raise ------------------------------------------------------------------------------------------------------------


def say_what_ranks_end_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in forked processes, whose errors Lightning tells nobody but their parent."""
    wrapping_function = _MultiProcessingLauncher._wrapping_function

    def wrap_and_say(self: _MultiProcessingLauncher, process_idx: int, trainer: pl.Trainer, *args: Any) -> None:
        try:
            wrapping_function(self, process_idx, trainer, *args)
        except BaseException as error:
            said = f"{trainer.lightning_module.steps} steps, {type(error).__name__}: {error}"
            Path(f"{trainer.global_rank}.said").write_text(said)
            raise

    monkeypatch.setattr(_MultiProcessingLauncher, "_wrapping_function", wrap_and_say)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("fault", [NAN_LOSS, INF_GRADIENT], ids=FAULTS.get)
@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=needs_sharding_on_cpu)])
def test_raise_tells_all_ranks_at_a_boundary(engine: str, fault: int, monkeypatch: pytest.MonkeyPatch) -> None:
    say_what_ranks_end_with(monkeypatch)
    module = OfBatches([labels(0, 1), labels(1, 2)], [labels(2, 3), labels(2, 1, fault=fault)])
    with pytest.raises(Exception, match="on rank 1 is not finite"):
        fit(module, ddp() if engine == "ddp" else fsdp2(2), 2, devices=2, on_nonfinite="raise")
    told = "NotFiniteError: Batch 1 of epoch 0 on rank 1 is not finite: "
    assert Path("1.said").read_text().startswith(f"0 steps, {told}")
    if Path("0.said").exists():  # else its parent ended it, having heard of the other
        heard = f"0 steps, RankFailedError: Rank 1 failed first, with lightning_accum.errors.{told}"
        assert Path("0.said").read_text().startswith(heard)


def test_raise_lets_good_training_be() -> None:
    batches = [labels(0, 1), labels(1, 2, 3, seed=1), labels(IGNORED, IGNORED), labels(2, seed=2)]
    module = OfBatches(batches)
    fit(module, "accum", 2, on_nonfinite="raise")  # a loss of NaN without weight is no fault
    assert_equal(module, full_batches(batches[:2], batches[3:]))


# --- what it costs, and what is refused -------------------------------------------------------------------------------


def test_propagate_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nobody looks")

    monkeypatch.setattr(nonfinite.Guard, "__init__", forbidden)
    monkeypatch.setattr(StateSnapshotter, "take", forbidden)

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            assert trainer.strategy.session.guard is None
            assert not trainer.strategy.session.finishes_after_backward

    module = OfBatches([labels(0, 1), labels(1, 2, fault=NAN_LOSS)])
    run = fit(module, "accum", 2, on_nonfinite="propagate", check=False, callbacks=[Look()])
    assert all(parameter.isnan().any() for parameter in module.parameters())
    assert "window/skipped_micro_batches" not in run.callback_metrics


class ByItself(OfBatches):
    automatic_optimization = False


class WithLBFGS(OfBatches):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


# --- Guard, without a Trainer -----------------------------------------------------------------------------------------


def guard_of(module: nn.Module) -> nonfinite.Guard:
    return nonfinite.Guard(
        True,
        lambda: GradientSync().gradient_slots(dict(module.named_parameters())),
        lambda micro_batch: "This one",
        StateSnapshotter(module, torch.device("cpu")),
        lambda told: None,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_large_gradients_are_finite_and_sums_are_autograds(dtype: torch.dtype) -> None:
    module = nn.Linear(300, 1, bias=False).to(dtype)
    guard, large = guard_of(module), torch.finfo(dtype).max / 4
    for factor in (large, large, math.nan, -large):
        guard.begin_micro_batch(MicroBatch(None))
        gradient = torch.full((1, 300), factor, dtype=dtype)
        with guard.watching(torch.tensor(1.0), 1.0):
            module.weight.backward(gradient)
        assert guard.end_micro_batch() == math.isnan(factor)
    assert (module.weight.grad == torch.tensor(large, dtype=dtype)).all()


@pytest.mark.filterwarnings("ignore")
def test_gradients_stay_where_they_were_when_a_backward_fails() -> None:
    module = nn.Linear(2, 1, bias=False)
    guard = guard_of(module)
    module.weight.grad = before = torch.ones(1, 2)

    def fails_late() -> None:
        with guard.watching(torch.tensor(1.0), 1.0):
            module.weight.backward(torch.ones(1, 2))
            raise ValueError("boom")

    guard.begin_micro_batch(MicroBatch(None))
    with pytest.raises(ValueError, match="boom"):
        fails_late()
    assert module.weight.grad is before
    assert before.tolist() == [[1.0, 1.0]]


@pytest.mark.filterwarnings("ignore")
def test_loss_without_weight_may_be_anything() -> None:
    module, left_out = nn.Linear(2, 1), []
    guard = guard_of(module)
    for weight in (torch.tensor(0.0), 1.0):
        guard.begin_micro_batch(MicroBatch(None))
        with guard.watching(torch.tensor(math.nan), weight):
            module(torch.zeros(1, 2)).sum().backward()
        left_out.append(guard.end_micro_batch())
    assert left_out == [False, True]


@pytest.mark.parametrize(("strategy", "ranks"), [("accum", 1), ("accum_ddp", 2)])
def test_gradients_added_up_in_a_wider_type_are_left_out_too(strategy: str, ranks: int) -> None:
    good = [labels(0, 1, 2), labels(3), labels(1, 1, 0, 2), labels(2, 2)]
    nan, inf = labels(1, 2, fault=NAN_GRADIENT), labels(3, 3, 3, fault=INF_LOSS)
    trained = []
    for batches in ([good[0], nan, good[1], good[2], good[3], inf], good):
        module, window = OfBatches(*[batches] * ranks).float(), len(batches) // 2
        for batch in batches:
            batch["x"] = batch["x"].float()
        fit(module, ddp() if ranks == 2 else strategy, window, devices=ranks, accumulate_dtype=torch.float64)
        trained.append([parameter.detach() for parameter in module.parameters()])
    assert all(torch.isfinite(parameter).all() for parameter in trained[0])
    assert relative_error(*trained) < 1e-7  # of one rounding to float32
