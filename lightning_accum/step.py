"""How a session's micro-batches are run, what it asks of the strategy that it belongs to, and what comes of a loader batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from lightning_accum.micro_batch import MicroBatch, Weighed
from lightning_accum.splitting.batch_log import BatchLog


class SessionEngine(Protocol):
    """What a session asks of the strategy that it belongs to."""

    def parameters(self) -> list[nn.Parameter]:
        """All that may get a gradient."""

    def announce(self, micro_batch: MicroBatch, weighed: Weighed) -> None:
        """The first loss was weighed: say what was understood."""

    def end_window_inside_batch(self) -> None:
        """A micro-batch has ended that is not the last of its loader batch: so does the window, if it has come to its tokens."""

    def stop(self) -> None:
        """A rank was told to end: all end after the loader batch under way."""


class ZeroGrad(Protocol):
    """How gradients are cleared."""

    @property
    def skips_backward(self) -> bool:
        """Nothing is trained."""

    def zero_grad(self) -> None:
        """Clear the gradients of an earlier window."""


class Step(ZeroGrad, Protocol):
    """How the micro-batches of one loader batch are run."""

    def forward(self, batch: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """``training_step``: the loss of a micro-batch, and what else it returned."""

    def backward(self, loss: Tensor, grad_output: Tensor | None, /) -> None:
        """Add the gradients of ``loss`` to those of the window, times ``grad_output`` (None for 1)."""

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
