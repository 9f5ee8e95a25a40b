"""Where training differs from Lightning's without accumulation being the reason, each with what should happen.

Issue 31 lists them: 24 to 29 are here, 17 to 23 in ``test_known_refusals.py``.
"""

import gc
import importlib
import re
import runpy
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from known import case, classified, open_until
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from sharded import ShardedScalar, fsdp2, needs_sharding_on_cpu
from support import SaveAfter, Toy, ddp, error_of_updates, fit, labelled, loader, noted, x
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_accum import GradientAccumulation, SampleCount, verify
from lightning_accum.testing import EXACT

EXAMPLES = Path(__file__).parents[2] / "notebooks" / "examples"
MATPLOTLIB = "pip install matplotlib"


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}], ids=str)
def test_a_closure_returns_a_loss_that_is_detached(arguments: dict[str, Any]) -> None:
    class ReadsClosure(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure().numpy()
            super().step()

    module = Toy(classified)
    module.configure_optimizers = lambda: ReadsClosure(module.parameters(), lr=0.1)
    assert fit(module, labelled(4, 4), **arguments).global_step == 2 // arguments.get("accumulate_grad_batches", 1)


class NoLossInTheSecond(Toy):  # keeps gradients of 0, which momentum goes on with
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class EndsItsEpoch(Toy):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None

    def on_train_epoch_end(self) -> None:
        self.has_gradients = self.net.weight.grad is not None


def trained(kind: type[Toy], **arguments: Any) -> list[Any]:  # with this package, and with Lightning alone
    modules = [kind(classified), kind(classified)]
    for module, strategy in zip(modules, ("accum", "auto"), strict=True):
        fit(module, labelled(4, 4, 4, 4), strategy=strategy, **arguments)
    return modules


@open_until(23, "where training_step returned None, hooks of the step and clipping are left out")
@pytest.mark.parametrize("hook", ["on_before_optimizer_step", "configure_gradient_clipping"])
def test_where_training_step_returns_none_hooks_of_the_step_are_called_as_by_lightning(hook: str, monkeypatch: Any) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(NoLossInTheSecond, hook, lambda *args, **kwargs: calls.append(args[0]))
    assert [calls.count(module) for module in trained(NoLossInTheSecond)] == [4, 4]


@open_until(23, "0.19 off: where training_step returned None, the optimizer takes no step with gradients of 0")
def test_where_training_step_returns_none_momentum_goes_on_as_with_lightning() -> None:
    assert error_of_updates(*trained(NoLossInTheSecond), NoLossInTheSecond(classified)) <= EXACT


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
def test_on_train_batch_start_that_ends_an_epoch_between_windows_leaves_the_gradients_and_is_not_warned_of() -> None:
    assert [module.has_gradients for module in trained(EndsItsEpoch, accumulate_grad_batches=2)] == [True, True]


@needs_sharding_on_cpu
def test_a_rank_may_need_longer_than_others_in_a_step_without_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    class WarmsUp(ShardedScalar):  # its first step has no backward, and takes rank 1 two seconds longer
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            if not batch_idx:
                time.sleep(2.0 * self.global_rank)
                return
            self.manual_backward(self.loss(batch))
            self.optimizers().step()
            self.optimizers().zero_grad()

    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: 10 * monotonic())  # two seconds are twenty
    run = fit(WarmsUp([x(1.0), x(2.0), x(3.0), x(4.0)]), strategy=fsdp2(), devices=2, accumulate_grad_batches=2)
    assert run.whole["layer.weight"].item() == -5.5


