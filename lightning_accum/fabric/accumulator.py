"""Accumulator: windows in a hand-written loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_accum import valid_policy
from lightning_accum.accumulation import Accumulation
from lightning_accum.boundary import Tail
from lightning_accum.checkpointing.unfinished import go_on_with, unfinished_window
from lightning_accum.errors import ArgumentError, UsageError, WrongTypeError
from lightning_accum.fabric import setup
from lightning_accum.fabric.misuse import UntouchedGradients, warn_of_factors, warn_of_hooks
from lightning_accum.fabric.passes import Passes
from lightning_accum.fabric.running import Running
from lightning_accum.fabric.training import Fabric, Training, checked_clip
from lightning_accum.fabric.words import Words
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.policy import OnNonfinite, Policy, WindowSize
from lightning_accum.session import Session
from lightning_accum.splitting.micro_batch import Tokens
from lightning_accum.splitting.plan import Split
from lightning_accum.weighing.counts import Weight
from lightning_accum.weighing.safeguards import warn_of_batch_norm
from lightning_accum.whole.row_wise import row_wise_of

LossOf = Callable[[Any, Any], Tensor]
"""``loss_of(model, batch)``: the loss of a batch, as the loop computes it."""


class Accumulator:
    """Accumulates gradients over windows in a hand-written loop, so that each window takes the step of one batch.

    It yields the micro-batches of a loader, keeps the reduction over ranks back inside a window, knows the end of the data, and
    divides the gradients once, by what the losses of the window were divided by. So the loop divides nothing, and counts nothing.

    Args:
        fabric: a ``lightning.fabric.Fabric`` on one device, with ``"ddp"``, or with ``ModelParallelStrategy`` (FSDP2). None for
            plain torch on one device, or with a model in DistributedDataParallel.
        model: the model as the loop calls it, after ``fabric.setup``.
        optimizer: its optimizer, after ``fabric.setup``.
        window: loader batches in a window, on every rank; or see :class:`~lightning_accum.GradientAccumulation`, for this and all
            arguments below that are not explained.
        micro_batch: the size of a micro-batch, into several of which each loader batch is split.
        row_wise: submodules that run in micro-batches of that size, while the loss sees the loader's batch.
        weight: what a micro-batch weighs.
        tail: what the end of the data does to an unfinished window. With ``"carry"`` it goes on in the next pass over the data, and
            is stepped in the pass that is called with ``is_last=True``.
        accumulate_dtype: the type that gradients are added up in.
        on_nonfinite: what to do with a micro-batch whose loss or gradient is not finite. What is skipped is as if it had never
            been there for the model and the window; what the loop does with its loss is the loop's.
        trim_padding: whether to trim the padding of split batches. Needs ``loss_of``, by which it is tried out first.
        split: cuts loader batches that are no containers of tensors with one entry a sample.
        loss_of: a function ``loss_of(model, batch)`` that returns the loss of a batch. By it the first batches are checked, and
            it is tried out whether the loss depends on padding. The loop may call it too, or compute its loss otherwise.
        check: whether to look for parameters that change inside a window; and, where there is ``loss_of``, to try out on a few
            rows of the first batches that micro-batches add up to them.
        log: whether to print, on rank zero, what was understood at the first micro-batch.

    Attributes:
        window_loss: the loss that the full batch of the last window would have had.
        window_weight: what its losses were divided by, over all ranks: tokens, samples, elements; 1 for a loss that is a sum.
        total_weight: that of all windows so far.
        gradient_norm: of that window, where ``step`` was called with ``clip_norm``; before clipping.
        optimizer_steps: steps so far.
        skipped_micro_batches: those that ``on_nonfinite="skip"`` has left out so far, over all ranks.
        passes: passes over the data that are done.
        loader_batches: loader batches of the pass under way that are done; 0 between passes.
        is_shadow_batch: what was yielded runs for the sake of other ranks, and is in no window: leave it out of metrics.

    Raises:
        ValueError: an argument is out of its range, or two exclude each other, or the model is trained in a way that is not known.
            In the loop, before a first step: the losses of micro-batches do not add up to that of their batch.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> accumulator = Accumulator(None, model, torch.optim.SGD(model.parameters(), lr=0.1), window=2, log=False)
        >>> for inputs, target in accumulator([(torch.ones(n, 2), torch.zeros(n, 1)) for n in (1, 3, 2)]):
        ...     accumulator.backward(nn.functional.mse_loss(model(inputs), target))
        ...     if accumulator.step(clip_norm=1.0):
        ...         print(accumulator.optimizer_steps, accumulator.window_weight)
        1 4.0
        2 2.0
    """

    def __init__(
        self,
        fabric: Fabric | None,
        model: nn.Module,
        optimizer: Any,
        window: WindowSize = 1,
        *,
        micro_batch: int | Tokens | None = None,
        row_wise: str | Sequence[str] | None = None,
        weight: Literal["auto", "equal"] | Weight | Sequence[Weight] = "auto",
        tail: Tail = "step",
        accumulate_dtype: torch.dtype | None = None,
        on_nonfinite: OnNonfinite = "propagate",
        trim_padding: bool | str = True,
        split: Split | None = None,
        loss_of: LossOf | None = None,
        check: bool = True,
        log: bool = True,
    ) -> None:
        setup.refuse_sizes(micro_batch)
        self._words = words = Words("the loss function" if loss_of is None else "loss_of")
        self._training = training = Training(fabric, model, optimizer, self._refuse_step)
        with words.in_errors():
            self.policy = policy = valid_policy.checked(
                Policy(
                    1 if window is None else window,
                    weight,  # type: ignore[arg-type]  # a sequence becomes a tuple
                    tail,
                    log=log,
                    micro_batch=None if row_wise is not None else micro_batch,
                    split=split,
                    trim_padding=trim_padding,
                    accumulate_dtype=accumulate_dtype,
                    on_nonfinite=on_nonfinite,
                    check=check,
                    **valid_policy.row_wise_fields(row_wise, micro_batch),
                )
            )
            setup.refuse(policy, training, words)
            splits = setup.splitting(policy, training, loss_of is not None, lambda: self._passes.samples, words)
            sums = setup.main_gradients(policy, training)
            self._accumulation = accumulation = Accumulation(policy, training.ranks, words.rank_zero_warn, splits, sums)
            accumulation.row_wise = row_wise_of(policy, training.module, training.ranks, training.is_sharded)
        loss = None if loss_of is None else setup.loss_without_wrapper(loss_of, training)
        training.sync = training.make_sync(policy.finishes_after_backward, sums, loss)
        guard = setup.guard(training, accumulation, words)
        training.session = self._session = Session(
            training, training.module, accumulation, training.sync, training.snapshotter, guard, accumulation.row_wise
        )
        is_window_long = policy.may_be_longer_than_one(1)
        is_split = policy.micro_batch is not None  # not row-wise, where the loss sees the loader's batch
        if is_window_long or is_split or training.ranks.size > 1:
            if policy.check:
                setup.begin_check(accumulation, has_loss=loss is not None)
            warn_of_hooks(training.module, is_checked=accumulation.checks_left > 0)
        warn_of_batch_norm(training.module, is_split, is_window_long, words.rank_zero_warn)
        self._passes = Passes(training, accumulation, loss, words, is_window_long, self.discard)
        training.announce = self._passes.announce
        self._running = Running(training, accumulation.row_wise)
        are_in_grad = sums is None and not training.sync.is_waited_for_in_forward
        self._untouched = UntouchedGradients(training.trained if are_in_grad else lambda: ())
        self._pass: Generator[Any, None, None] | None = None
        self._may_be_divided = True
        self.gradient_norm: Tensor | None = None

    # --- the loop ---------------------------------------------------------------------------------------------------

    def __call__(self, loader: Iterable[Any], *, skip: int = 0, is_last: bool = False) -> Iterator[Any]:
        """Pass over the data once: yields its micro-batches. On all ranks; they end together, the longest loader decides.

        A rank that runs out of data before others gets its last batch again, and what that adds is nothing.

        Args:
            loader: yields loader batches.
            skip: loader batches that are drawn and passed over: those that a checkpoint was taken after, ``loader_batches``.
            is_last: with ``tail="carry"``, this pass is the last one: its unfinished window is stepped.

        Raises:
            RuntimeError: the loop did not call ``backward``, or not ``step`` where a window ended.
        """
        if self._pass is not None:
            self._pass.close()
        self._running.refuse_if_step_is_missing()
        self._running.refuse_after_failure()
        if not self._accumulation.is_between_loader_batches:
            raise UsageError(
                "The last pass was broken off inside of a loader batch, a part of which is in the window. Call"
                " accumulator.discard() to begin a new window; or break off where accumulator.loader_batches has grown."
            )
        self._pass = self._run(loader, skip, is_last)
        return self._pass

    def _run(self, loader: Iterable[Any], skip: int, is_last: bool) -> Generator[Any, None, None]:
        running = self._running
        try:
            with self._words.in_errors():
                for micro_batch, ends_window in self._passes.micro_batches(loader, skip, is_last):
                    running.begin(micro_batch, ends_window)
                    yield micro_batch.batch
                    running.end()
        finally:
            running.leave()
            if running.is_first_without_backward:
                self._passes.leave_loader_batch()
            self._end_loader_batch()
            running.forget()

    def _end_loader_batch(self) -> None:
        """Count the loader batch, if its last micro-batch has run its backward: it may be counted again."""
        if self._running.has_ended_loader_batch:
            self._passes.end_loader_batch()

    def backward(self, loss: Tensor | None) -> None:
        """The backward of a micro-batch: in place of ``loss.backward()`` or ``fabric.backward(loss)``, once in each.

        Args:
            loss: its loss, undivided; None where it has none: it weighs nothing.

        Raises:
            RuntimeError: it is called outside of the loop, or again; or what a window had accumulated was changed by others.
        """
        micro_batch = self._running.begin_backward()
        self._untouched.refuse_changes()
        if loss is None:
            self._training.sync.forward_without_batch()
        elif not isinstance(loss, Tensor):
            raise WrongTypeError(f"backward takes the loss of a micro-batch, a tensor, or None; found {type(loss).__name__}")
        elif self._may_be_divided:
            self._may_be_divided = False
            warn_of_factors(loss, self._accumulation.boundary.size)
        try:
            weighed = self._session.add(self._training, loss, micro_batch)
            if self._session.guard is not None:
                self._session.end_micro_batch(weighed)
        except BaseException as error:
            self._running.fail()
            self._words.correct(error)
            raise
        self._running.end_backward()
        self._untouched.keep()

    def step(self, clip_norm: float | None = None, clip_value: float | None = None) -> bool:
        """Where a window ends: normalise its gradients, clip them, step the optimizer, and clear them. Elsewhere do nothing.

        Called after every ``backward``, on all ranks. Learning-rate schedulers are stepped where it returns True.

        Args:
            clip_norm: the norm to clip to; ``math.inf`` measures it.
            clip_value: the value to clip to.

        Returns:
            Whether the optimizer has stepped. Not where the window goes on; nor where it had no weight at all, or a GradScaler has
            found that the gradients are not finite.

        Raises:
            RuntimeError: it is called outside of the loop, before ``backward``, or again.
            ValueError: the losses of the window cannot be added up, for a reason that is named.
        """
        is_clipped = clip_norm is not None or clip_value is not None
        if is_clipped:
            checked_clip(clip_norm, clip_value)
        micro_batch = self._running.take_step()
        if not (self._running.ends_window or self._session.ends_by_tokens):
            return False  # the next backward looks
        self._untouched.refuse_changes()
        try:
            has_ended = self._end_window(micro_batch)
        except BaseException as error:
            self._words.correct(error)
            raise
        if not has_ended:
            return False
        has_stepped, self.gradient_norm = False, None
        if not self._accumulation.is_closed_empty:
            if is_clipped:
                self.gradient_norm = self._training.clip(clip_norm, clip_value)
            has_stepped = self._training.step()
        self._accumulation.after_optimizer_step(has_stepped)
        self._training.zero_grad()
        self._untouched.keep_cleared()
        return has_stepped

    def _end_window(self, micro_batch: MicroBatch) -> bool:
        """End the window, if it ends with this micro-batch. Returns whether it did."""
        session, seen = self._session, self._training.seen
        if self._running.ends_window:
            if micro_batch.is_boundary:
                session.close_window(seen)
                session.look_at_doubted()
            else:
                session.finish_window(seen)
            return True
        may_end = session.ends_by_tokens and (micro_batch.ends_loader_batch or session.counts_tokens_of_parts)
        if may_end and micro_batch.ends_loader_batch:
            self._accumulation.end_loader_batch(seen)
        if may_end and self._accumulation.is_full():
            session.finish_window(seen, not micro_batch.ends_loader_batch)
            return True
        return False

    def discard(self) -> None:
        """Drop what the unfinished window has accumulated. On all ranks."""
        self._accumulation.discard(self._training.seen)
        self._training.sync.drop_accumulated()
        self._training.zero_grad()
        self._untouched.forget()
        self._running.forget_failure()

    @property
    def is_shadow_batch(self) -> bool:
        """This rank has run out of data, or has fewer micro-batches than others: what is yielded runs again, for nothing."""
        return self._running.micro_batch is not None and self._running.micro_batch.is_shadow_batch

    # --- what a window was ------------------------------------------------------------------------------------------

    @property
    def window_loss(self) -> float:
        """The loss that the full batch of the last window would have had; NaN where it had no weight, and before the first."""
        closed = self._accumulation.closed
        return math.nan if closed is None else float(closed.loss)

    @property
    def window_weight(self) -> float:
        """What its losses were divided by, over all ranks: tokens, samples, elements; 1 for a loss that is a sum."""
        closed = self._accumulation.closed
        return 0.0 if closed is None else float(closed.weight)

    @property
    def total_weight(self) -> float:
        """That of all windows so far."""
        return float(self._accumulation.total_weight)

    @property
    def optimizer_steps(self) -> int:
        """Steps of the optimizer so far."""
        return self._accumulation.clock.optimizer_steps

    @property
    def skipped_micro_batches(self) -> int:
        """With ``on_nonfinite="skip"``, those of all windows so far that were not finite, over all ranks."""
        return self._accumulation.total_left_out

    @property
    def passes(self) -> int:
        """Passes over the data that are done."""
        return self._passes.done

    @property
    def loader_batches(self) -> int:
        """Loader batches of the pass under way that are done; 0 between passes."""
        return self._passes.number if self._running.has_ended_loader_batch else self._passes.loader_batches

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What goes into a checkpoint beside the states of model and optimizer; inside a window, with its gradients. On all ranks.

        Raises:
            RuntimeError: a window has ended, and ``step`` was not called yet.
        """
        self._running.refuse_if_step_is_missing()
        self._running.refuse_after_failure()
        self._untouched.refuse_changes()
        self._end_loader_batch()
        accumulation, size, warn = self._accumulation, self._passes.window_size, self._words.rank_zero_warn
        own = accumulation.state_dict()
        partial_window = unfinished_window(self._training, accumulation, size, warn, lambda words: None)
        if partial_window is not None:
            own["window"] = partial_window.state_dict()
        return {"passes": self.passes, "loader_batches": self.loader_batches, "accumulation": own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, after the model and the optimizer have their states. On all ranks.

        The loader has to go on, too: ``accumulator(loader, skip=accumulator.loader_batches)`` passes over what was done, if it
        gives the same batches again.

        Raises:
            ValueError: another version of the package has written it, or the unfinished window is of another model.
        """
        if self._pass is not None:
            self._pass.close()
        missing = {"passes", "loader_batches", "accumulation"} - set(state_dict)
        if missing:
            raise ArgumentError(f"This is no state of an Accumulator: it lacks {', '.join(sorted(missing))}")
        accumulation = self._accumulation
        self._running = Running(self._training, accumulation.row_wise)
        self._untouched.forget()
        self._passes.go_on(state_dict["passes"], state_dict["loader_batches"])
        with self._words.in_errors():
            accumulation.resume(state_dict["accumulation"])
            partial_window = accumulation.restart(self._training.seen, 0, 0, 0, self._passes.window_size)
            self._training.zero_grad()
            if partial_window is not None and not all(loss.gradients for loss in partial_window.losses):
                raise ArgumentError(
                    "This state is of a rank that keeps no gradients of the unfinished window. Load that of rank 0, on all ranks."
                )
            if partial_window is not None:
                go_on_with(partial_window, self._training, accumulation)
                accumulation.end_loader_batch(self._training.seen)
                self._untouched.keep()
        accumulation.resumed_state = {}

    def _refuse_step(self) -> None:
        if self._running.micro_batch is not None:
            raise UsageError(
                "The loop steps its optimizer by itself, inside of a window of the Accumulator. Leave optimizer.step() out:"
                " accumulator.step() steps it where a window ends."
            )
