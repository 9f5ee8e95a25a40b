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
from lightning_accum.backward import backward
from lightning_accum.callback import GradientAccumulation
from lightning_accum.listeners import Audience, already_on_cpu
from lightning_accum.loops.watch import Watch
from lightning_accum.lr_schedule import StepWatch
from lightning_accum.manual.optimization import ManualOptimization
from lightning_accum.nonfinite import Guard
from lightning_accum.splitting.micro_batch import Tokens
from lightning_accum.splitting.packed import samples_of
from lightning_accum.strategies.engine import Engine
from lightning_accum.weighing.counts import count_samples
from lightning_accum.weighing.safeguards import gradients_of_zero, no_gradients
from lightning_accum.whole.offload import Offload
from lightning_accum.whole.row_wise import RowWise

_NOTHING_AROUND = nullcontext()


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
    audience: Audience
    """Who hears what Lightning calls; there with :attr:`accumulation`."""
    guard: Guard | None = None
    """Looks whether micro-batches are finite; None where nobody does."""
    _watch: StepWatch
    _is_announced: bool = False

    def is_plain(self) -> bool:
        """Whether the window is one micro-batch on one rank, so that everything is left to Lightning."""
        return self.accumulation is None or self.accumulation.is_plain()

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
        if self.accumulation is None or self.audience.has_own_transfer:
            return super().batch_to_device(batch, device, dataloader_idx)
        splitting = self.accumulation.splitting
        if self.root_device.type == "cpu":
            moved = None if self.audience.is_profiled else already_on_cpu(batch)
            if moved is not None:
                return moved
        elif splitting is not None and batch is not None and self.trainer().training:
            splitting.planner.look_at(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self.manual is not None:
            return self.manual.backward(super().backward, closure_loss, optimizer, *args, **kwargs)
        if self.accumulation is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self.watch.backward(closure_loss, self.accumulation.is_zero_grad_due)
        loss, seed = self._weigh(closure_loss)
        if seed is not None:
            kwargs["gradient"] = seed
        with self._watching(loss, seed) if self.watch.is_close else _NOTHING_AROUND, self._around_backward(loss):
            return super().backward(loss, optimizer, *args, **kwargs)

    def _watching(self, loss: Tensor, seed: Tensor | None) -> AbstractContextManager[None]:
        return self.watch.gradient_of_loss(loss, seed, self.loss_scale() if self._is_precision_lightnings else None)

    def backward_without_hooks(self, loss: Tensor) -> None:
        """As :meth:`backward`, where nobody listens."""
        loss, seed = self._weigh(loss)
        assert self.accumulation is not None
        if self.accumulation.is_weightless or self.guard is not None:
            with self._around_backward(loss):
                backward(loss, seed)
        else:
            backward(loss, seed)

    @property
    def _may_skip_steps(self) -> bool:
        return getattr(self.precision_plugin, "scaler", None) is not None or not self._is_precision_lightnings

    @property
    def _is_precision_lightnings(self) -> bool:
        return type(self.precision_plugin).__module__.startswith("lightning.")

    def _around_backward(self, loss: Tensor) -> AbstractContextManager[None]:
        assert self.accumulation is not None
        if self.accumulation.is_stand_in and not self.is_waited_for_in_forward:
            return self._weightless(no_gradients(loss))
        if self.accumulation.is_weightless:
            return self._weightless(gradients_of_zero(loss))
        return nullcontext() if self.guard is None else self.guard.watching(loss, self.accumulation.weight)

    def _weightless(self, context: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """A backward in ``context``, of which row-wise submodules get nothing."""
        return context if self.row_wise is None else self.row_wise.dropping(context)

    def _weigh(self, loss: Tensor) -> tuple[Tensor, Tensor | None]:
        """Take in the loss of a micro-batch. Returns what to call backward on, and with which gradient (None for 1)."""
        assert self.accumulation is not None
        # straight on after the first, in every micro-batch
        seed = self.accumulation.begin_backward(loss) if self._is_announced else self._weigh_first(loss)
        self.sync.begin_backward()
        return (loss, seed) if self.takes_gradient or seed is None else (loss * seed, None)

    def _weigh_first(self, loss: Tensor) -> Tensor | None:
        """Take in the first loss, and say what was understood. Returns the ``gradient`` of its backward (None for 1)."""
        accumulation = self.accumulation
        assert accumulation is not None
        self._is_announced = True
        batch = accumulation.batch if accumulation.plan is None else accumulation.plan.batch
        seed = accumulation.begin_backward(loss)
        samples = samples_of(batch, loops.samples_of_loader(self.trainer()))
        rank_zero_info(accumulation.describe(samples, self.trainer().accumulate_grad_batches))
        accumulation.warn_of_windows_never_full(batch, self.trainer().num_training_batches)
        return seed

    def end_micro_batch(self) -> Tensor | None:
        """Leave training_step; at a boundary, end the window.

        Returns:
            At a boundary the loss of the window; None inside a window, and where the window had no weight.
        """
        assert self.accumulation is not None
        if not self.accumulation.end_micro_batch():
            self._backward_without_loss()
        self.sync.complete_reduction(self.accumulation.is_stand_in)
        return self._end_window() if self.accumulation.is_boundary else None

    @property
    def ends_windows_apart(self) -> bool:
        """The last micro-batch of a window is as all others, and gradients are reduced after it: it may come to nothing."""
        return self.guard is not None or self.policy.micro_batch == "auto" or self.row_wise is not None

    def end_window_apart(self) -> Tensor | None:
        """The window has ended with the last micro-batch, which did not know: only now the gradients are reduced."""
        assert self.accumulation is not None
        self.accumulation.is_boundary, self.accumulation.has_loss = True, False  # what runs from here is no micro-batch
        self._reduce_apart()
        return self._end_window()

    def _reduce_apart(self) -> None:
        """Reduce what was accumulated, and start to sum the weights. On all ranks together."""
        assert self.accumulation is not None
        self.accumulation.reduce()

    def _end_window(self) -> Tensor | None:
        assert self.accumulation is not None
        self.watch.close(self._watch.optimizer)
        self.sync.end_window()
        if self.guard is not None:
            self.guard.end_window()
        seen = loops.loader_batches_seen(self.trainer())
        if self.accumulation.is_plain():
            self.accumulation.close_plain(seen)
            return None
        closed = self.accumulation.close(seen, self.parameters())
        if closed.is_last and self.accumulation.ranks.size == self.accumulation.ranks.world_size:
            loops.stop(self.trainer())
        if closed.is_empty:
            return None
        return torch.as_tensor(closed.loss, dtype=self.accumulation.window.dtype, device=self.root_device)

    def run_without_batch(self) -> Tensor | None:
        """A loader batch with nothing to train on: this rank takes part in what the others do, with weight 0."""
        return self.run_shadow_batches(0, max(1, self.rounds(0)))

    def run_shadow_batches(self, done: int, rounds: int) -> Tensor | None:
        """Other ranks have more micro-batches in a loader batch: this one takes part in them, with weight 0.

        Args:
            done: micro-batches that this rank has run.
            rounds: those of the rank with the most.

        Returns:
            The loss of the window, if it ends one.
        """
        accumulation, window_loss = self.accumulation, None
        assert accumulation is not None
        ends_window = accumulation.is_boundary
        for index in range(done, rounds):
            is_last = index == rounds - 1
            accumulation.is_boundary = ends_window and is_last
            window_loss = self._run_shadow_batch()
            if self.counts_tokens_of_parts and not is_last:
                self.end_window_inside_batch()
        return window_loss

    def _run_shadow_batch(self) -> Tensor | None:
        assert self.accumulation is not None
        ends_window = self.accumulation.is_boundary
        self.accumulation.is_boundary &= not self.ends_windows_apart
        with nullcontext() if self.accumulation.is_boundary else self.blocked():
            self._forward_without_batch()
            window_loss = self.end_micro_batch()
        return self.end_window_apart() if ends_window and self.ends_windows_apart else window_loss

    @property
    def counts_tokens_of_parts(self) -> bool:
        """A window ends with any micro-batch of a split batch, as soon as it has its tokens.

        With its last, where an attempt at a batch may fail, which cannot take a step back.
        """
        splitting = None if self.accumulation is None else self.accumulation.splitting
        return isinstance(self.policy.window, Tokens) and splitting is not None and not splitting.is_retried

    def rounds(self, own: int) -> int:
        """The micro-batches of a loader batch, after each of which this rank may have to wait for others. Called on all ranks.

        Args:
            own: those of this rank.
        """
        has_rounds = self.counts_tokens_of_parts or (self.is_waited_for_in_forward and self.policy.micro_batch is not None)
        if not has_rounds or self.ranks is None:
            return own
        return int(self.ranks.largest(own)[0])

    def end_window_inside_batch(self) -> None:
        """A micro-batch has ended that is not the last of its loader batch: so does the window, if it has come to its tokens."""
        loops.end_window_inside_batch(self.trainer())

    # --- the optimizer step -----------------------------------------------------------------------------------------

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self.manual is not None:
            return self.manual.optimizer_step(super().optimizer_step, optimizer, closure, model, **kwargs)
        if self.accumulation is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.accumulation.is_plain():
            with suppress(_EmptyWindowError):
                return super().optimizer_step(optimizer, self._raising_where_empty(closure), model, **kwargs)
            return None
        loss, is_empty = self._run_window(optimizer, closure)
        if is_empty:
            return loss
        return super().optimizer_step(optimizer, _already_run(closure, loss), model, **kwargs)

    def step_unheard(self, optimizer: Optimizer, closure: Callable[[], Any]) -> None:
        """As :meth:`optimizer_step`, where nobody listens and nothing is clipped."""
        loss, is_empty = self._run_window(optimizer, closure)
        if not is_empty:
            optimizer.step(_already_run(closure, loss))

    def _run_window(self, optimizer: Optimizer, closure: Callable[[], Any]) -> tuple[Any, bool]:
        """Run what ends the window. Returns its loss, and whether nothing had any weight: optimizer and hooks see no step then."""
        assert self.accumulation is not None
        if self._watch.optimizer is not optimizer:
            self._watch.remove()
            self._watch = self._step_watch(optimizer)
        return closure(), self.accumulation.is_closed_empty

    def _step_watch(self, optimizer: Optimizer) -> StepWatch:
        return StepWatch(optimizer, lambda: self.watch.before_optimizer(self.is_plain))

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
