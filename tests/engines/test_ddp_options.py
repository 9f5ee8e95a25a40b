"""What DistributedDataParallel can do beside averaging goes on working with windows, and so does its overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from processes import run_ranks
from support import Language, OnCPU, end_profile, language_loss, loader, pad, relative_error, sentences, train_by_hand, trainer
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

RANKS, WINDOW, EPOCHS = 2, 4, 2
EXACT = 1e-12
SMALL = 4096 / 2**20  # 4 KiB, of some 40 that the parameters take: several buckets
Batch = dict[str, Tensor]


def fit(module: pl.LightningModule, window: int = WINDOW, of_trainer: dict[str, Any] | None = None, **options: Any) -> pl.Trainer:
    kwargs = {"devices": RANKS, "accumulate_grad_batches": window, "max_epochs": EPOCHS, **(of_trainer or {})}
    run = trainer(OnCPU(**options), **kwargs)
    run.fit(module)
    return run


ROWS = sentences(40)  # two windows of 16, and a tail of 8
MICRO = [pad(ROWS[i : i + 2]) for i in range(0, len(ROWS), 2)]
FULL = [pad(ROWS[i : i + 16]) for i in range(0, len(ROWS), 16)]
STEPS = len(FULL) * EPOCHS
PARAMETERS = sum(parameter.numel() for parameter in Language().parameters())


class Dealt(Language):
    """Ranks take micro-batches in turns."""

    batches: Sequence[Any] = MICRO

    def train_dataloader(self) -> Any:
        return loader(self.batches[self.trainer.global_rank :: RANKS])


# --- options ----------------------------------------------------------------------------------------------------------


class SometimesUsed(Dealt):
    """A layer for marked rows, which only rank 1 has, in some windows, and not in their last micro-batch; and one for nobody."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.for_marked = nn.Parameter(torch.linspace(-1, 1, 17, dtype=torch.float64))
        self.never = nn.Linear(2, 2).double()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.net(batch["input_ids"])
        if "marked" in batch and batch["marked"].any():
            logits = logits + batch["marked"][:, None, None] * self.for_marked.tanh()
        return language_loss(logits, batch["labels"])


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": SMALL, "gradient_as_bucket_view": True}, {"sync": "micro_batch"}], ids=str
)
def test_parameters_that_one_rank_or_none_uses(options: dict[str, Any]) -> None:
    def marked(batch: Batch, rows: Sequence[int]) -> Batch:
        marks = torch.zeros(len(batch["labels"]), dtype=torch.float64)
        marks[list(rows)] = 1.0
        return {**batch, "marked": marks}

    module, by_hand = SometimesUsed(), SometimesUsed()
    module.batches = [marked(batch, [0] if i in (1, 3) else []) for i, batch in enumerate(MICRO)]
    full = [marked(FULL[0], [2, 6]), *(marked(batch, []) for batch in FULL[1:])]
    fit(module, find_unused_parameters=True, **options)
    train_by_hand(by_hand, full, EPOCHS)
    assert relative_error(module.parameters(), by_hand.parameters()) < EXACT
    assert torch.equal(module.never.weight, SometimesUsed().never.weight)
    assert relative_error([module.for_marked], [SometimesUsed().for_marked]) > 1e-3


class Counting(Dealt):
    """A buffer to which every rank adds numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.seen += 1 + self.global_rank
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        torch.save(self.seen, f"seen{self.global_rank}.pt")


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_buffers_of_rank_zero_are_for_all_only_where_they_are_broadcast(broadcast_buffers: bool) -> None:
    fit(Counting(), broadcast_buffers=broadcast_buffers, of_trainer={"max_epochs": 1})
    seen = [torch.load(f"seen{rank}.pt").item() for rank in range(RANKS)]
    own = len(MICRO) / RANKS  # micro-batches
    # DistributedDataParallel broadcasts in the first forward after a reduction: before the last two, the tail
    assert seen == ([own, own - 2 + 2 * 2] if broadcast_buffers else [own, 2 * own])


# --- communication hooks ----------------------------------------------------------------------------------------------


def counted(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, with a list of the buckets that it was called for."""

    @wraps(hook)
    def counting(state: Any, bucket: dist.GradBucket) -> Any:
        counting.buckets.append(bucket.index())
        return hook(state, bucket)

    counting.buckets = []
    counting.__name__ = "counting"  # by its name torch refuses that of bfloat16 without CUDA
    return counting


class Hooked(Dealt):
    """Leaves its ranks' gradients of the first step, parameters and hook calls in a file."""

    def __init__(self, buckets: list[int]) -> None:
        super().__init__()
        self.buckets = buckets
        self.first: list[Tensor] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.first = self.first or [parameter.grad.clone() for parameter in self.parameters()]

    def on_train_end(self) -> None:
        parameters = [parameter.detach() for parameter in self.parameters()]
        torch.save((self.first, parameters, self.buckets), f"hooked{self.global_rank}.pt")


