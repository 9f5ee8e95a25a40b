"""The calls of a hand-written loop: in each micro-batch one backward and one step, in this order."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from lightning_accum.errors import ArgumentError, UsageError, WrongTypeError
from lightning_accum.fabric.passes import Passes
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.parameter_changes import KeptGradients
from lightning_accum.sync.base import NOTHING_AROUND
from lightning_accum.undo import replacing
from lightning_accum.user_warnings import rank_zero_warn
from lightning_accum.weighing.nodes import number_of


class Loop(Passes):
    """Begins and ends the micro-batches of a loop, and refuses calls that are missing or out of order."""

    _micro_batch: MicroBatch | None = None  # the last one yielded; None outside of the loop
    _pass: Generator[Any, None, None] | None = None
    _around: AbstractContextManager[Any] = NOTHING_AROUND  # the context of forward and backward
    _kept: KeptGradients
    _is_between_windows = _has_warned = False
    _ends_window = _is_backward_done = _is_step_done = _has_failed = False
    _may_be_divided = True
    gradient_norm: Tensor | None = None
    """The norm of the last window's gradient before clipping, if ``step`` was called with ``clip_norm``."""

    def __call__(self, loader: Iterable[Any], *, skip: int = 0, is_last: bool = False) -> Iterator[Any]:
        """Iterate over the data once, and yield its micro-batches. Call it on all ranks: they end together, with the longest
        loader.

        A rank that runs out of data first gets its last batch again, with weight 0.

        Args:
            loader: yields loader batches.
            skip: how many loader batches to draw and skip; after a checkpoint, its ``loader_batches``.
            is_last: with ``tail="carry"``, whether this is the last pass, whose unfinished window takes its step.

        Raises:
            RuntimeError: the loop did not call ``backward``, or did not call ``step`` at the end of a window.
        """
        if self._pass is not None:
            self._pass.close()
        self._refuse_unfinished()
        if not self._accumulation.is_between_loader_batches:
            raise UsageError("The last pass ended inside a loader batch. Call accumulator.discard() to begin a new window.")
        self._pass = self._run(loader, skip, is_last)
        return self._pass

    def _run(self, loader: Iterable[Any], skip: int, is_last: bool) -> Generator[Any, None, None]:
        try:
            with self._messages:
                for micro_batch, ends_window in self._micro_batches(loader, skip, is_last):
                    self._begin(micro_batch, ends_window)
                    yield micro_batch.batch
                    if not self._is_backward_done:
                        raise UsageError("Call accumulator.backward(loss), or (None) without a loss, once in every micro-batch.")
                    self._refuse_unfinished()
                    self._micro_batch = None
            if self._accumulation.boundary.is_dropped_by_the_end(self._seen):
                self.discard()
        finally:
            self._leave()
            self._micro_batch = None

    def _begin(self, micro_batch: MicroBatch, ends_window: bool) -> None:
        self._micro_batch, self._ends_window = micro_batch, ends_window
        self._is_backward_done = self._is_step_done = False
        if micro_batch.is_shadow_batch:
            self._session.zero_grad(self._training)  # before a snapshot, so that its changes are kept
        self._around = self._session.begin_micro_batch(micro_batch)
        self._around.__enter__()

    def _leave(self) -> None:
        """Leave the context of forward and backward, if it was not left yet."""
        around, self._around = self._around, NOTHING_AROUND
        around.__exit__(None, None, None)

    def _inside(self, call: str) -> MicroBatch:
        if self._micro_batch is None:
            raise UsageError(f"{call} is called outside the loop: for batch in accumulator(loader): ...")
        return self._micro_batch

    # --- backward and step ------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor | None, retain_graph: bool = False) -> None:
        """The backward of a micro-batch: in place of ``loss.backward()`` or ``fabric.backward(loss)``, once in each.

        Args:
            loss: the loss of the micro-batch, not divided by anything; None if it has no loss, which gives it weight 0.
            retain_graph: keep the graph of the loss, for ``torch.autograd.grad`` after it.

        Raises:
            RuntimeError: it is called outside of the loop or twice, or other code has changed the accumulated gradients.
        """
        micro_batch = self._inside("backward")
        self._refuse_unfinished()
        if self._is_backward_done:
            raise UsageError("backward is called twice in a micro-batch. Call accumulator.backward(loss_a + loss_b).")
        self._refuse_changes()
        if loss is None:
            self._training.sync.forward_without_batch()
        elif not isinstance(loss, Tensor):
            raise WrongTypeError(f"backward takes the loss of a micro-batch, a tensor, or None; found {type(loss).__name__}")
        elif self._may_be_divided:
            self._may_be_divided = False
            _warn_of_factors(loss, self._accumulation.boundary.size)
        try:
            with replacing(self._training, retains_graph=True) if retain_graph else NOTHING_AROUND:
                self._session.end_micro_batch(self._session.add(self._training, loss, micro_batch))
        except BaseException as error:
            self._messages.adapt(error)
            self._has_failed = True
            with suppress(Exception):  # it would hide the first error
                self._leave()
            raise
        self._is_backward_done = True
        self._leave()
        self._keep_gradients()
        if micro_batch.ends_loader_batch:
            self._seen, self.loader_batches = self._seen + 1, self.loader_batches + 1
            self._accumulation.end_loader_batch(self._seen)
            self._ends_window = self._ends_window or (self._accumulation.policy.ends_by_tokens and self._accumulation.is_full())

    def step(self, clip_norm: float | None = None, clip_value: float | None = None) -> bool:
        """At the end of a window normalise its gradients, clip them, step the optimizer and clear them; inside a window do nothing.

        Call it after every ``backward``, on all ranks. Step learning-rate schedulers if it returns True.

        Args:
            clip_norm: the norm to clip to; ``math.inf`` measures it.
            clip_value: the value to clip to.

        Returns:
            Whether the optimizer has stepped. It does not inside a window, for a window without weight, or if a GradScaler found
                non-finite gradients.

        Raises:
            RuntimeError: it is called outside of the loop, before ``backward``, or again.
            ValueError: the losses of the window cannot be combined; the message names the reason.
        """
        if clip_norm is not None and clip_value is not None:
            raise ArgumentError("step(clip_norm=..., clip_value=...): give one of them")
        if (limit := clip_value if clip_norm is None else clip_norm) is not None and not limit > 0:
            name = "clip_value" if clip_norm is None else "clip_norm"
            raise ArgumentError(f"step({name}={limit!r}): expected a number above 0; {math.inf} measures and does not clip")
        micro_batch = self._inside("step")
        if not self._is_backward_done:
            self._refuse_unfinished()
            raise UsageError("step is called before accumulator.backward(loss); without a loss call accumulator.backward(None)")
        if self._is_step_done:
            raise UsageError("step is called twice in a micro-batch")
        self._is_step_done = True
        accumulation = self._accumulation
        if not self._ends_window:
            return False
        with self._messages:
            self._refuse_changes()
            self._has_failed = True  # if an error ends the next line
            self._session.end_window(self._seen, micro_batch.is_boundary)
            self._has_failed = False
        has_stepped, self.gradient_norm = False, None
        if accumulation.closed is None or not accumulation.closed.is_empty:
            self.gradient_norm = None if limit is None else self._training.clip(clip_norm, clip_value)
            has_stepped = self._training.step()
        accumulation.after_optimizer_step(has_stepped)
        self._training.zero_grad()
        self._keep_gradients(is_between_windows=True)
        return has_stepped

    def discard(self) -> None:
        """Drop the gradients of the unfinished window. Call it on all ranks."""
        self._accumulation.discard(self._seen)
        self._training.sync.drop_accumulated()
        self._training.zero_grad()
        self._has_failed = False
        self._kept.forget()

    @property
    def is_shadow_batch(self) -> bool:
        """Whether the batch is repeated only because other ranks have more. It has weight 0: leave it out of metrics."""
        return self._micro_batch is not None and self._micro_batch.is_shadow_batch

    # --- what is refused --------------------------------------------------------------------------------------------

    def _refuse_unfinished(self) -> None:
        """Raise an error if this was replaced, after a backward or window that failed, and after one that was not stepped."""
        if self._training.is_replaced:
            raise UsageError("A later Accumulator of the same model has replaced this one. Use that one.")
        if self._has_failed:
            raise UsageError("This window has failed. Call accumulator.discard(), or resume from a checkpoint.")
        if self._is_backward_done and self._ends_window and not self._is_step_done:
            raise UsageError("The window has ended: call accumulator.step() after every accumulator.backward(loss).")

    def _refuse_step(self) -> None:
        if self._micro_batch is not None:
            raise UsageError("Leave optimizer.step() out: accumulator.step() calls it at the end of a window.")

    def _keep_gradients(self, is_between_windows: bool = False) -> None:
        """Save the gradients and their versions, to detect changes by other code."""
        if is_between_windows or not self._kept.parameters:
            are_in_grad = self._accumulation.sums is None and not self._training.sync.is_waited_for_in_forward
            self._kept = KeptGradients([("", own) for own in self._training.parameters() if own.requires_grad and are_in_grad])
        self._kept.keep()
        self._is_between_windows = is_between_windows

    def _refuse_changes(self) -> None:
        """Refuse gradients that were cleared or changed inside a window; warn of new gradients between windows."""
        if not self._kept.changed():
            return
        if not self._is_between_windows:
            found = "The gradients were cleared or changed inside a window. Remove zero_grad(), clipping and other backwards"
            raise UsageError(f"{found}: accumulator.step(clip_norm=...) clears and clips.")
        if not self._has_warned and any(own.grad is not None for _, own in self._kept.parameters):
            self._has_warned = True
            found = "The next window clears gradients that accumulator.backward did not compute"
            rank_zero_warn(f"{found}. Add the other loss to the loss of a micro-batch: accumulator.backward(loss_a + loss_b).")


def _warn_of_factors(loss: Tensor, size: float) -> None:
    """Warn of a loss that is still divided by the size of the window, or multiplied by a GradScaler."""
    node = loss.grad_fn
    kind, saved = type(node).__name__, getattr(node, "_saved_other", None)
    if not isinstance(saved, Tensor) or saved.numel() != 1 or kind not in ("DivBackward0", "MulBackward0"):
        return
    factor = float(saved)
    divisor = factor if kind == "DivBackward0" or factor == 0 else 1 / factor
    if size > 1 and number_of(saved) is not None and math.isclose(size, divisor, rel_tol=1e-6):  # no tensor, which counts
        rank_zero_warn(f"The loss is divided by the size of the window, {size:g}, and again by its weight. Remove this division.")
    elif kind == "MulBackward0" and saved.dtype == torch.float32 and factor >= 256 and math.frexp(factor)[0] == 0.5:
        rank_zero_warn(f'The loss is multiplied by {factor:g}. Instead of a GradScaler use Fabric(precision="16-mixed").')
