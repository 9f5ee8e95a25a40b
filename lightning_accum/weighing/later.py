"""Micro-batches that are checked later: the ones that differ from all checked ones, and now and then any."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]  # how many nodes this thread has made

from lightning_accum.weighing.counts import tensors_of
from lightning_accum.weighing.terms import Denominator, on_host
from lightning_accum.weighing.weight import Contribution

_IGNORED = -100
_LOOKS_AGAIN = 8
_MOST_SIZES = 4
_COMPARED = 64
"""Micro-batches after the first check whose lengths are compared."""
Reason: TypeAlias = Literal["new terms", "other numbers", "other lengths", "time"]
"""Why a micro-batch is looked at: the check has not seen its terms, numbers in the batch or a weight, or the length of its rows; or
it is time.
"""


class LaterLooks:
    """Chooses micro-batches of the present window that are to be checked.

    Tensors that were one number in all rows that were checked, such as weights of 1, a mask without padding, one task, show nothing
    of rows in which they are not: a loss may divide by what is only then the same for all. Labels without -100 are such, too.

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
        """The number of each, by where it is in a batch; NaN for labels of which none is ignored. None before any was learned."""
        self.doubted: list[tuple[Denominator, Any, Reason]] = []
        """How much a micro-batch differs from those that were checked (it is not looked at if that is 0), its batch, and why."""
        self._has_other_lengths = False
        self._lengths: dict[tuple[Any, ...], torch.Size] = {}
        self._to_compare = _COMPARED
        self._begun = 0
        self._sizes: set[int] | None = set()
        """Of the graphs of losses until now, in nodes; None if they differ in any case, as with a loop over a list."""
        self.counts_left = 8
        """How many windows more are looked at that have a micro-batch whose weight may be none."""

    def begin_forward(self) -> None:
        """Note where the graph of the next micro-batch begins."""
        self._begun = _get_sequence_nr()

    def is_new_graph(self, is_first_window: bool) -> bool:
        """Whether the forward that has run made another number of nodes than those before: it may do what was not checked."""
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

    def note(self, batch: Any, contribution: Contribution, is_time: bool) -> Denominator:
        """Keep a micro-batch that differs. Returns how much; what a device holds stays there.

        Args:
            batch: what ``training_step`` got.
            contribution: what its loss brings in.
            is_time: one is looked at in this window, whether it differs or not.
        """
        doubt: Denominator = 1.0 if contribution.is_new else contribution.doubt if self.counts_left else 0.0
        for path, tensor in tensors_of(batch) if self.alike else ():
            if self.alike and path in self.alike:
                doubt = doubt + on_host(_unlike(tensor, self.alike[path]))
        reason: Reason = "new terms" if contribution.is_new else "other numbers"
        if is_time and not (self.doubted or isinstance(doubt, Tensor) or doubt):
            doubt, reason = 1.0, "time"
        if isinstance(doubt, Tensor) or doubt:
            self.doubted.append((doubt, batch, reason))
        return doubt

    def note_lengths(self, batch: Any) -> bool:
        """Note the first loader batch, soon after training began, that has other lengths. Returns whether it is this one."""
        self._to_compare -= 1
        if self._to_compare < 0 or all(self._lengths.get(path, t.shape[1:]) == t.shape[1:] for path, t in tensors_of(batch)):
            return False
        self._has_other_lengths, self._to_compare = True, 0
        return True

    def take_lengths(self) -> bool:
        """Whether a loader batch of the window was noted: it may be padded to another length than the checked one."""
        found, self._has_other_lengths = self._has_other_lengths, False
        return found

    def telling(self, others: Any) -> list[tuple[Any, Reason]]:
        """Which of the window to look at, and why: the last with new terms, and what differs most; ``others`` if nothing does."""
        doubted = [doubt for doubt in reversed(self.doubted) if doubt[0]] or [(0.0, others, "time")]
        self.doubted.clear()
        new = [doubt for doubt in doubted if doubt[2] == "new terms"]
        farthest = max(new or doubted, key=lambda doubt: float(doubt[0]))
        return [(batch, reason) for _, batch, reason in ([new[0], farthest] if new and new[0] is not farthest else [farthest])]


def is_time_to_look(window: int) -> bool:
    """Whether it is window 8, 64, 512, ...: what was found may have been so of the first parameters, or the first batches, only.

    Example:
        >>> [window for window in range(1, 1000) if is_time_to_look(window)]
        [8, 64, 512]
    """
    return window > 1 and window == _LOOKS_AGAIN ** round(math.log(window, _LOOKS_AGAIN))


def _number_of(tensor: Tensor) -> float | None:
    """The one number that it is; NaN where labels are others, of which none is ignored; None for all else."""
    if tensor.numel() == 0 or tensor.is_complex():
        return None
    if bool((tensor == tensor.flatten()[0]).all()):
        return float(tensor.flatten()[0])
    is_labels = tensor.dim() > 1 and tensor.dtype == torch.int64  # the loss shows the labels of single rows
    return math.nan if is_labels and not bool((tensor == _IGNORED).any()) else None


def _unlike(tensor: Tensor, number: float) -> Tensor:
    """The share of entries that differ from the number."""
    is_other = (tensor == _IGNORED) if math.isnan(number) else (tensor.detach() != number)
    return is_other.sum() / max(1, tensor.numel())
