"""Hand-written loops: with the Accumulator, parameters are those of the loop over full batches, with Fabric and without."""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning_utilities.core.rank_zero import rank_zero_only
from sharded import fully_shard, needs_sharding_on_cpu, whole_parameters
from support import OPTIMIZERS, TinyGPT, WrapsAnother, language_loss, pad, relative_error, sentences
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_accum import AccumulationWarning
from lightning_accum.fabric import Accumulator, TokenCount, Tokens
from lightning_accum.failures import RankFailedError

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
    accumulator, losses = Accumulator(fabric, wrapped, stepping, **{"log": False, **arguments}), []
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


# --- checkpoints --------------------------------------------------------------------------------------------------------


def resumed(fabric: Fabric | None, loader: Sequence[Any], **arguments: Any) -> list[Tensor]:
    """Train, be stopped after five loader batches of the second pass, inside a window, and go on in a new model."""
    is_first, path = fabric is None or fabric.global_rank == 0, "state.pt"

    def make() -> tuple[Any, Any, Accumulator]:
        model = gpt() if fabric is None else fabric.setup(gpt())
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        optimizer = optimizer if fabric is None else fabric.setup_optimizers(optimizer)
        return model, optimizer, Accumulator(fabric, model, optimizer, log=False, **arguments)

    model, optimizer, accumulator = make()
    for batch in (batch for _ in range(EPOCHS) for batch in accumulator(loader)):
        accumulator.backward(loss_of(model, batch))
        accumulator.step(clip_norm=0.5)
        if (accumulator.passes, accumulator.loader_batches) == (1, 5):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "accumulator": accumulator.state_dict()}
            if is_first:  # as fabric.save does
                torch.save(state, path)
            break
    if fabric is not None:
        fabric.barrier()
    model, optimizer, accumulator = make()
    state = torch.load(path, weights_only=True)
    for one, name in ((model, "model"), (optimizer, "optimizer"), (accumulator, "accumulator")):
        one.load_state_dict(state[name])
    assert (accumulator.passes, accumulator.loader_batches) == (1, 5)
    for _ in range(accumulator.passes, EPOCHS):
        for batch in accumulator(loader, skip=accumulator.loader_batches):
            accumulator.backward(loss_of(model, batch))
            accumulator.step(clip_norm=0.5)
    return [parameter.detach().clone() for parameter in model.parameters()]


@WITH_AND_WITHOUT_FABRIC
@pytest.mark.parametrize("window", [3, Tokens(40)], ids=["batches", "tokens"])
def test_a_checkpoint_inside_a_window_goes_on_to_the_bit(fabric: Callable[[], Any], window: Any) -> None:
    loader = in_batches(sentences(15), 2)
    expected, _ = loop(fabric(), "adamw", loader, window=window, clip=0.5)
    assert all(map(torch.equal, resumed(fabric(), loader, window=window), expected))


def test_a_checkpoint_inside_a_window_of_two_ranks_goes_on_to_the_bit() -> None:
    def train(fabric: Fabric) -> bool:
        loader = in_batches(sentences(31), 2)[fabric.global_rank :: 2]
        expected, _ = loop(fabric, "adamw", loader, window=3, clip=0.5)
        return all(map(torch.equal, resumed(fabric, loader, window=3), expected))

    assert on_two(train)


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="no state of an Accumulator"):
        accumulator_of(nn.Linear(1, 1)).load_state_dict({"format": 3})


# --- losses that are not there, not finite, or of the whole batch ---------------------------------------------------------


def accumulator_of(model: nn.Module, lr: float = 1.0, **arguments: Any) -> Accumulator:
    return Accumulator(None, model, torch.optim.SGD(model.parameters(), lr), log=False, **arguments)


