"""Two workers of Ray Train: windows are their full batches, and a reported checkpoint goes on inside a window."""

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
from support import StatefulLoader, Toy, classified, error_of_updates, joined, labelled, python_path, train_by_hand, trainer  # noqa: E402

from lightning_accum import GradientAccumulation  # noqa: E402

if not issubclass(RayDDPStrategy, pl.strategies.DDPStrategy):
    pytest.skip("Ray Train has the strategies of Lightning's other package", allow_module_level=True)

from lightning_accum.ray import RayDDPAccumulationStrategy, RayFSDPAccumulationStrategy  # noqa: E402

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

BY_RANK = [labelled(3, 1, 2, 5, ignored=0.2), labelled(2, 4, 1, 1, seed=2)]  # two windows of two loader batches of each rank
SAVED_AFTER = 3  # loader batches: inside of the second window


class ReportInsideAWindow(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 != SAVED_AFTER:
            return
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(Path(folder, f"{module.optimizer}.ckpt"))  # on all ranks, which gathers what they have
            checkpoint = train.Checkpoint.from_directory(folder) if trainer.is_global_zero else None
            train.report({"optimizer": module.optimizer}, checkpoint=checkpoint)


def on_each_worker(config: dict[str, Any]) -> None:  # trains with each optimizer, and saves the parameters that it ends with
    for optimizer, resumed in config["checkpoints"].items():
        trained, callbacks = Toy(classified, optimizer), [GradientAccumulation(2), *([] if resumed else [ReportInsideAWindow()])]
        arguments = {"plugins": [RayLightningEnvironment()], "callbacks": callbacks, "devices": "auto", "max_epochs": 2}
        run = prepare_trainer(trainer(RayDDPAccumulationStrategy(), **arguments))
        run.fit(trained, StatefulLoader(BY_RANK[run.global_rank]), ckpt_path=resumed)
        if run.is_global_zero:
            torch.save(dict(trained.named_parameters()), Path(config["folder"], f"{optimizer}.pt"))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    environment = {"env_vars": {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray.shutdown()


def on_two_workers(folder: Path, checkpoints: dict[str, str | None]) -> dict[str, str]:
    """Returns the checkpoints that they have reported, by optimizer."""
    folder.mkdir()
    result = TorchTrainer(
        on_each_worker,
        train_loop_config={"checkpoints": checkpoints, "folder": str(folder)},
        scaling_config=train.ScalingConfig(num_workers=2, use_gpu=False),
        run_config=train.RunConfig(storage_path=str(folder / "storage")),
    ).fit()
    return {metrics["optimizer"]: f"{saved.path}/{metrics['optimizer']}.ckpt" for saved, metrics in result.best_checkpoints}


def test_two_workers_take_the_steps_of_the_full_batches_also_resumed_inside_a_window(tmp_path: Path) -> None:
    saved = on_two_workers(tmp_path / "whole", dict.fromkeys(("sgd", "adamw")))
    on_two_workers(tmp_path / "resumed", saved)
    windows = [joined([batch for own in BY_RANK for batch in own[i : i + 2]]) for i in (0, 2)]
    for file in tmp_path.glob("*/*.pt"):
        expected = train_by_hand(Toy(classified, file.stem), windows, 2)
        assert error_of_updates(torch.load(file), expected, Toy(classified, file.stem)) < 1e-12
    assert len(list(tmp_path.glob("*/*.pt"))) == 4


def test_ray_takes_the_sharded_strategy() -> None:
    environment = RayLightningEnvironment()
    run = SimpleNamespace(strategy=RayFSDPAccumulationStrategy(sync="micro_batch", cluster_environment=environment))
    assert prepare_trainer(run) is run
