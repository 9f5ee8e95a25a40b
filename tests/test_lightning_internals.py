"""What `lightning_accum/loops/` relies on inside Lightning: if a release moves it, this says what, before wrong numbers do."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from support import Scalar, trainer, x

import lightning_accum
from lightning_accum import loops
from lightning_accum.loops import epochs


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_TrainingEpochLoop._should_accumulate, ["self"]),
        (_TrainingEpochLoop._num_ready_batches_reached, ["self"]),
        (_TrainingEpochLoop.run, ["self", "data_fetcher"]),
        (_TrainingEpochLoop.update_lr_schedulers, ["self", "interval", "update_plateau_schedulers"]),
        (_TrainingEpochLoop._update_learning_rates, ["self", "interval", "update_plateau_schedulers"]),
        (_AutomaticOptimization._make_closure, ["self", "kwargs", "optimizer", "batch_idx"]),
        (_AutomaticOptimization._make_step_fn, ["self", "kwargs"]),
        (_AutomaticOptimization._make_backward_fn, ["self", "optimizer"]),
        (_AutomaticOptimization._make_zero_grad_fn, ["self", "batch_idx", "optimizer"]),
        (_AutomaticOptimization._training_step, ["self", "kwargs"]),
        (_AutomaticOptimization._optimizer_step, ["self", "batch_idx", "train_step_and_backward_closure"]),
        (_AutomaticOptimization._on_before_zero_grad, ["self", "optimizer"]),
        (_AutomaticOptimization._optimizer_zero_grad, ["self", "batch_idx", "optimizer"]),
        (ClosureResult.from_training_step_output, ["training_step_output", "normalize"]),
        (Closure.__init__, ["self", "step_fn", "backward_fn", "zero_grad_fn"]),
        (_FitLoop.on_run_end, ["self"]),
        (_FitLoop._should_accumulate, ["self"]),
        (Precision.clip_grad_by_norm, ["self", "optimizer", "clip_val"]),
        (Precision.pre_backward, ["self", "tensor", "module"]),
        (Precision.backward, ["self", "tensor", "model", "optimizer", "args", "kwargs"]),
        (Precision.post_backward, ["self", "tensor", "module"]),
        (Strategy.training_step, ["self", "args", "kwargs"]),
        (Strategy.batch_to_device, ["self", "batch", "device", "dataloader_idx"]),
        (_ResultCollection.update_metrics, ["self", "key", "value", "batch_size"]),
        (_FitLoop.setup_data, ["self"]),
        (_SignalConnector.register_signal_handlers, ["self"]),
        (_MultiProcessingLauncher.launch, ["self", "function", "args", "trainer", "kwargs"]),
        (_SubprocessScriptLauncher.launch, ["self", "function", "args", "trainer", "kwargs"]),
        (_PrefetchDataFetcher.__iter__, ["self"]),
        (_PrefetchDataFetcher.__next__, ["self"]),
        (_DataConnector._prepare_dataloader, ["self", "dataloader", "shuffle", "mode"]),
        (_DataConnector._resolve_sampler, ["self", "dataloader", "shuffle", "mode"]),
        (_LoggerConnector.log_metrics, ["self", "metrics", "step"]),
        (_LoggerConnector.update_train_step_metrics, ["self"]),
        (_SignalConnector._sigterm_notifier_fn, ["self", "signum", "_"]),
    ],
)
def test_signature(function, expected: list[str]) -> None:
    assert parameters(function) == expected


def test_logged_values_go_through_log_and_update_metrics() -> None:
    results = trainer("auto").fit_loop.epoch_loop._results
    assert type(results) is _ResultCollection
    log = inspect.getsource(_ResultCollection.log)
    assert "self.update_metrics(key, value, batch_size)" in log
    assert parameters(_ResultCollection.log)[:4] == ["self", "fx", "name", "value"]
    assert "batch_size" in parameters(_ResultCollection.log)
    assert "value._forward_cache" in inspect.getsource(_ResultMetric.update)
    assert "_current_fx_name" in inspect.getsource(pl.LightningModule.log)


def test_ranks_are_kept_together_where_lightning_looks() -> None:
    run = trainer("auto")
    run.fit(Scalar([x(1), x(2)]))
    assert run._signal_connector.received_sigterm is run.received_sigterm is False
    assert type(run._data_connector) is _DataConnector
    assert run.fit_loop._last_train_dl_reload_epoch == 0
    setup_data = inspect.getsource(_FitLoop.setup_data)
    assert "self._data_fetcher = _select_data_fetcher(" in setup_data
    assert "trainer.val_check_batch = max(1, trainer.val_check_batch)" in setup_data
    advance = inspect.getsource(_TrainingEpochLoop.advance)
    assert "self.batch_progress.is_last_batch = data_fetcher.done" in advance
    if "torch.distributed" in advance:  # since 2.6
        assert "self._broadcast_sigterm_tensor()" in advance
    assert "received_sigterm:\n            raise SIGTERMException" in inspect.getsource(_TrainingEpochLoop.on_advance_end)


def test_a_loader_batch_is_to_lightning_what_it_was_when_it_was_read() -> None:
    """`AccumulatingEpochLoop._advance_unheard` goes the same way, in the versions that it knows."""
    assert epochs._IS_READ
    advance = inspect.getsource(_TrainingEpochLoop.advance)
    called = re.findall(
        r'(?:_hook(?:s|)\(trainer, "|[. ]_?)(increment_\w+|on_\w+|update_\w+|convert_input|batch_to_device|run)(?:"|\()', advance
    )
    called = [name for name in called if name not in ("increment_progress_to_evaluation_end", "increment_by")]
    if called.count("increment_processed") == 2:  # until 2.6 also where on_train_batch_start ends the epoch
        called.remove("increment_processed")
    assert called == [
        "convert_input", "on_before_batch_transfer", "batch_to_device", "increment_ready", "on_batch_start",
        "on_train_batch_start", "on_train_batch_start", "on_train_batch_start",  # of callbacks, module and strategy
        "increment_started", "run", "run",  # automatic or manual
        "increment_processed", "update_lr_schedulers", "update_lr_schedulers",
        "on_train_batch_end", "on_train_batch_end", "on_batch_end", "increment_completed", "update_train_step_metrics",
    ]  # fmt: skip


def test_a_fit_is_launched_connected_and_torn_down_where_this_package_looks() -> None:
    handled = inspect.getsource(call._call_and_handle_interrupt)
    assert "trainer.strategy.launcher.launch(trainer_fn, *args, trainer=trainer, **kwargs)" in handled
    assert handled.count("trainer._teardown()") == 3  # after the Tuner, an interrupt, any other error
    run = inspect.getsource(pl.Trainer._run)
    steps = ["strategy.connect(", "setup_environment()", "strategy.setup(self)", "register_signal_handlers()", "self._teardown()"]
    assert [run.count(step) for step in steps] == [1] * 5
    assert [run.index(step) for step in steps] == sorted(run.index(step) for step in steps)
    assert "self.strategy.teardown()" in inspect.getsource(pl.Trainer._teardown)


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