def scalar() -> nn.Linear:
    """Its gradient is the mean of what it sees."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def train_scalar(batches: Sequence[Any], window: int, **arguments: Any) -> tuple[list[float], Accumulator]:
    """The gradients that were stepped; a batch of NaN or None has no loss."""
    model, gradients = scalar(), []
    accumulator = accumulator_of(model, window=window, **arguments)
    for batch in accumulator(batches):
        before = model.weight.item()
        accumulator.backward(None if batch is None or batch.isnan().all() else model(batch).mean())
        if accumulator.step():
            gradients.append(before - model.weight.item())
    return gradients, accumulator


def test_a_micro_batch_without_a_loss_weighs_nothing() -> None:
    missing = column(math.nan)
    batches = [column(1), None, column(2, 3, 4), missing, column(8), None, missing, missing]
    gradients, accumulator = train_scalar(batches, 2)
    assert gradients == pytest.approx([1, 3, 8], rel=1e-14)
    assert accumulator.optimizer_steps == 3
    assert accumulator.total_weight == 5


def test_what_is_not_finite_is_left_out_or_an_error() -> None:
    batches = [column(1), column(math.inf, 1), column(4, 6, 8)]
    with pytest.warns(UserWarning, match="Loader batch 2 of rank 0"):
        gradients, _ = train_scalar(batches, 3, on_nonfinite="skip")
    assert gradients == [19 / 4]
    with pytest.raises(FloatingPointError, match="Loader batch 2"):
        train_scalar(batches, 3, on_nonfinite="raise")


def test_ranks_without_a_loss_and_with_less_data_take_part_in_the_steps_of_others() -> None:
    of_ranks = [
        [column(1), column(2, 3), column(4), column(5), column(6, 7)],
        [column(10, 11), None, column(math.nan)],
    ]

    def train(fabric: Fabric) -> list[float]:
        found = []
        for loader in (of_ranks[fabric.global_rank], Stream(of_ranks[fabric.global_rank])):
            model = scalar()
            wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 1.0))
            accumulator, before = Accumulator(fabric, wrapped, optimizer, window=2, log=False), 0.0
            for batch in accumulator(loader):
                accumulator.backward(None if batch is None or batch.isnan().all() else wrapped(batch).mean())
                if accumulator.step():
                    found.append(before - model.weight.item())
                    before = model.weight.item()
        return found

    expected = [(1 + 2 + 3 + 10 + 11) / 5, (4 + 5) / 2, (6 + 7) / 2]
    assert on_two(train) == pytest.approx(2 * expected, rel=1e-12)
    assert on_two(train, find_unused_parameters=True) == pytest.approx(2 * expected, rel=1e-12)


SWITCHED_OFF = pytest.mark.parametrize("is_off", [lambda i: i % 2 == 0, lambda i: True], ids=["inside of windows", "always"])


def switching(fabric: Fabric, is_off: Callable[[int], bool]) -> Trained | str:
    """A loop with what is left of Fabric's own recipe for accumulation."""
    model = gpt()
    wrapped = fabric.setup(model)
    optimizer = fabric.setup_optimizers(OPTIMIZERS["adamw"](wrapped.parameters()))
    accumulator, losses = Accumulator(fabric, wrapped, optimizer, 2, log=False), []
    try:
        for index, batch in enumerate(accumulator(in_batches(sentences(24), 4)[fabric.global_rank :: 2])):
            with fabric.no_backward_sync(wrapped, enabled=is_off(index)):
                accumulator.backward(loss_of(wrapped, batch))
            if accumulator.step():
                losses.append(accumulator.window_loss)
    except RuntimeError as error:
        return f"{error} {accumulator.optimizer_steps} steps"
    return list(whole_parameters(model).values()), losses


@SWITCHED_OFF
def test_a_loop_that_still_switches_the_reduction_off_is_an_error_before_a_step(is_off: Callable[[int], bool]) -> None:
    found = on_two(lambda fabric: switching(fabric, is_off))
    assert "Leave fabric.no_backward_sync(...)" in found
    assert found.endswith(" 0 steps")


@needs_sharding_on_cpu
@SWITCHED_OFF
def test_a_loop_that_still_switches_the_reduction_of_shards_off_takes_the_steps_of_full_batches(
    is_off: Callable[[int], bool],
) -> None:
    rows = sentences(24)
    found = on_two(lambda fabric: switching(fabric, is_off), "fsdp2")
    assert_same(found, by_hand("adamw", [pad(rows[:16]), pad(rows[16:])], epochs=1))


