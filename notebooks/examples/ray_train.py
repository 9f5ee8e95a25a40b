"""Ray Train: the workers are Ray's, on one machine or on a cluster, and each window is the loader batches of all of them.

pip install "ray[train]" && python ray_train.py --workers 2
"""

import argparse

import lightning.pytorch as pl
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_accum import GradientAccumulation, SameOrderSampler
from lightning_accum.ray import RayDDPAccumulationStrategy


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train_on_each_worker(config: dict[str, int]) -> None:
    pl.seed_everything(0)
    inputs = torch.randn(1000, 16)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    loader = DataLoader(data, batch_size=16, sampler=SameOrderSampler(data))  # every sample once, on any number of workers
    trainer = pl.Trainer(
        strategy=RayDDPAccumulationStrategy(), plugins=[RayLightningEnvironment()], devices="auto", logger=False,
        callbacks=[GradientAccumulation(config["window"]), RayTrainReportCallback()], max_epochs=config["epochs"],
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    prepare_trainer(trainer).fit(Regression(), loader)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--window", type=int, default=4, help="loader batches on each worker (default: 4)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--storage", help="where checkpoints go (default: Ray's)")
    options = parser.parse_args()
    scaling = ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available())
    run = RunConfig(storage_path=options.storage)
    result = TorchTrainer(train_on_each_worker, train_loop_config=vars(options), scaling_config=scaling, run_config=run).fit()
    print(f"{result.metrics['step']} steps, loss {result.metrics['window/loss_epoch']:.6f}")
