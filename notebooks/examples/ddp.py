"""Several processes: each window is the loader batches of all of them, and gradients are reduced once a window.

torchrun --nproc_per_node 2 ddp.py    # on one machine
torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint node1:29500 ddp.py --nodes 2    # on each node
python ddp.py --nodes 2 --kubeflow    # in each pod of a PyTorchJob; for SLURM see slurm.sbatch
"""

import argparse
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import KubeflowEnvironment
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_accum import GradientAccumulation, SameOrderSampler


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=int(os.environ.get("SLURM_NNODES", 1)))
    parser.add_argument("--window", type=int, default=4, help="loader batches on each rank (default: 4)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--kubeflow", action="store_true", help="Lightning recognises torchrun and SLURM, not this")
    options = parser.parse_args()

    pl.seed_everything(0)
    inputs = torch.randn(1000, 16)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    loader = DataLoader(data, batch_size=16, sampler=SameOrderSampler(data))  # every sample once, on any number of ranks

    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", 1)))
    trainer = pl.Trainer(
        strategy="accum_ddp", num_nodes=options.nodes, devices=per_node, max_epochs=options.epochs,
        plugins=[KubeflowEnvironment()] if options.kubeflow else None, logger=False, enable_checkpointing=False,
        callbacks=[GradientAccumulation(options.window)], enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Regression(), loader)
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['window/loss_epoch']:.6f}")


if __name__ == "__main__":
    main()
