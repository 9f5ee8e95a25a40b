"""What ``training_step`` returned for each micro-batch, put together to what it would have returned for the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_accum.splitting.means import loss_of_parts, weighted_mean
from lightning_accum.weighing.denominator import Denominator
from lightning_accum.weighing.functions import OfMean


class Outputs:
    """Collects the outputs of the micro-batches of one batch.

    Args:
        rows: the samples of each, those of micro-batches that will be left out too.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows: list[int] = []
        """The samples of each that was not left out."""
        self._planned = iter(rows)
        self._begun = 0
        self._left_out: set[int] = set()
        self.weights: list[Denominator | None] = []
        """What the loss of each was divided by; None for a sum, 0 without a loss."""
        self.of_means: list[OfMean | None] = []
        """What makes the loss of each of the mean that was weighed; None where it is that."""
        self._losses: list[Tensor | float | None] = []  # numbers on the host, where they are quicker than tensors
        self._dtype: torch.dtype | None = None
        self._extras: list[Mapping[str, Any]] = []

    def add(self, loss: Tensor | None, weight: Denominator | None, extra: Mapping[str, Any], of_mean: OfMean | None = None) -> None:
        """Take in the next micro-batch.

        Args:
            loss: its loss; None where it had none.
            weight: what the loss was divided by; None for a sum, 0 without a loss.
            extra: what else ``training_step`` returned, by name.
            of_mean: what makes the loss of the mean that was weighed; None where it is that.
        """
        self.rows.append(next(self._planned))
        self._begun += self.rows[-1]
        if loss is None:
            self._losses.append(None)
        else:
            self._losses.append(loss.item() if loss.device.type == "cpu" else loss.detach())
            self._dtype = loss.dtype
        self.weights.append(weight)
        self.of_means.append(of_mean)
        # a part of the graph that is not below the loss would keep what it saved for a backward that never comes
        self._extras.append(apply_to_collection(extra, Tensor, Tensor.detach) if extra else extra)

    def leave_out(self) -> None:
        """The next micro-batch is as if it had never been in the batch."""
        rows = next(self._planned)
        self._left_out.update(range(self._begun, self._begun + rows))
        self._begun += rows

    def loss(self, of_window: Tensor | None = None) -> Tensor | None:
        """The loss of the batch: the weighted mean, or the sum of sums; None where there was none at all.

        Args:
            of_window: the loss of a window that is this batch and nothing else, where it is known.
        """
        if self._dtype is None:
            return None
        if of_window is not None:
            return of_window.to(self._dtype)
        found = [one for one in zip(self._losses, self.weights, self.of_means, strict=True) if one[0] is not None]
        tensors = [loss.reshape(()) for loss, _, _ in found if isinstance(loss, Tensor)]
        losses = torch.stack(tensors) if tensors else torch.tensor([loss for loss, _, _ in found], dtype=torch.float64)
        return loss_of_parts(losses, [weight for _, weight, _ in found], [of_mean for *_, of_mean in found]).to(self._dtype)

    def extra(self, order: Sequence[int] | None) -> dict[str, Any]:
        """What else was returned.

        Tensors with one entry a sample are put together, in the order of the batch. Numbers are weighted means. Of anything else
        there is a list, with one entry a micro-batch.

        Args:
            order: the rows of the batch in the order of the micro-batches; None where they kept theirs.
        """
        if order is not None and self._left_out:
            order = [row for place, row in enumerate(order) if place not in self._left_out]
        names = dict.fromkeys(name for extra in self._extras for name in extra)
        return {name: self._join(name, order) for name in names}

    def _join(self, name: str, order: Sequence[int] | None) -> Any:
        values = [extra[name] for extra in self._extras if name in extra]
        rows = [count for extra, count in zip(self._extras, self.rows, strict=False) if name in extra]
        if all(isinstance(value, Tensor) and value.dim() > 0 for value in values):
            has_rows = [len(value) for value in values] == rows
            if has_rows and len({value.shape[1:] for value in values}) == 1:
                joined = torch.cat(values)
                if order is None or len(order) != len(joined):
                    return joined
                return joined[torch.tensor(order).argsort().to(joined.device)]
        elif all(_is_number(value) for value in values):
            numbers = torch.stack([torch.as_tensor(value) for value in values])
            weights = [weight for weight in self.weights if weight is not None]
            return weighted_mean(numbers, weights if len(weights) == len(values) else rows)
        return values


def _is_number(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.dim() == 0) or (isinstance(value, Number) and not isinstance(value, bool))
