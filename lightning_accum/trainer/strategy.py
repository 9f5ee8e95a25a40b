"""The set-up and end of a training, shared by all strategies."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum.accumulation import Accumulation
from lightning_accum.boundary import TAILS
from lightning_accum.check import MOST_BATCHES
from lightning_accum.exclusions import Asked, refuse
from lightning_accum.main_gradients import main_gradients
from lightning_accum.nonfinite import Guard
from lightning_accum.session import Session
from lightning_accum.splitting.plan import MicroBatchSizes, Splitting
from lightning_accum.trainer import seams
from lightning_accum.trainer.callback import GradientAccumulation
from lightning_accum.trainer.engine import Engine, SilentProfiler
from lightning_accum.trainer.epochs import AccumulatingEpochLoop
from lightning_accum.trainer.first_batch import unlogged_step
from lightning_accum.trainer.fit import (
    AccumulatingFitLoop,
    AccumulatingTrainer,
    DeferredSigterm,
    NonPaddingSampling,
    validating_every,
)
from lightning_accum.trainer.from_lightning import (
    MisconfiguredError,
    SIGTERMException,
    callbacks_of,
    is_lightnings,
    longest_window,
    misconfigured,
    pl,
    rank_zero_info,
    with_status,
)
from lightning_accum.trainer.manual import ManualWindows
from lightning_accum.trainer.optimization import WindowManualOptimization, WindowOptimization
from lightning_accum.trainer.results import BatchResults, WindowRows
from lightning_accum.trainer.seams import specialised
from lightning_accum.trainer.watch import Watch, gradient_reads
from lightning_accum.undo import Undo, replacing
from lightning_accum.user_warnings import rank_zero_warn
from lightning_accum.verdict import Verdict
from lightning_accum.weighing import advice
from lightning_accum.weighing.safeguards import warn_of_batch_norm, warn_of_hooks
from lightning_accum.whole.offload import Offload, offload_in_words
from lightning_accum.whole.row_proof import unproven
from lightning_accum.whole.row_wise import row_wise_of

_log = logging.getLogger(f"{pl.__name__}.accumulation")


class AccumulationMixin(Engine):
    """A mixin in front of a strategy of Lightning."""

    _hiding: ExitStack
    _callback: GradientAccumulation
    _fit: ExitStack  # undoes the changes of a fit to the Trainer, its optimizers and callbacks, and this strategy; not there before

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seams.check_nothing_is_missing()
        super().__init__(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for `import {pl.__name__}`>"  # Lightning shows it in an error about the other package

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        self._end_fit()  # of a fit whose teardown failed
        trainer = model._trainer
        if trainer is None or trainer.state.fn != "fit":
            return
        self._fit, self._hiding = ExitStack(), ExitStack()
        self.watch = Watch()
        self._fit.callback(lambda: [vars(self).pop(name, None) for name in seams.own_attributes(type(self))])
        self._fit.callback(lambda: self.ranks.close())
        self._fit.enter_context(self._installed(trainer))
        self._fit.enter_context(replacing(trainer, accumulate_grad_batches=trainer.accumulate_grad_batches))  # the policy sets it
        if not model.automatic_optimization:
            # Lightning refuses manual optimization with it, and looks only once, before the environment is set up
            self._hiding.enter_context(replacing(trainer, accumulate_grad_batches=1))
        if not _policies(trainer):
            callbacks_of(trainer).insert(0, policy := GradientAccumulation())  # the strategy alone: default policy
            self._fit.callback(_remove, policy, trainer)

    @override
    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, in no fit. Spawned loader processes get one with the data module, which holds its Trainer."""
        own = seams.own_attributes(type(self))
        return {name: value for name, value in super().__getstate__().items() if name not in own}

    def _end_fit(self) -> None:
        if "_fit" in vars(self):
            self._fit.close()

    @contextmanager
    def _installed(self, trainer: pl.Trainer) -> Iterator[None]:
        """Inside, this strategy decides; afterwards all objects have their own types. It may end with a late SIGTERM."""
        # checkpoints, tuners and callbacks refer to the loops, so each gets a subclass of its class, and is not replaced
        epoch_loop, signals = trainer.fit_loop.epoch_loop, trainer._signal_connector
        plugin, kinds = self.precision_plugin, (pl.plugins.Precision, pl.plugins.FSDPPrecision)
        has_lightnings_clipping = any(is_lightnings(plugin, "clip_grad_by_norm", kind) for kind in kinds)
        clip = partial(self._clip_by_norm, plugin.clip_grad_by_norm)
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]  # set by a connector
        is_unmeasured = type(profiler) is pl.profilers.PassThroughProfiler
        with (
            specialised(trainer, AccumulatingTrainer, is_users_first=True),
            specialised(profiler, SilentProfiler) if is_unmeasured else nullcontext(),
            specialised(trainer._data_connector, NonPaddingSampling),
            specialised(signals, DeferredSigterm),
            specialised(trainer._logger_connector, WindowRows, pending={}, in_bar={}),
            specialised(trainer.fit_loop, AccumulatingFitLoop),
            specialised(epoch_loop, AccumulatingEpochLoop, strategy=self),
            specialised(epoch_loop.automatic_optimization, WindowOptimization, strategy=self),
            specialised(epoch_loop.manual_optimization, WindowManualOptimization, strategy=self),
            specialised(epoch_loop._results, BatchResults, strategy=self, replaced={}),
            replacing(plugin, clip_grad_by_norm=clip) if has_lightnings_clipping else nullcontext(),
        ):
            yield
            epoch_loop.manual_optimization.on_run_end()  # a step that raised leaves the optimizers' hooks in place
            is_over = trainer.state.status == "running"
            is_unanswered = cast("DeferredSigterm", signals).is_waiting and not signals.received_sigterm
        if is_unanswered and is_over:
            raise with_status(SIGTERMException(), trainer)

    def _clip_by_norm(self, lightnings: Callable[..., None], optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the engine, and keep the norm, which Lightning drops."""
        if self.accumulation is None:  # manual optimization does its own clipping
            lightnings(optimizer, clip_val)
        else:
            norm, closed = self.clip_by_norm(self.precision_plugin.main_params(optimizer), clip_val), self.accumulation.closed
            self.accumulation.closed = closed and closed._replace(gradient_norm=norm)

    @override
    def setup_environment(self) -> None:
        # torch's thread pool does not survive a fork: the first thread that needs it creates a new one, and several at once fail or
        # abort ("Invalid thread pool!", pytorch/pytorch#178535; read in torch 2.13 and 2.15); here there is only one
        torch.set_num_threads(torch.get_num_threads())
        super().setup_environment()
        trainer: Any = self.trainer()
        self.ranks = self._ranks()
        if "_fit" not in vars(self):
            return
        self._hiding.close()
        every = _policies(trainer)[0].policy.validate_every  # several callbacks raise an error later
        if every is not None and not trainer.fast_dev_run:
            self._fit.enter_context(validating_every(every, trainer))

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn != "fit":
            super().setup(trainer)
            return
        (self._callback,) = _policies(trainer)
        self.policy = self._callback.policy
        super().setup(trainer)
        if differing := seams.changed():
            names = ", ".join(map(str, differing))
            found = f"Lightning {pl.__version__} has methods that differ from the versions read: {names}"
            rank_zero_warn(f"{found}. Windows may not be exact. {seams.INSTEAD}")
        self._begin(trainer)
        if self.windows is not None:
            self._callback.connect(self)
            self._fit.callback(self._callback.disconnect)

    def _begin(self, trainer: pl.Trainer) -> None:
        module, policy, size = self.module, self.policy, trainer.accumulate_grad_batches
        is_manual = not module.automatic_optimization
        asked = (policy, size, module, is_manual, self.optimizers, self.parameters(), type(self).__name__)
        with misconfigured():
            refuse(Asked(*asked, ranks=self.ranks.size, **self._engine()))
            self.row_wise = row_wise_of(policy, module, self.ranks, self.reduces_every_backward_by_itself)
        if self.row_wise is not None and self.row_wise.proofs_left and is_manual:
            rank_zero_warn(unproven(self.row_wise, "the module uses manual optimization"))
        self.offload = Offload(self.root_device) if policy.offload else None
        is_long, is_split = policy.may_be_longer_than_one(longest_window(trainer)), policy.micro_batch is not None
        if is_manual and self.ranks.size == 1 and not is_long:
            how = f", {offload_in_words(self.root_device)}" if policy.offload else ""
            rank_zero_info(f"accumulating 1 loader batch a step{how}; manual optimization: Lightning runs it unchanged")
            return
        warn_of_batch_norm(module, is_split, is_long, rank_zero_warn)
        self.snapshotter = Undo(module, self.root_device)
        if is_manual:
            reduces = self.reduces_every_backward_by_itself
            checks = MOST_BATCHES if policy.check and self._why_unchecked() is None else 0
            if checks and reduces:
                checks = 0
                rank_zero_warn(advice.of_unchecked(Verdict(None, seen="the module is sharded, and uses manual optimization"), True))
            self.manual = ManualWindows(policy, self, rank_zero_warn, reduces, self.row_wise, checks)
            self._fit.callback(self.manual.steps.end)
            return
        # a sharded module holds the whole gradients, and so their sum
        dtype = None if self.reduces_every_backward_by_itself else policy.accumulate_dtype
        sums = None if dtype is None else main_gradients(dtype, self.parameters)
        self.accumulation = Accumulation(policy, self.ranks, rank_zero_warn, self._splitting(), sums, self.row_wise)
        if sums is not None:
            self._fit.callback(sums.close)
        if policy.check and (is_long or is_split or self.world_size > 1 or policy.ends_by_tokens):
            self.accumulation.check.begin(MOST_BATCHES, self._why_unchecked())
        self.sync, guard = self._make_sync(), None
        if policy.on_nonfinite != "propagate":
            guard = Guard(self, sums or self.sync, policy.on_nonfinite == "skip", self._batch_in_words, _log.info)
        self.session = Session(self, self.accumulation, guard, self.announce)
        self._fit.callback(self.watch.forget_optimizer)

    def _batch_in_words(self) -> str:
        trainer = self.trainer()
        return f"Batch {trainer.fit_loop.epoch_loop.batch_idx} of epoch {trainer.current_epoch} on rank {self.global_rank}"

    def _engine(self) -> dict[str, Any]:
        """The engine's fields of :class:`lightning_accum.exclusions.Asked`."""
        return {}

    def _why_unchecked(self) -> str | None:
        """Why training_step cannot run on a few rows; None if it can."""
        if self.policy.weight == "equal":
            return 'weight="equal"'
        if "dataloader_iter" in inspect.signature(self.module.training_step).parameters:
            return "training_step draws its own batches"
        found = self.snapshotter.iterators()
        if self.ranks.largest(bool(found))[0] == 0:
            return None
        held = f"the module holds an iterator, {found[0]}" if found else "the module of another rank holds an iterator"
        rank_zero_warn(
            f"It is not checked that micro-batches add up to their batch: {held}, whose items cannot be put back. Have "
            "train_dataloader return both loaders, as a dict; or pass check=False if you know that they do."
        )
        return held

    def _splitting(self) -> Splitting | None:
        policy = self.policy
        if policy.micro_batch is None:
            return None
        # the check of trimming would run two rows in a forward on this rank alone
        trim = False if self.reduces_every_backward_by_itself else policy.trim_padding
        sizes = MicroBatchSizes(_log.info) if policy.micro_batch == "auto" else None
        step = lambda batch: unlogged_step(self.trainer())(batch)  # noqa: E731
        return Splitting(policy, self, trim, rank_zero_warn, self.samples_of_loader, step, sizes)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.manual is not None:
            self.manual.steps.begin(config.scheduler for config in self.lr_scheduler_configs)
        trainer, windows = self.trainer(), self.windows
        if self.accumulation is not None:
            smallest = self.policy.smallest_from(trainer.current_epoch, trainer.max_epochs, trainer.global_step)
            size = smallest or trainer.accumulate_grad_batches
            if TAILS[self.policy.tail].drops(batches := trainer.num_training_batches, size):
                found = f'With tail="{self.policy.tail}" nothing is trained: an epoch has {batches} loader batches, a window {size}'
                raise MisconfiguredError(f'{found}. Use a smaller window, or tail="step" or "carry".')
        if windows is None:
            return
        is_long = self.policy.may_be_longer_than_one(longest_window(trainer))
        has_several_backwards = is_long or self.policy.micro_batch is not None or self.ranks.size > 1
        if has_several_backwards or self.row_wise is not None:
            warn_of_hooks(self.module, rank_zero_warn)
        if has_several_backwards:
            self.gradient_reads = gradient_reads(trainer, rank_zero_warn)
        windows.begin_epoch(trainer.current_epoch)
        epoch_loop = trainer.fit_loop.epoch_loop
        ready, seen = epoch_loop.batch_progress.current.ready, epoch_loop.batch_progress.total.ready
        is_inside_epoch = epoch_loop.restarting and ready < trainer.num_training_batches
        into_window = ready % trainer.accumulate_grad_batches if is_inside_epoch else 0  # as Lightning counts
        steps = trainer.global_step if self.manual is None else 0  # global_step counts the steps of all optimizers
        state, size = self._callback.take_state(), trainer.accumulate_grad_batches
        unfinished = windows.restart(state, seen, into_window, steps, size)
        windows.restore(unfinished, self)
        self.set_size()

    @override
    def teardown(self) -> None:
        try:
            self._end_fit()
        finally:
            super().teardown()


def _remove(callback: GradientAccumulation, trainer: pl.Trainer) -> None:
    callbacks = callbacks_of(trainer)  # Lightning and its tuners replace the list
    callbacks[:] = [other for other in callbacks if other is not callback]


def _policies(trainer: pl.Trainer) -> list[GradientAccumulation]:
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, GradientAccumulation)]
