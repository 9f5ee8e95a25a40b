"""Micro-batches: how a loader's batch is made of rows that are samples, and how some of its rows are taken."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lightning_accum.errors import ArgumentError, UnsplittableBatchError
from lightning_accum.splitting.lengths import is_whole
from lightning_accum.splitting.rows import Layout


@dataclass(frozen=True)
class Tokens:
    """A size in tokens, for a window or a micro-batch.

    Args:
        count: how many tokens, at least 1. For a window also a function of the tokens (weights of all ranks) that training has
            seen in its windows so far, for a batch size that grows; it is asked when a window begins.

    Raises:
        ValueError: ``count`` is no int, or less than 1.

    Example:
        >>> Tokens(8_192)
        Tokens(count=8192)
        >>> warm_up = Tokens(lambda seen: 32_768 if seen < 10**9 else 524_288)
        >>> warm_up.at(0), warm_up.at(2 * 10**9)
        (32768, 524288)
    """

    count: int | Callable[[float], int]

    def __post_init__(self) -> None:
        if not callable(self.count):
            _check_tokens(self.count, "Tokens(count)")

    def at(self, seen: float) -> int:
        """The size of a window that begins when training has seen so many tokens.

        Raises:
            ValueError: the function gave no int, or less than 1.
        """
        if not callable(self.count):
            return self.count
        count = self.count(seen)
        _check_tokens(count, f"The function in Tokens(...), asked after {seen:.0f} tokens,")
        return count


def _check_tokens(count: Any, what: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError(f"{what} must be an int of at least 1, but count={count!r}")


# --- are its rows samples? --------------------------------------------------------------------------------------------


def samples_of(batch: Any, samples: Collection[int]) -> int | None:
    """How many samples a loader batch has; None where its rows may be none, as those of a graph."""
    if isinstance(batch, Iterator):  # training_step draws its batches by itself
        return None
    try:
        return layout_of_samples(batch, samples).size
    except Exception:  # whatever a batch is that is not split
        if len(samples) == 1 and 1 not in samples:  # else the dataset may make whole batches
            return next(iter(samples))
        return batch.size(0) if isinstance(batch, Tensor) and batch.dim() else None


def layout_of_samples(batch: Any, samples: Collection[int], known: Mapping[str, str] | None = None) -> Layout:
    """How a batch is made of rows that are samples, of which the loader puts so many into a batch.

    What it shares by all rows has to be a table: no part that had rows before, and no whole numbers that nobody explains: tokens,
    labels or indices, of which a flat batch has more than samples.

    Raises:
        UnsplittableBatchError: the batch has no rows, or its rows are not samples.
    """
    layout, known = Layout(batch, known, samples), known or {}
    found = _contradiction(layout, samples) or (None if known else _packing(layout, samples))
    for part in layout.parts if found is None else ():
        if part.kind == "rows" or part.size is None or (part.is_tensor and part.size in (1, *layout.columns)):
            continue
        is_unexplained = part.is_tensor and is_whole(part.value) and part.path not in known and not samples
        if is_unexplained or (known.get(part.path) == "rows" and part.has_tensors):
            found = f"{part}, and has no entry for each of the {layout.size} rows"
    if found is not None:
        raise UnsplittableBatchError.because(found)
    return layout


def doubt_about(layout: Layout, known: Mapping[str, str]) -> str | None:
    """Why what was read as rows may be none, in words.

    They may be the parts of the only sample: all have its number, and something is there once. Or what is read as shared may be
    several entries of each row, or whole numbers, which are hardly ever a table.
    """
    is_alone = any(tensor.dim() > 0 and tensor.shape[0] == 1 for tensor in layout.shared_tensors.values())
    numbers = (t for t in layout.tensors.values() if t.dim() == 1 and is_whole(t) and t.dtype != torch.bool)
    if is_alone and layout.size > 1 and any(not t.any() for t in numbers):
        return "the rows of the batch may be parts of one sample"
    for path, tensor in layout.shared_tensors.items():
        is_explained = path in known or tensor.shape[0] <= 1 or layout.columns.issuperset(tensor.shape)
        if not is_explained and (is_whole(tensor) or (layout.size > 1 and tensor.shape[0] % layout.size == 0)):
            return f"{_shape(path, tensor)} has no entry for each of the {layout.size} rows, and may have several"
    return None


def _contradiction(layout: Layout, samples: Collection[int]) -> str | None:
    if not samples or layout.size in samples or layout.size <= max(samples):  # a collate_fn may leave samples out
        return None
    hint = " (DataLoader(batch_size=None) says that the dataset makes whole batches)" if max(samples) == 1 else ""
    says = f"the loader puts {' or '.join(map(str, sorted(samples)))} into a batch"
    tensors = ", ".join(_shape(*found) for found in islice(layout.tensors.items(), 1))
    return f"it would be {layout.size} samples, but {says}{hint}: {tensors}"


def _packing(layout: Layout, samples: Collection[int]) -> str | None:
    """Which tensor says that samples lie end to end: offsets, lengths, or the sample of each entry. Reads values."""
    for tensors, others in ((layout.tensors, layout.shared_tensors), (layout.shared_tensors, layout.tensors)):
        ends = {t.shape[1] if t.shape[0] == 1 and t.dim() > 1 else t.shape[0] for t in others.values()}
        for path, numbers in tensors.items() if ends else ():
            if numbers.dim() != 1 or not is_whole(numbers) or numbers.dtype == torch.bool or len(numbers) < 2:
                continue
            steps, total, last = numbers.long().diff(), int(numbers.sum()), int(numbers[-1])
            is_sorted = int(numbers[0]) == 0 and bool((steps >= 0).all())
            are_offsets = is_sorted and last in ends and last != len(numbers)
            are_lengths = int(numbers.min()) > 0 and total in ends and len(numbers) < total
            is_index = is_sorted and bool((steps <= 1).all()) and last + 1 in ends and 0 < last + 1 < len(numbers)
            if are_offsets or are_lengths or (is_index and layout.size not in samples):
                return f"{_shape(path, numbers)} says that samples lie end to end"
    return None


def _shape(path: str, tensor: Tensor) -> str:
    return f"{path} of shape {tuple(tensor.shape)}"
