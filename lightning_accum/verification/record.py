"""What one optimizer step did, seen by a callback, and how far two steps are apart."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum.arguments import MisconfiguredError
from lightning_accum.engine import Engine
from lightning_accum.from_lightning import Callback, pl
from lightning_accum.randomness import seed_everything, switch_off_dropout
from lightning_accum.session import named_parameters_of
from lightning_accum.weighing.nodes import nodes_below
from lightning_accum.weighing.safeguards import batch_norm_layers

Tensors = Mapping[str, Tensor]

_SMALLEST_SHARE = 1e-2
"""Of the gradient's typical size: a parameter whose own gradient is smaller is measured by this.

The gradient of a key's bias in attention is 0 but for rounding, and would be a hundred percent off."""


@dataclass
class Step:
    """What one optimizer step did. Tensors are copies in host memory, by name; complex ones are viewed as real."""

    before: dict[str, Tensor] = field(default_factory=dict)  # the trained parameters
    after: dict[str, Tensor] = field(default_factory=dict)
    of_backward: dict[str, Tensor] = field(default_factory=dict)  # gradients, before clipping and hooks around the step
    gradients: dict[str, Tensor] = field(default_factory=dict)  # that the optimizer saw; zeros where there is none
    buffers: dict[str, Tensor] = field(default_factory=dict)  # after the step
    loss: float = float("nan")  # of the batch or of the window
    losses: list[float] = field(default_factory=list)  # of all backwards
    dtype: torch.dtype = torch.float64  # the narrowest in the graph of the loss
    parts: int = 1  # the micro-batches that the last loader batch was split into
    weight: str | None = None  # of each micro-batch, in words
    warnings: list[str] = field(default_factory=list)
    noise: set[str] = field(default_factory=set)  # the random operations that gave every row the same numbers
    dropout: list[str] = field(default_factory=list)  # where it was switched off
    batch_norm: list[str] = field(default_factory=list)  # layers that normalise by statistics of the batch they see

    @property
    def way(self) -> dict[str, Tensor]:
        """How far each parameter moved."""
        return {n: after.to(torch.float64) - self.before[n].to(torch.float64) for n, after in self.after.items()}


class StepTakenError(Exception):
    """Ends the fit after its first step."""


