"""The norm that clipping computes anyway, kept to be shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_accum.engine import Engine
from lightning_accum.from_lightning import FSDPPrecision, LightningModule, Precision, pl


@contextmanager
def noting_gradient_norm(trainer: pl.Trainer, strategy: Engine) -> Iterator[None]:
    """Clip as the strategy does, and keep the norm: Lightning's precision plugin throws it away."""
    plugin, accumulation = trainer.precision_plugin, strategy.accumulation
    assert accumulation is not None
    accumulation.gradient_norm = None
    clips_by_itself = type(trainer.lightning_module).configure_gradient_clipping is not LightningModule.configure_gradient_clipping
    if not (trainer.gradient_clip_val or clips_by_itself):
        yield
        return

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        accumulation.gradient_norm = strategy.clip_by_norm(plugin.main_params(optimizer), clip_val)

    if type(plugin).clip_grad_by_norm not in (Precision.clip_grad_by_norm, FSDPPrecision.clip_grad_by_norm):
        yield  # a plugin with a clipping of its own
        return
    plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]
    try:
        yield
    finally:
        del plugin.clip_grad_by_norm


@torch.no_grad()
def clip_sharded_by_norm(parameters: Iterable[Tensor], largest: float) -> Tensor:
    """As :func:`torch.nn.utils.clip_grad_norm_`, for DTensors on different meshes too, which torch 2.13 refuses to add up.

    Returns:
        The norm of all gradients together, one number, the same on all ranks.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = [_whole(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(group)))) for group in by_mesh.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(factor.to(local.device))
    return norm


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
