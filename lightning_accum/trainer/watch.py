"""What the user's code does in a window that a full batch does not show: its optimizer, learning rates, hooks of a backward."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
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
from lightning_accum.trainer.from_lightning import Closure, callbacks_of, pl

AROUND_BACKWARD = ("on_before_backward", "on_after_backward")
CLOSE_WINDOWS = 3  # the first windows, in which Lightning calls everything


class Watch:
    """Knows whether the optimizer has stepped, and what the user's code changes in the first windows."""

    def __init__(self) -> None:
        self._close_windows = math.inf if seams.changed() else CLOSE_WINDOWS
        self.is_close = True  # in the first windows, or always if a method of Lightning's differs
        self.moves_first = False  # the optimizer has changed parameters before its closure, like look-ahead optimizers
        self._optimizer: Optimizer | None = None
        self._hook: RemovableHandle | None = None
        self._is_stepping = self._has_stepped = False
        self._before_step: tuple[list[int], list[Tensor]] = ([], [])
        self._rates: list[float] | None = None

    def begin_epoch(self) -> None:
        """Begin an epoch: epoch schedulers step inside windows with ``tail="carry"``."""
        self._rates = None

    def find_other_rates(self, optimizer: Optimizer, warn: Callable[[str], None], is_after_step: bool = False) -> None:
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

    def forget_optimizer(self) -> None:
        """Stop watching steps."""
        if self._hook is not None:
            self._hook.remove()
        self._optimizer = self._hook = None

    def begin_step(self, optimizer: Optimizer) -> None:
        """Called before the step of a window."""
        if optimizer is not self._optimizer:
            self.forget_optimizer()
            self._optimizer = optimizer
            if getattr(type(optimizer).step, "hooked", False):  # some wrappers of optimizers skip Optimizer.__init__
                self._hook = optimizer.register_step_post_hook(self._after_optimizer)
        self._is_stepping, self._has_stepped = True, self._hook is None  # None: no hook can be registered
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

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # of an optimizer that unscales in its step (`fused=True`)
        self._has_stepped |= not (isinstance(found_inf, Tensor) and bool(found_inf))

    def end_step(self) -> bool:
        """Called after the step of a window. Returns whether the optimizer has stepped: a GradScaler may skip it."""
        self._close_windows -= 1
        self.is_close = self._close_windows > 0
        self._is_stepping, self._before_step = False, ([], [])
        return self._has_stepped


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
