"""``micro_batch="auto"`` over ``fully_shard``: memory runs out on one of two ranks, in any layer, and nothing hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from harness import assert_one_window_one_batch, dealt, windows_of
from sharded import ShardedLanguage, needs_sharding_on_cpu
from support import Limit, sentences
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchmetrics import SumMetric

from lightning_accum import GradientAccumulation, Tokens

pytestmark = [
    needs_sharding_on_cpu,
    pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch cannot take back a forward that stopped"),
]

ROWS = sentences(40)
PLACES = ["token", "blocks.0.self_attn", "blocks.0.linear1", "blocks.0.linear2", "blocks.1", "blocks.1.linear1", "head", ""]


def count_targets(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class Limited(ShardedLanguage):
    """Runs out of memory on some ranks above so many rows, where a submodule begins or ends, in forward or in backward.

    Args:
        most: rows that each rank has room for.
        place: the submodule.
        where: "forward" or "backward".
        loader_batch: the only one that this happens in; None for all.
    """

    def __init__(
        self, most: Sequence[int], place: str = "head", where: str = "forward", loader_batch: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__("adamw", **kwargs)
        self.most, self.where, self.loader_batch = most, where, loader_batch
        self.runs: list[int] = []
        module = self.net.get_submodule(place)
        if place in ("token", ""):
            module.register_forward_hook(lambda module, inputs, output: self.limited(output))
        else:
            module.register_forward_pre_hook(lambda module, inputs: (self.limited(inputs[0]), *inputs[1:]))

    def limited(self, hidden: Tensor) -> Tensor:
        if self._trainer is None:  # in the hand-written loop
            return hidden
        is_due = self.loader_batch is None or self.trainer.fit_loop.epoch_loop.batch_idx == self.loader_batch
        most = self.most[self.global_rank] if is_due else len(hidden)
        self.runs.append(len(hidden))
        return Limit.apply(hidden, len(hidden), most, self.where, out_of_memory)

    def on_train_end(self) -> None:
        torch.save(self.runs, f"runs{self.global_rank}.pt")


def assert_exact(
    make: Callable[[], pl.LightningModule],
    window: Any = 2,
    by_rank: Sequence[Sequence[Any]] | None = None,
    size: int = 2,
    engine: str = "fsdp2",
    policy: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    by_rank = dealt(ROWS, 8, engine) if by_rank is None else by_rank
    policy = GradientAccumulation(window, micro_batch="auto", **{"check": False, **(policy or {})})
    assert_one_window_one_batch(make, by_rank, windows_of(by_rank, size, epochs=2), policy, engine, options, max_epochs=2)


@pytest.mark.some_cases(2, 8)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("place", PLACES)
def test_memory_runs_out_on_one_rank_in_any_layer(place: str, where: str) -> None:
    assert_exact(lambda: Limited((3, 8), place, where))
    assert max(torch.load("runs0.pt")[3:]) <= 4
    assert torch.load("runs1.pt").count(8) <= 2  # it has learned of the other's


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("most", [(1, 1), (8, 3), (2, 5)])
@pytest.mark.parametrize("loader_batch", [0, 1, 2])
def test_gradients_of_earlier_loader_batches_are_kept(loader_batch: int, most: tuple[int, int], where: str) -> None:
    assert_exact(lambda: Limited(most, "blocks.1", where, loader_batch))


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("engine", "sync"), [("fsdp2", "micro_batch"), ("fsdp2 of 4", "shard"), ("fsdp2 of 4", "window"), ("fsdp2 of 4", "micro_batch")]
)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("loader_batch", [None, 1])
def test_other_reductions(engine: str, sync: str, where: str, loader_batch: int | None) -> None:
    assert_exact(lambda: Limited((8, 3, 8, 5), "blocks.1.linear1", where, loader_batch), engine=engine, sync=sync)


@pytest.mark.exhaustive
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_modules_that_are_gathered_again_or_stay(reshard: bool, where: str) -> None:
    assert_exact(lambda: Limited((8, 3), "blocks.0.linear2", where, 1, reshard_after_forward=reshard))


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("holes", [[(0, 1)], [(1, 1)]], ids=str)
def test_other_rank_has_no_batch(holes: list[tuple[int, int]]) -> None:
    by_rank: list[list[Any]] = [list(own) for own in dealt(ROWS, 8, "fsdp2")]
    for rank, index in holes:
        by_rank[rank][index] = None
    assert_exact(lambda: Limited((3, 5)), by_rank=by_rank)


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("place", ["token", "blocks.0.linear1"])
def test_memory_runs_out_in_the_check_on_one_rank(place: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_accum.weighing.trial.PATIENCE", 2.0)
    monkeypatch.setattr("harness.SHORT", timedelta(seconds=90))
    begin = time.monotonic()
    with pytest.raises(Exception, match="CUDA out of memory"):
        assert_exact(lambda: Limited((8, 3), place, where), policy={"check": True})
    assert time.monotonic() - begin < 15


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_memory_runs_out_in_the_check_on_both(where: str) -> None:
    assert_exact(lambda: Limited((3, 3), "blocks.1.linear1", where), policy={"check": True})


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "policy",
    [{"on_nonfinite": "skip"}, {"on_nonfinite": "raise"}, {"tail": "carry"}, {"weight": count_targets}],
    ids=" ".join,
)
def test_other_policies(policy: dict[str, Any], where: str) -> None:
    by_rank = dealt(ROWS[:32], 8, "fsdp2")
    assert_exact(lambda: Limited((8, 3), "blocks.1", where), by_rank=by_rank, policy=policy)


@pytest.mark.exhaustive
def test_windows_of_tokens() -> None:
    assert_exact(lambda: Limited((3, 8)), Tokens(1), size=1)


@pytest.mark.exhaustive
def test_first_batch_is_checked_where_there_is_room() -> None:
    by_rank = dealt(ROWS[:36], 9, "fsdp2")
    assert_exact(lambda: Limited((8, 9)), by_rank=by_rank, policy={"check": True})


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_sample_that_does_not_fit_ends_all_ranks(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.SHORT", timedelta(seconds=90))
    begin = time.monotonic()
    with pytest.raises(Exception, match="Nor did one sample"):
        assert_exact(lambda: Limited((8, 0), "blocks.1", where))
    assert time.monotonic() - begin < 60  # and not after the time-out of the group


# --- what a step sends by itself cannot be undone -----------------------------------------------------------------------


class Gathers(Limited):
    """Sends a collective of its own, in some loader batches.

    Args:
        kind: of collective.
        since: the first loader batch that has one.
    """

    def __init__(self, kind: str, since: int = 0, most: Sequence[int] = (8, 8)) -> None:
        super().__init__(most)
        self.kind, self.since = kind, since
        self.seen_tokens = SumMetric(dist_sync_on_step=True) if kind == "metric" else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx < self.since or self._trainer is None:
            return loss
        number = torch.tensor(float(len(batch["labels"])))
        if self.kind == "all_gather":
            self.all_gather(number)
        elif self.kind == "all_reduce":
            dist.all_reduce(number)
        elif self.kind == "differentiable":
            loss = loss + 0.0 * torch.distributed.nn.functional.all_reduce(loss)
        elif self.kind == "metric":
            self.seen_tokens(number)
        return loss

    def on_after_backward(self) -> None:
        if self.kind == "hook":
            self.all_gather(torch.ones(()))


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("kind", "since", "most", "check"),
    [
        ("all_gather", 0, (8, 8), False),
        ("all_reduce", 0, (3, 8), False),
        ("differentiable", 0, (8, 8), False),
        ("metric", 0, (8, 8), True),
        ("hook", 0, (8, 8), True),
        ("all_reduce", 2, (8, 8), True),
    ],
)
def test_collective_of_the_steps_own_is_refused(kind: str, since: int, most: tuple[int, int], check: bool) -> None:
    where = "in seen_tokens" if kind == "metric" else "such as self.all_gather"
    with pytest.raises(Exception, match=rf"Gathers sends \d collectives? of its own in a micro-batch \({where}"):
        assert_exact(lambda: Gathers(kind, since, most), policy={"check": check})


class Shows(Limited):
    """Sends what it logs and counts at the end of a loader batch, and by hooks that are outside of micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self._trainer is not None:
            self.log("own", loss.detach(), sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.all_gather(torch.ones(()))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._trainer is not None:
            self.all_gather(torch.ones(()))


@pytest.mark.exhaustive
def test_what_is_sent_outside_of_micro_batches_is_no_matter() -> None:
    assert_exact(lambda: Shows((3, 8)), policy={"check": True})
