"""Split batches over ranks that differ: in what their micro-batches use, in how many they have, in whether they have any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import Scalar, ddp, loader, relative_error, trainer, x
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation

Batch = tuple[Tensor, Tensor]


class Heads(pl.LightningModule):
    """A head for each task, of which a batch uses those of its tasks; a buffer, which is broadcast; a layer that nobody uses."""

    def __init__(self, by_rank: Sequence[Sequence[Batch | None]], has_unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.by_rank = by_rank
        self.trunk = nn.Linear(3, 2).double()
        self.heads = nn.ModuleList(nn.Linear(3, 2).double() for _ in range(3))
        self.register_buffer("scale", torch.full((2,), 0.5, dtype=torch.float64))
        if has_unused:
            self.unused = nn.Linear(2, 2).double()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        samples, tasks = batch
        output = self.trunk(samples) * self.scale
        for task in tasks.unique().tolist():
            rows = torch.where(tasks == task)[0]
            output = output.index_add(0, rows, self.heads[task](samples[rows]))
        return F.mse_loss(output.tanh(), samples[:, :2])

    def train_dataloader(self) -> Any:
        return loader(self.by_rank[self.trainer.global_rank])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


def of_tasks(seed: int, *tasks: int) -> Batch:
    samples = torch.randn(len(tasks), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return samples, torch.tensor(tasks)


def on_one_rank(by_rank: Sequence[Sequence[Batch | None]], window: int = 1, **kwargs: Any) -> Heads:
    """Plain Lightning, with the batches of a window on all ranks as one."""
    number = len(by_rank[0])
    parts = [[rank[i] for i in range(start, start + window) for rank in by_rank] for start in range(0, number, window)]
    batches = [tuple(torch.cat(column) for column in zip(*(p for p in part if p is not None), strict=True)) for part in parts]
    module = Heads([batches], **kwargs)
    trainer("auto").fit(module)
    return module


def error_over_ranks(by_rank: Any, window: int, size: Any, arguments: dict[str, Any], **kwargs: Any) -> float:
    module = Heads(by_rank, **kwargs)
    trainer(ddp(**arguments), devices=2, callbacks=[GradientAccumulation(window, micro_batch=size)]).fit(module)
    return relative_error(module.parameters(), on_one_rank(by_rank, window, **kwargs).parameters())


@pytest.mark.parametrize("steps", [1, 3])  # DistributedDataParallel itself would speak up in the second
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(
    "arguments", [{}, {"gradient_as_bucket_view": True}, {"sync": "micro_batch"}, {"find_unused_parameters": True}], ids=str
)
def test_parameters_that_the_last_micro_batch_does_not_use_are_reduced(arguments: dict[str, Any], window: int, steps: int) -> None:
    first = [of_tasks(seed, 0, 1, 2, 0, 0, 0) for seed in range(steps * window)]
    second = [of_tasks(10 + seed, 2, 1, 0, 1, 1, 1) for seed in range(steps * window)]
    assert error_over_ranks([first, second], window, 2, arguments) < 1e-12


def test_parameter_that_no_micro_batch_uses_is_an_error_before_the_step() -> None:
    batches = [of_tasks(0, 0, 1, 2, 0)]
    with pytest.raises(Exception, match="find_unused_parameters"):
        trainer(ddp(), devices=2, callbacks=[GradientAccumulation(micro_batch=2)]).fit(Heads([batches] * 2, has_unused=True))


@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
def test_auto_leaves_a_layer_alone_that_nobody_uses(arguments: dict[str, Any]) -> None:
    first = [of_tasks(seed, 0, 1, 2, 0) for seed in range(3)]
    second = [of_tasks(10 + seed, 1, 2, 0, 1) for seed in range(3)]
    assert error_over_ranks([first, second], 1, "auto", arguments, has_unused=True) < 1e-12


def test_auto_steps_a_layer_from_its_first_use_on_any_rank() -> None:
    first = [of_tasks(seed, 0, 1, 0) for seed in range(3)]
    second = [of_tasks(10, 1, 0, 1), of_tasks(11, 2, 1, 0), of_tasks(12, 1, 2, 0)]
    assert error_over_ranks([first, second], 1, "auto", {}) < 1e-12


@pytest.mark.parametrize("size", [2, "auto"])
@pytest.mark.parametrize("window", [1, 2])
def test_first_batch_is_none_on_one_rank(size: Any, window: int) -> None:
    first = [of_tasks(seed, 0, 1, 2, 0) for seed in range(4)]
    second = [None, *(of_tasks(10 + seed, 1, 2, 0, 1) for seed in range(3))]
    assert error_over_ranks([first, second], window, size, {}) < 1e-12


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("sync", ["window", "micro_batch"])
def test_ranks_with_different_numbers_of_micro_batches(sync: str, window: int) -> None:
    by_rank = [[x(1, 2, 3, 4, 5), x(7, 9), None, x(6)], [x(10), x(1, 2, 3, 4, 5, 6), x(8, 8, 8), x(3, 4)]]
    module = Scalar(by_rank=by_rank)
    trainer(ddp(sync=sync), devices=2, callbacks=[GradientAccumulation(window, micro_batch=2)]).fit(module)
    expected = [25 / 6, 37 / 8, 24 / 3, 13 / 3] if window == 1 else [62 / 14, 37 / 6]
    assert module.total == pytest.approx(sum(expected), rel=1e-12)
