"""Where the rows of a batch begin and end, read from the batch itself, and which of them go together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate
from operator import or_, sub

import torch
from torch import Tensor

from lightning_accum.errors import ArgumentError

IGNORE_INDEX = -100
"""What labels that do not count are set to, as in :func:`torch.nn.functional.cross_entropy`."""

_MASKS = ("attention_mask", "decoder_attention_mask")  # 1 is a token, 0 is padding
_INVERTED_MASKS = ("key_padding_mask",)  # of torch.nn.Transformer: True is padding


@dataclass(frozen=True)
class Spans:
    """The columns of every row that are not padding: from its start up to its stop, which is the column after its last."""

    length: int
    """Columns with padding: the size of the dimension that can be trimmed."""
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    read_from: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """The tensors that show it, by path."""

    @property
    def is_padded_left(self) -> bool:
        """Whether any row has padding in front."""
        return any(self.starts)

    @property
    def is_padded_right(self) -> bool:
        """Whether any row has padding behind."""
        return any(stop < self.length for stop in self.stops)

    @property
    def is_padded(self) -> bool:
        """Whether any row has padding."""
        return self.is_padded_left or self.is_padded_right

    def keep_padding(self, left: bool, right: bool) -> Spans:
        """The spans that take the padding on these sides for a part of the row."""
        starts = (0,) * len(self.starts) if left else self.starts
        stops = (self.length,) * len(self.stops) if right else self.stops
        return replace(self, starts=starts, stops=stops)

    @property
    def widths(self) -> list[int]:
        """How many columns of every row are not padding."""
        return [stop - start for start, stop in zip(self.starts, self.stops, strict=True)]


def kept_columns(rows: Sequence[int], spans: Iterable[Spans]) -> dict[int, slice]:
    """The columns that ``rows`` need, by the size of the dimension that has them; none where that is all."""
    bounds = ((s.length, min(s.starts[row] for row in rows), max(s.stops[row] for row in rows)) for s in spans)
    return {length: slice(start, stop) for length, start, stop in bounds if (start, stop) != (0, length)}


def number_within(tokens: int, rows: Sequence[int], untrimmed: int, spans: Iterable[Spans]) -> int:
    """How many of the first ``rows`` keep to the tokens: padded left and right, they need more columns than any has."""
    widths = [untrimmed] * len(rows)
    for span in spans:
        starts = accumulate((span.starts[row] for row in rows), min)
        stops = accumulate((span.stops[row] for row in rows), max)
        widths = list(map(max, widths, map(sub, stops, starts)))
    return next((number for number in range(1, len(rows)) if widths[number] * (number + 1) > tokens), len(rows))


def cut_where_lengths_fall(groups: list[list[int]], widths: Sequence[int]) -> list[list[int]]:
    """Split a micro-batch in two if this saves padding of at least half an average micro-batch."""
    least = sum(len(rows) * widths[rows[0]] for rows in groups) / len(groups) / 2
    cut: list[list[int]] = []
    waiting = groups[::-1]
    while waiting:
        rows = waiting.pop()
        # what is saved when so many of the longest rows are on their own
        saved = [(len(rows) - first) * (widths[rows[0]] - widths[rows[first]]) for first in range(len(rows))]
        first = saved.index(max(saved))
        if saved[first] < least:
            cut.append(rows)
        else:
            waiting += [rows[first:], rows[:first]]
    return cut


def read_spans(tensors: Mapping[str, Tensor], key: str | None = None) -> dict[int, Spans]:
    """Read where the rows of a batch begin and end.

    Attention masks show it, and where several have the same number of columns, padding is what is padding in all of them; without
    a mask, labels of -100 together with inputs that repeat one value up to the end of a row. Reads values: on an accelerator this
    waits for the device, so it is best asked of a batch that is still on the host.

    ``key`` is the path, its last part, or the last words of that (``lengths`` for ``encoder_lengths`` and ``decoder_lengths``), of
    masks of shape (rows, columns), not 0 where there is no padding (but 0 there if it is called ``key_padding_mask``), or of
    lengths of shape (rows,). Returned are spans by the size of the dimension that has columns: an encoder-decoder has two.

    Raises:
        ArgumentError: there is no ``key``, or it is neither a mask nor lengths.

    Example:
        >>> read_spans({"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])})
        {4: Spans(length=4, starts=(0, 0), stops=(3, 1))}
    """
    if key is not None:
        found = {path: tensor for path, tensor in tensors.items() if path == key or f"_{_name(path)}".endswith(f"_{key}")}
        if not found:
            raise ArgumentError(f"the batch has no tensor {key!r} to read lengths from: it has {', '.join(tensors)}")
        spans = _join((path, _explicit(path, tensor, tensors)) for path, tensor in found.items())
    else:
        masks = _join((path, _is_token(path, mask)) for path, mask in tensors.items() if mask.dim() == 2 and _is_mask(path))
        labels = _join(_from_labels(tensors, but=masks))
        # an end of sequence that no label asks for looks like one column of padding; positions count from the left
        behind = {length: span.keep_padding(left=True, right=min(span.stops) >= length - 1) for length, span in labels.items()}
        spans = {length: span for length, span in {**masks, **behind}.items() if _agrees(span, tensors, masks)}
    return {length: span for length, span in spans.items() if span.is_padded}


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
    raise ArgumentError(
        f"{path!r} has the shape {tuple(tensor.shape)} and type {tensor.dtype}: expected a mask of shape (rows, columns) or whole"
        " numbers of shape (rows,)"
    )


def _join(evidence: Iterable[tuple[str, Tensor]]) -> dict[int, Spans]:
    """The spans by their length. Each tensor, with its path, is True where there is a token."""
    by_length: dict[int, list[tuple[str, Tensor]]] = {}
    for path, is_token in evidence:
        by_length.setdefault(is_token.shape[1], []).append((path, is_token))
    by_length.pop(0, None)
    return {n: _spans(reduce(or_, (t for _, t in found)), tuple(p for p, _ in found)) for n, found in by_length.items()}


def _spans(is_token: Tensor, read_from: tuple[str, ...]) -> Spans:
    length = is_token.shape[1]
    from_one = torch.arange(1, length + 1, dtype=torch.int32, device=is_token.device)
    last = (is_token * from_one).amax(1)
    first = length - (is_token * from_one.flip(0)).amax(1)
    first = torch.minimum(first, (last - 1).clamp(min=0))  # a row of padding alone keeps one column
    starts, stops = torch.stack((first, last.clamp(min=1))).tolist()
    return Spans(length, tuple(starts), tuple(stops), read_from)


# --- what else has to look like padding -------------------------------------------------------------------------------


def _agrees(span: Spans, tensors: Mapping[str, Tensor], lengths: Collection[int]) -> bool:
    """Whether all whole numbers with these rows and columns say nothing in the padding.

    Labels of a decoder can have the length of the encoder's mask by chance, and are no padding there. Tensors that have one of
    ``lengths`` in another dimension too are masks of attention, which are as they like where it is from padding.
    """
    bounds = torch.tensor((span.starts, span.stops))[..., None]
    for path, tensor in tensors.items() if span.is_padded else ():
        is_other = tensor.shape[:2] != (len(span.starts), span.length) or path in span.read_from or not is_whole(tensor)
        if is_other or not set(lengths).isdisjoint(tensor.shape[2:]):
            continue
        columns, (start, stop) = torch.arange(span.length, device=tensor.device), bounds.to(tensor.device)
        padding = tensor[(columns < start) | (columns >= stop)]
        if bool((padding != padding[:1]).any()) and not _counts(tensor):
            return False
    return True


def _counts(tensor: Tensor) -> bool:
    """Whether every row stays or goes up by one from column to column, as positions and segments do."""
    if tensor.dtype == torch.bool or not is_whole(tensor) or tensor.dim() != 2 or tensor.shape[1] < 2:
        return False
    lowest, highest = tensor.diff(dim=1).aminmax()
    return int(lowest) >= 0 and int(highest) <= 1


def _from_labels(tensors: Mapping[str, Tensor], but: Collection[int]) -> Iterator[tuple[str, Tensor]]:
    """Where rows have a label, or an input that is not repeated up to their end, which has to be the same in all rows.

    Of labels with other lengths than ``but``.
    """
    for path, labels in tensors.items():
        if labels.dim() != 2 or not is_whole(labels) or labels.shape[1] in (0, *but):
            continue
        is_token, is_ignored = labels != IGNORE_INDEX, labels[:, -1] == IGNORE_INDEX
        others = (other for other in tensors.values() if other is not labels and other.shape[1:2] == labels.shape[1:])
        inputs = [other for other in others if not _counts(other)]
        last = [other[:, -1][is_ignored] for other in inputs]
        if not bool(is_ignored.any()) or any(bool((values != values[:1]).any()) for values in last):
            continue
        for other in inputs:
            is_token = is_token | (other != other[:, -1:]).reshape(*other.shape[:2], -1).any(-1)
        yield path, is_token


def is_whole(tensor: Tensor) -> bool:
    """Whether it holds whole numbers or bools."""
    return not tensor.is_floating_point() and not tensor.is_complex()
