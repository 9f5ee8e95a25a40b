"""The lengths of rows, read from the batch itself, and which rows to group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_accum.errors import ArgumentError

IGNORE_INDEX = -100  # the label of ignored positions, as in :func:`torch.nn.functional.cross_entropy`

_MASKS = ("attention_mask", "decoder_attention_mask")  # 1 is a token, 0 is padding
_INVERTED_MASKS = ("key_padding_mask",)  # of torch.nn.Transformer: True is padding


class Lengths(NamedTuple):
    """How many columns each row needs: up to its last column without padding. Padding on the left stays."""

    columns: int  # the size of the dimension that can be trimmed, padding included
    of_rows: tuple[int, ...]
    read_from: tuple[str, ...]  # the tensors that the lengths were read from, by path

    @property
    def is_padded(self) -> bool:
        """Whether any row has padding on the right."""
        return min(self.of_rows, default=self.columns) < self.columns


def kept_columns(rows: Sequence[int], lengths: Iterable[Lengths]) -> dict[int, slice]:
    """The columns that ``rows`` need, by the size of their dimension; empty if all columns are needed."""
    needed = {each.columns: max(each.of_rows[row] for row in rows) for each in lengths}
    return {columns: slice(number) for columns, number in needed.items() if number < columns}


def cut_where_lengths_fall(groups: list[list[int]], widths: Sequence[int]) -> list[list[int]]:
    """Split a micro-batch in two if this saves padding of at least half an average micro-batch."""
    least = sum(len(rows) * widths[rows[0]] for rows in groups) / len(groups) / 2
    cut: list[list[int]] = []
    waiting = groups[::-1]
    while waiting:
        rows = waiting.pop()
        # the savings if this many of the longest rows are separated
        saved = [(len(rows) - first) * (widths[rows[0]] - widths[rows[first]]) for first in range(len(rows))]
        first = saved.index(max(saved))
        if saved[first] < least:
            cut.append(rows)
        else:
            waiting += [rows[first:], rows[:first]]
    return cut


def read_lengths(tensors: Mapping[str, Tensor], key: str | None = None) -> dict[int, Lengths]:
    """Read where the rows of a batch end.

    They are read from attention masks, else from labels of -100. All other tensors of whole numbers must agree: inputs repeat one
    value up to the end of a row. Reads values, which waits for an accelerator, so call it while the batch is on the host.

    ``key`` is the path, its last part, or the last words of its last part (``lengths`` for ``encoder_lengths`` and
    ``decoder_lengths``), of masks of shape (rows, columns), nonzero at tokens (but 0 at tokens in a ``key_padding_mask``), or of
    lengths of shape (rows,). Returns the lengths by the size of their dimension: an encoder-decoder has two.
    """
    if key is not None:
        found = {path: tensor for path, tensor in tensors.items() if path == key or f"_{_name(path)}".endswith(f"_{key}")}
        if not found:
            raise ArgumentError(f"the batch has no tensor {key!r} to read lengths from: its tensors are {', '.join(tensors)}")
        return _lengths({path: _explicit(path, tensor, tensors) for path, tensor in found.items()}, {})
    masks = {path: _is_token(path, mask) for path, mask in tensors.items() if mask.dim() == 2 and _is_mask(path)}
    of_masks = {mask.shape[1] for mask in masks.values()}
    # attention masks, which also have the columns in another dimension, may have any value at padding
    others = {path: tensor for path, tensor in tensors.items() if tensor.dim() > 1 and of_masks.isdisjoint(tensor.shape[2:])}
    whole = {path: tensor for path, tensor in others.items() if is_whole(tensor)}
    labels = {
        path: tensor != IGNORE_INDEX
        for path, tensor in whole.items()
        if tensor.dim() == 2 and tensor.shape[1] not in (0, *of_masks) and bool((tensor[:, -1] == IGNORE_INDEX).any())
    }
    # an end of sequence without a label looks like one column of padding
    of_labels = {columns: found for columns, found in _lengths(labels, others).items() if min(found.of_rows) < columns - 1}
    return {**_lengths(masks, whole), **of_labels}


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _is_mask(path: str) -> bool:
    return _name(path) in _MASKS or _name(path).endswith(_INVERTED_MASKS)


def _is_token(path: str, mask: Tensor) -> Tensor:
    return mask == 0 if _name(path).endswith(_INVERTED_MASKS) else mask != 0


def _explicit(path: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    if tensor.dim() == 2:
        return _is_token(path, tensor)
    if tensor.dim() == 1 and not tensor.is_floating_point():
        longest = int(tensor.max()) if len(tensor) else 0
        by_path = {other: t.shape[1] for other, t in tensors.items() if t.dim() > 1 and t.shape[1] >= longest}
        prefix = _name(path).rpartition("_")[0]  # `decoder_lengths` are of `decoder_target` rather than of `encoder_target`
        sizes = [size for other, size in by_path.items() if prefix and _name(other).startswith(f"{prefix}_")] or [*by_path.values()]
        if sizes:
            columns = longest if longest in sizes else sizes[0]  # as a rule the longest row has no padding
            return torch.arange(columns, device=tensor.device) < tensor[:, None]
        raise ArgumentError(f"the lengths in {path!r} are up to {longest}, but no tensor of the batch has so many columns")
    found = f"{path!r} has the shape {tuple(tensor.shape)} and type {tensor.dtype}"
    raise ArgumentError(f"{found}: expected a mask of shape (rows, columns) or whole numbers of shape (rows,)")


def _lengths(evidence: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[int, Lengths]:
    """The lengths by the number of columns, of those that have padding.

    ``evidence`` is True where there is a token. The ``others`` with as many columns must have padding there, too: one value, the
    same at the end of all padded rows. Else the columns stay, such as labels of a decoder that have the length of the encoder's
    mask by chance.
    """
    found = dict[int, Lengths]()
    for columns in {is_token.shape[1] for is_token in evidence.values()} - {0}:
        own = {path: is_token for path, is_token in evidence.items() if is_token.shape[1] == columns}
        is_token = reduce(or_, own.values())
        is_padded = ~is_token[:, -1]
        for other in (other for path, other in others.items() if path not in own and other.shape[1] == columns):
            padding = other[is_padded, -1:]
            if len(padding) and not _counts(other):
                differs = (other != padding[:1]) | (padding != padding[:1]).any()
                is_token = is_token | differs[..., None].flatten(2).any(2)
        last = (is_token * torch.arange(1, columns + 1, dtype=torch.int32, device=is_token.device)).amax(1)
        lengths = Lengths(columns, tuple(last.clamp(min=1).tolist()), tuple(own))  # a row of padding alone keeps one column
        if lengths.is_padded:
            found[columns] = lengths
    return found


def _counts(tensor: Tensor) -> bool:
    """Whether every row stays or goes up by one from column to column, like positions and segments."""
    if tensor.dtype == torch.bool or not is_whole(tensor) or tensor.dim() != 2 or tensor.shape[1] < 2:
        return False
    lowest, highest = tensor.diff(dim=1).aminmax()
    return int(lowest) >= 0 and int(highest) <= 1


def is_whole(tensor: Tensor) -> bool:
    """Whether it holds whole numbers or bools."""
    return not tensor.is_floating_point() and not tensor.is_complex()
