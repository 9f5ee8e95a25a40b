"""The interfaces of a session: the trained module, how micro-batches run, and the outcome of a loader batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_accum.micro_batch import MicroBatch, Output
from lightning_accum.ranks import Ranks
from lightning_accum.splitting.logs import BatchLog
from lightning_accum.sync.base import GradientSync
from lightning_accum.undo import Undo
from lightning_accum.weighing.terms import Denominator


class Trained:
    """A module in training, in a fit or in a hand-written loop, as sessions, windows and checkpoints see it."""

    optimizers: list[Optimizer]
    """The optimizers that step."""
    precision_plugin: Any
    ranks: Ranks
    snapshotter: Undo
    """Saves the state that a shadow batch, or a batch that may run again, can change."""
    sync: GradientSync = GradientSync()
    """When gradients are reduced over the ranks."""
    can_save_window = True
    """Whether a checkpoint can have the gradients of an unfinished window."""

    @property
    def module(self) -> nn.Module:
        """The module without a wrapper."""
        raise NotImplementedError

    @property
    def scaler(self) -> Any:
        """The GradScaler; None if there is none."""
        return getattr(self.precision_plugin, "scaler", None)

    def loss_scale(self) -> float:
        """The factor of the GradScaler for losses and gradients; 1 without one."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the module and of the optimizers."""
        return parameters_of(self.module, self.optimizers)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """The parameters by names that are the same in every run, compiled or not."""
        named = named_parameters_of(self.module, self.optimizers)
        return {name.replace("_orig_mod.", ""): parameter for name, parameter in named.items()}

    def run_as_engine(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step with the engine's own set-up around it."""
        return step(*args, **kwargs)

    def differentiated(self, loss: Tensor, share: float) -> Tensor:
        """What is differentiated for ``share`` times a loss, divided by it: perhaps more, by the module's own ``backward``."""
        return loss

    def loss_again(self, batch: Any, is_on_device: bool) -> Tensor:
        """The loss of a batch that had one before, of which nothing is logged. Only sharded modules need it."""
        raise NotImplementedError

    def ranks_of_micro_batch(self) -> dist.ProcessGroup | None:
        """The ranks that run parts of the same micro-batch; None if each has its own."""
        return None


def parameters_of(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """All parameters that may get a gradient, each once, the module's parameters first."""
    # faster than module.parameters(), since it runs once a window
    parameters = {id(own): own for part in module.modules() for own in part._parameters.values() if own is not None}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters.update((id(own), own) for own in group["params"])
    return list(parameters.values())


def named_parameters_of(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, nn.Parameter]:
    """:func:`parameters_of` by names that are the same in every run."""
    named = dict(module.named_parameters())
    known = set(named.values())
    left = [parameter for parameter in parameters_of(module, optimizers) if parameter not in known]
    return {**named, **{f"optimizer.{index}": parameter for index, parameter in enumerate(left)}}


class BackwardObserver(Protocol):
    """Is called around the backward of each micro-batch."""

    def begin_backward(self, micro_batch: MicroBatch, weight: Denominator | None) -> None:
        """Called before the backward, when the micro-batch is in its window."""

    def end_backward(self) -> None:
        """Called after the backward."""


class Backward(Protocol):
    """How gradients are cleared and computed. A hand-written loop, which runs its own forward, needs no more."""

    skips_backward: bool
    """The step has nothing to train."""

    def zero_grad(self) -> None:
        """Clear the gradients of an earlier window."""

    def backward(self, loss: Tensor, grad_output: Tensor | None, /) -> None:
        """Add the gradients of ``loss``, times ``grad_output`` (None for 1), to the gradients of the window."""


class CountsAhead(Protocol):
    """How a window is counted before it runs."""

    def transferred(self, batch: Any) -> Any:
        """A loader batch that was drawn ahead, transferred to the device."""

    def run_ahead(self, batch: Any, ahead: int, /) -> Tensor | None:
        """The loss of a micro-batch that is ``ahead`` loader batches after the current one. Logs nothing."""


class Step(Backward, CountsAhead, Protocol):
    """How the micro-batches of one loader batch are run."""

    def forward(self, batch: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """Run ``training_step``. Returns the loss of a micro-batch, and the other outputs."""

    def collecting_logs(self) -> AbstractContextManager[BatchLog]:
        """Inside, collect logged values without logging them."""

    def show_logs(self, outputs: Sequence[Output]) -> None:
        """Log the collected values of these micro-batches; if all are left out, only take part in reductions over ranks."""


class Outcome(NamedTuple):
    """The outcome of a loader batch."""

    window_loss: Tensor | None  # of the window that it ends, if that has weight, or its own if Lightning takes the step; else None
    loss: Tensor | None = None  # its loss, combined over micro-batches; None if it had none
    extra: Mapping[str, Any] = MappingProxyType({})  # the other outputs of ``training_step``
