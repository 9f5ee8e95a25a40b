"""`verify` reads data of every kind, says what is wrong with it, and reports in a command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from support import Language, Scalar, command, loader, pad, sentences, x
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_accum import AccumulationError, Tokens, verify

# --- data ----------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.arange(number + 1, dtype=torch.float64) + number + 0.5 for number in range(6)])


LOADERS: dict[str, Any] = {
    "a loader": lambda: loader([x(1), x(2, 3), x(4)]),
    "a loader without a length": lambda: DataLoader(Stream(), batch_size=None),
    "an iterator": lambda: iter([x(1), x(2, 3), x(4)]),
    "a loader that yields None": lambda: loader([x(1), None, x(2, 3), x(4)]),
    "several loaders": lambda: {"a": loader([x(1), x(2)]), "b": loader([x(3), x(4)])},
    "a batch, which is cut": lambda: x(1, 2, 3, 4, 5, 6, 7),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_the_first_batches_of_any_data_are_the_window(kind: str) -> None:
    class Either(Scalar):
        def loss(self, batch):
            return super().loss(batch["a"] if isinstance(batch, dict) else batch)

    assert verify(Either(), LOADERS[kind](), window=2)


def test_windows_of_split_batches() -> None:
    rows = sentences(12)
    for size in (2, Tokens(24)):
        assert verify(Language(), [pad(rows[:6]), pad(rows[6:])], window=2, micro_batch=size)


class Bags:
    """Sets of numbers of different sizes, which are collated end to end in an object of their own."""

    def __init__(self, values: Any) -> None:
        self.values = values if isinstance(values, Tensor) else torch.cat(values)


class OfBags(Scalar):
    def __init__(self) -> None:
        super().__init__()
        self.w.data.fill_(2.0)

    def training_step(self, batch, batch_idx):
        return (self.w * batch.values).mean()


def test_batches_of_a_class_of_their_own_are_joined_and_split_by_functions() -> None:
    bags = [Bags(x(1)), Bags(x(2, 3))]
    with pytest.raises(AccumulationError, match="join="):
        verify(OfBags(), iter(bags), window=2)
    assert verify(OfBags(), iter(bags), window=2, join=lambda bags: Bags([bag.values for bag in bags]))
    assert verify(OfBags(), Bags(x(1, 2, 3)), micro_batch=2, split=lambda bag, size: [Bags(v) for v in bag.values.split(size)])


# --- bad input -----------------------------------------------------------------------------------------------------------


class Streaming(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.streams = {"train": iter([1, 2, 3])}


class Lazy(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(2)


class Untrained(BoringModel):
    def training_step(self, batch, batch_idx):
        return (self.layer(batch) * 0).mean()


class Single(BoringModel):
    def training_step(self, batch, batch_idx):
        return (self.layer(batch).double() @ torch.ones(2, 1, dtype=torch.float32)).mean()


class NoLoss(BoringModel):
    def training_step(self, batch, batch_idx):
        return None


BATCH, SPLIT = torch.randn(8, 32), {"micro_batch": 2}
WRONG: dict[str, Any] = {
    "nothing to compare": (BoringModel, BATCH, {}, "micro_batch="),
    "a window of one": (BoringModel, BATCH, {"window": 1}, ""),
    "a window of tokens": (BoringModel, BATCH, {"window": Tokens(8)}, "window"),
    "auto": (BoringModel, BATCH, {"micro_batch": "auto"}, "micro_batch"),
    "the whole batch": (BoringModel, BATCH, {"micro_batch": 8}, "micro_batch"),
    "a batch that is too small": (BoringModel, BATCH[:2], {"window": 3}, "2 rows"),
    "too few batches": (BoringModel, iter([BATCH]), {"window": 3}, "3 batches"),
    "lengths without a mask": (BoringModel, iter([torch.zeros(2, 3), torch.zeros(2, 4)]), {"window": 2}, "join="),
    "other parts": (BoringModel, iter([{"x": torch.zeros(2, 3)}, {"y": torch.zeros(2, 3)}]), {"window": 2}, "join="),
    "manual optimization": (ManualOptimBoringModel, BATCH, SPLIT, "automatic_optimization"),
    "a module with an iterator": (Streaming, BATCH, SPLIT, "streams"),
    "a module without shapes": (Lazy, BATCH, SPLIT, "layer"),
    "a loss that depends on nothing": (Untrained, BATCH, SPLIT, "gradient"),
    "a module of one type": (Single, BATCH, SPLIT, "precision="),
    "no module": (lambda: nn.Linear(2, 2), BATCH, SPLIT, "LightningModule"),
    "no data": (pl.LightningModule, None, {"window": 2}, "data="),
    "an argument of the policy": (BoringModel, BATCH, {**SPLIT, "weight": "auo"}, "weight"),
    "a gradient that is not finite": (BoringModel, BATCH / 0, SPLIT, "finite"),
    "no loss": (NoLoss, BATCH, SPLIT, "training_step"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_verified_is_an_error_that_names_it(name: str) -> None:
    make, data, how, named = WRONG[name]
    with pytest.raises(AccumulationError, match=named):
        verify(make(), data, **how)


def test_arguments_that_do_not_exist_are_refused() -> None:
    with pytest.raises(TypeError, match="wieght"):
        verify(BoringModel(), BATCH, micro_batch=2, wieght="auto")


# --- the command ---------------------------------------------------------------------------------------------------------

PROJECT = """
import torch
from lightning.pytorch.demos.boring_classes import BoringModel as Good

class Bad(Good):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] * (1 + batch_idx)

def made():
    return Good()

batch = torch.randn(8, 32)
bags = iter([{"x": torch.randn(2, 32)}, {"y": torch.randn(3, 32)}])
"""
DATA = ["--data", "project:batch"]
COMMANDS: list[tuple[str, int, str]] = [
    ("project:Good --data project:batch --micro-batch 4", 0, "Equal"),
    ("project:Good --window 4", 0, "Equal"),
    ("project:made --data project:batch --micro-batch 4 --precision 32-true", 0, "float32"),
    ("project:Bad --data project:batch --window 2", 1, "batch_idx"),
    ("project:Good --data project:batch --micro-batch 8", 1, "micro_batch"),
    ("project:Good --window 2 --data project:bags", 1, "join"),
    ("project:Good --data project:batch", 1, "micro_batch"),
    ("project:Good --micro-batch 0", 2, "--micro-batch"),
    ("project:Gone --window 2", 2, "Gone"),
    ("projekt:Good --window 2", 2, "projekt"),
    ("project --window 2", 2, "module:name"),
    ("", 2, "MODULE"),
]


@pytest.mark.parametrize(("arguments", "status", "text"), COMMANDS)
def test_exit_status_is_0_only_where_equality_holds(arguments: str, status: int, text: str, capsys: Any, monkeypatch: Any) -> None:
    Path("project.py").write_text(PROJECT)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "project", raising=False)
    assert command(monkeypatch, "verify", *arguments.split()) == status
    captured = capsys.readouterr()
    assert text in captured.out + captured.err
    monkeypatch.delitem(sys.modules, "project", raising=False)


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(monkeypatch, "--version") == 0
    assert version("lightning-accum") in capsys.readouterr().out
