"""Windows of a module that calls backward and steps its optimizers by itself (manual optimization).

Each call of ``manual_backward`` in ``training_step`` has a loss of its own, and so a window of its own: the first calls of all
micro-batches belong together, the second calls, and so on. What a call adds to the gradients is stored outside of ``.grad``. At
the boundary each call leaves in ``.grad`` what it would have left there after one batch of all the window's micro-batches, and
the module's own code goes on with that: clipping, ``step``, ``zero_grad``, in its order. Before the boundary, steps of
optimizers and schedulers wait. ``zero_grad`` need not: nothing that is accumulated is in ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accum.average import average
from lightning_accum.boundary import Boundary
from lightning_accum.policy import Policy
from lightning_accum.ranks import Ranks
from lightning_accum.user_warnings import users_line
from lightning_accum.weighing.weight import Weigher
from lightning_accum.window import FACTORS_DIFFER, ClosedWindow, Window


@dataclass
class Call:
    """One of the backward calls in a ``training_step``.

    Attributes:
        window: the losses and weights of this call.
        weigher: finds those weights.
        line: of the user's code that makes the call; empty before the first.
        sums: what it has given to the gradients in the window so far.
        micro_batches: how many micro-batches of the window have made this call.
    """

    window: Window
    weigher: Weigher
    line: str = ""
    sums: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    micro_batches: int = 0


@dataclass
class CurrentMicroBatch:
    """The micro-batch that ``training_step`` runs on.

    Attributes:
        batch: it.
        is_boundary: it is the last of its window.
        next_call: the number of its next backward call.
        stepped: the optimizers whose step it has called.
        before: what was in ``.grad`` before the backward that is running.
    """

    batch: Any = None
    is_boundary: bool = True
    next_call: int = 0
    stepped: list[str] = field(default_factory=list)
    before: dict[nn.Parameter, Tensor] = field(default_factory=dict)


class ManualWindows:
    """The state of manual optimization during one ``fit``.

    Args:
        policy: what was asked for.
        ranks: those whose gradients are averaged, and the device of this one.
        parameters: gives all that may get a gradient.
        warn: takes a warning to be seen once, on rank zero.
        loss_scale: what a GradScaler multiplies losses by at the moment.
        reduces_by_itself: every backward leaves gradients that are averaged over the ranks, as those of sharded modules are.
    """

    def __init__(
        self,
        policy: Policy,
        ranks: Ranks,
        parameters: Callable[[], list[nn.Parameter]],
        warn: Callable[[str], None],
        loss_scale: Callable[[], float] = lambda: 1.0,
        reduces_by_itself: bool = False,
    ) -> None:
        self.policy = policy
        self.ranks = ranks
        self.boundary = Boundary(policy.tail)
        self.calls: list[Call] = []
        self.waits = False
        """Steps of optimizers and schedulers wait: the current micro-batch does not end its window."""
        self.current = CurrentMicroBatch()
        self.is_under_way = False
        """A loader batch is in training_step."""
        self.closed: list[ClosedWindow] = []
        """The window of each call, at the last boundary."""
        self.epoch = 0
        """The current epoch, from 0."""
        self.windows = 0
        """Windows that have ended."""
        self.total_weight = 0.0
        """The weight that the first calls had in all of them."""
        self._parameters = parameters
        self._warn = warn
        self._warned: set[str] = set()
        self._loss_scale = loss_scale
        self._reduces_by_itself = reduces_by_itself
        self.is_weightless = False
        """The loss of the current call is known on the host to have no weight."""
        self.micro_batches = 0
        """Micro-batches of the window so far, with the current one."""
        self._versions: list[int] = []
        self._steps_of_first: list[str] | None = None
        """What the first micro-batch of the window stepped."""
        self._left_before: dict[nn.Parameter, Tensor] | None = None
        """What was in ``.grad`` before a micro-batch that does not end its window; None where it has been put back."""

    @property
    def is_first(self) -> bool:
        """The current loader batch is the first of its window."""
        return self.micro_batches == 0

    # --- one micro-batch --------------------------------------------------------------------------------------------

    def begin_micro_batch(self, batch: Any, is_boundary: bool) -> None:
        """Enter training_step."""
        self.put_back()
        if not is_boundary:
            self._versions = [p._version for p in self._parameters()]
        self.micro_batches += 1
        self.current, self.waits, self.is_under_way = CurrentMicroBatch(batch, is_boundary), not is_boundary, True
        if is_boundary:
            self.closed = []

    def begin_backward(self, loss: Tensor) -> Tensor | None:
        """Weigh the loss of the next call, and set aside what is in ``.grad``.

        Returns:
            The ``gradient`` for its backward; None for plain 1.
        """
        current = self.current
        if current.stepped and self.boundary.size != 1:
            self.warn_once(
                f"training_step steps {current.stepped[0]} and then calls manual_backward again. If that loss was computed with"
                " what was stepped, the micro-batches of a window before its last compute it with what was there before, and a"
                " window differs from its full batch. To be exact, call step after the last backward, or have the loader yield"
                ' batches as large as the window: GradientAccumulation(micro_batch="offload") runs one whole.'
            )
        call = self.call(current.next_call)
        call.micro_batches += 1
        call.line = call.line or users_line()
        contribution = call.weigher(loss, current.batch)
        if call.window.reference is None and not self._reduces_by_itself:
            # of this rank alone: the others may be at other calls, since they may have other numbers of micro-batches
            call.window.refer_to(1.0 if contribution.weight is None else float(contribution.weight))
        self.is_weightless = not isinstance(contribution.weight, Tensor) and contribution.weight == 0
        current.before = {p: p.grad for p in self._parameters() if p.grad is not None}
        if current.next_call == 0 and not current.is_boundary:
            self._left_before = dict(current.before)
        for parameter in current.before:
            parameter.grad = None
        if contribution.of_mean is not None:
            call.weigher.leave_out_function(loss)
        return call.window.add(loss, contribution)

    def end_backward(self) -> None:
        """Take what the call gave to the gradients; at the boundary, leave what the full batch would have given."""
        current, scale = self.current, self._loss_scale()
        call = self.calls[current.next_call]
        current.next_call += 1
        given = {p: p.grad.detach() for p in self._parameters() if p.grad is not None}
        for parameter, gradient in given.items():
            own = gradient / scale if scale != 1.0 else gradient
            if parameter in call.sums:
                call.sums[parameter] += own
            else:  # a copy, since the module may clip what it sees
                call.sums[parameter] = own if own is not gradient or current.is_boundary else own.clone()
        if current.is_boundary:
            given = self._close(call, scale)
        before, current.before = current.before, {}
        for parameter, gradient in given.items():
            parameter.grad = gradient if parameter not in before else before[parameter] + gradient
        for parameter, gradient in before.items():
            if parameter not in given:  # a copy where it is put back later, since the module may clip or clear what it sees
                parameter.grad = gradient if current.is_boundary else gradient.clone()

    def look_for_changes(self) -> None:
        """Warn if they have, in a micro-batch whose steps wait."""
        if self._versions != [p._version for p in self._parameters()]:
            self.warn_once(
                "training_step changes parameters by itself in a micro-batch whose steps wait (a moving average, a target network,"
                " an optimizer with steps of other names): that happens in every micro-batch, where it would happen once for the"
                " full batch. Do it where trainer.global_step has grown."
            )

    def put_back(self) -> None:
        """Have in ``.grad`` what was there before the last micro-batch, unless it ended its window: what it gave is in the sums."""
        before, self._left_before = self._left_before, None
        if before is not None:
            for parameter in self._parameters():
                parameter.grad = before.get(parameter)

    def _close(self, call: Call, scale: float) -> dict[nn.Parameter, Tensor]:
        """End the window of a call. Returns the gradients of the full batch."""
        sums, call.sums = call.sums, {}
        call.window.reduce()
        if self.ranks.size > 1 and not self._reduces_by_itself:
            factor = call.window.refer_to(1.0)
            sums = {parameter: gradient.mul_(factor) for parameter, gradient in sums.items()}
            parameters = [parameter for parameter in self._parameters() if parameter.requires_grad or parameter in sums]
            average(sums, parameters, self.ranks, torch.zeros_like)
        closed = call.window.close(list(sums.values()))
        self.closed.append(closed)
        if closed.do_terms_disagree:
            self.warn_once(
                "The terms of a loss are means over counts that are not proportional from micro-batch to micro-batch. All of them"
                f" take the weight of the main one ({call.weigher.criterion}); for the others a window differs from its full batch."
            )
        if closed.do_factors_differ:
            self.warn_once(FACTORS_DIFFER)
        if closed.is_empty:
            return {}
        if scale != 1.0:
            torch._foreach_mul_(list(sums.values()), scale)
        return sums

    def end_loader_batch(self, seen: int) -> None:
        """Leave training_step, with loader batch number ``seen``."""
        current, self.current, self.is_under_way = self.current, CurrentMicroBatch(), False
        if not current.is_boundary:
            self.look_for_changes()
        if self._steps_of_first is None:
            self._steps_of_first = current.stepped
        if current.stepped != self._steps_of_first and current.next_call:
            self.warn_once(
                f"training_step stepped {current.stepped or 'nothing'} in the last micro-batch of a window, and"
                f" {self._steps_of_first or 'nothing'} in its first. Only what the last one steps is stepped; does it depend on"
                " batch_idx, on what the loss is, or does the module accumulate by itself?"
            )
        made = {call.micro_batches for call in self.calls}
        if made - {self.micro_batches}:
            self.warn_once(
                f"training_step called manual_backward {len(self.calls)} times in some of the {self.micro_batches} micro-batches of"
                f" a window, and {current.next_call} times in another. A window equals its full batch only where all do the same;"
                " does it depend on batch_idx?"
            )
        if current.is_boundary:
            if self.closed and not self.closed[0].is_empty:
                self.total_weight += float(self.closed[0].weight)
            self.windows += 1
            self.discard(seen)

    def discard(self, seen: int) -> int:
        """Forget the unfinished window. Returns the loader batches that it had."""
        lost = self.boundary.position(seen)
        for call in self.calls:
            call.window.discard()
            call.sums, call.micro_batches = {}, 0
        self.micro_batches, self._steps_of_first = 0, None
        self.boundary.close(seen)
        return lost

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def agree_on_reference(self, call: Call) -> None:
        """Have the sums of all ranks, each of which took its scale from its own first weight, on one scale. Called on all ranks."""
        reference = self.ranks.largest(call.window.reference or 0.0)[0]
        if reference and (factor := call.window.refer_to(reference)) != 1.0:
            torch._foreach_mul_(list(call.sums.values()), factor)  # a power of two, which costs no rounding

    @contextmanager
    def sums_in_grad(self, call: Call) -> Iterator[None]:
        """In here ``.grad`` of all parameters is what a call has given so far, and what is there at the end is taken as that."""
        parameters = self._parameters()
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = call.sums.get(parameter)
        try:
            yield
            call.sums = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient

    def call(self, index: int) -> Call:
        """The call of a ``training_step`` that has the number ``index``, from 0."""
        if index == len(self.calls):
            window = Window(self.ranks.device, self.ranks.size, self.ranks.group)
            self.calls.append(Call(window, Weigher(self.policy.weight, self.warn_once)))
        return self.calls[index]

    def go_on(self, seen: int, position: int, size: float, micro_batches: int) -> None:
        """Be inside a window of ``size`` loader batches, the last of ``position`` so far being number ``seen``."""
        self.boundary.go_on(seen, position, size)
        self.micro_batches = micro_batches

    # --- steps ------------------------------------------------------------------------------------------------------

    def may_step(self, name: str) -> bool:
        """Whether an optimizer of this name, whose step is called, does it now rather than at the boundary."""
        self.current.stepped.append(name)
        if self.waits:
            return False
        if self.is_under_way and not any(call.micro_batches for call in self.calls):
            self.warn_once(
                f"training_step steps {name}, and no micro-batch of the window has called self.manual_backward: the gradients, from"
                " loss.backward() or the module's own code, are those of the last micro-batch of this rank alone. Call"
                " self.manual_backward(loss)."
            )
        is_empty = bool(self.closed) and all(closed.is_empty for closed in self.closed)
        if is_empty:
            self.warn_once(
                "A window ended without any weight (all labels ignored, or no loss): there is no optimizer step for it, parameters"
                " and optimizer state stay as they are."
            )
        return not is_empty

    def warn_once(self, message: str) -> None:
        """Warn, unless it was said before."""
        if message not in self._warned:
            self._warned.add(message)
            self._warn(message)
