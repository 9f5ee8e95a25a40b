"""What one optimizer step did, seen by callbacks, and how far two steps are apart."""

from __future__ import annotations

import functools
import math
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

Tensors = Mapping[str, Tensor]

_SMALLEST_SHARE = 1e-2
"""Of the gradient's typical size: a parameter whose own gradient is smaller is measured by this.

The gradient of a key's bias in attention is 0 but for rounding, and would be a hundred percent off."""


@dataclass
class Step:
    """What one optimizer step did. Tensors are copies in host memory, by name; complex ones are viewed as real.

    Attributes:
        before: the trained parameters before the step.
        after: the same after it.
        of_backward: the gradients of the full batch, before clipping and hooks around the step.
        gradients: what the optimizer saw; zeros for a parameter without a gradient.
        buffers: the module's, after the step.
        loss: of the batch or of the window.
        losses: of the micro-batches.
        dtype: the narrowest type in the graph of the loss.
        micro_batches: how many had a loss that counts.
        parts: the micro-batches that the last loader batch was split into.
        weight: how each micro-batch is weighted, in words.
        warnings: what was warned of.
        noise: the random operations that were given the same numbers for every row.
        dropout: where it was switched off.
        batch_norm: the layers that normalise by statistics of the batch they see.
    """

    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    of_backward: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    loss: float = float("nan")
    losses: list[float] = field(default_factory=list)
    dtype: torch.dtype = torch.float64
    micro_batches: int = 1
    parts: int = 1
    weight: str | None = None
    warnings: list[str] = field(default_factory=list)
    noise: set[str] = field(default_factory=set)
    dropout: list[str] = field(default_factory=list)
    batch_norm: list[str] = field(default_factory=list)

    @property
    def way(self) -> dict[str, Tensor]:
        """How far each parameter moved."""
        return {n: after.to(torch.float64) - self.before[n].to(torch.float64) for n, after in self.after.items()}


class StepTakenError(Exception):
    """Ends the fit after its first step."""


