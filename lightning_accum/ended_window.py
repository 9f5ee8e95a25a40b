"""What ``on_window_end`` gets of a window."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_accum.window_totals import ClosedWindow


@dataclass(frozen=True, slots=True)
class EndedWindow:
    """A window whose optimizer step has been made, over all ranks.

    Numbers that a device has computed may be tensors on it: nothing is copied to the host before somebody reads them, as with
    ``float(window.loss)``.

    Attributes:
        loss: the loss that the full batch would have had, as ``window/loss``; nan where the window had none.
        weight: what it was made of, as ``window/weight``: the tokens of a language model; 1 for a loss that is a sum.
        micro_batches: micro-batches with a loss, on all ranks.
        loader_batches: loader batches of each rank that ended in it: 0 for a window that ends in the loader batch that it began in.
        gradient_norm: of the full batch, before clipping, where the Trainer clips by norm; else None.
        has_stepped: the optimizer has changed the parameters. False where a GradScaler left the step out, or ``training_step``
            returned None throughout: ``trainer.global_step`` counts these too, as ever in Lightning.

    Example:
        >>> EndedWindow.of(ClosedWindow(loss=0.5, weight=1024.0, micro_batches=8), loader_batches=8).loss
        0.5
    """

    loss: Tensor | float
    weight: Tensor | float
    micro_batches: int
    loader_batches: int
    gradient_norm: Tensor | None = None
    has_stepped: bool = True

    @classmethod
    def of(
        cls, closed: ClosedWindow, loader_batches: int, gradient_norm: Tensor | None = None, has_stepped: bool = True
    ) -> EndedWindow:
        """What is to be seen of a window that was closed."""
        has_stepped = has_stepped and not closed.is_empty
        return cls(closed.loss, closed.weight, closed.micro_batches, loader_batches, gradient_norm, has_stepped)
