"""Compiled modules: exact, and compiled a bounded number of times, not once a micro-batch or window.

``torch.compile`` compiles for the first size that it sees, once for every dimension that turns out to vary (then for any size),
and apart for a size of one. So there is a bound: the first; one for rows and one for columns, if they vary; and one where a
micro-batch has a single row. The two rows on which trimming is tried are another number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import support
import torch
from support import Language, ddp, loader, pad, sentences, train_by_hand, trainer
from torch import nn
from torch._dynamo.utils import counters

from lightning_accum import GradientAccumulation, TokenCount, Tokens, UnreadableLossError

ROWS, WINDOWS = 24, 3
WHOLE = [pad(sentences(ROWS * WINDOWS)[i : i + ROWS]) for i in range(0, ROWS * WINDOWS, ROWS)]
"""Batches, each as much as a window."""
QUARTERS = [pad(sentences(ROWS * WINDOWS)[i : i + ROWS // 4]) for i in range(0, ROWS * WINDOWS, ROWS // 4)]
"""The same, in four of different lengths each."""


class SmallNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(17, 8), nn.Linear(8, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens).tanh())


class Small(Language):
    """Compiled in a second, not in ten."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        torch.manual_seed(7)
        self.net = SmallNetwork().double()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compilations() -> int:
    return counters["stats"]["unique_graphs"]


def with_compiled_network(optimizer: str = "adamw", backend: str = "aot_eager", **kwargs: Any) -> Language:
    module = Small(optimizer)
    module.net.compile(backend=backend, **kwargs)
    return module


def compiled_whole(optimizer: str = "adamw", backend: str = "aot_eager", **kwargs: Any) -> Any:
    return torch.compile(Small(optimizer), backend=backend, **kwargs)


def error_of_updates(module: Any, optimizer: str, epochs: int) -> float:
    """Of what training has changed, against full batches in a hand-written loop that is not compiled."""
    module = getattr(module, "_orig_mod", module)
    return support.error_of_updates(module, train_by_hand(Small(optimizer), WHOLE, epochs), Small(optimizer))


class Compilations(pl.Callback):
    """How often there was something to compile, by epoch."""

    def __init__(self) -> None:
        self.by_epoch: list[int] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.by_epoch.append(compilations())


def fit(module: Any, callback: GradientAccumulation, batches: list[Any], **kwargs: Any) -> list[int]:
    seen = Compilations()
    trainer(callbacks=[callback, seen], max_epochs=3, **kwargs).fit(module, loader(batches))
    return seen.by_epoch


WEIGHTS: list[Any] = [(with_compiled_network, "auto"), (with_compiled_network, TokenCount()), (compiled_whole, TokenCount())]


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(("compiled", "weight"), WEIGHTS)
def test_windows_of_batches_of_many_lengths(compiled: Any, weight: Any) -> None:
    module = compiled()
    by_epoch = fit(module, GradientAccumulation(4, weight=weight), QUARTERS)
    assert error_of_updates(module, "adamw", epochs=3) <= 1e-12
    assert by_epoch == [by_epoch[0]] * 3, "nothing is compiled anew after the first epoch"
    assert 1 <= by_epoch[0] <= 2, "the first length, then any"


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("micro_batch", [5, Tokens(40), "auto"])
@pytest.mark.parametrize(("compiled", "weight"), WEIGHTS[::2])
def test_split_batches_of_many_lengths(compiled: Any, weight: Any, micro_batch: Any) -> None:
    module = compiled("sgd")
    by_epoch = fit(module, GradientAccumulation(micro_batch=micro_batch, weight=weight), WHOLE)
    assert error_of_updates(module, "sgd", epochs=3) <= 1e-12
    assert by_epoch == [by_epoch[0]] * 3, "nothing is compiled anew after the first epoch"
    assert 1 <= by_epoch[0] <= 4, "the first size, any length, any rows, and the two rows of the proof"


def test_dynamic_from_the_start_is_compiled_least() -> None:
    module = with_compiled_network(dynamic=True)
    by_epoch = fit(module, GradientAccumulation(micro_batch=Tokens(40)), WHOLE)
    assert error_of_updates(module, "adamw", epochs=3) <= 1e-12
    assert by_epoch == [1, 1, 1]


