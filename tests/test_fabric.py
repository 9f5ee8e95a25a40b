"""Hand-written loops: with the Accumulator, parameters are those of the loop over full batches, with Fabric and without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from sharded import fully_shard, needs_sharding_on_cpu, whole_parameters
from support import OPTIMIZERS, TinyGPT, language_loss, pad, relative_error, sentences
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from lightning_accum.fabric import Accumulator, Tokens

EPOCHS = 2
Trained: TypeAlias = tuple[list[Tensor], list[float]]
"""Parameters at the end, and the loss of each step."""


# --- the same loop for all tests ----------------------------------------------------------------------------------------


def gpt() -> TinyGPT:
    torch.manual_seed(7)
    return TinyGPT().double()


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return language_loss(model(batch["input_ids"]), batch["labels"])


def in_batches(rows: Sequence[Tensor], size: int) -> list[dict[str, Tensor]]:
    return [pad(rows[i : i + size]) for i in range(0, len(rows), size)]


def by_hand(optimizer: str, batches: Sequence[Any], epochs: int = EPOCHS, clip: float | None = None) -> Trained:
    """The reference: a step on each full batch. Returns the model and its losses."""
    model, losses = gpt(), []
    stepping = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(epochs):
        for batch in batches:
            stepping.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            stepping.step()
    return list(whole_parameters(model).values()), losses


def loop(
    fabric: Fabric | None, optimizer: str, loader: Iterable[Any], epochs: int = EPOCHS, clip: float | None = None, **arguments: Any
) -> Trained:
    """The loop with the Accumulator. Returns the model and the losses of its windows."""
    model = wrapped = gpt()
    if fabric is not None:
        wrapped = fabric.setup(model)
    stepping = OPTIMIZERS[optimizer](wrapped.parameters())
    if fabric is not None:
        stepping = fabric.setup_optimizers(stepping)
    accumulator, losses = Accumulator(fabric, wrapped, stepping, log=False, **arguments), []
    for epoch in range(epochs):
        for batch in accumulator(loader, is_last=epoch == epochs - 1):
            accumulator.backward(loss_of(wrapped, batch))
            if accumulator.step(clip_norm=clip):
                losses.append(accumulator.window_loss)
    assert accumulator.optimizer_steps == len(losses)
    return list(whole_parameters(model).values()), losses


class Stream(IterableDataset):
    """Batches without a length."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def assert_same(found: Trained, expected: Trained, tolerance: float = 1e-12) -> None:
    assert relative_error(found[0], expected[0]) < tolerance
    assert found[1] == pytest.approx(expected[1], rel=tolerance)
    assert relative_error(found[0], gpt().parameters()) > 1e-3


def one_process() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)  # not "64-true", which hands outputs out in single precision


WITH_AND_WITHOUT_FABRIC = pytest.mark.parametrize("fabric", [one_process, lambda: None], ids=["Fabric", "plain torch"])


# --- two processes ------------------------------------------------------------------------------------------------------


class _Forked:
    def _configure_launcher(self) -> None:
        self._launcher = _MultiProcessingLauncher(self, start_method="fork")


class ForkedFSDP2(_Forked, ModelParallelStrategy):
    pass


def cut(model: nn.Module, mesh: Any) -> nn.Module:
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh["data_parallel"])
    return model


def on_two(run: Callable[[Fabric], Any], strategy: str = "ddp", **kwargs: Any) -> Any:
    """What ``run`` returns on the first of two ranks."""

    def to_file(fabric: Fabric) -> None:
        found = run(fabric)
        if fabric.global_rank == 0:
            torch.save(found, "found.pt")

    timeout = timedelta(seconds=60)
    if strategy == "ddp":
        chosen = DDPStrategy(start_method="fork", timeout=timeout, **kwargs)
    else:
        chosen = ForkedFSDP2(parallelize_fn=cut, timeout=timeout, data_parallel_size=2, tensor_parallel_size=1)
    Fabric(accelerator="cpu", devices=2, strategy=chosen).launch(to_file)
    return torch.load("found.pt")


ENGINES = pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=needs_sharding_on_cpu)])