def test_a_loader_that_fails_on_one_rank_ends_all() -> None:
    def train(fabric: Fabric) -> str:
        def failing() -> Iterator[Tensor]:
            yield column(1)
            if fabric.global_rank == 1:
                raise KeyError("no such file")
            yield column(2)

        model = scalar()
        wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 1.0))
        accumulator = Accumulator(fabric, wrapped, optimizer, window=2, log=False)
        try:
            for batch in accumulator(failing()):
                accumulator.backward(wrapped(batch).mean())
                accumulator.step()
        except (KeyError, RankFailedError) as error:
            return str(error)
        return ""

    assert "loader of rank 1 failed, with KeyError: 'no such file'" in on_two(train)


class Towers(nn.Module):
    """Two encoders whose loss compares every row with every other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        self.right = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = F.normalize(self.left(batch[0]), dim=1) @ F.normalize(self.right(batch[1]), dim=1).T * 5
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


@WITH_AND_WITHOUT_FABRIC
def test_row_wise_towers_have_the_contrastive_loss_of_the_whole_batch(fabric: Callable[[], Any]) -> None:
    torch.manual_seed(5)
    batches = [(torch.randn(n, 6).double(), torch.randn(n, 5).double()) for n in (8, 8, 5)]
    expected, model, seen = Towers(), Towers(), set()
    optimizer = OPTIMIZERS["adamw"](expected.parameters())
    for batch in batches:
        optimizer.zero_grad()
        expected(batch).backward()
        optimizer.step()
    chosen, optimizer, wrapped = fabric(), OPTIMIZERS["adamw"](model.parameters()), model
    if chosen is not None:
        wrapped, optimizer = chosen.setup(model, optimizer)
    accumulator = Accumulator(chosen, wrapped, optimizer, micro_batch=3, row_wise=["left", "right"], log=False)
    model.left[0].register_forward_hook(lambda layer, arguments, output: seen.add(len(output)))
    for batch in accumulator(batches):
        accumulator.backward(wrapped(batch))
        assert accumulator.step()
    assert relative_error(model.parameters(), expected.parameters()) < 1e-12
    assert max(seen) == 3


# --- precision ----------------------------------------------------------------------------------------------------------


def test_a_step_that_a_grad_scaler_leaves_out_is_none_and_clipping_is_unscaled() -> None:
    precision = FabricMixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
    fabric = Fabric(accelerator="cpu", devices=1, plugins=precision)
    torch.manual_seed(2)
    model = nn.Linear(4, 1)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accumulator, stepped, norms = Accumulator(fabric, wrapped, optimizer, window=2, log=False), [], []
    batches = [(torch.randn(n, 4), torch.full((n, 1), 3.0)) for n in (2, 3)]
    for inputs, target in accumulator([*batches, (1e4 * torch.ones(1, 4), torch.full((1, 1), -1e4)), batches[0]]):
        accumulator.backward(F.mse_loss(wrapped(inputs), target))
        stepped.append(accumulator.step(clip_norm=1.0))
        norms.append(accumulator.gradient_norm)
    assert stepped == [False, True, False, False]
    assert accumulator.optimizer_steps == 1
    inputs, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
    reference = nn.Linear(4, 1)
    reference.load_state_dict(dict(zip(("weight", "bias"), start, strict=True)))
    F.mse_loss(reference(inputs), target).backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    assert norms[1].item() == pytest.approx(norm.item(), rel=5e-3)  # float16 has 10 bits
    moved = [before - now for before, now in zip(start, model.parameters(), strict=True)]
    assert relative_error(moved, [parameter.grad for parameter in reference.parameters()]) < 5e-3


# --- loops that are not right -------------------------------------------------------------------------------------------


def misused(body: Callable[[Accumulator, nn.Module, Any, Tensor, int], None], **arguments: Any) -> None:
    """Run a loop with this body."""
    model = scalar()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    accumulator = Accumulator(None, model, optimizer, log=False, **{"window": 2, **arguments})
    for number, batch in enumerate(accumulator([column(1, 2), column(3), column(4), column(5)])):
        body(accumulator, model, optimizer, batch, number)


def test_a_micro_batch_that_is_skipped_without_a_word_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"without accumulator.backward\(loss\)"):
        misused(lambda accumulator, model, optimizer, batch, number: None)
    with pytest.raises(RuntimeError, match=r"without accumulator.backward\(loss\)"):
        misused(lambda accumulator, model, optimizer, batch, number: model(batch).mean().backward())


def test_a_window_whose_step_is_forgotten_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"accumulator.step\(\) was not called"):
        misused(lambda accumulator, model, optimizer, batch, number: accumulator.backward(model(batch).mean()))


def test_a_step_before_or_after_its_place_is_an_error() -> None:
    def twice(accumulator: Accumulator, model: nn.Module, optimizer: Any, batch: Tensor, number: int) -> None:
        accumulator.backward(model(batch).mean())
        accumulator.step()
        accumulator.step()

    with pytest.raises(RuntimeError, match="before accumulator.backward"):
        misused(lambda accumulator, model, optimizer, batch, number: accumulator.step())
    with pytest.raises(RuntimeError, match="twice"):
        misused(twice)
    for method, arguments in (("step", ()), ("backward", (None,))):
        with pytest.raises(RuntimeError, match="outside of the loop"):
            getattr(accumulator_of(scalar()), method)(*arguments)


def test_two_backwards_in_a_micro_batch_are_an_error() -> None:
    def twice(accumulator: Accumulator, model: nn.Module, optimizer: Any, batch: Tensor, number: int) -> None:
        accumulator.backward(model(batch).mean())
        accumulator.backward(model(batch).mean())

    with pytest.raises(RuntimeError, match="loss_a \\+ loss_b"):
        misused(twice)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_loop_that_still_clears_its_gradients_is_an_error(set_to_none: bool) -> None:
    def clearing(accumulator: Accumulator, model: nn.Module, optimizer: Any, batch: Tensor, number: int) -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        accumulator.backward(model(batch).mean())
        accumulator.step()

    with pytest.raises(RuntimeError, match=r"Leave optimizer.zero_grad\(\)"):
        misused(clearing)


def test_a_loop_that_still_clips_or_steps_by_itself_is_an_error() -> None:
    def clipping(accumulator: Accumulator, model: nn.Module, optimizer: Any, batch: Tensor, number: int) -> None:
        accumulator.backward(model(batch).mean())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        accumulator.step()

    def stepping(accumulator: Accumulator, model: nn.Module, optimizer: Any, batch: Tensor, number: int) -> None:
        accumulator.backward(model(batch).mean())
        optimizer.step()

    with pytest.raises(RuntimeError, match="clipping"):
        misused(clipping)
    with pytest.raises(RuntimeError, match=r"Leave optimizer.step\(\) out"):
        misused(stepping)


@pytest.mark.parametrize("divide", [lambda loss: loss / 2, lambda loss: loss * (1 / 2)], ids=["/ 2", "* (1 / 2)"])
def test_a_loop_that_still_divides_its_loss_is_warned(divide: Callable[[Tensor], Tensor]) -> None:
    def dividing(accumulator: Accumulator, model: nn.Module, optimizer: Any, batch: Tensor, number: int) -> None:
        accumulator.backward(divide(model(batch).mean()))
        accumulator.step()

    with pytest.warns(UserWarning, match="divided by 2, which is the size of the window"):
        misused(dividing)


def with_a_penalty_apart(window: int) -> None:
    """A loop with a backward of its own for a loss of one parameter, the last."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    accumulator = Accumulator(None, model, torch.optim.SGD(model.parameters(), lr=0.1), window, log=False)
    for batch in accumulator([torch.ones(3, 2)] * 2):
        model[1].weight.square().sum().backward()
        accumulator.backward(model(batch).mean())
        accumulator.step()


