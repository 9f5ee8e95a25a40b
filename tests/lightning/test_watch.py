"""Lightning's methods changed one by one, as a release might: a window is exact then, or it is told."""

import __future__

import inspect
import linecache
import logging
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support import Scalar, Toy, fit, relative_error, trainer, warned, x
from torch import Tensor

import lightning_accum
from lightning_accum import AccumulationError, GradientAccumulation, SeamError

GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [torch.randn(size, 4, generator=GENERATOR, dtype=torch.float64) for size in (3, 1, 4, 2, 2)]
POLICIES: dict[str, dict[str, Any]] = {
    "windows of 2": {"window": 2},
    "windows of 2, carried on": {"window": 2, "tail": "carry"},
    "split": {"micro_batch": 2},
    "split windows of 2": {"window": 2, "micro_batch": 2},
}
EPOCHS = 3
seams = import_module("lightning_accum.trainer.seams")
REPLACED = {str(seam) for seam in seams.LIGHTNING}
_CLASSES = pl.Trainer, pl.LightningModule, LightningOptimizer, _FitLoop, _TrainingEpochLoop, _AutomaticOptimization, ClosureResult
HOLDERS = {holder.__name__: holder for holder in (*_CLASSES, Strategy, Precision)} | {"call": call}


class Line(Toy):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(lambda net, batch: net(batch).square().mean(), optimizer)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def by_hand(window: int = 1, tail: str = "step", micro_batch: int | None = None) -> list[Tensor]:
    """The parameters after the same training on whole windows."""
    module = Line()
    made = module.configure_optimizers()
    for epoch in [BATCHES * EPOCHS] if tail == "carry" else [BATCHES] * EPOCHS:
        for begin in range(0, len(epoch), window):
            made["optimizer"].zero_grad()
            module.training_step(torch.cat(epoch[begin : begin + window]), 0).backward()
            made["optimizer"].step()
            made["lr_scheduler"]["scheduler"].step()
    return list(module.parameters())


def outcome(policy: dict[str, Any]) -> str:  # what became of a training: exact, told of by an error or a warning, or neither
    module = Line()
    with warned() as told:
        try:
            fit(module, BATCHES, GradientAccumulation(**policy, check=False, log=False), max_epochs=EPOCHS)
        except Exception as raised:
            return "told" if isinstance(raised, (AccumulationError, MisconfigurationException)) else type(raised).__name__
    error = relative_error(module.parameters(), by_hand(**policy))
    return "exact" if error <= 1e-12 else "told" if told else f"silently {error:.2g} off"


class Lightning:  # Lightning's code, to be changed until the end of a test
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def edit(self, name: str, before: str, after: str) -> None:  # have a method of other source, as a release would have it
        holder, _, method = name.partition(".")
        holder = HOLDERS[holder]
        found = inspect.getattr_static(holder, method)
        function = inspect.unwrap(getattr(found, "__func__", found))
        source = re.sub(r'r?""".*?"""', "...", textwrap.dedent(inspect.getsource(function)), flags=re.DOTALL)
        assert source.count(before) == 1, source
        private = f"self._{holder.__name__.rpartition('.')[2].lstrip('_')}__"  # as a class has it
        source = re.sub(r"self\.__(?=\w+(?<!__)\()", private, source.replace(before, after))
        file, inner = f"<edited {name}>", textwrap.indent(source, "    ")
        text = f"def make(__class__):\n{inner}\n    return {method}\n"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        made: dict[str, Any] = {}
        postponed = __future__.annotations.compiler_flag
        exec(compile(text, file, "exec", flags=postponed, dont_inherit=True), function.__globals__, made)
        self._monkeypatch.setattr(holder, method, made["make"](holder))

    def copy(self, name: str, is_renamed: bool = False) -> None:  # have a method under another name, too, or only there
        holder, _, method = name.partition(".")
        self._monkeypatch.setattr(HOLDERS[holder], f"{method}_", inspect.getattr_static(HOLDERS[holder], method), raising=False)
        if is_renamed:
            self._monkeypatch.delattr(HOLDERS[holder], method)


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> Lightning:
    monkeypatch.setattr(pl, "__version__", "2.7.0")
    return Lightning(monkeypatch)


