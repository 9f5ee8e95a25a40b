"""Micro-batches whose loss or gradient is not finite: found before their gradient is added to that of their window.

Autograd adds a gradient to what is there already, and a NaN cannot be subtracted from a sum. So what was accumulated is put aside
during each backward, and the new gradient is added to it when it was looked at: one copy of the gradients more, and one wait for
the device a micro-batch. Where a bad one is an error, what was accumulated is good, and it is enough to look at the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_accum.errors import NotFiniteError
from lightning_accum.exact import moved
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.sync.base import GradientSlot
from lightning_accum.undo import Snapshot, Undo
from lightning_accum.user_warnings import warn
from lightning_accum.weighing.terms import Denominator


class Guard:
    """Looks at each micro-batch of a training, and leaves out those that are not finite, or reports them.

    A micro-batch that is left out is as if it had never been there: its gradient is dropped, and what it changed in the module is
    restored (see :class:`Undo`), random state included.

    Args:
        leaves_out: whether to leave them out, or to raise an error.
        places: gives where the gradients of a window are accumulated, in the order of the parameters.
        where: says in words which micro-batch it is.
        snapshotter: keeps what a micro-batch changes in the module.
        inform: prints what was left out, after a warning about the first.
        group: ranks that run parts of the same micro-batch, and so have to find the same.
        looks_at_gradients: or at the loss alone, as where a GradScaler looks at the gradients.
        warn: takes the warning, on any rank.
    """

    def __init__(
        self,
        leaves_out: bool,
        places: Callable[[], Sequence[GradientSlot]],
        where: Callable[[MicroBatch], str],
        snapshotter: Undo,
        inform: Callable[[str], None],
        group: dist.ProcessGroup | None = None,
        looks_at_gradients: bool = True,
        warn: Callable[[str], None] = warn,
    ) -> None:
        self.leaves_out = leaves_out
        self._find_places = places
        self._where = where
        self._micro_batch = MicroBatch(None)
        self._snapshotter = snapshotter
        self._inform, self._warn = inform, warn
        self._group = group
        self._looks_at_gradients = looks_at_gradients
        self._places: Sequence[GradientSlot] | None = None
        self._snapshot: Snapshot | None = None
        self._has_warned = False
        self.has_left_out = False
        """The last micro-batch was left out."""

    def end_window(self) -> None:
        """Parameters may have come and gone when the next one begins."""
        self._places = None

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Its forward is next."""
        self._micro_batch, self.has_left_out = micro_batch, False
        if self.leaves_out:
            self._snapshot = self._snapshotter.take(watches_parameters=False)

    @contextmanager
    def watching(self, loss: Tensor, weight: Denominator | None) -> Iterator[None]:
        """The backward of a micro-batch runs in here.

        Raises:
            FloatingPointError: it is not finite, and such are not to be left out.
        """
        if self._places is None:
            self._places = self._find_places()
        places = self._places
        aside = [place.take() for place in places] if self.leaves_out else None
        try:
            yield
        except BaseException:
            if aside is not None:
                _restore(places, aside)
            raise
        fault = self._fault(loss, weight, places)
        if aside is not None:
            if fault is None:
                _add(places, aside)
            else:
                _restore(places, aside)
        if fault is not None:
            self._report(fault)
            self.has_left_out = True

    def _report(self, fault: str) -> None:
        if not self.leaves_out:
            raise NotFiniteError(
                f"{self._where(self._micro_batch)} is not finite: {fault}. No optimizer step was made with it."
                ' GradientAccumulation(on_nonfinite="skip") trains on without such micro-batches.'
            )
        if self._has_warned:
            self._inform(f"{self._where(self._micro_batch)} is left out: {fault}.")
            return
        self._has_warned = True
        found = f"{self._where(self._micro_batch)} is left out, as it is not finite: {fault}."
        self._warn(f"{found} Others may follow; `window/skipped_micro_batches` counts them.")

    def end_micro_batch(self) -> bool:
        """Its backward is done. Returns whether it was left out.

        Raises:
            RuntimeError: it changed something that cannot be restored.
        """
        snapshot, self._snapshot = self._snapshot, None
        if self.has_left_out and snapshot is not None:
            snapshot.restore()
        return self.has_left_out

    def _fault(self, loss: Tensor, weight: Denominator | None, places: Sequence[GradientSlot]) -> str | None:
        """What is not finite, in words; None for nothing. Waits for the device, once."""
        found = {place.name: place.get() for place in places} if self._looks_at_gradients else {}
        names, largest = _largest_of({name: gradient for name, gradient in found.items() if gradient is not None})
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
                return f"the gradient of '{name}' has {'NaN' if math.isnan(number) else 'an infinity'} in it"
        return "its gradient is not finite on another rank that runs a part of it"


@torch.no_grad()
def _largest_of(gradients: dict[str, Tensor]) -> tuple[list[str], list[Tensor]]:
    """The largest absolute value in each gradient: NaN or inf where there is one, and it cannot overflow as a sum could."""
    dense: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        values = gradient if gradient.layout == torch.strided else gradient._values()
        if values.numel():
            dense[name] = values
    return list(dense), list(torch._foreach_norm(list(dense.values()), math.inf)) if dense else []


def _restore(places: Sequence[GradientSlot], aside: Sequence[Tensor | None]) -> None:
    for place, gradient in zip(places, aside, strict=True):
        place.restore(gradient)


@torch.no_grad()
def _add(places: Sequence[GradientSlot], aside: Sequence[Tensor | None]) -> None:
    """Add what is there to what was put aside, as autograd would have done."""
    sums: list[Tensor] = []
    added: list[Tensor] = []
    for place, before in zip(places, aside, strict=True):
        if before is None:
            continue
        new = place.take()
        if new is not None and _is_dense(before) and _is_dense(new) and before.dtype == new.dtype:
            sums.append(before)
            added.append(new)
        elif new is not None and before.layout != torch.strided and new.layout == torch.strided:
            before = new + before
        elif new is not None:
            before += new
        place.put(before)
    if sums:
        torch._foreach_add_(sums, added)


def _is_dense(gradient: Tensor) -> bool:
    return gradient.layout == torch.strided and not isinstance(gradient, DTensor)
