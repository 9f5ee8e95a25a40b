"""Automatic optimization of a window: one loader batch, as it is or in micro-batches, and the optimizer step at its end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.optimization.closure import AbstractClosure
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum.backward import backward
from lightning_accum.boundary import Boundary
from lightning_accum.engine import Engine
from lightning_accum.gradient_norm import noting_gradient_norm
from lightning_accum.loops.first_batch import check_first_batch, choose_row_wise, unlogged_step
from lightning_accum.loops.results import collecting_logs, show_logs
from lightning_accum.splitting.batch_log import BatchLog
from lightning_accum.splitting.proofs import Verdict
from lightning_accum.splitting.trimming import difference_by_padding

if TYPE_CHECKING:
    from lightning_accum.accumulation import Accumulation

_NOTHING: dict[str, Any] = {}
_NOTHING_AROUND = nullcontext()


class EpochLoop(Protocol):
    """What the loop of automatic optimization asks of the loop that it is a part of."""

    batch_progress: Any
    batch: Any

    def begin_loader_batch(self, boundary: Boundary) -> bool:
        """A loader batch begins. Returns whether its window ends with it."""

    def end_full_window(self) -> None:
        """A loader batch has ended: so does the window, if it has come to its tokens."""


class WindowOptimization(_AutomaticOptimization):
    """A loader batch adds to a window instead of being a part of one."""

    strategy: Engine
    visited: int = 0
    """The loader batch whose training_step ran last, counted from 1 over all epochs."""

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        strategy = self.strategy
        strategy.watch.run("_AutomaticOptimization")
        with _NOTHING_AROUND if strategy.offload is None else strategy.around_loader_batch(kwargs):
            if strategy.accumulation is None:
                outputs = super().run(optimizer, batch_idx, kwargs)
            else:
                closure = self._closure_of(kwargs, optimizer, batch_idx, strategy.accumulation)
                if closure.ends_window:
                    self.step(batch_idx, closure)
                else:
                    closure()
                result = closure.consume_result()
                outputs = {} if result.loss is None else result.asdict()
        strategy.watch.end_run()
        if strategy.accumulation is not None:
            strategy.accumulation.end_loader_batch(self.visited)
            if strategy.policy.ends_by_tokens:
                cast("EpochLoop", self.trainer.fit_loop.epoch_loop).end_full_window()
        return outputs

    def _closure_of(
        self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int, accumulation: Accumulation
    ) -> WindowClosure:
        """What runs a loader batch that begins now."""
        strategy = self.strategy
        epoch_loop = cast("EpochLoop", self.trainer.fit_loop.epoch_loop)
        self.visited = epoch_loop.batch_progress.total.ready
        if self._skip_backward:  # StochasticWeightAveraging passes over the data without training
            accumulation.window.discard()
        ends_window = epoch_loop.begin_loader_batch(accumulation.boundary)
        batch = next(iter(kwargs.values()), None)
        if strategy.hooks.step_counters:
            epoch_loop.batch = batch
        if accumulation.splitting is not None:
            accumulation.splitting.begin(batch, partial(self._difference_by_padding, kwargs))
        if strategy.row_wise is not None and strategy.row_wise.is_undecided:
            choose_row_wise(self.trainer, strategy, strategy.row_wise, kwargs)
        if accumulation.checks_left and not self._skip_backward:
            check_first_batch(self.trainer, strategy, kwargs)
        return WindowClosure(self, strategy, kwargs, optimizer, batch_idx, ends_window)

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

    def zero_grad(self, optimizer: Optimizer, batch_idx: int) -> None:
        """Clear the gradients of an earlier window."""
        if self.strategy.hooks.has_backward:
            with self.strategy.watch.zero_grad(optimizer) if self.strategy.watch.is_close else _NOTHING_AROUND:
                self._on_before_zero_grad(optimizer)
                self._optimizer_zero_grad(batch_idx, optimizer)
            return
        progress = self.optim_progress.optimizer.zero_grad
        progress.increment_ready()
        progress.increment_started()
        optimizer.zero_grad()
        progress.increment_completed()

    def step(self, batch_idx: int, closure: Callable[[], Tensor | None]) -> None:
        """Make the optimizer step of a window that ``closure`` ends."""
        strategy, accumulation = self.strategy, self.strategy.accumulation
        assert accumulation is not None
        strategy.watch.expect_schedulers()
        strategy.hooks.look_again()
        accumulation.closed = None
        optimizer, progress, trainer = strategy._lightning_optimizers[0], self.optim_progress.optimizer.step, self.trainer
        progress.increment_ready()
        with noting_gradient_norm(trainer, strategy):
            if strategy.hooks.has_step or accumulation.is_passthrough():
                arguments = (trainer.current_epoch, batch_idx, optimizer, closure)
                call._call_lightning_module_hook(trainer, "optimizer_step", *arguments)
            else:
                strategy.optimizer_step(optimizer._optimizer, closure)
        progress.increment_completed()
        strategy.after_optimizer_step()
        if not accumulation.is_step:  # none is counted
            for tracker in (progress.total, progress.current):
                tracker.ready -= 1
                tracker.completed -= 1


class WindowClosure(AbstractClosure[ClosureResult]):
    """Runs a loader batch, up to the end of its window where it is the last; and how its micro-batches are run.

    Args:
        optimization: the loop that it runs in.
        strategy: of the Trainer.
        kwargs: of ``training_step``.
        optimizer: of the module.
        batch_idx: of the loader batch.
        ends_window: it is the last of its window.
    """

    _warning_cache = WarningCache()

    def __init__(
        self,
        optimization: WindowOptimization,
        strategy: Engine,
        kwargs: OrderedDict[str, Any],
        optimizer: Optimizer,
        batch_idx: int,
        ends_window: bool,
    ) -> None:
        super().__init__()
        self.ends_window = ends_window
        self.skips_backward = optimization._skip_backward
        self._optimization = optimization
        self._strategy = strategy
        self._optimizer = optimizer
        self._batch_idx = batch_idx
        self._batch, *self._others = kwargs.values()
        self._runs = 0
        module, hooks = optimization.trainer.lightning_module, strategy.hooks
        self._module = module
        self._training_step = module.training_step if hooks.is_step_bare else strategy.training_step
        self._has_hooks = hooks.has_backward
        if not self._has_hooks:
            self.backward = backward  # type: ignore[method-assign, assignment]

    @override
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        self(*args, **kwargs)
        assert self._result is not None
        return self._result

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self._runs += 1
        accumulation = self._strategy.accumulation
        assert accumulation is not None
        if self._runs > 1 and accumulation.boundary.size != 1:
            raise RuntimeError(
                "The optimizer calls its closure more than once in a step, as LBFGS does. A window of several loader batches"
                " cannot be run again: their data is gone. Use a window of 1, or another optimizer."
            )
        attributes = vars(self._module)  # as `current_hook` does: a context would take longer than the rest
        before = attributes["_current_fx_name"]
        attributes["_current_fx_name"] = "training_step"
        try:
            with torch.enable_grad():
                outcome = self._strategy.session.run(self, self._batch, self.ends_window)
        finally:
            attributes["_current_fx_name"] = before
        self._result = ClosureResult(None, extra=outcome.extra)
        self._result.loss = None if outcome.loss is None else outcome.loss.detach().clone()
        return outcome.window_loss

    # --- one micro-batch ------------------------------------------------------------------------------------------

    def forward(self, batch: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """``training_step``: the loss of a micro-batch, and what else it returned."""
        step = self._training_step_with_hooks if self._has_hooks else self._training_step
        output: Any = step(batch, *self._others)
        if isinstance(output, Tensor):
            return output, _NOTHING
        result = _result_of(output)
        if result.closure_loss is None:
            self._warning_cache.warn("`training_step` returned `None`. If this was on purpose, ignore this warning.")
        return result.closure_loss, result.extra

    def _training_step_with_hooks(self, *args: Any) -> Any:
        strategy = self._strategy
        with strategy.watch.training_step(self._module) if strategy.watch.is_close else _NOTHING_AROUND:
            output = call._call_strategy_hook(self._optimization.trainer, "training_step", *args)
        strategy.post_training_step()
        return output

    def zero_grad(self) -> None:
        """Clear the gradients of an earlier window."""
        self._optimization.zero_grad(self._optimizer, self._batch_idx)

    def backward(self, loss: Tensor, grad_output: Tensor | None) -> None:
        """Add the gradients of ``loss`` to those of the window, times ``grad_output`` (None for 1)."""
        strategy, kwargs = self._strategy, {}
        if grad_output is not None and not strategy.takes_gradient:
            loss, grad_output = loss * grad_output, None
        if grad_output is not None:
            kwargs["gradient"] = grad_output
        with strategy.watching_gradient(loss, grad_output) if strategy.watch.is_close else _NOTHING_AROUND:
            call._call_strategy_hook(self._optimization.trainer, "backward", loss, self._optimizer, **kwargs)

    def collecting_logs(self) -> AbstractContextManager[BatchLog]:
        """Collect what is logged in here, and log nothing yet."""
        return collecting_logs(self._optimization.trainer)

    def show_logs(self, log: BatchLog, is_left_out: bool) -> None:
        """Log what was collected."""
        show_logs(self._optimization.trainer, log, is_left_out)


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
