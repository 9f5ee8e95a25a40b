"""The interface of this package's strategies for loops, callbacks and sessions: the differences between engines, and Lightning's
hooks of a micro-batch and of an optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader
from typing_extensions import override

from lightning_accum.accumulation import Accumulation
from lightning_accum.micro_batch import MicroBatch, Weighed
from lightning_accum.policy import Policy
from lightning_accum.ranks import Ranks
from lightning_accum.session import Session
from lightning_accum.start_line import start_line
from lightning_accum.step import Trained
from lightning_accum.sync.base import GradientSync
from lightning_accum.trainer.from_lightning import Strategy, callbacks_of, is_lightnings, move_data_to_device, pl, rank_zero_info
from lightning_accum.trainer.manual import ManualWindows
from lightning_accum.trainer.results import WindowRows
from lightning_accum.trainer.seams import LIBRARIES, ShippedHooks
from lightning_accum.trainer.watch import Watch
from lightning_accum.undo import replacing, versions_in
from lightning_accum.verdict import CannotCheckError
from lightning_accum.whole.offload import Offload
from lightning_accum.whole.row_wise import RowWise
from lightning_accum.windows import Windows

_MOVES = "on_after_batch_transfer", "transfer_batch_to_device"  # hooks that transfer a batch to the device
_AROUND_A_MOVE = ShippedHooks({pl.LightningModule: _MOVES, pl.LightningDataModule: _MOVES})


class SilentProfiler(pl.profilers.PassThroughProfiler):
    """Measures nothing, without a generator around each hook."""

    profile: Any = nullcontext  # with the name of the hook, as Lightning's


class Engine(Strategy, Trained):
    """The base class of this package's strategies. Engines with several ranks override the methods that do nothing here."""

    accumulation: Accumulation | None = None  # the state of the running ``fit``; None outside of one, and in manual optimization
    policy: Policy = Policy()
    gradient_reads: AbstractContextManager[Any] | None = None  # notices hooks that look at gradients inside of a window
    if TYPE_CHECKING:  # Lightning's
        world_size: int
        global_rank: int
    ranks: Ranks = Ranks(torch.device("cpu"))  # the ranks of the training; a single rank before a fit
    reduces_every_backward_by_itself = False
    """Whether, in manual optimization, the engine averages gradients over the ranks in every backward."""
    manual: ManualWindows | None = None
    """The windows of manual optimization; None for automatic optimization, and if a window is one micro-batch on one rank."""
    watch: Watch  # what the user's code does in a window; set in a fit
    module: pl.LightningModule = Strategy.lightning_module  # type: ignore[assignment]  # a property
    row_wise: RowWise | None = None
    """Runs submodules in micro-batches, in steps that see the whole batch; None without ``row_wise=``."""
    offload: Offload | None = None  # moves tensors that autograd saves; None without offloading
    moved: tuple[Any, list[tuple[int, int]]] = (), []  # in the first windows, the last loader batch, and its tensors before hooks
    session: Session  # runs loader batches; set with :attr:`accumulation`

    @property
    def windows(self) -> Windows | None:
        """The windows of the running ``fit``; None outside of one, and if a window is one micro-batch of manual optimization."""
        return self.accumulation if self.manual is None else self.manual

    @property
    def rows(self) -> WindowRows:
        """The object that logs windows that have ended."""
        return cast("WindowRows", self.trainer()._logger_connector)

    def set_size(self) -> None:
        """Publish the size of the next window for tuners, monitors and Lightning."""
        if self.policy.has_varying_windows and self.windows is not None:
            trainer = self.trainer()
            size = self.policy.size_at(trainer.current_epoch, self.windows.clock.optimizer_steps)
            assert size is not None
            trainer.accumulate_grad_batches = size

    def end_window(self) -> None:
        """Log a window after its step, and publish the size of the next."""
        self.set_size()
        if self.policy.log and (windows := self.windows) is not None:
            self.rows.show_window(windows)

    def _ranks(self) -> Ranks:
        """The ranks whose gradients are averaged."""
        return Ranks(self.root_device, self.world_size, None, self.world_size, self.global_rank, getattr(self, "_timeout", None))

    def _make_sync(self) -> GradientSync:
        """The gradient reduction of a fit that begins. Raises an error if the engine does not support it."""
        return GradientSync()

    def clip_by_norm(self, parameters: Iterable[Tensor], largest: float) -> Tensor:
        """Clip the gradients of ``parameters`` to a norm. Returns their norm before."""
        return torch.nn.utils.clip_grad_norm_(parameters, largest)

    def trainer(self) -> pl.Trainer:
        """The Trainer of the module."""
        return self.module.trainer

    def around_loader_batch(self, batch: Any) -> AbstractContextManager[None]:
        """The context in which a loader batch runs, whole or in micro-batches."""
        if self.offload is None:
            return nullcontext()
        return self.offload.engaged((*self.module.parameters(), *self.module.buffers(), *tree_leaves(batch)))

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        trainer, splitting = self.trainer(), None if self.accumulation is None else self.accumulation.splitting
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector, as the profiler
        is_plain = _AROUND_A_MOVE.are_kept_by(self.module, *(() if data is None else (data,)))
        if is_plain and splitting is not None and batch is not None and self.root_device.type != "cpu" and trainer.training:
            splitting.look_at(batch)  # else it returns another object
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        move: Any = super().batch_to_device
        if is_plain and move.__func__ is Strategy.batch_to_device and isinstance(profiler, SilentProfiler):
            # Lightning's calls take longer
            move = lambda batch, device, _: move_data_to_device(batch, self.root_device if device is None else device)  # noqa: E731
        moved = move(batch, device, dataloader_idx)
        self.moved = (moved, versions_in(moved)) if trainer.training and self.watch.is_close else ((), [])
        return moved

    def changing_callbacks(self) -> list[pl.Callback]:
        """The user's callbacks with a hook before a loader batch, if hooks changed the last one."""
        hooks = [own for own in callbacks_of(self.trainer()) if not own.on_train_batch_start.__module__.startswith(LIBRARIES)]
        return hooks if versions_in(self.moved[0]) != self.moved[1] else []

    @override
    def differentiated(self, loss: Tensor, share: float) -> Tensor:
        if is_lightnings(self.module, "backward") or not (share and self.module.automatic_optimization):
            return loss
        found = list[Tensor]()
        note = lambda own, gradient=None, *_, **__: found.append((own * (1 if gradient is None else gradient)).sum())  # noqa: E731
        # gradients are None here; code that looks at them is warned of
        with replacing(torch.autograd, backward=note), suppress(AttributeError, TypeError):
            self.module.backward(loss * share)
        if not found:
            raise CannotCheckError("the module's own backward does not call loss.backward()")
        return sum(found[1:], found[0]) / share

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self.manual is not None:
            return self.manual.backward(super().backward, closure_loss, optimizer, *args, **kwargs)
        with self.gradient_reads or nullcontext():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def samples_of_loader(self) -> frozenset[int]:
        """The batch sizes of the loaders; empty if one of them is unknown."""
        combined, sizes = self.trainer().fit_loop._combined_loader, set[Any]()
        for loader in [] if combined is None else combined.flattened:
            sampler = getattr(loader, "batch_sampler", None)
            size = getattr(sampler if type(sampler) is BatchSampler else loader, "batch_size", None)
            sizes.add(size if isinstance(loader, DataLoader) and isinstance(size, int) else None)
        return frozenset() if None in sizes else frozenset(sizes)

    def announce(self, micro_batch: MicroBatch, weighed: Weighed) -> None:
        """Print the start line."""
        accumulation, trainer, samples = self.accumulation, self.trainer(), self.samples_of_loader()
        assert accumulation is not None
        beside_a_bar, size = "\n" if trainer.progress_bar_callback is not None else "", trainer.accumulate_grad_batches
        rank_zero_info(beside_a_bar + start_line(accumulation, micro_batch, weighed, samples, size, trainer.num_training_batches))

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        run: Any = lambda own: super(Engine, self).optimizer_step(optimizer, own, model, **kwargs)  # noqa: E731
        return run(closure) if self.manual is None else self.manual.steps.on_step(optimizer, run, closure)
