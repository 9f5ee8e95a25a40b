"""The same windows with ``import lightning.pytorch as pl`` and with ``import pytorch_lightning as pl``, each in a process."""

import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest
import second_package

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
OTHER = dict(zip(PACKAGES, reversed(PACKAGES), strict=True))
CORE = """
ddp resume schedulers check verify uneven manual_optimization noise_scale seams command_line sharded row_wise offload what_one_sees
after_a_fit
"""
SLOW = [pytest.param(f"test_{name}", marks=pytest.mark.slow) for name in CORE.split()]


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["test_window_equals_batch", *SLOW])
def test_the_suite_passes_with_pytorch_lightning(name: str, tmp_path: Path) -> None:
    (file,) = Path(__file__).parents[1].glob(f"*/{name}.py")
    path = file.relative_to(Path(__file__).parents[2])
    some = ["-k", "full_batch and not every"] if name == "test_window_equals_batch" else []
    assert second_package.run(tmp_path, str(path), "-q", "-n0", *some).returncode == 0


TRAINS = """
import importlib, sys, torch, warnings
from lightning_accum.testing import assert_window_equals_batch
torch.set_num_threads(1)
torch.manual_seed(1)
ROWS, MODULE = list(torch.randn(11, 32)), importlib.import_module(pl.__name__ + ".demos.boring_classes").BoringModel()
BATCHES = [ROWS[:3], ROWS[3:4], ROWS[4:6], ROWS[6:]]

class Saves(pl.Callback):
    seen = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            trainer.save_checkpoint("inside.ckpt")

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen += 1

def train(batches, strategy="accum", **arguments):
    saves = Saves()
    arguments |= {"windows": [ROWS[:4], ROWS[4:]], "trainer": {"callbacks": [saves]}, "optimizers": [None]}
    assert_window_equals_batch(MODULE, batches, GradientAccumulation(2), strategy=strategy, **arguments)
    return saves

if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(BATCHES[3:] + BATCHES[:3], ckpt_path="inside.ckpt")  # a DataLoader without a state begins again
    else:
        assert train(BATCHES).seen == 2 + 2  # in windows, and on full batches
        assert isinstance(GradientAccumulation(2), pl.Callback)
        assert isinstance(DDPAccumulationStrategy(), pl.strategies.DDPStrategy)
        assert "accum_ddp" in pl.strategies.StrategyRegistry
        train(BATCHES, strategy=AccumulationStrategy)
        assert verify(MODULE, torch.stack(ROWS), micro_batch=2)
        try:
            GradientAccumulation(0)
        except AccumulationError as error:
            assert isinstance(error, pl.utilities.exceptions.MisconfigurationException)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pl.Trainer(strategy="accum", accelerator="cpu", max_epochs=1, accumulate_grad_batches=2, logger=False).fit(
                MODULE, torch.utils.data.DataLoader([None, None], batch_size=None)
            )
        assert [w for w in caught if issubclass(w.category, AccumulationWarning)]
"""
NAMES = "GradientAccumulation, AccumulationError, AccumulationStrategy, AccumulationWarning, DDPAccumulationStrategy, verify\n"
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({absent}))\n"  # None: there is no such module


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    Path("script.py").write_text(script)
    return subprocess.run([sys.executable, "script.py", *arguments], capture_output=True, text=True, timeout=200)


WAYS = {
    **{f"{name} first": f"import {name} as pl\nfrom lightning_accum import {NAMES}" for name in PACKAGES},
    "pytorch_lightning by hand": f"from lightning_accum.pytorch_lightning import {NAMES}import pytorch_lightning as pl\n",
    "pytorch_lightning alone": WITHOUT.format(absent=["lightning"])
    + f"from lightning_accum import {NAMES}import pytorch_lightning as pl\n",
}


@pytest.mark.some_cases(1, 1)
@pytest.mark.parametrize("way", sorted(WAYS, key=lambda way: way.endswith("first")))
def test_windows_are_exact_with_either_package_and_a_checkpoint_inside_one_goes_on_in_the_other(way: str) -> None:
    result = run(WAYS[way] + TRAINS)
    assert result.returncode == 0, result.stderr
    if not way.endswith("first"):
        return
    other = next(first for first in WAYS if first.endswith("first") and first != way)
    result = run(WAYS[other] + TRAINS, "goes on")
    assert result.returncode == 0, result.stderr


@pytest.mark.some_cases(0, 1)
@pytest.mark.parametrize("name", PACKAGES[::-1])
def test_a_program_loads_no_other_package_than_its_own(name: str) -> None:
    script = f"import lightning_accum\nimport {name} as pl\nfrom lightning_accum import GradientAccumulation\n"
    script += TRAINS.partition("if __name__")[0]
    script += f"train(BATCHES)\nassert not any(name.startswith('{OTHER[name]}.') for name in sys.modules)\n"
    result = run(script)
    assert result.returncode == 0, result.stderr


USES = {
    "a name": "from lightning_accum.pytorch_lightning import verify",
    "a strategy": "import pytorch_lightning as pl\npl.Trainer(strategy='accum')",
    "a module": "import pytorch_lightning as pl\naccum.verify(pl.LightningModule())",
    "a Trainer": "import pytorch_lightning as pl\nfrom pytorch_lightning.demos.boring_classes import BoringModel\n"
    "pl.Trainer(callbacks=[accum.GradientAccumulation(2)], accelerator='cpu', logger=False).fit(BoringModel())",
}


def test_what_is_of_the_other_package_is_an_error_that_says_which_import_is_to_come_first() -> None:
    tries = [f"try:\n{indent(use, ' ')}\nexcept Exception as error:\n print('SAID', error)\n" for use in USES.values()]
    result = run(f"import lightning.pytorch\nimport lightning_accum as accum\naccum.Tokens\n{''.join(tries)}")
    said = dict(zip(USES, result.stdout.split("SAID")[1:], strict=True))
    for use, error in said.items():
        assert "pytorch_lightning, but lightning_accum uses lightning.pytorch in this process" in error, use
        assert "import lightning_accum.pytorch_lightning before" in error, use


def test_without_any_lightning_it_is_said_what_to_install() -> None:
    script = WITHOUT.format(absent=["lightning", "pytorch_lightning"]) + "from lightning_accum import GradientAccumulation"
    assert "pip install lightning" in run(script).stderr
