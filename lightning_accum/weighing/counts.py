"""Explicit weights: what is counted in a batch, for losses whose graph hides it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_accum.errors import ArgumentError, MissingEntryError, UnsplittableBatchError, WrongTypeError
from lightning_accum.splitting.rows import first_tensor_or_list, read_parts

Weight: TypeAlias = Callable[[Any], Any]
"""Counts what the mean loss of a batch is divided by: takes the batch, returns a scalar tensor or a number."""


@dataclass(frozen=True)
class TokenCount:
    """Weigh a micro-batch by its tokens that are not ignored.

    Args:
        key: where the labels are in the batch: a key of a mapping, an attribute, or the index in a tuple.
        ignore_index: labels with this value do not count, as in :func:`torch.nn.functional.cross_entropy`.
        shift: whether the model predicts the next token from labels that it shifts itself, so that the first position of every
            row has no prediction. True for Hugging Face's causal language models; False for labels that the data has shifted.

    Raises:
        KeyError: (when called) the batch has no such key; the message lists those that it has.

    Example:
        >>> TokenCount()({"labels": torch.tensor([[5, 6, 7, -100], [8, 9, -100, -100]])})
        tensor(3)
    """

    key: str | int = "labels"
    ignore_index: int = -100
    shift: bool = True

    def __call__(self, batch: Any) -> Tensor:
        """Count the tokens of ``batch``."""
        labels = _look_up(batch, self.key)
        if not isinstance(labels, Tensor):
            raise WrongTypeError(f"TokenCount(key={self.key!r}): expected a tensor of labels, found {type(labels).__name__}")
        if self.shift:
            if labels.dim() < 2:
                raise ArgumentError(
                    f"TokenCount(key={self.key!r}, shift=True): labels of shape {tuple(labels.shape)} have no sequence dimension"
                    " to shift along; pass shift=False"
                )
            labels = labels[..., 1:]
        return (labels != self.ignore_index).sum()


@dataclass(frozen=True)
class SampleCount:
    """Weigh a micro-batch by its samples: the entries of a list that has one a sample, else the size of dimension 0 of its first
    tensor.

    Args:
        key: look at this entry of the batch instead (a key of a mapping, an attribute, or the index in a tuple).

    Raises:
        ValueError: (when called) there is no tensor with a dimension 0 in the batch, or it is a list of two tensors that may be
            two samples, or an input and its target.

    Example:
        >>> SampleCount()([torch.zeros(4, 3), torch.zeros(4)])
        tensor(4)
        >>> images, targets = [torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)], [{"boxes": torch.zeros(n, 4)} for n in (5, 1)]
        >>> SampleCount()((images, targets))
        tensor(2)
    """

    key: str | int | None = None

    def __call__(self, batch: Any) -> Tensor:
        """Count the samples of ``batch``."""
        samples = count_samples(batch if self.key is None else _look_up(batch, self.key))
        if samples is None:
            found = f"found no tensor with a dimension 0 in a batch of type {type(batch).__name__}"
            if isinstance(batch, (list, tuple)) and len(batch) == 2:
                found = (
                    f"a {type(batch).__name__} of 2 may be two samples, or an input and its target: pass the `key` of one, or len"
                )
            raise ArgumentError(f"{self}: {found}")
        return torch.tensor(samples)


def count_samples(batch: Any) -> int | None:
    """The samples of a batch; None where they cannot be told.

    The size of dimension 0 of its first tensor. Where a list comes first that may have one entry a sample, the batch is read as
    one that is split, and the list counts its entries where that says nothing.
    """
    first = first_tensor_or_list(batch)
    if first is None or isinstance(first, Tensor):
        return None if first is None else first.size(0)
    is_pair = first is batch and len(first) == 2  # an input and its target, or two samples
    try:
        return None if is_pair and isinstance(first[0], Tensor) else read_parts(batch, {})[1]
    except UnsplittableBatchError:
        return None if is_pair else len(first)


def _look_up(batch: Any, key: str | int) -> Any:
    try:
        if not (isinstance(batch, Tensor) and isinstance(key, str)):  # of which torch warns
            return batch[key]
    except (KeyError, IndexError, TypeError):
        pass
    if isinstance(key, str) and hasattr(batch, key):
        return getattr(batch, key)
    if hasattr(batch, "keys"):
        has: str = f"it has the keys {list(batch.keys())}"
    elif isinstance(batch, (list, tuple)):
        has = f"it is a {type(batch).__name__} of {len(batch)}"
    else:
        has = f"it is a {type(batch).__name__}"
    raise MissingEntryError(f"the batch has no entry {key!r}: {has}; pass the right `key` to the weight")


def expected_weight(batch: Any, weight: Weight | str | tuple[Weight, ...]) -> float:
    """What a batch will about weigh, before there is a loss to tell: its labels that are not ignored, else its samples.

    Example:
        >>> expected_weight({"labels": torch.tensor([[1, 2, -100]])}, "auto")
        2.0
        >>> expected_weight([torch.zeros(3, 2)], "auto")
        3.0
    """
    if callable(weight):
        return float(weight(batch))
    with suppress(Exception):
        return float(TokenCount(shift=False)(batch))
    return float(count_samples(batch) or 1)
