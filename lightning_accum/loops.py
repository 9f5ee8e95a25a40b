"""The places where Lightning's training loop decides about accumulation, handed over to the strategy.

This is the only file that touches Lightning's internals (underscored names). All were read in Lightning 2.6.6;
``tests/test_lightning_internals.py`` fails loudly when a release moves one.

The loops of a Trainer keep their identity and their progress, since checkpoints, tuners and callbacks hold on to them: each
gets a subclass of its own class instead of a successor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_accum.batch_log import BatchLog
from lightning_accum.batch_run import BatchRun
from lightning_accum.boundary import count_windows
from lightning_accum.gradient_norm import noting_gradient_norm
from lightning_accum.trimming import difference_by_padding

if TYPE_CHECKING:
    from lightning_accum.mixin import AccumulationMixin


def install(trainer: pl.Trainer) -> None:
    """Hand the decisions of the Trainer's fit loop over to its strategy."""
    fit_loop = trainer.fit_loop
    _specialise(trainer, _CountingTrainer)
    _specialise(fit_loop, _AccumulatingFitLoop)
    _specialise(fit_loop.epoch_loop, _AccumulatingEpochLoop)
    _specialise(fit_loop.epoch_loop.automatic_optimization, _WindowOptimization)
    _specialise(fit_loop.epoch_loop._results, _BatchResults)
    cast("_BatchResults", fit_loop.epoch_loop._results).metrics_of_module = None
    for loop in (fit_loop.epoch_loop, fit_loop.epoch_loop.automatic_optimization):
        cast("_AccumulatingEpochLoop | _WindowOptimization", loop).strategy = cast("AccumulationMixin", trainer.strategy)


def _specialise(instance: Any, mixin: type) -> None:
    if not isinstance(instance, mixin):
        instance.__class__ = _subclass(mixin, instance.__class__)


@cache
def _subclass(mixin: Any, base: Any) -> type:
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def loader_batches_seen(trainer: pl.Trainer) -> int:
    """Loader batches that training has drawn so far, over all epochs."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The Trainer's callbacks, to read and to add to."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector, unseen by type checkers
    return callbacks


def loader_batches_into_window(trainer: pl.Trainer) -> int:
    """Where in its window a run goes on that was restarted in the middle of an epoch, as Lightning counts."""
    epoch_loop = trainer.fit_loop.epoch_loop
    ready = epoch_loop.batch_progress.current.ready
    if not epoch_loop.restarting or ready >= trainer.num_training_batches:
        return 0
    return ready % trainer.accumulate_grad_batches


def is_logging_due(trainer: pl.Trainer) -> bool:
    """Whether the Trainer's loggers get metrics at this optimizer step."""
    return trainer._logger_connector.should_update_logs


