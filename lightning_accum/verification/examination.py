"""Compares a window with its full batch, and finds the causes of a difference by removing them one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_accum.errors import AccumulationError, DoesNotAddUpError, UnsplittableBatchError
from lightning_accum.splitting.rows import Layout
from lightning_accum.trainer.from_lightning import MisconfiguredError
from lightning_accum.user_warnings import listed
from lightning_accum.verification.step import Change, Step, StepRunner, Tensors

_SMALLEST_DIFFERENCE_OF_BUFFERS = 1e-6  # running averages may be in float32 in any precision
_SMALLEST_SHARE = 1e-2
"""Relative to the whole gradient: smaller gradients are compared with this size.

The gradient of a key's bias in attention is 0 up to rounding, so its relative error would be 1."""

_DOES_NOT_ADD_UP = "losses that do not add up"
_MENDS = {
    "random numbers": "Verify a copy of the module without random numbers, with torch.use_deterministic_algorithms(True).",
    "BatchNorm": 'GradientAccumulation(micro_batch="offload") runs a loader batch whole: have the loader yield your'
    " effective batch. Or use GroupNorm, or layers in evaluation mode.",
    "batch_idx": "Split each loader batch with micro_batch=, or read self.global_step, which counts optimizer steps.",
    "padding": "Mask the padding in the module and in its loss; or let the loader pad all batches to one length.",
    "state": "No argument helps. Reset it in training_step, or update it once a step, in on_train_batch_start.",
    "weight": 'weight="auto", which reads the denominators from the losses: the gradients are then equal.',
    "gradient": 'GradientAccumulation(micro_batch="offload"), which runs the batch whole. Look for a count that can be 0 in a '
    "micro-batch, and for operations over all rows of a batch.",
    "optimizer step": "Look for what counts loader batches in configure_optimizers and the hooks around the step.",
}
"""The fix for each break, by name."""


class Break(NamedTuple):
    """A cause of a difference, and the argument or change to the module that fixes it.

    ``difference`` is the relative error of the gradients with it, ``without`` the error without it; None if it could not be
    removed.
    """

    name: str
    found: str
    difference: float
    without: float | None
    mend: str


class Comparison:
    """The full batch, and the loader batches of the same window.

    ``padding`` says how they were padded to be joined; ``layout`` is None if the rows of the full batch are unknown.
    """

    def __init__(self, full: Any, batches: Sequence[Any], padding: str = "") -> None:
        self.full, self.batches, self.padding = full, batches, padding
        self.layout: Layout | None = None
        with suppress(UnsplittableBatchError):
            self.layout = Layout(full)
        self.rows = None if self.layout is None else self.layout.size

    def reversed(self) -> Any:
        """The full batch in reverse order, which has the same mean up to rounding."""
        return self.full if self.layout is None else self.layout.take([*range(self.layout.size)][::-1])

    def padded(self) -> list[Any]:
        """The loader batches padded as in the full batch; empty without padding."""
        if self.layout is None or not self.padding:
            return []
        ends = [0, *accumulate(Layout(batch, self.layout.kinds).size for batch in self.batches)]
        return [self.layout.take([*range(*both)]) for both in pairwise(ends)]