def test_a_backward_of_another_loss_inside_of_a_window_is_an_error_whatever_parameter_it_reaches() -> None:
    with pytest.raises(RuntimeError, match="backward calls of other losses"):
        with_a_penalty_apart(window=2)


def test_a_backward_of_another_loss_before_that_of_a_window_of_one_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="gradients that accumulator.backward did not make"):
        with_a_penalty_apart(window=1)


def clearing_only(model: nn.Module, accumulator: Accumulator, cleared: nn.Module) -> None:
    """A loop that clears a part of the model inside of its second window."""
    for number, batch in enumerate(accumulator([torch.ones(3, 2)] * 4)):
        accumulator.backward(model(batch).mean())
        accumulator.step()
        if number == 2:
            cleared.zero_grad()


def test_gradients_of_parameters_that_are_trained_later_are_watched_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    accumulator = Accumulator(None, model, torch.optim.SGD(model.parameters(), lr=0.1), window=2, log=False)
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"Leave optimizer.zero_grad\(\)"):
        clearing_only(model, accumulator, model[0])

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(None, model, optimizer, window=2, log=False)
    model[0] = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    with pytest.raises(RuntimeError, match=r"Leave optimizer.zero_grad\(\)"):
        clearing_only(model, accumulator, model[0])


def test_a_loss_that_a_grad_scaler_of_the_loop_has_scaled_is_warned_of() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def scaling(accumulator: Accumulator, model: nn.Module, optimizer: Any, batch: Tensor, number: int) -> None:
        accumulator.backward(scaler.scale(model(batch).mean()))
        accumulator.step()

    with pytest.warns(AccumulationWarning, match=r"multiplied by 65536, as by GradScaler.scale\(loss\)"):
        misused(scaling)


