"""The BatchNorm layers of a module, which for the time of a batch normalise all of its micro-batches together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from lightning_accum.batch_norm.normalisation import NormalisedTogether
from lightning_accum.lock_step.turns import LockStep

_Forward = Callable[..., Any]


def group_of(layer: _BatchNorm) -> dist.ProcessGroup | None:
    """The ranks that a layer takes its statistics from; None for this one alone."""
    if not (isinstance(layer, nn.SyncBatchNorm) and layer.training and dist.is_available() and dist.is_initialized()):
        return None
    group: dist.ProcessGroup | None = layer.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def statistics_of_ranks(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The buffers of layers that ranks have in common, and their values."""
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and group_of(layer) is not None]
    return [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers()]


@contextmanager
def sync_batch_norm_hidden(module: nn.Module) -> Iterator[None]:
    """In here the SyncBatchNorm layers of ``module`` are plain ones.

    DistributedDataParallel refuses them on the CPU, where their forward does not run. That of :class:`JointLayers` does.
    """
    layers = [layer for layer in module.modules() if type(layer) is nn.SyncBatchNorm]
    for layer in layers:
        layer.__class__ = nn.BatchNorm1d  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.SyncBatchNorm


class JointLayers:
    """In :meth:`installed`, micro-batches that run in lock-step meet at each BatchNorm layer and are normalised together.

    A layer runs its own forward, with what it does before and after, and only the call of ``batch_norm`` in it is taken over. Of
    the changes that it makes to ``num_batches_tracked`` those of one micro-batch stay.

    Args:
        module: whose layers.
        steps: in which the micro-batches run.
        is_counted: this rank's rows belong to the batch that all ranks share; else they are there to keep the others company.
    """

    def __init__(self, module: nn.Module, steps: LockStep[Any], is_counted: bool = True) -> None:
        self._module = module
        self._steps = steps
        self._is_counted = is_counted
        self._call: NormalisedTogether | None = None
        self._calls: list[NormalisedTogether] = []
        self._forming: NormalisedTogether | None = None
        self.shared_token: Tensor | None = None
        """That of the last call that the ranks shared; None without."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The layers normalise together in here. A backward belongs in here too."""
        layers = {name: layer for name, layer in self._module.named_modules() if isinstance(layer, _BatchNorm)}
        before = {layer: vars(layer).get("forward") for layer in layers.values()}
        for name, layer in layers.items():
            vars(layer)["forward"] = self._joint_forward(name, layer)
        try:
            yield
        finally:
            for layer, own in before.items():
                del vars(layer)["forward"]
                if own is not None:
                    vars(layer)["forward"] = own
            self._calls.clear()

    def close(self) -> None:
        """All forwards are done: a backward may begin."""
        for call in self._calls:
            call.is_closed = True
        self._calls.clear()  # the graph holds them, as long as it needs them
        self._call = self._forming = None

    def _joint_forward(self, name: str, layer: _BatchNorm) -> _Forward:
        own = vars(layer).get("forward")
        place = f"the BatchNorm layer '{name}'"

        def forward(*args: Any, **kwargs: Any) -> Any:
            if own is not None:
                of_layer: _Forward = own
            elif type(layer).forward is nn.SyncBatchNorm.forward:  # it would go to the ranks by itself, and not on the CPU
                of_layer = _BatchNorm.forward.__get__(layer)
            else:
                of_layer = type(layer).forward.__get__(layer)
            is_by_batch = layer.training or layer.running_mean is None
            if not is_by_batch:
                return of_layer(*args, **kwargs)
            if not self._steps.is_in_turn():
                raise RuntimeError(
                    f"{place} is called outside of training_step, by activation checkpointing or another thread, where it would not"
                    ' see the whole batch. GradientAccumulation(batch_norm="exact") cannot be used with that.'
                )
            tracked = layer.num_batches_tracked
            before = None if tracked is None else tracked.clone()

            def normalise(*arguments: Any) -> Tensor:
                if self._steps.current != self._steps.number - 1 and before is not None:
                    layer.num_batches_tracked.copy_(before)  # type: ignore[union-attr]
                return self._normalise(place, group_of(layer), *arguments)

            with _TakingOver(normalise) as taken:
                output = of_layer(*args, **kwargs)
            if not taken.is_called:
                raise RuntimeError(
                    f"{place}, a {type(layer).__name__}, has a forward of its own that does not call"
                    ' torch.nn.functional.batch_norm: GradientAccumulation(batch_norm="exact") cannot give it the statistics of the'
                    " whole batch."
                )
            return output

        if "torch._dynamo" not in sys.modules:  # whose import takes long, and nothing is compiled without it
            return forward
        return torch.compiler.disable(forward)  # type: ignore[no-untyped-call, no-any-return]

    def _normalise(
        self,
        place: str,
        group: dist.ProcessGroup | None,
        part: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        index = self._steps.current
        assert index is not None
        if index == 0:
            self._forming = NormalisedTogether(self._steps.number, place, group, self._is_counted)
        forming = self._forming
        assert forming is not None
        forming.add(index, part)

        def join() -> None:
            forming.join(running_mean, running_var, weight, momentum, eps, self.shared_token if group is not None else None)
            if group is not None:
                self.shared_token = forming.token
            self._calls.append(forming)
            self._call = forming

        self._steps.meet(place, join)
        assert self._call is not None
        return self._call.normalise(index, weight, bias)


class _TakingOver(TorchFunctionMode):
    """Calls of ``batch_norm`` that would take the statistics of their input go to a function instead."""

    def __init__(self, normalise: Callable[..., Tensor]) -> None:
        super().__init__()
        self._normalise = normalise
        self.is_called = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        order = _ARGUMENTS.get(func)
        if order is None:
            return func(*args, **(kwargs or {}))
        self.is_called = True
        given = {**_DEFAULTS, **dict(zip(order, args, strict=False)), **(kwargs or {})}
        if not given["training"]:
            return func(*args, **(kwargs or {}))
        return self._normalise(*(given[name] for name in _ARGUMENTS[functional.batch_norm] if name != "training"))


_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    functional.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled"),
}
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
