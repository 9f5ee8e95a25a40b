"""One optimizer step of a module, taken by a Trainer and then undone."""

from __future__ import annotations

import copy
import functools
import logging
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from lightning_accum.arguments import MisconfiguredError
from lightning_accum.callback import GradientAccumulation
from lightning_accum.errors import UsageError
from lightning_accum.from_lightning import DummyLogger, fabric, is_overridden, pl
from lightning_accum.loops.installation import forks_or_spawns
from lightning_accum.randomness import NoiseOfRows, seed_everything
from lightning_accum.state_kinds import hooks_of
from lightning_accum.testing import QUIET
from lightning_accum.undo import Undo
from lightning_accum.user_warnings import AccumulationWarning
from lightning_accum.verification.record import Step, StepRecorder, StepTakenError
from lightning_accum.weighing.safeguards import freeze_batch_norm

_STEPS_IN_AN_EPOCH = 100
"""What the Trainer expects to have ahead of it: a schedule over one step would be all warm-up, or none."""
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_REPORTED = (AccumulationWarning, UserWarning)
"""Warnings of this package and of the module; Lightning's hints have categories of their own."""


class ModuleState:
    """Everything reachable from a module. It runs itself: a copy would lose what has captured the original."""

    def __init__(self, module: pl.LightningModule) -> None:
        trainer, name = module._trainer, type(module).__name__
        if trainer is not None and trainer.training and trainer.world_size > 1:
            raise MisconfiguredError(
                f"verify runs {name} itself, which is in a training over {trainer.world_size} ranks now: their reduction"
                " of gradients is tied to its parameters. Call verify before trainer.fit or after it."
            )
        for path, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(tensor):
                raise MisconfiguredError(f"{path} has no shape yet. Run a batch through {name} before verify.")
        undo = Undo(module, module.device, is_deep=True)
        if found := undo.iterators():
            raise MisconfiguredError(
                f"verify runs the module several times from the same state, but {found[0]} is an iterator, which cannot"
                " be restored. Leave it out, or make it in setup()."
            )
        self._module, self._before = module, undo.take(watches_parameters=False)

    @contextmanager
    def restored_afterwards(self) -> Iterator[None]:
        """In here the module has no Trainer and no gradients, and may be changed."""
        self._module._trainer = None
        try:
            for tensor in self._before.tensors:
                if tensor.is_leaf:
                    tensor.grad = None
                _remove_hooks_of_training(tensor)
            yield
        finally:
            try:
                self._before.restore()
            except Exception as error:
                raise UsageError(
                    f"verify could not restore all of {type(self._module).__name__} as it was. Make it anew, or load a checkpoint."
                ) from error


def _remove_hooks_of_training(tensor: Tensor) -> None:
    """A training around this one watches gradients, and must not see those in here."""
    for hooks in hooks_of(tensor):
        for number, hook in list((hooks or {}).items()):
            while isinstance(hook, (functools.partial, types.MethodType)):
                hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
            if str(getattr(hook, "__module__", "")).partition(".")[0] == "lightning_accum":
                del hooks[number]


class Change(NamedTuple):
    """What is taken out of a module, to see what it does to the result."""

    freezes_batch_norm: bool = False
    """BatchNorm normalises by its running statistics."""
    fixes_batch_idx: bool = False
    """Every ``training_step`` gets the index 0."""
    evens_noise: bool = False
    """Random numbers are the same for every row."""


_UNCHANGED = Change()