class Diagnosis:
    """Runs the full batch and its window, and further steps that show why they differ."""

    def __init__(self, runner: StepRunner, comparison: Comparison) -> None:
        self._runner, self._comparison = runner, comparison
        self.change = Change()  # removed in all steps, so that they can be compared
        self.breaks: list[Break] = []
        self.notes: list[str] = []
        self.full = runner.full(comparison.full)
        if not all(bool(gradient.isfinite().all()) for gradient in self.full.gradient.values()):
            raise MisconfiguredError("The gradient of the full batch is not finite, so nothing can be compared. Pass other data.")
        if not any(bool(gradient.any()) for gradient in self.full.gradient.values()):
            raise MisconfiguredError(
                "The full batch has no gradient: training_step returned no loss, or one of no trained parameter."
            )
        self.tolerance = tolerance(self.full.dtype, self._measure_noise())
        refusal: Exception | None = None
        try:
            self.window = runner.accumulated(comparison.batches, self.change, self.full.gradients)
        except DoesNotAddUpError as error:  # the check refuses it: run without the check, to measure it
            refusal = error
            self._runner = replace(runner, policy={**runner.policy, "check": False})
            self.window = self._runner.accumulated(comparison.batches, self.change, self.full.gradients)
        self.loss, self.gradient = self.window.loss, Difference.between(self.window.gradient, self.full.gradient)
        if self.breaks:  # with random numbers, no other cause can be found
            return
        if refusal is not None or self.gradient.largest > self.tolerance:
            self._find_breaks(refusal)
        else:
            self._compare_what_follows()

    def _add(self, name: str, found: str, size: float, without: float | None = None, mend: str | None = None) -> None:
        self.breaks.append(Break(name, found, size, without, mend or _MENDS[name]))

    def _measure_noise(self) -> float:
        """The difference between two runs of the full batch. If it exceeds rounding, the cause is examined."""
        most, noise = most_noise(self.full.dtype), self._from_itself(self._comparison.reversed())
        if noise > most:
            self.change = Change(evens_noise=True)
            self.full = self._runner.full(self._comparison.full, self.change)
            noise = self._from_itself(self._comparison.reversed())
        of_itself = noise if noise <= most else self._from_itself(self._comparison.full)
        if of_itself > most:
            found = "The full batch has a different gradient each time: an operation is not deterministic, or draws a permutation."
            self._add("random numbers", found, of_itself)
        elif self.full.noise:
            found = f"Random numbers ({', '.join(sorted(self.full.noise))}) were made the same for every row"
            self.notes.append(f"{found}: in training a window equals its batch only in distribution.")
        return of_itself

    def _from_itself(self, batch: Any) -> float:
        """The difference between the batch, with another seed, and the full batch."""
        return _difference(self._runner.full(batch, self.change, seed=1), self.full)

    def differs_by(self, runner: StepRunner) -> float:
        """The relative difference that another precision makes to the full batch's gradient; 0 for other parameters."""
        other = runner.full(self._comparison.full, self.change)
        return 0.0 if differing(other.before, self.full.before, 1e-2) else _difference(other, self.full)

    # --- what breaks equality -----------------------------------------------------------------------------------------

    def _find_breaks(self, refusal: Exception | None) -> None:
        """Remove possible causes one by one, until the steps are equal."""
        full, batches, left = self.full, self._comparison.batches, self.gradient.largest
        for name, found, new_change, new_batches in self._suspects(batches):
            if left <= self.tolerance:
                break
            new_change = Change(*map(max, self.change, new_change))
            new_full = full if new_change == self.change else self._runner.full(self._comparison.full, new_change)
            without = _difference(self._runner.accumulated(new_batches, new_change), new_full)
            if without < left - self.tolerance:
                self._add(name, found, left, without)
                self.change, full, left, batches = new_change, new_full, without, new_batches
        if refusal is not None:
            self._add(_DOES_NOT_ADD_UP, "The check of the first batch found this.", left, mend=str(refusal))
        elif left > self.tolerance:
            self._look_into_the_rest(full, batches, left)

    def _suspects(self, batches: Sequence[Any]) -> Iterator[tuple[str, str, Change, Sequence[Any]]]:
        """Causes that can be removed: name, message, change of the module, loader batches."""
        if layers := self.full.batch_norm:
            found = f"Each micro-batch is normalised by its own statistics, in {listed(layers)}."
            yield "BatchNorm", found, Change(freezes_batch_norm=True), batches
        if len(batches) > 1:
            found = "training_step reads batch_idx, which differs for each micro-batch of a window, and is 0 for the full batch."
            yield "batch_idx", found, Change(fixes_batch_idx=True), batches
        if padded := self._comparison.padded():
            found = f"The loss depends on padding: {self._comparison.padding}, and with that padding the micro-batches have"
            yield "padding", f"{found} other gradients.", Change(), padded

    def _look_into_the_rest(self, full: Step, batches: Sequence[Any], left: float) -> None:
        """Find causes that cannot be removed, and that the check has not seen."""
        # the mean of the same batch twice equals the batch, unless the first run changes the second
        twice = self._runner.full(self._comparison.full, self.change._replace(fixes_batch_idx=True), times=2)
        if (carried := _difference(twice, full)) > self.tolerance:
            found = "The same batch has a different gradient the second time: the module keeps state for the next training_step"
            self._add("state", f"{found} (a hidden state, a counter, a buffer that each forward updates).", carried)
            return
        with suppress(AccumulationError):
            without = _difference(self._runner.accumulated(batches, self.change, weight="auto"), full)
            if without <= self.tolerance:
                found = "The micro-batches are not weighted by the denominators of their losses."
                self._add("weight", found, left, without)
                return
        self._add("gradient", "The gradients of the micro-batches and of the full batch differ.", left)

    def _compare_what_follows(self) -> None:
        """Compare the steps after equal gradients, and the buffers, which later steps use."""
        if moved_differently(self.window, self.full):
            found = "The gradients are equal, but the learning rate, the optimizer or a hook around the step differs."
            self._add("optimizer step", found, self.gradient.largest)
        if all(torch.equal(after, self.full.before[name]) for name, after in self.full.after.items()):
            self.notes.append("The step changed no parameter (its learning rate may be 0), so gradients were compared instead.")
        most = max(self.tolerance, _SMALLEST_DIFFERENCE_OF_BUFFERS)
        if changed := differing(self.window.buffers, self.full.buffers, most):
            found = f"After the step {listed(list(changed))} differ by {max(changed.values()):.1e}"
            found += " from their values after the full batch: each forward updates them once."
            self._add("state", found, self.gradient.largest)