def log_metrics(trainer: pl.Trainer, metrics: dict[str, float]) -> None:
    """Give metrics to the Trainer's loggers, at the step that its own metrics get."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


class _CountingTrainer(pl.Trainer):
    """``estimated_stepping_batches`` is the number of optimizer steps that will happen."""

    @property
    @override
    def estimated_stepping_batches(self) -> int | float:
        lightnings = super().estimated_stepping_batches  # also sets up the data, and knows the cases without a length
        policy = cast("AccumulationMixin", self.strategy).policy
        batches, epochs = self.num_training_batches, self.max_epochs
        if epochs is None or epochs == -1 or batches == float("inf"):
            return lightnings
        scheduler = next((c for c in callbacks_of(self) if isinstance(c, GradientAccumulationScheduler)), None)

        def size(epoch: int) -> int:
            if scheduler is not None:
                return scheduler.get_accumulate_grad_batches(epoch)
            return policy.size_at(epoch) or self.accumulate_grad_batches

        steps = count_windows(int(batches), max(epochs, 1), size, policy.tail)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)


class _AccumulatingFitLoop(_FitLoop):
    @override
    def on_run_end(self) -> None:
        epoch_loop = cast("_AccumulatingEpochLoop", self.epoch_loop)
        epoch_loop.finish_window(is_end_of_training=True)
        super().on_run_end()


class _AccumulatingEpochLoop(_TrainingEpochLoop):
    strategy: AccumulationMixin
    _inspected: Any = None
    _takes_batch_idx = False

    @override
    def _should_accumulate(self) -> bool:
        accumulation = self.strategy.accumulation
        if accumulation is None:
            return super()._should_accumulate()
        boundary = accumulation.boundary
        if boundary.is_reached(self.batch_progress.total.ready, self.trainer.accumulate_grad_batches):
            return False
        return not (self._num_ready_batches_reached() and boundary.is_cut_by_the_end(self._is_last_epoch()))

    def _is_last_epoch(self) -> bool:
        fit_loop = self.trainer.fit_loop
        epochs_done = fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]  # the tracker of epochs has it
        return fit_loop.max_epochs not in (None, -1) and bool(epochs_done + 1 >= fit_loop.max_epochs)

    @override
    def run(self, data_fetcher: _DataFetcher) -> None:
        super().run(data_fetcher)
        accumulation = self.strategy.accumulation
        if accumulation is not None and accumulation.policy.tail != "carry":
            self.finish_window(is_end_of_training=False)

    @override
    def _build_kwargs(self, kwargs: OrderedDict[str, Any], batch: Any, batch_idx: int) -> OrderedDict[str, Any]:
        # Lightning inspects the signature of training_step again for every batch, at 20 us
        function = getattr(self.trainer.lightning_module.training_step, "__func__", None)
        if function is None or function is not self._inspected:
            self._inspected = function
            kwargs = super()._build_kwargs(kwargs, batch, batch_idx)
            self._takes_batch_idx = "batch_idx" in kwargs
            return kwargs
        kwargs["batch"] = batch
        if self._takes_batch_idx:
            kwargs["batch_idx"] = batch_idx
        return kwargs

    def finish_window(self, is_end_of_training: bool) -> None:
        """An unfinished window meets the end of its epoch, or of the training."""
        accumulation = self.strategy.accumulation
        seen = self.batch_progress.total.ready
        if accumulation is None or accumulation.boundary.position(seen) <= 0:
            return
        if accumulation.policy.tail == "drop":
            lost = accumulation.discard(seen)
            call._call_lightning_module_hook(self.trainer, "zero_grad")
            rank_zero_info(
                f"GradientAccumulation(tail='drop'): the gradients of {lost} loader batches at the end of epoch"
                f" {self.trainer.current_epoch} are dropped."
            )
            return
        accumulation.boundary.cut_short(seen)
        accumulation.is_boundary = True
        self._step_without_batch()
        if self.trainer.lightning_module.automatic_optimization:
            super().update_lr_schedulers("step", update_plateau_schedulers=False)
            super().update_lr_schedulers("step", update_plateau_schedulers=True)

    @override
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        if interval == "step":
            # the first thing that Lightning does after every loader batch, also where it was None and nothing ran
            if not update_plateau_schedulers and self.batch_progress.total.ready != self.optimization.visited:
                self._visit_skipped_batch()
            if self._should_accumulate():
                return
        self._update_learning_rates(interval, update_plateau_schedulers)

    @property
    def optimization(self) -> _WindowOptimization:
        """The loop of automatic optimization, by its own type."""
        return cast("_WindowOptimization", self.automatic_optimization)

    def _visit_skipped_batch(self) -> None:
        """A loader batch that ran no training_step counts in its window, with weight 0."""
        strategy, optimization, seen = self.strategy, self.optimization, self.batch_progress.total.ready
        accumulation = strategy.accumulation
        if accumulation is None:
            return
        optimization.visited = seen
        accumulation.is_boundary = not self._should_accumulate()
        zero_grad = optimization._make_zero_grad_fn(self.batch_idx, self.trainer.optimizers[0])
        if zero_grad is not None:  # a reduction may be next, and stale gradients must not be in it
            zero_grad()
        if accumulation.is_plain():
            accumulation.discard(seen)
            accumulation.after_optimizer_step(has_stepped=False)
        elif accumulation.is_boundary:
            self._step_without_batch()
        else:
            strategy.run_without_batch()

    def _step_without_batch(self) -> None:
        self.optimization._optimizer_step(self.batch_idx, self.strategy.run_without_batch)

    @override
    def _update_learning_rates(self, interval: str, update_plateau_schedulers: bool) -> None:
        strategy = self.strategy
        if interval != "step" or strategy.accumulation is None:
            super()._update_learning_rates(interval, update_plateau_schedulers)
            return
        # Lightning counts loader batches of the epoch; what is due is decided here, and stepped by Lightning
        clock = strategy.accumulation.clock
        configs = strategy.lr_scheduler_configs
        due = []
        for config in configs:
            if config.interval == "step":
                due += [replace(config, frequency=1)] * clock.times_due(config.frequency)
        strategy.lr_scheduler_configs = due
        try:
            super()._update_learning_rates(interval, update_plateau_schedulers)
        finally:
            strategy.lr_scheduler_configs = configs


class _WindowOptimization(_AutomaticOptimization):
    strategy: AccumulationMixin
    visited = 0
    """The loader batch whose training_step ran last, counted from 1 over all epochs."""

    @override
    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        accumulation = self.strategy.accumulation
        if accumulation is None:
            return super()._make_closure(kwargs, optimizer, batch_idx)
        epoch_loop = self.trainer.fit_loop.epoch_loop
        self.visited = epoch_loop.batch_progress.total.ready
        if self._skip_backward:  # StochasticWeightAveraging passes over the data without training
            accumulation.window.discard()
        accumulation.is_boundary = not epoch_loop._should_accumulate()
        accumulation.batch = next(iter(kwargs.values()), None)
        if accumulation.splitting is not None:
            accumulation.splitting.begin(accumulation.batch, partial(self._difference_by_padding, kwargs))
        return _WindowClosure(
            self._make_step_fn(kwargs),
            self._make_backward_fn(optimizer),
            self._make_zero_grad_fn(batch_idx, optimizer),
            strategy=self.strategy,
            kwargs=kwargs,
        )

    def _difference_by_padding(self, kwargs: OrderedDict[str, Any], padded: Any, trimmed: Any) -> str | None:
        trainer, accumulation = self.trainer, self.strategy.accumulation
        assert accumulation is not None
        assert accumulation.splitting is not None
        precision = trainer.precision_plugin

        def training_step(batch: Any) -> Any:
            # in full precision, where rounding is the least; a module's loss hardly changes by what it sees of padding
            context = nullcontext() if isinstance(precision, MixedPrecision) else precision.train_step_context()
            with torch.enable_grad(), context, collecting_logs(trainer):
                arguments = {**kwargs, next(iter(kwargs)): batch}
                return call._call_lightning_module_hook(trainer, "training_step", *arguments.values())

        weigh = accumulation.policy.weight
        return difference_by_padding(
            padded,
            trimmed,
            trainer.lightning_module,
            accumulation.splitting.keeper,
            training_step,
            weigh if callable(weigh) else None if weigh == "auto" else lambda batch: 1.0,
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
            self._on_before_zero_grad(optimizer)
            self._optimizer_zero_grad(batch_idx, optimizer)

        return zero_grad_fn

    @override
    def _training_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        if self.strategy.accumulation is None:
            return super()._training_step(kwargs)
        # Lightning divides the loss by accumulate_grad_batches here, and refuses None on more than one rank
        output = call._call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        if isinstance(output, Tensor):
            return ClosureResult(output)
        result = ClosureResult.from_training_step_output(output)
        if isinstance(output, Mapping):
            result.closure_loss = output["loss"]  # without a division by 1
        return result

    @override
    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Callable[[], Tensor | None]) -> None:
        strategy = self.strategy
        if strategy.accumulation is None:
            super()._optimizer_step(batch_idx, train_step_and_backward_closure)
            return
        with noting_gradient_norm(self.trainer, strategy.accumulation):
            super()._optimizer_step(batch_idx, train_step_and_backward_closure)
        strategy.after_optimizer_step()
        closed = strategy.accumulation.closed
        if closed is not None and closed.is_empty:  # no step was taken, none is counted
            for tracker in (self.optim_progress.optimizer.step.total, self.optim_progress.optimizer.step.current):
                tracker.ready -= 1
                tracker.completed -= 1


class _WindowClosure(Closure):
    """Lightning's closure (training_step, zero_grad, backward), and at a boundary the end of the window."""

    def __init__(self, *functions: Any, strategy: AccumulationMixin, kwargs: OrderedDict[str, Any]) -> None:
        super().__init__(*functions)
        self._strategy = strategy
        self._kwargs = kwargs
        self._runs = 0

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
        if accumulation.plan is not None:
            return self._run_micro_batches()
        self._result = self.closure(*args, **kwargs)
        window_loss = self._strategy.end_micro_batch()
        return self._result.loss if accumulation.is_plain() else window_loss

    def _run_micro_batches(self) -> Tensor | None:
        strategy, trainer = self._strategy, self._strategy.trainer()
        module, zero_grad, backward = trainer.lightning_module, self._zero_grad_fn, strategy.backward_without_hooks
        batch_name, *others = self._kwargs
        others = [self._kwargs[name] for name in others]
        training_step = module.training_step if _is_step_bare(trainer) else strategy.training_step

        def run_with_hooks(batch: Any) -> tuple[Tensor | None, dict[str, Any]]:
            self._kwargs[batch_name] = batch
            result = self.closure()
            return result.loss, result.extra

        def run_without_hooks(batch: Any) -> tuple[Tensor | None, dict[str, Any]]:
            nonlocal zero_grad
            output = training_step(batch, *others)
            loss, extra = (output, _NOTHING) if isinstance(output, Tensor) else _loss_and_extra(output)
            if zero_grad is not None:
                zero_grad()
                zero_grad = None
            if loss is not None:
                backward(loss)
            return loss, extra

        if strategy.is_heard is None:
            strategy.is_heard = _is_micro_batch_heard(trainer)
        run_micro_batch = run_with_hooks if strategy.is_heard or self._backward_fn is None else run_without_hooks
        run = BatchRun(strategy, run_micro_batch, partial(collecting_logs, trainer), partial(show_logs, trainer))
        with _current_hook(module, "training_step"), torch.enable_grad():
            loss, extra, window_loss = run()
        self._result = ClosureResult(None, extra=extra)
        self._result.loss = loss
        return window_loss


