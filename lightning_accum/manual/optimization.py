"""Manual optimization, ``automatic_optimization = False``: what a strategy does where the module optimizes by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_accum.checkpointing.format import FORMAT, check_format, check_keys
from lightning_accum.checkpointing.resume import PartialWindow, gather_gradients, gather_weighed, put_back
from lightning_accum.loops.trainer_state import loader_batches_seen, samples_of_loader
from lightning_accum.manual.waiting import intercept_steps, make_scheduler_wait
from lightning_accum.manual.windows import Call, ManualWindows
from lightning_accum.policy import Policy, window_in_words
from lightning_accum.ranks import Ranks
from lightning_accum.splitting.packed import samples_of
from lightning_accum.weighing.safeguards import gradients_of_zero, warn_of_batch_norm
from lightning_accum.whole.offload import offload_in_words


class ManualEngine(Protocol):
    """What manual optimization asks of its strategy."""

    policy: Policy
    ranks: Ranks | None
    takes_gradient: bool
    reduces_every_backward_by_itself: bool
    optimizers: list[Optimizer]
    lr_scheduler_configs: list[LRSchedulerConfig]

    @property
    def lightning_module(self) -> pl.LightningModule | None:
        """That is trained."""

    @property
    def is_global_zero(self) -> bool:
        """This is the first rank."""

    def trainer(self) -> pl.Trainer:
        """That of the module."""

    def parameters(self) -> list[nn.Parameter]:
        """All that may get a gradient."""

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """The same, by names that are the same in another run."""

    def rank_in_group(self) -> int:
        """Of this rank, among those whose gradients are averaged."""

    def loss_scale(self) -> float:
        """What a GradScaler multiplies losses by."""


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

    def __init__(self, strategy: ManualEngine, policy: Policy, ranks: Ranks, warn: Callable[[str], None]) -> None:
        self.windows = ManualWindows(
            policy, ranks, strategy.parameters, warn, strategy.loss_scale, strategy.reduces_every_backward_by_itself
        )
        self.resumed_state: Mapping[str, Any] = {}
        """What the checkpoint that training goes on from says, as :meth:`state_dict` gave it."""
        self._strategy = strategy
        self._warn = warn
        self._is_stepping = self._is_announced = False
        self._undo = ExitStack()
        self._waiting: set[int] = set()
        self._have_wait(strategy.optimizers, [config.scheduler for config in strategy.lr_scheduler_configs])

    def _have_wait(self, optimizers: Iterable[Optimizer], schedulers: Iterable[Any]) -> None:
        for optimizer in optimizers:
            if id(optimizer) not in self._waiting:
                self._waiting.add(id(optimizer))
                self._undo.callback(intercept_steps(optimizer, self._on_step))
        if self.windows.policy.scheduler_counts == "micro_batches":
            return
        for scheduler in schedulers:
            if id(scheduler) not in self._waiting:
                self._waiting.add(id(scheduler))
                self._undo.callback(make_scheduler_wait(scheduler, lambda: self.windows.waits))

    def _find_held(self) -> None:
        """Schedulers that the module keeps for itself, of optimizers that wait; and optimizers, where the Trainer has none.

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
        self._have_wait(optimizers, [one for one in schedulers if any(one.optimizer is optimizer for optimizer in optimizers)])

    def end(self) -> None:
        """Leave optimizers and schedulers as they were."""
        self._undo.close()

    def backward(self, run: Callable[..., Tensor], loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``manual_backward``: ``run`` is the strategy's own, and takes the loss first."""
        windows = self.windows
        if not windows.is_under_way:  # in validation, or in a hook
            if self._strategy.trainer().training:
                windows.warn_once(
                    "manual_backward is called outside of training_step, where it is no part of a window: what it gives to the"
                    " gradients is that of one loader batch. Call it in training_step."
                )
            return run(loss, *args, **kwargs)
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
        """Say in one line what was understood, once a ``training_step`` has called backward.

        Args:
            batch: the loader batch that it ran on.
            loader_batches: in a window.
        """
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

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, Any]:
        """What a checkpoint needs to go on counting."""
        windows = self.windows
        return {
            "format": FORMAT,
            "epoch": windows.epoch,
            "optimizer_steps": windows.windows,
            "total_weight": windows.total_weight,
        }

    def unfinished_window(self, may_gather: bool) -> dict[str, Any]:
        """What a checkpoint needs to go on inside a window. Called on all ranks where it ``may_gather`` what they have."""
        windows, strategy = self.windows, self._strategy
        position = windows.boundary.position(loader_batches_seen(strategy.trainer()))
        if position <= 0:
            return {}
        if windows.is_under_way or not may_gather:
            self._warn(
                "The checkpoint is taken inside a window and does not hold its gradients: training_step was under way, or not all"
                " ranks can take part. Going on from it, a new window begins."
            )
            return {}
        return {"micro_batches": windows.micro_batches, "calls": [self._partial(call, position) for call in windows.calls]}

    def _partial(self, call: Call, position: int) -> dict[str, Any]:
        windows, strategy, ranks = self.windows, self._strategy, self.windows.ranks
        is_reduced = strategy.reduces_every_backward_by_itself
        if not is_reduced:
            windows.agree_on_reference(call)
        with windows.sums_in_grad(call):
            gradients = gather_gradients(strategy.parameters_by_name(), ranks, is_reduced, strategy.is_global_zero)
        policy = windows.policy.in_words(strategy.trainer().accumulate_grad_batches)
        weighed = gather_weighed(call.window, ranks)
        size, reference = windows.boundary.size, call.window.reference
        partial = PartialWindow(policy, position, size, None, ranks.size, reference, weighed, is_reduced, gradients)
        return partial.state_dict()

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`counts` and :meth:`unfinished_window` gave; nothing where training begins.

        Raises:
            ValueError: another version of the package has written it.
        """
        if state:
            check_format(state)
            optional = ("epoch_loss", "micro_batches", "calls")
            check_keys(state, ("format", "epoch", "optimizer_steps", "total_weight"), optional, "GradientAccumulation")
        self.resumed_state = state
        self.windows.windows = int(state.get("optimizer_steps", 0))
        self.windows.total_weight = float(state.get("total_weight", 0.0))

    def restart(self, seen: int) -> None:
        """Begin to train after loader batch number ``seen``, inside a window if the checkpoint was."""
        windows, strategy = self.windows, self._strategy
        self._find_held()
        windows.discard(seen)
        state, self.resumed_state = self.resumed_state, {}
        partials = [PartialWindow.from_state_dict(partial) for partial in state.get("calls", [])]
        if not partials or (windows.policy.tail == "drop" and state["epoch"] != windows.epoch):
            return
        micro_batches = state["micro_batches"]
        first, policy = partials[0], windows.policy.in_words(strategy.trainer().accumulate_grad_batches)
        if first.policy != policy:
            self._warn(
                f"The checkpoint was taken after {first.position} loader batches of a window of {first.policy}. Now it is {policy}:"
                " the gradients in the checkpoint are dropped, and a new window begins."
            )
            return
        assert first.size is not None
        windows.go_on(seen, first.position, first.size, micro_batches)
        named, rank = strategy.parameters_by_name(), strategy.rank_in_group()
        for index, partial in enumerate(partials):
            call = windows.call(index)
            with windows.sums_in_grad(call):
                put_back(partial, named, call.window, windows.ranks, rank, 1.0, self._warn)
            call.micro_batches = micro_batches


def _name_of(optimizer: Optimizer, optimizers: list[Optimizer]) -> str:
    name = type(optimizer).__name__
    if all(optimizer is not one for one in optimizers):
        return f"{name} (not of configure_optimizers)"
    return name if len(optimizers) == 1 else f"optimizer {optimizers.index(optimizer)} ({name})"


def begin_manual(strategy: ManualEngine, batches: int, warn: Callable[[str], None]) -> ManualOptimization | None:
    """The windows of a module that optimizes by itself; None where each is one micro-batch on one rank.

    Args:
        strategy: of the Trainer, set up.
        batches: the Trainer's loader batches in a window.
        warn: takes a warning, on rank zero.

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
