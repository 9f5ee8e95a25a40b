"""Counts of the batch that a loss which hides its sum may have been divided by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_accum.errors import UnreadableLossError
from lightning_accum.exact import exact
from lightning_accum.weighing.counts import SampleCount

_IGNORED = -100


@dataclass(frozen=True)
class Count:
    """What is counted in one tensor of the batch.

    Attributes:
        path: keys and places that lead to it.
        what: ``"labels"`` that are not ignored, ``"mask"`` that is not 0, ``"elements"``, or their ``"sum"``.
        is_shifted: without the first column, as a language model leaves it out.
    """

    path: tuple[Any, ...]
    what: str
    is_shifted: bool = False

    def __call__(self, batch: Any) -> float:
        """How many there are."""
        for key in self.path:
            batch = batch[key]
        tensor = batch[..., 1:] if self.is_shifted else batch
        if self.what == "elements":
            return float(tensor.numel())
        if self.what == "sum":
            return float(exact(tensor).sum())
        return float((tensor != (_IGNORED if self.what == "labels" else 0)).sum())

    def __str__(self) -> str:
        place = "".join(f"[{key!r}]" for key in self.path)
        shifted = ", without the first column," * self.is_shifted
        counted = {"mask": "number of entries that are not 0", "sum": "sum"}.get(self.what, f"number of {self.what}")
        return f"{counted}{shifted} of batch{place}"


@dataclass(frozen=True)
class Adopted:
    """Counts that were proportional on all rows that were checked.

    Attributes:
        counts: they.
        ratios: what each comes to for one of the first.
    """

    counts: tuple[Any, ...]
    ratios: tuple[float, ...]

    def __call__(self, batch: Any) -> float:
        """What all of them say.

        Raises:
            UnreadableLossError: they part.
        """
        values = [float(count(batch)) / ratio for count, ratio in zip(self.counts, self.ratios, strict=True)]
        for count, value in zip(self.counts, values, strict=True):
            if abs(value - values[0]) > 1e-9 * max(abs(value), abs(values[0])):
                raise UnreadableLossError(
                    f"The loss hides its sum. In the rows that were checked it was divided by the {self.counts[0]}, or by the"
                    f" {count}; in this batch these are {values[0]:g} and {value:g}. Say which: GradientAccumulation(weight=...),"
                    " with a function of the batch that returns the count, as TokenCount or SampleCount do."
                )
        return values[0]

    def only(self, counts: Sequence[Any]) -> Adopted:
        """Some of them, in the same unit."""
        pairs = [(count, ratio) for count, ratio in zip(self.counts, self.ratios, strict=True) if count in counts]
        return Adopted(*map(tuple, zip(*pairs, strict=True)))

    def __str__(self) -> str:
        return f"the {self.counts[0]}"


def adopted(counts: Sequence[Any], batch: Any) -> Adopted | None:
    """Those of some counts that are not 0 in a batch, in one unit."""
    pairs = [(count, value) for count in counts if (value := float(count(batch)))]
    if not pairs:
        return None
    return Adopted(tuple(count for count, _ in pairs), tuple(value / pairs[0][1] for _, value in pairs))


def counts_of(batch: Any) -> list[Any]:
    """The usual ones, of a batch."""
    found: list[Any] = []
    for path, tensor in _tensors_of(batch):
        is_mask = tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())
        is_labels = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        for what in ["labels"] * is_labels + ["mask"] * is_mask:
            found += [Count(path, what)] + [Count(path, what, is_shifted=True)] * (tensor.dim() > 1)
        if not is_labels:
            found.append(Count(path, "elements"))
        if tensor.is_floating_point() and not is_mask and 0 <= tensor.min() < tensor.max():  # weights of rows
            found.append(Count(path, "sum"))
    return [*found, SampleCount()]


def _tensors_of(batch: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(batch, Tensor):
        if batch.dim() > 0:
            yield path, batch
    elif isinstance(batch, (Mapping, Sequence)) and not isinstance(batch, str) and len(path) < _DEPTH:
        pairs = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
        for key, value in pairs:
            yield from _tensors_of(value, (*path, key))


_DEPTH = 3
