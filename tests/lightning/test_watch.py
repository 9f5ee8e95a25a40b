"""Lightning's methods changed one by one, as a release might: a window is exact then, or an error names the method."""

from __future__ import annotations
import __future__

import inspect
import linecache
import re
import textwrap
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import loader, relative_error, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_accum import GradientAccumulation, SeamError, seams
from lightning_accum.seams import LIGHTNING, Seam

SIZES = (3, 1, 4, 2, 2)
GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [torch.randn(size, 3, generator=GENERATOR, dtype=torch.float64) for size in SIZES]
POLICIES: dict[str, dict[str, Any]] = {
    "windows of 2": {"window": 2},
    "windows of 2, carried on": {"window": 2, "tail": "carry"},
    "split": {"micro_batch": 2},
    "split windows of 2": {"window": 2, "micro_batch": 2},
}
EPOCHS = 3
BY_NAME = {str(seam): seam for seam in LIGHTNING if seam.read != "-"}


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([[0.3, -0.2]]))
            self.layer.bias.fill_(0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layer(batch[:, :2]).squeeze(1) - batch[:, 2]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay(optimizer), "interval": "step"}}

    def train_dataloader(self) -> DataLoader:
        return loader(BATCHES)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)


def by_hand(window: int = 1, tail: str = "step", micro_batch: int | None = None) -> list[Tensor]:
    """The parameters after the same training on whole windows."""
    module = Line()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler = decay(optimizer)
    epochs = [BATCHES * EPOCHS] if tail == "carry" else [BATCHES] * EPOCHS
    for epoch in epochs:
        for begin in range(0, len(epoch), window):
            optimizer.zero_grad()
            module.training_step(torch.cat(epoch[begin : begin + window]), 0).backward()
            optimizer.step()
            scheduler.step()
    return list(module.parameters())


def trained(policy: dict[str, Any]) -> list[Tensor]:
    module = Line()
    trainer(callbacks=[GradientAccumulation(**policy, check=False, log=False)], max_epochs=EPOCHS).fit(module)
    return list(module.parameters())


def outcome(policy: dict[str, Any], seam: Seam) -> str:
    """What became of a training: exact, an error that names the method, or neither."""
    try:
        error = relative_error(trained(policy), by_hand(**policy))
    except Exception as raised:
        told = "\n".join([str(raised), *getattr(raised, "__notes__", [])])
        return "named" if str(seam) in told else f"{type(raised).__name__} without its name: {told}"
    return "exact" if error <= 1e-12 else f"silently {error:.2g} off"


