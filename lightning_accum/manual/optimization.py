"""Manual optimization, ``automatic_optimization = False``: what a strategy does where the module optimizes by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from types import MethodType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_accum.from_lightning import LightningOptimizer, LRSchedulerConfig, pl, rank_zero_info
from lightning_accum.loops.trainer_state import samples_of_loader
from lightning_accum.manual.windows import ManualWindows
from lightning_accum.policy import Policy
from lightning_accum.ranks import Ranks
from lightning_accum.splitting.micro_batch import samples_of
from lightning_accum.start_line import window_in_words
from lightning_accum.weighing.safeguards import warn_of_batch_norm
from lightning_accum.whole.offload import offload_in_words

Closure: TypeAlias = Callable[[], Any]
OnStep: TypeAlias = Callable[[Optimizer, Callable[..., Any], "Closure | None"], Any]
"""Called instead of ``step``: takes the optimizer, its own ``step`` (which takes a closure or nothing), and the closure."""


class ManualEngine(Protocol):
    """What manual optimization asks of its strategy."""

    policy: Policy
    ranks: Ranks | None
    reduces_every_backward_by_itself: bool
    optimizers: list[Optimizer]
    lr_scheduler_configs: list[LRSchedulerConfig]

    @property
    def lightning_module(self) -> pl.LightningModule | None:
        """That is trained."""

    def trainer(self) -> pl.Trainer:
        """That of the module."""

    def parameters(self) -> list[nn.Parameter]:
        """All that may get a gradient."""

    def loss_scale(self) -> float:
        """What a GradScaler multiplies losses by."""


class ManualOptimization:
    """Hands what the module calls over to its windows.

    Raises:
        MisconfigurationException: the policy asks for what only a Trainer that optimizes can do.
    """

    def __init__(self, strategy: ManualEngine, policy: Policy, ranks: Ranks, warn: Callable[[str], None]) -> None:
        assert strategy.lightning_module is not None
        self.windows = ManualWindows(
            policy,
            ranks,
            strategy.lightning_module,
            strategy.parameters,
            warn,
            strategy.loss_scale,
            strategy.reduces_every_backward_by_itself,
        )
        self._strategy = strategy
        self._is_stepping = self._is_announced = False
        self._undo = ExitStack()
        self._deferred: set[int] = set()
        self._defer(strategy.optimizers, [config.scheduler for config in strategy.lr_scheduler_configs])

    def _defer(self, optimizers: Iterable[Optimizer], schedulers: Iterable[Any]) -> None:
        for optimizer in optimizers:
            if id(optimizer) not in self._deferred:
                self._deferred.add(id(optimizer))
                self._undo.callback(intercept_steps(optimizer, self._on_step))
        if self.windows.policy.scheduler_counts == "micro_batches":
            return
        for scheduler in schedulers:
            if id(scheduler) not in self._deferred:
                self._deferred.add(id(scheduler))
                self._undo.callback(defer_scheduler(scheduler, lambda: self.windows.current.defers_steps))

    def find_held(self) -> None:
        """Defer schedulers, too, that the module keeps for itself, of such optimizers; and optimizers, where the Trainer has none.

        Other optimizers, those of an inner loop, are the module's own business.
        """
        optimizers = [optimizer for optimizer in self._strategy.optimizers if optimizer.param_groups]
        owners = [self._strategy.lightning_module, *optimizers]
        held = [value for owner in owners for value in vars(owner).values()]
        held += [one for value in held if isinstance(value, (list, tuple)) for one in value]
        held += [one for value in held if isinstance(value, dict) for one in value.values()]
        if not optimizers:
            optimizers = [one for one in held if isinstance(one, Optimizer) and not isinstance(one, LightningOptimizer)]
        schedulers = [one for one in held if isinstance(one, (LRScheduler, ReduceLROnPlateau))]
        self._defer(optimizers, [one for one in schedulers if any(one.optimizer is optimizer for optimizer in optimizers)])

    def end(self) -> None:
        """Leave optimizers and schedulers as they were."""
        self._undo.close()

    def backward(self, run: Callable[..., Tensor], loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``manual_backward``: ``run`` is the strategy's own, and takes the loss first."""
        windows = self.windows
        if not windows.current.is_running:  # in validation, or in a hook
            if self._strategy.trainer().training:
                windows.warn_once(
                    "manual_backward is called outside of training_step, where it is no part of a window: what it gives to the"
                    " gradients is that of one loader batch. Call it in training_step."
                )
            return run(loss, *args, **kwargs)
        return windows.backward(loss, lambda loss: run(loss, *args, **kwargs))

    def optimizer_step(
        self, run: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """``step`` of one of Lightning's optimizers: ``run`` is the strategy's own."""
        return self._on_step(optimizer, lambda closure: run(optimizer, closure, *args, **kwargs), closure)

    def _on_step(self, optimizer: Optimizer, run: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        if self._is_stepping:  # Lightning's step calls the optimizer's own
            return run(closure)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        name = _name_of(optimizer, self._strategy.optimizers)
        if not self.windows.may_step(name):
            return result
        self._is_stepping = True
        try:
            return run() if closure is None else run(lambda: result)
        finally:
            self._is_stepping = False

    # --- what one sees ----------------------------------------------------------------------------------------------

    def announce(self, batch: Any, loader_batches: int) -> None:
        """Say in one line what was understood, once a ``training_step`` has called backward."""
        windows = self.windows
        if self._is_announced or not windows.calls:
            return
        self._is_announced = True
        samples = samples_of(batch, samples_of_loader(self._strategy.trainer()))
        parts = [window_in_words(loader_batches, windows.ranks.size, samples)]
        if windows.policy.offload:
            parts.append(offload_in_words(windows.ranks.device))
        is_checked = self._strategy.policy.check
        parts.append("the module optimizes by itself")
        parts += ["not checked: training_step steps"] * is_checked
        for number, call in enumerate(windows.calls, 1):
            name = "window/loss" if number == 1 else f"window/loss_{number}"
            parts.append(f"{name} is that of manual_backward in {call.line}, weight: {call.weigher.criterion}")
        rank_zero_info(f"GradientAccumulation: {'; '.join(parts)}.")


def _name_of(optimizer: Optimizer, optimizers: list[Optimizer]) -> str:
    name = type(optimizer).__name__
    if all(optimizer is not one for one in optimizers):
        return f"{name} (not of configure_optimizers)"
    return name if len(optimizers) == 1 else f"optimizer {optimizers.index(optimizer)} ({name})"


def intercept_steps(optimizer: Optimizer, on_step: OnStep) -> Callable[[], None]:
    """Have ``optimizer.step`` call ``on_step``.

    Returns:
        A function that makes it as it was.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
        >>> undo = intercept_steps(optimizer, lambda optimizer, step, closure: "later")
        >>> optimizer.step()
        'later'
        >>> undo(); optimizer.step()
    """
    own, original = vars(optimizer).get("step"), optimizer.step  # a scheduler has put its own there, to count

    @wraps(original)  # with the mark that a scheduler looks for
    def step(self: Optimizer, closure: Closure | None = None, **kwargs: Any) -> Any:
        def own_step(closure: Closure | None = None) -> Any:
            return original(**kwargs) if closure is None else original(closure, **kwargs)

        return on_step(optimizer, own_step, closure)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # a scheduler made later wants a method

    def undo() -> None:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]

    return undo


def defer_scheduler(scheduler: Any, defers_steps: Callable[[], bool]) -> Callable[[], None]:
    """Have ``scheduler.step`` do nothing while ``defers_steps()`` is true.

    Returns:
        A function that makes it as it was.
    """
    original = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        if not defers_steps():
            original.step(self, *args, **kwargs)

    # by its class, since all attributes of a scheduler go into checkpoints
    names = {"step": step, "__module__": original.__module__, "__doc__": original.__doc__}
    scheduler.__class__ = type(original.__name__, (original,), names)

    def undo() -> None:
        scheduler.__class__ = original

    return undo


def begin_manual(strategy: ManualEngine, batches: int, warn: Callable[[str], None]) -> ManualOptimization | None:
    """The windows of a module that optimizes by itself; None where each is one micro-batch on one rank.

    Raises:
        MisconfigurationException: the policy asks for what cannot be had.
    """
    policy, ranks, module = strategy.policy, strategy.ranks, strategy.lightning_module
    assert ranks is not None
    assert module is not None
    is_long = policy.may_be_longer_than_one(batches)
    if ranks.size == 1 and not is_long and policy.micro_batch is None:
        how = f"; {offload_in_words(ranks.device)}" if policy.offload else ""
        rank_zero_info(
            f"GradientAccumulation: a window is 1 loader batch{how}; the module optimizes by itself, and is left to Lightning."
        )
        return None
    warn_of_batch_norm(module, is_split=False, is_window_long=is_long, warn=warn)
    return ManualOptimization(strategy, policy, ranks, warn)
