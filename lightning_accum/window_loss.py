"""One loss of ``training_step`` over a window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_accum.main_gradients import GradientSums
from lightning_accum.weighing.weight import Weigher
from lightning_accum.window import Window
from lightning_accum.window_totals import ClosedWindow


@dataclass
class WindowLoss:
    """The only loss that a Trainer optimizes, or that of one call of ``manual_backward``.

    Attributes:
        window: its losses and weights since the last boundary.
        weigher: finds those weights.
        sums: where its gradients are added up, if not in ``parameter.grad``.
    """

    window: Window
    weigher: Weigher
    sums: GradientSums | None = None

    def warn_of(self, closed: ClosedWindow, warn: Callable[[str], None]) -> None:
        """Name what keeps a window that has ended from being its full batch."""
        if closed.do_terms_disagree:
            warn(
                f"The ratio of the terms' weights varies between micro-batches, and all took the weight of the first"
                f" ({self.weigher.criterion}): this window differs from its full batch. Pass one weight for each term,"
                " weight=[...]."
            )
        if closed.do_factors_differ:
            warn(
                "A factor of the loss changes inside a window, or is not the same on all ranks (as is the slope of relu(mean - c)"
                " on either side of c), or a penalty on parameters is not in all micro-batches. They are taken for constants, and"
                " if this one is not, a window differs from its full batch."
                " Anneal a factor by global_step, which is the same in all of a window, and not by batch_idx; for one that goes"
                " with the batch, pass an explicit weight."
            )
        if closed.is_miscounted:
            warn(
                "What the weights of the terms count in micro-batches does not add up to what they counted in the whole batch: a"
                " micro-batch had no loss, or a weight is no count that adds up. The terms of such a window have other shares than"
                " in the full batch."
            )
