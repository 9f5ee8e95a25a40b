"""The accumulation of one training run: its policy, and the small objects that carry it out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_accum.checkpoint import PartialWindow
from lightning_accum.errors import ArgumentError, NotFiniteError, UnreadableLossError, UsageError
from lightning_accum.exact import on_host
from lightning_accum.main_gradients import GradientSums, MainGradients
from lightning_accum.micro_batch import EMPTY, MicroBatch, Weighed
from lightning_accum.policy import Policy, Tokens
from lightning_accum.ranks import Ranks
from lightning_accum.splitting.plan import Plan, Splitting
from lightning_accum.step import BackwardObserver
from lightning_accum.verdict import Progress
from lightning_accum.weighing.advice import OF_LATER_WEIGHTS
from lightning_accum.weighing.counted import Counted
from lightning_accum.weighing.known import Reading
from lightning_accum.weighing.later import LaterLooks
from lightning_accum.weighing.terms import Denominator, Term, keep_weight, scale_terms
from lightning_accum.weighing.weight import Contribution, Weigher
from lightning_accum.whole.row_wise import RowWise
from lightning_accum.window import Window
from lightning_accum.window_totals import ClosedWindow
from lightning_accum.windows import Windows


class Accumulation(Windows):
    """The windows of a fit whose Trainer optimizes.

    ``sums`` hold the summed gradients, if ``parameter.grad`` does not. ``weight_scale`` is set by the first window.
    """

    def __init__(
        self,
        policy: Policy,
        ranks: Ranks,
        warn: Callable[[str], None],
        splitting: Splitting | None = None,
        sums: GradientSums | None = None,
        row_wise: RowWise | None = None,
        weight_scale: float | None = None,
    ) -> None:
        super().__init__(policy, ranks, warn)
        self.splitting, self.row_wise, self.world_size = splitting, row_wise, ranks.size
        self.weigher = Weigher(policy.weight)
        self.window = Window(ranks, self.weigher, sums, weight_scale)
        self.of_losses = [self.window]
        if policy.counts_ahead:
            self.count_first()
        self._sizes = None if splitting is None else splitting.sizes  # with "auto", the sizes that fit into memory
        self.sums = sums if isinstance(sums, MainGradients) else None  # the backward adds to them, not to the gradients
        self.closed: ClosedWindow | None = None  # the last window that ended; None before the first, and after a dropped one
        self.closed_loader_batches = 0
        self.is_zero_grad_due = True  # the gradients are of an earlier window, and are cleared before the next backward
        self._unread: UnreadableLossError | None = None
        self.is_shadow_batch = False  # whether the last drawn loader batch is a shadow batch; set by the code that draws it
        self._has_run_without_loss = False  # training_step has returned None in this window
        self.is_step = False  # whether the last window was an optimizer step: it had weight or, as in Lightning, no loss at all
        self.observer: BackwardObserver | None = None  # called around the backward of each micro-batch of the window
        self.check = Progress()
        self.written: set[str] = set()  # the parameters that a forward writes to
        self.later = LaterLooks()
        self.may_count_first = False  # the terms of a window can be counted before it runs
        self.counted_next: Sequence[int] | None = None
        """Terms found in this window to have different weights: the window is left out, and later windows are counted first."""
        self.stops_counting = False  # from the next window on all terms have one weight
        # draws the loader batches of a window after its first; None if they cannot be drawn ahead
        self.rest_of_window: Callable[[], Iterator[tuple[Any, bool]]] | None = None
        self.look_at_doubted: Callable[[], bool] = lambda: False  # checks micro-batches of the ended window, on all ranks

    def count_first(self, keys: Sequence[int] = ()) -> None:
        """Count the terms of each later window before it runs: terms with these keys, and others."""
        weights, is_listed = self.policy.weight, self.policy.counts_ahead
        self.weigher.learn(self.weigher.known._replace(counts_first=not is_listed))
        self.stops_counting = False
        self.window.counted = Counted(range(len(weights)) if isinstance(weights, tuple) else keys, self.ranks, is_listed)

    def take_look(self) -> bool:
        """Whether the next window is checked before it begins. The same on all ranks."""
        return not self.position and self.check.take_look(self.clock.optimizer_steps)

    @override
    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        self.check.begin_epoch(epoch, self.clock.optimizer_steps)
        if self.splitting is not None:
            self.splitting.begin_epoch()

    @override
    def restart(self, state: Mapping[str, Any], seen: int, into_window: int, steps: int, size: int) -> PartialWindow | None:
        if (keys := state.get("counted")) is not None and self.policy.weight == "auto":
            self.count_first(keys)
        partial = super().restart(state, seen, into_window, steps, size)
        self.is_zero_grad_due = partial is None
        if self._sizes is not None and "micro_batch_sizes" in state:
            self._sizes.load_state_dict(state["micro_batch_sizes"])
        return partial

    @override
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.window.counted is not None:
            state["counted"] = self.window.counted.keys
        if self._sizes is not None:
            state["micro_batch_sizes"] = self._sizes.state_dict()
        return state

    # --- one loader batch -----------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """How the last loader batch was split; None if it is one micro-batch."""
        return None if self.splitting is None else self.splitting.plan

    def is_passthrough(self) -> bool:
        """One micro-batch is the whole window: nothing is weighted, and Lightning takes the step unchanged."""
        return self.policy.on_nonfinite == "propagate" and self._is_one_micro_batch()

    def _is_one_micro_batch(self) -> bool:
        return self.world_size == 1 and self.boundary.size == 1 and self.plan is None

    def add(self, loss: Tensor, micro_batch: MicroBatch) -> Weighed:
        """Add the module's own loss of a micro-batch to the window."""
        # false for a split batch or a longer window, which needs no further test in each micro-batch
        is_left = micro_batch.number == 1 and self.boundary.size == 1 and self.is_passthrough()
        if self.sums is not None:
            self.sums.begin_backward(is_adding=not is_left)
        if micro_batch.is_shadow_batch:
            if self.check.has_joint_loss:
                raise UsageError(
                    "This rank has run out of data and repeats its last batch, but the loss gathers the rows of all ranks, so the "
                    "rows of this rank would count twice. Give all ranks equally many batches (drop_last=True)."
                )
            self._add_empty(micro_batch)
            return EMPTY
        try:
            contribution, reading = self.weigher(loss, micro_batch.batch, micro_batch.rows)
        except UnreadableLossError as error:
            self._unread = error  # other ranks do not know of it: all raise at the end of the window
            if (self.world_size == 1 or self.policy.on_nonfinite != "propagate") and not self._is_one_micro_batch():
                raise
            contribution, reading = Contribution(math.nan if self.world_size > 1 else None), Reading()  # one rank needs no weight
            if self.window.counted is not None and not is_left:
                self.window.counted.agree()  # like the other ranks
        if is_left:
            self.closed = ClosedWindow.alone(on_host(loss), 1.0 if contribution.weight is None else contribution.weight)
            return Weighed(self.closed.weight, is_weightless=False)
        check, counted = self.check, self.window.counted
        is_other = self.later.is_new_graph(is_first_window=self.closed is None) and check.is_checked
        if not check.batches_left:
            if self.splitting is None and check.is_checked and self.later.note_lengths(micro_batch.batch):
                self.window.note_doubt(1.0)
            # else it was noted when it was counted
            if is_other or counted is None or not counted.is_agreed or counted.is_listed:
                self.window.note_doubt(self.later.note(micro_batch.batch, contribution, is_other))
        if counted is not None and contribution.of_terms is None and self._unread is None:
            contribution = contribution._replace(weight=None, of_terms={})
        if contribution.of_terms is not None:
            return self._add_terms(loss, contribution, reading.terms, micro_batch)
        weight = contribution.weight
        if weight is None and check.has_joint_loss:
            raise ArgumentError(
                "The loss gathers the rows of all ranks, and is a sum: it may be the same on all ranks, or the sum of the rank's "
                'own rows. Pass GradientAccumulation(weight="equal") for the mean over the ranks, as in DistributedDataParallel; '
                "or divide the sum by the number of the rank's own rows."
            )
        is_weightless = not isinstance(weight, Tensor) and weight == 0
        # the weight has the type of the sums, if that is wider
        grad_output = self.window.add(loss if self.sums is None else loss.detach().to(self.window.dtype), contribution)
        if loss.dtype.itemsize < 4 and grad_output is not None and weight is not None:
            keep_weight(loss, weight / (self.window.weight_scale or 1.0), grad_output)
        if reading.function is not None:
            reading.function.leave_out(loss)
        return Weighed(weight, contribution.of_mean, self._begin_backward(micro_batch, weight, grad_output), is_weightless)

    def _add_terms(self, loss: Tensor, contribution: Contribution, terms: Sequence[Term], micro_batch: MicroBatch) -> Weighed:
        """Add a micro-batch whose terms have different weights."""
        window = self.window
        assert window.counted is not None
        assert contribution.of_terms is not None
        own, shown = window.counted.weigh(loss, contribution.of_terms, terms)
        window.add(loss, contribution, shown)
        is_weightless = not any(isinstance(factor, Tensor) or factor for factor in own)
        is_whole = len(terms) == 1 and all(edge.place is None for edge in terms[0].edges)
        grad_output = torch.ones_like(loss).detach() * own[0] if is_whole and own[0] != 1.0 else None
        grad_output = self._begin_backward(micro_batch, 0.0 if is_weightless else 1.0, grad_output)
        if not is_whole:
            scale_terms(terms, own)
        return Weighed(None, None, grad_output, is_weightless)

    def _begin_backward(self, micro_batch: MicroBatch, weight: Denominator | None, grad_output: Tensor | None) -> Tensor | None:
        """Prepare the backward of a micro-batch. Returns its ``gradient``; None for 1, and if the sums apply it."""
        if self.observer is not None:
            self.observer.begin_backward(micro_batch, weight)
        if micro_batch.is_boundary:
            self.reduce()
        if self.sums is not None:
            self.sums.weigh(grad_output)
            return None
        return grad_output

    def add_without_loss(self, micro_batch: MicroBatch, may_be_checked: bool = True) -> None:
        """Add a micro-batch for which training_step returned None."""
        has_batch = micro_batch.batch is not None and not micro_batch.is_shadow_batch
        self._has_run_without_loss |= has_batch
        self.closed = None
        if self.is_passthrough():
            self.closed = ClosedWindow.empty()
            return
        is_looked_at = has_batch and may_be_checked and self.check.is_checked and not self.check.batches_left
        if is_looked_at and self.later.note_missing_loss(micro_batch.batch):
            self.window.note_doubt(1.0)
        self._add_empty(micro_batch)

    def _add_empty(self, micro_batch: MicroBatch) -> None:
        if self.window.counted is not None:
            self.window.counted.agree()
        self.window.add_empty()
        if micro_batch.is_boundary:
            self.reduce()

    def reduce(self) -> None:
        """Start to sum the weights over the ranks. Called on all ranks, before the last reduction of gradients."""
        if self._sizes is not None:
            self.window.flag = self._sizes.has_changed
        self.window.reduce()

    def is_full(self) -> bool:
        """Whether the window has reached its tokens, over all ranks. Called on all of them, after every loader batch."""
        if any(entry.contribution.is_off for entry in self.window.entries):
            self.warn_once(
                "A window of Tokens waits for weight, but the loss has a factor of 0, and so no weight: begin with a small factor, "
                "or give the window in loader batches."
            )
        counted = self.window.counted
        return self.comes_to_tokens(self.window.weight_so_far()) if counted is None else counted.loader_batches_left <= 0

    def comes_to_tokens(self, weight: float) -> bool:
        """Whether ``weight``, summed over the ranks, fills a window of tokens. Called on all ranks."""
        assert isinstance(self.policy.window, Tokens)
        if self.boundary.tokens is None:
            self.boundary.tokens = self.policy.window.at(float(self.total_weight))
        return self.ranks.sum(weight) >= self.boundary.tokens

    def leave_out_window(self) -> None:
        """Treat the window that has just ended as if its weight were 0: its step is skipped."""
        assert self.closed is not None
        self.warn_once(OF_LATER_WEIGHTS)
        self.closed = self.closed._replace(loss=math.nan, weight=0.0, is_empty=True)
        self.is_step = False

    # --- the end of a window --------------------------------------------------------------------------------------

    def close(self, seen: int, parameters: Callable[[], Iterable[Tensor]]) -> ClosedWindow:
        """End the window: its gradients become the gradients of the full batch. If Lightning takes the step, nothing changes."""
        if self.closed is not None and self.is_passthrough():
            self._begin_window(seen)
            self.total_weight = self.total_weight + self.closed.weight
            return self.closed
        if self.changes.is_under_way:
            self.changes.end(len(self.window.entries))
        sums = None if self.sums is None else self.sums.gradients()
        try:
            self.closed = self.window.close(lambda: [p.grad for p in parameters() if p.grad is not None] if sums is None else sums)
        except ArgumentError as error:  # on all ranks
            unread = self.ranks.gather(self._unread) if self.world_size > 1 else []
            if self.counted_next is None or any(unread):
                raise next(filter(None, unread), error) from None
            self.closed = ClosedWindow.empty()
        disagrees = self.closed.do_terms_disagree or self.closed.do_factors_differ  # on all ranks
        is_auto = self.policy.weight == "auto" and self.may_count_first and self.window.counted is None
        if disagrees and is_auto and self.ranks.largest(float(self.closed.do_terms_disagree))[0]:
            self.counted_next = ()
        elif not self.closed.is_empty:
            self.window.warn_of(self.closed, self.warn_once)
        if self.sums is not None:
            self.sums.write_to_grad()
        if not math.isfinite(self.closed.slope) and self.policy.on_nonfinite != "propagate":
            self.closed = self._without_slope(self.closed)
        if not self.closed.has_doubts:
            self.later.doubted.clear()
        if self.closed.is_flagged and self._sizes is not None:  # the flag is the same on all ranks
            self._sizes.agree(self.ranks)
        self._begin_window(seen)
        self.total_left_out += self.closed.left_out
        self._add_weight(self.closed)
        if self.counted_next is not None:
            self.leave_out_window()
            self.count_first(self.counted_next)
            self.counted_next = None
        return self.closed

    def _without_slope(self, closed: ClosedWindow) -> ClosedWindow:
        """Leave out a window whose loss is a function of a mean without a finite derivative, such as the square root at 0."""
        if self.policy.on_nonfinite == "raise":
            raise NotFiniteError(
                f"The gradient of a window is not finite: its loss is {closed.loss:g}, a function of a mean "
                f"({self.weigher.criterion}) whose derivative there is {closed.slope:g}. No optimizer step used it."
            )
        left_out = closed.left_out + closed.micro_batches
        return closed._replace(loss=math.nan, weight=0.0, micro_batches=0, is_empty=True, left_out=left_out)

    def _add_weight(self, closed: ClosedWindow) -> None:
        if closed.is_empty and not self.is_step:
            self.warn_once(
                "A window ended with weight 0 (no batch, or no finite loss): its step is skipped. Parameters do not change."
            )
        elif not closed.is_empty:
            self.total_weight = self.total_weight + closed.weight

    @override
    def _begin_window(self, seen: int) -> None:
        # a closure that runs again (LBFGS over ranks) ends the same window again
        self.closed_loader_batches = self.boundary.position(seen) or self.closed_loader_batches
        super()._begin_window(seen)
        if self.sums is not None:
            self.sums.clear()
        if self.stops_counting and self.weigher.known.counts_first:
            self.weigher.learn(self.weigher.known._replace(counts_first=False))
            self.stops_counting, self.window.counted = False, None
        self.is_zero_grad_due, self._unread = True, None
        closed, has_run = self.closed, self._has_run_without_loss or self.world_size > 1  # the same on all ranks
        is_without_loss = has_run and closed is not None and closed.micro_batches == closed.left_out == 0
        self.is_step = closed is not None and (not closed.is_empty or is_without_loss)
        self._has_run_without_loss = False

    @override
    def discard(self, seen: int) -> int:
        self.closed = None
        self.later.doubted.clear()
        return super().discard(seen)

    def after_optimizer_step(self, has_stepped: bool) -> None:
        """Count the step for the schedulers."""
        if has_stepped:
            self.clock.tick(self.closed_loader_batches)
        else:
            self.clock.hold(False, True)
