"""Where training differs from Lightning's without accumulation being the reason, each with what should happen.

Issue 31 lists them: 24 to 29 are here, 17 to 23 in ``test_known_refusals.py``.
"""

from __future__ import annotations

import gc
import importlib
import re
import runpy
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from sharded import ShardedScalar, fsdp2, needs_sharding_on_cpu, total_of
from support import SaveAfter, Toy, ddp, error_of_updates, fit, labelled, loader, trainer, warned, x
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_accum import GradientAccumulation, SampleCount, verify
from lightning_accum.testing import EXACT

EXAMPLES = Path(__file__).parents[2] / "notebooks" / "examples"


def until(issue: int, why: str, raises: type[BaseException] = AssertionError) -> pytest.MarkDecorator:
    """What is wrong today, and the issue that mends it."""
    return pytest.mark.xfail(strict=True, raises=raises, reason=f"issue {issue}: {why}")


def cross_entropy(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


# --- 24 to 26: hooks and closures -------------------------------------------------------------------------------------------


class ReadsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        loss.numpy()
        return super().step()


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}], ids=str)
def test_a_closure_returns_a_loss_that_is_detached(arguments: dict[str, Any]) -> None:
    module = Toy(cross_entropy)
    module.configure_optimizers = lambda: ReadsClosure(module.parameters(), lr=0.1)
    assert fit(module, labelled(4, 4), **arguments).global_step == 2 // arguments.get("accumulate_grad_batches", 1)


class NoLossInTheSecond(Toy):
    """Counts the calls of hooks around a step, and keeps gradients of 0, which momentum goes on with."""

    def __init__(self) -> None:
        super().__init__(cross_entropy)
        self.called: Counter[str] = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.called["on_before_optimizer_step"] += 1

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.called["configure_gradient_clipping"] += 1


def trained_with(kind: type[Toy], strategy: str, **arguments: Any) -> Any:
    module = kind()
    fit(module, labelled(4, 4, 4, 4), strategy=strategy, **arguments)
    return module


@until(23, "where training_step returned None, hooks of the step and clipping are left out")
@pytest.mark.parametrize("hook", ["on_before_optimizer_step", "configure_gradient_clipping"])
def test_where_training_step_returns_none_hooks_of_the_step_are_called_as_by_lightning(hook: str) -> None:
    ours, theirs = (trained_with(NoLossInTheSecond, strategy) for strategy in ("accum", "auto"))
    assert ours.called[hook] == theirs.called[hook] == 4


@until(23, "0.19 off: where training_step returned None, the optimizer takes no step with gradients of 0")
def test_where_training_step_returns_none_momentum_goes_on_as_with_lightning() -> None:
    ours, theirs = (trained_with(NoLossInTheSecond, strategy) for strategy in ("accum", "auto"))
    assert error_of_updates(ours, theirs, NoLossInTheSecond()) <= EXACT


class EndsItsEpoch(Toy):
    def __init__(self) -> None:
        super().__init__(cross_entropy)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None

    def on_train_epoch_end(self) -> None:
        self.has_gradients = self.net.weight.grad is not None


@until(23, "gradients are cleared")
def test_on_train_batch_start_that_ends_an_epoch_leaves_the_gradients_of_the_last_step() -> None:
    ours, theirs = (trained_with(EndsItsEpoch, strategy, accumulate_grad_batches=2) for strategy in ("accum", "auto"))
    assert ours.has_gradients
    assert theirs.has_gradients


@until(23, "a window without any weight is warned of, where none began")
def test_on_train_batch_start_that_ends_an_epoch_between_windows_is_not_warned_of() -> None:
    with warned() as messages:
        trained_with(EndsItsEpoch, "accum", accumulate_grad_batches=2)
    assert not messages


class WarmsUp(ShardedScalar):
    """Its first step has no backward, and takes rank 1 two seconds longer."""

    def __init__(self) -> None:
        super().__init__([x(1.0), x(2.0), x(3.0), x(4.0)])
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        if not batch_idx:
            time.sleep(2.0 * self.global_rank)
            return
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.optimizers().zero_grad()


@needs_sharding_on_cpu
@until(23, "a rank that waits longer than 10 seconds raises", torch.multiprocessing.ProcessRaisedException)
def test_a_rank_may_need_longer_than_others_in_a_step_without_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: 10 * monotonic())  # two seconds are twenty
    run = trainer(fsdp2(), devices=2, accumulate_grad_batches=2)
    run.fit(WarmsUp())
    assert total_of(run) == 5.5


# --- 27: what is held, and what is copied ---------------------------------------------------------------------------------


