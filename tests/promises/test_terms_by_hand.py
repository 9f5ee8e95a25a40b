"""Losses of several terms in a hand-written loop: exact with ``loss_of=``, or with a weight for each term."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from fabric_ranks import on_two
from harness import windows_of
from lightning.fabric import Fabric
from losses_of_terms import COUNTS, LOSSES, OfTerms, rows, windows_of_tokens
from sharded import needs_sharding_on_cpu, whole_parameters
from support import OPTIMIZERS, error_of_updates, warned
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import default_collate

from lightning_accum import AccumulationError, Tokens
from lightning_accum.fabric import Accumulator

NAMES = ["tokens and samples", "learned uncertainty", "tokens, samples and a penalty", "a term only where there is something"]
BATCHES = [rows(size, seed) for seed, size in enumerate((3, 1, 5, 2, 2, 4, 1, 3, 1, 2, 6, 3))]
WINDOWS = windows_of([BATCHES], 4)


class Loss(nn.Module):
    """The loss of a batch, as the model that the loop calls."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.of = OfTerms(LOSSES[name].of)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.of.training_step(batch, 0)


def steps(accumulator: Accumulator, model: nn.Module, batches: Any) -> Iterator[float]:
    for batch in batches:
        accumulator.backward(model(batch))
        if accumulator.step():
            yield accumulator.window_loss


def set_up(fabric: Fabric | None, name: str, optimizer: str, **arguments: Any) -> tuple[Loss, nn.Module, Any, Accumulator]:
    model = Loss(name)
    wrapped = model if fabric is None else fabric.setup(model)
    stepping = OPTIMIZERS[optimizer](wrapped.parameters())
    stepping = stepping if fabric is None else fabric.setup_optimizers(stepping)
    return model, wrapped, stepping, Accumulator(fabric, wrapped, stepping, log=False, **arguments)


def with_loss(model: Any, batch: Any) -> Tensor:
    return model(batch)


def trained(fabric: Fabric | None, name: str, optimizer: str, batches: Sequence[Any], **arguments: Any) -> Any:
    """Parameters, and the loss of each window."""
    model, wrapped, _, accumulator = set_up(fabric, name, optimizer, **arguments)
    losses = list(steps(accumulator, wrapped, accumulator([default_collate(batch) for batch in batches])))
    return whole_parameters(model), losses


def assert_steps_of(found: Any, name: str, optimizer: str, windows: Sequence[Any], shown: slice = slice(None)) -> None:
    """Parameters, and the losses of windows in ``shown``."""
    model, losses = Loss(name), []
    stepping = OPTIMIZERS[optimizer](model.parameters())
    for window in windows:
        stepping.zero_grad()
        loss = model(default_collate(window))
        loss.backward()
        stepping.step()
        losses.append(float(loss.detach()))
    assert error_of_updates(found[0], model, Loss(name)) < 1e-12
    assert len(found[1]) == len(losses)
    assert found[1][shown] == pytest.approx(losses[shown], rel=1e-12)


@pytest.mark.some_cases(5)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("arguments", [{"window": 4}, {"micro_batch": 3}], ids=["windows", "split"])
@pytest.mark.parametrize("name", NAMES)
def test_with_loss_of_each_window_takes_the_step_of_its_full_batch(name: str, arguments: Any, optimizer: str) -> None:
    batches = BATCHES if "window" in arguments else WINDOWS
    with warned() as messages:
        found = trained(None, name, optimizer, batches, loss_of=with_loss, **arguments)
    assert messages == []
    assert_steps_of(found, name, optimizer, WINDOWS)


def test_a_weight_for_each_term_needs_no_loss_of() -> None:
    weight = [COUNTS[count] for count in LOSSES["tokens and samples"].counts.split(", ")]
    found = trained(None, "tokens and samples", "adamw", BATCHES, window=4, weight=weight)
    assert_steps_of(found, "tokens and samples", "adamw", WINDOWS, shown=slice(0))  # it is shown by the first weight


def test_a_window_of_tokens_is_counted_up_to_its_end() -> None:
    found = trained(None, "tokens and samples", "adamw", BATCHES, window=Tokens(30), loss_of=with_loss)
    assert_steps_of(found, "tokens and samples", "adamw", windows_of_tokens(BATCHES, 30))


def test_without_loss_of_the_terms_are_told_of_before_or_at_the_first_step() -> None:
    with warned() as messages:
        trained(None, "tokens and samples", "sgd", BATCHES, window=4)
    assert any("weight=[...]" in message for message in messages)


def test_a_checkpoint_inside_a_window_goes_on() -> None:
    arguments: Any = {"window": 4, "loss_of": with_loss}
    loader = [default_collate(batch) for batch in BATCHES]
    model, wrapped, optimizer, accumulator = set_up(None, "tokens and samples", "adamw", **arguments)

    def until_it_stops() -> Iterator[Any]:
        for batch in accumulator(loader):
            yield batch
            if accumulator.loader_batches == 6:
                return

    losses = list(steps(accumulator, wrapped, until_it_stops()))
    torch.save([one.state_dict() for one in (model, optimizer, accumulator)], "state.pt")
    model, wrapped, optimizer, accumulator = set_up(None, "tokens and samples", "adamw", **arguments)
    for one, state in zip((model, optimizer, accumulator), torch.load("state.pt", weights_only=True), strict=True):
        one.load_state_dict(state)
    losses += steps(accumulator, wrapped, accumulator(loader, skip=6))
    assert_steps_of((model, losses), "tokens and samples", "adamw", WINDOWS, shown=slice(0, 3, 2))  # not of the window in between


def in_shards(model: Any, mesh: Any) -> nn.Module:
    for part in (model.of.net, model):
        fully_shard(part, mesh=mesh["data_parallel"])
    return model


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=needs_sharding_on_cpu)])
@pytest.mark.parametrize("arguments", [{"window": 2}, {"micro_batch": 2}], ids=["windows", "split"])
def test_on_two_ranks_the_terms_of_both_are_counted(arguments: Any, strategy: str) -> None:
    """The second rank has fewer loader batches, and other numbers of micro-batches in each."""
    by_rank = [BATCHES[:6], BATCHES[6:11]]

    def run(fabric: Fabric) -> Any:
        return trained(fabric, "tokens and samples", "adamw", by_rank[fabric.global_rank], loss_of=with_loss, **arguments)

    found = on_two(run, strategy, in_shards, **({"find_unused_parameters": True} if strategy == "ddp" else {}))
    assert_steps_of(found, "tokens and samples", "adamw", windows_of(by_rank, arguments.get("window", 1)))


def test_a_loader_that_writes_into_its_last_batch_is_an_error_where_a_window_is_counted() -> None:
    """Each batch is a view of one memory, as some loaders hand out."""
    memory = default_collate(rows(4, 1))

    class Reusing:
        def __len__(self) -> int:
            return 8

        def __iter__(self) -> Iterator[Any]:
            for seed in range(8):
                for name, value in default_collate(rows(4, seed)).items():
                    memory[name].copy_(value)
                yield memory

    model, wrapped, _, accumulator = set_up(None, "tokens and samples", "sgd", window=4, loss_of=with_loss)
    with pytest.raises(AccumulationError, match="drawn ahead"):
        list(steps(accumulator, wrapped, accumulator(Reusing())))
    assert all(torch.equal(value, Loss("tokens and samples").state_dict()[name]) for name, value in model.state_dict().items())
