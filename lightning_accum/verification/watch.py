"""What one optimizer step does, seen by callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum.engine import Engine
from lightning_accum.randomness import seed_everything, switch_off_dropout
from lightning_accum.session import named_parameters_of
from lightning_accum.weighing.nodes import nodes_below
from lightning_accum.weighing.safeguards import batch_norm_layers


@dataclass
class Step:
    """What one optimizer step did. All tensors are copies in host memory, by name, complex numbers as two real ones each.

    Attributes:
        before: the parameters that are trained, before the step.
        after: and after it.
        gradients: what the optimizer saw, clipped; zeros for a parameter without a gradient.
        of_backward: the gradients of the full batch, before hooks around the step and clipping change them.
        buffers: those of the module, after the step.
        loss: of the batch, or of the window.
        dtype: the narrowest type in the graph of the loss.
        micro_batches: how many had a loss that counts.
        parts: the micro-batches that the last loader batch was split into.
        weight: what each weighs, in words.
        warnings: what was warned of.
        noise: the random operations that were made even.
        dropout: where it was switched off.
        batch_norm: the layers that normalise by statistics of the batch they see.
        gradient_hooks: the parameters that have hooks on their gradients.
        losses: of the micro-batches.
        total_weight: of the window; 1 for a loss that is a sum.
        buffers_before: those of the module, before the step.
        seed: of torch's generator, after the step.
    """

    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    of_backward: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    loss: float = float("nan")
    dtype: torch.dtype = torch.float64
    micro_batches: int = 1
    parts: int = 1
    weight: str | None = None
    warnings: list[str] = field(default_factory=list)
    noise: set[str] = field(default_factory=set)
    dropout: list[str] = field(default_factory=list)
    batch_norm: list[str] = field(default_factory=list)
    gradient_hooks: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    total_weight: float | None = None
    buffers_before: dict[str, Tensor] = field(default_factory=dict)
    seed: int = 0

    @property
    def way(self) -> dict[str, Tensor]:
        """How far each parameter went."""
        return {name: after.to(torch.float64) - self.before[name].to(torch.float64) for name, after in self.after.items()}

    @property
    def is_finite(self) -> bool:
        """No gradient is infinite or NaN."""
        return all(bool(gradient.isfinite().all()) for gradient in self.gradients.values())


class StepTakenError(Exception):
    """Ends the fit: nothing after the step is of interest, least of all the ends of epochs."""


class StepRecorder(pl.Callback):
    """Copies what each backward leaves, what the optimizer steps on, and where it goes.

    Args:
        seed: of the random generators.
        gradients: what the optimizer is given instead of its own; None to leave them.
    """

    def __init__(self, seed: int = 0, gradients: Mapping[str, Tensor] | None = None) -> None:
        self.step = Step()
        self.gradients = gradients
        self._seed = seed
        self._trained: list[tuple[str, nn.Parameter]] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note_before(trainer, pl_module)
        self.step.dropout = switch_off_dropout(pl_module)
        self.step.batch_norm = batch_norm_layers(pl_module)
        self.step.gradient_hooks = [
            name
            for name, parameter in self._trained
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        ]
        seed_everything(self._seed)
        for optimizer in trainer.optimizers:
            try:
                optimizer.register_step_post_hook(self._after_step)
            except AttributeError:  # some that wrap another leave out Optimizer.__init__
                optimizer.step = self._noting(optimizer, optimizer.step)  # type: ignore[method-assign]

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:  # the module's own on_train_start comes after that of a callback, and may add parameters or change them
            self._note_before(trainer, pl_module)

    def _note_before(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        named = named_parameters_of(pl_module, trainer.optimizers)
        self._trained = [(name, parameter) for name, parameter in named.items() if parameter.requires_grad]
        self.step.before, self.step.buffers_before = _copies(self._trained), _copies(pl_module.named_buffers())

    def _noting(self, optimizer: Optimizer, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self._after_step(optimizer, args, kwargs)
            return result

        return run

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.step.after = _copies(self._trained)
        self.step.gradients = _gradients(self._trained)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_last = batch_idx + 1 >= trainer.accumulate_grad_batches
        if not (self.step.after or is_last):
            return
        self.step.buffers, self.step.seed = _copies(pl_module.named_buffers()), torch.initial_seed()
        accumulation = trainer.strategy.accumulation if isinstance(trainer.strategy, Engine) else None
        if accumulation is not None and accumulation.closed is not None:
            self.step.loss, self.step.total_weight = float(accumulation.closed.loss), float(accumulation.closed.weight)
            self.step.micro_batches = accumulation.closed.micro_batches
            self.step.weight = accumulation.weigher.criterion
            if accumulation.splitting is not None and accumulation.splitting.plan is not None:
                self.step.parts = len(accumulation.splitting.plan.pieces)
        elif isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
            self.step.loss = float(outputs["loss"])
        raise StepTakenError

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self.step.dtype = narrowest_dtype(loss)
        is_divided = not isinstance(trainer.strategy, Engine)
        self.step.losses.append(float(loss.detach()) * (trainer.accumulate_grad_batches if is_divided else 1))

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        self.step.of_backward = _gradients(self._trained)
        for name, parameter in self._trained:
            if self.gradients is not None and parameter.grad is not None:
                gradient = self.gradients[name]
                gradient = torch.view_as_complex(gradient) if parameter.is_complex() else gradient
                parameter.grad = gradient.to(parameter.device, parameter.dtype)


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
            if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex):
                dtypes.add(dtype.to_real())
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _copies(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: _copy(parameter) for name, parameter in parameters}


def _gradients(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    found = {}
    for name, parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = gradient if gradient.layout is torch.strided else gradient.to_dense()
        found[name] = _copy(gradient)
    return found


def _copy(tensor: Tensor) -> Tensor:
    """Of one that is sharded, gathered from all ranks; of complex numbers as two real ones each."""
    whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    return (torch.view_as_real(whole.resolve_conj()) if whole.is_complex() else whole).cpu().clone()
