"""Manual optimization, ``automatic_optimization = False``: windows of a module that calls backward and steps by itself.

Each call of ``manual_backward`` in ``training_step`` has a loss of its own: the first calls of all micro-batches of a window belong
together, the second calls, and so on. What a call adds to the gradients is added up outside of ``.grad``. At the boundary each call
leaves in ``.grad`` what it would have left there after one batch of all the window's micro-batches, and the module's own code goes
on with that: clipping, ``step``, ``zero_grad``, in its order. Before the boundary, steps of optimizers and schedulers are put off.
``zero_grad`` need not be: nothing that is accumulated is in ``.grad``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum.checkpoint import PartialWindow
from lightning_accum.errors import UsageError
from lightning_accum.failures import have_all_left
from lightning_accum.main_gradients import as_number
from lightning_accum.manual_calls import Call, ManualMicroBatch
from lightning_accum.policy import Policy
from lightning_accum.splitting.micro_batch import samples_of
from lightning_accum.start_line import in_lines, window_in_words
from lightning_accum.step import Trained
from lightning_accum.trainer.deferred_steps import DeferredSteps
from lightning_accum.trainer.from_lightning import pl, rank_zero_info
from lightning_accum.trial import PATIENCE
from lightning_accum.user_warnings import users_line
from lightning_accum.weighing.advice import OF_UNSEEN_TERMS
from lightning_accum.weighing.safeguards import gradients_of_zero
from lightning_accum.whole.offload import offload_in_words
from lightning_accum.whole.row_wise import RowWise
from lightning_accum.window import Window
from lightning_accum.window_totals import ClosedWindow
from lightning_accum.windows import Windows

_SAME_CALLS = (
    "Over ranks, all of them make the same calls of manual_backward and step: a rank that has nothing to add takes part with a loss"
    " of 0 that depends on the parameters. With automatic optimization a rank may return None."
)


class ManualWindows(Windows):
    """The windows of a fit whose module optimizes by itself.

    Args:
        trained: the module of the fit.
        schedulers: of the fit.
        reduces_by_itself: every backward leaves gradients that are averaged over the ranks, as those of sharded modules are.
        row_wise: runs submodules in micro-batches.
        checks: at how many loader batches the losses may be checked.
    """

    def __init__(
        self,
        policy: Policy,
        trained: Trained,
        schedulers: Iterable[Any],
        warn: Callable[[str], None],
        reduces_by_itself: bool = False,
        row_wise: RowWise | None = None,
        checks: int = 0,
    ) -> None:
        super().__init__(policy, trained.ranks, warn, "where trainer.global_step has grown")
        self.calls: list[Call] = []
        self.current = ManualMicroBatch()
        """None of the data, between loader batches."""
        self.closed: list[ClosedWindow] = []
        """The window of each call, at the last boundary."""
        self.row_wise, self.checks = row_wise, checks
        self.tried: list[Tensor] | None = None
        """The losses of a ``training_step`` that is tried out."""
        self.most_tried = 1
        """Of these, in any ``training_step`` that was tried out."""
        self.is_free_of_steps: bool | None = None
        """No loss depends on a step that ``training_step`` makes before it; None where that was not tried out."""
        self._module = cast("pl.LightningModule", trained.module)
        self._parameters, self._loss_scale, self._reduces_by_itself = trained.parameters, trained.loss_scale, reduces_by_itself
        self.micro_batches_begun = 0
        """Those of the window."""
        self._has_called = False
        """A micro-batch of the window has called ``manual_backward``."""
        self._most_calls = 0
        """Of ``manual_backward``, in any ``training_step`` so far."""
        self._of_first: tuple[list[str], int] | None = None
        """What the first micro-batch of the window stepped, and how many backward calls it made."""
        self._is_announced = False
        counts_steps = policy.scheduler_counts == "optimizer_steps"
        # in what is tried out no scheduler steps, whatever it counts
        are_deferred = lambda: self.tried is not None or (counts_steps and self.current.defers_steps)  # noqa: E731
        self.steps = DeferredSteps(trained, schedulers, self.may_step, are_deferred)

    @property
    @override
    def of_losses(self) -> list[Window]:
        return [call.window for call in self.calls]

    # --- one loader batch -------------------------------------------------------------------------------------------

    def begin_loader_batch(self) -> None:
        """Hooks before training_step are next. A window has one that may step, that of its first loader batch."""
        self.current = ManualMicroBatch(defers_steps=self.micro_batches_begun > 0)

    def takes_check(self) -> bool:
        """Whether the loader batch that is next is checked: on all ranks or on none."""
        self.checks -= 1
        return self.checks >= 0

    def check_batch(self, has_batch: bool, is_boundary: bool) -> None:
        """A loader batch is next. Called on all ranks.

        Raises:
            RuntimeError: on all ranks, some have a batch and others have None, and those that have one would wait for the others.
        """
        if self.ranks.size == 1 or not (is_boundary or self._reduces_by_itself):
            return
        some_have, some_lack = self.ranks.largest(has_batch, not has_batch)
        if some_have and some_lack:
            has, others = ("", "another has None for it") if has_batch else ("None for ", "others have a batch")
            raise UsageError(
                f"Rank {self.ranks.rank} has {has}a loader batch that reduces gradients, and {others}. With"
                " automatic_optimization=False the module's own training_step reduces gradients and steps, on all ranks or on none:"
                " leave None out of the loaders, or use automatic optimization."
            )

    def begin_training_step(self, batch: Any, is_boundary: bool) -> None:
        """Enter training_step."""
        versions = [] if is_boundary else [p._version for p in self._parameters()]
        self.current = ManualMicroBatch(batch, not is_boundary, is_running=True, versions=versions)
        self.micro_batches_begun += 1
        if is_boundary:
            self.closed = []

    def backward(self, run: Callable[..., Tensor], loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``manual_backward``: at the boundary it leaves the full batch's gradients. ``run`` is the strategy's own."""
        current = self.current
        if self.tried is not None:
            self.tried.append(loss)
            return loss
        if not current.is_running:  # in validation, or in a hook
            if self._module.trainer.training:
                self.warn_once(
                    "manual_backward is called outside of training_step, where it is no part of a window: what it gives to the"
                    " gradients is that of one loader batch. Call it in training_step."
                )
            return run(loss, *args, **kwargs)
        if current.stepped and self.boundary.size != 1 and not self.is_free_of_steps:
            self.warn_once(
                f"training_step steps {current.stepped[0]} and then calls manual_backward again. If that loss was computed with"
                " what was stepped, the micro-batches of a window before its last compute it with what was there before, and a"
                " window differs from its full batch. To be exact, call step after the last backward, or have the loader yield"
                ' batches as large as the window: GradientAccumulation(micro_batch="offload") runs one whole.'
            )
        if not current.next_call:
            self._look_for_changes()
        call = self.call(current.next_call)
        current.next_call += 1
        self._has_called = True
        call.line = call.line or users_line()
        contribution, reading = call.weigher(loss, current.batch)
        if reading.function is not None:
            reading.function.leave_out(loss)
        del reading  # before the backward: its terms may be as large as the losses
        if call.verdict is not None:  # else it is not checked
            call.window.note_doubt(contribution.is_new + contribution.doubt)
        factor = as_number(call.window.add(loss.detach().to(call.window.dtype), contribution))
        before = {p: p.grad for p in self._parameters() if p.grad is not None}
        if current.before is None:
            current.before = dict(before)
        for parameter in before:
            parameter.grad = None
        if self._reduces_by_itself:  # a mean over ranks, each of which has its own factor
            loss, factor = (loss * factor).to(loss.dtype), 1.0
        is_weightless = not isinstance(contribution.weight, Tensor) and contribution.weight == 0
        with gradients_of_zero(loss) if is_weightless else nullcontext():
            result = run(loss, *args, **kwargs)
        self._take_gradients(call, factor, before)
        return result

    def _look_for_changes(self) -> None:
        """Compare the parameters that the last micro-batch of a window has run forward with to those of its first."""
        if self._reduces_by_itself:  # they are others between forward and backward
            return
        if self.changes.is_under_way and not self.current.defers_steps:
            if not self.current.stepped:
                self.changes.end(self.micro_batches_begun)
        elif self.changes.is_due and self.micro_batches_begun == 1 and self.current.defers_steps:
            self.changes.begin(self._module)

    def _take_gradients(self, call: Call, factor: float | Tensor, before: dict[nn.Parameter, Tensor]) -> None:
        """Add up what a call gave to the gradients, times ``factor``; and add it to what was there ``before``."""
        is_boundary, scale = not self.current.defers_steps, self._loss_scale()
        given = {p: p.grad.detach() for p in self._parameters() if p.grad is not None}
        for parameter, gradient in given.items():  # a copy, since the module may clip what it sees
            call.given.add(parameter, gradient if is_boundary else gradient.clone(), factor / scale)
        if is_boundary:
            given = self._close(call, scale)
        for parameter, gradient in given.items():
            parameter.grad = gradient if parameter not in before else before[parameter] + gradient
        for parameter, gradient in before.items():
            if parameter not in given:  # a copy where it is restored later, since the module may clip or clear what it sees
                parameter.grad = gradient if is_boundary else gradient.clone()

    def _close(self, call: Call, scale: float) -> dict[nn.Parameter, Tensor]:
        """End the window of a call. Returns the gradients of the full batch."""
        if not self._reduces_by_itself:
            self._compare_places(is_end=False)
        call.window.reduce()
        if self.ranks.size > 1 and not self._reduces_by_itself:
            call.given.reduce(self.ranks, [p for p in self._parameters() if p.requires_grad or p in call.given.of])
        closed = call.window.close(call.given.gradients)
        call.window.warn_of(closed, self.warn_once)
        if closed.has_doubts:
            self.warn_once(OF_UNSEEN_TERMS)
        self.closed.append(closed)
        sums = call.given.of
        call.given.clear()
        if closed.is_empty:
            return {}
        if scale != 1.0:
            torch._foreach_mul_(list(sums.values()), scale)
        return sums

    @contextmanager
    def trying_out(self, moves: bool = False) -> Iterator[list[Tensor]]:
        """In here ``training_step`` is tried out: losses are collected, no backward runs, and no optimizer or scheduler steps.

        Args:
            moves: an optimizer whose step is called changes its parameters a little.
        """
        before, self.current, self.tried = self.current, ManualMicroBatch(defers_steps=True, moves=moves), []
        trained = [(parameter, parameter.requires_grad) for parameter in self._parameters()]
        try:
            yield self.tried
        finally:
            self.most_tried = max(self.most_tried, len(self.tried))
            self.current, self.tried = before, None
            for parameter, is_trained in trained:  # toggle_optimizer takes it, and an error may leave it so
                parameter.requires_grad_(is_trained)

    def end_training_step(self, seen: int) -> None:
        """Leave training_step, with loader batch number ``seen``.

        Raises:
            RuntimeError: other ranks are elsewhere in training_step, or have stepped other optimizers.
        """
        current = self.current
        current.is_running, is_boundary = False, not current.defers_steps
        self._wait_for_others()
        if is_boundary:
            self._compare_places(is_end=True)
        elif current.versions != [p._version for p in self._parameters()]:
            self.changes.stop()
            self.warn_once(
                "training_step changes parameters by itself in a micro-batch whose steps wait (a moving average, a target network,"
                " an optimizer with steps of other names): it happens in every micro-batch, but only once for the full batch. Do it"
                " when trainer.global_step has grown."
            )
        if self._of_first is None:
            self._of_first = list(current.stepped), current.next_call
        stepped, calls = self._of_first
        if current.stepped != stepped and current.next_call:
            self.warn_once(
                f"training_step stepped {', '.join(current.stepped) or 'nothing'} in a micro-batch of a window, and"
                f" {', '.join(stepped) or 'nothing'} in the first. Only the steps of the last micro-batch are taken. Do they"
                " depend on batch_idx or on the loss, or does the module accumulate by itself?"
            )
        if current.next_call != calls:
            self.warn_once(
                f"training_step called manual_backward {calls} times in the first micro-batch of a window, and"
                f" {current.next_call} times in another: the first calls of all micro-batches belong together, and so do the"
                " second ones. A window equals its full batch only if all micro-batches make the same calls. Does their number"
                " depend on batch_idx, or does training_step return early?"
            )
        self.end_loader_batch(seen)
        if is_boundary:
            if self.closed and not self.closed[0].is_empty:
                self.total_weight += float(self.closed[0].weight)
            self.clock.tick(self.position)
            self.discard(seen)

    @override
    def end_loader_batch(self, seen: int) -> None:
        self._done = (seen, self._micro_batches())

    def leave_loader_batch(self) -> None:
        """Hooks after training_step have run: ``.grad`` is what it was before, unless a window has ended."""
        current, self.current = self.current, ManualMicroBatch()
        if current.defers_steps and current.before is not None:
            for parameter in self._parameters():
                parameter.grad = current.before.get(parameter)

    @override
    def _begin_window(self, seen: int) -> None:
        self.boundary.close(seen)
        self.micro_batches_begun, self._of_first, self._has_called = 0, None, False
        for call in self.calls:
            call.given.clear()

    def call(self, index: int) -> Call:
        """The call of a ``training_step`` that has the number ``index``, from 0."""
        if index == len(self.calls):
            # not from the first weights: other ranks may be at other calls, since they may have other numbers of micro-batches
            weight_scale = 1.0 if self.ranks.size > 1 and not self._reduces_by_itself else None
            self.calls.append(Call(self, weight_scale, max(0, self.checks), self.row_wise))
        return self.calls[index]

    def announce(self, batch: Any, loader_batches: int, samples: frozenset[int]) -> None:
        """Say in one line what was understood, once a ``training_step`` has called backward."""
        if self._is_announced or not self.calls:
            return
        self._is_announced = True
        parts = [window_in_words(loader_batches, self.ranks.size, samples_of(batch, samples))]
        if self.policy.offload:
            parts[0] += f", {offload_in_words(self.ranks.device)}"
        parts.append("manual optimization")
        for number, call in enumerate(self.calls, 1):
            name = "window/loss" if number == 1 else f"window/loss_{number}"
            verdict = "" if call.verdict is None else f" ({call.verdict})"
            parts.append(f"{name} of {call.line}: {call.weigher.criterion}{verdict}")
        rank_zero_info(in_lines(parts))

    # --- ranks ------------------------------------------------------------------------------------------------------

    def _compare_places(self, is_end: bool) -> None:
        """Compare where the ranks are in the ``training_step`` that ends a window, or whether all have ended it alike.

        Raises:
            RuntimeError: on all ranks, one is elsewhere.
        """
        if self.ranks.size == 1:
            return
        calls, stepped = self.current.next_call, self.current.stepped
        line, left = ("", ", and left training_step") if is_end else (f" ({users_line()})", "")
        where = f"has called manual_backward {calls} times{line}, stepped {', '.join(stepped) or 'nothing'}{left}"
        code = crc32(f"{calls} {stepped} {is_end}".encode()) & 0xFFFFFF  # exact in any type
        most, fewest = self.ranks.largest(code, -code)
        if most != -fewest:
            places = [f"rank {rank} {self.ranks.share(where, rank)}" for rank in range(self.ranks.world_size)]
            raise UsageError(
                f"The ranks are at different places in the training_step that ends a window: {'; '.join(places)}. {_SAME_CALLS}"
            )

    def _wait_for_others(self) -> None:
        """Where each backward waits for the other ranks, leave ``training_step`` with them. Called on all, if all come to it.

        Raises:
            RuntimeError: this rank has called backward less often than before, and others are still in training_step.
        """
        if self.ranks.size == 1 or not self._reduces_by_itself:
            return
        calls = self.current.next_call
        may_be_early = calls < self._most_calls or not self._most_calls
        self._most_calls = max(self._most_calls, calls)
        if not have_all_left(may_be_early, PATIENCE + 10 * (time.monotonic() - self.current.begun)):
            raise UsageError(
                f"Rank {self.ranks.rank} has called manual_backward {calls} times and left training_step, and another rank is still"
                f" in it, where it waits for this one. {_SAME_CALLS}"
            )

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @override
    def in_words(self, size: int) -> str:
        return f"{super().in_words(size)}, of a module that optimizes by itself"

    @override
    def restart(self, seen: int, into_window: int, steps: int, loader_batches: int, size: int) -> PartialWindow | None:
        partial = super().restart(seen, into_window, steps, loader_batches, size)
        if partial is not None:
            self.micro_batches_begun, self._has_called = partial.position, bool(partial.losses)
            for index in range(len(partial.losses)):
                self.call(index)
        return partial

    @override
    def partial_window(self, training: Trained, size: int) -> PartialWindow | None:
        for index in range(int(self.ranks.largest(len(self.calls))[0])):  # those of all ranks
            self.call(index)
        return super().partial_window(training, size)

    @override
    def _is_reduced_inside(self, training: Trained) -> bool:
        return self._reduces_by_itself

    @override
    def _loss_scale_of(self, training: Trained) -> float:
        return 1.0  # the sums are without it

    # --- steps ------------------------------------------------------------------------------------------------------

    def may_step(self, name: str, optimizer: Optimizer) -> bool:
        """Whether an optimizer of this name, whose step is called, makes it now rather than at the boundary."""
        self.current.stepped.append(name)
        if self.current.moves:
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            with torch.no_grad():
                for parameter in self._module.parameters():
                    if id(parameter) in own:
                        parameter.mul_(1.01).add_(0.01)
        if self.current.defers_steps:
            return False
        if self.current.is_running and not self._has_called:
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
