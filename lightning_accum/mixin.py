"""What all strategies share: Lightning's hooks, handed over to :class:`~lightning_accum.accumulation.Accumulation`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_accum import loops
from lightning_accum.accumulation import Accumulates, Accumulation, Policy
from lightning_accum.callback import GradientAccumulation
from lightning_accum.listeners import callbacks_of, is_step_heard
from lightning_accum.lr_schedule import StepWatch
from lightning_accum.safeguards import batch_norm_layers, zero_loss_like
from lightning_accum.splitting import Splitting

_log = logging.getLogger("lightning.pytorch.accumulation")


class AccumulationMixin(Accumulates, Strategy):
    """To be put in front of a strategy of Lightning's. The methods that do nothing here are for engines with several ranks."""

    world_size: int
    is_heard: bool | None = None
    """Whether anything listens to the hooks around the backward of a micro-batch; None where it is not known yet."""

    # --- setting up -------------------------------------------------------------------------------------------------

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        trainer = model.trainer
        if trainer.state.fn == TrainerFn.FITTING and _callback_of(trainer) is None:
            callbacks_of(trainer).insert(0, GradientAccumulation())  # the strategy alone: default policy

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self.accumulation = None
        if trainer.state.fn == TrainerFn.FITTING:
            callback = _callback_of(trainer)
            self.policy = Policy() if callback is None else callback.policy
            loops.install(trainer)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._begin(trainer, callback)

    def _begin(self, trainer: pl.Trainer, callback: GradientAccumulation | None) -> None:
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            return
        self._check_what_windows_cannot_do(trainer, module)
        self.accumulation = Accumulation(self.policy, self.root_device, self.world_size, _warn, self._splitting(module))
        if callback is not None:
            callback.connect(self.accumulation)
        self._callback = callback
        self._watch = StepWatch(self.optimizers[0])
        # an overridden backward may not hand its keyword arguments on: it gets the product instead
        self._takes_gradient = not is_overridden("backward", module)
        self._is_announced = False
        self.is_heard = None
        self._is_step_heard = True
        self._heard_at: tuple[int, int] | None = None

    def _splitting(self, module: pl.LightningModule) -> Splitting | None:
        policy = self.policy
        if policy.micro_batch is None:
            return None
        trim, device, has_ranks = policy.trim_padding, self.root_device, self.world_size > 1
        return Splitting(policy.micro_batch, trim, policy.split, module, device, has_ranks, _warn, _log.info)

    def _check_what_windows_cannot_do(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        sizes = self.policy.sizes() or {trainer.accumulate_grad_batches}
        for optimizer in self.optimizers:
            if isinstance(optimizer, LBFGS) and max(sizes) > 1:
                raise MisconfigurationException(
                    f"LBFGS runs its closure several times in a step, and a window of {max(sizes)} loader batches cannot be run"
                    " again: their data is gone. Use GradientAccumulation(1) or another optimizer."
                )
        if (max(sizes) > 1 or self.policy.micro_batch is not None) and (layers := batch_norm_layers(module)):
            more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
            _warn(
                f"BatchNorm ({', '.join(layers[:3])}{more}) normalises each micro-batch by its own statistics, and updates its"
                " running statistics at each: with it a window differs from its full batch."
            )

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.accumulation is not None:
            trainer = self.trainer()
            size = self.policy.size_at(trainer.current_epoch) or trainer.accumulate_grad_batches
            if self.policy.tail == "drop" and trainer.num_training_batches < size:
                raise MisconfigurationException(
                    f"An epoch has {trainer.num_training_batches} loader batches, and a window of {size} would never be full: with"
                    ' tail="drop" nothing would be trained. Use a smaller window, or tail="step" or "carry".'
                )
            seen, into_window = loops.loader_batches_seen(trainer), loops.loader_batches_into_window(trainer)
            self.accumulation.restart(seen, into_window, steps=trainer.global_step, loader_batches=seen - into_window)

    @override
    def teardown(self) -> None:
        if self.accumulation is not None:
            self._watch.remove()
            self.accumulation = None
        super().teardown()

    def trainer(self) -> pl.Trainer:
        """The Trainer of the module."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def is_plain(self) -> bool:
        """Whether the window is one micro-batch on one rank, so that everything is left to Lightning."""
        return self.accumulation is None or self.accumulation.is_plain()

    # --- one micro-batch --------------------------------------------------------------------------------------------

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        splitting = None if self.accumulation is None else self.accumulation.splitting
        is_on_its_way = self.root_device.type != "cpu" and batch is not None
        if splitting is not None and is_on_its_way and self.trainer().training and not self._changes_batches():
            splitting.planner.look_at(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self.accumulation is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        loss, seed = self._weigh(closure_loss)
        if seed is not None:
            kwargs["gradient"] = seed
        return super().backward(loss, optimizer, *args, **kwargs)

    def backward_without_hooks(self, loss: Tensor) -> None:
        """As :meth:`backward`, where nobody listens."""
        loss, seed = self._weigh(loss)
        torch.autograd.backward(loss, seed)

    def _changes_batches(self) -> bool:
        """Whether a batch on the device may be another than on the host: augmented, or moved by the user's own rules."""
        hooks = ("on_after_batch_transfer", "transfer_batch_to_device")
        module, data = self.lightning_module, getattr(self.trainer(), "datamodule", None)
        return any(is_overridden(hook, owner) for owner in (module, data) if owner is not None for hook in hooks)

    def _weigh(self, loss: Tensor) -> tuple[Tensor, Tensor | None]:
        """Take in the loss of a micro-batch. Returns what to call backward on, and with which gradient (None for 1)."""
        accumulation = self.accumulation
        assert accumulation is not None
        if self._is_announced:
            seed = accumulation.begin_backward(loss)
        else:
            self._is_announced = True
            batch = accumulation.batch if accumulation.plan is None else accumulation.plan.batch
            seed = accumulation.begin_backward(loss)
            rank_zero_info(accumulation.describe(batch, self.trainer().accumulate_grad_batches))
        if seed is None:
            return loss, None
        if accumulation.is_weightless and self._can_replace_loss():
            return zero_loss_like(loss), None  # its loss may be NaN, and NaN * 0 is NaN: zeros are added instead
        return (loss, seed) if self._takes_gradient else (loss * seed, None)

    def end_micro_batch(self) -> Tensor | None:
        """Leave training_step; at a boundary, end the window.

        Returns:
            At a boundary the loss of the window; None inside a window, and where the window had no weight.
        """
        assert self.accumulation is not None
        if not self.accumulation.end_micro_batch():
            self._backward_without_loss()
        return self._end_window() if self.accumulation.is_boundary else None

    def end_retried_batch(self) -> Tensor | None:
        """An attempt at the last batch of a window has succeeded: only now the gradients are reduced, and the window ends."""
        assert self.accumulation is not None
        self.accumulation.is_boundary = True
        self._forward_without_batch()
        self.accumulation.reduce()
        self._backward_without_loss()
        return self._end_window()

    def _end_window(self) -> Tensor | None:
        assert self.accumulation is not None
        seen = loops.loader_batches_seen(self.trainer())
        if self.accumulation.is_plain():
            self.accumulation.close_plain(seen)
            return None
        closed = self.accumulation.close(seen, self.parameters())
        if closed.is_empty:
            return None
        return torch.as_tensor(closed.loss, dtype=self.accumulation.window.dtype, device=self.root_device)

    def run_without_batch(self) -> Tensor | None:
        """A loader batch with nothing to train on: this rank takes part in what the others do, with weight 0."""
        self._forward_without_batch()
        return self.end_micro_batch()

    def blocked(self) -> AbstractContextManager[None]:
        """A micro-batch that is not the last of its window: its gradients are not reduced."""
        return nullcontext()

    def _can_replace_loss(self) -> bool:
        return True

    def _forward_without_batch(self) -> None:
        """Take part in the other ranks' forward."""

    def _backward_without_loss(self) -> None:
        """Take part in the other ranks' backward, adding nothing."""

    def parameters(self) -> list[nn.Parameter]:
        """Those of the module and of the optimizers."""
        assert self.lightning_module is not None
        parameters = dict.fromkeys(self.lightning_module.parameters())
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                parameters.update(dict.fromkeys(group["params"]))
        return list(parameters)

    # --- the optimizer step -----------------------------------------------------------------------------------------

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self.accumulation is None or self.accumulation.is_plain():
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._watch.optimizer is not optimizer:
            self._watch.remove()
            self._watch = StepWatch(optimizer)
        loss = closure()
        if self.accumulation.closed is not None and self.accumulation.closed.is_empty:
            return loss  # nothing had any weight: optimizer and hooks see no step
        trainer = self.trainer()
        if self._heard_at != (heard_at := (len(callbacks_of(trainer)), trainer.current_epoch)):
            self._heard_at = heard_at  # callbacks come and go
            self._is_step_heard, self.is_heard = is_step_heard(trainer), None
        if self._is_step_heard or trainer.gradient_clip_val:
            return super().optimizer_step(optimizer, _already_run(closure, loss), model, **kwargs)
        return optimizer.step(_already_run(closure, loss), **kwargs)

    def after_optimizer_step(self) -> None:
        """Count the step, if it really happened."""
        assert self.accumulation is not None
        self.accumulation.after_optimizer_step(self._watch.has_stepped())
        if self._callback is not None:
            self._callback.show_window()


def _already_run(closure: Callable[[], Any], result: Any) -> Callable[[], Any]:
    """A closure whose first call has been made."""
    calls = 0

    def first_result_then_again() -> Any:
        nonlocal calls
        calls += 1
        return result if calls == 1 else closure()

    return first_result_then_again


def _callback_of(trainer: pl.Trainer) -> GradientAccumulation | None:
    callbacks = [callback for callback in callbacks_of(trainer) if isinstance(callback, GradientAccumulation)]
    if len(callbacks) > 1:
        raise MisconfigurationException(f"There are {len(callbacks)} GradientAccumulation callbacks in the Trainer; keep one.")
    return callbacks[0] if callbacks else None


def _warn(message: str) -> None:
    rank_zero_warn(message, category=UserWarning)
