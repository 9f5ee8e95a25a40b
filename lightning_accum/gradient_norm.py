"""The norm that clipping computes anyway, kept to be shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
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
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None, []).append(parameter)
    norms = [get_total_norm([p.grad for p in group], foreach=True) for group in by_mesh.values()]  # type: ignore[misc]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = torch.linalg.vector_norm(torch.stack(whole)) if whole else torch.tensor(0.0)
    for group in by_mesh.values():
        clip_grads_with_norm_(group, largest, norm, foreach=True)
    return norm
