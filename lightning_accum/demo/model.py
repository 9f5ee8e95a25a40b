"""What the demo trains: a small language model over bytes, on the reference that Python comes with for its ``help()``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_accum import SameOrderSampler
from lightning_accum.trainer.from_lightning import pl

EDGE = 0  # the byte before and after a text: none has it
SHORTEST = 20  # a paragraph of fewer bytes is a heading, or nothing
IGNORED = -100  # the label of padding: cross_entropy's default


def sample_corpus(samples: int, longest: int) -> list[bytes]:
    """Draw paragraphs of Python's own reference, the same ones at every call, each cut at ``longest`` bytes."""
    paragraphs = {paragraph for topic in topics.values() for paragraph in topic.split("\n\n") if len(paragraph) > SHORTEST}
    return [text.encode()[:longest] for text in random.Random(0).sample(sorted(paragraphs), samples)]


def collate(texts: Sequence[bytes]) -> dict[str, Tensor]:
    """Pad texts to the longest: ``input_ids`` and ``labels``, both (batch, length); a label is -100 on padding, else the input."""
    rows = [torch.tensor([EDGE, *text, EDGE]) for text in texts]
    return {
        "input_ids": pad_sequence(rows, batch_first=True, padding_value=EDGE),
        "labels": pad_sequence(rows, batch_first=True, padding_value=IGNORED),
    }


def count_targets(labels: Tensor) -> Tensor:
    """The bytes that are to be predicted: all labels but the first of a row and padding."""
    return (labels[:, 1:] != IGNORED).sum()


def loader_of(corpus: Sequence[bytes], batch: int) -> DataLoader[bytes]:
    """The corpus in batches, in a new order every epoch, which is the same for any number of ranks and any batch."""
    dataset = cast("Dataset[Any]", corpus)
    return DataLoader(dataset, batch_size=batch, sampler=SameOrderSampler(dataset), collate_fn=collate)


class ByteModel(pl.LightningModule):
    """A causal transformer, trained with AdamW under a one-cycle schedule. It knows nothing of this package."""

    learning_rate = 1e-2

    def __init__(self, width: int = 48, depth: int = 2, longest: int = 258) -> None:
        super().__init__()
        self.net = _Transformer(width, depth, longest)

    @override
    def configure_model(self) -> None:
        """Shard each block and the rest, if the Trainer's strategy is for that (FSDP2)."""
        if self.device_mesh is not None:
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
        # without biases: the gradient of the keys' is zero but for rounding, and Adam blows rounding up to whole steps
        how: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True, "bias": False}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 4 * width, **how) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.next_byte = nn.Linear(width, 256, bias=False)

    @override
    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.bytes(input_ids) + self.positions.weight[: input_ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], hidden.device, hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        logits: Tensor = self.next_byte(self.norm(hidden))
        return logits


def new_model() -> ByteModel:
    """The model that every run begins with, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ByteModel().double()
