"""Counts of a batch, for losses whose graph hides the denominator: explicit weights, and counts that the check adopts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Number
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_accum.errors import ArgumentError, MissingEntryError, UnreadableLossError, UnsplittableBatchError, WrongTypeError
from lightning_accum.exact import exact, is_on_host
from lightning_accum.splitting.rows import Layout, Part, is_record, may_be_samples, parse
from lightning_accum.weighing.terms import Denominator

Weight: TypeAlias = Callable[[Any], Any]
"""A function from a batch to the denominator of its mean loss: a scalar tensor or a number."""


@dataclass(frozen=True)
class TokenCount:
    """Weight a micro-batch by its tokens that are not ignored.

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
        return (labels.long() != self.ignore_index).sum()  # as a uint8, -100 would be 156


@dataclass(frozen=True)
class SampleCount:
    """Weight a micro-batch by its samples: the entries of a list with one entry a sample, else the size of dimension 0 of its first
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
                found = f"a {type(batch).__name__} of 2 may be two samples, or an input and its target: pass one's `key`, or len"
            raise ArgumentError(f"{self}: {found}")
        return torch.tensor(samples)


def count_samples(batch: Any) -> int | None:
    """The number of samples in a batch; None if unknown.

    The size of dimension 0 of its first tensor. If a list comes first that may have one entry a sample, the batch is read as for
    splitting; if this fails, the entries of the list count.
    """
    root = parse(batch)
    parts = _with_attributes(root, depth=3)
    first = next((part for part in parts if (part.is_tensor and part.size is not None) or _may_be_rows(part, root)), None)
    if first is None or first.is_tensor:
        return None if first is None else first.size
    try:
        return Layout(batch).size
    except UnsplittableBatchError:
        return None if first is root and first.size == 2 else first.size  # an input and its target, or two samples


def _with_attributes(root: Part, depth: int) -> Iterator[Part]:
    """Yield all parts, and the attributes of unknown classes. Nothing is drawn from iterators."""
    for part in root.walk():
        yield part
        if part.problem and depth and not isinstance(part.value, (Tensor, Iterator)):
            yield from _with_attributes(parse(getattr(part.value, "__dict__", {})), depth - 1)


def _may_be_rows(part: Part, root: Part) -> bool:
    """Whether a part is a packed sequence, or a list that may have one entry for each sample."""
    is_inside = part is not root and part.is_list and (isinstance(part.value, list) or part.size != 1 or _is_zipped(root))
    return isinstance(part.value, PackedSequence) or may_be_samples(part.value) or (is_inside and part.has_tensors)


def _is_zipped(root: Part) -> bool:
    """Whether it may be ``tuple(zip(*samples))`` of one sample: tuples of one each, which are not tensors of as many rows."""
    if not isinstance(root.value, tuple) or not all(isinstance(entry, tuple) and len(entry) == 1 for entry in root.value):
        return False
    sizes = {entry.size(0) if isinstance(entry, Tensor) and entry.dim() else None for (entry,) in root.value}
    return len(root.value) > 1 and (None in sizes or len(sizes) > 1)


def _look_up(batch: Any, key: str | int) -> Any:
    try:
        if not (isinstance(batch, Tensor) and isinstance(key, str)):  # torch would warn
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


def name_of(weight: Any) -> str:
    """A weight, or one for each term, in words."""
    if isinstance(weight, tuple):
        return f"[{', '.join(map(name_of, weight))}]"
    return str(getattr(weight, "__name__", weight))


def count_by(source: Any, batch: Any, rows: int | None = None) -> Denominator:
    """The value of an explicit weight, or an error if it cannot be a weight.

    Args:
        source: the weight.
        batch: the batch to count.
        rows: the number of samples, to distinguish a list of two images from an input and its target.
    """
    weight = rows if rows is not None and source == SampleCount() else source(batch)
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ArgumentError(f"weight={source} must return one number per batch, but returned a tensor of {tuple(weight.shape)}")
        if not is_on_host(weight):  # its value is checked at the end of the window
            return exact(weight).reshape(())  # torch divides two integers in single precision
        weight = weight.item()
    if isinstance(weight, (bool, complex)) or not isinstance(weight, Number):
        raise WrongTypeError(f"weight={source} must return a scalar tensor or a number, but returned {type(weight).__name__}")
    number = float(weight)  # type: ignore[arg-type]  # of a Fraction, a Decimal, a number of numpy
    if not (number >= 0 and math.isfinite(number)):
        raise ArgumentError(f"weight={source} must be a count, finite and not negative, but returned {weight}")
    return number


# --- adopted ones, for losses that hide their sum


@dataclass(frozen=True)
class Count:
    """A count of one tensor of the batch."""

    path: tuple[Any, ...]  # the keys and indices that lead to it
    what: str  # one of ``_COUNTED``
    is_shifted: bool = False  # whether the first column is left out, as in a language model

    def __call__(self, batch: Any) -> float:
        """The count."""
        for key in self.path:
            batch = _look_up(batch, key)
        return float(_COUNTED[self.what](batch[..., 1:] if self.is_shifted else batch))

    def __str__(self) -> str:
        place = "".join(f"[{key!r}]" for key in self.path)
        return f"{self.what}{', without the first column,' * self.is_shifted} of batch{place}"


LABELS, MASK, ELEMENTS, SUM = "number of labels", "number of entries that are not 0", "number of elements", "sum"
_COUNTED: dict[str, Callable[[Tensor], Any]] = {
    LABELS: lambda labels: (labels != -100).sum(),
    MASK: lambda mask: (mask != 0).sum(),
    ELEMENTS: Tensor.numel,
    SUM: lambda weights: exact(weights).sum(),
}


def count_by_all(counts: Mapping[Any, float], batch: Any) -> float:
    """The common value of all counts that added up on the checked rows, each in its unit.

    Raises:
        UnreadableLossError: the counts differ.
    """
    (first, value), *others = [(count, float(count(batch)) / unit) for count, unit in counts.items()]
    for count, other in others:
        if abs(other - value) > 1e-9 * max(abs(other), abs(value)):
            raise UnreadableLossError(
                f"The loss hides its sum. On the checked rows it was divided by the {first}, or by the {count}; in this batch "
                f"these are {value:g} and {other:g}. Say which: GradientAccumulation(weight=...), with a function of the batch "
                "that returns the count, as TokenCount or SampleCount do."
            )
    return value


def counts_of(batch: Any) -> list[Any]:
    """The usual counts of a batch."""
    found: list[Any] = []
    for path, tensor in tensors_of(batch):
        is_mask = tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())
        is_labels = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        for what in [LABELS] * is_labels + [MASK] * is_mask:
            found += [Count(path, what)] + [Count(path, what, is_shifted=True)] * (tensor.dim() > 1)
        if not is_labels:
            found.append(Count(path, ELEMENTS))
        if tensor.is_floating_point() and not is_mask and 0 <= tensor.min() < tensor.max():  # weights of rows
            found.append(Count(path, SUM))
    return found if count_samples(batch) is None else [*found, SampleCount()]


def tensors_of(batch: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The dense tensors of a batch, each with its path of keys, names and indices."""
    if is_record(batch):
        batch = {field.name: getattr(batch, field.name) for field in fields(batch)}
    if isinstance(batch, Tensor):
        if batch.dim() > 0 and batch.layout == torch.strided and not batch.is_nested:
            yield path, batch
    elif isinstance(batch, (Mapping, Sequence)) and not isinstance(batch, str) and len(path) < _DEPTH:
        pairs = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
        for key, value in pairs:
            yield from tensors_of(value, (*path, key))


_DEPTH = 3
