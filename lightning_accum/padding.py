"""Where the rows of a batch begin and end, read from the batch itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""What labels that do not count are set to, as in :func:`torch.nn.functional.cross_entropy`."""

_MASKS = ("attention_mask", "decoder_attention_mask")  # 1 is a token, 0 is padding
_INVERTED_MASKS = ("key_padding_mask",)  # of torch.nn.Transformer: True is padding


class LengthsNotFoundError(ValueError):
    """The key that should tell the lengths of rows is not in the batch, or says something else."""


@dataclass(frozen=True)
class Spans:
    """The columns of every row that are not padding.

    Attributes:
        length: columns with padding: the size of the dimension that can be trimmed.
        starts: the first column of every row that is no padding.
        stops: the column after its last.
    """

    length: int
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    def keep_padding(self, left: bool, right: bool) -> Spans:
        """The spans that take the padding on these sides for a part of the row."""
        starts = (0,) * len(self.starts) if left else self.starts
        stops = (self.length,) * len(self.stops) if right else self.stops
        return Spans(self.length, starts, stops)

    def columns(self, rows: Sequence[int]) -> slice:
        """The columns that are not padding in all of ``rows``."""
        return slice(min(self.starts[row] for row in rows), max(self.stops[row] for row in rows))

    def width(self, rows: Sequence[int]) -> int:
        """How many columns these are."""
        columns = self.columns(rows)
        return int(columns.stop - columns.start)

    @property
    def is_padded_left(self) -> bool:
        """Whether any row has padding in front."""
        return any(self.starts)

    @property
    def is_padded_right(self) -> bool:
        """Whether any row has padding behind."""
        return any(stop < self.length for stop in self.stops)


def read_spans(tensors: Mapping[str, Tensor], key: str | None = None) -> dict[int, Spans]:
    """Read where the rows of a batch begin and end.

    An attention mask tells it; without one, labels of -100 together with inputs that repeat one value up to the end of a row.
    Reads values: on an accelerator this waits for the device, so it is best asked of a batch that is still on the host.

    Args:
        tensors: the tensors of a batch with one entry a row, by path. Shape (rows, columns, ...).
        key: the path, or its last part, of a mask of shape (rows, columns), not 0 where there is no padding, or of lengths of
            shape (rows,).

    Returns:
        The spans, by the size of the dimension that has columns. An encoder-decoder has two such dimensions. None at all where
        nothing tells the lengths, or no row has padding.

    Raises:
        LengthsNotFoundError: there is no ``key``, or it is neither a mask nor lengths.

    Example:
        >>> read_spans({"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])})
        {4: Spans(length=4, starts=(0, 0), stops=(3, 1))}
    """
    if key is not None:
        found = {path: tensor for path, tensor in tensors.items() if path == key or _name(path) == key}
        if not found:
            raise LengthsNotFoundError(f"the batch has no tensor {key!r} to read lengths from: it has {', '.join(tensors)}")
        evidence = [_explicit(path, tensor, tensors) for path, tensor in found.items()]
    else:
        evidence = [tensor != 0 for path, tensor in tensors.items() if _is_mask(tensor) and _name(path) in _MASKS]
        evidence += [tensor == 0 for path, tensor in tensors.items() if _is_mask(tensor) and _name(path).endswith(_INVERTED_MASKS)]
        sizes = {is_token.shape[1] for is_token in evidence}
        evidence = [is_token for is_token in evidence if _agrees(is_token, tensors)]
        evidence += [tokens for size, tokens in _from_labels(tensors).items() if size not in sizes]
    spans = [_spans(is_token) for is_token in evidence]
    return {span.length: span for span in spans if span.is_padded_left or span.is_padded_right}


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dim() == 2


def _explicit(path: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    if _is_mask(tensor):
        return tensor != 0
    if tensor.dim() == 1 and not tensor.is_floating_point():
        longest = int(tensor.max())
        sizes = [other.shape[1] for other in tensors.values() if other.dim() > 1 and other.shape[1] >= longest]
        if sizes:
            return torch.arange(sizes[0], device=tensor.device) < tensor[:, None]
        raise LengthsNotFoundError(f"the lengths in {path!r} are up to {longest}, but no tensor of the batch has so many columns")
    raise LengthsNotFoundError(
        f"{path!r} has the shape {tuple(tensor.shape)} and type {tensor.dtype}: expected a mask of shape (rows, columns) or whole"
        " numbers of shape (rows,)"
    )


def _agrees(is_token: Tensor, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the whole numbers of this shape hold one value each where the mask has padding at the ends of rows.

    Labels of a decoder can have the length of the encoder's mask by chance, and are no padding there.
    """
    at_ends = ~(_seen_from_left(is_token) & _seen_from_right(is_token))
    for tensor in tensors.values():
        if tensor.shape == is_token.shape and _is_whole(tensor) and not _is_constant(tensor[at_ends]):
            return False
    return True


def _from_labels(tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """What is no padding behind a row, by labels of -100 and inputs that repeat one value, the same in all rows."""
    found: dict[int, Tensor] = {}
    for labels in tensors.values():
        if not (labels.dim() == 2 and _is_whole(labels) and labels.shape[1] > 0) or labels.shape[1] in found:
            continue
        size = labels.shape[1]
        ends_ignored = labels[:, -1] == IGNORE_INDEX
        inputs = [other for other in tensors.values() if other is not labels and other.dim() > 1 and other.shape[1] == size]
        if not bool(ends_ignored.any()) or not all(_is_constant(other[:, -1][ends_ignored]) for other in inputs):
            continue
        is_token = labels != IGNORE_INDEX
        for other in inputs:
            is_token = is_token | (other != other[:, -1:]).reshape(*other.shape[:2], -1).any(-1)
        is_token[~ends_ignored, -1] = True
        found[size] = _seen_from_right(is_token)  # only what is behind: positions count from the left
    return found


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _is_constant(values: Tensor) -> bool:
    """Whether all entries along dimension 0 are the same."""
    return len(values) == 0 or bool((values == values[0]).all())


def _seen_from_left(is_token: Tensor) -> Tensor:
    """True from the first token of each row on."""
    return is_token.cumsum(1) > 0


def _seen_from_right(is_token: Tensor) -> Tensor:
    """True up to the last token of each row."""
    return is_token.flip(1).cumsum(1).flip(1) > 0


def _spans(is_token: Tensor) -> Spans:
    columns = torch.arange(is_token.shape[1], device=is_token.device)
    last = torch.where(is_token, columns + 1, 0).amax(1)
    first = torch.where(is_token, columns, is_token.shape[1]).amin(1)
    first = torch.minimum(first, (last - 1).clamp(min=0))  # a row of padding alone keeps one column
    starts, stops = torch.stack((first, last.clamp(min=1))).tolist()
    return Spans(is_token.shape[1], tuple(starts), tuple(stops))
