"""Two workers of Ray Train: windows are their full batches, and a reported checkpoint goes on inside a window."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

ray = pytest.importorskip("ray")
train = pytest.importorskip("ray.train")
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer  # noqa: E402
from ray.train.torch import TorchTrainer  # noqa: E402
from support import StatefulLoader, python_path  # noqa: E402

from lightning_accum import GradientAccumulation  # noqa: E402

if not issubclass(RayDDPStrategy, pl.strategies.DDPStrategy):
    pytest.skip("Ray Train has the strategies of Lightning's other package", allow_module_level=True)

from lightning_accum.ray import RayDDPAccumulationStrategy, RayFSDPAccumulationStrategy  # noqa: E402

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

SIZES = ((3, 1, 2, 5), (2, 4, 1, 1))
"""Of the loader batches of each rank: two windows of two."""
SAVED_AFTER = 3
"""Loader batches: inside of the second window."""


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [tuple(torch.randn(n, 4, dtype=torch.float64, generator=generator) for _ in range(2)) for n in SIZES[rank]]


class Regression(pl.LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double()
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, targets = batch
        return torch.nn.functional.mse_loss(self.layers(rows), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), 0.01)


class ReportInsideAWindow(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 != SAVED_AFTER:
            return
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(Path(folder, f"{module.optimizer}.ckpt"))  # on all ranks, which gathers what they have
            checkpoint = train.Checkpoint.from_directory(folder) if trainer.is_global_zero else None
            train.report({"optimizer": module.optimizer}, checkpoint=checkpoint)


def on_each_worker(config: dict[str, Any]) -> None:
    """Trains with each optimizer, and saves the parameters that it ends with."""
    for optimizer, resumed in config["checkpoints"].items():
        module = Regression(optimizer)
        trainer = pl.Trainer(
            strategy=RayDDPAccumulationStrategy(),
            plugins=[RayLightningEnvironment()],
            callbacks=[GradientAccumulation(2), *([] if resumed else [ReportInsideAWindow()])],
            accelerator="cpu",
            devices="auto",
            max_epochs=2,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        prepare_trainer(trainer).fit(module, StatefulLoader(batches(trainer.global_rank)), ckpt_path=resumed)
        if trainer.is_global_zero:
            torch.save(list(module.parameters()), Path(config["folder"], f"{optimizer}.pt"))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    environment = {"env_vars": {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray.shutdown()


def trained(folder: Path, checkpoints: dict[str, str | None]) -> dict[str, str]:
    """Train on two workers. Returns the checkpoints that they have reported, by optimizer."""
    folder.mkdir()
    result = TorchTrainer(
        on_each_worker,
        train_loop_config={"checkpoints": checkpoints, "folder": str(folder)},
        scaling_config=train.ScalingConfig(num_workers=2, use_gpu=False),
        run_config=train.RunConfig(storage_path=str(folder / "storage")),
    ).fit()
    return {metrics["optimizer"]: f"{saved.path}/{metrics['optimizer']}.ckpt" for saved, metrics in result.best_checkpoints}


def by_hand(optimizer: str) -> list[torch.Tensor]:
    """The parameters after the joined batches of the windows."""
    module = Regression(optimizer)
    step = module.configure_optimizers()
    for _ in range(2):
        for window in (slice(0, 2), slice(2, 4)):
            parts = [batch for rank in range(2) for batch in batches(rank)[window]]
            step.zero_grad()
            module.training_step(tuple(map(torch.cat, zip(*parts, strict=True))), 0).backward()
            step.step()
    return list(module.parameters())


def test_two_workers_take_the_steps_of_the_full_batches_also_resumed_inside_a_window(tmp_path: Path) -> None:
    saved = trained(tmp_path / "whole", dict.fromkeys(("sgd", "adamw")))
    trained(tmp_path / "resumed", {optimizer: saved[optimizer] for optimizer in ("sgd", "adamw")})
    for optimizer in ("sgd", "adamw"):
        for name in ("whole", "resumed"):
            found = torch.load(tmp_path / name / f"{optimizer}.pt", weights_only=False)
            for ours, theirs in zip(found, by_hand(optimizer), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_ray_takes_the_sharded_strategy() -> None:
    strategy = RayFSDPAccumulationStrategy(sync="micro_batch", cluster_environment=RayLightningEnvironment())
    trainer = SimpleNamespace(strategy=strategy)
    assert prepare_trainer(trainer) is trainer
