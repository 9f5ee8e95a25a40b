"""An unfinished window in a checkpoint: its gradients by name, and its weights and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_accum.errors import ArgumentError
from lightning_accum.main_gradients import GradientSums, as_sparse
from lightning_accum.ranks import Ranks
from lightning_accum.window import Window

FORMAT = 9
"""The format of the state of ``GradientAccumulation``. Increase it if a key is added, removed or changes its meaning."""


def check_format(state: Mapping[str, Any]) -> None:
    """Refuse a state that another version of the package has written, with a ValueError."""
    if state.get("format") != FORMAT:
        raise ArgumentError(
            f"The checkpoint holds a state of GradientAccumulation in format {state.get('format', 0)}, and this version of "
            f"lightning_accum reads format {FORMAT}. Resume with the version of lightning_accum that wrote it; or delete "
            "checkpoint['callbacks']['GradientAccumulation'] from the file: parameters, optimizers and schedulers then continue, "
            "but the gradients of an unfinished window are lost."
        )


@dataclass
class PartialLoss:
    """One loss of an unfinished window."""

    weight_scale: float | None  # the divisor of the weights, and so of the gradients
    weighed: list[dict[str, Any]]  # the Window.entries of all ranks, as numbers
    gradients: dict[str, Tensor]  # summed over the ranks, on the host, by parameter; empty on ranks that do not save them
    term_totals: list[float] | None = None  # the denominator of each term over the whole window, if terms are counted first
    loader_batches_left: float = 0  # of that window
    units: dict[int, dict[Any, float]] = field(default_factory=dict)  # see Weigher.units_to_keep


@dataclass
class PartialWindow:
    """The unfinished window of a checkpoint."""

    policy: str  # what ends it, in words: it cannot continue with another policy
    position: int  # loader batches that it had
    size: float | None  # loader batches that it would have; None if tokens end it
    tokens: int | None  # tokens that it must reach, if tokens end it
    ranks: int  # ranks whose gradients are averaged
    losses: list[PartialLoss]  # in the order of their backward calls
    scale: float = 1.0  # the factor of a GradScaler on the losses
    left_out: int = 0  # micro-batches that were not finite, over all ranks

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers."""
        return {**vars(self), "losses": [dict(vars(loss)) for loss in self.losses]}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> PartialWindow:
        """The window of a :meth:`state_dict`."""
        return cls(**{**state, "losses": [PartialLoss(**loss) for loss in state["losses"]]})


def gather_loss(window: Window, named: Mapping[str, nn.Parameter], ranks: Ranks, is_reduced: bool) -> PartialLoss:
    """One loss over all ranks. Called on all ranks."""
    of_all: list[Any] = [[entry.state_dict() for entry in window.entries]]
    if ranks.size > 1:
        of_all *= ranks.size
        dist.all_gather_object(of_all, of_all[0], group=ranks.group)
    weighed = [micro_batch for of_rank in of_all for micro_batch in of_rank]
    gradients, terms = _summed_gradients(named, ranks, is_reduced, window.sums), window.counted
    counted = (None, 0.0) if terms is None else (terms.totals, terms.loader_batches_left)
    units = window.weigher.units_to_keep()
    return PartialLoss(window.weight_scale, weighed, gradients, *counted, units)


def _summed_gradients(
    named: Mapping[str, nn.Parameter], ranks: Ranks, is_reduced: bool, sums: GradientSums | None
) -> dict[str, Tensor]:
    """The gradients, summed over the ranks, on the host of the first rank."""
    gradients = {name: parameter.grad if sums is None else sums.by_parameter.get(parameter) for name, parameter in named.items()}
    kinds = ranks.largest(*(0.0 if own is None else 1.0 + (own.layout != torch.strided) for own in gradients.values()))
    found = {}
    for (name, own), kind in zip(gradients.items(), kinds, strict=True):
        if not kind:
            continue
        if own is None:
            own = torch.zeros_like(named[name], dtype=None if sums is None else sums.dtype_of(named[name]))
        own = own.full_tensor() if isinstance(own, DTensor) else own.detach()
        if is_reduced:
            own = own * ranks.size
        elif ranks.size > 1:
            own = own.clone().contiguous() if kind == 1 else as_sparse(own).clone()
            dist.all_reduce(own, group=ranks.group)
        if ranks.rank == 0:
            found[name] = own.to("cpu", copy=True)
    return found


def restore_loss(
    window: Window, kept: PartialLoss, named: Mapping[str, nn.Parameter], ranks: Ranks, scale: float, warn: Callable[[str], None]
) -> None:
    """Give a loss and the parameters what a checkpoint holds, or raise a ValueError if a parameter has another shape now.

    The first rank gets all weights, and each rank a part of the gradients. The end of the window averages them over the ranks.
    ``scale`` is the present scale of the losses, divided by the scale in the checkpoint.
    """
    sums = window.sums
    known = window.weigher.known
    window.weigher.learn(known._replace(units={**known.units, **kept.units}))
    window.restore(kept.weight_scale, kept.weighed if ranks.is_first else [])
    if kept.term_totals is not None and window.counted is not None:
        window.counted.restore(kept.term_totals)
        window.counted.loader_batches_left = kept.loader_batches_left
    if left := kept.gradients.keys() - named.keys():
        warn(f"The checkpoint has partial gradients of parameters that are not in the module: {', '.join(sorted(left)[:3])}.")
    for name, parameter in named.items():
        gradient = kept.gradients.get(name)
        if gradient is None or not parameter.requires_grad:  # frozen since then
            continue
        if gradient.shape != parameter.shape:
            raise ArgumentError(
                f"The checkpoint's unfinished window has a gradient of shape {tuple(gradient.shape)} for the parameter {name}, "
                f"which is of shape {tuple(parameter.shape)}. Resume with the module that was trained; or change the window, "
                "which begins a new one."
            )
        dtype = parameter.dtype if sums is None else sums.dtype_of(parameter)
        gradient = (gradient * (scale / ranks.size)).to(parameter.device, dtype)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        if sums is None:
            parameter.grad = gradient
        else:
            sums.by_parameter[parameter] = gradient
