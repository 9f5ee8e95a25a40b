"""The micro-batch that a hand-written loop is running: one backward and one step are called in each, in this order."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

from lightning_accum.errors import UsageError
from lightning_accum.fabric.training import Training
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.undo import Snapshot
from lightning_accum.weighing.counts import count_samples
from lightning_accum.whole.row_wise import RowWise


class Running:
    """Begins and ends the micro-batches of a loop, and refuses calls that are missing or out of order.

    Args:
        training: that runs them.
        row_wise: runs submodules in micro-batches; None where nothing was asked to.
    """

    def __init__(self, training: Training, row_wise: RowWise | None) -> None:
        self._training = training
        self._row_wise = row_wise
        self.micro_batch: MicroBatch | None = None
        """The one that was yielded last; None outside of the loop."""
        self.ends_window = False
        """Its window ends with it."""
        self._is_backward_done = self._is_step_done = self._has_failed = False
        self._context: AbstractContextManager[Any] | None = None
        self._snapshot: Snapshot | None = None
        self._is_plain = row_wise is None and training.session.runs_in_nothing

    def begin(self, micro_batch: MicroBatch, ends_window: bool) -> None:
        """Its forward is next."""
        self.micro_batch, self.ends_window = micro_batch, ends_window
        self._is_backward_done = self._is_step_done = False
        if self._is_plain:
            return
        session = self._training.session
        context = session.begin_micro_batch(micro_batch)
        if micro_batch.is_shadow_batch:
            session.zero_grad(self._training)  # what it does to the model is to last
            self._snapshot = self._training.snapshotter.take(watches_parameters=False)
        if self._row_wise is not None:
            stack = ExitStack()
            stack.enter_context(self._row_wise.step(count_samples(micro_batch.batch)))
            stack.enter_context(context)
            self._context = stack
        elif type(context) is not nullcontext:
            context.__enter__()
            self._context = context

    def begin_backward(self) -> MicroBatch:
        """Its backward is called.

        Raises:
            RuntimeError: it is called outside of the loop, or again, or another has failed.
        """
        if self.micro_batch is None:
            raise UsageError("backward is called outside of the loop: for batch in accumulator(loader): ...")
        if self._has_failed:
            self.refuse_after_failure()
        if self._is_backward_done:
            raise UsageError(
                "backward is called twice in a micro-batch. A window has one loss in each: add them up, and call"
                " accumulator.backward(loss_a + loss_b)."
            )
        return self.micro_batch

    def end_backward(self) -> None:
        """It is over."""
        self._is_backward_done = True
        if self._context is not None or self._snapshot is not None:
            self.leave()

    def fail(self) -> None:
        """It has raised an error."""
        self._has_failed = True
        with suppress(Exception):  # it would hide the first one
            self.leave()

    def leave(self) -> None:
        """Nothing more runs in what its forward and backward ran in."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.restore()

    def take_step(self) -> MicroBatch:
        """Its step is called.

        Raises:
            RuntimeError: it is called outside of the loop, before the backward, or again.
        """
        if self.micro_batch is None:
            raise UsageError("step is called outside of the loop: for batch in accumulator(loader): ...")
        if not self._is_backward_done:
            self.refuse_after_failure()
            raise UsageError("step is called before accumulator.backward(loss), or backward(None) where there is no loss")
        if self._is_step_done:
            raise UsageError("step is called twice in a micro-batch")
        self._is_step_done = True
        return self.micro_batch

    def end(self) -> None:
        """The loop asks for the next one: there is none until then.

        Raises:
            RuntimeError: its backward was not called, or its step where its window ends.
        """
        if not self._is_backward_done:
            raise UsageError(
                "The loop has gone on without accumulator.backward(loss). Call it once in every micro-batch, in place of"
                " loss.backward(): accumulator.backward(None) where there is no loss; and accumulator.step() after it."
            )
        if self.ends_window:
            self.refuse_if_step_is_missing()
        self.micro_batch = None

    @property
    def has_ended_loader_batch(self) -> bool:
        """It has run its backward, and is the last of its loader batch."""
        return self.micro_batch is not None and self._is_backward_done and self.micro_batch.ends_loader_batch

    @property
    def is_first_without_backward(self) -> bool:
        """It is the first of its loader batch, and its backward was not called."""
        return self.micro_batch is not None and not (self._is_backward_done or self._has_failed or self.micro_batch.position)

    def forget(self) -> None:
        """There is none, nor what it has left."""
        self.micro_batch = None

    def forget_failure(self) -> None:
        """What a window has accumulated was dropped, or put back from a checkpoint."""
        self._has_failed = False

    def refuse_if_step_is_missing(self) -> None:
        """Refuse to go on where a window has ended, and was not stepped."""
        if self._is_backward_done and self.ends_window and not self._is_step_done:
            raise UsageError(
                "The window has ended, and accumulator.step() was not called. Call it after every accumulator.backward(loss): it"
                " steps where a window ends, and returns whether it did."
            )

    def refuse_after_failure(self) -> None:
        """Refuse to go on where a backward has failed."""
        if self._has_failed:
            raise UsageError(
                "The backward of a micro-batch of this window has failed, and a part of its gradient may be there. Call"
                " accumulator.discard() to begin a new window; or go on from a checkpoint."
            )
