"""Automatic optimization of a window: one loader batch, as it is or in micro-batches, and the optimizer step at its end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum.gradient_norm import noting_gradient_norm
from lightning_accum.loops.first_batch import check_first_batch, choose_row_wise, unlogged_step
from lightning_accum.loops.results import collecting_logs, current_hook, show_logs
from lightning_accum.splitting.batch_run import BatchRun
from lightning_accum.splitting.proofs import Verdict
from lightning_accum.splitting.trimming import difference_by_padding

if TYPE_CHECKING:
    from lightning_accum.accumulation import Accumulation
    from lightning_accum.loops.epochs import AccumulatingEpochLoop
    from lightning_accum.nonfinite import Guard
    from lightning_accum.strategies.mixin import AccumulationMixin

_NOTHING: dict[str, Any] = {}
_NOTHING_AROUND = nullcontext()


class WindowOptimization(_AutomaticOptimization):
    """A loader batch adds to a window instead of being a part of one."""

    strategy: AccumulationMixin
    visited: int = 0
    """The loader batch whose training_step ran last, counted from 1 over all epochs."""

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        self.strategy.watch.run("_AutomaticOptimization")
        with self.strategy.around_loader_batch(kwargs):
            outputs = super().run(optimizer, batch_idx, kwargs)
        self.strategy.watch.end_run()
        if (accumulation := self.strategy.accumulation) is not None:
            accumulation.end_loader_batch(self.visited)
        self.trainer.fit_loop.epoch_loop.end_full_window()  # type: ignore[attr-defined]  # it has been made an AccumulatingEpochLoop
        return outputs

    @override
    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        self.strategy.watch.make_closure()
        accumulation = self.strategy.accumulation
        if accumulation is None:
            return super()._make_closure(kwargs, optimizer, batch_idx)
        epoch_loop = cast("AccumulatingEpochLoop", self.trainer.fit_loop.epoch_loop)
        self.visited = epoch_loop.batch_progress.total.ready
        if self._skip_backward:  # StochasticWeightAveraging passes over the data without training
            accumulation.window.discard()
        accumulation.is_boundary = epoch_loop.begin_loader_batch(accumulation.boundary)
        accumulation.batch = next(iter(kwargs.values()), None)
        if self.strategy.audience.step_counters:
            epoch_loop.batch = accumulation.batch
        if accumulation.splitting is not None:
            accumulation.splitting.begin(accumulation.batch, partial(self._difference_by_padding, kwargs))
        if self.strategy.row_wise is not None and self.strategy.row_wise.is_undecided:
            choose_row_wise(self.trainer, self.strategy, self.strategy.row_wise, kwargs)
        if accumulation.checks_left and not self._skip_backward:
            check_first_batch(self.trainer, self.strategy, kwargs)
        return WindowClosure(
            self._make_step_fn(kwargs),
            self._make_backward_fn(optimizer),
            self._make_zero_grad_fn(batch_idx, optimizer),
            strategy=self.strategy,
            kwargs=kwargs,
        )

    def _difference_by_padding(self, kwargs: OrderedDict[str, Any], padded: Any, *trimmed: Any) -> Verdict:
        trainer, accumulation = self.trainer, self.strategy.accumulation
        assert accumulation is not None
        assert accumulation.splitting is not None
        weigh = accumulation.policy.weight
        return difference_by_padding(
            padded,
            *trimmed,
            module=trainer.lightning_module,
            keeper=accumulation.splitting.keeper,
            training_step=unlogged_step(trainer, kwargs),
            weigh=weigh if callable(weigh) else None if weigh != "equal" else lambda batch: 1.0,
        )

    @override
    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        accumulation = self.strategy.accumulation
        if accumulation is None:
            return super()._make_zero_grad_fn(batch_idx, optimizer)
        if self._skip_backward or not accumulation.is_zero_grad_due:
            return None

        def zero_grad_fn() -> None:
            if not accumulation.is_zero_grad_due:  # a micro-batch of the same batch
                return
            accumulation.is_zero_grad_due = False
            # parameters of sharded modules are others between forward and backward
            if not (accumulation.is_plain() or self.strategy.is_waited_for_in_forward):
                accumulation.changes.begin(self.trainer.lightning_module, accumulation.epoch)
            if not self.strategy.audience.hears_micro_batch:
                progress = self.optim_progress.optimizer.zero_grad
                progress.increment_ready()
                progress.increment_started()
                optimizer.zero_grad()
                progress.increment_completed()
                return
            with self.strategy.watch.zero_grad(optimizer) if self.strategy.watch.is_close else _NOTHING_AROUND:
                self._on_before_zero_grad(optimizer)
                self._optimizer_zero_grad(batch_idx, optimizer)

        return zero_grad_fn

    @override
    def _training_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        if self.strategy.accumulation is None:
            return super()._training_step(kwargs)
        # Lightning divides the loss by accumulate_grad_batches here, and refuses None on more than one rank
        watch = self.strategy.watch
        with watch.training_step(self.trainer.lightning_module) if watch.is_close else _NOTHING_AROUND:
            output = call._call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        self.strategy.post_training_step()
        result = _result_of(output)
        watch.returned = result.closure_loss
        return result

    @override
    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Callable[[], Tensor | None]) -> None:
        strategy = self.strategy
        if strategy.accumulation is None:
            super()._optimizer_step(batch_idx, train_step_and_backward_closure)
            return
        if isinstance(train_step_and_backward_closure, WindowClosure):
            strategy.watch.begin_step(train_step_and_backward_closure.runs == 0, strategy.accumulation.is_boundary)
        strategy.watch.expect_schedulers()
        strategy.audience.look_again()
        strategy.accumulation.closed = None
        if strategy.accumulation.is_plain() or strategy.audience.hears_step or self.trainer.gradient_clip_val:
            with noting_gradient_norm(self.trainer, strategy):
                super()._optimizer_step(batch_idx, train_step_and_backward_closure)
        else:
            self._unheard_optimizer_step(train_step_and_backward_closure)
        strategy.after_optimizer_step()
        if not strategy.accumulation.is_step:  # none is counted
            for tracker in (self.optim_progress.optimizer.step.total, self.optim_progress.optimizer.step.current):
                tracker.ready -= 1
                tracker.completed -= 1

    def _unheard_optimizer_step(self, closure: Callable[[], Tensor | None]) -> None:
        """As Lightning's, without the hook of the module, which is Lightning's own and would call the strategy."""
        assert self.strategy.accumulation is not None
        self.strategy.accumulation.gradient_norm = None
        (optimizer, *_), progress = self.strategy._lightning_optimizers, self.optim_progress.optimizer.step
        is_counted = not self.trainer.fit_loop._should_accumulate()
        if is_counted:
            progress.increment_ready()
        self.strategy.step_unheard(optimizer._optimizer, closure)
        if is_counted:
            progress.increment_completed()


class WindowClosure(Closure):
    """Lightning's closure (training_step, zero_grad, backward), and at a boundary the end of the window."""

    def __init__(self, *functions: Any, strategy: AccumulationMixin, kwargs: OrderedDict[str, Any]) -> None:
        super().__init__(*functions)
        self._strategy = strategy
        self._kwargs = kwargs
        self.runs = 0

    @override
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        result = super().closure(*args, **kwargs)
        if self._strategy.watch.returned is not None:
            self._strategy.watch.end_closure(self._backward_fn is not None)
        return result

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self.runs += 1
        accumulation = self._strategy.accumulation
        assert accumulation is not None
        if self.runs > 1 and accumulation.boundary.size != 1:
            raise RuntimeError(
                "The optimizer calls its closure more than once in a step, as LBFGS does. A window of several loader batches"
                " cannot be run again: their data is gone. Use a window of 1, or another optimizer."
            )
        with self._strategy.running_row_wise(next(iter(self._kwargs.values()), None)):
            return self._run_or_stand_in(accumulation, *args, **kwargs)

    def _run_or_stand_in(self, accumulation: Accumulation, *args: Any, **kwargs: Any) -> Tensor | None:
        if not accumulation.is_stand_in:
            return self._run(*args, **kwargs)
        if self._zero_grad_fn is not None:  # what it does to the module is to last
            self._zero_grad_fn()
        snapshot = self._strategy.keeper.take(watches_parameters=False)
        try:
            return self._run(*args, **kwargs)
        finally:
            snapshot.restore()

    def _run(self, *args: Any, **kwargs: Any) -> Tensor | None:
        accumulation = self._strategy.accumulation
        assert accumulation is not None
        accumulation.count_ahead(next(iter(self._kwargs.values())))
        if accumulation.plan is not None:
            return self._run_micro_batches()
        if self._strategy.guard is not None:
            return self._run_before_reduction(self._strategy.guard)
        if accumulation.is_plain():
            self._result = self.closure(*args, **kwargs)
            self._strategy.end_micro_batch()
            return self._result.loss
        if self._strategy.row_wise is not None:
            return self._run_before_reduction(None)
        self._result = self._run_step()
        return self._strategy.end_micro_batch()

    def _run_step(self) -> ClosureResult:
        is_heard = self._strategy.audience.hears_micro_batch or self._backward_fn is None
        return self.closure() if is_heard else self._run_unheard()

    def _run_unheard(self) -> ClosureResult:
        """As Lightning's closure, where nobody hears what it calls."""
        strategy, trainer = self._strategy, self._strategy.trainer()
        module = trainer.lightning_module
        training_step = module.training_step if strategy.audience.is_step_bare else strategy.training_step
        with current_hook(module, "training_step"), torch.enable_grad():
            result = _result_of(training_step(*self._kwargs.values()))
            if self._zero_grad_fn is not None:
                self._zero_grad_fn()
            if result.closure_loss is None:
                self.warning_cache.warn("`training_step` returned `None`. If this was on purpose, ignore this warning.")
            else:
                strategy.backward_without_hooks(result.closure_loss)
        return result

    def _run_before_reduction(self, guard: Guard | None) -> Tensor | None:
        """Run a loader batch that does not end its window: it may be left out, or it has more backwards than one.

        One that may be left out is not shown before it was looked at.
        """
        strategy, trainer = self._strategy, self._strategy.trainer()
        accumulation = strategy.accumulation
        assert accumulation is not None
        ends_window, accumulation.is_boundary = accumulation.is_boundary, False
        with collecting_logs(trainer) if accumulation.policy.on_nonfinite == "skip" else nullcontext() as log:
            if guard is not None:
                guard.begin_micro_batch()
            with strategy.blocked():
                self._result = self.closure() if guard is not None else self._run_step()
                strategy.end_micro_batch()
            is_left_out = guard is not None and guard.end_micro_batch()
        if is_left_out:
            self._result = ClosureResult(None)
        if log is not None:
            log.weigh([accumulation.weight], [1])
            show_logs(trainer, log, is_left_out)
        return strategy.end_window_apart() if ends_window else None

    def _run_micro_batches(self) -> Tensor | None:
        strategy, trainer = self._strategy, self._strategy.trainer()
        module, zero_grad, backward = trainer.lightning_module, self._zero_grad_fn, strategy.backward_without_hooks
        batch_name, *others = self._kwargs
        others = [self._kwargs[name] for name in others]
        collecting, show = partial(collecting_logs, trainer), partial(show_logs, trainer)

        training_step = module.training_step if strategy.audience.is_step_bare else strategy.training_step

        def run_with_hooks(batch: Any) -> tuple[Tensor | None, dict[str, Any]]:
            self._kwargs[batch_name] = batch
            result = self.closure()
            return result.closure_loss, result.extra

        def run_without_hooks(batch: Any) -> tuple[Tensor | None, dict[str, Any]]:
            nonlocal zero_grad
            output: Any = training_step(batch, *others)
            loss, extra = output, _NOTHING
            if not isinstance(output, Tensor):
                result = _result_of(output)
                loss, extra = result.closure_loss, result.extra
            if zero_grad is not None:
                zero_grad()
                zero_grad = None
            if loss is not None:
                backward(loss)
            return loss, extra

        run_micro_batch = run_with_hooks if strategy.audience.hears_micro_batch or self._backward_fn is None else run_without_hooks
        run = BatchRun(strategy, run_micro_batch, collecting, show)
        with current_hook(module, "training_step"), torch.enable_grad():
            loss, extra, window_loss = run()
        self._result = ClosureResult(None, extra=extra)
        self._result.loss = loss
        return window_loss


def loss_unlogged(trainer: pl.Trainer, batch: Any) -> Tensor | None:
    """The loss of a batch that is not trained on: nothing is logged."""
    epoch_loop = trainer.fit_loop.epoch_loop
    kwargs = epoch_loop._build_kwargs(OrderedDict(), batch, epoch_loop.batch_idx)
    with torch.enable_grad(), collecting_logs(trainer):
        return _result_of(call._call_lightning_module_hook(trainer, "training_step", *kwargs.values())).closure_loss


def _result_of(output: Any) -> ClosureResult:
    """What training_step returned, with the loss as it is."""
    if isinstance(output, Tensor):
        return ClosureResult(output)
    result = ClosureResult.from_training_step_output(output)
    if isinstance(output, Mapping):
        result.closure_loss = output["loss"]  # without a division by 1
    return result
