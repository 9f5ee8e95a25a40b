"""One loader batch, run as micro-batches: what Lightning sees of it is what it would have seen of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_accum.splitting.batch_log import BatchLog
from lightning_accum.splitting.outputs import Outputs
from lightning_accum.splitting.plan import Plan

if TYPE_CHECKING:
    from lightning_accum.strategies.mixin import AccumulationMixin

RunMicroBatch = Callable[[Any], tuple[Tensor | None, dict[str, Any]]]
"""training_step, zero_grad where it is due, and backward. Takes the micro-batch; returns its loss and what else it returned."""


class BatchRun:
    """Runs the micro-batches of a plan, one after the other.

    Args:
        strategy: whose accumulation has planned the batch.
        run_micro_batch: runs one.
        collecting: makes a log that takes in what is logged as long as its context lasts.
        show: logs what was collected; or, where that is as if it had never been there, takes part in what other ranks log.
    """

    def __init__(
        self,
        strategy: AccumulationMixin,
        run_micro_batch: RunMicroBatch,
        collecting: Callable[[], AbstractContextManager[BatchLog]],
        show: Callable[[BatchLog, bool], None],
    ) -> None:
        assert strategy.accumulation is not None
        self._strategy = strategy
        self._accumulation = strategy.accumulation
        self._run_micro_batch = run_micro_batch
        self._collecting = collecting
        self._show = show
        self._ends_window = self._accumulation.is_boundary

    def __call__(self) -> tuple[Tensor | None, dict[str, Any], Tensor | None]:
        """Run the batch.

        Returns:
            Its loss, what else was returned, and the loss of the window if it ends one.
        """
        accumulation, strategy = self._accumulation, self._strategy
        splitting = accumulation.splitting
        assert splitting is not None
        assert accumulation.plan is not None
        accumulation.count_ahead(accumulation.plan.batch)
        begun, is_zero_grad_due = accumulation.window.micro_batches, accumulation.is_zero_grad_due
        left_out, sums = accumulation.window.left_out, accumulation.sums if splitting.is_retried else None
        kept = {} if sums is None else sums.copies()

        def discard() -> None:
            accumulation.window.rewind(begun)
            accumulation.window.left_out = left_out
            if sums is not None:
                sums.put_back(kept)
            if is_zero_grad_due and not accumulation.is_zero_grad_due:
                for parameter in strategy.parameters():
                    parameter.grad = None

        accumulated = None if is_zero_grad_due else strategy.parameters()
        outputs, order, log, window_loss = splitting.run(self._attempt, discard, accumulated)
        self._show(log, not outputs.weights)
        if self._ends_window and strategy.ends_windows_apart:
            window_loss = strategy.end_window_apart()
        is_window = self._ends_window and begun == 0 and accumulation.world_size == 1 and not strategy.counts_tokens_of_parts
        return outputs.loss(window_loss if is_window else None), outputs.extra(order), window_loss

    def _attempt(self, plan: Plan) -> tuple[Outputs, list[int] | None, BatchLog, Tensor | None]:
        accumulation, strategy = self._accumulation, self._strategy
        assert accumulation.splitting is not None
        ends_window = self._ends_window and not strategy.ends_windows_apart
        counts_tokens, own = strategy.counts_tokens_of_parts, len(plan.pieces)
        last, rounds, window_loss = own - 1, strategy.rounds(own), None
        outputs, run_micro_batch = Outputs([piece.count for piece in plan.pieces]), self._run_micro_batch
        no_sync, has_sync, nothing, guard = strategy.blocked, strategy.world_size > 1, nullcontext(), strategy.guard
        with self._collecting() as log:
            for index, micro_batch in enumerate(plan):
                accumulation.begin_micro_batch(micro_batch)
                log.micro_batch = len(outputs.weights)
                is_last = index == last
                accumulation.is_boundary = ends_window and index == rounds - 1
                if guard is not None:
                    guard.begin_micro_batch()
                with no_sync() if has_sync and not accumulation.is_boundary else nothing:
                    loss, extra = run_micro_batch(micro_batch)
                    log.note_loss(loss)
                    if is_last or loss is None:
                        window_loss = strategy.end_micro_batch()
                if guard is not None and guard.end_micro_batch():
                    outputs.leave_out()
                    if not (is_last and has_sync and not outputs.weights):  # other ranks may wait for what it logs
                        log.forget_micro_batch()
                else:
                    outputs.add(loss, accumulation.weight, extra, accumulation.of_mean)
                del loss, extra, micro_batch  # before the next forward
                if counts_tokens and index < rounds - 1:
                    strategy.end_window_inside_batch()
        if rounds > own:
            accumulation.is_boundary = ends_window
            window_loss = strategy.run_shadow_batches(own, rounds)
        log.weigh(outputs.weights or [0.0], outputs.rows or [1], outputs.of_means)
        return outputs, plan.order, log, window_loss
