"""What is true of one micro-batch, as a value that is passed."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from lightning_accum.weighing.functions import OfMean
from lightning_accum.weighing.terms import Denominator


class MicroBatch(NamedTuple):
    """What one forward and backward sees.

    Attributes:
        batch: what ``training_step`` gets.
        rows: its samples, where it is known to be made of them.
        position: its place in its loader batch, from 0.
        number: of the micro-batches that its loader batch is split into.
        is_boundary: it is the last of its window, and gradients are reduced in its backward.
        is_shadow_batch: its loader batch is one that this rank runs for the sake of the others: it weighs nothing.
    """

    batch: Any
    rows: int | None = None
    position: int = 0
    number: int = 1
    is_boundary: bool = False
    is_shadow_batch: bool = False

    @property
    def ends_loader_batch(self) -> bool:
        """It is the last of its loader batch."""
        return self.position == self.number - 1


class Weighed(NamedTuple):
    """What a micro-batch brought into its window.

    Attributes:
        weight: what its loss was divided by; None for a sum, 0 without a loss.
        of_mean: what makes the loss of the mean that was weighed; None where it is that.
        grad_output: the ``gradient`` of its backward; None for 1.
        is_weightless: it is known on the host to have no weight.
    """

    weight: Denominator | None = 0.0
    of_mean: OfMean | None = None
    grad_output: Tensor | None = None
    is_weightless: bool = True

    @property
    def is_written_to(self) -> bool:
        """A backward of the user's has changed ``grad_output`` in place."""
        return self.grad_output is not None and self.grad_output._version > 0


EMPTY = Weighed()
