"""An unfinished window in a checkpoint: its gradients, by name, and what had been weighed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_accum.checkpointing.format import check_keys
from lightning_accum.ranks import Ranks
from lightning_accum.weighing.terms import TermsCountedAhead
from lightning_accum.wide_sums import WideSums
from lightning_accum.window import Window

MOST_RANKS_APART = 8
"""Up to so many ranks each one's own gradients are saved, so that on as many a training goes on to the bit; of more, their sum."""


@dataclass
class PartialWindow:
    """A window that a checkpoint was taken inside of.

    Attributes:
        policy: what ends it, in words. With another policy it cannot go on.
        position: loader batches that it had.
        size: loader batches that it would have; None where tokens end it.
        tokens: what it has to reach, where tokens end it.
        ranks: those whose gradients are averaged.
        reference: the scale of its gradients.
        weighed: by rank, what :meth:`Window.weighed` says of its micro-batches, in their order.
        is_reduced: the gradients were averaged over the ranks already.
        gradients: by rank, on the host, by the name of the parameter; one entry where they were averaged or added up.
        scale: by which a GradScaler had multiplied the losses.
        left_out: micro-batches that were not finite, over all ranks.
        term_totals: what each term of the loss is divided by in all of the window, where that was counted ahead.
    """

    policy: str
    position: int
    size: float | None
    tokens: int | None
    ranks: int
    reference: float | None
    weighed: list[list[list[Any]]]
    is_reduced: bool
    gradients: list[dict[str, Tensor]]
    scale: float = 1.0
    left_out: int = 0
    term_totals: list[float] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers."""
        return {**asdict(self), "gradients": self.gradients}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> PartialWindow:
        """The window of a :meth:`state_dict`.

        Raises:
            ValueError: it lacks a field, or has one that is not known.
        """
        check_keys(state, [field.name for field in fields(cls)], (), "an unfinished window")
        return cls(**state)

    def bytes(self) -> int:
        """What the gradients take."""
        return sum(gradient.numel() * gradient.element_size() for own in self.gradients for gradient in own.values())


def gather_gradients(
    named: Mapping[str, nn.Parameter], ranks: Ranks, is_reduced: bool, is_kept: bool, sums: WideSums | None = None
) -> list[dict[str, Tensor]]:
    """The gradients of all ranks, on the host of those that keep them. Called on all ranks.

    Args:
        named: the parameters, in the same order on all ranks.
        ranks: those whose gradients are averaged.
        is_reduced: they were averaged already, so that one rank's are those of all.
        is_kept: whether this rank keeps them.
        sums: where they are, if not in ``parameter.grad``.

    Returns:
        By rank, or one entry (averaged, or the sum of many ranks); empty where this rank does not keep them.
    """
    gradients = {name: parameter.grad if sums is None else sums.of(parameter) for name, parameter in named.items()}
    if is_reduced or ranks.size == 1:
        whole = {name: _whole(gradient) for name, gradient in gradients.items() if gradient is not None}
        return [{name: gradient.to("cpu", copy=True) for name, gradient in whole.items()}] if is_kept else []
    has_gradient = torch.tensor([gradient is not None for gradient in gradients.values()], dtype=torch.uint8, device=ranks.device)
    dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=ranks.group)
    apart = ranks.size <= MOST_RANKS_APART
    by_rank: list[dict[str, Tensor]] = [{} for _ in range(ranks.size if apart else 1)] if is_kept else []
    for (name, parameter), is_on_a_rank in zip(named.items(), has_gradient.tolist(), strict=True):
        if not is_on_a_rank:
            continue
        gradient = gradients[name]
        if gradient is None:
            own = torch.zeros_like(parameter, dtype=None if sums is None else sums.dtype_of(parameter))
        else:
            own = gradient.detach().clone().contiguous()
        if apart:
            found = [torch.empty_like(own) for _ in range(ranks.size)]
            dist.all_gather(found, own, group=ranks.group)
        else:
            dist.all_reduce(own, group=ranks.group)
            found = [own]
        for kept, of_rank in zip(by_rank, found, strict=False):
            kept[name] = of_rank.to("cpu", copy=True)
    return by_rank


def gather_weighed(window: Window, ranks: Ranks) -> list[list[list[Any]]]:
    """What the micro-batches of all ranks weighed. Called on all ranks."""
    own = window.weighed()
    if ranks.size == 1:
        return [own]
    of_all: list[Any] = [None] * ranks.size
    dist.all_gather_object(of_all, own, group=ranks.group)
    return of_all


def put_back(
    partial: PartialWindow,
    named: Mapping[str, nn.Parameter],
    window: Window,
    ranks: Ranks,
    rank: int,
    scale: float,
    warn: Callable[[str], None],
    sums: WideSums | None = None,
) -> None:
    """Give the window and the parameters what a checkpoint holds, on as many ranks as then or on others.

    Args:
        partial: the window in the checkpoint.
        named: the parameters.
        window: takes what was weighed.
        ranks: those whose gradients are averaged now.
        rank: of this one among them.
        scale: by which a GradScaler multiplies the losses now.
        warn: takes a warning to be seen once.
        sums: where the gradients are added up, if not in ``parameter.grad``.

    Raises:
        ValueError: a gradient has another shape than its parameter.
    """
    if ranks.size == partial.ranks:
        weighed = partial.weighed[rank]
    else:  # a sum, so it does not matter who brings in what
        weighed = [micro_batch for of_rank in partial.weighed for micro_batch in of_rank] if rank == 0 else []
    window.take_back(partial.reference, weighed)
    if partial.term_totals is not None and isinstance(window.terms, TermsCountedAhead):
        window.terms.take_back(partial.term_totals)
    window.left_out = partial.left_out if rank == 0 else 0
    left = set()
    for own in partial.gradients:
        left |= own.keys() - named.keys()
    if left:
        warn(f"The checkpoint has partial gradients of parameters that are not in the module: {', '.join(sorted(left)[:3])}.")
    with torch.no_grad():
        for name, parameter in named.items():
            if not parameter.requires_grad:  # frozen since then
                continue
            gradient = _of_this_rank([own[name] for own in partial.gradients if name in own], partial, ranks, rank)
            if gradient is None:
                continue
            if gradient.shape != parameter.shape:
                raise ValueError(
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