@pytest.mark.parametrize("policy", POLICIES)
def test_as_lightning_is_windows_are_exact(policy: str) -> None:
    assert outcome(POLICIES[policy]) == "exact"


FIT, EPOCH, AUTOMATIC = "_FitLoop", "_TrainingEpochLoop", "_AutomaticOptimization"
MODULE, PRECISION = "LightningModule", "Precision"
# who calls whom: a release might call what has been copied under another name, so that nobody calls what is replaced
CALLS = [
    *(("Trainer._run", f"Strategy.{name}") for name in ("connect", "setup_environment", "setup")),
    *((f"{FIT}.run", f"{FIT}.{name}") for name in ("setup_data", "reset", "on_run_end")),
    *((f"{EPOCH}.run", f"{EPOCH}.{name}") for name in ("on_run_start", "advance", "on_advance_end")),
    (f"{FIT}.advance", f"{EPOCH}.run"), (f"{FIT}._should_accumulate", f"{EPOCH}._should_accumulate"),
    (f"{EPOCH}.advance", f"{EPOCH}._build_kwargs"),
    (f"{EPOCH}.update_lr_schedulers", f"{EPOCH}._update_learning_rates"), ("LightningOptimizer.step", "Strategy.optimizer_step"),
]  # fmt: skip
# what is edited, what is there, what a release might have instead, and who is not called then
NOT_CALLED = [
    *((edited, f".{called.partition('.')[2]}(", f".{called.partition('.')[2]}_(", called) for edited, called in CALLS),
    (f"{FIT}.on_run_start", 'call._call_strategy_hook(trainer, "on_train_start")', "pass", "Strategy.on_train_start"),
    (f"{EPOCH}.advance", ".automatic_optimization.run(", ".automatic_optimization.run_(", f"{AUTOMATIC}.run"),
    (f"{EPOCH}.advance", ".update_lr_schedulers(\"step\"", ".update_lr_schedulers_(\"step\"", f"{EPOCH}.update_lr_schedulers"),
    (f"{AUTOMATIC}._optimizer_zero_grad", 'call._call_lightning_module_hook(trainer, "optimizer_zero_grad", trainer.current_epoch,'
     " batch_idx, optimizer)", "pass", f"{MODULE}.optimizer_zero_grad"),
    (f"{MODULE}.optimizer_zero_grad", "optimizer.zero_grad()", "pass", f"{AUTOMATIC}._optimizer_zero_grad"),
    (f"{MODULE}.optimizer_step", "optimizer.step(closure=optimizer_closure)", "optimizer_closure()", "LightningOptimizer.step"),
    (f"{MODULE}.optimizer_step", "optimizer.step(closure=optimizer_closure)", "optimizer._optimizer.step(optimizer_closure)",
     "LightningOptimizer.step"),
    ("LightningOptimizer.step", "self._strategy.optimizer_step(self._optimizer, closure, **kwargs)",
     "self._optimizer.step(closure)", "Strategy.optimizer_step"),
    ("Strategy.optimizer_step", "self.precision_plugin.optimizer_step(optimizer, model=model, closure=closure, **kwargs)",
     "closure()", "Precision.optimizer_step"),
    ("Strategy.backward", "self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)", "pass",
     "Precision.backward"),
    ("Precision.backward", "model.backward(tensor, *args, **kwargs)", "pass", f"{MODULE}.backward"),
    ("Precision.optimizer_step", "optimizer.step(closure=closure, **kwargs)", "closure()", "Precision._wrap_closure"),
    ("Precision._wrap_closure", "closure()", "None", "Precision._after_closure"),
    (f"{MODULE}.lr_scheduler_step", "scheduler.step()", "pass", f"{EPOCH}._update_learning_rates"),
]  # fmt: skip
TWICE = [
    *((edited, call, f"[{call} for _ in range(2)][1]") for edited, call in [
        (f"{FIT}.advance", "self.epoch_loop.run(self._data_fetcher)"),
        (f"{EPOCH}.run", "self.advance(data_fetcher)"),
        (f"{EPOCH}.run", "self.on_advance_end(data_fetcher)"),
        (f"{EPOCH}.advance", "self.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs)"),
        (f"{EPOCH}.advance", 'self.update_lr_schedulers("step", update_plateau_schedulers=False)'),
        (f"{MODULE}.optimizer_step", "optimizer.step(closure=optimizer_closure)"),
        ("LightningOptimizer.step", "self._strategy.optimizer_step(self._optimizer, closure, **kwargs)"),
        ("Precision._wrap_closure", "closure()"),
    ]),
    (f"{EPOCH}._update_learning_rates", "config.scheduler,", "(config.scheduler.step(), config.scheduler)[1],"),
    ("Strategy.backward", "self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)",
     "[self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **{**kwargs, 'retain_graph': keep})"
     " for keep in (True, False)]"),
    (f"{MODULE}.backward", "loss.backward(*args, **kwargs)", "loss.backward(*args, **kwargs, retain_graph=True); loss.backward()"),
    ("Precision.optimizer_step", "optimizer.step(closure=closure, **kwargs)",
     "[optimizer.step(closure=closure, **kwargs), optimizer.step()]"),
]  # fmt: skip
DIVIDED = [
    ("ClosureResult.from_training_step_output", "closure_loss = closure_loss / normalize", "closure_loss = closure_loss / 2"),
    ("ClosureResult.__post_init__", "self._clone_loss()", "self._clone_loss(); self.closure_loss = self.closure_loss / 2"),
    ("call._call_strategy_hook", "output = fn(*args, **kwargs)",
     'output = fn(*args, **kwargs); output = output / 2 if hook_name == "training_step" else output'),
    ("Strategy.training_step", "return self.lightning_module.training_step(*args, **kwargs)",
     "return self.lightning_module.training_step(*args, **kwargs) / 2"),
    ("Strategy.backward", "self.precision_plugin.pre_backward(closure_loss, self.lightning_module)",
     "self.precision_plugin.pre_backward(closure_loss, self.model) / self.model.trainer.accumulate_grad_batches"),
    ("Strategy.backward", "optimizer, *args, **kwargs)", "optimizer)"),
    (f"{PRECISION}.pre_backward", "return tensor", "return tensor / 2"),
    (f"{PRECISION}.backward", "model.backward(tensor, *args, **kwargs)", "model.backward(tensor / 2, *args, **kwargs)"),
    (f"{PRECISION}.backward", "model.backward(tensor, *args, **kwargs)", "model.backward(tensor)"),
    (f"{MODULE}.backward", "loss.backward(*args, **kwargs)", "(loss / 2).backward(*args, **kwargs)"),
]  # fmt: skip
MUTATIONS = {
    **{f"not called: {called}, {index}": (edited, old, new, called) for index, (edited, old, new, called) in enumerate(NOT_CALLED)},
    **{f"twice: {edited}, {index}": (edited, old, new, edited) for index, (edited, old, new) in enumerate(TWICE)},
    **{f"divided: {edited}, {index}": (edited, old, new, edited) for index, (edited, old, new) in enumerate(DIVIDED)},
}


