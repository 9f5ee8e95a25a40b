"""What a hand-written loop may still do by itself, and an Accumulator does: clear, clip, or divide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter, is_

from torch import Tensor, nn

from lightning_accum.user_warnings import rank_zero_warn

_GRADIENT = attrgetter("grad")


class UntouchedGradients:
    """Keeps the gradients of a window, to see whether others change one before the next backward.

    Args:
        parameters: that are trained; none where their gradients are not kept by them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._kept: list[Tensor | None] = []
        self._versions: list[int] = []
        self._is_between_windows = self._has_warned = False

    def keep(self) -> None:
        """A backward is over."""
        self._kept, self._versions = self._now()
        self._is_between_windows = False

    def keep_cleared(self) -> None:
        """A window has ended, and its gradients were cleared."""
        self.keep()
        self._is_between_windows = True

    def forget(self) -> None:
        """The window was dropped."""
        self._kept = []

    def _now(self) -> tuple[list[Tensor | None], list[int]]:
        gradients = list(map(_GRADIENT, self._parameters))  # in every micro-batch
        return gradients, [0 if gradient is None else gradient._version for gradient in gradients]

    def refuse_changes(self) -> None:
        """Look at them again.

        Raises:
            RuntimeError: one was cleared or changed inside of a window.
        """
        if not self._kept:
            return
        now, versions = self._now()
        if versions == self._versions and all(map(is_, now, self._kept)):
            return
        if not self._is_between_windows:
            raise RuntimeError(
                "The gradients were cleared or changed inside of a window. Leave optimizer.zero_grad(), clipping, and backward"
                " calls of other losses out of the loop: accumulator.step(clip_norm=...) clears and clips where a window ends,"
                " and accumulator.backward(loss_a + loss_b) takes all losses of a micro-batch."
            )
        if not self._has_warned and any(gradient is not None for gradient in now):
            self._has_warned = True
            rank_zero_warn(
                "There are gradients that accumulator.backward did not make, and the first accumulator.backward of a window clears"
                " them. If a loss of the loop is to be trained on, add it to that of its micro-batch:"
                " accumulator.backward(loss_a + loss_b)."
            )


def warn_of_division(loss: Tensor, size: float) -> None:
    """A loop that was written for accumulation divides its loss by the size of the window."""
    node = loss.grad_fn
    saved = getattr(node, "_saved_other", None)
    number = float(saved) if isinstance(saved, Tensor) and saved.numel() == 1 else 0.0
    divisors = {"DivBackward0": number, "MulBackward0": 1 / number if number else 0.0}
    if size > 1 and math.isclose(size, divisors.get(type(node).__name__, 0.0), rel_tol=1e-6):
        rank_zero_warn(
            f"The loss is divided by {size:g}, which is the size of the window. accumulator.backward(loss) divides by what the"
            " window comes to; with this, gradients are that much smaller than the full batch's. Leave the division out."
        )
