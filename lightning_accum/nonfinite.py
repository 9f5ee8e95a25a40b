"""Micro-batches whose loss or gradient is not finite: left out of their window, or an error.

A NaN cannot be subtracted from a sum. So the accumulated gradients are copied before each backward, and restored if it
makes them non-finite. This costs one copy of the gradients and one device sync a micro-batch. An error needs no copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_accum.errors import NotFiniteError
from lightning_accum.exact import moved
from lightning_accum.main_gradients import MainGradients
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.step import Trained
from lightning_accum.sync.base import GradientSync
from lightning_accum.undo import Snapshot
from lightning_accum.user_warnings import warn
from lightning_accum.weighing.terms import Denominator


@dataclass(eq=False)
class Guard:
    """Checks each micro-batch of a training run, and leaves out those that are not finite, or raises an error.

    Leaving out a micro-batch drops its gradient, and restores what it changed in the module, random state included (:class:`Undo`).
    With a GradScaler, which checks gradients itself, only the loss is checked.
    """

    trained: Trained
    gradients: GradientSync | MainGradients  # keep the window's gradients until they are reduced
    skips: bool
    where: Callable[[], str]  # says in words which loader batch is under way
    inform: Callable[[str], None]  # prints what was left out, after a warning about the first
    warn: Callable[[str], None] = warn

    def __post_init__(self) -> None:
        self.has_skipped = self._has_warned = False  # the last micro-batch was left out; a warning was given
        self._group, self._looks_at_gradients = self.trained.ranks_of_micro_batch(), self.trained.scaler is None
        self._micro_batch = MicroBatch(None)
        self._snapshot: Snapshot | None = None

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Save the state that its forward and backward may change."""
        self._micro_batch, self.has_skipped = micro_batch, False
        if self.skips:
            self._snapshot = self.trained.snapshotter.take(watches_parameters=False)

    @contextmanager
    def watching(self, loss: Tensor, weight: Denominator | None) -> Iterator[None]:
        """The context of a micro-batch's backward."""
        named, gradients = self.trained.parameters_by_name(), self.gradients
        accumulated = gradients.accumulated(named.values()) if self.skips else {}
        kept = {parameter: gradient.clone() for parameter, gradient in accumulated.items()}
        fault: str | None = "an error"
        try:
            yield
            fault = self._fault(loss, weight, named)
        finally:
            if fault is not None and self.skips:
                gradients.restore_accumulated(named.values(), kept)
        if fault is not None:
            self._report(fault)

    def _report(self, fault: str) -> None:
        place, number = self._micro_batch.position, self._micro_batch.number
        where = self.where() + (f" (micro-batch {place} of {number})" if number > 1 else "")
        if not self.skips:
            raise NotFiniteError(f'{where} is not finite: {fault}. GradientAccumulation(on_nonfinite="skip") would leave it out.')
        self.has_skipped = True
        if self._has_warned:
            self.inform(f"{where} is left out: {fault}.")
        else:
            self._has_warned = True
            found = f"{where} is not finite, and is left out: {fault}."
            self.warn(f"{found} Others may follow; `window/skipped_micro_batches` counts them.")

    def end_micro_batch(self) -> bool:
        """Restore what the micro-batch changed, if it was left out. Returns whether it was."""
        snapshot, self._snapshot = self._snapshot, None
        if self.has_skipped and snapshot is not None:
            snapshot.restore()
        return self.has_skipped

    def _fault(self, loss: Tensor, weight: Denominator | None, named: Mapping[str, nn.Parameter]) -> str | None:
        """The name of the first non-finite value; None if all are finite. One device sync."""
        names, largest = self._largest(named) if self._looks_at_gradients else ([], [])
        weights = [weight.detach().reshape(())] if isinstance(weight, Tensor) else []
        value, *numbers = torch.stack([moved(t, loss.device) for t in (loss.detach().reshape(()), *weights, *largest)]).tolist()
        is_bad_loss = not math.isfinite(value) and not (weights and numbers[0] == 0)
        numbers = numbers[len(weights) :]
        is_bad = is_bad_loss or not all(map(math.isfinite, numbers))
        if self._group is not None:
            of_all = torch.tensor(is_bad, dtype=torch.uint8, device=loss.device)
            dist.all_reduce(of_all, dist.ReduceOp.MAX, group=self._group)
            is_bad = bool(of_all)
        if not is_bad:
            return None
        if is_bad_loss:
            return f"its loss is {value}"
        for name, number in zip(names, numbers, strict=True):
            if not math.isfinite(number):
                return f"the gradient of '{name}' contains {'NaN' if math.isnan(number) else 'an infinity'}"
        return "its gradient is not finite on another rank that has a part of it"

    @torch.no_grad()
    def _largest(self, named: Mapping[str, nn.Parameter]) -> tuple[list[str], list[Tensor]]:
        """The largest absolute value of each gradient: NaN or inf if the gradient has one. It does not overflow, unlike a sum."""
        values: dict[str, Tensor] = {}
        names = {parameter: name for name, parameter in named.items()}
        for parameter, gradient in self.gradients.accumulated(named.values()).items():
            gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            value = gradient if gradient.layout == torch.strided else gradient._values()
            if value.numel():
                values[names[parameter]] = value
        return list(values), list(torch._foreach_norm(list(values.values()), math.inf)) if values else []
