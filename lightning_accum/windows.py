"""The position of a training in its windows, and its state in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_accum.boundary import TAILS, Boundary, StepClock
from lightning_accum.checkpoint import FORMAT, PartialWindow, check_format, gather_loss, restore_loss
from lightning_accum.parameter_changes import ONCE_A_WINDOW, ParameterChanges
from lightning_accum.policy import Policy
from lightning_accum.ranks import Ranks
from lightning_accum.step import Trained
from lightning_accum.window import Window


class EpochLoss:
    """The loss of an epoch: the weighted mean of its windows."""

    def __init__(self, weighed: float = 0.0, weight: float = 0.0) -> None:
        self._sums = (weighed, weight)
        self._windows: list[tuple[Tensor | float, Tensor | float]] = []

    def add(self, loss: Tensor | float, weight: Tensor | float) -> None:
        """Add a window. The numbers of many windows are read together, since each read waits for an accelerator."""
        self._windows.append((loss, weight))
        if len(self._windows) == 100:
            self.sums()

    def sums(self) -> list[float]:
        """The weighted sum of the losses so far, and the sum of the weights, for a checkpoint."""
        for loss, weight in ((float(loss), float(weight)) for loss, weight in self._windows):
            if not math.isnan(loss):
                self._sums = (self._sums[0] + loss * weight, self._sums[1] + weight)
        self._windows = []
        return [*self._sums]

    def take_mean(self) -> float | None:
        """Return the mean, None without weight, and begin another epoch."""
        weighed, weight = self.sums()
        self._sums = (0.0, 0.0)
        return weighed / weight if weight else None


class Windows:
    """The windows of one ``fit``, with automatic or manual optimization."""

    def __init__(self, policy: Policy, ranks: Ranks, warn: Callable[[str], None], once_a_window: str = ONCE_A_WINDOW) -> None:
        self.policy = policy
        self.ranks = ranks
        self.changes = ParameterChanges(warn if policy.check else None, once_a_window)
        """Finds parameters that change inside a window."""
        self.boundary = Boundary(policy.tail)
        self.clock = StepClock(policy.scheduler_counts)
        self._done = (0, 0)
        """The last loader batch that is done, counted from 1, and the micro-batches of its window so far."""
        self.total_weight: Tensor | float = 0.0
        """The weight of all windows so far."""
        self.total_left_out = 0
        """Micro-batches of all windows so far that were not finite, over all ranks."""
        self.epoch = 0
        """The epoch under way, from 0."""
        self.of_losses: list[Window] = []
        """The window under way of each loss of ``training_step``, in the order of their backward calls."""
        self.epoch_loss = EpochLoss()
        self._warn = warn
        self._warned: set[str] = set()

    def in_words(self, size: int) -> str:
        """What ends a window, in words that a checkpoint compares."""
        return self.policy.in_words(size)

    def warn_once(self, message: str, about: str = "") -> None:
        """Warn, unless the same warning was given before, or one about the same."""
        if (about or message) not in self._warned:
            self._warned.add(about or message)
            self._warn(message)

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, or resume it."""
        self.epoch = epoch
        self.changes.begin_epoch()

    def end_loader_batch(self, seen: int) -> None:
        """Loader batch number ``seen`` is done."""
        for window in self.of_losses:
            if window.counted is not None and seen != self._done[0]:  # the same batch may be reported again
                window.counted.loader_batches_left -= 1
        self._done = (seen, self._micro_batches())

    @property
    def position(self) -> int:
        """Loader batches of the unfinished window that are done."""
        return max(0, self.boundary.position(self._done[0]))

    @property
    def is_between_loader_batches(self) -> bool:
        """Whether the gradients are of whole loader batches: none is running, and none has failed half-way."""
        return self._micro_batches() == (self._done[1] if self.position else 0)

    def _micro_batches(self) -> int:
        return sum([len(window.entries) for window in self.of_losses])

    def discard(self, seen: int) -> int:
        """Drop the unfinished window. Returns its number of loader batches."""
        lost = self.boundary.position(seen)
        for window in self.of_losses:
            window.discard()
        self._begin_window(seen)
        return lost

    def _begin_window(self, seen: int) -> None:
        """Begin a window after loader batch number ``seen``."""
        self.boundary.close(seen)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The counters for a checkpoint."""
        return {
            "format": FORMAT,
            "epoch": self.epoch,
            "optimizer_steps": self.clock.optimizer_steps,
            "scheduler_time": self.clock.time,
            "total_weight": float(self.total_weight),
            "epoch_loss": self.epoch_loss.sums(),
            "skipped_micro_batches": self.total_left_out,
            "is_at_boundary": self.position == 0,
        }

    def restart(self, state: Mapping[str, Any], seen: int, into_window: int, steps: int, size: int) -> PartialWindow | None:
        """Begin training, or resume from a checkpoint.

        Args:
            state: the :meth:`state_dict` in the checkpoint; empty if training begins.
            seen: loader batches so far.
            into_window: how many of them belong to an unfinished window, according to Lightning.
            steps: optimizer steps so far.
            size: loader batches in a window now.

        Returns:
            The unfinished window of the checkpoint, for :meth:`restore`.
        """
        self.discard(seen)
        if state:
            check_format(state)
        self.clock.optimizer_steps = int(state.get("optimizer_steps", steps))
        time = steps if self.policy.scheduler_counts == "optimizer_steps" else seen - into_window
        self.clock.time = int(state.get("scheduler_time", time))
        self.clock.hold(False, True)
        self.total_weight = float(state.get("total_weight", 0.0))
        self.total_left_out = int(state.get("skipped_micro_batches", 0))
        self.epoch_loss = EpochLoss(*(state.get("epoch_loss", ()) if state.get("epoch") == self.epoch else ()))
        rule, kept = TAILS[self.policy.tail], state.get("window", {})
        if state.get("epoch", self.epoch) != self.epoch and rule.drops(kept.get("position", 0), kept.get("size") or math.inf):
            return None
        if "window" not in state:
            if not state.get("is_at_boundary", False):
                self.boundary.close(seen - into_window)
                if into_window or "is_at_boundary" in state:
                    self._warn(
                        "The checkpoint was taken inside a window and does not hold its gradients: the first optimizer step uses "
                        "the rest of the window."
                    )
            return None
        partial = PartialWindow.from_state_dict(state["window"])
        then, now = partial.policy, self.in_words(size)
        if partial.ranks != self.ranks.size and any(loss.term_totals is not None for loss in partial.losses):
            then += f", with terms counted over {partial.ranks} ranks"
            now += f" over {self.ranks.size}, with other batches"
        if then != now:
            self._warn(
                f"The checkpoint was taken after {partial.position} loader batches of a window of {then}. The window is now "
                f"{now}: the gradients in the checkpoint are dropped, and a new window begins."
            )
            return None
        self.boundary.go_on(seen, partial.position, math.inf if partial.size is None else partial.size, partial.tokens)
        self._done = (seen, 0)
        return partial

    def partial_window(self, training: Trained, size: int) -> PartialWindow | None:
        """The unfinished window of ``size`` loader batches, for a checkpoint; None at a boundary. Called on all ranks."""
        if self.position == 0:
            return None
        if not self.is_between_loader_batches:
            self._warn(
                "This checkpoint is taken inside a loader batch, part of which is already in the gradients of the window. The "
                "checkpoint lacks these gradients: after a resume the first step uses the rest of the window."
            )
            return None
        if not training.can_save_window:
            self._warn(
                "With FSDP1 a checkpoint inside a window lacks its gradients: the first step after a resume uses the rest. "
                'strategy="accum_model_parallel" (FSDP2) saves them.'
            )
            return None
        training.sync.reduce_for_checkpoint()
        named, is_reduced = training.parameters_by_name(), self._is_reduced_inside(training)
        left_out = sum(window.left_out for window in self.of_losses)
        return PartialWindow(
            self.in_words(size),
            self.position,
            None if self.boundary.size == math.inf else self.boundary.size,
            self.boundary.tokens,
            self.ranks.size,
            [gather_loss(window, named, self.ranks, is_reduced) for window in self.of_losses],
            self._loss_scale_of(training),
            int(self.ranks.sum(left_out)) if self.policy.on_nonfinite == "skip" else 0,
        )

    def restore(self, partial: PartialWindow | None, training: Trained) -> None:
        """Restore the weights and gradients of a window from :meth:`restart`, on any number of ranks."""
        if partial is None:
            return
        named, scale = training.parameters_by_name(), self._loss_scale_of(training) / partial.scale
        for window, kept in zip(self.of_losses, partial.losses, strict=True):
            restore_loss(window, kept, named, self.ranks, scale, self.warn_once)
            window.left_out = partial.left_out if self.ranks.is_first else 0
        training.sync.note_gradients()
        self.end_loader_batch(self._done[0])

    def _is_reduced_inside(self, training: Trained) -> bool:
        """Whether the gradients of an unfinished window are averaged over the ranks already."""
        return training.sync.is_reduced_inside

    def _loss_scale_of(self, training: Trained) -> float:
        """The loss scale of the gradients of an unfinished window."""
        return training.loss_scale()
