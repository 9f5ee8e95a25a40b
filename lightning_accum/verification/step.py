"""One optimizer step of a module, taken by a Trainer on a copy of it."""

from __future__ import annotations

import copy
import functools
import logging
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_accum.accumulation import Accumulates
from lightning_accum.callback import GradientAccumulation
from lightning_accum.denominator import UnreadableLossError
from lightning_accum.graph import terms_of
from lightning_accum.nodes import nodes_below
from lightning_accum.safeguards import is_contrastive
from lightning_accum.verification.randomness import SameForEveryRow, switch_off_dropout

STEPS_IN_AN_EPOCH = 100
"""What the Trainer believes to have ahead of it, for schedules that ask: one step alone would be all warm-up, or none."""
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@dataclass(frozen=True)
class Change:
    """What is taken out of a module, to see what it does to the result.

    Attributes:
        freezes_batch_norm: BatchNorm normalises by its running statistics.
        fixes_batch_idx: every ``training_step`` gets the index 0.
        evens_noise: random numbers are the same for every row.
    """

    freezes_batch_norm: bool = False
    fixes_batch_idx: bool = False
    evens_noise: bool = False


@dataclass
class Step:
    """What one optimizer step did. All tensors are copies in host memory, by name.

    Attributes:
        before: the parameters that are trained, before the step.
        after: and after it.
        gradients: what the optimizer saw, clipped; zeros for a parameter without a gradient.
        buffers: those of the module, after the step.
        loss: of the batch, or of the window.
        dtype: the narrowest type in the graph of the loss.
        is_contrastive: the loss is a cross entropy over logits that are square in the batch.
        micro_batches: how many had a loss.
        weight: what each weighs, in words.
        weights: the weight of each; None for a sum.
        pieces: the gradients that each added, where they were asked for.
        warnings: what was warned of.
        noise: the random operations that were made even.
    """

    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    loss: float = float("nan")
    dtype: torch.dtype = torch.float64
    is_contrastive: bool = False
    micro_batches: int = 1
    weight: str | None = None
    weights: list[float | None] = field(default_factory=list)
    pieces: list[dict[str, Tensor]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    noise: set[str] = field(default_factory=set)


class NoStepError(RuntimeError):
    """There was no optimizer step."""


@dataclass(frozen=True)
class Bench:
    """Takes optimizer steps of copies of a module.

    Args:
        module: stays as it is.
        policy: the arguments of GradientAccumulation.
        trainer: those of the Trainer: precision, accelerator, clipping.
        hooks: a LightningDataModule whose transfer hooks the batches go through.
    """

    module: pl.LightningModule
    policy: Mapping[str, Any]
    trainer: Mapping[str, Any]
    hooks: pl.LightningDataModule | None = None

    def full(self, batch: Any, change: Change = Change(), seed: int = 0, gradients: Mapping[str, Tensor] | None = None) -> Step:  # noqa: B008
        """The step of plain Lightning on one batch.

        Args:
            batch: the batch.
            change: what is taken out of the module.
            seed: of the random generators.
            gradients: what the optimizer is given instead of the batch's gradients.
        """
        watcher = _WatchesReference(gradients)
        trainer = dict(self.trainer)
        if gradients is not None:  # they have been clipped
            trainer["gradient_clip_val"] = None
        return self._run([batch], change, seed, watcher, [], strategy="auto", **trainer)

    def accumulated(self, batches: Sequence[Any], change: Change = Change(), keeps_pieces: bool = False) -> Step:  # noqa: B008
        """The step of this package on a window.

        Args:
            batches: those of the loader.
            change: what is taken out of the module.
            keeps_pieces: whether to keep the gradient of each micro-batch.
        """
        watcher = _WatchesPieces() if keeps_pieces else _Watches()
        policy = {"log": False, **self.policy, "window": len(batches)}
        callbacks = [GradientAccumulation(**policy)]
        return self._run(batches, change, 0, watcher, callbacks, strategy="accum", **self.trainer)

    def _run(
        self, batches: Sequence[Any], change: Change, seed: int, watcher: _Watches, callbacks: list[Any], **arguments: Any
    ) -> Step:
        module = copy_of(self.module)
        switch_off_dropout(module)
        noise = SameForEveryRow()
        _keep_to_one_step(module, change, noise)
        if isinstance(watcher, _WatchesReference) and watcher.gradients is not None:
            module.configure_gradient_clipping = lambda *args, **kwargs: None  # type: ignore[method-assign]
        data = _data(batches, self.hooks)
        _seed(seed)
        with warnings.catch_warnings(record=True) as caught, _quiet(), torch.enable_grad(), suppress(_StepTakenError):
            warnings.simplefilter("always")
            trainer = pl.Trainer(
                **arguments,
                devices=1,
                max_epochs=1,
                logger=DummyLogger(),
                callbacks=[*callbacks, watcher],
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                num_sanity_val_steps=0,
                limit_val_batches=0,
                use_distributed_sampler=False,
            )
            trainer.fit(module, **data)
        step = watcher.step
        if not step.after:
            raise NoStepError(
                f"{type(module).__name__} took no optimizer step on {len(batches)} batch{'es' * (len(batches) > 1)}: training_step"
                " returned no loss, the loss had no weight, or its gradient was not finite."
            )
        step.warnings = list(dict.fromkeys(str(warning.message) for warning in caught if warning.category is UserWarning))
        step.noise = noise.found
        return step


def copy_of(module: pl.LightningModule) -> pl.LightningModule:
    """A deep copy without its Trainer.

    Raises:
        MisconfigurationException: it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, pl.Trainer):
                memo[id(value)] = None
            elif isinstance(value, Tensor) and not value.is_leaf:  # of an earlier graph: torch copies leaves only
                memo[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise MisconfigurationException(
            f"verify works on copies of the module, but {type(module).__name__} cannot be copied by copy.deepcopy:"
            f" {type(error).__name__}: {error}. Leave out the attribute that this comes from (a lock, a file, a generator), or give"
            " it to the module in setup()."
        ) from error


# --- the copy ---------------------------------------------------------------------------------------------------------


def _keep_to_one_step(module: pl.LightningModule, change: Change, noise: SameForEveryRow) -> None:
    """What a copy leaves out: preparing data that is at hand already, and the user's callbacks."""
    module.prepare_data = lambda: None  # type: ignore[method-assign]
    module.configure_callbacks = list  # type: ignore[method-assign]
    if change == Change():
        return
    original = module.training_step

    @functools.wraps(original)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        if change.freezes_batch_norm:
            _freeze_batch_norm(module)
        if change.fixes_batch_idx and len(args) > 1:
            args = (args[0], 0, *args[2:])
        if not change.evens_noise:
            return original(*args, **kwargs)
        noise.restart()
        with noise:
            return original(*args, **kwargs)

    module.training_step = training_step  # type: ignore[method-assign]


def _freeze_batch_norm(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.eval()
            if layer.running_mean is None or layer.running_var is None:  # it has none to go by
                layer.running_mean = torch.zeros(layer.num_features, device=next(module.parameters()).device)
                layer.running_var = torch.ones_like(layer.running_mean)


# --- its data ---------------------------------------------------------------------------------------------------------


class _Repeated(Dataset[Any]):
    """The batches of one step, again and again. Each time they are copies: a module may take its batch apart."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return STEPS_IN_AN_EPOCH * len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return copy.deepcopy(self._batches[index % len(self._batches)])


class _Data(pl.LightningDataModule):
    """The batches, with the hooks of the user's data module."""

    def __init__(self, loader: DataLoader[Any], owner: pl.LightningDataModule) -> None:
        super().__init__()
        self._loader = loader
        for hook in _TRANSFER_HOOKS:
            if is_overridden(hook, owner):
                setattr(self, hook, getattr(owner, hook))

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader


def _data(batches: Sequence[Any], hooks: pl.LightningDataModule | None) -> dict[str, Any]:
    loader = DataLoader(_Repeated(batches), batch_size=None, shuffle=False)
    if hooks is None or not any(is_overridden(hook, hooks) for hook in _TRANSFER_HOOKS):
        return {"train_dataloaders": loader}
    return {"datamodule": _Data(loader, hooks)}


# --- what is seen of it -----------------------------------------------------------------------------------------------


class _StepTakenError(Exception):
    """Ends the fit: nothing after the step is of interest, least of all the ends of epochs."""


class _Watches(pl.Callback):
    """Copies what the optimizer steps on and where it goes, by a hook of torch's: Lightning runs as if nobody listened."""

    def __init__(self) -> None:
        self.step = Step()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step.before = _copies(pl_module)
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(functools.partial(self._after_step, pl_module))

    def _after_step(self, module: pl.LightningModule, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.step.after = _copies(module)
        self.step.gradients = _gradients(module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_last = batch_idx + 1 >= trainer.accumulate_grad_batches
        if not (self.step.after or is_last):
            return
        self.step.buffers = {name: buffer.detach().cpu().clone() for name, buffer in pl_module.named_buffers()}
        accumulation = trainer.strategy.accumulation if isinstance(trainer.strategy, Accumulates) else None
        if accumulation is not None and accumulation.closed is not None:
            self.step.loss = float(accumulation.closed.loss)
            self.step.micro_batches = accumulation.closed.micro_batches
            self.step.weight = accumulation.weigher.criterion
        elif isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
            self.step.loss = float(outputs["loss"])
        raise _StepTakenError


class _WatchesReference(_Watches):
    """Also looks at the loss, and may give the optimizer other gradients."""

    def __init__(self, gradients: Mapping[str, Tensor] | None) -> None:
        super().__init__()
        self.gradients = gradients

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self.step.dtype = narrowest_dtype(loss)
        try:
            self.step.is_contrastive = bool(is_contrastive(terms_of(loss)))
        except UnreadableLossError:
            self.step.is_contrastive = False

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        for name, parameter in pl_module.named_parameters():
            if self.gradients is not None and parameter.grad is not None:
                parameter.grad = self.gradients[name].to(parameter.device, parameter.dtype)


class _WatchesPieces(_Watches):
    """Also keeps what each micro-batch added."""

    def __init__(self) -> None:
        super().__init__()
        self._sum: dict[str, Tensor] = {}

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        now = {name: gradient.to(torch.float64) for name, gradient in _gradients(pl_module).items()}
        self.step.pieces.append({name: gradient - self._sum.get(name, 0.0) for name, gradient in now.items()})
        self._sum = now
        accumulation = trainer.strategy.accumulation if isinstance(trainer.strategy, Accumulates) else None
        weight = None if accumulation is None else accumulation.weight
        self.step.weights.append(None if weight is None else float(weight))


def narrowest_dtype(loss: Tensor) -> torch.dtype:
    """The floating-point type of the least precision that the graph of ``loss`` goes through.

    Example:
        >>> x = torch.ones(2, dtype=torch.float64, requires_grad=True)
        >>> narrowest_dtype((x * 2).float().sum().double())
        torch.float32
    """
    dtypes = {loss.dtype}
    for node in () if loss.grad_fn is None else nodes_below(loss.grad_fn):
        for metadata in getattr(node, "_input_metadata", ()):
            dtype = getattr(metadata, "dtype", None)
            if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
                dtypes.add(dtype)
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in module.named_parameters() if p.requires_grad}


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradient = gradient if gradient.layout is torch.strided else gradient.to_dense()
            found[name] = gradient.detach().cpu().clone()
    return found


# --- around it --------------------------------------------------------------------------------------------------------


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the Trainers' own words to themselves."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def with_change(change: Change, **more: bool) -> Change:
    """``change`` and more."""
    return replace(change, **more)
