"""How a session's micro-batches are run, the training that it belongs to, and what comes of a loader batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    """A module that is trained, in a fit or in a hand-written loop: what its session, its windows and checkpoints ask for."""

    optimizers: list[Optimizer]
    """Those that step."""
    precision_plugin: Any
    ranks: Ranks
    snapshotter: Undo
    """Keeps what a batch may change that runs for others only, or that may have to run again."""
    sync: GradientSync = GradientSync()
    """When gradients are reduced over the ranks."""

    @property
    def module(self) -> nn.Module:
        """It, without a wrapper."""
        raise NotImplementedError

    @property
    def scaler(self) -> Any:
        """A GradScaler; None where there is none."""
        return getattr(self.precision_plugin, "scaler", None)

    def loss_scale(self) -> float:
        """The factor of a GradScaler, by which losses and their gradients are multiplied."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def parameters(self) -> list[nn.Parameter]:
        """Those of the module and of the optimizers."""
        return parameters_of(self.module, self.optimizers)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """The same, by names that are the same in another run, also of a module that is compiled in one of them."""
        named = named_parameters_of(self.module, self.optimizers)
        return {name.replace("_orig_mod.", ""): parameter for name, parameter in named.items()}

    def ranks_of_micro_batch(self) -> dist.ProcessGroup | None:
        """Those that run parts of the same micro-batch; None where each has its own."""
        return None


def parameters_of(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """All that may get a gradient: each once, those of a module first."""
    # without the names that torch would give them: it is asked once a window
    parameters = {id(own): own for part in module.modules() for own in part._parameters.values() if own is not None}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters.update((id(own), own) for own in group["params"])
    return list(parameters.values())


def named_parameters_of(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, nn.Parameter]:
    """As :func:`parameters_of`, by names that are the same in another run."""
    named = dict(module.named_parameters())
    known = set(named.values())
    left = [parameter for parameter in parameters_of(module, optimizers) if parameter not in known]
    return {**named, **{f"optimizer.{index}": parameter for index, parameter in enumerate(left)}}


class BackwardObserver(Protocol):
    """What is called around the backward of a micro-batch."""

    def begin_backward(self, micro_batch: MicroBatch, weight: Denominator | None) -> None:
        """It is next, and the micro-batch is in its window."""

    def end_backward(self) -> None:
        """It is over."""


class Backward(Protocol):
    """How gradients are cleared and made: all that is asked of a hand-written loop, which runs its forward itself."""

    skips_backward: bool
    """Nothing is trained."""

    def zero_grad(self) -> None:
        """Clear the gradients of an earlier window."""

    def backward(self, loss: Tensor, grad_output: Tensor | None, /) -> None:
        """Add the gradients of ``loss`` to those of the window, times ``grad_output`` (None for 1)."""


class CountsAhead(Protocol):
    """How a window is counted before it runs."""

    def transferred(self, batch: Any) -> Any:
        """A loader batch that was drawn ahead, as ``training_step`` gets it."""

    def plan_ahead(self, batch: Any) -> None:
        """Plan how it is split."""

    def run_ahead(self, batch: Any, ahead: int, /) -> Tensor | None:
        """The loss of a micro-batch of a loader batch that is so many after the one under way. Nothing is logged."""


class Step(Backward, CountsAhead, Protocol):
    """How the micro-batches of one loader batch are run."""

    def forward(self, batch: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """``training_step``: the loss of a micro-batch, and what else it returned."""

    def collecting_logs(self) -> AbstractContextManager[BatchLog]:
        """Collect what is logged in here, and log nothing yet."""

    def show_logs(self, outputs: Sequence[Output]) -> None:
        """Log what was collected in these micro-batches; if all are left out, only take part in what ranks reduce together."""


class Outcome(NamedTuple):
    """What came of a loader batch.

    Attributes:
        window_loss: the loss of the window that it ends, which is its own where everything is left to Lightning; None inside of a
            window, and where the window had no weight.
        loss: what ``training_step`` returned for it, put together; None where it had none.
        extra: what else it returned.
    """

    window_loss: Tensor | None
    loss: Tensor | None = None
    extra: Mapping[str, Any] = MappingProxyType({})
