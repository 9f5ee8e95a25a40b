"""What a hand-written loop is told: messages in its own words, and what is left in it of a loop without windows."""

from __future__ import annotations

import math
import re
from types import TracebackType

import torch
from torch import Tensor

from lightning_accum.errors import AccumulationError
from lightning_accum.user_warnings import rank_zero_warn, warn

_AROUND = "torch.autograd.graph.save_on_cpu() around forward and backward"
_NAMES = {  # the first that fits is taken
    'GradientAccumulation(1, micro_batch="offload")': _AROUND,
    'GradientAccumulation(micro_batch="offload")': _AROUND,
    'micro_batch="offload"': _AROUND,
    "delete checkpoint['callbacks']['GradientAccumulation'] from the file": "leave out accumulator.load_state_dict(...)",
    "GradientAccumulation": "Accumulator",
    "in the module's optimizer_step, after super().optimizer_step(...)": "where accumulator.step() returns True",
    "in on_before_optimizer_step, which sees": "in optimizer.register_step_pre_hook(...), which sees",
    "self.all_gather(..., sync_grads=True)": "torch.distributed.nn.functional.all_gather(...)",
    "`window/skipped_micro_batches`": "`accumulator.skipped_micro_batches`",
}


class Words:
    """Puts the names of a hand-written loop into messages that are written for fits. As a context, into errors raised in it.

    Args:
        loss: what computes the loss in a loop, where a fit has its ``training_step``.
    """

    def __init__(self, loss: str) -> None:
        self._names = {**_NAMES, "training_step": loss}
        self._pattern = re.compile("|".join(map(re.escape, self._names)))

    def __call__(self, message: str) -> str:
        """A message, with the names of a loop."""
        return self._pattern.sub(lambda found: self._names[found[0]], message)

    def warn(self, message: str) -> None:
        """Warn, on any rank."""
        warn(self(message))

    def rank_zero_warn(self, message: str) -> None:
        """Warn, on rank zero."""
        rank_zero_warn(self(message))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, AccumulationError):  # errors of the user's code stay as they are
            error.args = tuple(self(word) if isinstance(word, str) else word for word in error.args)


def warn_of_factors(loss: Tensor, size: float) -> None:
    """Warn of a loss that is still divided by the size of the window, or multiplied by a GradScaler."""
    node = loss.grad_fn
    kind, saved = type(node).__name__, getattr(node, "_saved_other", None)
    if not isinstance(saved, Tensor) or saved.numel() != 1 or kind not in ("DivBackward0", "MulBackward0"):
        return
    factor = float(saved)
    divisor = factor if kind == "DivBackward0" or factor == 0 else 1 / factor
    if size > 1 and math.isclose(size, divisor, rel_tol=1e-6):
        rank_zero_warn(
            f"The loss is divided by {size:g}, which is the size of the window. accumulator.backward(loss) divides by what the"
            " window comes to; with this, gradients are that much smaller than the full batch's. Leave the division out."
        )
    elif kind == "MulBackward0" and saved.dtype == torch.float32 and factor >= 256 and math.frexp(factor)[0] == 0.5:
        rank_zero_warn(
            f"The loss is multiplied by {factor:g}, as by GradScaler.scale(loss), and nothing divides the gradients by that. Leave"
            ' the GradScaler out; for float16 use Fabric(precision="16-mixed"), which does both by itself.'
        )
