"""Runs that take turns: in what order they move, what they carry, and how they end."""

from __future__ import annotations

import _thread
import contextvars
import gc
import signal
import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accum.lock_step.thread_state import RandomStreams, carried
from lightning_accum.lock_step.turns import LockStep, WaysPartError

CPU = torch.device("cpu")


def test_turns_go_round_in_the_same_order_each_time() -> None:
    def run(index: int) -> int:
        for place in "ab":
            seen.append((index, place))
            steps.meet(place, lambda place=place: seen.append(("all", place)))
        seen.append((index, "end"))
        return index**2

    for _ in range(3):
        seen, steps = [], LockStep(3)
        assert steps.run(run) == [0, 1, 4]
        of_round = {place: [(0, place), (1, place), (2, place), ("all", place)] for place in "ab"}
        assert seen == [*of_round["a"], *of_round["b"], (0, "end"), (1, "end"), (2, "end")]


@pytest.mark.parametrize("number", [1, 2, 50])
def test_a_run_may_meet_never_or_often(number: int) -> None:
    for meetings in (0, 1, 20):
        steps = LockStep(number)
        joined: list[int] = []

        def run(index: int, steps: Any = steps, joined: Any = joined, meetings: int = meetings) -> None:
            for _ in range(meetings):
                steps.meet("the same place again", lambda: joined.append(1))

        steps.run(run)
        assert len(joined) == meetings
        assert steps.current is None


def test_only_the_run_whose_turn_it_is_moves() -> None:
    moving, most = [0], [0]

    def run(index: int) -> None:
        for _ in range(5):
            moving[0] += 1
            most[0] = max(most[0], moving[0])
            sum(range(10_000))
            moving[0] -= 1
            assert steps.is_in_turn()
            steps.meet("place")

    steps = LockStep(8)
    steps.run(run)
    assert most == [1]
    assert not steps.is_in_turn()


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_exception_in_one_ends_all_with_that_exception_and_its_traceback(failing: int, after: int) -> None:
    ended: list[int] = []

    def the_function_that_fails() -> None:
        raise KeyError("of its own")

    def run(index: int) -> None:
        try:
            for meeting in range(5):
                if index == failing and meeting == after:
                    the_function_that_fails()
                steps.meet("place")
        finally:
            ended.append(index)

    steps = LockStep(3)
    with pytest.raises(KeyError, match="of its own") as raised:
        steps.run(run)
    assert "the_function_that_fails" in "".join(traceback.format_exception(raised.value))
    began = set(range(3)) if after else set(range(failing + 1))
    assert set(ended) == began  # each ran its own clean-up, once
    assert len(ended) == len(began)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("micro-batch")]


def test_an_exception_while_joining_ends_all() -> None:
    def run(index: int) -> None:
        steps.meet("place", lambda: [][0])

    steps = LockStep(3)
    with pytest.raises(IndexError):
        steps.run(run)


