"""What this package relies on inside Lightning, one by one: if a release moves it, this says what, before wrong numbers do."""

from __future__ import annotations

import ast
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import Strategy
from support import Scalar, trainer, x
from torch.distributed.fsdp import FSDPModule

import lightning_accum
from lightning_accum import SeamError, loops, seams
from lightning_accum.seams.seam import of_tree


def counted(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return wrapper


def subclasses(kind: type) -> Iterator[type]:
    for derived in kind.__subclasses__():
        yield derived
        yield from subclasses(derived)


def test_everything_is_as_it_was_read() -> None:
    has_auto = hasattr(FSDPModule, "reset_iter_state")  # else micro_batch="auto" over shards is refused, which alone needs these
    assert [seam for seam in seams.changed(seams.SEAMS) if has_auto or seam not in seams.COLLECTIVES] == []


def test_every_method_that_is_replaced_is_in_the_table() -> None:
    rows = {(seam.owner.rpartition(".")[2], seam.name) for seam in seams.LIGHTNING}
    ours = {
        derived
        for holder in {seam.holder() for seam in seams.LIGHTNING}
        if isinstance(holder, type)
        for derived in subclasses(holder)
        if derived.__module__.startswith(("lightning_accum.loops", "lightning_accum.strategies"))
    }
    assert {"AccumulatingEpochLoop", "WindowOptimization", "BatchResults", "DDPAccumulationStrategy"} <= {c.__name__ for c in ours}
    for derived in ours:
        for name, value in vars(derived).items():
            is_method = callable(value) or isinstance(value, property)
            parents = [base for base in derived.__mro__[1:] if base.__module__.startswith("lightning.") and name in vars(base)]
            if is_method and parents and name not in ("__init__", "__doc__", "__module__"):
                assert any((base.__name__, name) in rows for base in derived.__mro__), f"{derived.__name__}.{name}"


def test_a_fingerprint_is_of_what_a_method_does() -> None:
    before = 'def f(self, a: int) -> int:\n    """Docs."""\n    return self.g(a)  # a comment\n'
    same = "def f(self, a):\n\n    return self.g(\n        a)\n"
    others = ["def f(self, a): return self.g(a) / 2", "def f(self, a, b=1): return self.g(a)", "def f(self, a): return self.h(a)"]
    of = [of_tree(ast.parse(source).body[0]) for source in (before, same, *others)]
    assert of[0] == of[1]
    assert len(set(of)) == 4


def test_a_method_that_has_gone_is_an_error_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_TrainingEpochLoop, "_should_accumulate")
    monkeypatch.setattr(pl, "__version__", "2.7.0")
    told = r"Lightning 2\.7\.0 does not have _TrainingEpochLoop\._should_accumulate \(AccumulatingEpochLoop: .*issue tracker"
    with pytest.raises(SeamError, match=told):
        trainer()


def test_a_name_of_torch_that_has_gone_is_an_error_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    # nothing that Lightning uses itself
    monkeypatch.delattr(torch.nn.parallel.DistributedDataParallel, "_sync_buffers")
    told = rf"torch {re.escape(torch.__version__)} does not have DistributedDataParallel\._sync_buffers \(relied on: sends the buff"
    with pytest.raises(SeamError, match=told):
        trainer()


def test_a_seam_that_broke_says_where_to_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    (address,) = re.findall(r'^Issues = "(https://.*?)"', pyproject, re.MULTILINE)
    installed = Message()
    installed["Project-URL"] = "Documentation, https://docs.invalid"
    installed["Project-URL"] = f"Issues, {address}"
    monkeypatch.setattr(seams, "metadata", {"lightning-accum": installed}.__getitem__)
    assert str(seams.broken("Seen.")).endswith(f"report it to the issue tracker of lightning_accum: {address}.")


def test_a_method_that_was_not_read_is_named_and_nothing_is_done_in_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = _AutomaticOptimization._on_before_zero_grad
    monkeypatch.setattr(_AutomaticOptimization, "_on_before_zero_grad", lambda self, optimizer: original(self, optimizer))
    heard = []
    monkeypatch.setattr(Strategy, "backward", counted(Strategy.backward, heard))
    module = Scalar([x(1), x(2, 3)])
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trainer(accumulate_grad_batches=2).fit(module)
    assert (
        "2 methods differ from those read: Strategy.backward, _AutomaticOptimization._on_before_zero_grad. Each step is watched"
        in caplog.text
    )
    assert len(heard) == 2
    assert module.total == 2.0


def test_the_divisor_has_one_place() -> None:
    """Lightning divides the loss in `_training_step`, through `normalize`, and nowhere else."""
    source = Path(inspect.getfile(pl)).parent
    users = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if re.search(r"(/|normalize=|,) ?(self\.)?trainer\.accumulate_grad_batches\)?$", path.read_text(), re.MULTILINE)
    }
    assert users <= {"loops/optimization/automatic.py", "loops/training_epoch_loop.py", "trainer/trainer.py"}
    assert "loops/optimization/automatic.py" in users


def test_every_loader_batch_ends_in_update_lr_schedulers(monkeypatch) -> None:
    calls = []
    original = _TrainingEpochLoop.update_lr_schedulers

    def update_lr_schedulers(self, interval, update_plateau_schedulers):
        calls.append((interval, update_plateau_schedulers))
        original(self, interval, update_plateau_schedulers)

    monkeypatch.setattr(_TrainingEpochLoop, "update_lr_schedulers", update_lr_schedulers)
    trainer("auto").fit(Scalar([x(1), None, x(3)]))
    per_batch = [("step", False), ("step", True)]
    assert [call for call in calls if call[0] == "step"] == per_batch * 3


def test_the_loops_keep_their_identity_and_their_state() -> None:
    run = trainer()
    before = run.fit_loop, run.fit_loop.epoch_loop, run.fit_loop.epoch_loop.automatic_optimization
    plain = set(run.fit_loop.state_dict())
    run.fit(Scalar([x(1), x(2)]))
    after = run.fit_loop, run.fit_loop.epoch_loop, run.fit_loop.epoch_loop.automatic_optimization
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert set(run.fit_loop.state_dict()) == plain
    assert isinstance(run, pl.Trainer)
    assert type(run).__name__ == "Trainer"


def test_other_trainers_are_left_alone() -> None:
    trainer().fit(Scalar([x(1)]))
    other = trainer("auto")
    other.fit(Scalar([x(1)]))
    assert type(other) is pl.Trainer
    assert type(other.fit_loop) is _FitLoop


def test_internals_are_used_in_one_folder_only() -> None:
    package = Path(lightning_accum.__file__).parent
    users = {
        path.parent
        for path in package.rglob("*.py")
        if re.search(
            r"from lightning\.[\w.]+ import [^#\n]*\b_[A-Za-z]|\b(trainer|fit_loop|epoch_loop|loop)\._[a-z]", path.read_text()
        )
    }
    assert users == {Path(loops.__file__).parent}
