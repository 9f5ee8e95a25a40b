"""Ranks whose loaders yield different numbers of batches: all end together, and every sample counts once."""

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import ENGINES as HELD
from harness import Unsized, assert_one_window_one_batch, on, on_each, trained
from sharded import ShardedScalar, needs_sharding_on_cpu
from support import NONE_LOSS, Asking, Scalar, Toy, loader, x
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric, SumMetric

from lightning_accum import GradientAccumulation

EPOCHS = 2
SHARDED = [pytest.param(name, marks=needs_sharding_on_cpu) for name in ("fsdp2", "fsdp1")]
ENGINES = pytest.mark.parametrize("engine", ["ddp", *SHARDED])
LENGTHS_KNOWN = pytest.mark.parametrize("has_length", [True, False], ids=["sized", "iterable"])


def batches(*lengths: int) -> list[list[Tensor]]:  # so many batches for each rank, of one to three values that do not come twice
    values = iter(range(1, 1000))
    return [[x(*(next(values) ** 2 for _ in range(1 + (rank + i) % 3))) for i in range(n)] for rank, n in enumerate(lengths)]


def means(by_rank: Sequence[Sequence[Tensor]], window: int) -> list[float]:
    """The gradient of each window: the mean of all its values, of all ranks."""
    longest = max(map(len, by_rank))
    windows = [[batch for rank in by_rank for batch in rank[i : i + window]] for i in range(0, longest, window)]
    return [torch.cat(parts).mean().item() for parts in windows]


class Uneven(ShardedScalar):  # each data-parallel rank has batches of its own. What training ended with is in a file for each rank.
    def __init__(self, by_rank: Sequence[Sequence[Any]] = (), has_length: bool = True) -> None:
        super().__init__(by_rank=by_rank)
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self.has_length = has_length

    def train_dataloader(self) -> DataLoader:
        own = self.by_rank[self.global_rank]
        return DataLoader(own if self.has_length else Unsized(own), batch_size=None)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10**6)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def facts(self) -> Any:  # steps, those of the scheduler, epochs, loader batches of all and of the last, its length
        run, batches = self.trainer, self.trainer.fit_loop.epoch_loop.batch_progress
        steps = run.global_step, self.lr_schedulers().last_epoch, run.current_epoch
        return (*steps, batches.total.completed, batches.current.completed, run.num_training_batches)

    def on_train_end(self) -> None:
        metrics = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
        torch.save((self.facts(), metrics), f"rank{self.global_rank}.pt")


def facts_of(ranks: int) -> list[Any]:
    return [torch.load(f"rank{rank}.pt")[0] for rank in range(ranks)]


def total(engine: str, module: pl.LightningModule, window: int, **kwargs: Any) -> float:
    """The sum of all gradients that were stepped."""
    (found,) = trained(module, GradientAccumulation(window), engine, **{"max_epochs": EPOCHS, **kwargs}).values()
    return -found.item()


class AskingUneven(Asking, Uneven):
    def facts(self) -> Any:
        return (*super().facts(), self.estimate)


@pytest.mark.some_cases(4, 6)
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "length", "limit"), [(Uneven, 5, 1.0), (Uneven, inf, 1.0), (AskingUneven, 5, 1.0), (Uneven, 9, 9)]
)
@ENGINES
def test_two_ranks_equal_the_full_batch_and_count_alike(engine: str, kind: Any, length: float, limit: Any, window: int) -> None:
    by_rank = batches(5, 2) if window != 2 else batches(2, 5)
    found, expected = total(engine, kind(by_rank, length == 5), window, limit_train_batches=limit), means(by_rank, window)
    assert found == pytest.approx(EPOCHS * sum(expected), rel=1e-12)
    steps, asked = EPOCHS * len(expected), kind is AskingUneven
    assert facts_of(2) == [(steps, steps, EPOCHS, 5 * EPOCHS, 5, length, *[steps] * asked)] * 2


CASES = [  # an engine, so many loader batches of each rank, and how they make windows
    on("ddp of 3", (2, 5, 1), {"window": 2}),
    on("fsdp2 of 4", (2, 5, 1, 3), {"window": 2}),
    on("fsdp2 of 4", (2, 5, 1, 3), {"window": 2}, sync="shard"),
    *on_each("ddp, fsdp2, fsdp1", (3, 0), {"window": 2}),
    *on_each("ddp, fsdp2, fsdp1", (0, 3), {"window": 2}),
    *on_each("ddp, fsdp2, fsdp1", (3, 0), {"window": 2, "tail": "drop"}),
    on("fsdp2 and tensor", (1, 4), {"window": 3}),
    on("ddp", (5, 2), {"window": 3, "tail": "carry"}),
    on("ddp of 3", (0, 5, 2), {"window": 3}, sync="micro_batch"),
    on("ddp of 3", (0, 5, 2), {"window": 3}, find_unused_parameters=True),
    on("ddp of 3", (0, 5, 2), {"window": 3}, static_graph=True),
    on("ddp of 3", (0, 5, 2), {"window": 3}, gradient_as_bucket_view=True),
    on("ddp", (6, 9), {"window": 1, "micro_batch": 2}),
    *on_each("ddp, fsdp2, fsdp1", (6, 9), {"window": 2, "micro_batch": 2}),
]