def _difference(step: Step, full: Step) -> float:
    return Difference.between(step.gradient, full.gradient).largest


# --- how far two steps are apart --------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """The difference of two sets of tensors relative to the second: in total, and by name."""

    overall: float
    by_name: Mapping[str, float]

    @property
    def largest(self) -> float:
        """The largest of all; infinite if any is NaN."""
        return max(math.inf if math.isnan(value) else value for value in (self.overall, *self.by_name.values()))

    @classmethod
    def between(cls, found: Mapping[str, Tensor | None], expected: Tensors) -> Difference:
        """Measure. A missing tensor, or one of another shape, differs infinitely; a tiny one is compared with a share of all."""
        distances = {name: _distance(found.get(name), tensor) for name, tensor in expected.items()}
        sizes = {name: _norm(tensor) for name, tensor in expected.items()}
        size = math.hypot(*sizes.values())
        by_name = {name: _ratio(distances[name], max(own, _SMALLEST_SHARE * size)) for name, own in sizes.items()}
        return cls(_ratio(math.hypot(*distances.values()), size), by_name)


def differing(found: Tensors, expected: Tensors, most: float) -> dict[str, float]:
    """The tensors that differ by more than ``most``, each relative to itself, and by how much."""
    sizes = {name: Difference.between(found, {name: tensor}).largest for name, tensor in expected.items()}
    return {name: size for name, size in sizes.items() if size > most}


def moved_differently(step: Step, full: Step) -> list[str]:
    """The parameters that differ after the same gradient, beyond the optimizer's rounding."""

    def rounding(name: str, tensor: Tensor) -> float:
        """Rounding errors of the step, and of the parameter itself."""
        eps = torch.finfo(tensor.dtype).eps
        return 1024 * eps * _distance(tensor, full.before[name]) + 4 * eps * _norm(tensor)

    floats = {name: tensor for name, tensor in full.after.items() if tensor.is_floating_point()}
    return [name for name, tensor in floats.items() if not _distance(step.after[name], tensor) <= rounding(name, tensor)]


def tolerance(dtype: torch.dtype, noise: float) -> float:
    """The allowed difference of equal gradients: sixteen rounding errors, or four times the effect of reversing the rows."""
    least = 1e-12 if dtype == torch.float64 else 16 * torch.finfo(dtype).eps
    return max(least, min(4 * noise, most_noise(dtype)))


def most_noise(dtype: torch.dtype) -> float:
    """A larger difference between two runs of one batch is not rounding."""
    return min((2**16 if dtype == torch.float64 else 2**12) * torch.finfo(dtype).eps, 0.25)


def _distance(found: Tensor | None, expected: Tensor) -> float:
    if found is None or found.shape != expected.shape:
        return math.inf
    return 0.0 if torch.equal(found, expected) else _norm(found.double() - expected.double())


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.inf if part else 0.0
