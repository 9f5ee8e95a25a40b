"""Lightning's strategies with windows: one mixin that overrides their hooks, and a few lines for each engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_accum import loops
from lightning_accum.accumulation import Accumulation, Policy
from lightning_accum.callback import GradientAccumulation
from lightning_accum.graph import zero_loss_like
from lightning_accum.lr_schedule import StepWatch
from lightning_accum.sync import DDPSync, SyncPolicy


class AccumulationMixin(Strategy):
    """What all strategies of this package share: Lightning's hooks, handed over to :class:`Accumulation`."""

    accumulation: Accumulation | None = None
    """The state of the running ``fit``; None outside of one, and in manual optimization."""
    policy: Policy = Policy()
    world_size: int

    # --- setting up -------------------------------------------------------------------------------------------------

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        trainer = model.trainer
        if trainer.state.fn == TrainerFn.FITTING and _callback_of(trainer) is None:
            loops.callbacks_of(trainer).insert(0, GradientAccumulation())  # the strategy alone: default policy

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
        sizes = self.policy.sizes() or {trainer.accumulate_grad_batches}
        for optimizer in self.optimizers:
            if isinstance(optimizer, LBFGS) and max(sizes) > 1:
                raise MisconfigurationException(
                    f"LBFGS runs its closure several times in a step, and a window of {max(sizes)} loader batches cannot be run"
                    " again: their data is gone. Use GradientAccumulation(1) or another optimizer."
                )
        self.accumulation = Accumulation(self.policy, self.root_device, self.world_size, _warn)
        if callback is not None:
            callback.connect(self.accumulation)
        self._watch = StepWatch(self.optimizers[0])
        # an overridden backward may not hand its keyword arguments on: it gets the product instead
        self._takes_gradient = not is_overridden("backward", module)
        self._is_announced = False

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.accumulation is not None:
            trainer = self._trainer()
            seen, into_window = loops.loader_batches_seen(trainer), loops.loader_batches_into_window(trainer)
            self.accumulation.restart(seen, into_window, steps=trainer.global_step, loader_batches=seen - into_window)

    @override
    def teardown(self) -> None:
        if self.accumulation is not None:
            self._watch.remove()
            self.accumulation = None
        super().teardown()

    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def is_plain(self) -> bool:
        """Whether the window is one micro-batch on one rank, so that everything is left to Lightning."""
        return self.accumulation is None or self.accumulation.is_plain()

    # --- one micro-batch --------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.accumulation is not None and args:
            self.accumulation.batch = args[0]
        return super().training_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self.accumulation is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        batch = self.accumulation.batch
        seed = self.accumulation.begin_backward(closure_loss)
        if not self._is_announced:
            self._is_announced = True
            rank_zero_info(self.accumulation.describe(batch, self._trainer().accumulate_grad_batches))
        if seed is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        if seed.device.type == "cpu" and seed.item() == 0 and self._can_replace_loss():
            # no weight, and perhaps NaN: on the host it costs nothing to look, and zeros are added instead
            return super().backward(zero_loss_like(closure_loss), optimizer, *args, **kwargs)
        if self._takes_gradient:
            return super().backward(closure_loss, optimizer, *args, gradient=seed, **kwargs)
        return super().backward(closure_loss * seed, optimizer, *args, **kwargs)

    def end_micro_batch(self) -> Tensor | None:
        """Leave training_step; at a boundary, end the window.

        Returns:
            At a boundary the loss of the window; None inside a window, and where the window had no weight.
        """
        assert self.accumulation is not None
        if not self.accumulation.end_micro_batch():
            self._backward_without_loss()
        if not self.accumulation.is_boundary:
            return None
        seen = loops.loader_batches_seen(self._trainer())
        if self.accumulation.is_plain():
            self.accumulation.close_plain(seen)
            return None
        closed = self.accumulation.close(seen, self._parameters())
        return None if closed.is_empty else torch.as_tensor(closed.loss, device=self.root_device)

    def run_without_batch(self) -> Tensor | None:
        """A loader batch with nothing to train on: this rank takes part in what the others do, with weight 0."""
        self._forward_without_batch()
        return self.end_micro_batch()

    def _can_replace_loss(self) -> bool:
        return True

    def _forward_without_batch(self) -> None:
        """Take part in the other ranks' forward."""

    def _backward_without_loss(self) -> None:
        """Take part in the other ranks' backward, adding nothing."""

    def _parameters(self) -> list[nn.Parameter]:
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
        loss = closure()
        if self.accumulation.closed is not None and self.accumulation.closed.is_empty:
            return loss  # nothing had any weight: optimizer and hooks see no step
        return super().optimizer_step(optimizer, _already_run(closure, loss), model, **kwargs)

    def after_optimizer_step(self) -> None:
        """Count the step, if it really happened."""
        assert self.accumulation is not None
        self.accumulation.after_optimizer_step(self._watch.has_stepped())