def hooked(register: str) -> nn.Module:
    model = scalar()
    getattr(model.weight, register)(lambda tensor: None)
    return model


def test_hooks_of_parameters_that_see_each_micro_batch_are_warned_of() -> None:
    with pytest.warns(AccumulationWarning, match="weight: a hook of this parameter runs in every micro-batch"):
        accumulator_of(hooked("register_post_accumulate_grad_hook"), window=2)
    with pytest.warns(AccumulationWarning, match="weight: a hook of this parameter runs in every micro-batch"):
        accumulator_of(hooked("register_hook"), window=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AccumulationWarning)
        accumulator_of(hooked("register_hook"), window=2, loss_of=lambda model, batch: model(batch).mean())  # the check runs them
        accumulator_of(hooked("register_hook"), window=1)


def test_warnings_of_a_loop_in_plain_torch_need_no_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(rank_zero_only, "rank")  # importing Lightning sets it
    with pytest.warns(AccumulationWarning, match="a hook of this parameter"):
        accumulator_of(hooked("register_post_accumulate_grad_hook"), window=2)


def test_a_data_loader_without_a_length_is_drawn_from() -> None:
    rows = sentences(7)
    loader = DataLoader(Stream(in_batches(rows, 2)), batch_size=None)
    assert_same(loop(None, "adamw", loader, window=2), by_hand("adamw", in_batches(rows, 4)))


def test_a_loader_that_writes_its_next_batch_into_the_last_is_an_error() -> None:
    class OneBuffer(IterableDataset):
        def __iter__(self) -> Iterator[Tensor]:
            rows = torch.empty(2, 1)
            for number in range(4):
                yield rows.fill_(number)

    accumulator = accumulator_of(scalar(), window=2)
    with pytest.raises(RuntimeError, match="into the tensors of the one before"):
        next(iter(accumulator(OneBuffer())))


