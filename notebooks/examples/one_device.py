"""One device: the loader yields the batch that is wanted, and the package runs as much of it at a time as fits.

python one_device.py
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_accum import GradientAccumulation


class Classifier(pl.LightningModule):
    """An ordinary LightningModule: nothing in it knows about accumulation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        logits = self.net(inputs)
        loss = F.cross_entropy(logits, labels)
        self.log("loss", loss, prog_bar=True)  # of the whole batch, however it was split
        self.log("accuracy", (logits.argmax(1) == labels).float().mean(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--micro-batch", default="auto", help='samples, or "auto": as many as memory allows (default)')
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    pl.seed_everything(0)
    inputs = torch.randn(8192, 64)
    data = TensorDataset(inputs, inputs[:, :10].argmax(1))
    loader = DataLoader(data, batch_size=options.batch_size, shuffle=True)

    micro_batch = "auto" if options.micro_batch == "auto" else int(options.micro_batch)
    accumulation = GradientAccumulation(micro_batch=micro_batch)
    trainer = pl.Trainer(strategy="accum", devices=1, max_epochs=options.epochs, callbacks=[accumulation], logger=False)
    trainer.fit(Classifier(), loader)
    print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['window/loss_epoch']:.6f}")


if __name__ == "__main__":
    main()
