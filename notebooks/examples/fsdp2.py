"""A model that is sharded over the ranks by fully_shard (FSDP2); between micro-batches nothing is reduced.

torchrun --nproc_per_node 2 fsdp2.py
"""

import argparse
import os

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_accum import GradientAccumulation, ModelParallelAccumulationStrategy, SameOrderSampler


class NextToken(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
        self.net = nn.Sequential(nn.Embedding(32, 64), *blocks, nn.Linear(64, 32))

    def configure_model(self) -> None:
        for block in self.net:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        return F.cross_entropy(self.net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)

    pl.seed_everything(0)
    data = TensorDataset(torch.randint(0, 4, (500, 24)).cumsum(1) % 32)
    loader = DataLoader(data, batch_size=8, sampler=SameOrderSampler(data))

    # by default Lightning uses the devices of a machine for tensor parallelism, and shards over machines only
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    strategy = ModelParallelAccumulationStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    trainer = pl.Trainer(
        strategy=strategy, devices=ranks, max_epochs=parser.parse_args().epochs,
        callbacks=[GradientAccumulation(4)], logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(NextToken(), loader)
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['window/loss_epoch']:.6f}")


if __name__ == "__main__":
    main()