def test_a_loss_that_sees_the_whole_batch_needs_no_check_and_no_warning_of_layers_that_do() -> None:
    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.norm = nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4)

        def forward(self, rows: Tensor) -> Tensor:
            return self.norm(self.encoder(rows))

    def contrastive(model: Any, rows: Tensor) -> Tensor:
        embeddings = F.normalize(model(rows))
        return F.cross_entropy(embeddings @ embeddings.T, torch.arange(len(rows)))

    torch.manual_seed(3)
    batches, models = [torch.randn(n, 3, dtype=torch.float64) for n in (7, 4, 9)], [Contrastive().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arguments = {"micro_batch": 2, "row_wise": "encoder", "loss_of": contrastive, "log": False}
        accumulator = Accumulator(None, models[0], optimizers[0], **arguments)
        for batch in accumulator(batches):
            accumulator.backward(contrastive(models[0], batch))
            accumulator.step()
    for batch in batches:
        optimizers[1].zero_grad()
        contrastive(models[1], batch).backward()
        optimizers[1].step()
    assert relative_error(models[0].parameters(), models[1].parameters()) < 1e-12


def test_a_backward_that_failed_leaves_no_gradient_that_is_trained_on() -> None:
    def failing(accumulator: Accumulator, model: nn.Module, optimizer: Any, batch: Tensor, number: int) -> None:
        loss = model(batch).mean()
        if number == 1:
            loss.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                accumulator.backward(loss)
            with pytest.raises(RuntimeError, match=r"accumulator.discard\(\)"):
                accumulator.step()
            accumulator.discard()
            accumulator.backward(None)
        else:
            accumulator.backward(loss)
        accumulator.step()

    misused(failing)


def test_a_pass_that_is_broken_off_goes_on_in_the_next() -> None:
    model = scalar()
    accumulator = accumulator_of(model, window=4)
    batches, gradients = [column(1), column(2), column(4), column(6, 8)], []
    for stop in (2, 4):
        for number, batch in enumerate(accumulator(batches, skip=accumulator.loader_batches), 3 - stop // 2):
            accumulator.backward(model(batch).mean())
            if accumulator.step():
                gradients.append(-model.weight.item())
            if number == stop:
                break
    assert gradients == [(1 + 2 + 4 + 6 + 8) / 5]


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_a_loader_batch_that_a_pass_is_broken_off_at_is_in_no_window(micro_batch: int | None) -> None:
    model, weights = scalar(), []
    accumulator = accumulator_of(model, window=3, micro_batch=micro_batch)
    batches = [column(1), column(2, 3), column(4), column(6, 8), column(5)]
    for stop in (3, 5):
        for batch in accumulator(batches, skip=accumulator.loader_batches):
            if accumulator.loader_batches == stop - 2:
                break  # before its backward
            accumulator.backward(model(batch).mean())
            if accumulator.step():
                weights.append(accumulator.window_weight)
    assert (weights, accumulator.loader_batches) == ([4.0], 3)
    assert model.weight.item() == -(1 + 2 + 3 + 4) / 4


@pytest.mark.parametrize("tail", ["step", "drop", "carry"])
@pytest.mark.parametrize("is_step_left_out", [False, True], ids=["", "step only where a window ends"])
def test_between_passes_no_loader_batch_of_one_is_done(tail: str, is_step_left_out: bool) -> None:
    model = scalar()
    accumulator = accumulator_of(model, window=2, tail=tail)
    seen, batches = [], [column(1), column(2), column(4), column(6)]
    for epoch in range(3):
        assert (accumulator.passes, accumulator.loader_batches) == (epoch, 0)
        for number, batch in enumerate(accumulator(batches, skip=accumulator.loader_batches)):
            assert accumulator.loader_batches == number
            seen.append(number)
            accumulator.backward(model(batch).mean())
            if number % 2 or not is_step_left_out:
                accumulator.step()
    assert (accumulator.passes, accumulator.loader_batches, accumulator.optimizer_steps) == (3, 0, 6)
    assert seen == [0, 1, 2, 3] * 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"micro_batch": "auto"}, "cannot run your loop again"),
        ({"micro_batch": "offload"}, "save_on_cpu"),
        ({"micro_batch": 2, "row_wise": "auto"}, "name the submodules"),
        ({"weight": [TokenCount(), TokenCount()]}, "Give one weight"),
        ({"tail": "keep"}, "tail='keep'"),
        ({"window": 0}, "window=0"),
        ({"trim_padding": "lengths"}, "set micro_batch= too"),
        ({"trim_padding": "lengths", "micro_batch": 2}, "loss_of="),
        ({"row_wise": "encoder", "micro_batch": 2}, "no submodule of that name"),
    ],
)
def test_what_a_hand_written_loop_cannot_have_is_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        accumulator_of(nn.Linear(1, 1), **arguments)


def test_models_and_optimizers_that_do_not_belong_together_are_refused() -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    with pytest.raises(ValueError, match="none of the parameters"):
        Accumulator(None, model, torch.optim.SGD(other.parameters(), 1.0))
    with pytest.raises(ValueError, match=r"fabric.setup\(model, optimizer\) first"):
        Accumulator(one_process(), model, torch.optim.SGD(model.parameters(), 1.0))
    with pytest.raises(TypeError, match="one optimizer, but got a list"):
        Accumulator(None, nn.Linear(1, 1), [])
    with pytest.raises(ValueError, match="LBFGS"):
        Accumulator(None, model, torch.optim.LBFGS(model.parameters()))


def test_a_loader_that_gives_less_than_its_length_is_an_error() -> None:
    class Short(list):
        def __len__(self) -> int:
            return 9

    with pytest.raises(RuntimeError, match="fewer batches than its length of 9"):
        train_scalar(Short([column(1), column(2), column(3)]), 2)