@pytest.mark.some_cases(16, 92)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_method_of_lightnings_that_changed_leaves_windows_exact_or_is_told(policy: str, name: str, lightning: Lightning) -> None:
    edited, before, after, called = MUTATIONS[name]
    lightning.copy(called)
    lightning.edit(edited, before, after)
    assert outcome(POLICIES[policy]) in ("exact", "told")


@pytest.mark.some_cases(8)
@pytest.mark.parametrize("name", sorted(REPLACED & {called for *_, called in NOT_CALLED}))
def test_a_method_of_lightnings_that_was_renamed_is_an_error_before_training(name: str, lightning: Lightning) -> None:
    lightning.copy(name, is_renamed=True)
    with pytest.raises(SeamError, match=name.partition(".")[2]):
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


def test_a_method_that_was_not_read_is_named_and_nothing_is_done_in_its_place(monkeypatch: Any, caplog: Any) -> None:
    heard, original, other = [], Strategy.backward, _AutomaticOptimization.run
    monkeypatch.setattr(Strategy, "backward", lambda *args, **kwargs: (heard.append(1), original(*args, **kwargs))[1])
    monkeypatch.setattr(_AutomaticOptimization, "run", lambda self, *arguments: other(self, *arguments))
    module = Scalar([x(1), x(2, 3)])
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        fit(module, accumulate_grad_batches=2)
    assert "Strategy.backward, _AutomaticOptimization.run" in caplog.text
    assert len(heard) == 2
    assert module.total == 2.0
