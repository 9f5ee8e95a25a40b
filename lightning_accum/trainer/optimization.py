"""Optimization of a window: loader batches, whole or in micro-batches, and the optimizer step at its end.

Manual optimization: the module's own backwards and steps, some of which are deferred.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum.accumulation import Accumulation
from lightning_accum.errors import UsageError
from lightning_accum.left_behind import warn_of_hooks
from lightning_accum.looks import Checked
from lightning_accum.micro_batch import Output
from lightning_accum.splitting.logs import BatchLog
from lightning_accum.step import Outcome
from lightning_accum.sync.base import NOTHING_AROUND
from lightning_accum.trainer.engine import Engine, SilentProfiler
from lightning_accum.trainer.first_batch import check_manual_batch, loss_unlogged, result_of, transferred, try_out, unlogged_step
from lightning_accum.trainer.from_lightning import _AutomaticOptimization, _ManualOptimization, call, is_lightnings, pl
from lightning_accum.trainer.results import collecting_logs, show_logs
from lightning_accum.trainer.seams import ShippedHooks
from lightning_accum.trainer.watch import AROUND_BACKWARD, CLOSE_WINDOWS, WindowClosure, parameters_of
from lightning_accum.undo import Snapshot, replacing
from lightning_accum.weighing.counts import count_samples
from lightning_accum.window_totals import ClosedWindow

_NOTHING: dict[str, Any] = {}


class WindowOptimization(_AutomaticOptimization):
    """Adds a loader batch to a window, and runs its micro-batches."""

    strategy: Engine
    _others: Sequence[Any] = ()  # the arguments of ``training_step`` after the batch
    _is_silent: bool = False  # no hooks around ``training_step`` and its backward
    skips_backward: bool = False  # no training: StochasticWeightAveraging passes over the data
    _left: Snapshot | None = None  # what the first training_step of the window has left in the module, if hooks are watched

    @property
    def epoch_loop(self) -> Any:
        """The enclosing loop, whose type imports this file. Not an attribute, since loops are restored from checkpoints."""
        return self.trainer.fit_loop.epoch_loop

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        outcome = self.run_loader_batch([*kwargs.values()])
        return {} if outcome.loss is None else {"loss": outcome.loss.detach().clone(), **outcome.extra}

    def run_loader_batch(self, arguments: Sequence[Any]) -> Outcome:
        """Add a loader batch to its window, and make the step of a window that it ends.

        ``arguments`` are those of ``training_step``; none if this rank has no batch, which then counts with weight 0.
        """
        strategy, accumulation = self.strategy, self.strategy.accumulation
        assert accumulation is not None
        attributes: dict[str, Any] = vars(self.trainer.lightning_module)  # setting an attribute of a Module takes microseconds
        before, attributes["_current_fx_name"] = attributes["_current_fx_name"], "training_step"  # as Lightning, for `self.log`
        try:
            with torch.enable_grad(), NOTHING_AROUND if strategy.offload is None else strategy.around_loader_batch(arguments):
                (seen, ends_window), session, again = self._begin(arguments, accumulation), strategy.session, None
                if arguments:
                    outcome = session.run(self, arguments[0], seen, ends_window)
                    again = partial(self._run_again, arguments[0], seen) if accumulation.boundary.size == 1 else None
                else:
                    outcome = session.run_without_batch(self, seen, ends_window)
                if ends_window:
                    outcome = self.step(outcome, again)
        finally:
            attributes["_current_fx_name"] = before
        return outcome

    def _run_again(self, batch: Any, seen: int) -> Outcome:
        """Called if the optimizer calls its closure again, in its own hook and perhaps without gradients."""
        with torch.enable_grad(), replacing(self.trainer.lightning_module, _current_fx_name="training_step"):
            return self.strategy.session.run(self, batch, seen, ends_window=True)

    def _begin(self, arguments: Sequence[Any], accumulation: Accumulation) -> tuple[int, bool]:
        """Begin a loader batch. Returns its number, and whether it ends its window."""
        strategy, self.skips_backward = self.strategy, self._skip_backward
        if self.skips_backward:
            accumulation.window.discard()
        if arguments:
            self._others, self._is_silent = arguments[1:], _is_silent(self.trainer, strategy)
        seen, ends_window = self.epoch_loop.begin_loader_batch(accumulation.boundary)
        if accumulation.splitting is not None:
            accumulation.splitting.begin(arguments[0] if arguments else None)
        left, self._left = self._left, None
        # a rank without a first batch left nothing, and the others do not wait for it
        is_watched = accumulation.clock.optimizer_steps < CLOSE_WINDOWS and strategy.policy.check
        is_watched = is_watched if strategy.world_size > 1 else left is not None
        if is_watched and accumulation.boundary.position(seen) == 2:
            step = unlogged_step(self.trainer, is_begun=False)
            warn_of_hooks(Checked(strategy, step, accumulation, (), True, lambda _: None), left, arguments[:1])
        is_due = strategy.row_wise is not None or accumulation.check.batches_left or seen == accumulation.boundary.closed_at + 1
        if is_due and not self._skip_backward and (arguments or strategy.world_size > 1):
            try_out(self.trainer, strategy, arguments[:1])
        return seen, ends_window

    def transferred(self, batch: Any) -> Any:
        """A loader batch that was drawn ahead, transferred to the device."""
        return transferred(self.trainer, batch)

    def run_ahead(self, batch: Any, ahead: int) -> Tensor | None:
        """The loss of a micro-batch that is ``ahead`` loader batches after the current one. Logs nothing."""
        loss: Tensor | None = self.strategy.run_as_engine(partial(loss_unlogged, self.trainer, ahead=ahead), batch)
        return loss

    def step(self, outcome: Outcome, again: Callable[[], Outcome] | None) -> Outcome:
        """Make the optimizer step of a window that has ended, and count it if it happened. Returns the last outcome.

        The closure may run the window ``again``; None if its data is gone.
        """
        strategy, trainer, accumulation = self.strategy, self.trainer, self.strategy.accumulation
        assert accumulation is not None
        optimizer, watch, batch_idx = strategy._lightning_optimizers[0], strategy.watch, self.epoch_loop.batch_idx
        watch.begin_step(strategy.optimizers[0])
        if accumulation.closed is None or not accumulation.closed.is_empty:  # else optimizer and hooks see no step
            closure = WindowClosure(outcome, again, watch)
            call._call_lightning_module_hook(trainer, "optimizer_step", trainer.current_epoch, batch_idx, optimizer, closure)
            outcome = closure.outcome()
        closed, ranks = accumulation.closed, accumulation.ranks
        assert closed is not None
        is_empty = closed.is_empty
        is_changed = watch.end_step()
        has_stepped = is_changed or is_empty
        if closed.is_last and ranks.size == ranks.world_size:
            trainer._signal_connector.received_sigterm = True  # a rank got SIGTERM: all end after the current loader batch
        accumulation.after_optimizer_step(has_stepped and accumulation.is_step)
        if accumulation.is_step:
            self.optim_progress.optimizer.step.increment_ready()
            self.optim_progress.optimizer.step.increment_completed()
        strategy.end_window()
        if accumulation.is_step:
            has_stepped, loader_batches = is_changed and not is_empty, accumulation.closed_loader_batches
            call_window_hooks(trainer, closed._replace(has_stepped=has_stepped, loader_batches=loader_batches))
        return outcome

    def step_without_batch(self) -> None:
        """End a window after its last loader batch, and make its step."""
        self.step(Outcome(self.strategy.session.end_window(self.epoch_loop.batch_progress.total.ready, is_reduced=False)), None)

    def forward(self, batch: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """Run ``training_step``. Returns the loss of a micro-batch, and the other outputs."""
        strategy, module = self.strategy, self.trainer.lightning_module
        output: Any
        if self._is_silent:
            output = module.training_step(batch, *self._others)
        else:
            watch, warn = strategy.watch, strategy.session.accumulation.warn_once
            if watch.is_close:
                watch.find_other_rates(strategy.optimizers[0], warn)
            output = call._call_strategy_hook(self.trainer, "training_step", batch, *self._others)
            if watch.is_close:
                watch.find_other_rates(strategy.optimizers[0], warn, is_after_step=True)
            strategy.post_training_step()
        if isinstance(output, Tensor):
            return output, _NOTHING
        result = result_of(output)
        if result.closure_loss is None:
            WindowClosure.warning_cache.warn("`training_step` returned `None`. If this was on purpose, ignore this warning.")
        return result.closure_loss, result.extra

    def zero_grad(self) -> None:
        """Clear the gradients of an earlier window."""
        strategy, optimizer, found = self.strategy, self.strategy.optimizers[0], None
        accumulation = strategy.session.accumulation
        if accumulation.changes.is_under_way and accumulation.boundary.size > 1:
            self._left = strategy.snapshotter.take(watches_parameters=False)
        if strategy.watch.is_close and not accumulation.is_passthrough():
            gradients = ((own, own.grad) for own in parameters_of(optimizer))
            found = next(((own, grad, grad._version) for own, grad in gradients if grad is not None), None)
        self._on_before_zero_grad(optimizer)
        self._optimizer_zero_grad(self.epoch_loop.batch_idx, optimizer)
        if found is not None and found[0].grad is found[1] and found[1]._version == found[2]:  # the same, with the same values
            raise UsageError(
                "The module's optimizer_zero_grad does not clear the gradients of the last window, so the new window would add to "
                "them. Have it call optimizer.zero_grad()."
            )

    def backward(self, loss: Tensor, grad_output: Tensor | None) -> None:
        """Add the gradients of ``loss``, times ``grad_output`` (None for 1), to the gradients of the window."""
        strategy = self.strategy
        is_users = not self._is_silent and not is_lightnings(self.trainer.lightning_module, "backward")
        if not is_users and not loss.requires_grad:
            raise UsageError(
                "training_step returned a loss without a graph, so it has no gradient: it was detached, computed under "
                "torch.no_grad(), or depends on no parameter that requires one. Return None if there is nothing to train on."
            )
        if self._is_silent:
            loss.backward(grad_output)  # type: ignore[no-untyped-call]
            return
        kwargs = {} if is_users or grad_output is None else {"gradient": grad_output}
        if is_users and grad_output is not None:  # it may drop keyword arguments, so it gets the product instead
            loss = loss * grad_output
        call._call_strategy_hook(self.trainer, "backward", loss, strategy.optimizers[0], **kwargs)

    def collecting_logs(self) -> AbstractContextManager[BatchLog]:
        """Inside, collect logged values without logging them."""
        return collecting_logs(self.trainer)

    def show_logs(self, outputs: Sequence[Output]) -> None:
        """Log the collected values of these micro-batches as one batch."""
        show_logs(self.trainer, outputs)


class WindowManualOptimization(_ManualOptimization):
    """Counts the steps that are not deferred, and begins and ends micro-batches."""

    strategy: Engine

    @override
    def run(self, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        """Run ``training_step``, which calls the optimizers itself, on a loader batch."""
        strategy, manual, before = self.strategy, self.strategy.manual, self.optim_step_progress.total.completed
        batch = next(iter(kwargs.values()), None)
        row_wise = NOTHING_AROUND if strategy.row_wise is None else strategy.row_wise.step(count_samples(batch))
        with strategy.around_loader_batch(batch), row_wise:
            if manual is None:
                outputs, closed, loader_batches = super().run(kwargs), list[ClosedWindow](), 1
            else:
                epoch_loop: Any = self.trainer.fit_loop.epoch_loop
                seen, is_boundary = epoch_loop.begin_loader_batch(manual.boundary)
                manual.check_batch(True, is_boundary)
                check_manual_batch(self.trainer, strategy, [batch])
                manual.begin_training_step(batch, is_boundary)
                outputs, loader_batches = super().run(kwargs), manual.boundary.position(seen)
                manual.end_training_step(seen)
                manual.announce(batch, self.trainer.accumulate_grad_batches, strategy.samples_of_loader())
                if not is_boundary:
                    return outputs
                strategy.end_window()
                closed = manual.closed
            if self.optim_step_progress.total.completed > before:
                window = closed[0] if closed else ClosedWindow(math.nan, math.nan, 1)  # if no loss was weighted
                call_window_hooks(self.trainer, window._replace(loader_batches=loader_batches, has_stepped=not window.is_empty))
        return outputs

    @override
    def _on_before_step(self) -> None:
        if not self._defers_steps():
            super()._on_before_step()

    @override
    def _on_after_step(self) -> None:
        if not self._defers_steps():
            super()._on_after_step()

    def _defers_steps(self) -> bool:
        return self.strategy.manual is not None and self.strategy.manual.current.defers_steps


def call_window_hooks(trainer: pl.Trainer, window: ClosedWindow) -> None:
    """Call ``on_window_end`` of the callbacks and of the module that have it."""
    module = trainer.lightning_module
    owners: list[Any] = [*trainer.callbacks, module]  # type: ignore[attr-defined]  # set by a connector
    listeners = [owner for owner in owners if callable(getattr(owner, "on_window_end", None))]
    if not listeners:
        return
    with replacing(module, _current_fx_name="on_train_batch_end"):  # `self.log` works as in that hook
        for owner in listeners:
            owner.on_window_end(*((window,) if owner is module else (trainer, module, window)))


# --- what nobody listens to -------------------------------------------------------------------------------------------

# Lightning's calls around a step take longer than a small micro-batch. They are skipped if no hook is overridden: each loader batch
# compares the hooks with the functions that Lightning shipped.
_AROUND_A_STEP = ShippedHooks(
    {
        pl.LightningModule: (*AROUND_BACKWARD, "backward"),
        Engine: ("training_step", "post_training_step", "pre_backward", "backward", "post_backward"),
        pl.plugins.Precision: ("train_step_context", "forward_context", "pre_backward", "backward", "post_backward"),
        pl.Callback: AROUND_BACKWARD,
    }
)
"""The functions inside Lightning's calls of ``training_step`` and backward. ``Strategy.backward`` is this package's own."""
_LIGHTNINGS_BACKWARD = pl.strategies.Strategy.backward


def _is_silent(trainer: Any, strategy: Engine) -> bool:
    """Whether no hooks run around ``training_step`` and backward of the current loader batch."""
    is_theirs = getattr(super(Engine, strategy).backward, "__func__", None) is _LIGHTNINGS_BACKWARD
    module = strategy.lightning_module
    is_plain = is_theirs and not strategy.watch.is_close and strategy.gradient_reads is None and strategy.model is module
    if not (is_plain and isinstance(trainer.profiler, SilentProfiler)):
        return False
    return _AROUND_A_STEP.are_kept_by(module, strategy, strategy.precision_plugin, *trainer.callbacks)