@pytest.mark.parametrize(
    ("losses", "arguments", "words"),
    [
        (["squeeze"], {}, "the loss function must return a loss of one number"),
        (["sum", "mean"], {}, "Return one kind of loss from the loss function"),
        (["sum", "sum"], {"window": Tokens(9)}, "Return a mean from the loss function"),
        (["sum", "sum"], {"window": Tokens(9), "loss_of": lambda model, batch: model(batch).sum()}, "Return a mean from loss_of"),
        (["mean"], {"on_nonfinite": "raise"}, r'Accumulator\(on_nonfinite="skip"\) trains on'),
        (["mean"], {"micro_batch": 4}, r"Accumulator\(split=\.\.\.\)"),
    ],
)
def test_messages_have_the_names_of_the_loop(losses: list[str], arguments: dict[str, Any], words: str) -> None:
    values: Any = math.nan if "on_nonfinite" in arguments else 1.0
    model = scalar()
    accumulator = accumulator_of(model, **{"window": 2, "check": False, **arguments})
    batches = [object() if "micro_batch" in arguments else column(values, 2.0) for _ in losses]

    def run() -> None:
        for batch, loss in zip(accumulator(batches), losses, strict=False):
            accumulator.backward(getattr(model(batch), loss)())
            accumulator.step()

    with pytest.raises((ValueError, TypeError, FloatingPointError), match=words) as caught:
        run()
    assert not {"GradientAccumulation", "training_step"} & set(re.findall(r"\w+", str(caught.value)))


def test_errors_of_the_users_code_stay_as_they_are() -> None:
    def weight(batch: Any) -> float:
        raise ValueError("training_step has no GradientAccumulation here")

    model = scalar()
    accumulator = accumulator_of(model, window=2, weight=weight)
    for batch in accumulator([column(1)]):
        with pytest.raises(ValueError, match="^training_step has no GradientAccumulation here$"):
            accumulator.backward(model(batch).mean())
        accumulator.discard()
        break


def test_what_is_left_out_is_a_warning_and_then_a_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = scalar(), [column(1), column(math.nan), column(2), column(math.inf)]
    accumulator = accumulator_of(model, window=2, on_nonfinite="skip")
    logger = logging.getLogger(".".join(("lightning", "fabric", "accumulation")))  # the same with either package
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logger, "level", logging.INFO)
    monkeypatch.setattr(logger, "handle", logged.append)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for batch in accumulator(batches):
            accumulator.backward(model(batch).mean())
            accumulator.step()
    assert [warning.category for warning in warned] == [AccumulationWarning]
    assert [str(warning.message) for warning in warned] == [
        "Loader batch 2 of rank 0, counted from 1, is left out, as it is not finite: its loss is nan. Others may follow;"
        " `accumulator.skipped_micro_batches` counts them."
    ]
    assert [record.getMessage() for record in logged] == [
        "Loader batch 4 of rank 0, counted from 1, is left out: its loss is -inf."
    ]
    assert capsys.readouterr().out == ""
    assert accumulator.skipped_micro_batches == 2


def test_the_start_line_says_what_was_understood(capsys: pytest.CaptureFixture[str]) -> None:
    model = gpt()
    accumulator = Accumulator(None, model, torch.optim.SGD(model.parameters(), 0.1), window=2)
    for batch in accumulator(in_batches(sentences(4), 2)):
        accumulator.backward(loss_of(model, batch))
        accumulator.step()
    line = capsys.readouterr().out
    assert line.startswith(
        "Accumulator: a window is 2 loader batches, 4 samples with loader batches like the first (2); weight: cross"
    )
    assert "not checked: pass loss_of=" in line
    assert line.count("\n") == 1


def test_an_accumulator_that_was_left_in_its_loop_does_not_watch_the_optimizer_of_the_next() -> None:
    model = scalar()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    left = Accumulator(None, model, optimizer, window=2, log=False)
    suspended = left([column(1), column(2)])
    next(suspended)
    accumulator = Accumulator(None, model, optimizer, log=False)
    for batch in accumulator([column(1)]):
        with pytest.raises(TypeError, match="found float"):
            accumulator.backward(1.0)
        accumulator.backward(model(batch).mean())
        assert accumulator.step()


