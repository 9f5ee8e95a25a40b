"""An unfinished window in a checkpoint: its gradients, by name, and what had been weighed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_accum.checkpointing.format import check_keys
from lightning_accum.errors import ArgumentError
from lightning_accum.main_gradients import GradientSums
from lightning_accum.ranks import Ranks
from lightning_accum.window_loss import WindowLoss

MOST_SEPARATE_RANKS = 8
"""Up to so many ranks each one's own gradients are saved, so that on as many a training goes on to the bit; of more, their sum."""


@dataclass
class PartialLoss:
    """One loss of an unfinished window.

    Attributes:
        weight_scale: what the weights, and so the gradients, were divided by.
        weighed: by rank, what :meth:`Window.weighed` says of its micro-batches, in their order.
        gradients: by rank, on the host, by the name of the parameter; one entry where they were averaged or added up.
        term_totals: what each term of the loss is divided by in all of the window, where that was counted ahead.
        loader_batches_left: of that window.
    """

    weight_scale: float | None
    weighed: list[list[list[Any]]]
    gradients: list[dict[str, Tensor]]
    term_totals: list[float] | None = None
    loader_batches_left: int = 0


@dataclass
class PartialWindow:
    """A window that a checkpoint was taken inside of.

    Attributes:
        policy: what ends it, in words. With another policy it cannot go on.
        position: loader batches that it had.
        size: loader batches that it would have; None where tokens end it.
        tokens: what it has to reach, where tokens end it.
        ranks: those whose gradients are averaged.
        is_reduced: the gradients were averaged over the ranks already.
        losses: in the order of their backward calls.
        scale: by which a GradScaler had multiplied the losses.
        left_out: micro-batches that were not finite, over all ranks.
    """

    policy: str
    position: int
    size: float | None
    tokens: int | None
    ranks: int
    is_reduced: bool
    losses: list[PartialLoss]
    scale: float = 1.0
    left_out: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers."""
        return {**vars(self), "losses": [dict(vars(loss)) for loss in self.losses]}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> PartialWindow:
        """The window of a :meth:`state_dict`.

        Raises:
            ValueError: it lacks a field, or has one that is not known.
        """
        check_keys(state, [field.name for field in fields(cls)], (), "an unfinished window")
        for loss in state["losses"]:
            check_keys(loss, [field.name for field in fields(PartialLoss)], (), "a loss of an unfinished window")
        return cls(**{**state, "losses": [PartialLoss(**loss) for loss in state["losses"]]})

    def bytes(self) -> int:
        """What the gradients take."""
        gradients = [gradient for loss in self.losses for own in loss.gradients for gradient in own.values()]
        return sum(gradient.numel() * gradient.element_size() for gradient in gradients)


def gather_loss(loss: WindowLoss, named: Mapping[str, nn.Parameter], ranks: Ranks, is_reduced: bool, is_kept: bool) -> PartialLoss:
    """What all ranks have of a loss. Called on all of them."""
    weighed = [loss.window.weighed()]
    if ranks.size > 1:
        of_all: list[Any] = [None] * ranks.size
        dist.all_gather_object(of_all, weighed[0], group=ranks.group)
        weighed = of_all
    gradients = _gather_gradients(named, ranks, is_reduced, is_kept, loss.sums)
    terms = loss.window.counted
    if terms is None:
        return PartialLoss(loss.window.weight_scale, weighed, gradients)
    return PartialLoss(loss.window.weight_scale, weighed, gradients, terms.totals, terms.loader_batches_left)


def _gather_gradients(
    named: Mapping[str, nn.Parameter], ranks: Ranks, is_reduced: bool, is_kept: bool, sums: GradientSums | None
) -> list[dict[str, Tensor]]:
    """The gradients of all ranks, on the host of those that keep them.

    Returns:
        By rank, or one entry (averaged, or the sum of many ranks); empty where this rank does not keep them.
    """
    gradients = {name: parameter.grad if sums is None else sums.of(parameter) for name, parameter in named.items()}
    if is_reduced or ranks.size == 1:
        whole = {name: _whole(gradient) for name, gradient in gradients.items() if gradient is not None}
        return [{name: gradient.to("cpu", copy=True) for name, gradient in whole.items()}] if is_kept else []
    has_gradient = torch.tensor([gradient is not None for gradient in gradients.values()], dtype=torch.uint8, device=ranks.device)
    dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=ranks.group)
    is_separate = ranks.size <= MOST_SEPARATE_RANKS
    by_rank: list[dict[str, Tensor]] = [{} for _ in range(ranks.size if is_separate else 1)] if is_kept else []
    for (name, parameter), is_on_a_rank in zip(named.items(), has_gradient.tolist(), strict=True):
        if not is_on_a_rank:
            continue
        gradient = gradients[name]
        if gradient is None:
            own = torch.zeros_like(parameter, dtype=None if sums is None else sums.dtype_of(parameter))
        else:
            own = gradient.detach().clone().contiguous()
        if is_separate:
            found = [torch.empty_like(own) for _ in range(ranks.size)]
            dist.all_gather(found, own, group=ranks.group)
        else:
            dist.all_reduce(own, group=ranks.group)
            found = [own]
        for kept, of_rank in zip(by_rank, found, strict=False):
            kept[name] = of_rank.to("cpu", copy=True)
    return by_rank


def restore_loss(
    loss: WindowLoss,
    kept: PartialLoss,
    partial: PartialWindow,
    named: Mapping[str, nn.Parameter],
    ranks: Ranks,
    rank: int,
    scale: float,
    warn: Callable[[str], None],
) -> None:
    """Give a loss and the parameters what a checkpoint holds, on as many ranks as then or on others.

    Raises:
        ValueError: a gradient has another shape than its parameter.
    """
    window, sums = loss.window, loss.sums
    if ranks.size == partial.ranks:
        weighed = kept.weighed[rank]
    else:  # a sum, so it does not matter who brings in what
        weighed = [micro_batch for of_rank in kept.weighed for micro_batch in of_rank] if rank == 0 else []
    window.restore(kept.weight_scale, weighed)
    if kept.term_totals is not None and window.counted is not None:
        window.counted.restore(kept.term_totals)
        window.counted.loader_batches_left = kept.loader_batches_left
    left = set()
    for own in kept.gradients:
        left |= own.keys() - named.keys()
    if left:
        warn(f"The checkpoint has partial gradients of parameters that are not in the module: {', '.join(sorted(left)[:3])}.")
    with torch.no_grad():
        for name, parameter in named.items():
            if not parameter.requires_grad:  # frozen since then
                continue
            gradient = _of_this_rank([own[name] for own in kept.gradients if name in own], partial, ranks, rank)
            if gradient is None:
                continue
            if gradient.shape != parameter.shape:
                raise ArgumentError(
                    f"The checkpoint's unfinished window has a gradient of shape {tuple(gradient.shape)} for the parameter {name},"
                    f" which is of shape {tuple(parameter.shape)}. Resume with the module that was trained; or with another window,"
                    " so that a new one begins."
                )
            gradient = gradient if scale == partial.scale else gradient * (scale / partial.scale)
            if sums is None:
                parameter.grad = _placed(gradient, parameter, parameter.dtype)
            else:
                sums.put(parameter, _placed(gradient, parameter, sums.dtype_of(parameter)))


def _of_this_rank(of_ranks: list[Tensor], partial: PartialWindow, ranks: Ranks, rank: int) -> Tensor | None:
    if not of_ranks:
        return None
    if partial.is_reduced:
        return of_ranks[0] if ranks.size == partial.ranks else of_ranks[0] * (partial.ranks / ranks.size)
    if len(of_ranks) == ranks.size == partial.ranks:
        return of_ranks[rank]
    whole = torch.stack(of_ranks).sum(0)
    return whole if rank == 0 else torch.zeros_like(whole)


def _placed(gradient: Tensor, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    gradient = gradient.to(parameter.device, dtype, copy=True)
    if isinstance(parameter, DTensor):
        return distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
    return gradient


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
