"""Batches of bytes, in an order that is the same for every mix of ranks, window and batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler
from typing_extensions import override

from lightning_accum.demo.model import IGNORED

EDGE = 0
"""The byte before and after a text: no docstring has it."""


def collate(texts: Sequence[bytes]) -> dict[str, Tensor]:
    """Pad texts to the longest of them.

    Returns:
        ``input_ids`` and ``labels``, both (batch, length); a label is the input at its own position, or -100 on padding.

    Example:
        >>> collate([b"ab", b"c"])["labels"].tolist()
        [[0, 97, 98, 0], [0, 99, 0, -100]]
    """
    rows = [torch.tensor([EDGE, *text, EDGE]) for text in texts]
    return {
        "input_ids": pad_sequence(rows, batch_first=True, padding_value=EDGE),
        "labels": pad_sequence(rows, batch_first=True, padding_value=IGNORED),
    }


def count_targets(labels: Tensor) -> Tensor:
    """The bytes that are to be predicted: all labels but the first of a row and padding."""
    return (labels[:, 1:] != IGNORED).sum()


class EpochOrder(Sampler[int]):
    """A permutation of the samples for each epoch, dealt out to the ranks in turn.

    However many ranks there are, and whatever their batch, the first 32 samples together are the same 32, and so on.

    Args:
        samples: how many there are.
        rank: whose share to yield.
        ranks: over how many they are dealt out.

    Example:
        >>> shares = [list(EpochOrder(6, rank, ranks=2)) for rank in range(2)]
        >>> [sample for pair in zip(*shares) for sample in pair] == list(EpochOrder(6, rank=0, ranks=1))
        True
    """

    def __init__(self, samples: int, rank: int, ranks: int) -> None:
        self._samples = samples
        self._rank = rank
        self._ranks = ranks
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Take the order of ``epoch``; Lightning calls it."""
        self._epoch = epoch

    @override
    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self._samples, generator=torch.Generator().manual_seed(self._epoch)).tolist()
        return iter(order[self._rank :: self._ranks])

    def __len__(self) -> int:
        return len(range(self._rank, self._samples, self._ranks))


class Docstrings(pl.LightningDataModule):
    """The corpus in batches, for the rank that asks.

    Args:
        corpus: the texts.
        batch: samples in a loader batch.
    """

    def __init__(self, corpus: Sequence[bytes], batch: int) -> None:
        super().__init__()
        self._corpus = corpus
        self._batch = batch

    @override
    def train_dataloader(self) -> DataLoader[bytes]:
        """The share of this rank."""
        assert self.trainer is not None
        order = EpochOrder(len(self._corpus), self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(self._corpus, batch_size=self._batch, sampler=order, collate_fn=collate)  # type: ignore[arg-type]
