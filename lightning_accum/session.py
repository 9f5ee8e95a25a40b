"""Runs a loader batch, whole or in micro-batches that add to a window, and ends windows."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_accum.accumulation import Accumulation
from lightning_accum.counting import count_window
from lightning_accum.errors import UsageError, is_out_of_memory
from lightning_accum.exact import tensor_of
from lightning_accum.micro_batch import EMPTY, MicroBatch, Output, Weighed, joined_extra, joined_loss
from lightning_accum.nonfinite import Guard
from lightning_accum.splitting.plan import Plan, Splitting
from lightning_accum.step import Backward, Outcome, Step, Trained
from lightning_accum.sync.base import NOTHING_AROUND, put_gradients
from lightning_accum.weighing.counts import count_samples
from lightning_accum.weighing.safeguards import gradients_of_zero


@dataclass(eq=False)
class Session:
    """Runs the loader batches of one fit. State between loader batches is in its :class:`Accumulation`."""

    trained: Trained
    accumulation: Accumulation
    guard: Guard | None
    announce: Callable[[MicroBatch, Weighed], None]  # prints the start line, after the first loss was weighted

    def __post_init__(self) -> None:
        self.sync, policy = self.trained.sync, self.accumulation.policy
        self._is_announced = False
        self._copied: dict[nn.Parameter, ref[Tensor]] = {}  # gradients that CUDA graphs cannot overwrite
        self._has_graphs = False  # of torch.cuda.make_graphed_callables
        self.finishes_after_backward = policy.finishes_after_backward
        self._has_rounds = self.sync.is_waited_for_in_forward and policy.micro_batch is not None

    # --- one loader batch -----------------------------------------------------------------------------------------

    def run(self, step: Step, batch: Any, seen: int, ends_window: bool) -> Outcome:
        """Run a loader batch of the training loop, number ``seen``, counted from 1 over all epochs."""
        accumulation, splitting = self.accumulation, self.accumulation.splitting
        if accumulation.window.counted is not None:
            count_window(accumulation, step, batch, self.sync, self.trained.snapshotter)
        is_split, begun = splitting is not None and splitting.plan is not None, len(accumulation.window.entries)
        has_boundary = ends_window and not self.finishes_after_backward
        if accumulation.is_shadow_batch:
            self.zero_grad(step)  # before the snapshot, so that its changes to the module are kept
        if splitting is not None and is_split:
            outputs, order = self._run_split(step, splitting, has_boundary)
            if any(output.logs for output in outputs):
                step.show_logs(outputs)
        else:
            loss, extra = self._run_whole(step, batch, has_boundary)
        window_loss = self.end_window(seen, has_boundary) if ends_window else None
        if is_split:
            is_window = begun == 0 and accumulation.world_size == 1
            return Outcome(window_loss, joined_loss(outputs, window_loss if is_window else None), joined_extra(outputs, order))
        return Outcome(loss if ends_window and accumulation.is_passthrough() else window_loss, loss, extra)

    def _run_whole(self, step: Step, batch: Any, is_boundary: bool) -> tuple[Tensor | None, dict[str, Any]]:
        micro_batch = MicroBatch(batch, is_boundary=is_boundary, is_shadow_batch=self.accumulation.is_shadow_batch)
        if self.guard is None or not self.guard.skips:
            return self._run_micro_batch(step, micro_batch)[:2]
        with step.collecting_logs() as log:  # logs of a micro-batch that may be left out wait for the check
            loss, extra, weighed = self._run_micro_batch(step, micro_batch)
        step.show_logs([Output(loss, extra, weighed, 1, log.take(loss, weighed, 1), self.guard.has_skipped)])
        return (None, {}) if self.guard.has_skipped else (loss, extra)

    def _run_split(self, step: Step, splitting: Splitting, has_boundary: bool) -> tuple[list[Output], list[int] | None]:
        """Run a loader batch in micro-batches; with ``"auto"``, until they fit into memory."""
        assert splitting.plan is not None
        plan, sizes = splitting.plan, splitting.sizes
        undo = None if sizes is None else self._undo_of_attempts(plan)
        while True:
            try:
                outputs = self._attempt(step, plan, has_boundary)
            except Exception as error:
                plan.note(error)
                if sizes is None or undo is None or not is_out_of_memory(error):
                    raise
                seen = str(error).strip().partition("\n")[0]
            else:
                splitting.end_batch()
                return outputs, plan.order
            undo()  # outside the handler, whose traceback keeps the memory of the attempt
            failed = plan.pieces[plan.current]
            sizes.halve(failed.cost, failed.size, seen)
            splitting.begin_again()
            plan = splitting.plan

    def _undo_of_attempts(self, plan: Plan) -> Callable[[], None]:
        """Returns a function that undoes a failed attempt at a loader batch."""
        accumulation, window, sums = self.accumulation, self.accumulation.window, self.accumulation.sums
        begun, left_out, is_zero_grad_due = len(window.entries), window.left_out, accumulation.is_zero_grad_due
        parameters = self.trained.parameters()
        kept = {} if sums is None else {own: total.clone() for own, total in sums.accumulated(parameters).items()}
        snapshot = self.trained.snapshotter.take(None if is_zero_grad_due else parameters)
        tensors = [] if plan.layout is None else [*plan.layout.tensors.values(), *plan.layout.shared_tensors.values()]
        versions = [tensor._version for tensor in tensors]

        def undo() -> None:
            if [tensor._version for tensor in tensors] != versions:
                raise UsageError('training_step changed its batch in place: for micro_batch="auto" have it change a copy.')
            window.rewind(begun)
            window.left_out = left_out
            accumulation.changes.gradients.forget()
            if window.counted is not None:
                window.counted.values.clear()  # of larger micro-batches
            if sums is not None:
                sums.restore_accumulated(parameters, kept)
            if is_zero_grad_due and not accumulation.is_zero_grad_due:
                put_gradients(parameters, {})
            snapshot.restore()
            _free(accumulation.ranks.device)

        return undo

    def _attempt(self, step: Step, plan: Plan, has_boundary: bool) -> list[Output]:
        guard, is_shadow_batch = self.guard, self.accumulation.is_shadow_batch
        own, outputs = len(plan.pieces), list[Output]()
        rounds = self.rounds(own)
        with step.collecting_logs() as log:
            for index, batch in enumerate(plan):
                is_boundary = has_boundary and index == rounds - 1
                count = plan.pieces[index].size
                micro_batch = MicroBatch(batch, plan.rows, index, own, is_boundary, is_shadow_batch)
                try:
                    loss, extra, weighed = self._run_micro_batch(step, micro_batch)
                except StopIteration as error:
                    if not index:
                        raise  # it ends the epoch, as it would without splitting
                    found = f"training_step raises StopIteration in micro-batch {index + 1} of {own} of a loader batch"
                    raise UsageError(f"{found}, whose other micro-batches are in the window. Leave micro_batch out.") from error
                logs = log.take(loss, weighed, count)
                if guard is not None and guard.has_skipped:
                    outputs.append(Output(None, {}, EMPTY, count, logs, is_left_out=True))
                else:
                    # else the graph would keep tensors saved for a backward that never runs
                    extra = apply_to_collection(extra, Tensor, Tensor.detach) if extra else extra
                    outputs.append(Output(None if loss is None else loss.detach(), extra, weighed, count, logs))
                del loss, extra, batch, micro_batch  # before the next forward
        self._run_shadow_batches(own, rounds, has_boundary)
        return outputs

    # --- one micro-batch ------------------------------------------------------------------------------------------

    def _run_micro_batch(self, step: Step, micro_batch: MicroBatch) -> tuple[Tensor | None, dict[str, Any], Weighed]:
        """Forward, weight, backward. Returns the loss, the other outputs, and the contribution to the window."""
        with self.begin_micro_batch(micro_batch):
            with NOTHING_AROUND if (counted := self.accumulation.window.counted) is None else counted.noting_values():
                loss, extra = step.forward(micro_batch.batch)
            weighed = self.add(step, loss, micro_batch)
        if self.guard is not None or self.accumulation.changes.is_under_way:
            weighed = self.end_micro_batch(weighed)
        return loss, extra, weighed

    def begin_micro_batch(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        """Begin a micro-batch. Returns the context for its forward and backward."""
        if self.guard is not None:
            self.guard.begin_micro_batch(micro_batch)
        self.accumulation.later.begin_forward()
        around = NOTHING_AROUND if micro_batch.is_boundary else self.sync.blocked(micro_batch)
        if (row_wise := self.accumulation.row_wise) is None and not micro_batch.is_shadow_batch:
            return around
        with ExitStack() as stack:
            if micro_batch.is_shadow_batch:  # it does not change the module, but a step of its window may
                stack.enter_context(self.trained.snapshotter.take(watches_parameters=False))
            if row_wise is not None:
                stack.enter_context(row_wise.step(count_samples(micro_batch.batch)))
            stack.enter_context(around)
            return stack.pop_all()

    def add(self, step: Backward, loss: Tensor | None, micro_batch: MicroBatch) -> Weighed:
        """Add a micro-batch to the window after its forward, and run its backward. Returns its contribution."""
        accumulation, weighed = self.accumulation, EMPTY
        if accumulation.is_zero_grad_due:
            self.zero_grad(step)
        if accumulation.changes.is_under_way:  # in the first windows
            accumulation.changes.refuse_other_gradients()
        if loss is None or step.skips_backward:
            accumulation.add_without_loss(micro_batch, not self.sync.is_waited_for_in_forward)  # shards hold their gradients
            self.sync.backward_without_loss()
        else:
            weighed = accumulation.add(loss, micro_batch)
            if not self._is_announced:
                self._is_announced = True
                self.announce(micro_batch, weighed)
                self._has_graphs = any(
                    getattr(part.forward, "__module__", "") == "torch.cuda.graphs" for part in self.trained.module.modules()
                )
            self.sync.begin_backward(micro_batch, loss)
            if self.guard is None and not weighed.is_weightless:
                step.backward(loss, weighed.grad_output)
            else:
                with self._around_backward(loss, micro_batch, weighed):
                    step.backward(loss, weighed.grad_output)
            if self.accumulation.row_wise is not None:
                self.accumulation.row_wise.end_backward()
            if self._has_graphs or "torch._inductor.cudagraph_trees" in sys.modules:  # of torch.compile
                self._copy_gradients_of_graphs()
            if accumulation.observer is not None:
                accumulation.observer.end_backward()
        self.sync.complete_reduction(micro_batch)
        return weighed

    def end_micro_batch(self, weighed: Weighed) -> Weighed:
        """Leave a non-finite micro-batch out of the window, if the policy says so. Returns its contribution."""
        if self.guard is not None and self.guard.end_micro_batch():
            self.accumulation.window.skip_nonfinite()
            weighed = EMPTY
        if self.accumulation.changes.is_under_way:
            self.accumulation.changes.gradients.keep(has_values=True)
        return weighed

    def _copy_gradients_of_graphs(self) -> None:
        """Copy new gradients: a CUDA graph writes the gradients of each backward to the same memory."""
        for parameter in self.trained.parameters():
            copied = self._copied.get(parameter)
            if parameter.grad is not None and (copied is None or copied() is not parameter.grad):
                parameter.grad = parameter.grad.clone()
                self._copied[parameter] = ref(parameter.grad)

    def zero_grad(self, step: Backward, is_after_forward: bool = True) -> None:
        """Clear the gradients of an earlier window, if this is due; by default after the first forward of the window."""
        accumulation = self.accumulation
        if step.skips_backward or not accumulation.is_zero_grad_due:
            return
        accumulation.is_zero_grad_due = False
        accumulation.changes.gradients.forget()
        # sharded modules have other parameters between forward and backward
        is_compared = is_after_forward and accumulation.changes.is_due and not self.sync.is_waited_for_in_forward
        if is_compared and not accumulation.is_passthrough():
            accumulation.changes.begin(self.trained.parameters_by_name())
        step.zero_grad()

    def _around_backward(self, loss: Tensor, micro_batch: MicroBatch, weighed: Weighed) -> AbstractContextManager[None]:
        if micro_batch.is_shadow_batch and not self.sync.is_waited_for_in_forward:
            return gradients_of_zero(loss, leaves_none=True)
        if weighed.is_weightless:
            return self.sync.without_weight(loss, micro_batch)
        assert self.guard is not None
        return self.guard.watching(loss, weighed.weight)

    # --- a rank without a batch -----------------------------------------------------------------------------------

    def run_without_batch(self, step: Step, seen: int, ends_window: bool) -> Outcome:
        """Take part in a loader batch of the other ranks with weight 0, since this rank has none."""
        self.zero_grad(step, is_after_forward=False)
        has_boundary = ends_window and not self.finishes_after_backward
        if self.accumulation.window.counted is not None:
            count_window(self.accumulation, step, None, self.sync, self.trained.snapshotter)
        self._run_shadow_batches(0, max(1, self.rounds(0)), has_boundary)
        return Outcome(self.end_window(seen, has_boundary) if ends_window else None)

    def _run_shadow_batches(self, done: int, rounds: int, has_boundary: bool) -> None:
        """Take part with weight 0 in further micro-batches of other ranks: this one has ``done`` some, the others ``rounds``."""
        for index in range(done, rounds):
            micro_batch = MicroBatch(None, None, index, rounds, has_boundary and index == rounds - 1)
            with NOTHING_AROUND if micro_batch.is_boundary else self.sync.blocked(micro_batch):
                self.accumulation.changes.gradients.forget()
                self.sync.forward_without_batch()
                self.accumulation.add_without_loss(micro_batch)
                self.sync.backward_without_loss()
                self.sync.complete_reduction(micro_batch)

    def rounds(self, own: int) -> int:
        """The number of micro-batches in a loader batch, including shadow batches while other ranks run theirs. Called on all
        ranks."""
        splitting, ranks = self.accumulation.splitting, self.accumulation.ranks
        is_agreed = self._has_rounds or (ranks.world_size > 1 and splitting is not None and self.sync.is_recording_graph)
        return int(ranks.largest(own)[0]) if is_agreed else own

    # --- the end of a window --------------------------------------------------------------------------------------

    def end_window(self, seen: int, is_reduced: bool) -> Tensor | None:
        """End the window with loader batch ``seen``, in which gradients are already reduced or not. Called on all ranks.

        Returns its loss; None if it had no weight.
        """
        accumulation = self.accumulation
        if not is_reduced:
            accumulation.reduce()
            self.sync.reduce_accumulated()
        self.sync.end_window()
        if accumulation.close(seen, self.trained.parameters).has_doubts and accumulation.look_at_doubted():  # before its step
            accumulation.leave_out_window()
        closed = accumulation.closed
        if closed is None or closed.is_empty:
            return None
        return tensor_of(closed.loss, accumulation.ranks.device, accumulation.window.dtype)


def _free(device: torch.device) -> None:
    """Free the memory of a failed attempt. Called when the error, whose traceback refers to it, is out of scope."""
    gc.collect()
    if device.type not in ("cuda", "mps", "xpu"):
        return
    try:
        getattr(torch, device.type).empty_cache()
    except RuntimeError as error:  # even this can run out of memory
        if not is_out_of_memory(error):
            raise
