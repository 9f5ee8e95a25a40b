"""What DistributedDataParallel can do beside averaging goes on working with windows, and so does its overlap."""

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Dealt, dealt, windows_of
from lightning.pytorch.strategies import DDPStrategy
from support import Language, OnCPU, Profiled, fit, pad, relative_error, sentences
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.profiler import profile

RANKS, WINDOW, EPOCHS = 2, 4, 2
SMALL = {"bucket_cap_mb": 4096 / 2**20}  # 4 KiB, of some 40 that the parameters take: several buckets
BY_RANK = dealt(sentences(40), 2, "ddp")  # two windows of 16, and a tail of 8
FULL = [pad(window) for window in windows_of(BY_RANK, WINDOW)]


def train(module: Language, by_rank: Any = BY_RANK, epochs: int = EPOCHS, *callbacks: Any, **options: Any) -> None:
    arguments = {"devices": RANKS, "accumulate_grad_batches": WINDOW, "max_epochs": epochs}
    fit(module, Dealt(by_rank), *callbacks, strategy=OnCPU(**options), **arguments)


class Hooked(Language):  # leaves its ranks' gradients of the first step, parameters and hook calls in a file
    def __init__(self, hook: Callable[..., Any]) -> None:
        super().__init__()
        self.buckets: list[int] = []
        self.first: list[Tensor] = []

        @wraps(hook)
        def counting(state: Any, bucket: dist.GradBucket) -> Any:
            self.buckets.append(bucket.index())
            return hook(state, bucket)

        counting.__name__ = "counting"  # by its name torch refuses that of bfloat16 without CUDA
        self.hook = counting

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.first = self.first or [parameter.grad.clone() for parameter in self.parameters()]

    def on_train_end(self) -> None:
        parameters = [parameter.detach() for parameter in self.parameters()]
        torch.save((self.first, parameters, self.buckets), f"hooked{self.global_rank}.pt")


def hooked(hook: Callable[..., Any], **options: Any) -> tuple[list[Tensor], list[int]]:
    """What both ranks have: the gradients of the first step, and for which buckets it was called."""
    module = Hooked(hook)
    train(module, ddp_comm_hook=module.hook, **options)
    (first, parameters, buckets), (_, others, others_buckets) = (torch.load(f"hooked{rank}.pt") for rank in range(RANKS))
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
    assert buckets == others_buckets
    return first, buckets


@pytest.mark.some_cases(1, 1)
@pytest.mark.parametrize(
    ("hook", "options", "unit"),
    [
        (fp16_compress_hook, {}, 2.0**-11),
        (bf16_compress_hook, {}, 2.0**-8),
        (fp16_compress_hook, {**SMALL, "gradient_as_bucket_view": True}, 2.0**-11),
        (allreduce_hook, {"ddp_comm_wrapper": fp16_compress_wrapper}, 2.0**-11),
    ],
    ids=["fp16", "bf16", "fp16 in small buckets", "wrapped in fp16"],
)
def test_compressed_gradients_are_those_of_the_full_batch_but_for_rounding(hook: Any, options: Any, unit: float) -> None:
    """The gradients of two ranks are rounded, each by at most a ``unit`` of its numbers, and their mean once more."""
    first, buckets = hooked(hook, **options)
    module = Language()
    exact = torch.autograd.grad(module.training_step(FULL[0], 0), list(module.parameters()))
    assert 1e-3 * unit < relative_error(first, exact) < 3 * unit
    of_a_step, steps = len(set(buckets)), len(FULL) * EPOCHS
    assert (of_a_step > 1) == ("bucket_cap_mb" in options)
    # small buckets are rebuilt once, after the first step
    assert buckets[-of_a_step * (steps - 1) :] == list(range(of_a_step)) * (steps - 1)


def names_of(found: profile) -> list[str]:
    return [event.name for event in sorted(found.events(), key=lambda event: event.time_range.start)]


REDUCTION = "c10d::allreduce_"


def order() -> list[str]:  # of the nodes of the last backward and what is to be all-reduced, as it was begun
    events, node = torch.load("profiled.pt"), "autograd::engine::evaluate_function: "
    last = events[len(events) - events[::-1].index("next micro-batch") :]
    names = [name.removeprefix(node) for name in last if name.startswith(node) or name == REDUCTION]
    return [name for name in names if name != "DivBackward0"]  # Lightning's own, by accumulate_grad_batches


@pytest.mark.some_cases(1, 1)
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}], ids=" ".join
)
def test_reduction_overlaps_with_the_last_backward_as_in_plain_lightning(options: dict[str, Any]) -> None:
    by_rank = dealt(sentences(48), 2, "ddp")
    third = Profiled(2 * WINDOW, 3 * WINDOW - 1, names_of)  # in the second DistributedDataParallel rebuilds its buckets
    train(Language(), by_rank, 1, third, **SMALL, **options)
    ours = order()
    strategy = DDPStrategy(start_method="fork", timeout=timedelta(seconds=20), **SMALL, **options)
    fit(Language(), Dealt(by_rank), third, strategy=strategy, devices=RANKS)  # every micro-batch is reduced
    lightnings = order()
    assert ours == [REDUCTION, *lightnings]  # the weights do not wait in line behind the gradients
    assert lightnings.count(REDUCTION) > 4
    assert lightnings.index(REDUCTION) / len(lightnings) < 0.6  # the first bucket is on its way long before the backward ends
