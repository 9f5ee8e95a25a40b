"""Compiled modules: exact, and compiled for the first size, once for a dimension that varies, and for the rows of a proof."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import Language, error_of_updates, fit, noted, pad, sentences, train_by_hand
from torch import nn
from torch._dynamo.utils import counters

from lightning_accum import GradientAccumulation, TokenCount, Tokens, UnreadableLossError

ROWS, TEXT = 24, sentences(72)
WHOLE = [pad(TEXT[i : i + ROWS]) for i in range(0, 72, ROWS)]  # batches, each as much as a window
QUARTERS = [pad(TEXT[i : i + ROWS // 4]) for i in range(0, 72, ROWS // 4)]  # the same, in four of different lengths each


class SmallNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(17, 8), nn.Linear(8, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens).tanh())


class Small(Language):  # compiled in a second, not in ten
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        torch.manual_seed(7)
        self.net = SmallNetwork().double()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def with_compiled_network(backend: str = "aot_eager", **kwargs: Any) -> Language:
    module = Small()
    module.net.compile(backend=backend, **kwargs)
    return module


def compiled_whole(backend: str = "aot_eager", **kwargs: Any) -> Any:
    return torch.compile(Small(), backend=backend, **kwargs)


def compilations(module: Any, policy: GradientAccumulation, batches: list[Any], limit: float = 1e-12) -> int:
    """In three epochs, all of them in the first; the updates are those of full batches by hand, uncompiled."""
    looks, by_epoch = noted("on_train_epoch_end", lambda _: counters["stats"]["unique_graphs"])
    fit(module, batches, policy, looks, max_epochs=3)
    module = getattr(module, "_orig_mod", module)
    assert error_of_updates(module, train_by_hand(Small(), WHOLE, 3), Small()) <= limit
    assert by_epoch == by_epoch[:1] * 3
    return by_epoch[0]


WEIGHTS: list[Any] = [(with_compiled_network, "auto"), (with_compiled_network, TokenCount()), (compiled_whole, TokenCount())]


@pytest.mark.some_cases(1, 1)
@pytest.mark.parametrize(("compiled", "weight"), WEIGHTS)
def test_windows_of_batches_of_many_lengths_compile_no_more_than_the_batches_do(compiled: Any, weight: Any) -> None:
    assert 1 <= compilations(compiled(), GradientAccumulation(4, weight=weight), QUARTERS) <= 2  # the first length, then any


@pytest.mark.some_cases(1, 2)
@pytest.mark.parametrize("micro_batch", [5, Tokens(40), "auto"])
@pytest.mark.parametrize(("compiled", "weight"), WEIGHTS[::2])
def test_split_batches_of_many_lengths_are_exact_and_compiled_once_a_kind(compiled: Any, weight: Any, micro_batch: Any) -> None:
    found = compilations(compiled(), GradientAccumulation(micro_batch=micro_batch, weight=weight), WHOLE)
    assert 1 <= found <= 4  # the first size, any length, any rows, and the rows of the proof


@pytest.mark.parametrize("dynamic", [True, False])
def test_dynamic_is_compiled_once_and_fixed_once_for_each_size(dynamic: bool) -> None:
    policy = GradientAccumulation(micro_batch=Tokens(40) if dynamic else 6, trim_padding=dynamic)
    lengths = {batch["labels"].shape[1] for batch in WHOLE}
    assert compilations(with_compiled_network(dynamic=dynamic), policy, WHOLE) == (1 if dynamic else len(lengths))


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("micro_batch", [None, 5])
def test_a_compiled_step_is_exact_by_a_count_that_the_check_adopts_or_needs_an_explicit_one(micro_batch: int | None) -> None:
    window, batches = None if micro_batch else 4, WHOLE if micro_batch else QUARTERS
    fit(module := compiled_whole(), batches, GradientAccumulation(window, micro_batch=micro_batch), max_epochs=3)
    assert error_of_updates(module._orig_mod, train_by_hand(Small(), WHOLE, 3), Small()) <= 1e-12
    with pytest.raises(UnreadableLossError, match="TokenCount"):
        fit(compiled_whole(), batches, GradientAccumulation(window, micro_batch=micro_batch, check=False))
