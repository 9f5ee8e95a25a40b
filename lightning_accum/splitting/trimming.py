"""Whether what a module learns depends on padding: tried out on the module itself, before any is trimmed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accum.dispatch import with_tensors
from lightning_accum.splitting.snapshot import Keeper
from lightning_accum.weighing.denominator import UnreadableLossError
from lightning_accum.weighing.graph import read_loss

TrainingStep = Callable[[Any], Any]


class _Found(NamedTuple):
    """What a few rows contribute to a window: a mean loss, its weight, and the gradient of their product."""

    loss: float
    weight: float
    gradient: list[Tensor | None]
    eps: float


def difference_by_padding(
    padded: Any, trimmed: Any, module: nn.Module, keeper: Keeper, training_step: TrainingStep, weigh: Callable[[Any], Any] | None
) -> str | None:
    """Compare the loss, its weight and its gradient for the same rows with and without padding.

    The modules below ``module`` run in evaluation mode, where dropout draws no numbers that would differ by shape. Nothing of it
    lasts, and nothing in it waits for other ranks, which may have nothing to try.

    Args:
        padded: a few rows as they came.
        trimmed: the same rows with fewer columns.
        module: what runs them.
        keeper: takes back what running them changes.
        training_step: runs the module on one of both.
        weigh: tells the weight of a batch; None to read it from the loss.

    Returns:
        None where all is the same but for rounding, else what was seen.
    """
    snapshot = keeper.take()
    found: list[_Found] = []
    try:
        for batch in (padded, trimmed):
            snapshot.restore()
            for child in module.children():
                child.eval()
            with _no_collectives():
                found.append(_contribution(training_step(batch), batch, module, weigh))
    except Exception as error:
        return f"{'without' if found else 'with'} it, training_step raises {type(error).__name__}: {error}"
    finally:
        snapshot.restore()
    with_padding, without = found
    # sums of other lengths round otherwise, by more than one unit in the last place; gradients by more than losses
    eps = [torch.finfo(p.dtype).eps for p in module.parameters() if p.is_floating_point()]
    return _difference(with_padding, without, max([with_padding.eps, *eps]))


def _contribution(output: Any, batch: Any, module: nn.Module, weigh: Callable[[Any], Any] | None) -> _Found:
    loss = output["loss"] if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        return _Found(0.0, 0.0, [], 0.0)
    weight: Any = 1.0
    if weigh is not None:
        weight = weigh(batch)
    else:
        with suppress(UnreadableLossError):  # said later, with what to do about it
            reading = read_loss(loss)
            weight = 1.0 if reading.weight is None else reading.weight
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradient = torch.autograd.grad(loss * float(weight), trained, allow_unused=True) if loss.requires_grad else []
    return _Found(loss.item(), float(weight), list(gradient), torch.finfo(loss.dtype).eps)


def _difference(padded: _Found, trimmed: _Found, eps: float) -> str | None:
    for name, with_padding, without in [("loss", padded.loss, trimmed.loss), ("weight", padded.weight, trimmed.weight)]:
        if not abs(with_padding - without) <= eps**0.7 * max(abs(with_padding), abs(without)):
            return f"its {name} is {with_padding:.9g} with it, {without:.9g} without"
    pairs = [(a, b) for a, b in zip(padded.gradient, trimmed.gradient, strict=True) if a is not None or b is not None]
    size = sum(float(g.double().square().sum()) for pair in pairs for g in pair if g is not None) ** 0.5
    apart = sum(float(_minus(a, b).double().square().sum()) for a, b in pairs) ** 0.5
    if not apart <= eps**0.6 * size:
        return f"its gradient differs by {apart / size:.2g} of its size"
    return None


def _minus(a: Tensor | None, b: Tensor | None) -> Tensor:
    if a is None or b is None:
        given = b if a is None else a
        assert given is not None
        return given
    return a.to_dense() - b.to_dense()


def _no_collectives() -> AbstractContextManager[Any]:
    return _NoCollectives() if dist.is_available() and dist.is_initialized() else nullcontext()  # type: ignore[no-untyped-call]


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """Stops what would wait for other ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("it waits for other ranks, which may have no padding to try")
        return func(*with_tensors(args), **(kwargs or {}))
