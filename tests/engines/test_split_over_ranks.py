"""Split batches over ranks that differ: in what their micro-batches use, in how many they have, in whether they have any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import SaveAfter, Scalar, StatefulLoader, ddp, loader, relative_error, trainer, x
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation, Tokens

Batch = tuple[Tensor, Tensor]
NO_TASK = -1
"""For a batch of it training_step returns None."""


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

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        samples, tasks = batch
        if (tasks == NO_TASK).any():
            return None
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


def has_loss(batch: Batch | None) -> bool:
    return batch is not None and NO_TASK not in batch[1] and bool(batch[0].isfinite().all())


def on_one_rank(by_rank: Sequence[Sequence[Batch | None]], window: int = 1, max_epochs: int = 1, **kwargs: Any) -> Heads:
    """Plain Lightning, with the batches of a window on all ranks as one."""
    longest = max(map(len, by_rank))
    parts = [[batch for rank in by_rank for batch in rank[i : i + window] if has_loss(batch)] for i in range(0, longest, window)]
    batches = [tuple(torch.cat(column) for column in zip(*part, strict=True)) for part in parts if part]
    module = Heads([batches], **kwargs)
    trainer("auto", max_epochs=max_epochs).fit(module)
    return module


def error_over_ranks(by_rank: Any, policy: dict[str, Any], arguments: dict[str, Any], full: Any = None, **kwargs: Any) -> float:
    """Of two ranks, beside one that has ``full``: by default the batches of a window of all ranks as one."""
    module = Heads(by_rank, **kwargs)
    trainer(ddp(**arguments), devices=2, callbacks=[GradientAccumulation(**policy)]).fit(module)
    expected = on_one_rank(by_rank, policy.get("window", 1), **kwargs) if full is None else on_one_rank(full, **kwargs)
    return relative_error(module.parameters(), expected.parameters())


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("steps", [1, 3])  # DistributedDataParallel itself would speak up in the second
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(
    "arguments", [{}, {"gradient_as_bucket_view": True}, {"sync": "micro_batch"}, {"find_unused_parameters": True}], ids=str
)
def test_parameters_that_the_last_micro_batch_does_not_use_are_reduced(arguments: dict[str, Any], window: int, steps: int) -> None:
    first = [of_tasks(seed, 0, 1, 2, 0, 0, 0) for seed in range(steps * window)]
    second = [of_tasks(10 + seed, 2, 1, 0, 1, 1, 1) for seed in range(steps * window)]
    assert error_over_ranks([first, second], {"window": window, "micro_batch": 2}, arguments) < 1e-12


def test_parameter_that_no_micro_batch_uses_is_an_error_before_the_step() -> None:
    batches = [of_tasks(0, 0, 1, 2, 0)]
    with pytest.raises(Exception, match="find_unused_parameters"):
        trainer(ddp(), devices=2, callbacks=[GradientAccumulation(micro_batch=2)]).fit(Heads([batches] * 2, has_unused=True))


@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
def test_auto_leaves_a_layer_alone_that_nobody_uses(arguments: dict[str, Any]) -> None:
    first = [of_tasks(seed, 0, 1, 2, 0) for seed in range(3)]
    second = [of_tasks(10 + seed, 1, 2, 0, 1) for seed in range(3)]
    assert error_over_ranks([first, second], {"micro_batch": "auto"}, arguments, has_unused=True) < 1e-12


def test_auto_steps_a_layer_from_its_first_use_on_any_rank() -> None:
    first = [of_tasks(seed, 0, 1, 0) for seed in range(3)]
    second = [of_tasks(10, 1, 0, 1), of_tasks(11, 2, 1, 0), of_tasks(12, 1, 2, 0)]
    assert error_over_ranks([first, second], {"micro_batch": "auto"}, {}) < 1e-12


NONE_LOSS = of_tasks(0, NO_TASK)
UNEVEN = (
    [of_tasks(1, 0, 1), NONE_LOSS, of_tasks(2, 0, 0), of_tasks(3, 2, 0), of_tasks(4, 0), None, of_tasks(5, 1), of_tasks(6, 0)],
    [None, of_tasks(11, 0, 0, 1), of_tasks(12, 1, 0), NONE_LOSS, of_tasks(13, 0), of_tasks(14, 1, 2)],
)
"""No window uses all heads, and in each a rank may lack a batch or its loss. The second rank runs out."""


@pytest.mark.parametrize("window", [1, *(pytest.param(window, marks=pytest.mark.slow) for window in (2, 3))])
@pytest.mark.parametrize(
    ("policy", "arguments"),
    [
        ({}, {}),
        ({}, {"gradient_as_bucket_view": True}),
        ({}, {"sync": "micro_batch"}),
        ({"micro_batch": 1}, {}),
        ({"micro_batch": "auto"}, {}),
        ({"micro_batch": "auto"}, {"find_unused_parameters": False}),
        ({"on_nonfinite": "skip"}, {}),
    ],
    ids=str,
)
def test_parameter_that_no_rank_used_in_a_window_stays_where_a_rank_has_no_loss(
    policy: dict[str, Any], arguments: dict[str, Any], window: int
) -> None:
    arguments = {"find_unused_parameters": True, **arguments}
    assert error_over_ranks(UNEVEN, {"window": window, **policy}, arguments) < 1e-12


class Hooked(Heads):
    """Its hooks on gradients take tensors, as all do."""

    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-100, 100))


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("policy", [{}, {"on_nonfinite": "skip"}, {"window": Tokens(6), "micro_batch": 1}], ids=str)
def test_hooks_on_gradients_get_no_none_where_a_rank_has_no_loss(policy: dict[str, Any]) -> None:
    parameters = []
    for kind in (Heads, Hooked):
        module = kind(UNEVEN)
        trainer(ddp(find_unused_parameters=True), devices=2, callbacks=[GradientAccumulation(**policy)]).fit(module)
        parameters.append(list(module.parameters()))
    assert relative_error(*parameters) == 0


@pytest.mark.parametrize("find_unused_parameters", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("micro_batch", [None, 2, "auto"])
def test_parameter_that_only_a_skipped_micro_batch_used_stays_on_all_ranks(micro_batch: Any, find_unused_parameters: bool) -> None:
    bad = of_tasks(7, 0, 2)
    bad[0][1] = torch.nan
    first = [of_tasks(1, 0, 1), bad, of_tasks(2, 0, 1), of_tasks(3, 0, 2), bad, of_tasks(4, 0, 0)]
    second = [of_tasks(11, 0, 0), of_tasks(12, 0, 0), of_tasks(13, 0, 0), of_tasks(14, 0, 0), of_tasks(15, 0), of_tasks(16, 1)]
    policy = {"window": 2, "on_nonfinite": "skip", "micro_batch": micro_batch}
    assert error_over_ranks([first, second], policy, {"find_unused_parameters": find_unused_parameters}) < 1e-12


@pytest.mark.parametrize("policy", [{}, {"on_nonfinite": "skip"}, {"micro_batch": 1}], ids=str)
def test_parameter_that_only_a_dropped_tail_used_stays(policy: dict[str, Any]) -> None:
    first, second = [of_tasks(1, 0, 1), of_tasks(2, 0), of_tasks(3, 2, 0)], [of_tasks(11, 0), of_tasks(12, 0, 1)]
    module, policy = Heads([first, second]), GradientAccumulation(2, tail="drop", **policy)
    trainer(ddp(find_unused_parameters=True), devices=2, max_epochs=3, callbacks=[policy]).fit(module)
    expected = on_one_rank([first[:2], second], 2, max_epochs=3)
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12


@pytest.mark.parametrize(("micro_batch", "find_unused_parameters"), [(None, True), (1, True), (1, False)])
def test_parameter_that_no_rank_used_in_a_window_of_tokens_stays(micro_batch: int | None, find_unused_parameters: bool) -> None:
    first = [of_tasks(1, 0, 1), of_tasks(2, 0, 0, 0, 0), of_tasks(3, 2, 0), of_tasks(4, 1)]
    by_rank = [first, [of_tasks(11, 0, 0), None, of_tasks(12, 1, 0)]]
    policy = {"window": Tokens(8), "micro_batch": micro_batch}  # so many numbers are in each loader batch
    arguments = {"find_unused_parameters": find_unused_parameters}
    assert error_over_ranks(by_rank, policy, arguments, full=by_rank) < 1e-12


def test_parameter_that_was_used_before_a_checkpoint_and_not_after_is_reduced() -> None:
    by_rank = [of_tasks(1, 0, 1), of_tasks(2, 0)], [of_tasks(11, 0), of_tasks(12, 0)]

    class Resumable(Heads):
        def train_dataloader(self) -> Any:
            return StatefulLoader(self.by_rank[self.trainer.global_rank])

    for checkpoint in (None, "inside.ckpt"):
        module = Resumable(by_rank)
        run = trainer(ddp(find_unused_parameters=True), devices=2, accumulate_grad_batches=2, callbacks=[SaveAfter(1)])
        run.fit(module, ckpt_path=checkpoint)
        assert relative_error(module.parameters(), on_one_rank(by_rank, 2).parameters()) < 1e-12


def test_rank_that_ran_out_needs_no_other_parameters_than_its_own() -> None:
    first = [of_tasks(i, 0, 1, 2) for i in range(3)]
    by_rank = [first, [of_tasks(11, 1, 2, 0, 0)]]
    assert error_over_ranks(by_rank, {"micro_batch": 3}, {}) < 1e-12  # its last micro-batch uses head 0 only


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("size", [2, "auto"])
@pytest.mark.parametrize("window", [1, 2])
def test_first_batch_is_none_on_one_rank(size: Any, window: int) -> None:
    first = [of_tasks(seed, 0, 1, 2, 0) for seed in range(4)]
    second = [None, *(of_tasks(10 + seed, 1, 2, 0, 1) for seed in range(3))]
    assert error_over_ranks([first, second], {"window": window, "micro_batch": size}, {}) < 1e-12


@pytest.mark.parametrize("sync", ["window", "micro_batch"])
def test_window_of_tokens_where_a_rank_has_no_batch_to_split(sync: str) -> None:
    by_rank = [[x(1, 2, 3), None, x(4, 5)], [None, x(6, 7, 8, 9), x(10, 11, 12)]]
    module = Scalar(by_rank=by_rank)
    trainer(ddp(sync=sync), devices=2, callbacks=[GradientAccumulation(Tokens(2), micro_batch=1)]).fit(module)
    windows = [[1, 2], [3, 6], [7, 8], [9, 4, 10], [5, 11], [12]]
    assert module.total == pytest.approx(sum(sum(window) / len(window) for window in windows), rel=1e-12)
