"""What ``training_step`` returned for each micro-batch, put together to what it would have returned for the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_accum.exact import exact_dtype, moved
from lightning_accum.micro_batch import Weighed
from lightning_accum.weighing.functions import OfMean
from lightning_accum.weighing.terms import Denominator


class Output(NamedTuple):
    """What came of one micro-batch of a batch.

    Attributes:
        loss: without its graph; a number where it is on the host, where these are quicker than tensors; None where there was none.
        dtype: of the loss.
        extra: what else ``training_step`` returned, by name, without its graph.
        weighed: what it brought into its window.
        rows: its samples.
        is_left_out: it is as if it had never been in the batch.
    """

    loss: Tensor | float | None
    dtype: torch.dtype | None
    extra: Mapping[str, Any]
    weighed: Weighed
    rows: int
    is_left_out: bool = False


def joined_loss(outputs: Sequence[Output], of_window: Tensor | None = None) -> Tensor | None:
    """The loss of a batch: the weighted mean, or the sum of sums; None where there was none at all.

    Args:
        outputs: of its micro-batches, in their order.
        of_window: the loss of a window that is this batch and nothing else, where it is known.
    """
    found = [output for output in outputs if output.loss is not None]
    if not found:
        return None
    dtype = found[-1].dtype
    if of_window is not None:
        return of_window.to(dtype)
    tensors = [output.loss.reshape(()) for output in found if isinstance(output.loss, Tensor)]
    losses = torch.stack(tensors) if tensors else torch.tensor([output.loss for output in found], dtype=torch.float64)
    weights, of_means = [output.weighed.weight for output in found], [output.weighed.of_mean for output in found]
    return loss_of_parts(losses, weights, of_means).to(dtype)


def joined_extra(outputs: Sequence[Output], order: Sequence[int] | None = None) -> dict[str, Any]:
    """What else was returned for a batch.

    Tensors with one entry a sample are put together, in the order of the batch. Numbers are weighted means. Of anything else there
    is a list, with one entry a micro-batch.

    Args:
        outputs: of its micro-batches, in their order.
        order: the rows of the batch in the order of the micro-batches; None where they kept theirs.
    """
    if order is not None:
        rows = iter(order)
        order = [row for output in outputs for row in islice(rows, output.rows) if not output.is_left_out]
    kept = [output for output in outputs if not output.is_left_out]
    names = dict.fromkeys(name for output in kept for name in output.extra)
    return {name: _join([output for output in kept if name in output.extra], name, order) for name in names}


def _join(outputs: Sequence[Output], name: str, order: Sequence[int] | None) -> Any:
    values, rows = [output.extra[name] for output in outputs], [output.rows for output in outputs]
    if all(isinstance(value, Tensor) and value.dim() > 0 for value in values):
        has_rows = [len(value) for value in values] == rows
        if has_rows and len({value.shape[1:] for value in values}) == 1:
            joined = torch.cat(values)
            if order is None or len(order) != len(joined):
                return joined
            return joined[torch.tensor(order).argsort().to(joined.device)]
    elif all(_is_number(value) for value in values):
        numbers = torch.stack([torch.as_tensor(value) for value in values])
        weights = [output.weighed.weight for output in outputs if output.weighed.weight is not None]
        return weighted_mean(numbers, weights if len(weights) == len(values) else rows)
    return values


def _is_number(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.dim() == 0) or (isinstance(value, Number) and not isinstance(value, bool))


def loss_of_parts(values: Tensor, weights: Sequence[Denominator | None], of_means: Sequence[OfMean | None]) -> Tensor:
    """What is a mean, a sum, or a function of one of these, of the whole of several parts."""
    counts = [weight for weight in weights if weight is not None]
    counted = [of_mean for of_mean in of_means if of_mean is not None]
    are_sums = len(counts) < len(weights)
    if len(counted) < len(of_means) or len({of_mean.function for of_mean in counted}) > 1:
        return values.sum(0) if are_sums else weighted_mean(values, counts)
    means, constants = (
        torch.stack([torch.as_tensor(getattr(of_mean, name), device=values.device) for of_mean in counted])
        for name in ("mean", "constant")
    )
    if are_sums:
        return (counted[0].function(means.sum()) + constants.mean()).to(values.dtype)
    return (counted[0].function(weighted_mean(means, counts)) + weighted_mean(constants, counts)).to(values.dtype)


def weighted_mean(values: Tensor, weights: Sequence[Denominator]) -> Tensor:
    """The mean of ``values`` (along dimension 0), each with its weight; values without weight may be NaN.

    Example:
        >>> weighted_mean(torch.tensor([1.0, 4.0, float("nan")]), [1.0, 2.0, 0.0])
        tensor(3.)
    """
    for weight in weights:  # to where they are: from the host to a device nobody waits
        if isinstance(weight, Tensor) and weight.device.type != "cpu":
            values = moved(values, weight.device)
    exact = exact_dtype(values.device)
    if any(isinstance(weight, Tensor) for weight in weights):
        n = torch.stack([torch.as_tensor(weight, device=values.device).detach().to(exact) for weight in weights])
    else:
        n = torch.tensor(weights, dtype=exact, device=values.device)
    n = n.reshape(-1, *[1] * (values.dim() - 1))
    n = torch.where(n.sum(0) == 0, torch.ones_like(n), n)
    parts = torch.where(n == 0, torch.zeros_like(n), values.to(exact) * n)
    return (parts.sum(0) / n.sum(0)).to(values.dtype if values.is_floating_point() else torch.get_default_dtype())