@dataclass(frozen=True)
class StepRunner:
    """Takes optimizer steps of a module, each from the state that it is in.

    ``module`` may be what ``torch.compile`` made of it; the batches go through the transfer hooks of ``hooks``.
    """

    module: pl.LightningModule
    state: ModuleState
    policy: Mapping[str, Any]
    trainer: Mapping[str, Any]
    hooks: pl.LightningDataModule | None = None

    def full(self, batch: Any, change: Change = _UNCHANGED, seed: int = 0, gradients: Mapping[str, Tensor] | None = None) -> Step:
        """The step of plain Lightning on one batch; its optimizer may be given other ``gradients``."""
        return self._run([batch], change, StepRecorder(seed, gradients), [], strategy="auto")

    def twice(self, batch: Any, change: Change = _UNCHANGED) -> Step:
        """The step of plain Lightning on the mean of one batch with itself."""
        return self._run([batch] * 2, change, StepRecorder(), [], strategy="auto", accumulate_grad_batches=2)

    def accumulated(self, batches: Sequence[Any], change: Change = _UNCHANGED, **policy: Any) -> Step:
        """The step of this package on a window of these loader batches, after its check of the first."""
        callback = GradientAccumulation(**{"log": False, **self.policy, **policy, "window": len(batches)})
        return self._run(batches, change, StepRecorder(), [callback], strategy="accum")

    def _run(self, batches: Sequence[Any], change: Change, recorder: StepRecorder, callbacks: list[Any], **arguments: Any) -> Step:
        with self.state.restored_afterwards(), warnings.catch_warnings(record=True) as caught, torch.enable_grad():
            warnings.simplefilter("always")
            self.fit(batches, change, recorder, callbacks, **arguments)
        if not recorder.step.after:
            raise MisconfiguredError(
                f"{type(uncompiled(self.module)).__name__} took no optimizer step on {len(batches)}"
                f" batch{'es' * (len(batches) > 1)}: training_step returned no loss, the loss had no weight, or its"
                " gradient was not finite."
            )
        messages = (str(warning.message) for warning in caught if warning.category in _REPORTED)
        recorder.step.warnings = list(dict.fromkeys(messages))
        return recorder.step

    def fit(self, batches: Sequence[Any], change: Change, recorder: StepRecorder, callbacks: Sequence[Any], **trainer: Any) -> None:
        """Fit the module for a step: without preparing data again, without its callbacks and without what is taken out."""
        inner, noise = uncompiled(self.module), NoiseOfRows()
        recorder.step.noise = noise.found
        inner.prepare_data, inner.configure_callbacks = lambda: None, list
        if recorder.gradients is not None:  # they have been clipped
            inner.configure_gradient_clipping = lambda *args, **kwargs: None
        for hook in _TRANSFER_HOOKS:  # the data module's take precedence over the module's own
            if self.hooks is not None and is_overridden(hook, self.hooks):
                setattr(inner, hook, getattr(self.hooks, hook))
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

        if change != _UNCHANGED:
            inner.training_step = training_step
        with quiet(), suppress(StepTakenError):
            seed_everything(0)  # for what setup and configure_model make
            loader = DataLoader(_Repeated(batches), batch_size=None, shuffle=False)
            made = trainer_of_one_step([*callbacks, recorder], **{"devices": 1, **self.trainer, **trainer})
            if forks_or_spawns(made.strategy.launcher):
                raise MisconfiguredError(
                    f"verify starts the ranks itself: pass a {type(made.strategy).__name__} without start_method, or a strategy's"
                    " name."
                )
            made.fit(self.module, loader)


def uncompiled(module: Any) -> Any:
    """The module inside of what ``torch.compile`` made of it."""
    return getattr(module, "_orig_mod", module)


def trainer_of_one_step(callbacks: Sequence[pl.Callback], **arguments: Any) -> pl.Trainer:
    """A Trainer that does nothing but train for an epoch, and prints and writes nothing."""
    arguments |= {**QUIET, "logger": DummyLogger(), "callbacks": list(callbacks), "max_epochs": 1}
    return pl.Trainer(**arguments, num_sanity_val_steps=0, limit_val_batches=0, use_distributed_sampler=False)


class _Repeated(Dataset[Any]):
    """The batches of one step, again and again. Each time they are copies: a module may change its batch."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return _STEPS_IN_AN_EPOCH * len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return copy.deepcopy(self._batches[index % len(self._batches)])


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the Trainers' own messages."""
    loggers = [logging.getLogger(name) for name in (pl.__name__, fabric.__name__)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
