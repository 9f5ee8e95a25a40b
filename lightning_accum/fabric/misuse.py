"""What a hand-written loop may still do by itself, and an Accumulator does: clear, clip, or divide."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_accum.errors import UsageError
from lightning_accum.user_warnings import listed, rank_zero_warn


class UntouchedGradients:
    """Keeps the gradients of a window, to see whether others change one before the next backward.

    Args:
        trained: returns the parameters that are trained; none where their gradients are not kept by them. Asked once a window.
    """

    def __init__(self, trained: Callable[[], Sequence[nn.Parameter]]) -> None:
        self._trained = trained
        self._parameters = trained()
        self._kept: list[tuple[nn.Parameter, Tensor | None, int]] = []
        """Of each parameter its gradient, and how often that has been changed."""
        self._is_between_windows = self._has_warned = False

    def keep(self) -> None:
        """A backward is over."""
        self._kept = [(own, found := own.grad, 0 if found is None else found._version) for own in self._parameters]
        self._is_between_windows = False

    def keep_cleared(self) -> None:
        """A window has ended, and its gradients were cleared."""
        self._parameters = self._trained()
        self.keep()
        self._is_between_windows = True

    def forget(self) -> None:
        """The window was dropped."""
        self._kept = []

    def refuse_changes(self) -> None:
        """Look at them again.

        Raises:
            RuntimeError: one was cleared or changed inside of a window.
        """
        for parameter, gradient, version in self._kept:
            if parameter.grad is not gradient or (gradient is not None and gradient._version != version):
                break
        else:
            return
        if not self._is_between_windows:
            raise UsageError(
                "The gradients were cleared or changed inside of a window. Leave optimizer.zero_grad(), clipping, and backward"
                " calls of other losses out of the loop: accumulator.step(clip_norm=...) clears and clips where a window ends,"
                " and accumulator.backward(loss_a + loss_b) takes all losses of a micro-batch."
            )
        if not self._has_warned and any(parameter.grad is not None for parameter in self._parameters):
            self._has_warned = True
            rank_zero_warn(
                "There are gradients that accumulator.backward did not make, and the first accumulator.backward of a window clears"
                " them. If a loss of the loop is to be trained on, add it to that of its micro-batch:"
                " accumulator.backward(loss_a + loss_b)."
            )


def warn_of_factors(loss: Tensor, size: float) -> None:
    """A loop that was written for accumulation divides its loss by the size of the window; one for float16 has a GradScaler."""
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
            f"The loss is multiplied by {factor:g}, as by GradScaler.scale(loss), which nothing takes back: gradients are that much"
            ' larger than the full batch\'s. Leave the GradScaler out; for float16 use Fabric(precision="16-mixed"), which scales'
            " losses, and unscales gradients, by itself."
        )


def warn_of_hooks(module: nn.Module, is_checked: bool) -> None:
    """Name parameters whose hooks see gradients that are not those of a window.

    Args:
        module: that is trained.
        is_checked: the check of the first batch runs hooks of tensors, and finds those that matter.
    """
    hooked = [
        name
        for name, parameter in module.named_parameters()
        if getattr(parameter, "_post_accumulate_grad_hooks", None) or (parameter._backward_hooks and not is_checked)
    ]
    if hooked:
        rank_zero_warn(
            f"{listed(hooked)}: a hook of this parameter runs in every micro-batch, on gradients that are not yet those of the"
            " window. What it changes, or an optimizer that it steps, is not what it would be in the full batch. Clip by"
            " accumulator.step(clip_norm=...), and do anything else in optimizer.register_step_pre_hook(...): both see the full"
            " batch's gradients."
        )
