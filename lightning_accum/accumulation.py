"""One training run's accumulation: the policy that was asked for, and the small objects that carry it out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_accum.checkpointing.resume import PartialWindow
from lightning_accum.errors import ArgumentError, NotFiniteError, UnreadableLossError, UsageError
from lightning_accum.main_gradients import MainGradients
from lightning_accum.micro_batch import EMPTY, MicroBatch, Weighed
from lightning_accum.policy import Policy
from lightning_accum.ranks import Ranks
from lightning_accum.splitting.micro_batch import Tokens
from lightning_accum.splitting.plan import Plan, Splitting
from lightning_accum.weighing.contribution import Contribution
from lightning_accum.weighing.denominator import Denominator
from lightning_accum.weighing.proven import Proven
from lightning_accum.weighing.shares import ShareWeight
from lightning_accum.weighing.term_nodes import scale_terms
from lightning_accum.weighing.terms import HOW_TO_WEIGH_EACH, TermsAtOnce, TermsCountedAhead
from lightning_accum.weighing.verdict import Verdict
from lightning_accum.weighing.weight import Weigher
from lightning_accum.whole.row_wise import RowWise
from lightning_accum.window import Window
from lightning_accum.window_loss import WindowLoss
from lightning_accum.window_totals import ClosedWindow
from lightning_accum.windows import Windows


class BackwardObserver(Protocol):
    """What is called around the backward of a micro-batch."""

    def begin_backward(self, micro_batch: MicroBatch, weight: Denominator | None) -> None:
        """It is next, and the micro-batch is in its window."""

    def end_backward(self) -> None:
        """It is over."""


class Accumulation(Windows):
    """The windows of a fit whose Trainer optimizes.

    Args:
        splitting: how loader batches are split; None where each is a micro-batch.
        sums: where gradients are added up, if in a wider type than that of their parameters.
    """

    def __init__(
        self,
        policy: Policy,
        ranks: Ranks,
        warn: Callable[[str], None],
        splitting: Splitting | None = None,
        sums: MainGradients | None = None,
    ) -> None:
        super().__init__(policy, ranks, warn)
        self.splitting = splitting
        self.world_size = ranks.size
        """The ranks that have batches of their own."""
        self.window = Window(ranks.device, ranks.size, ranks.group, counts_left_out=policy.on_nonfinite == "skip")
        # the totals are known before the backward, unless its gradient may still be left out of them
        are_totals_known = ranks.size > 1 and splitting is None and policy.on_nonfinite == "propagate" and not policy.row_wise
        may_be_at_once = policy.weight == "auto" and are_totals_known
        self._terms_at_once = TermsAtOnce() if may_be_at_once else None
        self.weigher = Weigher(policy.weight, warn, self._terms_at_once is not None, lambda: self._is_proven)
        if isinstance(policy.weight, tuple):
            window = self.window
            window.terms = TermsCountedAhead(policy.weight, window.device, window.dtype, ranks.size, ranks.group)
        self._weighs_terms = self._terms_at_once is not None or self.window.terms is not None
        self.sums = sums
        """Where gradients are added up, if in a wider type than that of their parameters."""
        self._loss = WindowLoss(self.window, self.weigher, sums)
        self.closed: ClosedWindow | None = None
        """The last window that ended; None while the next is about to end, and where its closure was not called."""
        self.gradient_norm: Tensor | None = None
        """The norm of its gradient, where it was clipped by norm."""
        self.closed_loader_batches = 0
        """How many loader batches it took."""
        self.is_zero_grad_due = True
        """The gradients are those of an earlier window: they are cleared before the first backward of the next."""
        self.is_shadow_batch = False
        """The loader batch that was drawn last is one that this rank runs for the sake of the others. Set by what draws it."""
        self._again: tuple[Contribution, torch.dtype, Weighed] | None = None
        """What the last micro-batch of this window brought into it, where one that is weighed as it was brings in the same."""
        self._has_run_without_loss = False
        """In this window training_step has returned None."""
        self.is_step = False
        """The window that ended last counts as an optimizer step: it has weight, or, as in Lightning, no loss at all."""
        self.observer: BackwardObserver | None = None
        """Called around the backward of every micro-batch that is added to the window."""
        self.checks_left = 0
        """At how many loader batches more the check may be tried: until enough rows were looked at on every rank."""
        self.row_wise: RowWise | None = None
        """Runs submodules in micro-batches."""
        self.has_joint_loss = False
        """The loss of a rank takes the rows of all ranks together."""
        self.verdict: Verdict | None = None
        """What the check found in this fit."""
        self.is_just_checked = False
        """The first micro-batch of a loader batch that was checked is next, on all ranks, of which there are several."""
        self.kept: list[Any] = []
        """The loader batches that it has looked at, each with few rows; None for others. Until it ends."""
        self.proven: Proven | None = None
        """What windows are known to add up for; None where that was not found out."""
        self.look_at_doubted: Callable[[], None] = lambda: None
        """Checks micro-batches of the window that has ended. Called on all ranks."""
        self.was_checked = False
        """It was made before the checkpoint that training goes on from, with the same weight."""

    @property
    @override
    def losses(self) -> Sequence[WindowLoss]:
        return (self._loss,)

    @override
    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        if self.splitting is not None:
            self.splitting.planner.prove_again()

    @override
    def restart(self, seen: int, into_window: int, steps: int, loader_batches: int, size: int) -> PartialWindow | None:
        partial, state = super().restart(seen, into_window, steps, loader_batches, size), self.resumed_state
        self.is_zero_grad_due = partial is None
        self.weigher.takes_functions = bool(state.get("takes_functions", True))
        self.was_checked = state.get("checked_weight") == self.policy.weight_in_words
        if self.was_checked:
            self.window.constant = state.get("weight_constant")
        if self.was_checked and "shares" in state:
            self.weigher.shares = ShareWeight(**state["shares"])
        if self.was_checked and "ways" in state:
            self.proven = Proven(set(map(tuple, state["ways"])))
        if self.was_checked and self.checks_left:
            self.checks_left, self.verdict = 1, Verdict(None, seen="the checkpoint is of a training that was")
        if self.splitting is not None and self.splitting.sizes is not None and "micro_batch_sizes" in state:
            self.splitting.sizes.load_state_dict(state["micro_batch_sizes"])
        if self.splitting is not None and "padding" in state:
            self.splitting.planner.proofs.load_state_dict(state["padding"])
        return partial

    @override
    def state_dict(self) -> dict[str, Any]:
        is_verdict = self.verdict is not None and self.verdict.deviation is not None and not self.checks_left
        state = super().state_dict()
        state["checked_weight"] = self.policy.weight_in_words if self.was_checked or is_verdict else ""
        state["takes_functions"] = self.weigher.takes_functions
        if self.window.constant:
            state["weight_constant"] = self.window.constant
        if self.proven is not None:
            state["ways"] = sorted(map(list, self.proven.ways))
        if self.weigher.shares is not None:
            state["shares"] = asdict(self.weigher.shares)
        if self.splitting is not None and self.splitting.sizes is not None:
            state["micro_batch_sizes"] = self.splitting.sizes.state_dict()
        if self.splitting is not None:
            state["padding"] = self.splitting.planner.proofs.state_dict()
        return state

    @property
    def weighs_terms(self) -> bool:
        """Each term of a loss is weighed by itself in the windows of now."""
        at_once = self._terms_at_once is not None and self.boundary.size in (None, 1)
        return at_once or self.window.terms is not None

    # --- one loader batch -----------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """How the last loader batch was split; None where it is a micro-batch."""
        return None if self.splitting is None else self.splitting.plan

    def is_passthrough(self) -> bool:
        """One micro-batch is the whole window: there is nothing to weigh, and everything is left to Lightning."""
        return self.policy.on_nonfinite == "propagate" and self._is_one_micro_batch()

    def _is_one_micro_batch(self) -> bool:
        return self.world_size == 1 and self.boundary.size == 1 and self.plan is None

    def count_ahead(self, batch: Any) -> None:
        """A loader batch is about to run that is a window: what its terms are divided by is counted in all of it."""
        terms = self.window.terms
        if isinstance(terms, TermsCountedAhead) and self.boundary.size == 1 and not (self.is_shadow_batch or self.is_passthrough()):
            terms.discard()
            terms.add(batch)

    def add(self, loss: Tensor, micro_batch: MicroBatch) -> Weighed:
        """Take in the loss of a micro-batch, the module's own."""
        if self.sums is not None:
            self.sums.begin_backward(is_adding=not self.is_passthrough())
        if micro_batch.is_shadow_batch:
            if self.has_joint_loss:
                raise UsageError(
                    "This rank has run out of data, and its last batch stands in for the next, but the loss gathers the rows of all"
                    " ranks: those of this one would count twice. Give all ranks equally many batches (drop_last=True)."
                )
            self._add_empty(micro_batch)
            return EMPTY
        # the micro-batch of a split batch, or of a longer window, never is: without asking further, in every one of them
        if micro_batch.number == 1 and self.boundary.size == 1 and self.is_passthrough():
            self.closed = self._passthrough_window(loss, micro_batch)
            self.weigher.forget()
            return Weighed(self.closed.weight, is_weightless=self.closed.is_empty)
        try:
            contribution = self.weigher(loss, micro_batch.batch, micro_batch.rows)
        except UnreadableLossError as error:
            if not self._is_one_micro_batch():
                if self.is_just_checked:
                    self._agree_that_it_is_read(error)
                raise
            contribution = Contribution(None)  # nothing depends on its weight
        again = self._again
        if again is not None and contribution is again[0] and loss.dtype is again[1]:
            self.window.add_again(loss, contribution)
            if micro_batch.is_boundary:
                self.reduce()
            return again[2]
        if self.is_just_checked:
            self._agree_that_it_is_read()
        proven = self.proven
        if proven is not None and (proven.rows is None or not contribution.ways <= proven.ways):
            self.window.has_doubts |= proven.doubts(contribution, micro_batch.batch)
        weight = contribution.weight
        if self.has_joint_loss and weight is None:
            raise ArgumentError(
                "The loss gathers the rows of all ranks, and is a sum: it may be the same on each, or that of its own rows."
                ' Pass GradientAccumulation(weight="equal") for the mean over the ranks, as DistributedDataParallel takes it;'
                " or divide it by the number of its own rows."
            )
        is_weightless = not isinstance(weight, Tensor) and weight == 0
        # the weight in the type of the sums, if they are in a wider one
        grad_output = self.window.add(loss if self.sums is None else loss.detach().to(self.window.dtype), contribution)
        if contribution.of_mean is not None:
            self.weigher.leave_out_function(loss)
        if self.observer is not None:
            self.observer.begin_backward(micro_batch, weight)
        if micro_batch.is_boundary:
            self.reduce()
        terms = self.weigher.take_terms() if self._weighs_terms else None
        if terms and (factors := self.window.factors_of_terms()) is not None:
            is_weightless, grad_output = not any(isinstance(factor, Tensor) or factor for factor in factors), None
            scale_terms(terms, factors)
        elif self.sums is not None:
            self.sums.weigh(grad_output)
            grad_output = None
        weighed = Weighed(weight, contribution.of_mean, grad_output, is_weightless)
        if self._may_be_the_same and (proven is None or contribution.ways <= proven.ways):
            self._again = (contribution, loss.dtype, weighed)
        return weighed

    @property
    def _may_be_the_same(self) -> bool:
        return self.sums is None and self.observer is None and not (self.checks_left or self._weighs_terms)

    def _agree_that_it_is_read(self, error: UnreadableLossError | None = None) -> None:
        """Raise on all ranks what one cannot read of the first micro-batch after a check: else they would wait for it."""
        self.is_just_checked = False
        failed = int(self.ranks.largest(0 if error is None else self.ranks.rank + 1)[0])
        if failed:
            raise UnreadableLossError(self.ranks.share(str(error), failed - 1)) from None

    def _passthrough_window(self, loss: Tensor, micro_batch: MicroBatch) -> ClosedWindow:
        """A window that is one micro-batch with this loss, and left to Lightning."""
        try:
            weight = self.weigher(loss, micro_batch.batch, micro_batch.rows).weight
        except UnreadableLossError:  # whatever the loss, nothing depends on its weight here
            weight = None
        # a batch that is not split for once counts as those that are; Lightning steps, and waits for no device
        is_empty = self.splitting is not None and weight is not None and float(weight) == 0
        value = loss.item() if loss.is_cpu else loss.detach()
        return ClosedWindow(value, 1.0 if weight is None else weight, 1, is_empty=is_empty)

    def add_without_loss(self, micro_batch: MicroBatch) -> None:
        """Take in a micro-batch that training_step returned None for."""
        self._has_run_without_loss |= micro_batch.batch is not None and not micro_batch.is_shadow_batch
        self.closed = None
        if self.is_passthrough():
            self.closed = ClosedWindow(math.nan, 0.0, 0, is_empty=True)
        else:
            self._add_empty(micro_batch)

    def _add_empty(self, micro_batch: MicroBatch) -> None:
        if self.is_just_checked:
            self._agree_that_it_is_read()
        self.window.add_empty()
        if micro_batch.is_boundary:
            self.reduce()

    @override
    def end_loader_batch(self, seen: int) -> None:
        self._done = (seen, self.window.micro_batches)

    def reduce(self) -> None:
        """Start to sum the weights over the ranks: on all of them before the last reduction of gradients."""
        if self.splitting is not None and self.splitting.sizes is not None:
            self.window.flag = self.splitting.sizes.has_changed
        if self._terms_at_once is not None:  # a micro-batch on each rank is all of the window
            self.window.terms = self._terms_at_once if self.boundary.size == 1 else None
        self.window.reduce()

    def is_full(self) -> bool:
        """Whether the window has reached its tokens, over all ranks. Called on all of them, after every loader batch.

        Raises:
            ValueError: the loss is a sum, which has no weight.
        """
        return self.comes_to_tokens(self.window.weight_so_far())

    def comes_to_tokens(self, weight: float) -> bool:
        """Whether ``weight``, summed over the ranks, is that of a window of tokens. Called on all of them."""
        assert isinstance(self.policy.window, Tokens)
        if self.boundary.tokens is None:
            self.boundary.tokens = self.policy.window.at(float(self.total_weight))
        return self.ranks.sum(weight) >= self.boundary.tokens

    @property
    def sees_windows_whole(self) -> bool:
        """Each window is one micro-batch, this one and those that follow."""
        is_always = self.row_wise is not None or (self.splitting is None and not self.policy.has_varying_windows)
        return is_always and self.is_passthrough()

    @property
    def _is_proven(self) -> bool:
        """Parts of the first batch were found to add up to it, or its loss has seen all of its window."""
        if self.sees_windows_whole:
            return True
        return self.verdict is not None and self.verdict.deviation is not None and self.verdict.adds_up

    @property
    def is_closed_empty(self) -> bool:
        """The window that ended last had no weight, so there is no optimizer step for it."""
        return self.closed is not None and self.closed.is_empty

    # --- the end of a window --------------------------------------------------------------------------------------

    def close(self, seen: int, parameters: Callable[[], Iterable[Tensor]], is_inside_batch: bool = False) -> ClosedWindow:
        """End the window: its gradients become the full batch's."""
        if self.changes.is_under_way:
            self.changes.end(self.window.micro_batches)
        sums = None if self.sums is None else self.sums.gradients()
        self.closed = self.window.close(lambda: [p.grad for p in parameters() if p.grad is not None] if sums is None else sums)
        doubted = self.closed
        if doubted.do_terms_disagree and self.verdict is not None and self.verdict.deviation is not None:
            doubted = doubted._replace(do_terms_disagree=self.verdict.adds_up)  # else the check has said it
        if doubted.is_doubtful or self.weigher.unweighed_beside is not None:
            self._loss.warn_of(doubted, self.warn_once, HOW_TO_WEIGH_EACH)
        if self.sums is not None:
            self.sums.write_to_grad()
        if not math.isfinite(self.closed.slope) and self.policy.on_nonfinite != "propagate":
            self.closed = self._without_slope(self.closed)
        if self.closed.is_flagged:
            self._agree_on_sizes()
        self._begin_window(seen, is_inside_batch)
        self.total_left_out += self.closed.left_out
        self._add_weight(self.closed)
        return self.closed

    def _without_slope(self, closed: ClosedWindow) -> ClosedWindow:
        """A window whose loss is a function of a mean where that has no finite slope, as the square root at 0: it is left out."""
        if self.policy.on_nonfinite == "raise":
            raise NotFiniteError(
                f"The gradient of a window is not finite: its loss is {closed.loss:g}, where the function of the mean that it is"
                f" ({self.weigher.criterion}) has the slope {closed.slope:g}. No optimizer step was made with it."
            )
        left_out = closed.left_out + closed.micro_batches
        return closed._replace(loss=math.nan, weight=0.0, micro_batches=0, is_empty=True, left_out=left_out)

    def _agree_on_sizes(self) -> None:
        """A rank found another size of micro-batch: all take the smallest that any rank has found."""
        assert self.splitting is not None
        assert self.splitting.sizes is not None
        sizes = self.splitting.sizes.as_tensor().to(self.window.device, self.window.dtype)
        if self.world_size > 1:
            dist.all_reduce(sizes, dist.ReduceOp.MIN, group=self.ranks.group)
        self.splitting.sizes.agree(sizes)

    def close_passthrough(self, seen: int) -> None:
        """End a window that was left to Lightning."""
        self._begin_window(seen)
        if self.closed is not None:
            self._add_weight(self.closed)

    def _add_weight(self, closed: ClosedWindow) -> None:
        if closed.is_empty and not self.is_step:
            self.warn_once(
                "A window ended without any weight (all labels ignored, no batch, or nothing finite): there is no optimizer step"
                " for it, parameters and optimizer state stay as they are."
            )
        elif not closed.is_empty:
            self.total_weight = self.total_weight + closed.weight

    @override
    def _begin_window(self, seen: int, is_inside_batch: bool = False) -> None:
        seen -= is_inside_batch
        # a closure that runs again (LBFGS over ranks) ends the same window again
        before = 0 if is_inside_batch else self.closed_loader_batches
        self.closed_loader_batches = self.boundary.position(seen) or before
        self.boundary.close(seen)
        if is_inside_batch:
            self.boundary.begin(math.inf)
        if self.sums is not None:
            self.sums.clear()
        self.is_zero_grad_due = True
        self._again = None
        self.is_step = self.closed is not None and (not self.closed.is_empty or self._is_without_loss(self.closed))
        self._has_run_without_loss = False

    @override
    def discard(self, seen: int) -> int:
        self.closed = None
        return super().discard(seen)

    def _is_without_loss(self, closed: ClosedWindow) -> bool:
        """training_step ran, and returned None in all of the window."""
        has_run = self._has_run_without_loss or self.world_size > 1  # all ranks are to come to the same answer
        return closed.is_empty and closed.micro_batches == closed.left_out == 0 and has_run

    def after_optimizer_step(self, has_stepped: bool) -> None:
        """Count the step for the schedulers."""
        if has_stepped:
            self.clock.tick(self.closed_loader_batches)
        else:
            self.clock.hold()
