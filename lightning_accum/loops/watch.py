"""Whether Lightning calls what stands in for its own, once and in the order that was read, and divides nothing on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_accum import seams

CLOSE_WINDOWS = 3
"""The windows in which the watch is close where all of Lightning's methods are those that were read."""
_TOLERANCE = 1e-2
"""Of a factor: what gradients are rounded to in the narrowest type; a loss that is divided is at least halved."""


class At(Enum):
    """How far a loader batch has come."""

    NOWHERE = auto()
    ADVANCE = auto()
    RUN = auto()
    DONE = auto()


class Step(Enum):
    """How far the step of a window has come."""

    OPEN = auto()
    CLOSED = auto()
    BEGUN = auto()
    """The optimizer runs the closure, which closes the window."""
    DONE = auto()


class Watch:
    """Compares, in each loader batch and at each boundary, what was called with what was to be called.

    Args:
        module: whose own hooks, where it has them, are left to it.

    Attributes:
        is_close: what needs hooks on tensors is looked at too: in the first windows, or always where a method was not read.
        is_set_up: the strategy is.
        has_data: the loaders are set up.
        is_unfinished: the last window has not ended.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._is_read = not seams.changed()
        self._close_windows = CLOSE_WINDOWS if self._is_read else math.inf
        self.is_close = True
        self.is_set_up = self.has_data = self._has_begun = self.is_unfinished = False
        self._epoch: int | None = None
        self._at = At.NOWHERE
        self._step = Step.OPEN
        self._own: Tensor | None = None
        self._stepped: tuple[Tensor, int] | None = None
        self._left: set[bool] = set()
        own = ("backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step")
        self._is_lightnings = {hook: not is_overridden(hook, module) for hook in own}

    # --- loader batches -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Training begins, maybe after a run that failed: tuners try some."""
        self._has_begun, self._step, self._epoch, self._left = True, Step.OPEN, None, set()

    @contextmanager
    def epoch(self, number: int) -> Iterator[None]:
        """An epoch runs."""
        called = {
            "Strategy.setup": self.is_set_up,
            "_FitLoop.setup_data": self.has_data,
            "Strategy.on_train_start": self._has_begun,
        }
        for seam, has_been in called.items():
            if not has_been:
                raise seams.SeamError(f"{seam} was not called before the first loader batch.")
        if number == self._epoch:
            raise seams.SeamError(f"_TrainingEpochLoop.run was called twice for epoch {number}.")
        self._epoch, self.is_unfinished, self._at = number, True, At.DONE
        try:
            yield
        finally:
            self._at = At.NOWHERE

    def advance(self) -> None:
        """A loader batch is about to be drawn."""
        if self._at is At.NOWHERE:
            raise seams.SeamError("_TrainingEpochLoop.advance was called, but not by _TrainingEpochLoop.run.")
        self._at = At.ADVANCE

    def run(self, optimization: str) -> None:
        """A loader batch is about to run."""
        if self._at is not At.ADVANCE:
            raise seams.SeamError(f"{optimization}.run was called twice for a loader batch, or not by _TrainingEpochLoop.advance.")
        self._at = At.RUN

    def end_batch(self, optimization: str) -> None:
        """A loader batch is over."""
        if self._at is At.ADVANCE:
            raise seams.SeamError(f"A loader batch was trained on without a call of {optimization}.run.")

    def end(self) -> None:
        """Training ends, and its last window has."""
        self.expect_schedulers()
        self.is_unfinished = False

    # --- the loss -------------------------------------------------------------------------------------------------------

    @contextmanager
    def training_step(self, module: pl.LightningModule) -> Iterator[None]:
        """Lightning calls the module's ``training_step``: keep the loss that the module itself returned."""
        attributes, original = vars(module), module.training_step
        before = attributes.get("training_step")

        def training_step(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            loss = output.get("loss") if isinstance(output, dict) else output
            self._own = loss if isinstance(loss, Tensor) and loss.requires_grad else None
            return output

        attributes["training_step"] = training_step
        try:
            yield
        finally:
            del attributes["training_step"]
            if before is not None:
                attributes["training_step"] = before

    @contextmanager
    def gradient_of_loss(self, loss: Tensor, gradient: Tensor | None, scale: float | None) -> Iterator[None]:
        """The backward of a micro-batch: its loss gets the gradient that it was given, once.

        Args:
            loss: what backward is called on.
            gradient: the argument of backward; None for 1.
            scale: what a GradScaler multiplies it by; None where it cannot be known.
        """
        own, self._own = self._own if self._own is not None else loss, None
        if not (self._is_lightnings["backward"] and own.requires_grad) or scale is None:
            yield
            return
        arrived: list[Tensor] = []
        handle = own.register_hook(arrived.append)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            handle.remove()
        if len(arrived) == 1 and arrived[0] is gradient and scale == 1:
            return
        expected = scale * (1.0 if gradient is None else float(gradient))
        found = [float(number) for number in arrived]
        is_right = len(found) == 1 and abs(found[0] - expected) <= _TOLERANCE * abs(expected)
        if not is_right and math.isfinite(expected) and (not found or math.isfinite(found[0])):
            raise seams.SeamError(
                f"The loss of a micro-batch got the gradients {found} in backward, and not [{expected}] (Strategy.training_step,"
                " Strategy.backward, Precision.pre_backward, Precision.backward, LightningModule.backward)."
            )

    @contextmanager
    def zero_grad(self, optimizer: Optimizer) -> Iterator[None]:
        """The gradients of an earlier window are cleared in here."""
        parameter = _with_gradient(optimizer) if self._is_lightnings["optimizer_zero_grad"] else None
        gradient = None if parameter is None else parameter.grad
        before = None if gradient is None else gradient._version
        yield
        if gradient is not None and parameter is not None and parameter.grad is gradient and gradient._version == before:
            raise seams.SeamError(
                "zero_grad left a gradient of an earlier window (_AutomaticOptimization._optimizer_zero_grad,"
                " LightningModule.optimizer_zero_grad)."
            )

    # --- the step -------------------------------------------------------------------------------------------------------

    def close(self, optimizer: Optimizer) -> None:
        """A window has ended."""
        if self._step is not Step.DONE:
            self._step = Step.DONE if self._step is Step.BEGUN else Step.CLOSED
        if not self._is_read:
            parameter = _with_gradient(optimizer)
            self._stepped = None if parameter is None else (parameter, parameter._version)
        self._close_windows -= 1
        self.is_close = self._close_windows > 0

    def before_optimizer(self, is_passthrough: Callable[[], bool]) -> None:
        """The optimizer is about to change parameters.

        Args:
            is_passthrough: whether it runs the closure itself, since the window is one micro-batch.

        Raises:
            SeamError: no window has ended, or it has stepped before.
        """
        if self._step is Step.CLOSED:
            self._step = Step.DONE
        elif self._step is Step.OPEN and is_passthrough():
            self._step = Step.BEGUN
        elif self._is_lightnings["optimizer_step"] and self._at is At.RUN:  # else it is the user who steps
            seen = "no window has ended" if self._step is Step.OPEN else "for the second time in a window"
            raise seams.SeamError(
                f"The optimizer steps, {seen} (LightningModule.optimizer_step, LightningOptimizer.step, Strategy.optimizer_step,"
                " Precision.optimizer_step)."
            )

    def after_optimizer(self, has_stepped: bool) -> None:
        """The step of a window is over.

        Args:
            has_stepped: the optimizer has, or need not have.
        """
        step, self._step = self._step, Step.OPEN
        stepped, self._stepped = self._stepped, None
        has_stepped = has_stepped or stepped is None or stepped[0]._version != stepped[1]
        if step is Step.CLOSED and not has_stepped and self._is_lightnings["optimizer_step"]:
            raise seams.SeamError(
                "A window ended, and the optimizer did not step (LightningModule.optimizer_step, LightningOptimizer.step,"
                " Strategy.optimizer_step, Precision.optimizer_step)."
            )

    def end_run(self) -> None:
        """A loader batch has run."""
        self._at = At.DONE
        if self._step is not Step.OPEN:
            raise seams.SeamError("A window ended, and no step followed (LightningModule.optimizer_step).")

    # --- schedulers -----------------------------------------------------------------------------------------------------

    def schedulers_due(self) -> None:
        """The clock has ticked."""
        self._left = {False, True}

    def take_turn(self, is_plateau: bool) -> bool:
        """Whether schedulers of a kind may step now: they do so once after a step, however often Lightning asks."""
        is_left = is_plateau in self._left
        self._left.discard(is_plateau)
        return is_left

    def expect_schedulers(self) -> None:
        """The next step is about to begin, or training ends."""
        if False in self._left:
            raise seams.SeamError("Schedulers were not asked after a step: _TrainingEpochLoop.update_lr_schedulers was not called.")

    @contextmanager
    def ticks(self, due: list[Any]) -> Iterator[None]:
        """Each of these schedulers steps in here, as often as it is there."""
        schedulers = [config.scheduler for config in due if not config.reduce_on_plateau]
        counted = [
            s for s in schedulers if type(s).__module__.startswith("torch.") and isinstance(getattr(s, "last_epoch", None), int)
        ]
        before = [scheduler.last_epoch for scheduler in counted]
        yield
        ticked = [scheduler.last_epoch - count for scheduler, count in zip(counted, before, strict=True)]
        if self._is_lightnings["lr_scheduler_step"] and ticked != [sum(s is other for other in counted) for s in counted]:
            raise seams.SeamError(
                f"Schedulers stepped {ticked} times where one step was due (_TrainingEpochLoop._update_learning_rates,"
                " LightningModule.lr_scheduler_step)."
            )


def _with_gradient(optimizer: Optimizer) -> Tensor | None:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return next((parameter for parameter in parameters if parameter.grad is not None), None)