_NOTHING: dict[str, Any] = {}


def _loss_and_extra(output: Any) -> tuple[Tensor | None, dict[str, Any]]:
    result = ClosureResult.from_training_step_output(output)
    return (output["loss"] if isinstance(output, Mapping) else None), result.extra


def _is_micro_batch_heard(trainer: pl.Trainer) -> bool:
    """Whether anything would notice that training_step and backward of a micro-batch run without Lightning's calls around them.

    They take several times as long as the rest of a small micro-batch: two profiler scopes, four hooks of every callback.
    """
    hooks, strategy, precision = ("on_before_backward", "on_after_backward"), trainer.strategy, type(trainer.precision_plugin)
    return not (
        type(trainer.profiler) is PassThroughProfiler  # type: ignore[attr-defined]  # set by a connector
        and all(_is_inherited(type(callback), pl.Callback, hooks) for callback in callbacks_of(trainer))
        and _is_inherited(type(trainer.lightning_module), pl.LightningModule, (*hooks, "backward"))
        and _is_inherited(precision, Precision, ("pre_backward", "backward", "post_backward"))
        and _is_inherited(type(strategy), Strategy, ("pre_backward", "post_backward", "post_training_step"))
    )


def _is_step_bare(trainer: pl.Trainer) -> bool:
    """Whether a training_step needs nothing around it: no wrapper of the module, no autocast."""
    strategy = trainer.strategy
    return (
        type(strategy).training_step is Strategy.training_step
        and strategy.model is trainer.lightning_module
        and _is_inherited(type(trainer.precision_plugin), Precision, ("train_step_context", "forward_context"))
    )