def test_a_run_that_swallows_its_end_does_not_hang() -> None:
    def run(index: int) -> None:
        for _ in range(3):
            if index == 2:
                raise ValueError("first")
            with suppress(BaseException):
                steps.meet("place")

    steps = LockStep(3)
    with pytest.raises(ValueError, match="first"):
        steps.run(run)


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """Where tests run in several processes, these ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
@pytest.mark.parametrize("busy", [0, 1])
def test_an_interrupt_from_outside_ends_all(busy: int) -> None:
    ended: list[int] = []

    def run(index: int) -> None:
        try:
            for meeting in range(1000):
                if index == busy and meeting == 3:
                    _thread.interrupt_main()
                    threading.Event().wait(0.05)
                steps.meet("place")
        finally:
            ended.append(index)

    steps = LockStep(3)
    with pytest.raises(KeyboardInterrupt):
        steps.run(run)
    assert sorted(ended) == [0, 1, 2]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("micro-batch")]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (["ab", "ac"], "micro-batch 1 came to c, where micro-batch 0 came to b"),
        (["ab", "a"], "micro-batch 1 had ended, where micro-batch 0 came to b"),
        (["a", "ab"], "micro-batch 1 came to b, where micro-batch 0 had ended"),
        (["ab", "ba"], "micro-batch 1 came to b, where micro-batch 0 came to a"),
        (["", "", "a"], "micro-batch 2 came to a, where micro-batch 0 had ended"),
        (["aab", "aab", "ab"], "micro-batch 2 came to b, where micro-batch 0 came to a"),
    ],
)
def test_ways_that_part_are_an_error_that_names_the_places(places: list[str], message: str) -> None:
    def run(index: int) -> None:
        for place in places[index]:
            steps.meet(place)

    steps = LockStep(len(places))
    with pytest.raises(WaysPartError, match=message):
        steps.run(run)


def test_nothing_is_kept_alive_by_a_failure() -> None:
    kept: list[Any] = []

    class Large:
        pass

    def run(index: int) -> None:
        large = Large()
        kept.append(weakref.ref(large))
        steps.meet("place")
        raise ValueError

    steps = LockStep(2)
    with pytest.raises(ValueError):  # noqa: PT011
        steps.run(run)
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


# --- what a thread does not inherit -----------------------------------------------------------------------------------


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def in_another_thread(around: Any, function: Any) -> Any:
    def run(index: int) -> Any:
        return function()

    return LockStep(1, around).run(run)[0]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_grad_mode_is_carried(is_enabled: bool) -> None:
    with torch.set_grad_enabled(is_enabled):
        assert in_another_thread(carried(CPU), torch.is_grad_enabled) is is_enabled
    with torch.inference_mode(is_enabled):
        assert in_another_thread(carried(CPU), torch.is_inference_mode_enabled) is is_enabled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_carried(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(2, 2), torch.randn(1, 2)
    with torch.autocast("cpu", dtype):
        assert in_another_thread(carried(CPU), lambda: layer(x).dtype) is dtype
    assert in_another_thread(carried(CPU), lambda: layer(x).dtype) is torch.float32


@pytest.mark.skipif(not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="torch tells since 2.8")
def test_hooks_for_saved_tensors_are_carried() -> None:
    packed: list[Any] = []
    x = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        in_another_thread(carried(CPU), lambda: x.exp())
    assert len(packed) == 1


def test_modes_are_carried() -> None:
    with Functions() as functions, Operators() as operators:
        in_another_thread(carried(CPU), lambda: torch.ones(2).add(1))
    assert "add" in functions.seen
    assert any("add" in name for name in operators.seen)
    with torch.device("meta"):
        assert in_another_thread(carried(CPU), lambda: torch.ones(2).device.type) == "meta"


def test_context_variables_and_threads_of_torch_are_carried() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=1)
    token = variable.set(2)
    assert in_another_thread(carried(CPU), variable.get) == 2
    variable.reset(token)
    assert in_another_thread(carried(CPU), torch.get_num_threads) == torch.get_num_threads()


def test_random_numbers_do_not_depend_on_what_the_others_draw() -> None:
    def draw(meetings: tuple[int, int]) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(5)
        streams = RandomStreams(CPU)

        def run(index: int) -> torch.Tensor:
            drawn = []
            for _ in range(4):
                drawn.append(torch.rand(2))
                steps.meet("place")
                if index == 1:
                    torch.rand(meetings[1])
            return torch.cat(drawn)

        steps = LockStep(3, on_turn=streams.switch)
        return steps.run(run), torch.rand(1)

    (first, other, last), after = draw((0, 1))
    again, after_again = draw((0, 7))
    assert torch.equal(first, again[0])
    assert torch.equal(last, again[2])
    assert torch.equal(after, after_again)
    assert len({tuple(stream.tolist()) for stream in (first, other, last)}) == 3
    torch.manual_seed(5)
    assert torch.equal(first, torch.cat([torch.rand(2) for _ in range(4)]))  # the first goes on with what there was
    assert torch.equal(after, torch.rand(1))


def test_where_nothing_is_drawn_random_state_stays() -> None:
    before = torch.get_rng_state()
    steps = LockStep(3, on_turn=RandomStreams(CPU).switch)
    steps.run(lambda index: steps.meet("place"))
    assert torch.equal(torch.get_rng_state(), before)