@pytest.mark.some_cases(4, 12)
@LENGTHS_KNOWN
@pytest.mark.parametrize(("engine", "options", "lengths", "policy"), CASES)
def test_ranks_that_end_at_different_times_are_exact(
    engine: str, options: Any, lengths: Any, policy: Any, has_length: bool
) -> None:
    rows = [[list(batch) for batch in own] for own in batches(*lengths)]
    arguments = {"collate": torch.stack, "epochs": EPOCHS, "has_length": has_length}
    assert_one_window_one_batch(ShardedScalar, rows, GradientAccumulation(**policy), engine, options, **arguments)


@pytest.mark.some_cases(2, 2)
@LENGTHS_KNOWN
@ENGINES
def test_lengths_may_change_from_epoch_to_epoch(engine: str, has_length: bool) -> None:
    class Streams(Unsized):  # others in each epoch
        def __iter__(self) -> Iterator[Any]:
            return iter(self.batches.pop(0))

    class ByEpoch(Uneven):  # in each epoch the loaders have other lengths
        def train_dataloader(self) -> DataLoader:
            by_epoch = [by_rank[self.global_rank] for by_rank in self.by_rank]
            if self.has_length:
                return DataLoader(by_epoch[self.trainer.current_epoch], batch_size=None)
            return DataLoader(Streams(by_epoch), batch_size=None)

    by_epoch = [batches(3, 1), batches(0, 2), batches(4, 4), batches(1, 3)]
    reload = {"reload_dataloaders_every_n_epochs": 1} if has_length else {}
    found = total(engine, ByEpoch(by_epoch, has_length), 2, max_epochs=len(by_epoch), **reload)
    assert found == pytest.approx(sum(mean for by_rank in by_epoch for mean in means(by_rank, 2)), rel=1e-12)


@pytest.mark.some_cases(2, 2)
@LENGTHS_KNOWN
@ENGINES
def test_what_is_logged_in_an_epoch_counts_every_sample_once(engine: str, has_length: bool) -> None:
    class Logs(Uneven):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.of_metric, self.count = MeanMetric(), SumMetric()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            options = {"sync_dist": True, "on_epoch": True}
            self.log("mean", batch.mean(), on_step=True, batch_size=len(batch), **options)
            self.log("sum", batch.sum(), on_step=True, reduce_fx="sum", batch_size=len(batch), **options)
            self.log("largest", batch.max(), on_step=False, reduce_fx="max", batch_size=len(batch), **options)
            self.log("not synced", batch.mean(), on_step=True, on_epoch=True, batch_size=len(batch))
            self.of_metric(batch)  # forward: of the batch, and of the epoch
            self.count.update(torch.ones(len(batch)))
            self.log("of metric", self.of_metric, on_step=True, on_epoch=True)
            self.log("count", self.count, on_step=False, on_epoch=True)
            return self.loss(batch)

    by_rank = batches(2, 5)
    total(engine, Logs(by_rank, has_length), 2)
    of_ranks = [torch.cat(batches_of_rank) for batches_of_rank in by_rank]
    values = torch.cat(of_ranks)
    found = {name.removesuffix("_epoch"): value for name, value in torch.load("rank0.pt")[1].items()}
    # torchmetrics sums in float32: seven means, with some ten roundings of 2**-24 together; whole numbers are exact
    for name in ("mean", "of metric"):
        assert found[name] == pytest.approx(values.mean().item(), rel=1e-6), name
    assert (found["sum"], found["largest"], found["count"]) == (values.sum(), values.max(), len(values))
    assert found["not synced"] == pytest.approx(of_ranks[0].mean().item(), rel=1e-6)