class AccumulationStrategy(AccumulationMixin, SingleDeviceStrategy):
    """Exact gradient accumulation on one device, ``Trainer(strategy="accum")``.

    It runs on the device that the Trainer's ``accelerator`` and ``devices`` name.

    Args:
        device: the device, if not the Trainer's.
        kwargs: see :class:`lightning.pytorch.strategies.SingleDeviceStrategy`.

    Raises:
        MisconfigurationException: (from the Trainer) it names more than one device or node.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_accum import GradientAccumulation
        >>> trainer = Trainer(accelerator="cpu", strategy="accum", callbacks=[GradientAccumulation(8)], logger=False)
    """

    strategy_name = "accum"

    def __init__(self, device: torch.device | str | int | None = None, **kwargs: Any) -> None:
        super().__init__(device="cpu" if device is None else device, **kwargs)
        self._has_device = device is not None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The one device, as the Trainer's connector asks for it; None until it is known."""
        return [self.root_device] if self._has_device else None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise MisconfigurationException(
                f'strategy="accum" runs on one device, but the Trainer names {len(devices)}. Use strategy="accum_ddp", or'
                " devices=1."
            )
        self._root_device = devices[0]
        self._has_device = True

    @property
    def num_nodes(self) -> int:
        """Always 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes > 1:
            raise MisconfigurationException(
                f'strategy="accum" runs on one node, but the Trainer names {num_nodes}. Use strategy="accum_ddp".'
            )


class DDPAccumulationStrategy(AccumulationMixin, DDPStrategy):
    """Exact gradient accumulation over DistributedDataParallel, ``Trainer(strategy="accum_ddp")``.

    Also registered with the suffixes of Lightning's own: ``_spawn``, ``_fork``, ``_notebook`` and
    ``_find_unused_parameters_true``.

    Args:
        args: see :class:`lightning.pytorch.strategies.DDPStrategy`; so are the keyword arguments.
        sync: reduce the gradients over the ranks once a ``"window"``, or at every ``"micro_batch"`` (Accelerate's
            ``sync_each_batch``). The result is the same.
        kwargs: see above.

    Raises:
        MisconfigurationException: ``sync`` is neither of the two.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=2, strategy="accum_ddp", accumulate_grad_batches=8, logger=False)
    """

    strategy_name = "accum_ddp"

    def __init__(self, *args: Any, sync: SyncPolicy = "window", **kwargs: Any) -> None:
        if sync not in ("window", "micro_batch"):
            raise MisconfigurationException(f'sync={sync!r}: expected "window" or "micro_batch"')
        super().__init__(*args, **kwargs)
        self._sync_policy: SyncPolicy = sync
        self._sync: DDPSync | None = None

    @override
    def _begin(self, trainer: pl.Trainer, callback: GradientAccumulation | None) -> None:
        super()._begin(trainer, callback)
        if self.accumulation is None:
            return
        assert isinstance(self.model, DistributedDataParallel)
        self._sync = DDPSync(self.model, self._sync_policy)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if self.accumulation is None or self._sync is None:
            with super().block_backward_sync():
                yield
        else:
            with self._sync.blocked():
                yield

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.accumulation is None or self._sync is None:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        self.accumulation.batch = args[0] if args else None
        with self.precision_plugin.train_step_context():
            return self._sync.forward(self.lightning_module.training_step, *args, **kwargs)

    @override
    def _forward_without_batch(self) -> None:
        assert self.accumulation is not None
        assert self._sync is not None
        with nullcontext() if self.accumulation.is_boundary else self._sync.blocked():
            self._sync.forward_without_batch()

    @override
    def _backward_without_loss(self) -> None:
        assert self._sync is not None
        self._sync.backward_without_loss()

    @override
    def _can_replace_loss(self) -> bool:
        return self._sync is None or not self._sync.is_recording_graph()

    @override
    def end_micro_batch(self) -> Tensor | None:
        loss = super().end_micro_batch()
        if self._sync is not None and self.accumulation is not None and self.accumulation.is_boundary:
            self._sync.note_used_parameters()
        return loss

    @override
    def teardown(self) -> None:
        self._sync = None
        super().teardown()


def _already_run(closure: Callable[[], Any], result: Any) -> Callable[[], Any]:
    """A closure whose first call has been made."""
    calls = 0

    def first_result_then_again() -> Any:
        nonlocal calls
        calls += 1
        return result if calls == 1 else closure()

    return first_result_then_again


def _callback_of(trainer: pl.Trainer) -> GradientAccumulation | None:
    callbacks = [callback for callback in loops.callbacks_of(trainer) if isinstance(callback, GradientAccumulation)]
    if len(callbacks) > 1:
        raise MisconfigurationException(f"There are {len(callbacks)} GradientAccumulation callbacks in the Trainer; keep one.")
    return callbacks[0] if callbacks else None


def _warn(message: str) -> None:
    rank_zero_warn(message, category=UserWarning)


def register() -> None:
    """Add the strategies to Lightning's registry, under the names of Lightning's own with ``accum`` in front."""
    entries: list[tuple[str, type[Strategy], dict[str, Any]]] = [("accum", AccumulationStrategy, {})]
    for launcher, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
        entries.append((f"accum_ddp{launcher}", DDPAccumulationStrategy, {"start_method": start_method}))
        for find_unused in (True, False):
            name = f"accum_ddp{launcher}_find_unused_parameters_{str(find_unused).lower()}"
            arguments = {"start_method": start_method, "find_unused_parameters": find_unused}
            entries.append((name, DDPAccumulationStrategy, arguments))
    for name, strategy, arguments in entries:
        StrategyRegistry.register(name, strategy, description=strategy.__name__, override=True, **arguments)


register()