def hooked(hook: Callable[..., Any], batches: Sequence[Batch] = MICRO, **options: Any) -> list[Any]:
    counting = counted(hook)
    module = Hooked(counting.buckets)
    module.batches = batches
    fit(module, ddp_comm_hook=counting, **options)
    return [torch.load(f"hooked{rank}.pt") for rank in range(RANKS)]


def gradients(loss: Tensor, module: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(module.parameters())))


def norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("hook", "options", "unit", "smallest"),
    [
        (fp16_compress_hook, {}, 2.0**-11, 2.0**-24),
        (bf16_compress_hook, {}, 2.0**-8, 0.0),
        (fp16_compress_hook, {"bucket_cap_mb": SMALL, "gradient_as_bucket_view": True}, 2.0**-11, 2.0**-24),
    ],
    ids=["fp16", "bf16", "fp16 in small buckets"],
)
def test_compressed_gradients_are_those_of_the_full_batch_but_for_rounding(
    hook: Callable[..., Any], options: dict[str, Any], unit: float, smallest: float
) -> None:
    """The gradient of each rank is rounded once, by at most a ``unit`` of each number, and their mean once more; numbers near the
    ``smallest`` by half of that. So is the norm of the error, by the triangle inequality, since the window multiplies what was sent
    by less than 1, and rounds it in float64."""
    ranks = hooked(hook, **options)
    module, first, buckets = Language(), ranks[0][0], ranks[0][2]
    exact = gradients(module.training_step(FULL[0], 0), module)
    in_window = MICRO[: RANKS * WINDOW]
    weights = [(batch["labels"][:, 1:] != -100).sum() for batch in in_window]
    losses = [weight * module.training_step(batch, 0) for weight, batch in zip(weights, in_window, strict=True)]
    of_rank = [gradients(sum(losses[rank::RANKS]) / sum(weights), module) for rank in range(RANKS)]
    bound = unit * (1 + unit) * (sum(map(norm, of_rank)) + norm(exact)) + 2 * smallest * math.sqrt(PARAMETERS)
    assert 1e-3 * bound < norm([a - b for a, b in zip(first, exact, strict=True)]) < bound
    assert all(torch.equal(a, b) for a, b in zip(ranks[0][1], ranks[1][1], strict=True))
    in_a_step = len(set(buckets))
    assert (in_a_step > 1) == bool(options)
    # small buckets are rebuilt once, after the first step
    assert buckets[-in_a_step * (STEPS - 1) :] == list(range(in_a_step)) * (STEPS - 1)
    assert ranks[1][2] == buckets


@pytest.mark.exhaustive
def test_wrapped_hook_is_called_once_a_window() -> None:
    ranks = hooked(allreduce_hook, ddp_comm_wrapper=fp16_compress_wrapper)
    assert ranks[0][2] == ranks[1][2] == [0] * STEPS
    module = Language()
    assert 1e-6 < relative_error(ranks[0][0], gradients(module.training_step(FULL[0], 0), module)) < 2.0**-9


LENGTHS = [3, 12, 5, 9, 2, 11, 7, 4, 6, 10, 8, 12, 4, 3, 9, 5]
"""Of the rows of a window, in another order in each: so all windows have the same weight."""


def windows_of_equal_weight(number: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    batches = []
    for _ in range(number):
        order = torch.randperm(len(LENGTHS), generator=generator).tolist()
        rows = [torch.randint(0, 17, (LENGTHS[i],), generator=generator) for i in order]
        batches += [pad(rows[i : i + 2]) for i in range(0, len(rows), 2)]
    return batches


def power_sgd() -> PowerSGDState:
    return PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2)


class Forward(nn.Module):
    def __init__(self, module: Language) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Batch) -> Tensor:
        return self.module.training_step(batch, 0)


