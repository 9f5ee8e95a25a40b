"""The same windows with ``import lightning.pytorch as pl`` and with ``import pytorch_lightning as pl``, from one source."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pickle
import subprocess
import sys
import traceback
import warnings
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import second_package
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_accum
import lightning_accum.pytorch_lightning
from lightning_accum import families

PACKAGE = Path(lightning_accum.__file__).parent
LIGHTNINGS = {"lightning.pytorch": lightning.pytorch, "pytorch_lightning": pytorch_lightning}
OURS = {"lightning.pytorch": lightning_accum, "pytorch_lightning": lightning_accum.pytorch_lightning}
OTHER = {"lightning.pytorch": "pytorch_lightning", "pytorch_lightning": "lightning.pytorch"}
QUIET = {
    "accelerator": "cpu", "max_epochs": 1, "logger": False,
    "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip
both = pytest.mark.parametrize("family", LIGHTNINGS)

# --- the promises -------------------------------------------------------------------------------------------------------

CORE = [
    "test_micro_batches_equal_batch", "test_ddp", "test_resume", "test_schedulers", "test_check", "test_verify", "test_uneven",
    "test_manual_optimization", "test_noise_scale", "test_watch", "test_lightning_internals", "test_command_line", "test_sharded",
    "test_row_wise", "test_offload", "test_warnings", "test_after_a_fit", "test_windows_over_time",
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["test_window_equals_batch", *(pytest.param(name, marks=pytest.mark.slow) for name in CORE)])
def test_the_suite_passes_with_pytorch_lightning(name: str, tmp_path: Path) -> None:
    (file,) = Path(__file__).parents[1].glob(f"*/{name}.py")
    path = file.relative_to(Path(__file__).parents[2])
    assert second_package.run(tmp_path, str(path), "-q", "-n0").returncode == 0


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, 3, dtype=torch.float64, generator=generator),
            torch.randn(rows, dtype=torch.float64, generator=generator),
        )
        for rows in (3, 1, 2, 5)
    ]


def regression(family: str, *callbacks: Any) -> Any:
    class Regression(LIGHTNINGS[family].LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return (batch[0] @ self.weight - batch[1]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def configure_callbacks(self) -> Any:
            return list(callbacks)

    return Regression()


def after_windows_of_two() -> Tensor:
    """Two steps of gradient descent, on the first two batches as one and on the last two as one, by the closed form."""
    weight = torch.ones(3, dtype=torch.float64)
    first, second, third, fourth = batches()
    for window in ((first, second), (third, fourth)):
        inputs, targets = (torch.cat(parts) for parts in zip(*window, strict=True))
        weight = weight - 0.1 * 2 / len(inputs) * inputs.T @ (inputs @ weight - targets)
    return weight


def trained(family: str, *callbacks: Any, module: Any = None, **arguments: Any) -> Any:
    module = module or regression(family)
    trainer = LIGHTNINGS[family].Trainer(**{"strategy": "accum", **QUIET, **arguments}, callbacks=list(callbacks))
    trainer.fit(module, DataLoader(batches(), batch_size=None, shuffle=False))
    expected = after_windows_of_two()
    assert (module.weight - expected).norm() <= 1e-12 * expected.norm()
    return trainer


@both
@pytest.mark.parametrize("of", LIGHTNINGS)
def test_callbacks_are_those_of_either(family: str, of: str) -> None:
    noise = OURS[of].GradientNoiseScale()
    trainer = trained(family, OURS[of].GradientAccumulation(2), noise)
    assert noise.estimate is not None
    assert trainer.callback_metrics["window/optimizer_steps"] == 2
    assert all(isinstance(callback, LIGHTNINGS[family].Callback) for callback in trainer.callbacks)


@both
@pytest.mark.parametrize("of", LIGHTNINGS)
def test_a_modules_own_callbacks_are_those_of_either(family: str, of: str) -> None:
    trainer = trained(family, module=regression(family, OURS[of].GradientAccumulation(2), OURS[of].GradientNoiseScale()))
    assert [type(callback).__name__ for callback in trainer.callbacks].count("GradientAccumulation") == 1


@both
def test_one_callback_trains_in_both_after_another(family: str) -> None:
    callback = lightning_accum.GradientAccumulation(2)
    for one in (family, OTHER[family], family):
        assert trained(one, callback).callback_metrics["window/optimizer_steps"] == 2


@both
def test_other_callbacks_are_those_of_either(family: str) -> None:
    class Counts(LIGHTNINGS[OTHER[family]].Callback):  # type: ignore[name-defined]
        seen = 0

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.seen += 1

    counts = Counts()
    trained(family, counts, OURS[family].GradientAccumulation(2))
    assert counts.seen == 2


@both
def test_a_callback_that_was_derived_for_the_other_says_from_what_to_derive_it(family: str) -> None:
    class Mine(OURS[OTHER[family]].GradientAccumulation):  # type: ignore[name-defined]
        pass

    home = OURS[family].__name__
    with pytest.raises(TypeError, match=f"Mine is derived .* from {home} import GradientAccumulation$"):
        trained(family, Mine(2))


@both
def test_a_strategy_of_the_other_says_where_it_is(family: str) -> None:
    strategy = OURS[OTHER[family]].DDPAccumulationStrategy()
    told = f"with `import {family}`: from {OURS[family].__name__} import DDPAccumulationStrategy>"
    with pytest.raises(ValueError, match=told):
        LIGHTNINGS[family].Trainer(strategy=strategy, **QUIET)


@both
def test_a_callback_in_a_trainer_without_windows_names_a_strategy(family: str) -> None:
    with pytest.raises(Exception, match=r'has SingleDeviceStrategy. Use Trainer\(strategy="accum"\)'):
        trained(family, lightning_accum.GradientAccumulation(2), strategy="auto")


@both
def test_strategies_of_both_have_the_same_names_and_arguments(family: str) -> None:
    registries = [module.strategies.StrategyRegistry for module in (LIGHTNINGS[family], LIGHTNINGS[OTHER[family]])]
    names = [{name: entry["init_params"] for name, entry in registry.items() if "accum" in name} for registry in registries]
    assert names[0] == names[1]
    assert len(names[0]) == 16
    for name in names[0]:
        assert isinstance(registries[0].get(name), LIGHTNINGS[family].strategies.Strategy)


@both
@pytest.mark.parametrize("of", LIGHTNINGS)
def test_verify_takes_modules_and_data_modules_of_either(family: str, of: str) -> None:
    class Data(LIGHTNINGS[family].LightningDataModule):  # type: ignore[name-defined]
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(batches(), batch_size=None, shuffle=False)

    report = OURS[of].verify(regression(family), Data(), window=2)
    assert report
    assert report.gradient < 1e-12
    with pytest.raises(TypeError, match=rf"Data is of {family}, but Regression of {OTHER[family]}: import both from one"):
        OURS[of].verify(regression(OTHER[family]), Data(), window=2)


@both
def test_a_checkpoint_inside_a_window_goes_on_in_the_other(family: str, tmp_path: Path) -> None:
    class Saves(LIGHTNINGS[family].Callback):  # type: ignore[name-defined]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

    trained(family, OURS[family].GradientAccumulation(2), Saves())
    other, module = OTHER[family], regression(OTHER[family])
    trainer = LIGHTNINGS[other].Trainer(strategy="accum", callbacks=[OURS[other].GradientAccumulation(2)], **QUIET)
    first, second, third, fourth = batches()
    remaining = [fourth, first, second, third]  # a DataLoader without a state begins again
    trainer.fit(module, DataLoader(remaining, batch_size=None, shuffle=False), ckpt_path=tmp_path / "inside.ckpt")
    assert trainer.global_step == 2
    expected = after_windows_of_two()
    assert (module.weight - expected).norm() <= 1e-12 * expected.norm()


# --- one source -----------------------------------------------------------------------------------------------------------

MODULES = sorted(
    ".".join(("lightning_accum", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for file in PACKAGE.rglob("*.py")
)


def second_name(module: str) -> str:
    return module.replace("lightning_accum", "lightning_accum.pytorch_lightning", 1)


def test_imports_are_found_as_python_finds_them() -> None:
    for file in PACKAGE.rglob("*.py"):
        source = file.read_text()
        found = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.module is not None
                found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*"}
        assert found <= families.imports(source), file
        ours = {name for name in families.imports(source) if name.startswith("lightning")}
        assert ours - found <= {f"{name}.as" for name in found} | {name for name in ours if name.rpartition(".")[0] in found}, file


def test_what_imports_lightning_is_loaded_twice_and_nothing_else_is() -> None:
    classes = {}
    of_one = {"lightning_accum", "lightning_accum.families", "lightning_accum.pytorch_lightning", "lightning_accum.ray"}  # an extra
    for name in set(MODULES) - of_one:
        one, two = (importlib.import_module(name) for name in (name, second_name(name)))
        if name in families.loaded_twice():
            assert one is not two
            text = inspect.getsource(one)
            assert inspect.getsource(two) == text
            assert not any(str(getattr(value, "__module__", "")).startswith("lightning.") for value in vars(two).values()), name
        elif not hasattr(one, "__path__"):
            assert one is two
        classes |= {kind: name for kind in vars(one).values() if isinstance(kind, type) and kind.__module__ == name}
    assert {"Tokens", "TokenCount", "SampleCount", "AccumulationWarning", "Policy", "Window"} <= {
        kind.__name__
        for kind, name in classes.items()
        if getattr(importlib.import_module(second_name(name)), kind.__name__) is kind
    }


@pytest.mark.parametrize("name", lightning_accum.__all__)
def test_every_name_is_there_for_both(name: str) -> None:
    one, two = getattr(lightning_accum, name), getattr(lightning_accum.pytorch_lightning, name)
    assert (one is two) == (one.__module__ not in families.loaded_twice())
    assert one.__qualname__ == two.__qualname__
    assert pickle.loads(pickle.dumps(two)) is two
    assert name in dir(lightning_accum.pytorch_lightning)


def test_objects_are_pickled_by_the_name_of_their_class() -> None:
    strategy = pickle.loads(pickle.dumps(lightning_accum.pytorch_lightning.DDPAccumulationStrategy()))
    assert isinstance(strategy, pytorch_lightning.strategies.DDPStrategy)
    callback = pickle.loads(pickle.dumps(lightning_accum.pytorch_lightning.GradientAccumulation(8)))
    assert isinstance(callback, pytorch_lightning.Callback)
    assert callback.policy.window == 8


def test_tracebacks_show_the_line_of_the_source() -> None:
    with pytest.raises(Exception, match="window=0") as caught:
        lightning_accum.pytorch_lightning.GradientAccumulation(0)
    last = traceback.extract_tb(caught.tb)[-1]
    assert Path(last.filename) == PACKAGE / "arguments.py"
    assert (PACKAGE / "arguments.py").read_text().splitlines()[last.lineno - 1].strip() == last.line
    assert isinstance(caught.value, pytorch_lightning.utilities.exceptions.MisconfigurationException)


def test_what_was_compiled_is_kept_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "module.py"
    file.write_text("import lightning.pytorch as pl")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache"))
    for _ in range(2):
        one, two = (loader("module", str(file)).get_code("module") for loader in (SourceFileLoader, families._Second))
        assert one is not None
        assert two is not None
        assert ("lightning.pytorch" in one.co_names, "pytorch_lightning" in two.co_names) == (True, True)
        monkeypatch.setattr(SourceFileLoader, "source_to_code", None)  # the second time nothing is compiled
        monkeypatch.setattr(families._Second, "source_to_code", None)
    assert len(list((tmp_path / "cache").rglob("*.pyc"))) == 2
    file.write_text("import lightning.fabric")
    monkeypatch.undo()
    assert families._Second("module", str(file)).get_code("module").co_names == ("lightning_fabric",)  # type: ignore[union-attr]


def test_warnings_of_both_have_one_category() -> None:
    assert lightning_accum.AccumulationWarning is lightning_accum.pytorch_lightning.AccumulationWarning
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = regression("pytorch_lightning")
        module.norm = nn.BatchNorm1d(3).double()
        module.training_step = lambda batch, batch_idx: module.norm(batch[0]).square().mean() + module.weight.sum() * 0
        trainer = pytorch_lightning.Trainer(strategy="accum", accumulate_grad_batches=2, **QUIET)
        trainer.fit(module, DataLoader(batches()[::3], batch_size=None, shuffle=False))
    told = [warning for warning in caught if warning.category is lightning_accum.AccumulationWarning]
    assert [warning.filename for warning in told if "BatchNorm" in str(warning.message)] == [__file__]


# --- in a process of its own -----------------------------------------------------------------------------------------------

TRAINS = """
import torch
from {family}.demos.boring_classes import BoringModel
quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
trainer = pl.Trainer(strategy="accum", accelerator="cpu", accumulate_grad_batches=2, limit_train_batches=4, max_epochs=1, **quiet)
trainer.fit(BoringModel())
assert trainer.global_step == 2
"""
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({absent}))\n"  # None: there is no such module


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=200)


@pytest.mark.exhaustive
@both
def test_names_work_where_lightning_is_imported_afterwards_and_the_other_is_not(family: str) -> None:
    script = f"import lightning_accum\nimport {family} as pl\n" + TRAINS.format(family=family)
    script += f"import sys; assert not any(name.startswith('{OTHER[family]}.') for name in sys.modules)"
    result = run(script)
    assert result.returncode == 0, result.stderr


@pytest.mark.exhaustive
def test_pytorch_lightning_alone_is_enough() -> None:
    script = WITHOUT.format(absent=["lightning"]) + "import pytorch_lightning as pl, lightning_accum\n"
    script += TRAINS.format(family="pytorch_lightning")
    script += "assert isinstance(lightning_accum.GradientAccumulation(8), pl.Callback)\n"
    script += "from lightning_accum import DDPAccumulationStrategy, Tokens, verify\n"
    script += "assert verify(BoringModel(), torch.randn(8, 32), micro_batch=2)"
    result = run(script)
    assert result.returncode == 0, result.stderr


def test_without_any_lightning_it_is_said_what_to_install() -> None:
    script = WITHOUT.format(absent=["lightning", "pytorch_lightning"]) + "from lightning_accum import GradientAccumulation"
    assert "needs Lightning: pip install lightning (or pytorch-lightning)" in run(script).stderr