class StepRecorder(pl.Callback):
    """Copies what backward leaves, what the optimizer steps on, and where it goes.

    Args:
        seed: of the random generators.
        gradients: what the optimizer is given instead of its own.
        finish: called with the step, before the fit ends.
    """

    def __init__(
        self,
        seed: int = 0,
        gradients: Mapping[str, Tensor] | None = None,
        finish: Callable[[Step], None] | None = None,
    ) -> None:
        self.step, self.gradients = Step(), gradients
        self._seed, self._finish = seed, finish
        self._trained: list[tuple[str, nn.Parameter]] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step.dropout = switch_off_dropout(pl_module)
        self.step.batch_norm = batch_norm_layers(pl_module)
        seed_everything(self._seed)
        for optimizer in trainer.optimizers:
            # one that wraps another may not be an Optimizer by its __init__, and has no hooks then
            optimizer.step = self._recorded(optimizer.step)  # type: ignore[method-assign]

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:  # the module's own on_train_start may add parameters or change them
            named = named_parameters_of(pl_module, trainer.optimizers)
            self._trained = [(name, parameter) for name, parameter in named.items() if parameter.requires_grad]
            self.step.before = _copies(self._trained)

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

    def _recorded(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self.step.after, self.step.gradients = _copies(self._trained), _gradients(self._trained)
            return result

        return run

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, strategy = self.step, trainer.strategy
        if not step.after and batch_idx + 1 < trainer.accumulate_grad_batches:
            return
        step.buffers = _copies(pl_module.named_buffers())
        accumulation = strategy.accumulation if isinstance(strategy, Engine) else None
        if accumulation is not None and accumulation.closed is not None:
            step.loss, step.micro_batches = float(accumulation.closed.loss), accumulation.closed.micro_batches
            step.weight = accumulation.weigher.criterion
            if accumulation.splitting is not None and accumulation.splitting.plan is not None:
                step.parts = len(accumulation.splitting.plan.pieces)
        elif isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
            step.loss = float(outputs["loss"])
        if self._finish is not None:
            self._finish(step)
        raise StepTakenError


def narrowest_dtype(loss: Tensor) -> torch.dtype:
    """The floating-point type of the least precision in the graph of ``loss``.

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


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: _copy(tensor) for name, tensor in tensors}


def _gradients(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters}
    return {name: _copy(grad if grad.layout is torch.strided else grad.to_dense()) for name, grad in found.items()}


def _copy(tensor: Tensor) -> Tensor:
    """Of a sharded tensor, gathered from all ranks."""
    whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    return (torch.view_as_real(whole.resolve_conj()) if whole.is_complex() else whole).cpu().clone()


# --- how far two steps are apart ------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How much two sets of tensors differ, relative to the second.

    ``overall`` is the norm of all differences over the norm of all expected tensors; ``by_name`` the same for each tensor, relative
    to a share of the typical size for one that is much smaller.
    """

    overall: float
    by_name: Mapping[str, float]

    @property
    def largest(self) -> float:
        """The largest of all; infinite if any is NaN."""
        return max(math.inf if math.isnan(value) else value for value in (self.overall, *self.by_name.values()))

    @classmethod
    def between(cls, found: Tensors, expected: Tensors) -> Difference:
        """Measure.

        Example:
            >>> expected = {"w": torch.tensor([3.0, -4.0])}
            >>> Difference.between({"w": torch.tensor([3.0, -3.0])}, expected).overall
            0.2
        """
        distances = {name: _distance(found[name], tensor) for name, tensor in expected.items()}
        sizes = {name: _norm(tensor) for name, tensor in expected.items()}
        numbers = {name: tensor.numel() for name, tensor in expected.items()}
        size = math.hypot(*sizes.values())
        typical = _SMALLEST_SHARE * size / math.sqrt(max(1, sum(numbers.values())))
        least = {name: max(sizes[name], typical * math.sqrt(numbers[name])) for name in expected}
        by_name = {name: _ratio(distances[name], least[name]) for name in expected}
        return cls(_ratio(math.hypot(*distances.values()), size), by_name)


def difference(found: Tensor | None, expected: Tensor) -> float:
    """How far a tensor is from another, relative to it; infinite if it is missing or of another shape."""
    if found is None or found.shape != expected.shape:
        return math.inf
    return Difference.between({"": found}, {"": expected}).largest


def is_same_step(found: Tensors, expected: Tensors, before: Tensors) -> bool:
    """Whether parameters are where the same gradient has taken others, up to the rounding of the optimizer's arithmetic."""
    for name, tensor in expected.items():
        if not tensor.is_floating_point():
            continue
        eps = torch.finfo(tensor.dtype).eps
        rounding = 1024 * eps * _distance(tensor, before[name]) + 4 * eps * _norm(tensor)
        if not _distance(found[name], tensor) <= rounding:
            return False
    return True


def tolerance(dtype: torch.dtype, noise: float) -> float:
    """How much the gradients of equal steps may differ.

    Sixteen roundings (1e-12 in float64), or four times what was measured to be rounding.

    Args:
        dtype: the narrowest that the loss is computed in.
        noise: the largest difference between two runs that differ in the order of additions alone.

    Example:
        >>> tolerance(torch.float64, 1e-15), round(tolerance(torch.float32, 1e-6), 7)
        (1e-12, 4e-06)
    """
    least = 1e-12 if dtype == torch.float64 else 16 * torch.finfo(dtype).eps
    return max(least, min(4 * noise, most_noise(dtype)))


def most_noise(dtype: torch.dtype) -> float:
    """A larger difference between two runs of one batch is no rounding."""
    return min((2**16 if dtype == torch.float64 else 2**12) * torch.finfo(dtype).eps, 0.25)


def multiples(columns: Tensor, target: Tensor, limit: float) -> Tensor | None:
    """By how much to multiply vectors so that they add up to another; None if they do not.

    Args:
        columns: shape (elements, vectors), float64.
        target: shape (elements,).
        limit: the relative error that is rounding.

    Example:
        >>> columns = torch.tensor([[1.0, 0], [0, 1], [0, 0]], dtype=torch.float64)
        >>> multiples(columns, torch.tensor([0.25, 0.75, 0], dtype=torch.float64), 1e-12).tolist()
        [0.25, 0.75]
    """
    found = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
    left = _norm(target - columns @ found)
    return found if left <= limit * _norm(target) else None


def flat(tensors: Tensors) -> Tensor:
    """All tensors in one float64 vector."""
    return torch.cat([tensor.to(torch.float64).flatten() for tensor in tensors.values()])


def _distance(a: Tensor, b: Tensor) -> float:
    return 0.0 if torch.equal(a, b) else _norm(a.to(torch.float64) - b.to(torch.float64))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.to(torch.float64)))


def _ratio(part: float, whole: float) -> float:
    if whole == 0:
        return 0.0 if part == 0 else math.inf
    return part / whole
