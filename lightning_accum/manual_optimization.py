"""Manual optimization, ``automatic_optimization = False``: what a strategy does where the module optimizes by itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_accum.manual import ManualWindows
from lightning_accum.micro_batch import Tokens
from lightning_accum.policy import Policy
from lightning_accum.ranks import Ranks
from lightning_accum.safeguards import gradients_of_zero
from lightning_accum.waiting import make_wait

if TYPE_CHECKING:
    from lightning_accum.mixin import AccumulationMixin


class ManualOptimization:
    """Hands what the module calls over to its windows.

    Args:
        strategy: of the Trainer, set up.
        policy: what was asked for.
        ranks: those whose gradients are averaged.
        warn: takes a warning, on rank zero.

    Raises:
        MisconfigurationException: the policy asks for what only a Trainer that optimizes can do.
    """

    def __init__(self, strategy: AccumulationMixin, policy: Policy, ranks: Ranks, warn: Callable[[str], None]) -> None:
        _check(policy)
        if any(isinstance(optimizer, LBFGS) for optimizer in strategy.optimizers):
            raise MisconfigurationException(
                "LBFGS runs its closure several times in a step, and the loader batches of a window cannot be run again: their data"
                " is gone. Use a window of 1 on one rank, or another optimizer."
            )
        self.windows = ManualWindows(
            policy, ranks, strategy.parameters, warn, strategy._loss_scale, strategy.reduces_every_backward_by_itself
        )
        self._strategy = strategy
        schedulers = (
            [config.scheduler for config in strategy.lr_scheduler_configs] if policy.scheduler_counts != "micro_batches" else []
        )
        self.end = make_wait(strategy.optimizers, schedulers, lambda: self.windows.waits)
        """Leave optimizers and schedulers as they were."""

    def backward(self, run: Callable[..., Tensor], loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``manual_backward``: ``run`` is the strategy's own, and takes the loss first."""
        windows = self.windows
        seed = windows.begin_backward(loss)
        if seed is not None:
            if self._strategy.takes_gradient and kwargs.get("gradient") is None and not args[1:]:
                kwargs["gradient"] = seed
            else:
                loss = loss * seed
        with gradients_of_zero(loss) if windows.is_weightless else nullcontext():
            result = run(loss, *args, **kwargs)
        windows.end_backward()
        return result

    def optimizer_step(
        self, run: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """``step`` of one of the Trainer's optimizers: ``run`` is the strategy's own."""
        windows = self.windows
        with torch.enable_grad():
            result = closure()
        if not windows.may_step(_name_of(optimizer, self._strategy.optimizers)):
            return result

        def already_run() -> Any:
            return result

        return run(optimizer, already_run, *args, **kwargs)


def _name_of(optimizer: Optimizer, optimizers: list[Optimizer]) -> str:
    name = type(optimizer).__name__
    return name if len(optimizers) == 1 else f"optimizer {optimizers.index(optimizer)} ({name})"


def _check(policy: Policy) -> None:
    manual = "with automatic_optimization=False"
    if isinstance(policy.window, Tokens):
        raise MisconfigurationException(
            f"GradientAccumulation({policy.window!r}) knows that a window has ended only after a micro-batch, but {manual} the"
            " module steps its optimizers inside training_step. Give the window in loader batches."
        )
    if policy.accumulate_dtype is not None or policy.on_nonfinite != "propagate":
        raise MisconfigurationException(
            f"accumulate_dtype and on_nonfinite are for automatic optimization; {manual} leave them out."
        )
