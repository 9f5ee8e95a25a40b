"""How a session's micro-batches are run, what it asks of the training that it belongs to, and what comes of a loader batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.optim import Optimizer

from lightning_accum.micro_batch import MicroBatch, Weighed
from lightning_accum.splitting.logs import BatchLog


class SessionEngine(Protocol):
    """What a session asks of the training that it belongs to."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that step."""

    def announce(self, micro_batch: MicroBatch, weighed: Weighed) -> None:
        """Say what was understood: the first loss was weighed."""


class Backward(Protocol):
    """How gradients are cleared and made: all that is asked of a hand-written loop, which runs its forward itself."""

    @property
    def skips_backward(self) -> bool:
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

    def show_logs(self, log: BatchLog, is_left_out: bool) -> None:
        """Log what was collected; or take part in what other ranks log, if it is as if it had never been there."""


class Outcome(NamedTuple):
    """What came of a loader batch.

    Attributes:
        returned: gives what ``training_step`` returned for it, put together: the loss, None where it had none, and what else.
        window_loss: the loss of the window that it ends, which is its own where everything is left to Lightning; None inside of a
            window, and where the window had no weight.
    """

    returned: Callable[[], tuple[Tensor | None, dict[str, Any]]]
    window_loss: Tensor | None
