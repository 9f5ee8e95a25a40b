"""LightningCLI: module, data and accumulation from a file.

python cli.py fit --config cli.yaml
python cli.py fit --config cli.yaml --trainer.max_epochs 2 --data.batch_size 128
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    """An ordinary LightningModule: nothing in it knows about accumulation."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Data(pl.LightningDataModule):
    """Made-up samples; the label says which of ten numbers is the largest."""

    def __init__(self, batch_size: int = 256) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[list[Tensor]]:
        inputs = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=self.batch_size)


if __name__ == "__main__":
    cli = LightningCLI(Classifier, Data, save_config_kwargs={"overwrite": True})
    print(f"{cli.trainer.global_step} steps, loss {cli.trainer.callback_metrics['window/loss_epoch']:.6f}")
