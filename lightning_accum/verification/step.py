"""One optimizer step of a module: run by a Trainer, recorded by a callback, and undone."""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_accum.exact import is_dense
from lightning_accum.randomness import NoiseOfRows, seed_everything, switch_off_dropout
from lightning_accum.step import named_parameters_of
from lightning_accum.testing import QUIET, whole_copies
from lightning_accum.trainer.callback import GradientAccumulation
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.from_lightning import MisconfiguredError, fabric, forks_or_spawns, pl
from lightning_accum.undo import Undo
from lightning_accum.user_warnings import AccumulationWarning
from lightning_accum.weighing.nodes import nodes_below
from lightning_accum.weighing.safeguards import batch_norm_layers, freeze_batch_norm

_STEPS_IN_AN_EPOCH = 100  # the length reported to the Trainer: with one step a schedule would be all warm-up, or none
Tensors = Mapping[str, Tensor]
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_REPORTED = (AccumulationWarning, UserWarning)
"""Categories of warnings of this package and of the module; Lightning's hints have their own."""


class StepTakenError(SystemExit):
    """Ends the fit after its first step. It is not a failure, so handlers of exceptions let it pass."""


class Step(pl.Callback):
    """The record of one optimizer step. Tensors are copies in host memory, by name; complex ones are viewed as real.

    The ``given`` gradients of another step replace its own before clipping and the hooks of the step, so that only what comes after
    the backward is compared. The number of data-parallel ``ranks`` must be the same.
    """

    def __init__(self, seed: int = 0, given: Sequence[Tensors] = (), ranks: int = 1) -> None:
        self._seed, self._given, self._ranks = seed, given, ranks
        self._trained: dict[str, nn.Parameter] = {}
        self.before: dict[str, Tensor] = {}  # the trained parameters
        self.after: dict[str, Tensor] = {}
        self.gradients: list[dict[str, Tensor]] = []  # gradients of each call of the closure, after backward
        self.buffers: dict[str, Tensor] = {}  # after the step
        self.loss = float("nan")  # of the batch or of the window
        self.losses: list[float] = []  # of all backwards
        self.dtype = torch.float64  # the narrowest type in the graph of the loss
        self.parts = 1  # the number of micro-batches in the last loader batch
        self.weight: str | None = None  # of each micro-batch, in words
        self.warnings: list[str] = []
        self.noise: set[str] = set()  # the random operations that gave every row the same numbers
        self.dropout: list[str] = []  # paths of switched-off dropout
        self.batch_norm: list[str] = []  # layers that normalise by statistics of the batch they see

    @property
    def gradient(self) -> dict[str, Tensor]:
        """The gradients of the first call of the closure; zeros if there is none."""
        return self.gradients[0]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        if found != self._ranks:
            raise MisconfiguredError(f"verify(devices={self._ranks}): the strategy has {found} data-parallel ranks instead.")
        self.dropout, self.batch_norm = [path for path, *_ in switch_off_dropout(pl_module)], batch_norm_layers(pl_module)
        seed_everything(self._seed)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:  # the module's own on_train_start may add parameters or change them
            named = named_parameters_of(pl_module, trainer.optimizers)
            self._trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
            self.before = whole_copies(self._trained.items())

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self.dtype = narrowest_dtype(loss)
        self.losses.append(float(loss.detach()))

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self._trained.items()}
        self.gradients.append(whole_copies((n, g if g.layout is torch.strided else g.to_dense()) for n, g in found.items()))
        for gradients in self._given[len(self.gradients) - 1 :][:1]:
            for name, gradient in gradients.items():
                if (own := self._trained[name].grad) is not None:
                    _write(own, torch.view_as_complex(gradient) if own.is_complex() else gradient)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.gradients and batch_idx + 1 < trainer.accumulate_grad_batches:
            return
        self.after = whole_copies(self._trained.items())
        self.buffers = whole_copies((name, own) for name, own in pl_module.named_buffers() if is_dense(own))
        self._trained, self._given, self.loss = {}, (), self.losses[0] if self.losses else self.loss
        accumulation = trainer.strategy.accumulation if isinstance(trainer.strategy, Engine) else None
        if accumulation is not None and accumulation.closed is not None:
            self.loss, self.weight = float(accumulation.closed.loss), accumulation.weigher.criterion
            self.parts = len(accumulation.plan.pieces) if accumulation.plan is not None else 1
        raise StepTakenError


