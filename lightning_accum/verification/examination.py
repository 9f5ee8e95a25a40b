"""Whether a window equals its full batch, and what breaks that where it does not: one thing after the other is taken out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_accum.arguments import MisconfiguredError
from lightning_accum.errors import AccumulationError, DoesNotAddUpError, UnreadableLossError
from lightning_accum.user_warnings import listed
from lightning_accum.verification import breaks
from lightning_accum.verification.data import Comparison
from lightning_accum.verification.measure import Difference, difference, is_same_step, most_noise, tolerance
from lightning_accum.verification.report import Break
from lightning_accum.verification.step import Change, StepRunner
from lightning_accum.verification.watch import Step

_SMALLEST_DIFFERENCE_OF_BUFFERS = 1e-6
"""Running averages may be kept in float32 whatever the precision."""


class Diagnosis:
    """Runs the full batch and its window, and whatever else shows how they differ."""

    def __init__(self, runner: StepRunner, comparison: Comparison) -> None:
        self._runner, self._comparison = runner, comparison
        self.change = Change()
        """What was taken out of the module in all steps, so that they can be compared."""
        self._order: float | None = None
        self.breaks: list[Break] = []
        self.notes: list[str] = []
        self.full = runner.full(comparison.full)
        if not self.full.is_finite:
            raise MisconfiguredError("The gradient of the full batch is not finite: there is nothing to compare. Pass other data.")
        if not any(bool(gradient.any()) for gradient in self.full.gradients.values()):
            raise MisconfiguredError(
                "The full batch has no gradient: training_step returned no loss, or a loss that changes with none of the parameters"
                " that the Trainer's optimizers step on. Pass other data, or look for optimizers that step elsewhere."
            )
        self.tolerance = tolerance(self.full.dtype, self._measure_noise())
        self.gradient = self.update = Difference(math.nan, {})
        self.window: Step | None = None
        """None where it could not be run, since its weight cannot be read."""
        self._refusal: DoesNotAddUpError | None = None
        try:
            self.window = self._as_in_training()
        except UnreadableLossError as error:
            found = breaks.named("losses that do not add up", math.nan, error)
            self.breaks.append(breaks.mended_by_row_wise(found, self._names_that_mend(self.full)))
            return
        self.gradient = Difference.between(self.window.gradients, self.full.gradients)
        self.update = Difference.between(self.window.way, self.full.way)
        if self.gradient.largest <= self.tolerance:
            self._check_step(self.window)
        if not self.breaks and (self._refusal is not None or self.gradient.largest > self.tolerance):
            self._find_breaks(self.window)  # beside random numbers nothing else can be found out
        self._check_buffers(self.window)

    @property
    def is_equal(self) -> bool:
        """Whether the window's step is the full batch's."""
        return self.window is not None and not self.breaks and self.gradient.largest <= self.tolerance

    def _as_in_training(self) -> Step:
        """The step of the window, after the check of its first batch; what that refuses is run without it, to be measured."""
        try:
            return self._runner.accumulated(self._comparison.batches, self.change)
        except DoesNotAddUpError as error:
            self._refusal = error
            self._runner = replace(self._runner, policy={**self._runner.policy, "check": False})
            return self._runner.accumulated(self._comparison.batches, self.change)

    # --- what a run of the same batch changes -------------------------------------------------------------------------

    def _measure_noise(self) -> float:
        """How far the full batch is from itself, in another order. What is more than rounding is looked into."""
        comparison, most = self._comparison, most_noise(self.full.dtype)
        backwards = comparison.reversed()
        again = comparison.full if backwards is None else backwards
        noise = self._difference(again, seed=1)
        if noise <= most:
            return noise
        same = self._difference(comparison.full, seed=0)
        if same > most:
            self.breaks.append(breaks.named("non-deterministic operations", same))
            return same
        seeded = self._difference(comparison.full, seed=1)
        if seeded > most:  # have it draw the same random numbers for every row
            drawn, self.change = self.full, Change(evens_noise=True)
            self.full = self._runner.full(comparison.full, self.change)
            same = self._difference(comparison.full, seed=1)
            if same > most:
                self.full, self.change = drawn, Change()
                self.breaks.append(breaks.named("random numbers", seeded))
                return same
            self.notes.append(
                f"Random numbers ({', '.join(sorted(self.full.noise))}) were made the same for every row, to compare batches of"
                f" different sizes: two seeds alone differ by {seeded:.1e}. In training a window is equal to its batch in"
                " distribution."
            )
            noise = self._difference(again, seed=1)
            if noise <= most:
                return noise
        self._order = noise
        self.notes.append(f"The gradient of the full batch depends on the order of its rows: in reverse it is {noise:.1e} away.")
        return same

    def _difference(self, batch: Any, seed: int) -> float:
        return _difference(self._runner.full(batch, self.change, seed), self.full)

    # --- what breaks equality -----------------------------------------------------------------------------------------

    def _find_breaks(self, window: Step) -> None:
        """Take out one thing after the other, until the rest is equal."""
        full, batches, left = self.full, list(self._comparison.batches), self.gradient.largest
        if not window.is_finite:
            self.breaks.append(breaks.named("non-finite gradient", math.nan))
            return
        if layers := self.full.batch_norm:
            change = replace(self.change, freezes_batch_norm=True)
            frozen, frozen_window = self._runner.full(self._comparison.full, change), self._runner.accumulated(batches, change)
            without = _difference(frozen_window, frozen)
            if without < left:
                self.breaks.append(breaks.named("BatchNorm", left, listed(layers), without=without))
                self.change, full, window, left = change, frozen, frozen_window, without
        if left > self.tolerance and len(batches) > 1:
            change = replace(self.change, fixes_batch_idx=True)
            fixed = self._runner.accumulated(batches, change)
            if _difference(fixed, window) > self.tolerance:
                without = _difference(fixed, full)
                self.breaks.append(breaks.named("batch_idx", left, without=without))
                self.change, window, left = change, fixed, without
        padded = self._comparison.padded()
        if left > self.tolerance and padded is not None:
            even = self._runner.accumulated(padded, self.change)
            if _difference(even, window) > self.tolerance:
                without = _difference(even, full)
                self.breaks.append(breaks.named("padding", left, self._comparison.padding, without=without))
                batches, window, left = padded, even, without
        if self._refusal is not None:
            found = breaks.named("losses that do not add up", left, self._refusal)
            self.breaks.append(breaks.mended_by_row_wise(found, self._names_that_mend(full)))
        elif left > self.tolerance:
            self.breaks.append(self._look_into_the_rest(full, batches, left))

    def _look_into_the_rest(self, full: Step, batches: Sequence[Any], left: float) -> Break:
        """What cannot be taken out, and the check has not seen."""
        # the mean of the same batch twice is the batch's own: what differs was carried from one to the other
        carried = _difference(self._runner.twice(self._comparison.full, replace(self.change, fixes_batch_idx=True)), full)
        if carried > self.tolerance:
            return breaks.named("state", carried)
        with suppress(AccumulationError):
            read = replace(self._runner, policy={**self._runner.policy, "weight": "auto"})
            without = _difference(read.accumulated(batches, self.change), full)
            if without <= self.tolerance:
                return breaks.named("weight", left, without=without)
        of_order = "" if self._order is None else " It depends on the order of the rows, too."
        return breaks.named("rows that depend on each other", left, of_order)

    def _names_that_mend(self, full: Step) -> list[str]:
        """The submodules, at most two levels deep, with which, run row-wise, the module takes the step of the full batch."""
        asked_for = self._runner.policy.get("micro_batch")
        size = asked_for if isinstance(asked_for, int) else max(1, (self._comparison.rows or 2) // 2)
        names: list[str] = []
        for name, inner in self._runner.module.named_modules():
            is_inside_another = any(name.startswith(f"{outer}.") for outer in names)
            if name and name.count(".") < 2 and not is_inside_another and next(inner.parameters(), None) is not None:
                with suppress(Exception):  # whatever a submodule does on other rows
                    step = self._runner.row_wise(self._comparison.full, name, size, self.change)
                    if _difference(step, full) <= self.tolerance:
                        names.append(name)
        return names

    # --- what comes after the gradients -------------------------------------------------------------------------------

    def _check_step(self, window: Step) -> None:
        """Given the window's gradient, does the full batch's step end where the window's did?"""
        replay = self._runner.full(self._comparison.full, self.change, gradients=window.gradients)
        is_same = is_same_step(window.after, replay.after, replay.before)
        if not is_same and self.update.largest > self.tolerance:  # LBFGS takes more gradients than the one that is replayed
            self.breaks.append(breaks.named("optimizer step", self.update.largest))
        elif self.update.largest > self.tolerance:
            self.notes.append(
                "Updates differ by more than gradients, by what the optimizer makes of rounding in a gradient that is almost 0:"
                " given the window's gradient, the full batch's step ends in the same parameters."
            )
        if not any(bool(way.any()) for way in self.full.way.values()):
            self.notes.append("The step moved no parameter, as with a learning rate that begins at 0: gradients were compared.")

    def _check_buffers(self, window: Step) -> None:
        """What the steps after this one go by."""
        if any(found.name in ("BatchNorm", "state", "random numbers") for found in self.breaks):
            return
        most = max(self.tolerance, _SMALLEST_DIFFERENCE_OF_BUFFERS)
        differences = {name: difference(window.buffers.get(name), buffer) for name, buffer in self.full.buffers.items()}
        changed = {name: value for name, value in differences.items() if value > most}
        updated = [layer for layer in self.full.batch_norm if any(name.startswith(f"{layer}.") for name in changed)]
        if updated:
            self.breaks.append(breaks.named("BatchNorm", self.gradient.largest, listed(updated)))
        elif changed:
            self.breaks.append(breaks.named("buffers", self.gradient.largest, listed(list(changed)), max(changed.values())))


def _difference(step: Step, full: Step) -> float:
    return Difference.between(step.gradients, full.gradients).largest
