"""Micro-batches that are checked later: those that differ from all checked ones, and a random one at times."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]  # how many nodes this thread has made

from lightning_accum.exact import on_host
from lightning_accum.weighing.counts import tensors_of
from lightning_accum.weighing.terms import Denominator
from lightning_accum.weighing.weight import Contribution

_IGNORED = -100
_MOST_SIZES = 4
_COMPARED = 64
"""The lengths of this many micro-batches after the first check are compared."""
Reason: TypeAlias = Literal["new terms", "other numbers", "other lengths", "no loss", "time"]
"""Why a micro-batch is checked: new terms, new numbers in the batch or weights, a new length of rows, or a regular check."""


class LaterLooks:
    """Chooses micro-batches of the present window that are to be checked.

    A tensor that held one number in all checked rows, such as weights of 1, a mask without padding or one task, proves nothing for
    rows with other numbers: a loss may divide by its sum. The same holds for labels without -100.

    Example:
        >>> looks = LaterLooks()
        >>> looks.learn({"x": torch.tensor([1.0, 2.0]), "mask": torch.ones(2, 3), "labels": torch.tensor([[3, 4], [5, 6]])})
        False
        >>> looks.alike
        {('mask',): 1.0, ('labels',): nan}
        >>> looks.note({"x": torch.tensor([3.0]), "mask": torch.tensor([[1.0, 1.0, 0.0, 0.0]])}, Contribution(1.0), False)
        0.5
    """

    def __init__(self) -> None:
        self.alike: dict[tuple[Any, ...], float] | None = None
        """The number of each such tensor, by path; NaN for labels without an ignored one. None before the first check."""
        self.doubted: list[tuple[Denominator, Any, Reason]] = []
        """How much a micro-batch differs from checked ones (0: it is not checked), its batch, and the reason."""
        self._of_other_lengths: Any = None
        self._lengths: dict[tuple[Any, ...], torch.Size] = {}
        self._to_compare = _COMPARED
        self._begun = self._missing = 0
        self._sizes: set[int] | None = set()
        """The numbers of nodes in the graphs of losses so far; None if they always differ, as with a loop over a list."""
        self.counts_left = 8
        """How many more windows are checked for a doubtful weight."""

    def begin_forward(self) -> None:
        """Note the start of the next micro-batch's graph."""
        self._begun = _get_sequence_nr()

    def is_new_graph(self, is_first_window: bool) -> bool:
        """Whether the last forward had a new number of nodes, so it may run unchecked operations."""
        if self._sizes is None or not self._begun or (size := _get_sequence_nr() - self._begun) in self._sizes:
            return False
        is_new = len(self._sizes) > 0
        self._sizes.add(size)
        if (is_new and is_first_window) or len(self._sizes) > _MOST_SIZES:
            self._sizes = None
        return is_new and not is_first_window

    def learn(self, rows: Any) -> bool:
        """Note checked rows. Returns whether a number in them differs from all earlier rows."""
        before, tensors = self.alike, dict(tensors_of(rows))
        if before is None:
            found = {path: number for path, tensor in tensors.items() if (number := _number_of(tensor)) is not None}
        else:
            found = {path: n for path, n in before.items() if path not in tensors or not float(_unlike(tensors[path], n))}
        self.alike = found
        self._lengths = self._lengths or {path: tensor.shape[1:] for path, tensor in tensors.items()}
        return before is not None and len(found) < len(before)

    def note(self, batch: Any, contribution: Contribution, is_other: bool) -> Denominator:
        """Keep a micro-batch that differs from checked ones. Returns how much, without a copy from a device.

        Args:
            batch: the argument of ``training_step``.
            contribution: the contribution of its loss.
            is_other: whether its graph differs, so that it is checked in any case.
        """
        doubt: Denominator = contribution.is_new + (contribution.doubt if self.counts_left else 0.0)
        for path, tensor in tensors_of(batch) if self.alike else ():
            if self.alike and path in self.alike:
                doubt = doubt + on_host(_unlike(tensor, self.alike[path]))
        if isinstance(doubt, Tensor) or doubt:
            is_new = isinstance(contribution.is_new, Tensor) or contribution.is_new != 0
            self.doubted.append((doubt, batch, "new terms" if is_new else "other numbers"))
        elif is_other and not self.doubted:
            doubt = 1.0
            self.doubted.append((doubt, batch, "time"))
        return doubt

    def note_missing_loss(self, batch: Any) -> bool:
        """Note the first micro-batch without a loss, and the second, the fourth, ...: its rows may count in the full batch."""
        self._missing += 1
        is_noted = self._missing.bit_count() == 1
        self.doubted += [(1.0, batch, "no loss")] * is_noted
        return is_noted

    def note_lengths(self, batch: Any) -> bool:
        """Note the first loader batch with new lengths, soon after training began. Returns whether it is this one."""
        self._to_compare -= 1
        if self._to_compare < 0 or all(self._lengths.get(path, t.shape[1:]) == t.shape[1:] for path, t in tensors_of(batch)):
            return False
        self._of_other_lengths, self._to_compare = batch, 0
        return True

    def take_lengths(self) -> Any:
        """The noted loader batch of the window, which may be padded to another length than the checked one; or None."""
        found, self._of_other_lengths = self._of_other_lengths, None
        return found

    def is_doubtful(self) -> bool:
        """Whether a micro-batch differs from the checked ones."""
        return bool(sum((doubt for doubt, *_ in self.doubted), 0.0))

    def telling(self, others: Any) -> list[tuple[Any, Reason]]:
        """The micro-batches to check, and why: the last with new terms, and the one that differs most; else ``others``."""
        doubted = [doubt for doubt in reversed(self.doubted) if doubt[0]] or [(0.0, others, "time")]
        new = [doubt for doubt in doubted if doubt[2] == "new terms"]
        farthest = max((new or doubted)[::-1], key=lambda doubt: float(doubt[0]))  # the first, as the last may have few rows
        return [(batch, reason) for _, batch, reason in ([new[0], farthest] if new and new[0] is not farthest else [farthest])]


def _number_of(tensor: Tensor) -> float | None:
    """The single number in it; NaN for labels without an ignored one; None otherwise."""
    if tensor.numel() == 0 or tensor.is_complex():
        return None
    if bool((tensor == tensor.flatten()[0]).all()):
        return float(tensor.flatten()[0])
    is_labels = tensor.dim() > 1 and tensor.dtype == torch.int64  # labels of single rows are visible in the loss
    return math.nan if is_labels and not bool((tensor == _IGNORED).any()) else None


def _unlike(tensor: Tensor, number: float) -> Tensor:
    """The share of entries that differ from the number."""
    is_other = (tensor == _IGNORED) if math.isnan(number) else (tensor.detach() != number)
    return is_other.sum() / max(1, tensor.numel())