@ENGINES
def test_two_ranks_take_the_steps_of_one_process_on_the_full_batch(strategy: str) -> None:
    rows = sentences(41)  # two ranks, windows of two loader batches of 4 rows; the second rank has fewer of them

    def train(fabric: Fabric) -> list[Any]:
        batches, found = in_batches(rows, 4)[fabric.global_rank :: 2], []
        streams: list[Any] = [batches, Stream(batches)]
        for optimizer, loader, arguments in [
            ("sgd", streams[0], {"clip": 0.5}),
            ("adamw", streams[1], {"clip": 0.5}),
            ("sgd", streams[0], {"clip": 0.5, "micro_batch": 3}),
        ]:
            found.append(loop(fabric, optimizer, loader, window=2, **arguments))
        return found

    found = on_two(train, strategy)
    for optimizer, one in zip(("sgd", "adamw", "sgd"), found, strict=True):
        assert_same(one, by_hand(optimizer, in_batches(rows, 16), clip=0.5))


# --- one process --------------------------------------------------------------------------------------------------------


@WITH_AND_WITHOUT_FABRIC
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("has_length", [True, False])
def test_windows_with_tails_take_the_steps_of_full_batches(fabric: Callable[[], Any], optimizer: str, has_length: bool) -> None:
    rows = sentences(53)  # windows of 8 rows, and tails of 5 in micro-batches of 2, 2 and 1
    batches = in_batches(rows, 2)
    found = loop(fabric(), optimizer, batches if has_length else Stream(batches), window=4, clip=0.5)
    assert_same(found, by_hand(optimizer, in_batches(rows, 8), clip=0.5))


@WITH_AND_WITHOUT_FABRIC
def test_split_batches_take_the_steps_of_whole_ones(fabric: Callable[[], Any]) -> None:
    rows = sentences(30)
    expected = by_hand("adamw", in_batches(rows, 8))
    for arguments in ({"micro_batch": 3}, {"micro_batch": Tokens(20)}, {"micro_batch": 3, "loss_of": loss_of}):
        assert_same(loop(fabric(), "adamw", in_batches(rows, 8), **arguments), expected)
    assert_same(loop(fabric(), "adamw", in_batches(rows, 4), window=2, micro_batch=3), expected)


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_windows_of_tokens_end_where_they_have_them(micro_batch: int | None) -> None:
    rows = sentences(24)
    tokens, windows, size = [len(row) - 1 for row in rows], [[]], 30
    step = 2 if micro_batch is None else 1
    for i in range(0, len(rows), step):
        windows[-1] += range(i, i + step)
        if sum(tokens[row] for row in windows[-1]) >= size:
            windows.append([])
    batches = [pad([rows[i] for i in window]) for window in windows if window]
    found = loop(None, "sgd", in_batches(rows, 2), epochs=1, window=Tokens(size), micro_batch=micro_batch)
    assert_same(found, by_hand("sgd", batches, epochs=1))


def test_tails_are_dropped_or_carried_into_the_next_pass() -> None:
    rows = sentences(14)
    whole = by_hand("sgd", in_batches(rows[:12], 6))
    assert_same(loop(None, "sgd", in_batches(rows, 2), window=3, tail="drop"), whole)
    carried = by_hand("sgd", [*in_batches(rows[:12], 6), pad([*rows[12:], *rows[:4]]), pad(rows[4:10]), pad(rows[10:])], epochs=1)
    assert_same(loop(None, "sgd", in_batches(rows, 2), window=3, tail="carry"), carried)


def test_a_window_that_changes_with_the_pass_or_the_step() -> None:
    rows = sentences(12)
    expected = by_hand("sgd", [*in_batches(rows, 4), *in_batches(rows, 6)], epochs=1)
    assert_same(loop(None, "sgd", in_batches(rows, 2), window={0: 2, 1: 3}), expected)
    by_step = by_hand("sgd", [pad(rows[:2]), pad(rows[2:6]), pad(rows[6:12])], epochs=1)
    assert_same(loop(None, "sgd", in_batches(rows, 2), epochs=1, window=lambda step: step + 1), by_step)


def test_gradients_are_added_up_in_a_wider_type() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.zeros_(model.weight)
    accumulator = Accumulator(
        None, model, torch.optim.SGD(model.parameters(), 1.0), window=3, accumulate_dtype=torch.float32, weight="equal", log=False
    )
    for batch in accumulator([torch.full((1, 1), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]):
        accumulator.backward(model(batch).sum())
        accumulator.step()
    assert model.weight.item() == -86  # (256 + 1 + 1) / 3; in bfloat16, 256 + 1 is 256
