"""The gradients of the micro-batches of one window, measured for the noise scale before they are added to each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_accum.weighing.denominator import Denominator
from lightning_accum.window_totals import tensor_of


class GradientWatch:
    """Takes the norm of every gradient that a backward is about to add to a parameter.

    A hook on a leaf gets the sum over all uses of the parameter in the graph, before it is added to ``.grad`` and before
    DistributedDataParallel reduces it (read in torch 2.13; tests/promises/test_noise_scale.py fails where a release changes it).
    """

    def __init__(self) -> None:
        self.norms: dict[int, Tensor] | None = None
        """Takes the norms, by the number of the parameter; None while nobody looks."""
        self.has_parts = False
        """A gradient came in several parts, as from reentrant checkpointing: that of their sum does not follow from their norms."""
        self._handles: list[RemovableHandle] = []
        self._watched = WeakTensorKeyDictionary()  # those of FSDP2 come and go

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Watch those that need a gradient and are not watched yet. Sharded ones never get theirs from a backward."""
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._watched and not isinstance(parameter, DTensor):
                self._watched[parameter] = len(self._watched)
                handle = parameter.register_hook(partial(self._see, len(self._handles)))  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def watch_units(self, units: Sequence[nn.Module]) -> None:
        """Watch the whole parameters of modules that :func:`torch.distributed.fsdp.fully_shard` was applied to.

        A rank has them from just before the forward of the module, and their gradients, before reduction, are its own.
        """
        for unit in units:
            parts = list(unit.modules())
            self._handles.append(unit.register_forward_pre_hook(partial(self._look_at_whole, parts)))

    def _look_at_whole(self, parts: list[nn.Module], unit: nn.Module, arguments: object) -> None:
        if torch.is_grad_enabled():
            for part in parts:
                self.watch(parameter for parameter in part._parameters.values() if parameter is not None)

    def _see(self, number: int, gradient: Tensor) -> None:
        norms = self.norms
        if norms is None:
            return
        self.has_parts |= number in norms
        norms[number] = norm_of(gradient.detach() if gradient.requires_grad else gradient)

    def close(self) -> None:
        """Remove the hooks from all parameters."""
        self.norms = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def norm_of(gradient: Tensor) -> Tensor:
    """The norm of a gradient, dense or sparse, in single precision at least: squares of float16 overflow."""
    if gradient.layout != torch.strided:
        gradient = gradient.coalesce().values()
    dtype = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=dtype)
    return norm


def sum_of_squares(norms: Iterable[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The sum of squared numbers, one number of ``dtype`` on ``device``, without waiting for it."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for norm in norms:
        alike.setdefault((norm.dtype, norm.device), []).append(norm)
    sums = [torch.stack(group).to(device, dtype).square().sum() for group in alike.values()]
    if len(sums) == 1:  # as nearly always
        return sums[0]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=dtype, device=device)


def squared_norm_of_gradients(parameters: Iterable[Tensor], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The squared norm of what is in ``.grad``: of whole parameters, and of this rank's shards of others."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    whole = (norm_of(gradient) for gradient in gradients if not isinstance(gradient, DTensor))
    shards = (norm_of(gradient.to_local()) for gradient in gradients if isinstance(gradient, DTensor))
    return sum_of_squares(whole, device, dtype), sum_of_squares(shards, device, dtype)


class MeasuredMicroBatch(NamedTuple):
    """A micro-batch of the window that is running.

    Attributes:
        weight: None where its loss is a sum.
        samples: how many it has; nan where the batch does not show it.
        weight_scale: what its gradients are divided by, of the window.
        square: the squared norm of its gradients.
    """

    weight: Denominator | None
    samples: float
    weight_scale: float
    square: Tensor


def totals(
    micro_batches: Sequence[MeasuredMicroBatch], scale: float, is_weighed: bool, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """What is to be summed over the ranks.

    Over the micro-batches of this rank: of n_i |g_i|^2, of n_i, of those that have a weight, of the weights as the window counts
    them (1 for a sum), of samples, and of those whose loss is a sum.

    Args:
        micro_batches: of the window, on this rank.
        scale: of the loss, which the gradients are multiplied by.
        is_weighed: their gradients are multiplied by their weight; with accumulate_dtype that comes later, when they are summed.
        device: where the sums are.
        dtype: float64 where the device has it.
    """
    if not micro_batches:
        return torch.zeros(6, dtype=dtype, device=device)

    def column(values: Iterable[Denominator]) -> Tensor:
        return tensor_of(list(values), device, dtype)

    counted, samples = (
        column(1.0 if m.weight is None else m.weight for m in micro_batches),
        column(m.samples for m in micro_batches),
    )
    sums, scales = column(m.weight is None for m in micro_batches), column(m.weight_scale for m in micro_batches)
    weights = torch.where(sums > 0, samples, counted)  # what a sum would be divided by, if it were a mean, is its samples
    factors = torch.where(sums > 0, 1.0, scales if is_weighed else counted) / scale
    squares = torch.stack([m.square for m in micro_batches]) * factors**2 / weights
    has_weight = weights != 0
    return torch.stack((squares.where(has_weight, 0.0), weights, has_weight.to(dtype), counted, samples, sums)).sum(1)
