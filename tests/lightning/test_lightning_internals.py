"""What this package relies on inside Lightning, one by one: if a release moves it, this says what, before wrong numbers do."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.strategies import Strategy
from support import Scalar, fit, x

import lightning_accum

seams = import_module("lightning_accum.trainer.seams")


def subclasses(kind: type) -> Iterator[type]:
    for derived in kind.__subclasses__():
        yield derived
        yield from subclasses(derived)


def test_everything_is_as_it_was_read() -> None:
    assert seams.changed() == []


def test_every_method_that_is_replaced_is_in_the_table() -> None:
    rows = {(seam.owner.rpartition(".")[2], seam.name) for seam in seams.LIGHTNING}
    holders = {seam.holder() for seam in seams.LIGHTNING}
    found = {derived for holder in holders if isinstance(holder, type) for derived in subclasses(holder)}
    ours = {
        derived
        for derived in found
        if derived.__module__.startswith("lightning_accum.") and issubclass(derived, (_FitLoop, Strategy))
    }
    ours |= {derived for derived in found if derived.__module__.startswith("lightning_accum.trainer")}
    assert lightning_accum.DDPAccumulationStrategy in ours
    for derived in ours:
        for name, value in vars(derived).items():
            is_method = callable(value) or isinstance(value, property)
            parents = [base for base in derived.__mro__[1:] if base.__module__.startswith("lightning.") and name in vars(base)]
            if is_method and parents and name not in ("__init__", "__doc__", "__module__"):
                assert any((base.__name__, name) in rows for base in derived.__mro__), f"{derived.__name__}.{name}"


def test_a_method_that_was_not_read_is_named_and_nothing_is_done_in_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard = []

    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        heard.append(self)
        return original(self, *args, **kwargs)

    original, other = Strategy.backward, _AutomaticOptimization.run
    monkeypatch.setattr(Strategy, "backward", backward)
    monkeypatch.setattr(_AutomaticOptimization, "run", lambda self, *arguments: other(self, *arguments))
    module = Scalar([x(1), x(2, 3)])
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        fit(module, accumulate_grad_batches=2)
    assert "Strategy.backward, _AutomaticOptimization.run" in caplog.text
    assert len(heard) == 2
    assert module.total == 2.0


def test_other_trainers_are_left_alone() -> None:
    fit(Scalar([x(1)]))
    other = fit(Scalar([x(1)]), strategy="auto")
    assert type(other) is pl.Trainer
    assert type(other.fit_loop) is _FitLoop
