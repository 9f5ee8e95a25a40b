"""A batch that is None, a training_step that returns None, labels that are all ignored: the window is what is left of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness import assert_one_window_one_batch, dealt, on, windows_of
from sharded import ShardedLanguage
from support import pad, sentences
from torch import Tensor

from lightning_accum import GradientAccumulation

ROWS = sentences(28)
KINDS = ["no batch", "None before the forward", "None after the forward", "all labels ignored"]


class Hole(list):
    """Rows that are not in their window."""

    def __init__(self, rows: Any, kind: str) -> None:
        super().__init__()
        self.rows, self.kind = rows, kind


def collate(rows: Any) -> dict[str, Any] | None:
    if not isinstance(rows, Hole):
        return pad(rows)
    batch = pad(rows.rows)
    if rows.kind == "no batch":
        return None
    if rows.kind == "all labels ignored":
        return {**batch, "labels": torch.full_like(batch["labels"], -100)}
    return {**batch, "returns_none": rows.kind.removeprefix("None ")}


class Holed(ShardedLanguage):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor | None:
        if "returns_none" not in batch:
            return super().training_step(batch, batch_idx)
        if batch["returns_none"] == "after the forward":
            self.net(batch["input_ids"])
        return None


def assert_the_rest_is_the_window(
    engine: str, options: Any, places: list[tuple[int, int]], kinds: list[str], rows: Any = ROWS, **policy: Any
) -> None:
    """With each of the kinds in turn at loader batches of ranks."""
    by_rank: list[list[Any]] = dealt(rows, 2, engine)
    for index, (rank, place) in enumerate(places):
        by_rank[rank][place] = Hole(by_rank[rank][place], kinds[index % len(kinds)])
    make, accumulation = partial(Holed, "adamw"), GradientAccumulation(2, **policy)
    assert_one_window_one_batch(make, by_rank, windows_of(by_rank, 2), accumulation, engine, options, collate=collate)


ENGINES = [
    *(on(engine) for engine in ("ddp", "fsdp2", "fsdp1")),
    *(on(engine, sync="micro_batch") for engine in ("ddp", "fsdp2", "fsdp1")),
    on("ddp", find_unused_parameters=True),
    on("ddp", static_graph=True),
    on("fsdp2 and tensor"),
    on("fsdp1 by layer"),
    on("fsdp1 by layer", sync="micro_batch"),
    on("fsdp2", sync="shard"),
]


@pytest.mark.some_cases(4, 15)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("engine", "options"), ENGINES)
def test_nothing_on_one_of_two_ranks(engine: str, options: dict[str, Any], kind: str) -> None:
    """At a boundary, at a beginning, at a boundary, as the tail."""
    assert_the_rest_is_the_window(engine, options, [(1, 1), (0, 2), (1, 5), (1, 6)], [kind])


@pytest.mark.some_cases(2, 9)
@pytest.mark.parametrize("micro_batch", [None, 1])
@pytest.mark.parametrize(("engine", "options"), [*ENGINES[:6], *ENGINES[8:]])
def test_nothing_of_every_kind_on_either_of_two_ranks(engine: str, options: dict[str, Any], micro_batch: int | None) -> None:
    first = [(0, 0)] if engine == "ddp" else []  # a shard needs a batch first, and is told so
    places = [*first, (0, 1), (1, 2), (1, 3), (0, 4), (0, 5), (1, 6)]
    assert_the_rest_is_the_window(engine, options, places, KINDS, micro_batch=micro_batch)


@pytest.mark.some_cases(2, 6)
@pytest.mark.parametrize(("engine", "options"), [on("accum"), *ENGINES])
def test_a_window_of_nothing_takes_no_step(engine: str, options: dict[str, Any]) -> None:
    ranks = range(1 if engine == "accum" else 2)
    places = [(rank, place) for place in (2, 3) for rank in ranks]
    kinds = [*["no batch", "None after the forward"][: len(ranks)], *["all labels ignored"] * len(ranks)]
    assert_the_rest_is_the_window(engine, options, places, kinds, ROWS[: 12 * len(ranks)])