def test_fixed_sizes_are_compiled_once() -> None:
    module = with_compiled_network(dynamic=False)
    by_epoch = fit(module, GradientAccumulation(micro_batch=6, trim_padding=False), WHOLE)
    assert error_of_updates(module, "adamw", epochs=3) <= 1e-12
    assert by_epoch == [len({batch["labels"].shape[1] for batch in WHOLE})] * 3


def test_a_window_compiles_no_more_than_its_batches_do() -> None:
    """Against the same batches without accumulation."""
    plain = fit(with_compiled_network(), GradientAccumulation(1), QUARTERS)
    torch._dynamo.reset()
    counters.clear()
    assert fit(with_compiled_network(), GradientAccumulation(4), QUARTERS) == plain


class LogsAndReturnsMore(Small):
    """What is logged inside a compiled step, and returned from it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "tokens": (batch["labels"] != -100).sum(1)}


@pytest.mark.exhaustive
def test_a_compiled_step_that_returns_more() -> None:
    module: Any = torch.compile(LogsAndReturnsMore("sgd"), backend="aot_eager")
    fit(module, GradientAccumulation(micro_batch=5, weight=TokenCount()), WHOLE)
    assert error_of_updates(module, "sgd", epochs=3) <= 1e-12


class Logs(Small):
    @torch.compiler.disable  # without, Lightning 2.6's own `log` cannot be compiled by torch 2.13
    def log(self, *args: Any, **kwargs: Any) -> None:
        super().log(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, batch_size=len(batch["labels"]))
        return loss


@pytest.mark.exhaustive
@pytest.mark.parametrize("micro_batch", [None, 5])
def test_a_compiled_step_that_logs(micro_batch: int | None) -> None:
    """Logging breaks the graph in two; still nothing is compiled anew for every batch."""
    module: Any = torch.compile(Logs("sgd"), backend="aot_eager")
    callback = GradientAccumulation(4 if micro_batch is None else None, micro_batch=micro_batch, weight=TokenCount())
    by_epoch = fit(module, callback, QUARTERS if micro_batch is None else WHOLE)
    assert error_of_updates(module, "sgd", epochs=3) <= 1e-12
    assert by_epoch == [by_epoch[0]] * 3
    assert 1 <= by_epoch[0] <= 8
    assert "loss" in module.trainer.callback_metrics


@pytest.mark.parametrize("micro_batch", [None, 5])
def test_a_compiled_step_needs_an_explicit_weight_and_is_told_so(micro_batch: int | None) -> None:
    callback = GradientAccumulation(4 if micro_batch is None else None, micro_batch=micro_batch)
    with pytest.raises(
        UnreadableLossError, match="training_step is compiled, its graph is hidden; compiling only the network.*TokenCount"
    ):
        fit(compiled_whole(), callback, WHOLE)


class OverRanks(Small):
    """Every rank has its share of the rows."""

    def __init__(self, batches: Any = (), is_compiled: bool = False, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.batches, self.is_compiled = batches, is_compiled

    def configure_model(self) -> None:
        if self.is_compiled:
            self.net.compile(backend="aot_eager")

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        return loader([{key: rows[rank::2] for key, rows in batch.items()} for batch in self.batches])


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("micro_batch", [None, Tokens(40)])
def test_over_ranks(is_whole: bool, micro_batch: Any) -> None:
    module: nn.Module = OverRanks(QUARTERS if micro_batch is None else WHOLE, is_compiled=not is_whole)
    if is_whole:
        module = torch.compile(module, backend="aot_eager")  # type: ignore[assignment]
    window = 4 if micro_batch is None else None
    callback = GradientAccumulation(window, micro_batch=micro_batch, weight=TokenCount() if is_whole else "auto")
    trainer(ddp(), devices=2, callbacks=[callback], max_epochs=2).fit(module)
    assert error_of_updates(module, "adamw", epochs=2) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("compiled", "weight"), WEIGHTS[::2])
def test_with_inductor(compiled: Any, weight: Any) -> None:
    """Generated code adds up in another order, in the type of the module."""
    module = compiled(backend="inductor")
    by_epoch = fit(module, GradientAccumulation(micro_batch=Tokens(40), weight=weight), WHOLE)
    assert error_of_updates(module, "adamw", epochs=3) <= 1e-11
    assert by_epoch == [by_epoch[0]] * 3
    assert 1 <= by_epoch[0] <= 4
