"""Whether a window equals its full batch, and what breaks that where it does not: one thing after the other is taken out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accum.denominator import UnreadableLossError
from lightning_accum.safeguards import batch_norm_layers
from lightning_accum.verification.data import Trial
from lightning_accum.verification.measure import Difference, is_same_step, minus, most_noise, tolerance, weights_that_fit
from lightning_accum.verification.report import Break
from lightning_accum.verification.step import Bench, Change, Step

_OF_SPLITTING = ("micro_batch", "split", "trim_padding", "batch_norm")


class Examination:
    """Runs the full batch and its window, and whatever else it takes to tell them apart.

    Args:
        bench: takes the steps.
        trial: what is compared.
    """

    def __init__(self, bench: Bench, trial: Trial) -> None:
        self._bench, self._trial = bench, trial
        self._change = Change()
        self.breaks: list[Break] = []
        self.notes: list[str] = []
        self.full = bench.full(trial.full)
        self.window: Step | None = None
        """None where it could not be run, since its weight cannot be read."""
        self.noise = self._measure_noise()
        self.tolerance = tolerance(self.full.dtype, self.noise)
        try:
            self.window = bench.accumulated(trial.batches, self._change)
        except UnreadableLossError as error:
            found, _, mend = str(error).partition(" Say what")
            self.breaks.append(Break("weight", found, math.nan, None, f"Say what{mend}"))
            return
        self.gradient = Difference.between(self.window.gradients, self.full.gradients)
        ways = minus(self.window.after, self.window.before), minus(self.full.after, self.full.before)
        self.update = Difference.between(*ways)
        if not self.gradient.largest <= self.tolerance:
            self._find_breaks(self.window)
        else:
            self._check_step(self.window)
        self._check_buffers(self.window)

    @property
    def is_equal(self) -> bool:
        """Whether the window's step is the full batch's."""
        return self.window is not None and not self.breaks and self.gradient.largest <= self.tolerance

    # --- what a run of the same batch changes -------------------------------------------------------------------------

    def _measure_noise(self) -> float:
        """How far apart the full batch is from itself. What is more than rounding is looked into, and becomes a break."""
        bench, trial, most = self._bench, self._trial, most_noise(self.full.dtype)
        backwards = trial.reversed()
        again = trial.full if backwards is None else backwards
        noise = self._apart(bench.full(again, seed=1))
        if noise <= most:
            return noise
        same = self._apart(bench.full(trial.full))
        if not same <= most:
            self.breaks.append(
                Break(
                    "non-deterministic operations",
                    "The full batch, run twice with the same random numbers, gives two gradients.",
                    same,
                    None,
                    "torch.use_deterministic_algorithms(True) replaces them where there is a replacement. Until then, nothing finer"
                    " than this can be told.",
                )
            )
            return same
        seeded = self._apart(bench.full(trial.full, seed=1))
        if not seeded <= most:
            return self._even_noise(seeded, again)
        self._note_order(noise)
        return same

    def _even_noise(self, seeded: float, again: Any) -> float:
        """The module draws random numbers: have it draw the same for every row."""
        bench, trial, most = self._bench, self._trial, most_noise(self.full.dtype)
        even = Change(evens_noise=True)
        full = bench.full(trial.full, even)
        left = _apart(bench.full(trial.full, even, seed=1), full)
        if not left <= most:
            self.breaks.append(
                Break(
                    "random numbers",
                    f"The full batch itself gives another gradient with other random numbers, {seeded:.1e} away, and what draws them"
                    " cannot be made the same for all batch sizes (a permutation of the batch, Python's or NumPy's generator).",
                    seeded,
                    left,
                    "No argument does: micro-batches draw other numbers than their batch, and are equal to it in distribution only."
                    " Verify a copy of the module that does not draw them.",
                )
            )
            return left
        self._change, self.full = even, full
        self.notes.append(
            f"Random numbers ({', '.join(sorted(full.noise))}) were made the same for every row, to compare batches of different"
            f" sizes: two seeds alone are {seeded:.1e} apart. In training a window is equal to its batch in distribution."
        )
        noise = _apart(bench.full(again, even, seed=1), full)
        if noise <= most:
            return noise
        self._note_order(noise)
        return left

    def _note_order(self, noise: float) -> None:
        self._order = noise
        self.notes.append(f"The gradient of the full batch depends on the order of its rows: in reverse, it is {noise:.1e} away.")

    _order: float | None = None

    def _apart(self, step: Step) -> float:
        return _apart(step, self.full)

    # --- what breaks equality -----------------------------------------------------------------------------------------

    def _find_breaks(self, window: Step) -> None:
        if self.breaks:  # random: whatever else there is cannot be told from it
            return
        left = self.gradient.largest
        full, batches = self.full, list(self._trial.batches)
        layers = batch_norm_layers(self._bench.module)
        if layers:
            change = replace(self._change, freezes_batch_norm=True)
            frozen, frozen_window = self._bench.full(self._trial.full, change), self._bench.accumulated(batches, change)
            without = _apart(frozen_window, frozen)
            if without < left:
                self._break_by_batch_norm(layers, left, without)
                self._change, full, window, left = change, frozen, frozen_window, without
        if not left <= self.tolerance and len(batches) > 1:
            change = replace(self._change, fixes_batch_idx=True)
            fixed = self._bench.accumulated(batches, change)
            if not _apart(fixed, window) <= self.tolerance:
                without = _apart(fixed, full)
                self._break_by_batch_idx(left, without)
                self._change, window, left = change, fixed, without
        padded = self._trial.padded() if self._trial.padding else None
        if not left <= self.tolerance and padded is not None:
            even = self._bench.accumulated(padded, self._change)
            if not _apart(even, window) <= self.tolerance:
                without = _apart(even, full)
                self._break_by_padding(left, without)
                batches, window, left = padded, even, without
        if not left <= self.tolerance:
            self._look_into_the_rest(full, batches, left, [*window.warnings, *(self.window or window).warnings])

    def _look_into_the_rest(self, full: Step, batches: Sequence[Any], left: float, warnings: Sequence[str]) -> None:
        if full.is_contrastive or any("contrastive" in warning for warning in warnings):
            self._add(
                "contrastive loss",
                "It is a cross entropy over logits that are square in the batch, with labels 0..B-1: every sample is a negative of all"
                " others, and a micro-batch has fewer of them.",
                left,
                None,
                "No argument does. Run the batch as one (no micro_batch=, window=1), or keep the embeddings of the whole batch and"
                " backpropagate in pieces (GradCache, arXiv 2101.06983).",
            )
            return
        state = self._state_carried(full)
        if state is not None:
            self._add(
                "state",
                "The same batch twice gives another gradient than once: the module carries something from one training_step to the"
                " next (a hidden state, a counter, a buffer that each forward updates).",
                state,
                None,
                "No argument does. Reset it in training_step, or update it once in on_train_batch_start.",
            )
        nearest, fits, used = self._weights_that_fit(full, batches)
        if nearest <= max(10 * self.tolerance, 1e-9):
            self._break_by_weight(left, nearest, fits, used)
        elif any("terms" in warning for warning in warnings):
            about = next(warning for warning in warnings if "terms" in warning)
            self._add("terms of the loss", about, left, nearest, "Return one mean, or terms that are means over the same count.")
        elif state is None:
            order = "" if self._order is None else " It depends on the order of its rows, too."
            self._add(
                "rows that depend on each other",
                f"No weights of the micro-batches give the gradient of the full batch; the nearest come to {nearest:.1e}."
                f" The loss or the module computes something over the whole batch that its parts do not add up to.{order}",
                left,
                None,
                "No argument does. Compute it within each row (LayerNorm, a loss of one row), or run the batch as one.",
            )

    def _state_carried(self, full: Step) -> float | None:
        """A window of the same batch twice has the batch's own mean: what differs was carried from one to the other."""
        policy = {name: value for name, value in self._bench.policy.items() if name not in _OF_SPLITTING}
        change = replace(self._change, fixes_batch_idx=True)
        twice = replace(self._bench, policy=policy).accumulated([self._trial.full] * 2, change)
        apart = _apart(twice, full)
        return None if apart <= self.tolerance else apart

    def _weights_that_fit(self, full: Step, batches: Sequence[Any]) -> tuple[float, list[float], list[float | None]]:
        """How near any weights come to the full batch, these weights, and those that were used."""
        window = self._bench.accumulated(batches, self._change, keeps_pieces=True)
        pieces = torch.stack([_flat(piece) for piece in window.pieces], 1)
        factors, nearest = weights_that_fit(pieces, _flat(full.gradients))
        used = [1.0 if weight is None else weight for weight in window.weights]
        fits = [float(factor) * weight for factor, weight in zip(factors, used, strict=True)]
        total = sum(used) / sum(fits) if sum(fits) else 1.0
        return nearest, [weight * total for weight in fits], window.weights

    # --- in words -----------------------------------------------------------------------------------------------------

    def _add(self, name: str, found: str, difference: float, without: float | None, mend: str) -> None:
        self.breaks.append(Break(name, found, difference, without, mend))

    def _break_by_batch_norm(self, layers: Sequence[str], difference: float, without: float) -> None:
        exact = 'batch_norm="exact"' if self._bench.policy.get("micro_batch") else 'micro_batch=..., batch_norm="exact"'
        self._add(
            "BatchNorm",
            f"{_listed(layers)} normalise{'s' * (len(layers) == 1)} each micro-batch by its own statistics.",
            difference,
            without,
            f"GradientAccumulation({exact}) takes those of the whole batch; or use GroupNorm, or layers in evaluation mode.",
        )

    def _break_by_batch_idx(self, difference: float, without: float) -> None:
        self._add(
            "batch_idx",
            "training_step reads batch_idx, which is another for every micro-batch of a window, and 0 for the full batch.",
            difference,
            without,
            "GradientAccumulation(micro_batch=...) splits each loader batch into micro-batches of the same batch_idx; or read"
            " self.global_step, which counts optimizer steps.",
        )

    def _break_by_padding(self, difference: float, without: float) -> None:
        self._add(
            "padding",
            f"The loss depends on padding: {self._trial.padding}, and with that padding the micro-batches have other gradients.",
            difference,
            without,
            "Mask the padding in the module and in its loss; or let the loader pad all batches to one length.",
        )

    def _break_by_weight(self, difference: float, nearest: float, fits: Sequence[float], used: Sequence[float | None]) -> None:
        given = self._bench.policy.get("weight", "auto")
        right, wrong = ", ".join(f"{weight:.6g}" for weight in fits[:8]), ", ".join(_weight(weight) for weight in used[:8])
        mend = (
            'weight="auto" reads the right ones from the loss, if it is a mean.'
            if given != "auto"
            else "weight=<a callable of the batch> that counts what the loss is really divided by (TokenCount(...), SampleCount())."
        )
        self._add(
            "weight",
            f"The micro-batches weigh {wrong}; with {right} they would give the gradient of the full batch.",
            difference,
            nearest,
            mend,
        )

    def _check_step(self, window: Step) -> None:
        """Given the window's gradient, does the full batch's step end where the window's did?"""
        replay = self._bench.full(self._trial.full, self._change, gradients=window.gradients)
        if not is_same_step(window.after, replay.after, replay.before):
            self._add(
                "optimizer step",
                "The gradients are equal, but the same gradient moves the parameters elsewhere: the learning rate, the optimizer or"
                " a hook around the step differs.",
                self.update.largest,
                None,
                "Compare what configure_optimizers and on_before_optimizer_step do with a window; they may count loader batches.",
            )
        elif not self.update.largest <= self.tolerance:
            self.notes.append(
                "Updates are farther apart than gradients, by what the optimizer makes of rounding in a gradient that is almost 0:"
                " given the window's gradient, the full batch's step ends in the same parameters."
            )
        if all(not bool(way.any()) for way in minus(self.full.after, self.full.before).values()):
            self.notes.append("The step moved no parameter, as with a learning rate that begins at 0: only gradients were compared.")

    def _check_buffers(self, window: Step) -> None:
        """What the steps after this one go by."""
        if any(found.name in ("BatchNorm", "state", "random numbers") for found in self.breaks):
            return
        apart = {name: _buffer_apart(window.buffers.get(name), buffer) for name, buffer in self.full.buffers.items()}
        apart = {name: value for name, value in apart.items() if not value <= max(self.tolerance, 1e-6)}
        if not apart:
            return
        layers = [name for name, layer in self._bench.module.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        of_batch_norm = [layer for layer in layers if any(name.startswith(f"{layer}.") for name in apart)]
        if of_batch_norm:
            self._break_by_batch_norm(of_batch_norm, self.gradient.largest, None if not self.breaks else math.nan)  # type: ignore[arg-type]
            return
        self._add(
            "buffers",
            f"After the step {_listed(list(apart))} {'is' if len(apart) == 1 else 'are'} not as after the full batch (up to"
            f" {max(apart.values()):.1e} away): every forward updates what the full batch updates once.",
            self.gradient.largest,
            None,
            "No argument does. Update it once a step, in on_train_batch_start or on_before_zero_grad.",
        )


def _apart(step: Step, full: Step) -> float:
    return Difference.between(step.gradients, full.gradients).largest


def _flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.to(torch.float64).flatten() for gradient in gradients.values()])


def _buffer_apart(found: Tensor | None, expected: Tensor) -> float:
    if found is None or found.shape != expected.shape:
        return math.inf
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else 1.0
    return 0.0 if torch.equal(found, expected) else Difference.between({"": found}, {"": expected}).overall


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _weight(weight: float | None) -> str:
    return "nothing (a sum)" if weight is None else f"{weight:.6g}"


Words = Callable[[Examination], str]