@pytest.mark.parametrize(
    ("devices", "strategy", "weight"), [(1, lambda: "accum", [SampleCount(1), SampleCount(1)]), (2, ddp, "auto")]
)
def test_loaders_that_are_made_anew_in_each_epoch_are_let_go(devices: int, strategy: Any, weight: Any) -> None:
    loaders, module = weakref.WeakSet(), Toy(lambda net, batch: classified(net, batch) + net(batch[0]).square().mean())
    module.train_dataloader = lambda: (made := loader(labelled(4, 4)), loaders.add(made))[0]
    notes, alive = noted("on_train_epoch_start", lambda trainer: (gc.collect(), len(loaders))[1])
    saves = LambdaCallback(on_train_end=lambda trainer, module: torch.save(alive, f"alive{trainer.global_rank}.pt"))
    arguments = {"devices": devices, "max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    fit(module, None, GradientAccumulation(2, weight=weight), notes, saves, strategy=strategy(), **arguments)
    assert [torch.load(f"alive{rank}.pt") for rank in range(devices)] == [[1, 1, 1]] * devices


def test_a_fit_over_ranks_leaves_the_launcher_as_it_was() -> None:
    run = fit(Toy(classified), labelled(4, 4), ranks=2)
    assert "launch" not in vars(run.strategy._launcher)


def test_after_a_resume_no_batch_is_held() -> None:
    class Fresh(IterableDataset):  # makes each batch when it is drawn, and keeps none
        def __iter__(self) -> Iterator[Any]:
            for seed in range(8):
                (batch,) = labelled(8, seed=seed)
                self.first = weakref.ref(batch[0]) if seed == 0 else self.first
                yield batch

    batches = Fresh()
    data = DataLoader(batches, batch_size=None)
    looks, are_held = noted("on_train_epoch_end", lambda trainer: (gc.collect(), batches.first() is not None)[1])
    fit(Toy(classified), data, SaveAfter(4), accumulate_grad_batches=2)
    fit(Toy(classified), data, looks, ckpt_path="inside.ckpt", accumulate_grad_batches=2)
    assert are_held == [False]


def test_the_random_state_of_other_devices_is_not_saved_for_each_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    saved, fork = [], torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda what=None, *args, **kw: (saved.append(what), fork(what, *args, **kw))[1])
    module = Toy(lambda net, batch: classified(net, [batch[0] + torch.randn_like(batch[0]), batch[1]]))
    fit(module, labelled(8, 8), GradientAccumulation(2))
    assert verify(module, labelled(8)[0], micro_batch=4)
    assert None not in saved  # that is every device


class LogsAndPrints(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.logger.log_metrics({"direct": 1.0}, step=batch_idx)
        self.logger.experiment.log_metrics({"experiment": 1.0}, step=batch_idx)
        print("print")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("where", ["direct", "experiment", case(22, "about 30 more are printed by the check", "print")])
def test_what_a_step_logs_or_prints_by_itself_is_there_once_a_micro_batch(where: str, monkeypatch: Any, capsys: Any) -> None:
    def of_terms_that_are_counted(net: Any, batch: Any) -> Tensor:
        mask = batch[0][:, 0] > 0
        return classified(net, batch) + (net(batch[0])[:, 0] * mask).square().sum() / mask.sum()

    logger, sent = CSVLogger("logs"), []
    kind, log_metrics = type(logger.experiment), type(logger.experiment).log_metrics
    monkeypatch.setattr(kind, "log_metrics", lambda *args, **kw: (sent.extend(args[1]), log_metrics(*args, **kw)))
    for loss in (classified, of_terms_that_are_counted):
        fit(LogsAndPrints(loss), labelled(8, 8, 8, 8), GradientAccumulation(2), logger=logger)
    assert [*sent, *capsys.readouterr().out.splitlines()].count(where) == 8


def test_the_example_of_the_command_line_runs_twice_in_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # which LightningCLI sets
    options = ["--trainer.max_epochs", "1", "--data.batch_size", "2048", "--trainer.enable_progress_bar", "false"]
    monkeypatch.setattr(sys, "argv", ["cli.py", "fit", "--config", str(EXAMPLES / "cli.yaml"), *options])
    runs = [runpy.run_path(str(EXAMPLES / "cli.py"), run_name="__main__") for _ in range(2)]
    assert [run["cli"].trainer.global_step for run in runs] == [2, 2]


@pytest.mark.parametrize(
    ("library", "use", "error", "mend"),
    [
        ("ray", lambda: importlib.import_module("lightning_accum.ray"), ImportError, r"pip install .ray\[train\]"),
        ("matplotlib", lambda: runpy.run_module("lightning_accum", run_name="__main__"), SystemExit, MATPLOTLIB),
    ],
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
def test_a_backward_of_tensors_that_somebody_has_replaced_is_called(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called, backward = [], Tensor.backward
    monkeypatch.setattr(Tensor, "backward", lambda *args, **kwargs: (called.append(1), backward(*args, **kwargs))[1])
    fit(Toy(classified), labelled(4, 4), GradientAccumulation(**policy))
    assert len(called) == (4 if "micro_batch" in policy else 2)
