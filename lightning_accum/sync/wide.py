"""Reduction over DistributedDataParallel's ranks of gradients that were added up in a wider type than the parameters'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_accum.main_gradients import MainGradients
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.ranks import Ranks
from lightning_accum.sync.base import GradientSlot, GradientSync
from lightning_accum.sync.ddp import DDPSync


class SumSlot(GradientSlot):
    """Where the gradient of a parameter is accumulated in a wider type.

    Args:
        name: of the parameter.
        parameter: the parameter.
        sums: have it.
    """

    def __init__(self, name: str, parameter: nn.Parameter, sums: MainGradients) -> None:
        super().__init__(name, parameter)
        self._sums = sums

    @override
    def get(self) -> Tensor | None:
        return self._sums.of(self._parameter)

    @override
    def put(self, gradient: Tensor | None) -> None:
        self._sums.put(self._parameter, gradient)


def slots_of(sync: GradientSync, named: Mapping[str, nn.Parameter], sums: MainGradients | None) -> list[GradientSlot]:
    """Where the gradients of a micro-batch arrive: in a wider type, if they are added up in one, else where ``sync`` has them."""
    if sums is None:
        return sync.gradient_slots(named)
    return [SumSlot(name, parameter, sums) for name, parameter in named.items() if parameter.requires_grad]


class WideDDPSync(DDPSync):
    """One reduction at the end of a window, of the sums: DistributedDataParallel itself would reduce in the parameters' type.

    It reduces nothing then, so its forward is left out, and ``find_unused_parameters`` and ``static_graph``, which prepare its
    reduction, change nothing.

    Args:
        ddp: the wrapped module.
        sums: what is reduced.
        ranks: over which.
    """

    def __init__(self, ddp: DistributedDataParallel, sums: MainGradients, ranks: Ranks) -> None:
        super().__init__(ddp)
        ddp.require_backward_grad_sync = False
        self._sums = sums
        self._ranks = ranks
        named = ddp.module.named_parameters()
        self._parameters = [parameter for name, parameter in named if name not in ddp.parameters_to_ignore]

    @override
    def blocked(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        return nullcontext()

    @override
    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    @override
    def forward_without_batch(self) -> None:
        pass

    @override
    def reduce_accumulated(self) -> None:
        pass

    @override
    def end_window(self) -> None:
        self._sums.reduce(self._ranks, self._parameters)
        # which DistributedDataParallel does in the forward after a reduction
        self._ddp.require_forward_param_sync = True
        if self._ddp.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            self._ddp._sync_buffers()  # type: ignore[no-untyped-call]