class StepRecorder(Callback):
    """Copies what backward leaves, what the optimizer steps on (``gradients``, if given), and where it goes.

    There have to be as many data-parallel ``ranks``; ``finish`` is called with the step, before the fit ends.
    """

    def __init__(
        self, seed: int = 0, gradients: Tensors | None = None, ranks: int = 1, finish: Callable[[Step], None] = lambda step: None
    ) -> None:
        self.step, self.gradients = Step(), gradients
        self._seed, self._ranks, self._finish = seed, ranks, finish
        self._trained: dict[str, nn.Parameter] = {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        if found != self._ranks:
            raise MisconfiguredError(
                f"verify(devices={self._ranks}) gives each device its own batches, but"
                f" {type(trainer.strategy).__name__} has {found} data-parallel ranks. Pass an object of the"
                f" strategy whose data_parallel_size is {self._ranks}."
            )
        self.step.dropout = switch_off_dropout(pl_module)
        self.step.batch_norm = batch_norm_layers(pl_module)
        seed_everything(self._seed)
        for optimizer in trainer.optimizers:  # one that wraps another may have no hooks
            optimizer.step = self._recorded(optimizer.step)  # type: ignore[method-assign]

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:  # the module's own on_train_start may add parameters or change them
            named = named_parameters_of(pl_module, trainer.optimizers)
            self._trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
            self.step.before = _copies(self._trained.items())

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self.step.dtype = narrowest_dtype(loss)
        divisor = 1 if isinstance(trainer.strategy, Engine) else trainer.accumulate_grad_batches
        self.step.losses.append(float(loss.detach()) * divisor)

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        self.step.of_backward = self._gradients()
        for name, gradient in (self.gradients or {}).items():
            parameter = self._trained[name]
            if parameter.grad is not None:
                gradient = torch.view_as_complex(gradient) if parameter.is_complex() else gradient
                parameter.grad = gradient.to(parameter.device, parameter.dtype)

    def _recorded(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self.step.after, self.step.gradients = _copies(self._trained.items()), self._gradients()
            return result

        return run

    def _gradients(self) -> dict[str, Tensor]:
        found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self._trained.items()}
        return _copies((n, g if g.layout is torch.strided else g.to_dense()) for n, g in found.items())

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, strategy = self.step, trainer.strategy
        if not step.after and batch_idx + 1 < trainer.accumulate_grad_batches:
            return
        step.buffers = _copies(pl_module.named_buffers())
        step.loss = step.losses[0] if step.losses else step.loss
        accumulation = strategy.accumulation if isinstance(strategy, Engine) else None
        if accumulation is not None and accumulation.closed is not None:
            step.loss, step.weight = float(accumulation.closed.loss), accumulation.weigher.criterion
            if accumulation.splitting is not None and accumulation.splitting.plan is not None:
                step.parts = len(accumulation.splitting.plan.pieces)
        self._finish(step)
        raise StepTakenError


def narrowest_dtype(loss: Tensor) -> torch.dtype:
    """The floating-point type of the least precision in the graph of ``loss``."""
    nodes = () if loss.grad_fn is None else nodes_below(loss.grad_fn)
    found = [getattr(metadata, "dtype", None) for node in nodes for metadata in getattr(node, "_input_metadata", ())]
    dtypes = (dtype for dtype in (loss.dtype, *found) if isinstance(dtype, torch.dtype))
    floats = (dtype.to_real() for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
    return max(floats, key=lambda dtype: torch.finfo(dtype).eps)


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """In host memory; sharded tensors are gathered from all ranks."""
    wholes = ((name, (t.full_tensor() if isinstance(t, DTensor) else t).detach()) for name, t in tensors)
    return {name: (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).cpu().clone() for name, t in wholes}


# --- how far two steps are apart --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How much two sets of tensors differ, relative to the second: all together, and each by name."""

    overall: float
    by_name: Mapping[str, float]

    @property
    def largest(self) -> float:
        """The largest of all; infinite if any is NaN."""
        return max(math.inf if math.isnan(value) else value for value in (self.overall, *self.by_name.values()))

    @classmethod
    def between(cls, found: Tensors, expected: Tensors) -> Difference:
        """Measure. A tensor that is much smaller than is typical is measured by a share of that size."""
        distances = {name: _distance(found[name], tensor) for name, tensor in expected.items()}
        sizes = {name: _norm(tensor) for name, tensor in expected.items()}
        size, elements = math.hypot(*sizes.values()), sum(tensor.numel() for tensor in expected.values())
        typical = _SMALLEST_SHARE * size / math.sqrt(max(1, elements))
        least = {name: max(sizes[name], typical * math.sqrt(tensor.numel())) for name, tensor in expected.items()}
        by_name = {name: _ratio(distances[name], least[name]) for name in expected}
        return cls(_ratio(math.hypot(*distances.values()), size), by_name)


def difference(found: Tensor | None, expected: Tensor) -> float:
    """How far a tensor is from another, relative to it; infinite if it is missing or of another shape."""
    if found is None or found.shape != expected.shape:
        return math.inf
    return Difference.between({"": found}, {"": expected}).largest


def elsewhere(found: Tensors, expected: Tensors, before: Tensors) -> list[str]:
    """The parameters that are not where the same gradient has taken others, up to the optimizer's rounding."""

    def rounding(name: str, tensor: Tensor) -> float:
        eps = torch.finfo(tensor.dtype).eps
        return 1024 * eps * _distance(tensor, before[name]) + 4 * eps * _norm(tensor)

    floats = {name: tensor for name, tensor in expected.items() if tensor.is_floating_point()}
    return [name for name, tensor in floats.items() if not _distance(found[name], tensor) <= rounding(name, tensor)]


def tolerance(dtype: torch.dtype, noise: float) -> float:
    """How much the gradients of equal steps may differ: sixteen roundings, or four times what the order of rows changes."""
    least = 1e-12 if dtype == torch.float64 else 16 * torch.finfo(dtype).eps
    return max(least, min(4 * noise, most_noise(dtype)))


def most_noise(dtype: torch.dtype) -> float:
    """A larger difference between two runs of one batch is no rounding."""
    return min((2**16 if dtype == torch.float64 else 2**12) * torch.finfo(dtype).eps, 0.25)


def multiples(columns: Tensor, target: Tensor, limit: float) -> Tensor | None:
    """By how much to multiply the columns so that they add up to the target, up to a relative error; None if they do not."""
    found = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
    return found if _norm(target - columns @ found) <= limit * _norm(target) else None


def _distance(a: Tensor, b: Tensor) -> float:
    return 0.0 if torch.equal(a, b) else _norm(a.to(torch.float64) - b.to(torch.float64))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.to(torch.float64)))


def _ratio(part: float, whole: float) -> float:
    if whole == 0:
        return 0.0 if part == 0 else math.inf
    return part / whole