@pytest.mark.some_cases(2, 2)
@LENGTHS_KNOWN
@ENGINES
def test_a_rank_that_stands_in_changes_nothing_of_its_own(engine: str, has_length: bool) -> None:
    class Changes(Uneven):  # its training_step changes what a module can hold
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.seen: list[float] = []
            self.norm = nn.BatchNorm1d(1, affine=False).double()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.seen.append(batch.sum().item())
            return self.loss(batch) + self.norm(batch[:, None]).sum() * 0

        def facts(self) -> Any:
            return self.seen, [buffer.item() for buffer in self.norm.buffers()]

    by_rank = [[x(1, 2), x(3, 5)], [x(6, 7), x(8, 1), x(9, 2), x(4, 4), x(5, 3)]]
    total(engine, Changes(by_rank, has_length), 2, options={"broadcast_buffers": False} if engine == "ddp" else {})
    for own, found in zip(by_rank, facts_of(2), strict=True):
        norm = nn.BatchNorm1d(1, affine=False).double()
        for batch in own * EPOCHS:
            norm(batch[:, None])
        assert found == ([batch.sum().item() for batch in own] * EPOCHS, [buffer.item() for buffer in norm.buffers()])


@pytest.mark.some_cases(2, 4)
@pytest.mark.parametrize(
    ("has_length", "interval", "expected"),
    [(True, 1.0, [5, 10]), (False, 1.0, [5, 10]), (True, 0.5, [2, 4, 7, 9]), (False, 2, [2, 4, 7, 9])],
)
@ENGINES
def test_validation_is_on_all_ranks_at_once(engine: str, has_length: bool, interval: float, expected: list[int]) -> None:
    class Validates(Uneven):  # notes how many batches it had trained on at each validation
        def on_fit_start(self) -> None:
            self.validated_at: list[int] = []

        def val_dataloader(self) -> DataLoader:
            return loader([x(1), x(2)])

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val", self.layer(batch[:, None]).mean(), sync_dist=True)
            if batch_idx == 0:
                self.validated_at.append(self.trainer.fit_loop.epoch_loop.batch_progress.total.completed)

        def facts(self) -> Any:
            return self.validated_at

    by_rank = batches(5, 2)
    found = total(engine, Validates(by_rank, has_length), 2, val_check_interval=interval, num_sanity_val_steps=0)
    assert found == pytest.approx(EPOCHS * sum(means(by_rank, 2)), rel=1e-12)
    assert facts_of(2) == [expected] * 2


MAPPED = [*(on(engine, 10, 0) for engine in ("ddp", "ddp of 3", "fsdp2")), on("ddp", 2, 1), on("ddp", 10, 1)]


@pytest.mark.some_cases(2, 3)
@pytest.mark.parametrize("samples", [7, 10])
@pytest.mark.parametrize(("engine", "options", "window", "repeated"), MAPPED)
def test_samples_count_once_or_as_often_as_a_sampler_repeats_them(
    engine, options, window: int, repeated: int, samples: int
) -> None:
    class MapStyle(Uneven):
        def __init__(self, samples: int, has_own_sampler: bool) -> None:
            super().__init__()
            self.numbers, self.has_own_sampler = torch.arange(samples, dtype=torch.float64).square(), has_own_sampler

        def train_dataloader(self) -> DataLoader:
            arguments = self.trainer.world_size, self.global_rank
            own = DistributedSampler(self.numbers, *arguments, shuffle=False) if self.has_own_sampler else None
            return DataLoader(self.numbers, batch_size=2, sampler=own)

    module, size = MapStyle(samples, repeated > 0), 2 * HELD[engine].ranks * window
    found = total(engine, module, window, use_distributed_sampler=True)
    values = torch.cat([module.numbers, module.numbers[: repeated * (samples % 2)]])
    assert found == pytest.approx(EPOCHS * sum(part.mean().item() for part in values.split(size)), rel=1e-12)


@pytest.mark.parametrize("tail", [[], [None, None]], ids=["out of data", "without a batch"])
def test_a_rank_takes_part_in_the_reduction_of_sparse_gradients_without_data(tail: list[None]) -> None:
    def embeds() -> Toy:
        table = partial(nn.Embedding, 9, 2, sparse=True)
        return Toy(lambda net, ids: net(ids).square().mean(), net=lambda: nn.Sequential(table(), nn.Linear(2, 1)))

    rows = [list(torch.arange(n) * n % 9) for n in (5, 2, 4, 1, 3, 2)]
    by_rank: list[list[Any]] = [rows[:4], [*rows[4:], *tail]]
    optimizers = (partial(torch.optim.SGD, lr=0.1),)
    assert_one_window_one_batch(embeds, by_rank, 2, "ddp", collate=torch.stack, optimizers=optimizers)


def test_a_rank_without_losses_looks_at_a_later_epoch_with_the_others() -> None:
    by_rank = [[NONE_LOSS] * 9, [x(i) for i in range(9)]]
    found = trained(Scalar(by_rank=by_rank), 1, "ddp", max_epochs=EPOCHS)
    assert found["w"].item() == -EPOCHS * sum(range(9))
