"""Manual optimization, ``automatic_optimization = False``: windows of a module that calls backward and step itself.

Each call of ``manual_backward`` in ``training_step`` has its own loss: the first calls of all micro-batches of a window form one
loss, the second calls another, and so on. The gradients of each call are summed outside of ``.grad``. At the boundary each call
leaves the gradient of the full batch in ``.grad``, and the module's own code uses it: clipping, ``step``, ``zero_grad``. Before the
boundary, steps of optimizers and schedulers are deferred, but not ``zero_grad``, since ``.grad`` holds no sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum.accumulation import Accumulation
from lightning_accum.checkpoint import PartialWindow
from lightning_accum.errors import UsageError
from lightning_accum.main_gradients import GradientSums, as_number
from lightning_accum.manual_calls import Gradients, ManualMicroBatch, TriedStep, check_batches
from lightning_accum.policy import Policy
from lightning_accum.start_line import manual_start_line, samples_of
from lightning_accum.step import Trained
from lightning_accum.sync.base import gradients_set_aside, put_gradients
from lightning_accum.trainer.deferred_steps import DeferredSteps, groups_kept
from lightning_accum.trainer.from_lightning import pl, rank_zero_info
from lightning_accum.user_warnings import listed, users_line
from lightning_accum.weighing.advice import OF_UNSEEN_TERMS
from lightning_accum.weighing.safeguards import gradients_of_zero
from lightning_accum.whole.row_wise import RowWise
from lightning_accum.window_totals import ClosedWindow
from lightning_accum.windows import Windows


class Call(Accumulation):
    """One of the backward calls in a ``training_step``: its windows, and the check of its loss."""

    def __init__(self, windows: ManualWindows, weight_scale: float | None) -> None:
        self.given = GradientSums()  # the sums of its gradients in this window
        self.line = ""  # the line of the user's code that calls it
        super().__init__(windows.policy, windows.ranks, windows.warn_once, None, self.given, windows.row_wise, weight_scale)
        self.boundary = windows.boundary
        self.check.begin(max(0, windows.checks))


class ManualWindows(Windows):
    """The windows of a fit with manual optimization.

    Args:
        reduces_by_itself: the engine averages gradients over the ranks in every backward, as in sharded modules.
        checks: at how many loader batches the losses may be checked.
    """

    def __init__(
        self,
        policy: Policy,
        trained: Trained,
        warn: Callable[[str], None],
        reduces_by_itself: bool = False,
        row_wise: RowWise | None = None,
        checks: int = 0,
    ) -> None:
        super().__init__(policy, trained.ranks, warn, "where trainer.global_step has grown")
        self.calls: list[Call] = []
        self.current = ManualMicroBatch()  # without a batch between loader batches
        self.closed: list[ClosedWindow] = []  # the last closed window of each call of manual_backward
        self.row_wise, self.checks = row_wise, checks
        self.tried: TriedStep | None = None  # the ``training_step`` of a trial
        self.most_tried = 1  # the largest number of losses in a trial
        self.are_steps_tried = False  # it was checked how the steps depend on the batch
        self.is_free_of_steps = False  # no loss depends on an earlier step of the same ``training_step``
        self._module = cast("pl.LightningModule", trained.module)
        self._named, self._named_parameters = dict(trained.module.named_parameters()), trained.parameters_by_name
        self._parameters, self._loss_scale, self._reduces_by_itself = trained.parameters, trained.loss_scale, reduces_by_itself
        self.micro_batches_begun = 0  # in this window
        self._most_calls = 0  # of ``manual_backward``, in any ``training_step`` so far
        self._of_first: tuple[list[str], int] | None = None
        """What the first micro-batch of the window stepped, and how many backward calls it made."""
        self._is_announced = False
        counts_steps = policy.scheduler_counts == "optimizer_steps"
        # in a trial no scheduler steps, whatever it counts
        are_deferred = lambda: self.tried is not None or (counts_steps and self.current.defers_steps)  # noqa: E731
        self.steps = DeferredSteps(trained, self.may_step, are_deferred)

    def begin_loader_batch(self) -> None:
        """Begin the hooks before training_step. In a window, only hooks of its first loader batch may step."""
        self.current = ManualMicroBatch(defers_steps=self.micro_batches_begun > 0)

    def takes_check(self) -> bool:
        """Whether the next loader batch is checked, on all ranks or on none."""
        self.checks -= 1
        return self.checks >= 0

    def check_batch(self, has_batch: bool, is_boundary: bool) -> None:
        """Begin a loader batch; see :func:`check_batches`. Called on all ranks."""
        if self.ranks.size > 1 and (is_boundary or self._reduces_by_itself):
            check_batches(self.ranks, has_batch)

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
            self.tried.backward(loss, [own for own in self._parameters() if own.requires_grad])
            return loss
        if not current.is_running:  # in validation, or in a hook
            if self._module.trainer.training:
                self.warn_once(
                    "manual_backward is called outside of training_step, so it is not part of a window and adds the gradients of "
                    "one loader batch. Call it in training_step."
                )
            return run(loss, *args, **kwargs)
        if current.stepped and self.boundary.size != 1 and not self.is_free_of_steps:
            self.warn_once(
                f"training_step steps {current.stepped[0]} and then calls manual_backward again. If this loss uses the stepped "
                "parameters, all micro-batches of a window but the last compute it with the old parameters, and the window differs "
                "from its full batch. To be exact, call step after the last backward, or have the loader yield batches as large as "
                'the window: GradientAccumulation(micro_batch="offload") runs each whole.'
            )
        if kwargs.get("create_graph"):
            raise UsageError(
                "manual_backward(create_graph=True): the gradients of a window are sums without a graph. Compute gradients that a"
                " loss uses by torch.autograd.grad(loss, parameters, create_graph=True)."
            )
        if not current.next_call:
            self._look_for_changes()
        call = self.call(current.next_call)
        current.next_call += 1
        call.line = call.line or users_line()
        contribution, reading = call.weigher(loss, current.batch)
        if reading.function is not None:
            reading.function.leave_out(loss)
        del reading  # free its terms before the backward, which may be as large as the losses
        if call.check.verdict is not None:  # else it is not checked
            is_new = contribution.is_new * (not call.check.batches_left)  # else it has just been checked
            call.window.note_doubt(is_new + contribution.doubt)
        factor = as_number(call.window.add(loss.detach().to(call.window.dtype), contribution))
        before = {p: p.grad for p in self._parameters() if p.grad is not None}
        if current.before is None:
            current.before = dict(before)
        put_gradients(before, {})
        if self._reduces_by_itself:  # the reduction would mix ranks with different factors
            loss, factor = (loss * factor).to(loss.dtype), 1.0
        is_weightless = not isinstance(contribution.weight, Tensor) and contribution.weight == 0
        with gradients_of_zero(loss) if is_weightless else nullcontext():
            result = run(loss, *args, **kwargs)
        self._take_gradients(call, factor, before)
        return result

    def _look_for_changes(self) -> None:
        """Compare the parameters of the first and the last forward of a window."""
        if self._reduces_by_itself:  # parameters differ between forward and backward
            return
        if self.changes.is_under_way and not self.current.defers_steps:
            if not self.current.stepped:
                self.changes.end(self.micro_batches_begun)
        elif self.changes.is_due and self.micro_batches_begun == 1 and self.current.defers_steps:
            self.changes.begin(self._named_parameters())

    def _take_gradients(self, call: Call, factor: float | Tensor, before: dict[nn.Parameter, Tensor]) -> None:
        """Add the gradients of a call, times ``factor``, to its sums; and to the gradients ``before``."""
        is_boundary, scale = not self.current.defers_steps, self._loss_scale()
        given = {p: p.grad.detach() for p in self._parameters() if p.grad is not None}
        for parameter, gradient in given.items():  # a copy, since the module may clip it
            call.given.add(parameter, gradient if is_boundary else gradient.clone(), factor / scale)
        if is_boundary:
            given = self._close(call, scale)
        self.current.given.update(given)
        # a copy if it is restored later, since the module may clip or clear it
        kept = {own: gradient if is_boundary else gradient.clone() for own, gradient in before.items() if own not in given}
        sums = {own: gradient if own not in before else before[own] + gradient for own, gradient in given.items()}
        put_gradients([*kept, *sums], {**kept, **sums})

    def _close(self, call: Call, scale: float) -> dict[nn.Parameter, Tensor]:
        """End the window of a call. Returns the gradients of the full batch."""
        if not self._reduces_by_itself:
            self.current.compare_places(self.ranks, is_end=False)
        call.window.reduce()
        if self.ranks.size > 1 and not self._reduces_by_itself:
            call.given.reduce(self.ranks, [p for p in self._parameters() if p.requires_grad or p in call.given.by_parameter])
        closed = call.window.close(call.given.gradients)
        call.window.warn_of(closed, self.warn_once)
        if closed.has_doubts:
            self.warn_once(OF_UNSEEN_TERMS)
        self.closed.append(closed)
        sums = call.given.by_parameter
        call.given.clear()
        if closed.is_empty:
            return {}
        if scale != 1.0:
            torch._foreach_mul_(list(sums.values()), scale)
        return sums

    @contextmanager
    def trying_out(self, moves: bool = False, given: Sequence[Gradients] = ()) -> Iterator[TriedStep]:
        """Inside, ``training_step`` runs as a trial, in which steps do nothing (``moves``: a little).

        Optimizers have the parameters that the module has now: a trial in a wider type replaces those.
        """
        before, self.current, self.tried = self.current, ManualMicroBatch(defers_steps=True), TriedStep(given, moves=moves)
        trained = [(parameter, parameter.requires_grad) for parameter in self._parameters()]
        now = dict(self._module.named_parameters())
        of_trial = {parameter: now.get(name, parameter) for name, parameter in self._named.items()}
        groups = [group for optimizer in self.steps.optimizers for group in optimizer.param_groups]
        try:
            with groups_kept(self.steps.optimizers, self.steps.others), gradients_set_aside(self._parameters()):
                for group in groups:
                    group["params"] = [of_trial.get(parameter, parameter) for parameter in group["params"]]
                yield self.tried
        finally:
            self.most_tried = max(self.most_tried, len(self.tried.losses))
            self.current, self.tried = before, None
            for parameter, is_trained in trained:  # an error may occur after toggle_optimizer has changed it
                parameter.requires_grad_(is_trained)

    def end_training_step(self, seen: int) -> None:
        """Leave training_step, with loader batch number ``seen``. Raises on all ranks if they stepped different optimizers."""
        current = self.current
        current.is_running, is_boundary = False, not current.defers_steps
        if self.ranks.size > 1 and self._reduces_by_itself:
            current.wait_for_others(self.ranks, self._most_calls)
            self._most_calls = max(self._most_calls, current.next_call)
        if is_boundary:
            current.compare_places(self.ranks, is_end=True)
        elif current.versions != [p._version for p in self._parameters()]:
            self.changes.stop()
            self.warn_once(
                "training_step changes parameters in a micro-batch whose optimizer steps are deferred (a moving average, a target "
                "network, an optimizer whose step has another name). This happens in every micro-batch, but once in the full "
                "batch. Change them when trainer.global_step has grown."
            )
        if self._of_first is None:
            self._of_first = list(current.stepped), current.next_call
        current.warn_of_others(*self._of_first, self.warn_once)
        if is_boundary:
            if self.closed and not self.closed[0].is_empty:
                self.total_weight += float(self.closed[0].weight)
            self.clock.tick(self.boundary.position(seen))
            self.discard(seen)

    def leave_loader_batch(self) -> None:
        """End the hooks after training_step: restore ``.grad``, unless a window has ended."""
        current, self.current = self.current, ManualMicroBatch()
        if current.defers_steps and current.before is not None:
            put_gradients(self._parameters(), current.before)

    @override
    def _begin_window(self, seen: int) -> None:
        super()._begin_window(seen)
        self.micro_batches_begun, self._of_first = 0, None
        for call in self.calls:
            call.given.clear()

    def call(self, index: int) -> Call:
        """The call of a ``training_step`` that has the number ``index``, from 0."""
        if index == len(self.calls):
            # not from the first weights: ranks may be at different calls, since they may have different numbers of micro-batches
            weight_scale = 1.0 if self.ranks.size > 1 and not self._reduces_by_itself else None
            self.calls.append(Call(self, weight_scale))
            self.of_losses.append(self.calls[index].window)
        return self.calls[index]

    def announce(self, batch: Any, loader_batches: int, samples: frozenset[int]) -> None:
        """Print the start line, once a ``training_step`` has called backward."""
        if self._is_announced or not self.calls:
            return
        self._is_announced = True
        rank_zero_info(
            manual_start_line(self.calls, [call.line for call in self.calls], samples_of(batch, samples), loader_batches)
        )

    @override
    def in_words(self, size: int) -> str:
        return f"{super().in_words(size)}, with manual optimization"

    @override
    def restart(self, state: Mapping[str, Any], seen: int, into_window: int, steps: int, size: int) -> PartialWindow | None:
        partial = super().restart(state, seen, into_window, steps, size)
        if partial is not None:
            self.micro_batches_begun = partial.position
            for index in range(len(partial.losses)):
                self.call(index)
        return partial

    @override
    def partial_window(self, training: Trained, size: int) -> PartialWindow | None:
        for index in range(int(self.ranks.largest(len(self.calls))[0])):  # of all ranks
            self.call(index)
        return super().partial_window(training, size)

    @override
    def _is_reduced_inside(self, training: Trained) -> bool:
        return self._reduces_by_itself

    @override
    def _loss_scale_of(self, training: Trained) -> float:
        return 1.0  # the sums are not scaled

    def _of_other_backwards(self, optimizer: Optimizer) -> str:
        """The parameters whose gradients an optimizer is to use, though no call of this step gave them, nor an earlier one."""
        known = {*self.current.given, *(self.current.before or ())}
        stepped = [own for group in optimizer.param_groups for own in group["params"] if own.grad is not None and own not in known]
        found = {own for own in stepped if own.grad.any()}
        return listed([name for name, own in self._named_parameters().items() if own in found]) if found else ""

    def may_step(self, name: str, optimizer: Optimizer) -> bool:
        """Whether the optimizer of this name steps now, or at the boundary."""
        self.current.stepped.append(name)
        if self.tried is not None:
            self.tried.step(optimizer)
        if self.current.defers_steps:
            return False
        if self.current.is_running and (names := self._of_other_backwards(optimizer)):
            self.warn_once(
                f"training_step steps {name}, but no self.manual_backward gave the gradients of {names}. In a window they are the"
                " gradients of the last micro-batch of this rank alone. Compute them by self.manual_backward(loss)."
            )
        is_empty = bool(self.closed) and all(closed.is_empty for closed in self.closed)
        if is_empty:
            self.warn_once(
                "A window ended with weight 0 (no loss, or none that is finite): its optimizer step is skipped. Parameters and "
                "optimizer state do not change."
            )
        return not is_empty
