"""Windows of tokens are their full batches on every engine, and windows that have no end are refused."""

from functools import partial
from typing import Any

import pytest
import torch
from harness import assert_one_window_one_batch, dealt, on, on_each, windows_of
from sharded import ShardedLanguage
from support import Scalar, fit, sentences, x

from lightning_accum import AccumulationError, GradientAccumulation, Tokens

ROWS = sentences(70)


ENGINES = [
    *on_each("accum, ddp, fsdp2, fsdp2 and tensor, fsdp1, ddp of 3"),
    *(on("ddp", sync="micro_batch"), on("ddp", find_unused_parameters=True)),
]


@pytest.mark.some_cases(3, 4)
@pytest.mark.parametrize("has_length", [True, False], ids=["sized", "iterable"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("engine", "options"), ENGINES)
def test_windows_of_tokens_are_their_full_batches(engine: str, options: dict[str, Any], optimizer: str, has_length: bool) -> None:
    def tokens_of(rows: list[torch.Tensor]) -> int:  # a row has one prediction less than tokens
        return sum(len(row) - 1 for row in rows)

    by_rank = dealt(ROWS, 2, engine)
    if len(by_rank) > 1:
        del by_rank[-1][-3:]
    windows: list[list[torch.Tensor]] = [[]]  # of an epoch: each ends with the loader batch in which it is full
    for step in windows_of(by_rank, 1):
        windows[-1] += step
        if tokens_of(windows[-1]) >= 70:
            windows.append([])
    windows = [window for window in windows if window]
    weights = list(map(tokens_of, windows))
    make, policy = partial(ShardedLanguage, optimizer), GradientAccumulation(Tokens(70))
    arguments = {"windows": windows, "weights": weights, "has_length": has_length}
    assert_one_window_one_batch(make, by_rank, policy, engine, options, **arguments)


class Sum(Scalar):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.w * batch).sum()


@pytest.mark.parametrize(
    ("policy", "kind", "trainer", "names"),
    [
        (GradientAccumulation(lambda step: 2 - 2 * step), Scalar, {}, "window"),
        (GradientAccumulation(Tokens(3)), Sum, {}, "Tokens"),
        (GradientAccumulation(Tokens(3)), Scalar, {"accumulate_grad_batches": 4}, "accumulate_grad_batches"),
        (GradientAccumulation(Tokens(lambda seen: 0)), Scalar, {}, "count"),
        (GradientAccumulation(7, tail="drop"), Scalar, {}, "window"),  # the tail of every epoch
        (GradientAccumulation({0: 8, 2: 1}, tail="drop"), Scalar, {}, "window"),
    ],
)
def test_windows_that_have_no_end_are_refused(policy: GradientAccumulation, kind: type[Scalar], trainer: Any, names: str) -> None:
    with pytest.raises(AccumulationError, match=names):
        fit(kind([x(1)] * 6), None, policy, **trainer)