# --- the check of the first batch ---------------------------------------------------------------------------------------


@WITH_AND_WITHOUT_FABRIC
def test_with_the_loss_as_a_function_the_first_batch_is_checked(
    fabric: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = sentences(24)
    for arguments, batches in (({"window": 2}, in_batches(rows, 4)), ({"micro_batch": 3}, in_batches(rows, 8))):
        found = loop(fabric(), "adamw", batches, log=True, loss_of=loss_of, **arguments)
        assert "; checked: adds up to " in capsys.readouterr().out
        assert_same(found, by_hand("adamw", in_batches(rows, 8)))


def test_a_loss_that_does_not_add_up_is_an_error_before_the_first_step() -> None:
    torch.manual_seed(5)
    batches, model = [(torch.randn(8, 6).double(), torch.randn(8, 5).double()) for _ in range(4)], Towers()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    accumulator = accumulator_of(model, window=2, loss_of=lambda model, batch: model(batch))
    with pytest.raises(ValueError, match=r"do not add up.*Accumulator\(micro_batch=\.\.\., row_wise="):
        next(iter(accumulator(batches)))
    assert all(map(torch.equal, model.parameters(), before))
    loose = accumulator_of(Towers(), window=2, loss_of=lambda model, batch: model(batch), check=False)
    assert next(iter(loose(batches))) is batches[0]


@ENGINES
def test_ranks_check_their_first_batches_together(strategy: str) -> None:
    rows = sentences(41)

    def train(fabric: Fabric) -> Trained:
        batches = in_batches(rows, 4)[fabric.global_rank :: 2]
        return loop(fabric, "adamw", batches, window=2, loss_of=loss_of)

    assert_same(on_two(train, strategy), by_hand("adamw", in_batches(rows, 16)))


def test_optimizer_that_wraps_another_without_being_one_itself() -> None:
    model, reference = gpt(), gpt()
    wraps, stepping = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference))
    batches = in_batches(sentences(16), 4)
    accumulator = Accumulator(None, model, WrapsAnother(wraps), window=1, micro_batch=2, log=False)
    for batch in accumulator(batches):
        accumulator.backward(loss_of(model, batch))
        accumulator.step()
    for batch in batches:
        stepping.zero_grad()
        loss_of(reference, batch).backward()
        stepping.step()
    assert relative_error(model.parameters(), reference.parameters()) <= 1e-12


# --- micro-batches that bring in the same as the one before them -----------------------------------------------------------


class TwoHeads(nn.Module):
    """One in double precision, one in half."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.exact, self.rounded = nn.Linear(3, 2).double(), nn.Linear(3, 2).bfloat16()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.exact(inputs) if inputs.dtype == torch.float64 else self.rounded(inputs)


@pytest.mark.parametrize("begins_in_half", [False, True])
def test_windows_of_equal_micro_batches_between_windows_of_larger_ones(begins_in_half: bool) -> None:
    sizes = [[257, 257, 257], [1024, 1024, 1024], [257, 257, 257], [257, 1024, 1024], [4096, 4096, 4096], [257, 257, 257]]
    generator = torch.Generator().manual_seed(1)
    windows = [[torch.randn(rows, 3, generator=generator, dtype=torch.float64) for rows in window] for window in sizes]
    if begins_in_half:  # what scales a loss there, 514 / 512, is rounded
        windows = [[window[0].bfloat16(), *window[1:]] for window in windows]
    model, reference = TwoHeads(), TwoHeads()
    accumulator = Accumulator(None, model, torch.optim.SGD(model.parameters(), lr=0.1), window=3, log=False)
    for batch in accumulator([batch for window in windows for batch in window]):
        accumulator.backward(F.mse_loss(model(batch), torch.ones_like(batch[:, :2])))
        accumulator.step()
    assert accumulator.optimizer_steps == len(windows)
    stepping = torch.optim.SGD(reference.exact.parameters(), lr=0.1)
    for window in windows:
        stepping.zero_grad()
        batch = torch.cat([batch for batch in window if batch.dtype == torch.float64])
        ((reference(batch) - 1).square().sum() / (2 * sum(map(len, window)))).backward()
        stepping.step()
    for own, expected in zip(model.exact.parameters(), reference.exact.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-14, atol=1e-14)
