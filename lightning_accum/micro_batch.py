"""One micro-batch as a value that is passed, and the outputs of several, joined to the output of their batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from numbers import Number
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_accum.exact import exact_dtype, is_on_host, moved, tensor_of
from lightning_accum.weighing.functions import OfMean
from lightning_accum.weighing.terms import Denominator


class MicroBatch(NamedTuple):
    """The input of one forward and backward."""

    batch: Any  # what ``training_step`` gets
    rows: int | None = None  # the number of its samples, if known
    position: int = 0  # its place in its loader batch, from 0
    number: int = 1  # how many micro-batches its loader batch has
    is_boundary: bool = False  # it is the last of its window, and gradients are reduced in its backward
    is_shadow_batch: bool = False  # it has weight 0, and runs only because other ranks wait for this one

    @property
    def ends_loader_batch(self) -> bool:
        """It is the last of its loader batch."""
        return self.position == self.number - 1


class Weighed(NamedTuple):
    """The contribution of a micro-batch to its window."""

    weight: Denominator | None = 0.0  # the denominator of its loss; None for a sum, 0 without a loss
    of_mean: OfMean | None = None  # the function that maps the mean to the loss; None if the loss is the mean
    grad_output: Tensor | None = None  # the ``gradient`` of its backward; None for 1
    is_weightless: bool = True  # it is known on the host to have no weight


EMPTY = Weighed()


# --- the outputs of several micro-batches, joined to the output of their batch ----------------------------------------


class Output(NamedTuple):
    """The output of one micro-batch of a batch."""

    loss: Tensor | None
    """Without its graph; None if there was no loss."""
    extra: Mapping[str, Any]
    """The other outputs of ``training_step``, by name, without their graph."""
    weighed: Weighed
    rows: int
    logs: Mapping[Any, Any] = MappingProxyType({})
    """Its logged values (``splitting/logs.py``)."""
    is_left_out: bool = False
    """It was left out of the batch."""


def joined_loss(outputs: Sequence[Output], of_window: Tensor | None = None) -> Tensor | None:
    """The loss of a batch: the weighted mean, or the sum of sums; ``of_window`` if the batch is the whole window."""
    losses = [output.loss for output in outputs if output.loss is not None]
    if not losses:
        return None
    if of_window is not None:
        return of_window.to(losses[-1].dtype)
    values = torch.stack([loss.reshape(()) for loss in losses])
    return loss_of_parts(values, [output.weighed for output in outputs if output.loss is not None])


def joined_extra(outputs: Sequence[Output], order: Sequence[int] | None = None) -> dict[str, Any]:
    """The other outputs of ``training_step`` for a batch.

    Tensors with one entry a sample are joined in the order of the batch. Numbers become weighted means. Other values become a list
    with one entry for each micro-batch.
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
    elif not any(isinstance(v, bool) or (isinstance(v, Tensor) and v.dim()) or not isinstance(v, (Tensor, Number)) for v in values):
        numbers = torch.stack([torch.as_tensor(value) for value in values])
        weights = [output.weighed.weight for output in outputs if output.weighed.weight is not None]
        return weighted_mean(numbers, weights if len(weights) == len(values) else rows)
    return values


def loss_of_parts(values: Tensor, parts: Sequence[Weighed]) -> Tensor:
    """Combine the values of parts to the value of the whole: a mean, a sum, or a function of one of these."""
    weights = [part.weight for part in parts if part.weight is not None]
    of_means = [part.of_mean for part in parts if part.of_mean is not None]
    are_sums = len(weights) < len(parts)
    if len(of_means) < len(parts) or len({of_mean.function for of_mean in of_means}) > 1:
        return values.sum(0) if are_sums else weighted_mean(values, weights)
    stacked = [[torch.as_tensor(getattr(own, name), device=values.device) for own in of_means] for name in ("mean", "constant")]
    means, constants = map(torch.stack, stacked)
    mean = means.sum() if are_sums else weighted_mean(means, weights)
    constant = constants.mean() if are_sums else weighted_mean(constants, weights)
    return (of_means[0].function(mean) + constant).to(values.dtype)


def weighted_mean(values: Tensor, weights: Sequence[Denominator]) -> Tensor:
    """The mean of ``values`` (along dimension 0), each with its weight; values without weight may be NaN."""
    for weight in weights:  # move to the weights' device: a copy from the host does not wait
        if isinstance(weight, Tensor) and not is_on_host(weight):
            values = moved(values, weight.device)
    exact = exact_dtype(values.device)
    if any(isinstance(weight, Tensor) for weight in weights):
        n = torch.stack([tensor_of(weight, values.device, exact).detach() for weight in weights])
    else:
        n = torch.tensor(weights, dtype=exact, device=values.device)
    n = n.reshape(-1, *[1] * (values.dim() - 1))
    n = torch.where(n.sum(0) == 0, torch.ones_like(n), n)
    parts = torch.where(n == 0, torch.zeros_like(n), values.to(exact) * n)
    return (parts.sum(0) / n.sum(0)).to(values.dtype if values.is_floating_point() else torch.get_default_dtype())
