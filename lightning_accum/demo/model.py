"""A small causal language model over bytes: an ordinary LightningModule that knows nothing of this package."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from typing_extensions import override

IGNORED = -100
"""The label of padding: cross_entropy's default."""


class ByteModel(pl.LightningModule):
    """A transformer that predicts the next byte, trained with AdamW under a one-cycle schedule.

    Args:
        width: features of a position.
        depth: transformer blocks.
        longest: positions that it can see.
    """

    learning_rate = 1e-2

    def __init__(self, width: int = 48, depth: int = 2, longest: int = 258) -> None:
        super().__init__()
        self.net = _Transformer(width, depth, longest)

    @override
    def configure_model(self) -> None:
        """Shard each block and the rest, where the Trainer's strategy wants it (FSDP2)."""
        if self.device_mesh is not None:
            from torch.distributed.fsdp import fully_shard  # not in the oldest torch

            for part in (*self.net.blocks, self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    @override
    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of the next byte: (batch, length) to (batch, length, 256)."""
        logits: Tensor = self.net(input_ids)
        return logits

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean loss of the bytes to predict; padding has the label -100."""
        logits = self(batch["input_ids"])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def configure_optimizers(self) -> Any:
        """AdamW and a one-cycle schedule over the optimizer steps that the Trainer announces."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.learning_rate, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class _Transformer(nn.Module):
    def __init__(self, width: int, depth: int, longest: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.next_byte = nn.Linear(width, 256, bias=False)

    @override
    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.blocks(self.bytes(input_ids) + self.positions(positions))
        logits: Tensor = self.next_byte(self.norm(hidden))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        # without a bias: the gradient of the keys' bias is zero but for rounding, and Adam blows rounding up to whole steps
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        split = self.queries_keys_values(self.attention_norm(hidden)).unflatten(-1, (3, 2, -1))
        queries, keys, values = split.permute(2, 0, 3, 1, 4)  # each (batch, one of two heads, position, feature)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).flatten(-2))
        out: Tensor = hidden + self.feed_forward(hidden)
        return out


def new_model() -> ByteModel:
    """The model that every run begins with, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ByteModel().double()
