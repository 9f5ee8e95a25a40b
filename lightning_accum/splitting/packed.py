"""Batches whose samples are packed end to end, so that dimension 0 is no row a sample: refused, since rows of them are no samples.

Graphs, where nodes lie end to end beside one label a graph; texts without padding, with their offsets (``cu_seqlens``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_accum.errors import UnsplittableBatchError
from lightning_accum.splitting.micro_batch import Layout


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


def layout_of_samples(batch: Any, samples: Collection[int]) -> Layout:
    """How a batch is made of rows that are samples.

    Raises:
        UnsplittableBatchError: there are none, or they are no samples.
    """
    layout = Layout.read(batch, samples=samples)
    PackedBatches(lambda: samples, lambda message: None).check(layout, is_first=True)
    return layout


def may_be_one_sample(layout: Layout) -> bool:
    """Whether what was found to be rows may be the parts of the only sample: all have its number, and something is there once."""
    is_alone = any(tensor.dim() > 0 and tensor.shape[0] == 1 for tensor in layout.shared_tensors.values())
    numbers = (t for t in layout.tensors.values() if t.dim() == 1 and not (t.is_floating_point() or t.is_complex()))
    return is_alone and layout.size > 1 and any(t.dtype != torch.bool and not t.any() for t in numbers)


def may_belong_to_rows(layout: Layout) -> str | None:
    """What is read as shared by all rows, and may be several entries of each, or whole numbers, which are hardly ever a table."""
    columns = _columns(layout)
    for path, tensor in layout.shared_tensors.items():
        is_whole = not (tensor.is_floating_point() or tensor.is_complex())
        is_multiple = layout.size > 1 and tensor.shape[0] % layout.size == 0
        if tensor.shape[0] > 1 and not columns.issuperset(tensor.shape) and (is_whole or is_multiple):
            return _shape(path, tensor)
    return None


class PackedBatches:
    """Refuses batches whose rows are no samples.

    What a batch shares by all micro-batches has to be a table. It is not, where it has as many entries as the loader puts samples
    into a batch, where its size changes with the batch, or where it says how samples are packed. Whole numbers that nobody
    explains are no table either.

    Args:
        samples: returns how many samples the loader puts into a batch; empty where it does not say so.
    """

    def __init__(self, samples: Callable[[], Collection[int]], warn: Callable[[str], None]) -> None:
        self._samples = samples
        self._warn = warn
        self._is_warned = False
        self._sizes: dict[str, int] = {}
        """Dimension 0 of what was shared so far, by path."""
        self._with_rows: set[str] = set()

    def check(self, layout: Layout, is_first: bool) -> None:
        """Look at a batch of other shapes than the one before.

        Raises:
            UnsplittableBatchError: its rows are no samples.
        """
        samples = self._samples()
        found = self._contradiction(layout, samples) or self._change(layout)
        if found is None and is_first and layout.shared_tensors:
            found = _packing(layout, is_confirmed=layout.size in samples)
        if found is None:
            found = self._unexplained(layout, samples)
        if found is not None:
            raise UnsplittableBatchError.because(found)

    def _contradiction(self, layout: Layout, samples: Collection[int]) -> str | None:
        if not samples or layout.size in samples:
            return None
        says = f"the loader puts {' or '.join(map(str, sorted(samples)))} into a batch"
        read = f"{_shape(*next(iter(layout.tensors.items())))} would be {layout.size} samples" if layout.tensors else ""
        if layout.size > max(samples):
            hint = " (DataLoader(batch_size=None) says that the dataset makes whole batches)" if max(samples) == 1 else ""
            return f"{read or f'it would be {layout.size} samples'}, but {says}{hint}"
        for path, tensor in layout.shared_tensors.items():
            if tensor.shape[0] in samples:
                return f"{read}, but {says}, and {_shape(path, tensor)} has as many"
        return None

    def _change(self, layout: Layout) -> str | None:
        columns = _columns(layout)
        self._with_rows.update(layout.tensors)
        for path, tensor in layout.shared_tensors.items():
            size, found = tensor.shape[0], f"{_shape(path, tensor)} has no entry for each of the {layout.size} rows"
            if size > 1 and path in self._with_rows:
                return f"{found}, and had one in an earlier batch"
            if size == 1 or size in columns:  # one for all rows, or for all columns
                continue
            before = self._sizes.setdefault(path, size)
            if before != size:
                return f"{found}, and had {before} in an earlier batch: what changes with the batch is no table that samples share"
        return None

    def _unexplained(self, layout: Layout, samples: Collection[int]) -> str | None:
        """Whole numbers are tokens, labels or indices, and hardly ever a table: a flat batch has more of them than samples."""
        columns = _columns(layout)
        whole = {path: t for path, t in layout.shared_tensors.items() if not (t.is_floating_point() or t.is_complex())}
        strange = [_shape(path, t) for path, t in whole.items() if t.shape[0] != 1 and t.shape[0] not in columns]
        if strange and not samples:
            return f"it was found to have {layout.size} samples, and {', '.join(strange)} has no entry for each of them"
        if whole and not self._is_warned:
            self._is_warned = True
            shared = ", ".join(f"{path} {tuple(tensor.shape)}" for path, tensor in whole.items())
            self._warn(
                f"{shared}: taken as shared by all micro-batches, since the batch was found to have {layout.size} samples. If they"
                " belong to samples, pass GradientAccumulation(split=...), a function split(batch, size) that returns the"
                " micro-batches as a list."
            )
        return None


def _shape(path: str, tensor: Tensor) -> str:
    return f"{path} of shape {tuple(tensor.shape)}"


def _columns(layout: Layout) -> set[int]:
    return {size for tensor in layout.tensors.values() for size in tensor.shape[1:]}


def _packing(layout: Layout, is_confirmed: bool) -> str | None:
    """Which tensor says that samples lie end to end, and of which other; None where none does. Reads values."""
    for tensors, others in ((layout.tensors, layout.shared_tensors), (layout.shared_tensors, layout.tensors)):
        ends = dict(_ends(others))
        for path, numbers in tensors.items():
            if numbers.dim() != 1 or numbers.is_floating_point() or numbers.is_complex() or len(numbers) < 2:
                continue
            for length, other in ends.items():
                says = _says(numbers, length, may_be_labels=is_confirmed and tensors is layout.tensors)
                if says:
                    return f"{path} {says} in {other}, so that its samples lie end to end"
    return None


def _ends(tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, str]]:
    """How long the tensors are along what samples may be packed along."""
    for path, tensor in tensors.items():
        length = tensor.shape[1] if tensor.shape[0] == 1 and tensor.dim() > 1 else tensor.shape[0]
        if length > 1:
            yield length, _shape(path, tensor)


def _says(numbers: Tensor, length: int, may_be_labels: bool) -> str | None:
    first, last = int(numbers[0]), int(numbers[-1])
    steps = numbers.long().diff()
    is_sorted = first == 0 and bool((steps >= 0).all())
    if is_sorted and last == length != len(numbers):
        return "counts up to where samples end"
    if len(numbers) < length and int(numbers.min()) > 0 and int(numbers.sum()) == length:
        return "adds up to the entries"
    is_index = is_sorted and last + 1 == length < len(numbers) and bool((steps <= 1).all())
    return "numbers the samples" if is_index and not may_be_labels else None
