"""What a hand-written loop may still do by itself, and an Accumulator does: clear, clip, or divide."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_accum.user_warnings import rank_zero_warn


class UntouchedGradients:
    """Keeps one gradient of a window, to see whether others change it before the next backward.

    Args:
        parameters: that are trained; none where their gradients are not kept by them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._kept: tuple[nn.Parameter, Tensor, int] | None = None

    def keep(self) -> None:
        """A backward is over."""
        self._kept = None
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None:
                self._kept = (parameter, gradient, gradient._version)
                return

    def forget(self) -> None:
        """The window has ended, or was dropped."""
        self._kept = None

    def refuse_changes(self) -> None:
        """Look at it again.

        Raises:
            RuntimeError: it was cleared or changed.
        """
        if self._kept is None:
            return
        parameter, gradient, version = self._kept
        if parameter.grad is not gradient or gradient._version != version:
            raise RuntimeError(
                "The gradients were cleared or changed inside of a window. Leave optimizer.zero_grad(), and clipping, out of the"
                " loop: accumulator.step(clip_norm=...) does both where a window ends."
            )


def warn_of_division(loss: Tensor, size: float) -> None:
    """A loop that was written for accumulation divides its loss by the size of the window."""
    node = loss.grad_fn
    divisor = getattr(node, "_saved_other", None) if type(node).__name__ == "DivBackward0" else None
    if isinstance(divisor, Tensor) and divisor.numel() == 1 and 1 < size == float(divisor):
        rank_zero_warn(
            f"The loss is divided by {size:g}, which is the size of the window. accumulator.backward(loss) divides by what the"
            " window comes to; with this, gradients are that much smaller than the full batch's. Leave the division out."
        )
