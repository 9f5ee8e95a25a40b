"""What ``training_step`` returned for each micro-batch, put together to what it would have returned for the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from lightning_accum.batch_log import weighted_mean
from lightning_accum.denominator import Denominator


class Outputs:
    """Collects the outputs of the micro-batches of one batch."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._weights: list[Denominator | None] = []
        self._extras: list[tuple[Mapping[str, Any], int]] = []

    def add(self, loss: Tensor | None, extra: Mapping[str, Any], weight: Denominator | None, rows: int) -> None:
        """Take in one micro-batch.

        Args:
            loss: its loss; None where it had none.
            extra: what else ``training_step`` returned, by name.
            weight: what the loss was divided by; None for a sum.
            rows: its samples.
        """
        if loss is not None:
            self._losses.append(loss.detach())
            self._weights.append(weight)
        if extra:
            self._extras.append((extra, rows))

    def loss(self) -> Tensor | None:
        """The loss of the batch: the weighted mean, or the sum of sums; None where there was none at all."""
        if not self._losses:
            return None
        weights = [weight for weight in self._weights if weight is not None]
        numbers = [weight for weight in weights if not isinstance(weight, Tensor)]
        if self._losses[0].device.type == "cpu" and len(numbers) == len(self._losses) and (total := sum(numbers)):
            # on the host numbers are quicker than tensors
            mean = sum(loss.item() * weight for loss, weight in zip(self._losses, numbers, strict=True) if weight) / total
            return torch.tensor(mean, dtype=self._losses[0].dtype)
        losses = torch.stack([loss.reshape(()) for loss in self._losses])
        return weighted_mean(losses, weights) if len(weights) == len(losses) else losses.sum()

    def extra(self, order: Sequence[int] | None) -> dict[str, Any]:
        """What else was returned.

        Tensors with one entry a sample are put together, in the order of the batch. Numbers are weighted means. Of anything else
        there is a list, with one entry a micro-batch.

        Args:
            order: the rows of the batch in the order of the micro-batches; None where they kept theirs.
        """
        names = dict.fromkeys(name for extra, _ in self._extras for name in extra)
        return {name: self._join(name, order) for name in names}

    def _join(self, name: str, order: Sequence[int] | None) -> Any:
        values = [extra[name] for extra, _ in self._extras if name in extra]
        rows = [count for extra, count in self._extras if name in extra]
        if all(isinstance(value, Tensor) and value.dim() > 0 for value in values):
            has_rows = [len(value) for value in values] == rows
            if has_rows and len({value.shape[1:] for value in values}) == 1:
                joined = torch.cat([value.detach() for value in values])
                return joined if order is None or len(order) != len(joined) else joined[_inverse(order, joined.device)]
        elif all(_is_number(value) for value in values):
            numbers = torch.stack([torch.as_tensor(value).detach() for value in values])
            weights = [weight for weight in self._weights if weight is not None]
            return weighted_mean(numbers, weights if len(weights) == len(values) else rows)
        return [value.detach() if isinstance(value, Tensor) else value for value in values]


def _is_number(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.dim() == 0) or (isinstance(value, Number) and not isinstance(value, bool))


def _inverse(order: Sequence[int], device: torch.device) -> Tensor:
    inverse = torch.empty(len(order), dtype=torch.long)
    inverse[torch.tensor(order)] = torch.arange(len(order))
    return inverse.to(device)