class Lightning:
    """Lightning's code, to be changed until the end of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def edit(self, seam: Seam, before: str, after: str) -> None:
        """Have a method of other source, as a release would have it."""
        holder, found = seam.holder(), seam.found()
        function = inspect.unwrap(getattr(getattr(found, "fget", found), "__func__", getattr(found, "fget", found)))
        source = re.sub(r'r?""".*?"""', "...", textwrap.dedent(inspect.getsource(function)), flags=re.DOTALL)
        assert source.count(before) == 1, source
        private = f"self._{holder.__name__.rpartition('.')[2]}__"  # as a class has it
        source = re.sub(r"self\.__(?=\w+(?<!__)\()", private, source.replace(before, after))
        file, inner = f"<edited {seam}>", textwrap.indent(source, "    ")
        text = f"def make(__class__):\n{inner}\n    return {seam.name}\n"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        made: dict[str, Any] = {}
        postponed = __future__.annotations.compiler_flag
        exec(compile(text, file, "exec", flags=postponed, dont_inherit=True), function.__globals__, made)
        self._monkeypatch.setattr(holder, seam.name, made["make"](holder))

    def rename(self, seam: Seam) -> None:
        """Have a method under another name; nobody needs the old one."""
        self._monkeypatch.setattr(seam.holder(), f"{seam.name}_", seam.found(), raising=False)
        self._monkeypatch.delattr(seam.holder(), seam.name)

    def copy(self, seam: Seam) -> None:
        """Have another method that does what this one did, which nobody replaces."""
        self._monkeypatch.setattr(seam.holder(), f"{seam.name}_", seam.found(), raising=False)


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> Lightning:
    monkeypatch.setattr(pl, "__version__", "2.7.0")
    return Lightning(monkeypatch)


@pytest.mark.parametrize("policy", POLICIES)
def test_as_lightning_is_windows_are_exact(policy: str) -> None:
    assert seams.changed() == []
    assert relative_error(trained(POLICIES[policy]), by_hand(**POLICIES[policy])) <= 1e-12


@pytest.mark.some_cases(30)
@pytest.mark.parametrize("name", [name for name, seam in BY_NAME.items() if not seam.is_optional])
def test_a_method_that_was_renamed_is_an_error_that_names_it(name: str, lightning: Lightning) -> None:
    lightning.rename(BY_NAME[name])
    with pytest.raises(SeamError, match=f"Lightning 2.7.0 does not have .*{name}.*issue tracker"):
        trainer()


FIT, EPOCH, AUTOMATIC = "_FitLoop", "_TrainingEpochLoop", "_AutomaticOptimization"
MODULE, PRECISION = "LightningModule", "Precision"
# what is edited, what is there, what a release might have instead; the last one is what it calls in place of a method that has
# been copied under another name, so that nobody calls the one that is replaced
NOT_CALLED = [
    ("Trainer._run", "self.strategy.connect(model)", "self.strategy.connect_(model)", "Strategy.connect"),
    ("Trainer._run", "self.strategy.setup_environment()", "self.strategy.setup_environment_()", "Strategy.setup_environment"),
    ("Trainer._run", "self.strategy.setup(self)", "self.strategy.setup_(self)", "Strategy.setup"),
    (f"{FIT}.on_run_start", 'call._call_strategy_hook(trainer, "on_train_start")', "pass", "Strategy.on_train_start"),
    (f"{FIT}.run", "self.setup_data()", "self.setup_data_()", f"{FIT}.setup_data"),
    (f"{FIT}.run", "self.reset()", "self.reset_()", f"{FIT}.reset"),
    (f"{FIT}.run", "self.on_run_end()", "self.on_run_end_()", f"{FIT}.on_run_end"),
    (f"{FIT}.advance", "self.epoch_loop.run(", "self.epoch_loop.run_(", f"{EPOCH}.run"),
    (f"{FIT}._should_accumulate", "._should_accumulate()", "._should_accumulate_()", f"{EPOCH}._should_accumulate"),
    (f"{EPOCH}.run", "self.on_run_start(data_fetcher)", "self.on_run_start_(data_fetcher)", f"{EPOCH}.on_run_start"),
    (f"{EPOCH}.run", "self.advance(data_fetcher)", "self.advance_(data_fetcher)", f"{EPOCH}.advance"),
    (f"{EPOCH}.run", "self.on_advance_end(data_fetcher)", "self.on_advance_end_(data_fetcher)", f"{EPOCH}.on_advance_end"),
    (f"{EPOCH}.advance", "self._build_kwargs(", "self._build_kwargs_(", f"{EPOCH}._build_kwargs"),
    (f"{EPOCH}.advance", "self.automatic_optimization.run(", "self.automatic_optimization.run_(", f"{AUTOMATIC}.run"),
    (f"{EPOCH}.advance", "self.update_lr_schedulers(\"step\"", "self.update_lr_schedulers_(\"step\"",
     f"{EPOCH}.update_lr_schedulers"),
    (f"{EPOCH}.update_lr_schedulers", "self._update_learning_rates(", "self._update_learning_rates_(",
     f"{EPOCH}._update_learning_rates"),
    (f"{AUTOMATIC}._optimizer_zero_grad", 'call._call_lightning_module_hook(trainer, "optimizer_zero_grad", trainer.current_epoch,'
     " batch_idx, optimizer)", "pass", f"{MODULE}.optimizer_zero_grad"),
    (f"{MODULE}.optimizer_zero_grad", "optimizer.zero_grad()", "pass", f"{AUTOMATIC}._optimizer_zero_grad"),
    (f"{MODULE}.optimizer_step", "optimizer.step(closure=optimizer_closure)", "optimizer_closure()", "LightningOptimizer.step"),
    (f"{MODULE}.optimizer_step", "optimizer.step(closure=optimizer_closure)", "optimizer._optimizer.step(optimizer_closure)",
     "LightningOptimizer.step"),
    ("LightningOptimizer.step", "self._strategy.optimizer_step(", "self._strategy.optimizer_step_(", "Strategy.optimizer_step"),
    ("LightningOptimizer.step", "self._strategy.optimizer_step(self._optimizer, closure, **kwargs)",
     "self._optimizer.step(closure)",
     "Strategy.optimizer_step"),
    ("Strategy.optimizer_step", "self.precision_plugin.optimizer_step(optimizer, model=model, closure=closure, **kwargs)",
     "closure()",
     "Precision.optimizer_step"),
    ("Strategy.backward", "self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)", "pass",
     "Precision.backward"),
    ("Precision.backward", "model.backward(tensor, *args, **kwargs)", "pass", f"{MODULE}.backward"),
    ("Precision.optimizer_step", "optimizer.step(closure=closure, **kwargs)", "closure()", "Precision._wrap_closure"),
    ("Precision._wrap_closure", "closure()", "None", "Precision._after_closure"),
    (f"{EPOCH}._update_learning_rates",
     'call._call_lightning_module_hook(\n                trainer,\n                "lr_scheduler_step",\n'
     "                config.scheduler,\n                monitor_val,\n            )", "pass", f"{MODULE}.lr_scheduler_step"),
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
SIGNATURES = [
    (f"{FIT}.advance", "self.epoch_loop.run(self._data_fetcher)", "self.epoch_loop.run(self._data_fetcher, 0)", f"{EPOCH}.run"),
    (f"{EPOCH}.run", "self.advance(data_fetcher)", "self.advance(data_fetcher, 0)", f"{EPOCH}.advance"),
    (f"{EPOCH}.advance", "self.automatic_optimization.run(trainer.optimizers[0],", "self.automatic_optimization.run(",
     f"{AUTOMATIC}.run"),
    (f"{EPOCH}.advance", 'self.update_lr_schedulers("epoch", update_plateau_schedulers=False)',
     'self.update_lr_schedulers("epoch", False, 0)', f"{EPOCH}.update_lr_schedulers"),
    (f"{EPOCH}.update_lr_schedulers", "interval=interval,", "when=interval,", f"{EPOCH}._update_learning_rates"),
    ("LightningOptimizer.step", "optimizer_step(self._optimizer, closure,", "optimizer_step(closure, self._optimizer,",
     "Strategy.optimizer_step"),
]  # fmt: skip
MUTATIONS = [
    *((f"not called: {called}, {edited}, {index}", edited, old, new, called)
      for index, (edited, old, new, called) in enumerate(NOT_CALLED)),
    *((f"twice: {edited}, {index}", edited, old, new, edited) for index, (edited, old, new) in enumerate(TWICE)),
    *((f"divided: {edited}, {index}", edited, old, new, edited) for index, (edited, old, new) in enumerate(DIVIDED)),
    *((f"signature: {called}", edited, old, new, called) for edited, old, new, called in SIGNATURES),
]  # fmt: skip


@pytest.mark.some_cases(24)
@pytest.mark.parametrize(
    ("policy", "edited", "before", "after", "called"),
    [pytest.param(policy, *mutation, id=f"{name}-{policy}") for name, *mutation in MUTATIONS for policy in POLICIES],
)
def test_a_method_that_changed_leaves_windows_exact_or_is_an_error_that_names_it(
    policy: str, edited: str, before: str, after: str, called: str, lightning: Lightning
) -> None:
    lightning.copy(BY_NAME[called])
    lightning.edit(BY_NAME[edited], before, after)
    assert edited in map(str, seams.changed())
    assert outcome(POLICIES[policy], BY_NAME[edited]) in ("exact", "named")