def two_terms(net: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(net, batch) + net(batch[0]).square().mean()


class Reloads(Toy):
    def __init__(self) -> None:
        super().__init__(two_terms)
        self.loaders: list[weakref.ref[Any]] = []
        self.alive: list[int] = []

    def train_dataloader(self) -> DataLoader:
        made = loader(labelled(4, 4))
        self.loaders.append(weakref.ref(made))
        return made

    def on_train_epoch_start(self) -> None:
        gc.collect()
        self.alive.append(sum(made() is not None for made in self.loaders))

    def on_train_end(self) -> None:
        torch.save(self.alive, f"alive{self.global_rank}.pt")


@pytest.mark.parametrize("devices", [1, 2])
def test_loaders_that_are_made_anew_in_each_epoch_are_let_go(devices: int) -> None:
    weight = [SampleCount(1), SampleCount(1)] if devices == 1 else "auto"
    strategy = "accum" if devices == 1 else ddp()
    arguments = {"devices": devices, "max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    fit(Reloads(), None, GradientAccumulation(2, weight=weight), strategy=strategy, **arguments)
    assert [torch.load(f"alive{rank}.pt") for rank in range(devices)] == [[1, 1, 1]] * devices


def test_a_fit_over_ranks_leaves_the_launcher_as_it_was() -> None:
    run = fit(Toy(cross_entropy), labelled(4, 4), strategy=ddp(), devices=2)
    assert "launch" not in vars(run.strategy._launcher)


class Fresh(IterableDataset):
    """Makes each batch when it is drawn, and keeps none."""

    def __init__(self) -> None:
        self.drawn: list[weakref.ref[Tensor]] = []

    def __iter__(self) -> Iterator[Any]:
        for seed in range(8):
            (batch,) = labelled(8, seed=seed)
            self.drawn.append(weakref.ref(batch[0]))
            yield batch


@until(22, "the first batch after a resume is held until the fit ends")
def test_after_a_resume_no_batch_is_held() -> None:
    class Looks(Toy):
        def on_train_epoch_end(self) -> None:
            gc.collect()
            self.is_held = batches.drawn[0]() is not None

    fit(Toy(cross_entropy), DataLoader(Fresh(), batch_size=None), SaveAfter(4), accumulate_grad_batches=2)
    batches, module = Fresh(), Looks(cross_entropy)
    fit(module, DataLoader(batches, batch_size=None), ckpt_path="inside.ckpt", accumulate_grad_batches=2)
    assert not module.is_held


def test_the_random_state_of_other_devices_is_not_saved_for_each_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    saved, fork_rng = [], torch.random.fork_rng

    def recorded(devices: Any = None, *args: Any, **kwargs: Any) -> Any:
        saved.append(devices)
        return fork_rng(devices, *args, **kwargs)

    def noisy(net: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(net, [batch[0] + torch.randn_like(batch[0]), batch[1]])

    monkeypatch.setattr(torch.random, "fork_rng", recorded)
    fit(Toy(noisy), labelled(8, 8), GradientAccumulation(2))
    assert verify(Toy(noisy), labelled(8)[0], micro_batch=4)
    assert None not in saved  # that is every device


# --- 28: the check runs training_step as if it had not ----------------------------------------------------------------------


class LogsAndPrints(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.logger.log_metrics({"direct": 1.0}, step=batch_idx)
        self.logger.experiment.log_metrics({"experiment": 1.0}, step=batch_idx)
        print("training_step")
        return super().training_step(batch, batch_idx)


@until(22, "about 30 rows more come from the check")
@pytest.mark.parametrize("name", ["direct", "experiment"])
def test_what_a_step_sends_to_the_logger_itself_reaches_it_once_a_micro_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logger, sent = CSVLogger("logs"), []
    log_metrics = type(logger.experiment).log_metrics
    monkeypatch.setattr(
        type(logger.experiment), "log_metrics", lambda *args, **kw: (sent.append(args[1]), log_metrics(*args, **kw))
    )
    fit(LogsAndPrints(cross_entropy), labelled(8, 8, 8, 8), GradientAccumulation(2), logger=logger)
    assert sum(name in metrics for metrics in sent) == 4


@until(22, "about 30 more are printed by the check")
def test_what_a_step_prints_is_seen_once_a_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    fit(LogsAndPrints(cross_entropy), labelled(8, 8, 8, 8), GradientAccumulation(2), logger=CSVLogger("logs"))
    assert capsys.readouterr().out.count("training_step") == 4


# --- 29: around the package -----------------------------------------------------------------------------------------------


def test_the_example_of_the_command_line_runs_twice_in_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # which LightningCLI sets
    options = ["--trainer.max_epochs", "1", "--data.batch_size", "2048", "--trainer.enable_progress_bar", "false"]
    monkeypatch.setattr(sys, "argv", ["cli.py", "fit", "--config", str(EXAMPLES / "cli.yaml"), *options])
    runs = [runpy.run_path(str(EXAMPLES / "cli.py"), run_name="__main__") for _ in range(2)]
    assert [run["cli"].trainer.global_step for run in runs] == [2, 2]


def plots() -> None:
    verify(Toy(cross_entropy), labelled(4)[0], micro_batch=2).plot()


def runs_demo() -> None:
    runpy.run_module("lightning_accum", run_name="__main__")


@pytest.mark.parametrize(
    ("library", "use", "error", "mend"),
    [
        ("ray", lambda: importlib.import_module("lightning_accum.ray"), ImportError, r"pip install .ray\[train\]"),
        ("matplotlib", plots, ModuleNotFoundError, "pip install matplotlib"),
        ("matplotlib", runs_demo, SystemExit, "pip install matplotlib"),
    ],
    ids=["lightning_accum.ray", "report.plot", "demo"],
)
def test_where_a_library_is_missing_the_error_names_what_can_be_installed(
    library: str, use: Any, error: Any, mend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, "lightning_accum.ray", raising=False)
    monkeypatch.setattr(sys, "argv", ["lightning-accum", "demo"])
    with pytest.raises(error) as caught:
        use()
    said = f"{caught.value} {capsys.readouterr().err}"
    assert re.search(mend, said)
    assert "lightning-accum[" not in said  # which is on no index


@pytest.mark.parametrize("policy", [{"window": 1}, {"window": 2}, {"window": 1, "micro_batch": 2}], ids=str)
def test_a_backward_of_tensors_that_somebody_has_replaced_is_called(
    policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    called, backward = [], Tensor.backward
    monkeypatch.setattr(Tensor, "backward", lambda *args, **kwargs: (called.append(1), backward(*args, **kwargs))[1])
    fit(Toy(cross_entropy), labelled(4, 4), GradientAccumulation(**policy))
    assert len(called) == (4 if "micro_batch" in policy else 2)
