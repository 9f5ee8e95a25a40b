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
test_ddp test_resume test_schedulers test_check test_verify test_uneven test_manual_optimization
test_noise_scale test_watch test_command_line test_sharded test_row_wise test_offload test_what_one_sees
test_after_a_fit test_windows_over_time
"""


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["test_window_equals_batch", *(pytest.param(name, marks=pytest.mark.slow) for name in CORE)])
def test_the_suite_passes_with_pytorch_lightning(name: str, tmp_path: Path) -> None:
    (file,) = Path(__file__).parents[1].glob(f"*/{name}.py")
    path = file.relative_to(Path(__file__).parents[2])
    some = ["-k", "full_batch and not every"] if name == "test_window_equals_batch" else []
    assert second_package.run(tmp_path, str(path), "-q", "-n0", *some).returncode == 0


TRAINS = """
import sys, torch, warnings
torch.set_num_threads(1)
quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
generator = torch.Generator().manual_seed(1)
BATCHES = [torch.randn(rows, 4, dtype=torch.float64, generator=generator) for rows in (3, 1, 2, 5)]

class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        return (batch[:, :3] @ self.weight - batch[:, 3]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Saves(pl.Callback):
    seen = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            trainer.save_checkpoint("inside.ckpt")

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen += 1

def train(batches, strategy="accum", ckpt_path=None, **arguments):
    module, saves = Regression(), Saves()
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=1, callbacks=[GradientAccumulation(2), saves], **quiet, **arguments
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None, shuffle=False), ckpt_path=ckpt_path)
    weight = torch.ones(3, dtype=torch.float64)
    for window in (BATCHES[:2], BATCHES[2:]):  # gradient descent on full batches, in closed form
        rows = torch.cat(window)
        weight = weight - 0.1 * 2 / len(rows) * rows[:, :3].T @ (rows[:, :3] @ weight - rows[:, 3])
    assert (module.weight - weight).norm() <= 1e-12 * weight.norm()
    assert trainer.global_step == trainer.callback_metrics["window/optimizer_steps"] == 2
    return trainer, saves

if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(BATCHES[3:] + BATCHES[:3], ckpt_path="inside.ckpt")  # a DataLoader without a state begins again
    else:
        _, saves = train(BATCHES)
        assert saves.seen == 2
        assert isinstance(GradientAccumulation(2), pl.Callback)
        assert isinstance(DDPAccumulationStrategy(), pl.strategies.DDPStrategy)
        assert "accum_ddp" in pl.strategies.StrategyRegistry
        train(BATCHES, strategy=AccumulationStrategy())
        assert verify(Regression(), BATCHES[3], micro_batch=2)
        try:
            GradientAccumulation(0)
        except AccumulationError as error:
            assert isinstance(error, pl.utilities.exceptions.MisconfigurationException)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pl.Trainer(strategy="accum", accelerator="cpu", max_epochs=1, accumulate_grad_batches=2, **quiet).fit(
                Regression(), torch.utils.data.DataLoader([None, None], batch_size=None)
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
