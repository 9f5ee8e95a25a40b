"""Lightning's hooks of a micro-batch and of an optimizer step, handed over to ``Accumulation``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_accum import loops
from lightning_accum.callback import GradientAccumulation
from lightning_accum.listeners import HookTable, already_on_cpu
from lightning_accum.loops.watch import Watch
from lightning_accum.lr_schedule import StepWatch
from lightning_accum.manual.optimization import ManualOptimization
from lightning_accum.micro_batch import MicroBatch, Weighed
from lightning_accum.session import Session
from lightning_accum.splitting.packed import samples_of
from lightning_accum.strategies.engine import Engine
from lightning_accum.weighing.weight import count_samples
from lightning_accum.whole.offload import Offload
from lightning_accum.whole.row_wise import RowWise


class WindowHooks(Engine):
    """From the way of a batch to its device to the step of its window."""

    manual: ManualOptimization | None = None
    """The windows of a module that optimizes by itself; None for any other, and where a window is one micro-batch on one rank."""
    takes_gradient: bool = True
    """``backward`` takes the ``gradient`` argument."""
    _callback: GradientAccumulation | None = None
    watch: Watch
    """Whether Lightning calls what stands in for its own; there in a fit."""
    row_wise: RowWise | None = None
    """Runs submodules in micro-batches, in steps that see the whole batch; None where nothing was asked to."""
    offload: Offload | None = None
    """Moves what autograd saves; None where it stays."""
    hooks: HookTable
    """Which of Lightning's hooks somebody overrides; there with :attr:`accumulation`."""
    session: Session
    """Runs loader batches; there with :attr:`accumulation`."""
    _watch: StepWatch

    def running_row_wise(self, batch: Any) -> AbstractContextManager[None]:
        """In here, a step and its backward, the submodules that were named run in micro-batches."""
        return nullcontext() if self.row_wise is None else self.row_wise.step(count_samples(batch))

    def around_loader_batch(self, batch: Any) -> AbstractContextManager[None]:
        """What a loader batch runs in, whole or in micro-batches."""
        module = self.lightning_module
        if self.offload is None or module is None:
            return nullcontext()
        return self.offload.engaged((*module.parameters(), *module.buffers(), *tree_leaves(batch)))

    # --- one micro-batch --------------------------------------------------------------------------------------------

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.accumulation is None or self.hooks.has_own_transfer:
            return super().batch_to_device(batch, device, dataloader_idx)
        splitting = self.accumulation.splitting
        if self.root_device.type == "cpu":
            moved = None if self.hooks.is_profiled else already_on_cpu(batch)
            if moved is not None:
                return moved
        elif splitting is not None and batch is not None and self.trainer().training:
            splitting.planner.look_at(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self.manual is not None:
            return self.manual.backward(super().backward, closure_loss, optimizer, *args, **kwargs)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def watching_gradient(self, loss: Tensor, grad_output: Tensor | None) -> AbstractContextManager[None]:
        """A backward in here: its loss is to get the gradient that it was given."""
        return self.watch.gradient_of_loss(loss, grad_output, self.loss_scale() if self._is_precision_lightnings else None)

    @property
    def _may_skip_steps(self) -> bool:
        return getattr(self.precision_plugin, "scaler", None) is not None or not self._is_precision_lightnings

    @property
    def _is_precision_lightnings(self) -> bool:
        return type(self.precision_plugin).__module__.startswith("lightning.")

    # --- what a session asks for ------------------------------------------------------------------------------------

    def loader_batches_seen(self) -> int:
        """Those that training has drawn so far, over all epochs."""
        return loops.loader_batches_seen(self.trainer())

    def announce(self, micro_batch: MicroBatch, weighed: Weighed) -> None:
        """Say in one line what was understood."""
        accumulation, trainer = self.accumulation, self.trainer()
        assert accumulation is not None
        batch = micro_batch.batch if accumulation.plan is None else accumulation.plan.batch
        samples = samples_of(batch, loops.samples_of_loader(trainer))
        rank_zero_info(accumulation.describe(micro_batch, weighed, samples, trainer.accumulate_grad_batches))
        accumulation.warn_of_windows_never_full(micro_batch, weighed, batch, trainer.num_training_batches)

    def note_end_of_window(self) -> None:
        """The watch is to see that an optimizer step follows."""
        self.watch.close(self._watch.optimizer)

    def end_window_inside_batch(self) -> None:
        """A micro-batch has ended that is not the last of its loader batch: so does the window, if it has come to its tokens."""
        loops.end_window_inside_batch(self.trainer())

    def stop(self) -> None:
        """All ranks end after the loader batch under way."""
        loops.stop(self.trainer())

    # --- the optimizer step -----------------------------------------------------------------------------------------

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self.manual is not None:
            return self.manual.optimizer_step(super().optimizer_step, optimizer, closure, model, **kwargs)
        if self.accumulation is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.accumulation.is_passthrough():
            with suppress(_EmptyWindowError):
                return super().optimizer_step(optimizer, self._raising_where_empty(closure), model, **kwargs)
            return None
        if self._watch.optimizer is not optimizer:
            self._watch.remove()
            self._watch = self._step_watch(optimizer)
        loss = closure()
        if self.accumulation.is_closed_empty:  # nothing had any weight: optimizer and hooks see no step
            return loss
        if self.hooks.has_step:
            return super().optimizer_step(optimizer, _already_run(closure, loss), model, **kwargs)
        return optimizer.step(_already_run(closure, loss))

    def _step_watch(self, optimizer: Optimizer) -> StepWatch:
        return StepWatch(optimizer, lambda: self.watch.before_optimizer(self._is_passthrough))

    def _is_passthrough(self) -> bool:
        return self.accumulation is None or self.accumulation.is_passthrough()

    def _raising_where_empty(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that Lightning calls inside of the optimizer's step, and that ends this step if the window has no weight."""
        is_first = True

        def run() -> Any:
            nonlocal is_first
            result = closure()
            assert self.accumulation is not None
            if is_first and self.accumulation.is_closed_empty:
                raise _EmptyWindowError
            is_first = False
            return result

        return run

    def after_optimizer_step(self) -> None:
        """Count the step, if it really happened."""
        assert self.accumulation is not None
        has_stepped, is_empty = self._watch.has_stepped(), self.accumulation.is_closed_empty
        self.watch.after_optimizer(has_stepped or is_empty or self._may_skip_steps)
        is_counted = (has_stepped or is_empty) and self.accumulation.is_step
        self.accumulation.after_optimizer_step(is_counted)
        if is_counted and self.lr_scheduler_configs:
            self.watch.schedulers_due()
        if self._callback is not None:
            self._callback.show_window()
            self._callback.set_size(self.trainer())


class _EmptyWindowError(Exception):
    """Ends the step of an optimizer before it changes anything."""


def _already_run(closure: Callable[[], Any], result: Any) -> Callable[[], Any]:
    """A closure whose first call has been made."""
    calls = 0

    def first_result_then_again() -> Any:
        nonlocal calls
        calls += 1
        return result if calls == 1 else closure()

    return first_result_then_again