def _is_inherited(type_: type, base: type, names: tuple[str, ...]) -> bool:
    return all(getattr(type_, name, None) is getattr(base, name, None) for name in names)


@contextmanager
def _current_hook(module: pl.LightningModule, name: str) -> Iterator[None]:
    """The hook that ``module.log`` is called in."""
    attributes = vars(module)  # of a Module, setting one takes microseconds
    before = module._current_fx_name
    attributes["_current_fx_name"] = name
    try:
        yield
    finally:
        attributes["_current_fx_name"] = before


# --- what is logged in the micro-batches of a batch -------------------------------------------------------------------


class _BatchResults(_ResultCollection):
    """Keeps what is logged in a micro-batch apart until its batch ends."""

    batch_log: BatchLog | None = None
    metrics_of_module: list[Metric] | None = None
    shown: set[int]
    _is_batch_size_given = False

    @override
    def log(self, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        self._is_batch_size_given = batch_size is not None
        super().log(*args, batch_size=batch_size, **kwargs)

    @override
    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        if self.batch_log is None:
            super().update_metrics(key, value, batch_size)
        else:
            self.batch_log.collect(key, value, batch_size, self._is_batch_size_given)


@contextmanager
def collecting_logs(trainer: pl.Trainer) -> Iterator[BatchLog]:
    """Collect what the module logs, and log nothing yet."""
    module, results = trainer.lightning_module, cast("_BatchResults", trainer.fit_loop.epoch_loop._results)
    if results.metrics_of_module is None:
        results.metrics_of_module = [child for child in module.modules() if isinstance(child, Metric)]
        results.shown = set()
    log = BatchLog(results.metrics_of_module, results.shown)
    modules_own = module.log

    def look_and_log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        log.look_at(value)
        modules_own(name, value, *args, **kwargs)

    attributes = vars(module)
    had_log = attributes.get("log")
    results.batch_log = log
    attributes["log"] = look_and_log
    try:
        yield log
    finally:
        results.batch_log = None
        del attributes["log"]
        if had_log is not None:
            attributes["log"] = had_log
        log.close(lambda key: results[key].meta.on_step)


def show_logs(trainer: pl.Trainer, log: BatchLog) -> None:
    """Log what was collected, as the whole batch would have."""
    results = trainer.fit_loop.epoch_loop._results
    for key, value, batch_size in log.merged(lambda key: results[key].meta.reduce_fx):
        results.update_metrics(key, value, batch_size)
