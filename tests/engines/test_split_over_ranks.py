"""Split batches over ranks that differ: in what their micro-batches use, in how many they have, in whether they have any."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from harness import Dealt, assert_one_window_one_batch, trained, windows_of
from support import SaveAfter, StatefulLoader, Toy, relative_error
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from lightning_accum import GradientAccumulation, Tokens

NO_TASK = -1  # for a batch of it the step returns None
Rows = list[tuple[Tensor, int]]


class Heads(nn.Module):
    """A head for each task, of which a batch uses those of its tasks; a buffer, which is broadcast; maybe a layer nobody uses."""

    def __init__(self, has_unused: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 2)
        self.heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))
        self.register_buffer("scale", torch.full((2,), 0.5))
        if has_unused:
            self.unused = nn.Linear(2, 2)

    def forward(self, samples: Tensor, tasks: Tensor) -> Tensor | None:
        if (tasks == NO_TASK).any():
            return None
        output = self.trunk(samples) * self.scale
        for task in tasks.unique().tolist():
            rows = torch.where(tasks == task)[0]
            output = output.index_add(0, rows, self.heads[task](samples[rows]))
        return F.mse_loss(output.tanh(), samples[:, :2])


def module(has_unused: bool = False) -> Toy:
    return Toy(lambda net, batch: net(*batch), "adamw", partial(Heads, has_unused))


def of_tasks(seed: int, *tasks: int) -> Rows:
    samples = torch.randn(len(tasks), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return list(zip(samples, tasks, strict=True))


def has_loss(rows: Rows) -> bool:
    return all(task != NO_TASK and sample.isfinite().all() for sample, task in rows)


def assert_exact(
    by_rank: Any, window: Any = 1, options: Any = None, data: Any = None, *, make: Any = module, **policy: Any
) -> None:
    arguments = policy.pop("arguments", {})
    counted = [[rows if rows is not None and has_loss(rows) else None for rows in own] for own in by_rank]
    windows = windows_of(counted, window if isinstance(window, int) else 1, tail=policy.get("tail", "step"))
    data, policy = by_rank if data is None else data, GradientAccumulation(window, **policy)
    assert_one_window_one_batch(make, data, policy, "ddp", options, windows=windows, collate=default_collate, **arguments)


UNUSED = {"find_unused_parameters": True}
OPTIONS = [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 64 / 2**20}, {"sync": "micro_batch"}, UNUSED]


@pytest.mark.some_cases(2, 3)
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_parameters_that_the_last_micro_batch_does_not_use_are_reduced(options: dict[str, Any], window: int) -> None:
    first = [of_tasks(seed, 0, 1, 2, 0, 0, 0) for seed in range(3 * window)]  # DDP itself would speak up in the second step
    second = [of_tasks(10 + seed, 2, 1, 0, 1, 1, 1) for seed in range(3 * window)]
    assert_exact([first, second], window, options, micro_batch=2)


def test_parameter_that_no_micro_batch_uses_is_an_error_before_the_step() -> None:
    data = Dealt([[of_tasks(0, 0, 1, 2, 0)]] * 2, default_collate)
    with pytest.raises(Exception, match="find_unused_parameters"):
        trained(module(True), GradientAccumulation(micro_batch=2), "ddp", data=data)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, UNUSED], ids=str)
def test_auto_leaves_a_layer_alone_that_nobody_uses(options: dict[str, Any]) -> None:
    by_rank = [[of_tasks(seed, 0, 1, 2, 0) for seed in range(3)], [of_tasks(10 + seed, 1, 2, 0, 1) for seed in range(3)]]
    assert_exact(by_rank, 1, options, make=partial(module, True), micro_batch="auto")


NONE_LOSS = of_tasks(0, NO_TASK)
UNEVEN = [  # no window uses all heads, and in each a rank may lack a batch or its loss. The second rank runs out.
    [of_tasks(1, 0, 1), NONE_LOSS, of_tasks(2, 0, 0), of_tasks(3, 2, 0), of_tasks(4, 0), None, of_tasks(5, 1), of_tasks(6, 0)],
    [None, of_tasks(11, 0, 0, 1), of_tasks(12, 1, 0), NONE_LOSS, of_tasks(13, 0), of_tasks(14, 1, 2)],
]
POLICIES = [
    ({}, {}),
    ({}, {"gradient_as_bucket_view": True}),
    ({}, {"sync": "micro_batch"}),
    ({"micro_batch": 1}, {}),
    ({"micro_batch": "auto"}, {}),
    ({"micro_batch": "auto"}, {"find_unused_parameters": False}),
    ({"on_nonfinite": "skip"}, {}),
]


@pytest.mark.some_cases(3, 5)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(("policy", "options"), POLICIES, ids=str)
def test_parameter_that_no_rank_used_in_a_window_stays_if_a_rank_has_no_loss(policy: Any, options: Any, window: int) -> None:
    assert_exact(UNEVEN, window, {**UNUSED, **options}, **policy)


BAD = of_tasks(7, 0, 2)
BAD[0][0][1] = torch.nan
ONCE = [of_tasks(1, 0, 1), of_tasks(2, 0, 0, 0, 0), of_tasks(3, 2, 0), of_tasks(4, 1)]
TAIL = [[of_tasks(1, 0, 1), of_tasks(2, 0), of_tasks(3, 2, 0)], [of_tasks(11, 0), of_tasks(12, 0, 1)]]
SKIPPED = [
    [of_tasks(1, 0, 1), BAD, of_tasks(2, 0, 1), of_tasks(3, 0, 2), BAD, of_tasks(4, 0, 0)],
    [of_tasks(11, 0, 0), of_tasks(12, 0, 0), of_tasks(13, 0, 0), of_tasks(14, 0, 0), of_tasks(15, 0), of_tasks(16, 1)],
]
FIRST_IS_NONE = [[of_tasks(seed, 0, 1, 2, 0) for seed in range(4)], [None, *(of_tasks(10 + seed, 1, 2, 0, 1) for seed in range(3))]]
STAYS: dict[str, tuple[Sequence[Any], Any, dict[str, Any], dict[str, Any]]] = {
    "only in a skipped loader batch": (SKIPPED, 2, UNUSED, {"on_nonfinite": "skip"}),
    "only in a skipped micro-batch": (SKIPPED, 2, UNUSED, {"on_nonfinite": "skip", "micro_batch": 2}),
    "only in a skipped micro-batch, auto": (SKIPPED, 2, {}, {"on_nonfinite": "skip", "micro_batch": "auto"}),
    "only in a dropped tail": (TAIL, 2, UNUSED, {"tail": "drop"}),
    "only in a dropped tail, skipping": (TAIL, 2, UNUSED, {"tail": "drop", "on_nonfinite": "skip"}),
    "only in a dropped tail, split": (TAIL, 2, UNUSED, {"tail": "drop", "micro_batch": 1}),
    "in no window of tokens": ([ONCE, [of_tasks(11, 0, 0), None, of_tasks(12, 1, 0)]], Tokens(8), UNUSED, {}),
    "in no window of tokens, cut": ([ONCE, [of_tasks(11, 0, 0), None, of_tasks(12, 1, 0)]], Tokens(8), UNUSED, {"micro_batch": 1}),
    "first in a later window": (
        [[of_tasks(seed, 0, 1, 0) for seed in range(3)], [of_tasks(10, 1, 0, 1), of_tasks(11, 2, 1, 0), of_tasks(12, 1, 2, 0)]],
        1, {}, {"micro_batch": "auto"},
    ),
    "not in the last micro-batch of a rank that ran out": (
        [[of_tasks(i, 0, 1, 2) for i in range(3)], [of_tasks(11, 1, 2, 0, 0)]], 1, {}, {"micro_batch": 3},
    ),
    "by a rank whose first batch is None": (FIRST_IS_NONE, 2, {}, {"micro_batch": 2}),
    "by a rank whose first batch is None, auto": (FIRST_IS_NONE, 1, {}, {"micro_batch": "auto"}),
}  # fmt: skip
"""Which parameters are used, by what ranks."""


@pytest.mark.some_cases(3, 5)
@pytest.mark.parametrize("used", STAYS)
def test_parameter_has_a_gradient_if_it_has_one_in_the_full_batch(used: str) -> None:
    by_rank, window, options, policy = STAYS[used]
    assert_exact(by_rank, window, options, **policy)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("policy", [{}, {"on_nonfinite": "skip"}], ids=str)
def test_hooks_on_gradients_get_no_none_if_a_rank_has_no_loss(policy: dict[str, Any]) -> None:
    plain, hooked = module(), module()
    hooked.on_fit_start = lambda: [p.register_hook(lambda gradient: gradient.clamp(-100, 100)) for p in hooked.parameters()]
    data = Dealt(UNEVEN, default_collate)
    found = [trained(each, GradientAccumulation(**policy), "ddp", UNUSED, data).values() for each in (plain, hooked)]
    assert relative_error(*found) == 0


def test_parameter_that_was_used_before_a_checkpoint_and_not_after_is_reduced() -> None:
    by_rank = [[of_tasks(1, 0, 1), of_tasks(2, 0)], [of_tasks(11, 0), of_tasks(12, 0)]]
    (data := Dealt(by_rank, default_collate)).train_dataloader = lambda: StatefulLoader(data.by_rank[data.trainer.global_rank])
    trained(module(), 2, "ddp", UNUSED, data, callbacks=[SaveAfter(1)])
    assert_exact(by_rank, 2, UNUSED, data, arguments={"ckpt_path": "inside.ckpt"})