def narrowest_dtype(loss: Tensor) -> torch.dtype:
    """The floating-point type of the least precision in the graph of ``loss``."""
    nodes = () if loss.grad_fn is None else nodes_below(loss.grad_fn)
    found = [getattr(metadata, "dtype", None) for node in nodes for metadata in getattr(node, "_input_metadata", ())]
    dtypes = (dtype for dtype in (loss.dtype, *found) if isinstance(dtype, torch.dtype))
    floats = (dtype.to_real() for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
    return max(floats, key=lambda dtype: torch.finfo(dtype).eps)


def _write(tensor: Tensor, values: Tensor) -> None:
    """Write whole values from the host into a tensor of any device, type and layout."""
    values = values.to(tensor.device, tensor.dtype)
    if isinstance(tensor, DTensor):
        values = distribute_tensor(values, tensor.device_mesh, tensor.placements)
    tensor.copy_(values if tensor.layout is torch.strided else values.sparse_mask(tensor.coalesce()))


# --- the module that takes it -------------------------------------------------------------------------------------------


class ModuleState:
    """All state reachable from a module. The module itself runs, since closures may refer to the original."""

    def __init__(self, module: pl.LightningModule) -> None:
        trainer, name = module._trainer, type(module).__name__
        undo = Undo(module, module.device, is_deep=True)
        if trainer is not None and trainer.state.status == "running":
            raise MisconfiguredError(f"verify runs {name} itself, which is in a training: call it before trainer.fit or after it.")
        for path, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(tensor):
                raise MisconfiguredError(f"{path} has no shape yet. Run a batch through {name} before verify.")
        if found := undo.iterators():
            raise MisconfiguredError(f"verify cannot restore {found[0]}, an iterator. Remove it, or create it in setup().")
        self._module, self._before = module, undo.take(watches_parameters=False)

    @contextmanager
    def restored_afterwards(self) -> Iterator[None]:
        """Inside, the module has no Trainer and no gradients, and may be changed."""
        self._module._trainer = None
        with self._before:
            nn.Module.zero_grad(self._module)
            yield


class Change(NamedTuple):
    """The removed causes of a difference."""

    freezes_batch_norm: bool = False  # BatchNorm normalises by its running statistics
    fixes_batch_idx: bool = False  # every training_step gets the index 0
    evens_noise: bool = False  # random numbers are the same for every row


_UNCHANGED = Change()


@dataclass(frozen=True)
class StepRunner:
    """Takes optimizer steps of a module, each from its present state.

    ``module`` may be compiled; batches pass through the transfer hooks of ``hooks``.
    """

    module: pl.LightningModule
    state: ModuleState | None  # None in the process of a rank, where nothing is restored
    policy: Mapping[str, Any]
    trainer: Mapping[str, Any]
    hooks: pl.LightningDataModule | None = None

    def full(self, batch: Any, change: Change = _UNCHANGED, seed: int = 0, times: int = 1) -> Step:
        """The step of plain Lightning on one batch, or on the mean of several runs of it."""
        return self.run([batch] * times, change, Step(seed), [], strategy="auto", accumulate_grad_batches=times)

    def accumulated(
        self, batches: Sequence[Any], change: Change = _UNCHANGED, gradients: Sequence[Tensors] = (), **policy: Any
    ) -> Step:
        """Take the step of this package on a window of these loader batches, with the given ``gradients`` if there are any."""
        return self.run(batches, change, Step(given=gradients), [self.policy_for(batches, **policy)], strategy="accum")

    def policy_for(self, batches: Sequence[Any], **policy: Any) -> GradientAccumulation:
        """The callback for a window of these loader batches."""
        return GradientAccumulation(**{"log": False, **self.policy, **policy, "window": len(batches)})

    def run(self, batches: Sequence[Any], change: Change, step: Step, callbacks: Sequence[Any], **trainer: Any) -> Step:
        """Fit the module for a step, with the causes of ``change`` removed; nothing prepares data, and callbacks are left out."""
        inner, noise = uncompiled(self.module), NoiseOfRows()
        original = inner.training_step

        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            if change.freezes_batch_norm:
                freeze_batch_norm(inner)
            if change.fixes_batch_idx and len(args) > 1:
                args = (args[0], 0, *args[2:])
            noise.restart()
            with noise if change.evens_noise else nullcontext():
                return original(*args, **kwargs)

        replaced: dict[str, Any] = {"prepare_data": lambda: None, "configure_callbacks": list}
        is_overridden, own = pl.utilities.model_helpers.is_overridden, self.hooks  # they take precedence over the module's own
        replaced |= {hook: getattr(own, hook) for hook in _TRANSFER_HOOKS if own is not None and is_overridden(hook, own)}
        if change != _UNCHANGED:
            replaced["training_step"] = training_step
        restored = nullcontext() if self.state is None else self.state.restored_afterwards()
        with restored, quiet(), warnings.catch_warnings(record=True) as caught, torch.enable_grad(), suppress(StepTakenError):
            warnings.simplefilter("always")
            vars(inner).update(replaced)
            seed_everything(0)  # for setup and configure_model
            # copies each time: a module may change its batch
            data: Any = [*batches] * _STEPS_IN_AN_EPOCH
            loader = DataLoader(data, batch_size=None, collate_fn=copy.deepcopy)
            trainer = {"devices": 1, "max_epochs": 1, "num_sanity_val_steps": 0, **QUIET, **self.trainer, **trainer}
            trainer |= {"logger": pl.loggers.logger.DummyLogger(), "limit_val_batches": 0, "use_distributed_sampler": False}
            made = pl.Trainer(**trainer, callbacks=[*callbacks, step])
            if forks_or_spawns(made.strategy.launcher):
                raise MisconfiguredError(f"verify starts the ranks: pass {type(made.strategy).__name__} without start_method.")
            made.fit(self.module, loader)
        step.warnings.extend(dict.fromkeys(str(warning.message) for warning in caught if warning.category in _REPORTED))
        step.noise.update(noise.found)
        for name in ("log", "log_dict"):  # set by the Trainer, and refer to it
            vars(step).pop(name, None)
        if not step.gradients:
            raise MisconfiguredError(
                f"{type(inner).__name__} took no step: training_step returned no loss, or one without weight or a finite gradient."
            )
        return step


def uncompiled(module: Any) -> Any:
    """The module inside of ``torch.compile``'s wrapper."""
    return getattr(module, "_orig_mod", module)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the Trainers' own messages."""
    loggers = {logger: logger.level for logger in (logging.getLogger(pl.__name__), logging.getLogger(fabric.__name__))}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)