@pytest.mark.exhaustive
def test_power_sgd_equals_a_hand_written_loop_with_the_same_hook() -> None:
    """The hook scales with its gradients, its error feedback too, so where all windows have one weight it does not matter when they
    are divided by it. What it computes is rounded differently then, and orthogonalization loses a few digits of that."""
    batches = windows_of_equal_weight(6)
    total = sum(LENGTHS) - len(LENGTHS)

    def work(rank: int) -> None:
        module = Language()
        ddp = DistributedDataParallel(Forward(module))
        ddp.register_comm_hook(power_sgd(), powerSGD_hook)
        optimizer = module.configure_optimizers()
        own = batches[rank::RANKS]
        for _ in range(EPOCHS):
            for begin in range(0, len(own), WINDOW):
                optimizer.zero_grad()
                for i, batch in enumerate(own[begin : begin + WINDOW]):
                    weight = (batch["labels"][:, 1:] != -100).sum()
                    ddp.require_backward_grad_sync = i == WINDOW - 1
                    (ddp(batch) * weight * RANKS / total).backward()
                optimizer.step()
        torch.save([parameter.detach() for parameter in module.parameters()], f"by_hand{rank}.pt")

    assert run_ranks(work, RANKS) == ["ended"] * RANKS
    by_hand = torch.load("by_hand0.pt")
    ranks = hooked(powerSGD_hook, batches, ddp_comm_state=power_sgd())
    assert relative_error(ranks[0][1], by_hand) < 1e-10
    assert all(torch.equal(a, b) for a, b in zip(ranks[0][1], ranks[1][1], strict=True))
    assert ranks[0][2] == ranks[1][2] == [0] * 6 * EPOCHS
    uncompressed = train_by_hand(Language(), [join(batches[i : i + 8]) for i in range(0, len(batches), 8)], EPOCHS)
    assert relative_error(ranks[0][1], uncompressed.parameters()) > 1e-3  # it did compress


def join(batches: Sequence[Batch]) -> Batch:
    rows = [(ids, labels) for batch in batches for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)]
    return pad([ids[labels != -100] for ids, labels in rows])


@pytest.mark.exhaustive
def test_power_sgd_trains_on_windows_of_unequal_weight() -> None:
    """Its error feedback is a sum over windows, which are not divided yet when it is added: with unequal windows it is no more than
    an approximation of that of full batches. It has to do what it is for, and ranks have to agree."""
    epochs = 8
    ranks = hooked(powerSGD_hook, ddp_comm_state=power_sgd(), of_trainer={"max_epochs": epochs})
    assert all(torch.equal(a, b) for a, b in zip(ranks[0][1], ranks[1][1], strict=True))
    assert ranks[0][2] == ranks[1][2] == [0] * len(FULL) * epochs
    module, exact = Language(), train_by_hand(Language(), FULL, epochs)
    begin, end = (loss_of_all(language) for language in (module, exact))
    with torch.no_grad():
        for parameter, trained in zip(module.parameters(), ranks[0][1], strict=True):
            parameter.copy_(trained)
    assert begin - loss_of_all(module) > 0.8 * (begin - end)


@torch.no_grad()
def loss_of_all(module: Language) -> float:
    return module.training_step(pad(ROWS), 0).item()


# --- when it is sent -------------------------------------------------------------------------------------------


class Profiled(Dealt):
    """Records the third window of rank 0: in the second DistributedDataParallel rebuilds its buckets."""

    batches = MICRO + MICRO[:4]  # three windows

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 * WINDOW:
            self.profile = profile(activities=[ProfilerActivity.CPU])
            self.profile.__enter__()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with record_function("next micro-batch"):
            pass
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 * WINDOW - 1:
            end_profile(self.profile)
            events = sorted(self.profile.events(), key=lambda event: event.time_range.start)
            if self.global_rank == 0:
                torch.save([event.name for event in events], "events.pt")


OPTIONS = pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}], ids=" ".join
)


def order() -> list[str]:
    """Of the nodes of the last backward and what is to be all-reduced, as it was begun."""
    events = torch.load("events.pt")
    last = events[len(events) - events[::-1].index("next micro-batch") :]
    names = [name.removeprefix("autograd::engine::evaluate_function: ") for name in last]
    nodes = [name for event, name in zip(last, names, strict=True) if name != event or name == "c10d::allreduce_"]
    return [name for name in nodes if name != "DivBackward0"]  # Lightning's own, by accumulate_grad_batches


@pytest.mark.some_cases(1)
@OPTIONS
def test_reduction_overlaps_with_the_last_backward_as_in_plain_lightning(options: dict[str, Any]) -> None:
    fit(Profiled(), of_trainer={"max_epochs": 1}, bucket_cap_mb=SMALL, **options)
    ours = order()
    strategy = DDPStrategy(start_method="fork", timeout=timedelta(seconds=20), bucket_cap_mb=SMALL, **options)
    trainer(strategy, devices=RANKS).fit(Profiled())  # every micro-batch is reduced
    lightnings = order()
    reduction = "c10d::allreduce_"
    assert ours == [reduction, *lightnings]  # the weights do not wait in line behind the gradients
    assert lightnings.count(reduction) > 4
    of_all = lightnings.index(reduction) / len(lightnings)
    assert of_all < 0.6, "the first bucket is on its way long before the backward ends"
