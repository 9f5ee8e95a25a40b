"""Several batches put together to the one batch that a window stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_accum.errors import AccumulationError, UnsplittableBatchError
from lightning_accum.splitting.batch_parts import BatchNode, read_parts
from lightning_accum.splitting.micro_batch import Layout, RowSelector
from lightning_accum.splitting.padding import IGNORE_INDEX

_SHOWS_PADDING = ("mask", "label")
"""What the name of a tensor has in it that shows which of its columns are padding."""


class JoiningError(AccumulationError, ValueError):
    """Batches do not show how they become one."""

    def __init__(self, found: str) -> None:
        self.found = found
        super().__init__(found)

    def __str__(self) -> str:
        return (
            f"The batches of the window cannot be put together to the full batch: {self.found}. Say how: verify(join=...) takes a"
            " function join(batches) that returns one batch; or verify one batch that is split, with micro_batch=."
        )


def join(batches: Sequence[Any]) -> tuple[Any, str]:
    """Concatenate batches along their rows, padded to the longest where they were padded already.

    Returns:
        The batch, of the types of the first; and what was padded, in words, empty where nothing was.

    Raises:
        JoiningError: they are not made of the same parts; what they share differs; or columns differ, and neither a mask nor
            labels show what is padding.

    Example:
        >>> join([{"x": torch.ones(2, 3), "rate": 0.5}, {"x": torch.zeros(1, 3), "rate": 0.5}])[0]["x"].shape
        torch.Size([3, 3])
        >>> texts = [torch.tensor([[5, 6]]), torch.tensor([[7]])]
        >>> join([{"ids": text, "labels": text.clone()} for text in texts])[0]["labels"]
        tensor([[   5,    6],
                [   7, -100]])
    """
    if len(batches) == 1:
        return batches[0], ""
    known: dict[str, str] = {}
    by_path: list[dict[str, BatchNode]] = []
    try:
        for batch in batches:
            parts = read_parts(batch, known)[2]
            known = known or {part.path: part.kind for part in parts}
            by_path.append({part.path: part for part in parts})
    except UnsplittableBatchError as error:
        found = str(error).partition(": ")[2].partition(". Say how")[0]
        raise JoiningError(found) from error
    first = by_path[0]
    for number, other in enumerate(by_path[1:], 1):
        if other.keys() != first.keys():
            others = sorted(other.keys() ^ first.keys())
            raise JoiningError(f"batch {number} has other parts than batch 0 ({', '.join(others[:5])})")
    columns = _Columns({path: [parts[path].value for parts in by_path] for path, part in first.items() if part.kind == "tensor"})
    joined = _Joined()
    for path, part in first.items():
        values = [parts[path].value for parts in by_path]
        if part.kind == "tensor":
            joined.put(part, columns.join(path))
        elif part.kind == "rows":
            joined.put(part, [entry for value in values for entry in value])
        elif part.kind == "shared":
            _check_shared(path, values)
    return Layout.read(batches[0], known).taken(joined), columns.description


class _Joined(RowSelector):
    """In place of some rows of a part: the rows of that part in all batches."""

    def __init__(self) -> None:
        super().__init__(slice(None), None)
        self._values: dict[int, tuple[str, Any]] = {}
        self.entries = self.tensor = lambda value: self._values[id(value)][1]

    def put(self, part: BatchNode, value: Any) -> None:
        """Give the rows of all batches for a part of the first."""
        path, other = self._values.setdefault(id(part.value), (part.path, value))
        if other is not value and not (isinstance(value, Tensor) and torch.equal(other, value)):
            raise JoiningError(f"{path} and {part.path} are one object in the first batch, and two in others")


def _check_shared(path: str, values: Sequence[Any]) -> None:
    if isinstance(values[0], Tensor) and not all(v.shape == values[0].shape and torch.equal(v, values[0]) for v in values[1:]):
        raise JoiningError(f"{path} has no rows, and is not the same in all of them")


class _Columns:
    """Tensors by path, one a batch, whose columns may differ in number."""

    def __init__(self, tensors: Mapping[str, Sequence[Tensor]]) -> None:
        self._tensors = tensors
        uneven = {path: [v.shape[1] for v in values] for path, values in tensors.items() if _is_uneven(values)}
        self._longest = {path: max(lengths) for path, lengths in uneven.items()}
        self._read_from = [path for path in uneven if any(word in path.lower() for word in _SHOWS_PADDING)]
        self._masks = [path for path in self._read_from if "mask" in path.lower()]
        self.description = ""
        if uneven:
            if not self._read_from:
                shown = ", ".join(f"{path} has {' and '.join(map(str, dict.fromkeys(u)))} columns" for path, u in uneven.items())
                raise JoiningError(f"{shown}, and there is no mask and no labels to say what padding is")
            self._side: Literal["left", "right"] = "left" if self._is_padded_left() else "right"
            most = max(self._longest.values())
            self.description = f"batches of unequal length were padded on the {self._side} to {most} columns ({', '.join(uneven)})"

    def join(self, path: str) -> Tensor:
        """The rows of all batches."""
        values = self._tensors[path]
        if path in self._longest:
            values = [self._padded(path, value) for value in values]
        elif len({value.shape[1:] for value in values}) > 1:
            shapes = " and ".join(dict.fromkeys(str(tuple(value.shape)) for value in values))
            raise JoiningError(f"{path} has the shapes {shapes}")
        return torch.cat(list(values))

    def _padded(self, path: str, value: Tensor) -> Tensor:
        missing = self._longest[path] - value.shape[1]
        ends = (missing, 0) if self._side == "left" else (0, missing)
        return torch.nn.functional.pad(value, (0, 0) * (value.dim() - 2) + ends, value=self._fill(path))

    def _fill(self, path: str) -> float:
        """What padding is in this tensor."""
        values = self._tensors[path]
        name = path.rpartition(".")[2].lower()
        if values[0].is_floating_point() or values[0].dtype == torch.bool or path in self._masks:
            return float(name.endswith("key_padding_mask"))
        if "label" in name or any(bool((value == IGNORE_INDEX).any()) for value in values):
            return IGNORE_INDEX
        for path_of_mask in self._masks:  # what it has there itself
            for value, mask in zip(values, self._tensors[path_of_mask], strict=True):
                is_padding = (mask != 0) if path_of_mask.endswith("key_padding_mask") else (mask == 0)
                if value.shape == mask.shape and bool(is_padding.any()):
                    return float(value[is_padding][0])
        return 0

    def _is_padded_left(self) -> bool:
        masks = [mask for path in self._masks if not path.endswith("key_padding_mask") for mask in self._tensors[path]]
        return any(bool((mask[:, 0] == 0).any()) for mask in masks) and all(bool((mask[:, -1] != 0).all()) for mask in masks)


def _is_uneven(values: Sequence[Tensor]) -> bool:
    """Whether dimension 1 is all that differs beside the rows."""
    shapes = {tuple(value.shape) for value in values}
    if any(len(shape) < 2 for shape in shapes):
        return False
    return len({shape[1] for shape in shapes}) > 1 and len({shape[2:] for shape in shapes}) == 1
