"""Checks that Lightning calls the replaced methods once and in the expected order, and divides nothing in between.

It also warns of user hooks that see gradients inside a window.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_accum.errors import UsageError
from lightning_accum.parameter_changes import elements_of
from lightning_accum.step import Outcome
from lightning_accum.trainer import seams
from lightning_accum.trainer.from_lightning import Closure, callbacks_of, is_lightnings, pl
from lightning_accum.undo import replacing

AROUND_BACKWARD = ("on_before_backward", "on_after_backward")
CLOSE_WINDOWS = 3  # the first windows, which are watched closely even if all methods match the versions read
_TOLERANCE = 1e-2  # tolerance of a factor: rounding in the narrowest type; a division at least halves the loss
_OF_A_STEP = "LightningModule.optimizer_step, LightningOptimizer.step, Strategy.optimizer_step, Precision.optimizer_step"


class Watch:
    """Compares the calls with the expected ones at each boundary. The module's own hooks are not checked.

    The loops themselves count which loader batches ran, and how often (``epochs.py``). With
    ``may_skip_steps`` the optimizer may skip a step, as with a GradScaler.
    """

    def __init__(self, module: pl.LightningModule, progress: Any, may_skip_steps: bool) -> None:
        self._close_windows = math.inf if seams.changed() else CLOSE_WINDOWS
        self._progress = progress  # Lightning's count of training's loader batches
        self._may_skip_steps = may_skip_steps
        self.is_close = True  # whether checks with tensor hooks run: in the first windows, or always if a method differs
        self.moves_first = False  # the optimizer has changed parameters before its closure, like look-ahead optimizers
        self.called: set[str] = set()  # Lightning's methods that have begun the fit so far
        self._epoch: int | None = None
        self._optimizer: Optimizer | None = None
        self._hooks: list[RemovableHandle] = []
        self._depth = self._steps = 0
        self._is_stepping = self._has_stepped = False
        self._before_step: tuple[list[int], list[Tensor]] = ([], [])
        self._own: Tensor | None = None
        self._rates: list[float] | None = None
        self._is_lightnings = partial(is_lightnings, module)

    def begin(self) -> None:
        """Begin training, perhaps after a failed run, as in tuners."""
        self.called.add("Strategy.on_train_start")
        self._is_stepping, self._epoch = False, None

    def begin_epoch(self, number: int) -> None:
        """Begin an epoch."""
        for seam in ("Strategy.setup", "_FitLoop.setup_data", "Strategy.on_train_start"):
            if seam not in self.called:
                raise seams.broken(f"{seam} was not called before the first loader batch.")
        if number == self._epoch:
            raise seams.broken(f"_TrainingEpochLoop.run was called twice for epoch {number}.")
        self._epoch, self._rates = number, None  # epoch schedulers step inside windows with tail="carry"

    @contextmanager
    def training_step(self, module: pl.LightningModule, optimizer: Optimizer, warn: Callable[[str], None]) -> Iterator[None]:
        """Lightning calls the module's ``training_step``: keep the loss that it returns, and compare the learning rates."""
        self._find_other_rates(optimizer, warn)
        # with its signature, which Lightning reads
        with replacing(module, training_step=update_wrapper(partial(self._note_loss, step := module.training_step), step)):
            yield
        self._find_other_rates(optimizer, warn, is_after_step=True)

    def _note_loss(self, training_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = training_step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, dict) else output
        self._own = loss if isinstance(loss, Tensor) and loss.requires_grad else None
        return output

    @contextmanager
    def gradient_of_loss(self, loss: Tensor, gradient: Tensor | None, scale: float | None) -> Iterator[None]:
        """Expect the loss to get ``gradient`` once in the backward, times the ``scale`` of a GradScaler (None: unknown)."""
        own, self._own = self._own if self._own is not None else loss, None
        if not own.requires_grad or scale is None or own._backward_hooks or not self._is_lightnings("backward"):  # hooks change it
            yield
            return
        expected = scale * (1.0 if gradient is None else float(gradient))
        arrived: list[Tensor] = []  # copies, since a backward may write into its gradient
        with own.register_hook(lambda found: arrived.append(found.clone())):  # type: ignore[no-untyped-call]
            yield
        found = [float(number) for number in arrived]
        is_right = len(found) == 1 and abs(found[0] - expected) <= _TOLERANCE * abs(expected)
        if not is_right and math.isfinite(expected) and (not found or math.isfinite(found[0])):
            raise seams.broken(
                f"The loss of a micro-batch got the gradients {found} in backward, and not [{expected}] (Strategy.training_step, "
                "Strategy.backward, Precision.pre_backward, Precision.backward, LightningModule.backward)."
            )

    @contextmanager
    def zero_grad(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the gradients of an earlier window are cleared."""
        found = next(((own, own.grad, own.grad._version) for own in parameters_of(optimizer) if own.grad is not None), None)
        yield
        if found is not None and found[0].grad is found[1] and found[1]._version == found[2]:
            if not self._is_lightnings("optimizer_zero_grad"):
                raise UsageError(
                    "The module's optimizer_zero_grad does not clear the gradients of the last window, so the new window would add "
                    "to them. Have it call optimizer.zero_grad()."
                )
            raise seams.broken(
                "zero_grad did not clear a gradient of an earlier window (_AutomaticOptimization._optimizer_zero_grad, "
                "LightningModule.optimizer_zero_grad)."
            )

    def _find_other_rates(self, optimizer: Optimizer, warn: Callable[[str], None], is_after_step: bool = False) -> None:
        """Compare the learning rate with the rate after an earlier ``training_step`` of the window."""
        rates = [group.get("lr") for group in optimizer.param_groups]
        before, now = self._rates, [rate for rate in rates if isinstance(rate, float)]  # a tensor may be on a device
        self._rates = now if is_after_step or before is not None else None
        if before is not None and before != now:
            warn(
                f"The learning rate was changed inside of a window, from {before} to {now}, by training_step, or by a callback "
                "that steps a scheduler at every batch. The step uses the last one. Change it when trainer.global_step has grown, "
                "or in on_window_end."
            )

    def attend(self, optimizer: Optimizer) -> None:
        """Watch the steps of the only optimizer."""
        if optimizer is self._optimizer:
            return
        self.forget_optimizer()
        self._optimizer = optimizer
        if getattr(type(optimizer).step, "hooked", False):  # some wrappers of optimizers skip Optimizer.__init__
            after, before = optimizer.register_step_post_hook, optimizer.register_step_pre_hook
            self._hooks = [after(self._after_optimizer), before(self._before_optimizer)]

    def forget_optimizer(self) -> None:
        """Stop watching steps."""
        for hook in self._hooks:
            hook.remove()
        self._optimizer, self._hooks = None, []

    def begin_step(self, optimizer: Optimizer) -> None:
        """Called before the step of a window."""
        self.attend(optimizer)
        self._depth, self._steps, self._is_stepping = 0, 0, True
        self._has_stepped = not self._hooks  # no hook can be registered
        self._before_step, self._rates = self._seen_of(optimizer), None  # a window of tokens ends after its loader batch

    @property
    def is_before_step(self) -> bool:
        """Whether a window has ended, and the optimizer has not stepped yet."""
        return self._is_stepping and not self._has_stepped

    def _seen_of(self, optimizer: Optimizer) -> tuple[list[int], list[Tensor]]:
        """The version of each parameter, and in the first windows some of its elements, since ``p.data`` changes no version."""
        parameters = [*parameters_of(optimizer)]
        return [p._version for p in parameters], [elements_of(p) for p in parameters if self.is_close]

    def find_moves(self) -> None:
        """Called by the optimizer's closure: check whether this step has changed parameters before it."""
        assert self._optimizer is not None
        (versions, values), (versions_now, values_now) = self._before_step, self._seen_of(self._optimizer)
        self.moves_first |= versions_now != versions or not all(map(torch.equal, values_now, values))

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth += 1
        progress = self._progress.current
        is_running = progress.started == progress.ready > progress.processed
        if self._depth > 1 or not (is_running or self._is_stepping):
            return  # a step that calls super().step() counts once; between loader batches the user may step
        self._steps += 1
        if (self._steps > 1 or not self._is_stepping) and self._is_lightnings("optimizer_step"):
            seen = "for the second time in a window" if self._is_stepping else "no window has ended"
            raise seams.broken(f"The optimizer steps, {seen} ({_OF_A_STEP}).")

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        found_inf = getattr(optimizer, "found_inf", None)  # of an optimizer that unscales in its step (`fused=True`)
        self._has_stepped |= not (isinstance(found_inf, Tensor) and bool(found_inf))

    def end_step(self, is_empty: bool) -> bool:
        """Called after the step of a window. Returns whether the optimizer has stepped: a GradScaler may skip it."""
        self._close_windows -= 1
        self.is_close = self._close_windows > 0
        may_be_skipped = is_empty or self._may_skip_steps or self._has_stepped or bool(self._steps)
        if not may_be_skipped and self._is_lightnings("optimizer_step"):
            raise seams.broken(f"A window ended, and the optimizer did not step ({_OF_A_STEP}).")
        self._is_stepping, self._steps, self._before_step = False, 0, ([], [])
        return self._has_stepped

    @contextmanager
    def ticks(self, due: list[Any]) -> Iterator[None]:
        """Inside, each of these schedulers steps once for each time that it is listed."""
        schedulers = [config.scheduler for config in due if not config.reduce_on_plateau]
        counted = [
            s for s in schedulers if type(s).__module__.startswith("torch.") and isinstance(getattr(s, "last_epoch", None), int)
        ]
        before = [scheduler.last_epoch for scheduler in counted]
        yield
        ticked = [scheduler.last_epoch - count for scheduler, count in zip(counted, before, strict=True)]
        if ticked != [sum(s is other for other in counted) for s in counted] and self._is_lightnings("lr_scheduler_step"):
            raise seams.broken(
                f"Schedulers stepped {ticked} times, but one step was due (_TrainingEpochLoop._update_learning_rates, "
                "LightningModule.lr_scheduler_step)."
            )


class WindowClosure(Closure):
    """The closure of a window that has run: returns its loss, once and if no parameter has changed; else runs it again."""

    def __init__(self, outcome: Outcome, again: Callable[[], Outcome] | None, watch: Watch) -> None:
        super(Closure, self).__init__()  # this does not run Closure's three functions
        self._outcome, self._again, self._watch = outcome, again, watch
        self._is_called = False

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        if not self._is_called:
            self._watch.find_moves()
        if self._is_called or self._watch.moves_first:
            if self._again is None:
                raise UsageError(
                    "The optimizer calls its closure more than once in a step (LBFGS), or after it has changed parameters. A "
                    "window of several loader batches cannot run again: their data is gone. Use a window of 1, or another "
                    "optimizer."
                )
            self._outcome = self._again()
        self._is_called = True
        loss = self._outcome.window_loss
        return None if loss is None else loss.detach()  # as Lightning's closure

    def outcome(self) -> Outcome:
        """The last outcome of its loader batch."""
        if not self._is_called:
            self.consume_result()  # raises an error if the closure was not called
        return self._outcome


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters of all groups, trained or frozen."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


# --- hooks that see gradients inside of a window -----------------------------------------------------------------------


def gradient_reads(trainer: pl.Trainer, warn: Callable[[str], None]) -> TorchFunctionMode | None:
    """Detects hooks around a backward that read gradients of an unfinished window; None if there are no such hooks."""
    hooks: dict[CodeType, str] = {}
    owners = [(owner, name) for owner in (*callbacks_of(trainer), trainer.lightning_module) for name in AROUND_BACKWARD]
    for owner, name in (*owners, (trainer.lightning_module, "backward")):
        hook: Any = getattr(owner, name, None)
        hook = inspect.unwrap(getattr(hook, "func", hook)) if callable(hook) else None
        code = getattr(hook, "__code__", None)
        if code is not None and not hook.__module__.startswith(seams.LIBRARIES):
            hooks[code] = f"{name} of {type(owner).__name__}"
    return _GradientReads(hooks, warn) if hooks else None


class _GradientReads(TorchFunctionMode):
    """Inside, detects hooks that get, set or add to the gradient of a tensor, by their code in the call stack, each once."""

    def __init__(self, left: dict[CodeType, str], warn: Callable[[str], None]) -> None:
        super().__init__()
        self._left, self._warn = left, warn

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_backward = func is Tensor.backward
        if self._left and (is_backward or getattr(func, "__self__", None) is Tensor.grad):  # the getter or the setter of .grad
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_code not in self._left:
                # code inside a nested backward does not belong to the hook that called it
                frame = None if frame.f_code.co_name == "_engine_run_backward" else frame.f_back
            if frame is not None and not (is_backward and self._left[frame.f_code].startswith("backward of")):
                self._warn(
                    f"{self._left.pop(frame.f_code)} looks at gradients. It runs at every micro-batch, on the gradients "
                    "accumulated so far, not of the full batch. Use on_before_optimizer_step instead, which sees the full "
                    "batch's gradients once a window."
                )
        return func(*args, **(kwargs or {}))
