"""The passes of a hand-written loop over its data: what its micro-batches are, and which of them ends a window."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from lightning_accum.accumulation import Accumulation
from lightning_accum.check import check_first_batch
from lightning_accum.counting import count_window
from lightning_accum.errors import UsageError
from lightning_accum.fabric import setup
from lightning_accum.fabric.data import Ahead, length_of, loader_batches
from lightning_accum.fabric.training import Training
from lightning_accum.fabric.words import Words
from lightning_accum.later_terms import check_doubted
from lightning_accum.looks import Checked
from lightning_accum.micro_batch import MicroBatch, Weighed
from lightning_accum.splitting.packed import samples_of
from lightning_accum.start_line import start_line, warn_of_windows_never_full


class Passes:
    """Draws loader batches, splits them, and has the first of them checked.

    Args:
        training: that runs them.
        accumulation: their windows.
        loss_of: the loss of a batch, by which it is checked, and its padding tried out; None where it is not known.
        words: for what is printed.
        is_window_long: a window may have several loader batches.
        discard: drops an unfinished window.
    """

    def __init__(
        self,
        training: Training,
        accumulation: Accumulation,
        loss_of: Callable[[Any], Tensor] | None,
        words: Words,
        is_window_long: bool,
        discard: Callable[[], None],
    ) -> None:
        self._training = training
        self._accumulation = accumulation
        self._loss_of = loss_of
        self._words = words
        self._is_window_long = is_window_long
        self._discard = discard
        self._difference_by_padding = setup.difference_by_padding(accumulation.policy, training, loss_of)
        self.samples: frozenset[int] = frozenset()
        """How many the loader puts into a batch; empty where it does not say so."""
        self.done = 0
        """Passes that are."""
        self.loader_batches = 0
        """Those of the pass under way that are done; 0 between passes."""
        self.number = 0
        """Of the loader batch under way, counted from 1."""
        self._length = math.inf

    def micro_batches(self, loader: Iterable[Any], skip: int, is_last: bool) -> Iterator[tuple[MicroBatch, bool]]:
        """One pass: its micro-batches, each with whether its window ends with it.

        Args:
            loader: yields loader batches.
            skip: loader batches that are drawn and passed over.
            is_last: with ``tail="carry"``, the window under way ends with the data.
        """
        accumulation, training = self._accumulation, self._training
        boundary, is_whole, overlaps = accumulation.boundary, accumulation.splitting is None, self._overlaps
        self._begin(loader, skip)
        ends_data, batches = False, Ahead(loader_batches(loader, training.ranks))
        accumulation.rest_of_window = lambda: (
            (batch, is_shadow) for batch, _, is_shadow in batches.rest(boundary.left(training.seen, self._size_or_inf))
        )
        for number, (batch, ends_data, is_shadow_batch) in enumerate(batches, 1):
            if number <= skip:
                continue
            training.seen += 1
            self.number = number
            accumulation.is_shadow_batch = is_shadow_batch
            if not boundary.is_under_way:
                boundary.begin(self._size_or_inf())
            ends_window = training.seen >= boundary.ends_at or (ends_data and boundary.is_cut_by_the_end(is_last))
            if accumulation.checks_left or accumulation.window.counted is not None or not is_whole:
                self._begin_loader_batch(batch)
            if is_whole:
                yield MicroBatch(batch, None, 0, 1, ends_window and overlaps, is_shadow_batch), ends_window
            else:
                yield from self._parts(batch, ends_window)
            self.end_loader_batch()
        self._end(ends_data, is_last)

    @property
    def _overlaps(self) -> bool:
        return not self._training.session.finishes_after_backward

    def _begin(self, loader: Iterable[Any], skip: int) -> None:
        self.loader_batches = skip
        size = getattr(loader, "batch_size", None)
        self.samples = frozenset((size,)) if isinstance(size, int) else frozenset()
        self._length = length_of(loader)
        self._accumulation.begin_epoch(self.done)

    def end_loader_batch(self) -> None:
        """The last micro-batch of the loader batch is done."""
        self._accumulation.end_loader_batch(self._training.seen)
        self.loader_batches = self.number

    def leave_loader_batch(self) -> None:
        """The loop has left before anything of the loader batch was accumulated: it is in no window."""
        self._training.seen -= 1

    def _end(self, has_ended: bool, is_last: bool) -> None:
        """The data are at their end."""
        accumulation = self._accumulation
        self.done, self.loader_batches = self.done + 1, 0
        lost = accumulation.boundary.position(self._training.seen)
        if lost <= 0:
            return
        if accumulation.policy.tail == "drop":
            self._discard()
        elif not has_ended and accumulation.boundary.is_cut_by_the_end(is_last):
            raise UsageError(
                f"The loader gave fewer batches than its length of {self._length}, so the last {lost} of them are in a window that"
                " never ended. Have len(loader) tell the truth, or pass iter(loader), whose length nobody asks for."
            )

    def go_on(self, done: int, loader_batches: int) -> None:
        """Be where a checkpoint was taken."""
        self.done, self.loader_batches = done, loader_batches
        self._accumulation.epoch = done

    # --- one loader batch -------------------------------------------------------------------------------------------

    def _begin_loader_batch(self, batch: Any) -> None:
        """Plan how it is split, and check it, where that is due."""
        accumulation, training, splitting = self._accumulation, self._training, self._accumulation.splitting
        if splitting is not None:
            splitting.plan = None
            if batch is not None:
                splitting.begin(batch, self._difference_by_padding)
        if accumulation.checks_left and self._loss_of is not None:
            sync, snapshotter, is_long = training.sync, training.snapshotter, self._is_window_long
            checked = Checked(
                training.module,
                self._loss_of,
                accumulation,
                sync,
                snapshotter,
                self.samples,
                is_long,
                self._say,
                accumulation.policy.may_count_first(is_long),
            )
            check_first_batch(checked, [] if batch is None else [batch])
            accumulation.look_at_doubted = partial(check_doubted, checked)
        if accumulation.window.counted is not None:
            count_window(accumulation, self, batch, training.sync, training.snapshotter)

    def transferred(self, batch: Any) -> Any:
        """A loader batch that was drawn ahead."""
        return batch

    def plan_ahead(self, batch: Any) -> None:
        """Plan how it is split."""
        assert self._accumulation.splitting is not None
        self._accumulation.splitting.begin(batch, self._difference_by_padding)

    def run_ahead(self, batch: Any, ahead: int) -> Tensor | None:
        """The loss of a micro-batch of a loader batch that is so many after the one under way."""
        assert self._loss_of is not None
        return self._loss_of(batch)

    def _parts(self, batch: Any, ends_window: bool) -> Iterator[tuple[MicroBatch, bool]]:
        """The micro-batches of a loader batch that may be split."""
        splitting, overlaps = self._accumulation.splitting, self._overlaps
        assert splitting is not None
        is_shadow, plan = self._accumulation.is_shadow_batch, splitting.plan
        own, parts = (1, [batch]) if plan is None else (len(plan.pieces), plan)
        rounds, part = self._training.session.rounds(own), None
        for position, part in enumerate(parts):
            is_end = ends_window and position == rounds - 1
            yield MicroBatch(part, splitting.rows, position, rounds, is_end and overlaps, is_shadow), is_end
        for position in range(own, rounds):  # other ranks have more
            is_end = ends_window and position == rounds - 1
            yield MicroBatch(part, None, position, rounds, is_end and overlaps, True), is_end

    # --- what is said of them ---------------------------------------------------------------------------------------

    @property
    def window_size(self) -> int:
        """Loader batches in a window that begins now; 1 where tokens end it."""
        size = self._size_or_inf()
        return 1 if size == math.inf else int(size)

    def _size_or_inf(self) -> float:
        accumulation = self._accumulation
        size = accumulation.policy.size_at(accumulation.epoch, accumulation.clock.optimizer_steps)
        return math.inf if size is None else size

    def announce(self, micro_batch: MicroBatch, weighed: Weighed) -> None:
        """Print what was understood of the first loss."""
        accumulation = self._accumulation
        batch = micro_batch.batch if accumulation.plan is None else accumulation.plan.batch
        self._say(start_line(accumulation, micro_batch, weighed, samples_of(batch, self.samples), self.window_size))
        warn_of_windows_never_full(accumulation, micro_batch, weighed, batch, self._length)

    def _say(self, line: str) -> None:
        if self._accumulation.policy.log and self._training.is_global_zero:
            print(self._words(line), flush=True)
