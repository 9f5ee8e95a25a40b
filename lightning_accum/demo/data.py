"""Batches of bytes, in an order that is the same for every mix of ranks, window and batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_accum import SameOrderSampler
from lightning_accum.demo.model import IGNORED

EDGE = 0
"""The byte before and after a text: no docstring has it."""


def collate(texts: Sequence[bytes]) -> dict[str, Tensor]:
    """Pad texts to the longest: ``input_ids`` and ``labels``, both (batch, length); a label is -100 on padding, else the input.

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


def loader_of(corpus: Sequence[bytes], batch: int) -> DataLoader[bytes]:
    """The corpus in batches, in a new order every epoch: each rank's share of it.

    However many ranks there are, and whatever their batch, the first 32 samples together are the same 32, and so on.

    Example:
        >>> [batch["input_ids"].shape[0] for batch in loader_of([b"a", b"b", b"c"], batch=2)]
        [2, 1]
    """
    dataset = cast("Dataset[Any]", corpus)
    return DataLoader(dataset, batch_size=batch, sampler=SameOrderSampler(dataset), collate_fn=collate)
