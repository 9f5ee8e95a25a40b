"""Lightning's methods that are replaced or relied on, changed as a release might: it is told before training."""

import linecache
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.strategies import Strategy
from support import Scalar, fit, trainer, x

import lightning_accum
from lightning_accum import AccumulationWarning, SeamError

seams = import_module("lightning_accum.trainer.seams")
PATH = {
    "Trainer": {"_run"},
    "_FitLoop": {"run", "advance", "on_run_start", "setup_data"},
    "_TrainingEpochLoop": {"run", "advance", "on_advance_end", "update_lr_schedulers", "_update_learning_rates"},
    "_AutomaticOptimization": {"run", "_on_before_zero_grad", "_optimizer_zero_grad", "_optimizer_step"},
    "ClosureResult": {"from_training_step_output", "__post_init__"},
    "call": {"_call_strategy_hook", "_call_lightning_module_hook"},
    "LightningModule": {"backward", "optimizer_zero_grad", "optimizer_step", "lr_scheduler_step"},
    "LightningOptimizer": {"step"},
    "Strategy": {"connect", "setup", "training_step", "backward", "optimizer_step"},
    "Precision": {"pre_backward", "backward", "optimizer_step", "_wrap_closure"},
    "MixedPrecision": {"pre_backward", "optimizer_step"},
}
"""What a micro-batch and a step pass through, and the calls of what is replaced."""


def test_all_that_a_step_passes_through_was_read() -> None:
    assert {f"{owner}.{name}" for owner, names in PATH.items() for name in names} <= {
        str(seam) for seam in seams.LIGHTNING if seam.read
    }


OF_A_STEP = """
def step(loss: float, times: int = 1) -> float:
    return loss / times
"""
IN_OTHER_WORDS = """
def step(
    loss, times=1
):
    'The loss of one.'
    return loss / times  # its mean
"""


def test_a_fingerprint_is_of_what_a_function_does() -> None:
    def fingerprint(source: str) -> str:
        linecache.cache[source] = (len(source), None, source.splitlines(keepends=True), source)
        exec(compile(source, source, "exec"), made := dict[str, Any]())
        found: str = seams.fingerprint(made["step"])
        return found

    assert fingerprint(OF_A_STEP) == fingerprint(IN_OTHER_WORDS) != fingerprint(OF_A_STEP.replace("/ times", "/ 2"))


@pytest.mark.parametrize("name", ["Strategy.connect", "_FitLoop.setup_data", "_AutomaticOptimization.run"])
def test_a_method_of_lightnings_that_was_renamed_is_an_error_before_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (seam,) = (seam for seam in seams.LIGHTNING if str(seam) == name)
    monkeypatch.delattr(seam.holder(), seam.name)
    with pytest.raises(SeamError, match=seam.name):
        trainer()


def test_everything_is_as_it_was_read() -> None:
    assert seams.changed() == []


def test_every_method_that_is_replaced_is_in_the_table() -> None:
    def subclasses(kind: type) -> Iterator[type]:
        for derived in kind.__subclasses__():
            yield derived
            yield from subclasses(derived)

    rows = {(seam.owner.rpartition(".")[2], seam.name) for seam in seams.LIGHTNING}
    holders = {seam.holder() for seam in seams.LIGHTNING}
    found = {derived for holder in holders if isinstance(holder, type) for derived in subclasses(holder)}
    places = {kind: "lightning_accum." + "trainer" * (not issubclass(kind, (_FitLoop, Strategy))) for kind in found}
    ours = {kind for kind, place in places.items() if kind.__module__.startswith(place)}
    assert lightning_accum.DDPAccumulationStrategy in ours
    for derived in ours:
        for name, value in vars(derived).items():
            is_method = callable(value) or isinstance(value, property)
            parents = [base for base in derived.__mro__[1:] if base.__module__.startswith("lightning.") and name in vars(base)]
            if is_method and parents and name not in ("__init__", "__doc__", "__module__"):
                assert any((base.__name__, name) in rows for base in derived.__mro__), f"{derived.__name__}.{name}"


def test_a_method_that_was_not_read_is_named_and_nothing_is_done_in_its_place(monkeypatch: Any) -> None:
    heard, original, other = [], Strategy.backward, _AutomaticOptimization.run
    monkeypatch.setattr(Strategy, "backward", lambda *args, **kwargs: (heard.append(1), original(*args, **kwargs))[1])
    monkeypatch.setattr(_AutomaticOptimization, "run", lambda self, *arguments: other(self, *arguments))
    module = Scalar([x(1), x(2, 3)])
    with pytest.warns(AccumulationWarning, match="methods that differ .* Strategy.backward, _AutomaticOptimization.run"):
        fit(module, accumulate_grad_batches=2)
    assert len(heard) == 2
    assert module.total == 2.0
