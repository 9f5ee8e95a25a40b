"""Accumulator: windows in a hand-written loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_accum import valid_policy
from lightning_accum.accumulation import Accumulation
from lightning_accum.boundary import Tail
from lightning_accum.checkpointing.unfinished import go_on_with, unfinished_window
from lightning_accum.fabric import setup
from lightning_accum.fabric.data import LoaderBatch, loader_batches
from lightning_accum.fabric.training import Fabric, Training, checked_clip
from lightning_accum.first_batch import MOST_BATCHES, Checked, JointLossError, check_first_batch
from lightning_accum.micro_batch import MicroBatch, Weighed
from lightning_accum.policy import OnNonfinite, Policy, WindowSize
from lightning_accum.session import Session, finishes_after_backward
from lightning_accum.splitting.micro_batch import Tokens
from lightning_accum.splitting.packed import samples_of
from lightning_accum.splitting.plan import Split
from lightning_accum.splitting.snapshot import Snapshot
from lightning_accum.start_line import start_line, warn_of_windows_never_full
from lightning_accum.user_warnings import rank_zero_warn
from lightning_accum.weighing.counts import Weight, count_samples
from lightning_accum.weighing.safeguards import warn_of_batch_norm
from lightning_accum.weighing.verdict import DoesNotAddUpError, Verdict

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
        gradient_norm: of that window, where ``step`` was called with ``clip_norm``; before clipping.
        optimizer_steps: steps so far.
        passes: passes over the data that are done.
        loader_batches: loader batches of the pass under way that are done; 0 between passes.

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
        weight: Literal["auto", "equal"] | Weight = "auto",
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
        self.policy = valid_policy.checked(
            Policy(
                1 if window is None else window,
                weight,
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
        self._training = training = Training(fabric, model, optimizer, self._refuse_step)
        setup.refuse(self.policy, training)
        self._loss = loss = None if loss_of is None else setup.loss_without_wrapper(loss_of, training)
        self._samples: frozenset[int] = frozenset()
        splitting = setup.splitting(self.policy, training, is_proven=loss_of is not None, samples=lambda: self._samples)
        sums = setup.main_gradients(self.policy, training)
        self._accumulation = accumulation = Accumulation(self.policy, training.ranks, rank_zero_warn, splitting, sums)
        self._row_wise = accumulation.row_wise = setup.row_wise(self.policy, training)
        training.sync = training.make_sync(finishes_after_backward(self.policy), sums, loss)
        guard = setup.guard(training, accumulation)
        training.session = Session(
            training, training.module, accumulation, training.sync, lambda: training.snapshotter, guard, self._row_wise
        )
        training.announce = self._announce
        self._session = training.session
        self._difference_by_padding = setup.difference_by_padding(self.policy, training, loss)
        self._is_window_long = self.policy.may_be_longer_than_one(1)
        if self.policy.check and (self._is_window_long or training.ranks.size > 1 or micro_batch is not None):
            if loss is None or weight == "equal":
                seen = "pass loss_of=" if weight != "equal" else "a mean of means was asked for"
                accumulation.verdict = Verdict(None, seen=seen)
            else:
                accumulation.checks_left = MOST_BATCHES
        warn_of_batch_norm(training.module, micro_batch is not None, self._is_window_long, rank_zero_warn)
        self.gradient_norm: Tensor | None = None
        self.passes = 0
        self.loader_batches = self._number = 0
        self._length = math.inf
        self._pass: Generator[Any, None, None] | None = None
        self._current: MicroBatch | None = None
        self._ends_window = self._is_backward_done = self._is_step_done = self._has_failed = False
        self._context: AbstractContextManager[Any] | None = None
        self._snapshot: Snapshot | None = None
        self._witness: tuple[nn.Parameter, Tensor, int] | None = None
        self._has_warned_of_division = False

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
        self._refuse_if_step_is_missing()
        self._refuse_after_failure()
        if not self._accumulation.is_between_loader_batches:
            raise RuntimeError(
                "The last pass was broken off inside of a loader batch, a part of which is in the window. Call"
                " accumulator.discard() to begin a new window; or break off where accumulator.loader_batches has grown."
            )
        self._pass = self._run(loader, skip, is_last)
        return self._pass

    def _run(self, loader: Iterable[Any], skip: int, is_last: bool) -> Generator[Any, None, None]:
        accumulation, ranks = self._accumulation, self._training.ranks
        boundary, is_whole = accumulation.boundary, accumulation.splitting is None
        finishes_after_backward = self._session.finishes_after_backward
        self._begin_pass(loader, skip)
        drawn = LoaderBatch(None, is_last=False)
        try:
            for number, drawn in enumerate(loader_batches(loader, ranks), 1):
                if number <= skip:
                    continue
                self._training.seen += 1
                self._number = number
                accumulation.is_shadow_batch = drawn.is_shadow_batch
                if not boundary.is_under_way:
                    boundary.begin(self._window_size())
                ends_window = boundary.is_reached(self._training.seen, lambda: math.inf)
                ends_window = ends_window or (drawn.is_last and boundary.is_cut_by_the_end(is_last))
                self._begin_loader_batch(drawn.batch)
                if is_whole:
                    is_boundary = ends_window and not finishes_after_backward
                    self._begin(MicroBatch(drawn.batch, None, 0, 1, is_boundary, drawn.is_shadow_batch), ends_window)
                    yield drawn.batch
                    self._end()
                    continue
                for micro_batch, ends in self._micro_batches(drawn.batch, ends_window):
                    self._begin(micro_batch, ends)
                    yield micro_batch.batch
                    self._end()
        finally:
            self._leave()
            self._complete()
            self._current = None
        self._end_pass(drawn.is_last, is_last)

    def _begin_pass(self, loader: Iterable[Any], skip: int) -> None:
        self.loader_batches = skip
        size = getattr(loader, "batch_size", None)
        self._samples = frozenset((size,)) if isinstance(size, int) else frozenset()
        self._length = len(loader) if isinstance(loader, Sized) else math.inf
        self._accumulation.begin_epoch(self.passes)

    def _end_pass(self, has_ended: bool, is_last: bool) -> None:
        """The data are at their end."""
        accumulation = self._accumulation
        self.passes, self.loader_batches = self.passes + 1, 0
        lost = accumulation.boundary.position(self._training.seen)
        if lost <= 0:
            return
        if accumulation.policy.tail == "drop":
            self.discard()
        elif not has_ended and accumulation.boundary.is_cut_by_the_end(is_last):
            raise RuntimeError(
                f"The loader gave fewer batches than its length of {self._length}, so the last {lost} of them are in a window that"
                " never ended. Have len(loader) tell the truth, or pass iter(loader), whose length nobody asks for."
            )

    def _announce(self, micro_batch: MicroBatch, weighed: Weighed) -> None:
        """Print what was understood of the first loss."""
        accumulation = self._accumulation
        plan = accumulation.plan
        batch = micro_batch.batch if plan is None else plan.batch
        words = start_line(accumulation, micro_batch, weighed, samples_of(batch, self._samples), self._size)
        self._say(words)
        warn_of_windows_never_full(accumulation, micro_batch, weighed, batch, self._length)

    def _say(self, words: str) -> None:
        if self.policy.log and self._training.is_global_zero:
            print(words.replace("GradientAccumulation", "Accumulator", 1).replace("training_step", "loss_of"), flush=True)

    def _window_size(self) -> float:
        """Loader batches in a window that begins now; inf where tokens end it."""
        accumulation, policy = self._accumulation, self.policy
        size = policy.size_at(accumulation.epoch, accumulation.clock.optimizer_steps)
        return math.inf if size is None else size

    @property
    def _size(self) -> int:
        """The same, 1 where tokens end it, for what is said of a window in words."""
        size = self._window_size()
        return 1 if size == math.inf else int(size)

    def _begin_loader_batch(self, batch: Any) -> None:
        """Plan how it is split, and check it, where that is due."""
        accumulation, training, splitting = self._accumulation, self._training, self._accumulation.splitting
        if splitting is not None:
            splitting.plan = None
            if batch is not None:
                splitting.begin(batch, self._difference_by_padding)
        if not accumulation.checks_left or self._loss is None:
            return
        sync, snapshotter, is_long = training.sync, training.snapshotter, self._is_window_long
        checked = Checked(training.module, self._loss, accumulation, sync, snapshotter, self._samples, is_long, self._say)
        try:
            check_first_batch(checked, [] if batch is None else [batch])
        except (DoesNotAddUpError, JointLossError) as error:
            raise type(error)(str(error).replace("GradientAccumulation(", "Accumulator(")) from None

    def _micro_batches(self, batch: Any, ends_window: bool) -> Iterator[tuple[MicroBatch, bool]]:
        """The micro-batches of a loader batch, each with whether its window ends with it."""
        accumulation, splitting, session = self._accumulation, self._accumulation.splitting, self._session
        assert splitting is not None
        is_shadow, overlaps = accumulation.is_shadow_batch, not session.finishes_after_backward
        plan = splitting.plan
        own, parts = (1, [batch]) if plan is None else (len(plan.pieces), plan)
        rounds, part = session.rounds(own), None
        for position, part in enumerate(parts):
            is_end = ends_window and position == rounds - 1
            yield MicroBatch(part, splitting.rows, position, rounds, is_end and overlaps, is_shadow), is_end
        for position in range(own, rounds):  # other ranks have more
            is_end = ends_window and position == rounds - 1
            yield MicroBatch(part, None, position, rounds, is_end and overlaps, True), is_end

    def _begin(self, micro_batch: MicroBatch, ends_window: bool) -> None:
        """Its forward is next."""
        self._current, self._ends_window = micro_batch, ends_window
        self._is_backward_done = self._is_step_done = False
        context = self._session.begin_micro_batch(micro_batch)
        if micro_batch.is_shadow_batch:
            self._session.zero_grad(self._training)  # what it does to the model is to last
            self._snapshot = self._training.snapshotter.take(watches_parameters=False)
        if self._row_wise is not None:
            stack = ExitStack()
            stack.enter_context(self._row_wise.step(count_samples(micro_batch.batch)))
            stack.enter_context(context)
            self._context = stack
        elif type(context) is not nullcontext:
            context.__enter__()
            self._context = context

    def _leave(self) -> None:
        """Its backward is over."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.restore()

    def _end(self) -> None:
        """The loop asks for the next micro-batch."""
        if not self._is_backward_done:
            raise RuntimeError(
                "The loop has gone on without accumulator.backward(loss). Call it once in every micro-batch, in place of"
                " loss.backward(): accumulator.backward(None) where there is no loss; and accumulator.step() after it."
            )
        if not self._is_step_done:
            self._refuse_if_step_is_missing()
            self._complete()
        self._current = None

    def _refuse_if_step_is_missing(self) -> None:
        if self._is_backward_done and self._ends_window and not self._is_step_done:
            raise RuntimeError(
                "The window has ended, and accumulator.step() was not called. Call it after every accumulator.backward(loss): it"
                " steps where a window ends, and returns whether it did."
            )

    def _complete(self) -> None:
        """Its loader batch is done, if it is the last of it."""
        if self._current is not None and self._is_backward_done and self._current.ends_loader_batch:
            self._accumulation.end_loader_batch(self._training.seen)
            self.loader_batches = self._number

    # --- one micro-batch --------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor | None) -> None:
        """The backward of a micro-batch: in place of ``loss.backward()`` or ``fabric.backward(loss)``, once in each.

        Args:
            loss: its loss, undivided; None where it has none: it weighs nothing.

        Raises:
            RuntimeError: it is called outside of the loop, or again; or what a window had accumulated was changed by others.
        """
        micro_batch = self._current
        if micro_batch is None:
            raise RuntimeError("backward is called outside of the loop: for batch in accumulator(loader): ...")
        self._refuse_after_failure()
        if self._is_backward_done:
            raise RuntimeError(
                "backward is called twice in a micro-batch. A window has one loss in each: add them up, and call"
                " accumulator.backward(loss_a + loss_b)."
            )
        if not (loss is None or isinstance(loss, Tensor)):
            raise TypeError(f"backward takes the loss of a micro-batch, a tensor, or None; found {type(loss).__name__}")
        self._refuse_if_gradients_were_changed()
        if loss is None:
            self._training.sync.forward_without_batch()
        elif not self._has_warned_of_division:
            self._warn_of_division(loss)
        try:
            self._session.end_micro_batch(self._session.add(self._training, loss, micro_batch))
        except BaseException:
            self._has_failed = True
            with suppress(Exception):  # it would hide the first one
                self._leave()
            raise
        self._is_backward_done = True
        self._leave()
        self._note_gradients()

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
        micro_batch, accumulation, session = self._current, self._accumulation, self._session
        if micro_batch is None:
            raise RuntimeError("step is called outside of the loop: for batch in accumulator(loader): ...")
        if not self._is_backward_done:
            self._refuse_after_failure()
            raise RuntimeError("step is called before accumulator.backward(loss), or backward(None) where there is no loss")
        if self._is_step_done:
            raise RuntimeError("step is called twice in a micro-batch")
        checked_clip(clip_norm, clip_value)
        self._refuse_if_gradients_were_changed()
        self._is_step_done = True
        if self._ends_window:
            if micro_batch.is_boundary:
                session.end_window(self._training.seen)
            else:
                session.finish_window(self._training.seen)
        elif self.policy.ends_by_tokens and (micro_batch.ends_loader_batch or session.counts_tokens_of_parts):
            if not accumulation.is_full():
                self._complete()
                return False
            session.finish_window(self._training.seen, not micro_batch.ends_loader_batch)
        else:
            self._complete()
            return False
        self._complete()
        self._witness = None
        has_stepped, self.gradient_norm = False, None
        if not accumulation.is_closed_empty:
            if clip_norm is not None or clip_value is not None:
                self.gradient_norm = self._training.clip(clip_norm, clip_value)
            has_stepped = self._training.step()
        accumulation.after_optimizer_step(has_stepped)
        self._training.zero_grad()
        return has_stepped

    def discard(self) -> None:
        """Drop what the unfinished window has accumulated. On all ranks."""
        self._accumulation.discard(self._training.seen)
        self._training.sync.drop_accumulated()
        self._training.zero_grad()
        self._witness, self._has_failed = None, False

    @property
    def is_shadow_batch(self) -> bool:
        """This rank has run out of data, or has fewer micro-batches than others: what is yielded runs again, for nothing."""
        return self._current is not None and self._current.is_shadow_batch

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

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What goes into a checkpoint beside the states of model and optimizer; inside a window, with its gradients. On all ranks.

        Raises:
            RuntimeError: a window has ended, and ``step`` was not called yet.
        """
        self._refuse_if_step_is_missing()
        self._refuse_after_failure()
        self._complete()
        accumulation = self._accumulation
        own = accumulation.state_dict()
        partial_window = unfinished_window(self._training, accumulation, self._size, rank_zero_warn, lambda words: None)
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
            raise ValueError(f"This is no state of an Accumulator: it lacks {', '.join(sorted(missing))}")
        accumulation = self._accumulation
        self.passes, self.loader_batches = state_dict["passes"], state_dict["loader_batches"]
        self._is_backward_done = self._has_failed = False
        self._witness = None
        accumulation.epoch = self.passes
        accumulation.resume(state_dict["accumulation"])
        partial_window = accumulation.restart(self._training.seen, 0, 0, 0, self._size)
        self._training.zero_grad()
        if partial_window is not None and not all(loss.gradients for loss in partial_window.losses):
            raise ValueError(
                "This state is of a rank that keeps no gradients of the unfinished window. Load that of rank 0, on all ranks."
            )
        if partial_window is not None:
            go_on_with(partial_window, self._training, accumulation)
            accumulation.end_loader_batch(self._training.seen)
            self._note_gradients()
        accumulation.resumed_state = {}

    # --- what keeps a loop from a wrong gradient ----------------------------------------------------------------------

    def _refuse_step(self) -> None:
        if self._current is not None:
            raise RuntimeError(
                "The loop steps its optimizer by itself, inside of a window of the Accumulator. Leave optimizer.step() out:"
                " accumulator.step() steps it where a window ends."
            )

    def _refuse_after_failure(self) -> None:
        if self._has_failed:
            raise RuntimeError(
                "The backward of a micro-batch of this window has failed, and a part of its gradient may be there. Call"
                " accumulator.discard() to begin a new window; or go on from a checkpoint."
            )

    def _note_gradients(self) -> None:
        """Keep one gradient, to see whether others change it before the next backward."""
        self._witness = None
        if self._accumulation.sums is None and not self._training.sync.is_waited_for_in_forward:
            for parameter in self._training.trained:
                gradient = parameter.grad
                if gradient is not None:
                    self._witness = (parameter, gradient, gradient._version)
                    break

    def _refuse_if_gradients_were_changed(self) -> None:
        if self._witness is None:
            return
        parameter, gradient, version = self._witness
        if parameter.grad is not gradient or gradient._version != version:
            raise RuntimeError(
                "The gradients were cleared or changed inside of a window. Leave optimizer.zero_grad(), and clipping, out of the"
                " loop: accumulator.step(clip_norm=...) does both where a window ends."
            )

    def _warn_of_division(self, loss: Tensor) -> None:
        """A loop that was written for accumulation divides its loss by the size of the window."""
        self._has_warned_of_division = True
        size, node = self._window_size(), loss.grad_fn
        divisor = getattr(node, "_saved_other", None) if type(node).__name__ == "DivBackward0" else None
        if isinstance(divisor, Tensor) and divisor.numel() == 1 and 1 < size == float(divisor):
            rank_zero_warn(
                f"The loss is divided by {size:g}, which is the size of the window. accumulator.backward(loss) divides by what the"
                " window comes to; with this, gradients are that much smaller than the full batch's. Leave the division out."
            )
