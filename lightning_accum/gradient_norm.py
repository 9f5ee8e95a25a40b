"""The norm that clipping computes anyway, kept to be shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

if TYPE_CHECKING:
    from lightning_accum.accumulation import Accumulation


@contextmanager
def noting_gradient_norm(trainer: pl.Trainer, accumulation: Accumulation) -> Iterator[None]:
    """Keep the norm that clipping computes: Lightning's precision plugin throws it away."""
    plugin = trainer.precision_plugin
    accumulation.gradient_norm = None
    clips_by_itself = type(trainer.lightning_module).configure_gradient_clipping is not LightningModule.configure_gradient_clipping
    if not (trainer.gradient_clip_val or clips_by_itself):
        yield
        return

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        accumulation.gradient_norm = torch.nn.utils.clip_grad_norm_(plugin.main_params(optimizer), clip_val)

    if type(plugin).clip_grad_by_norm is not Precision.clip_grad_by_norm:
        yield  # a plugin with a clipping of its own
        return
    plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]
    try:
        yield
    finally:
        del plugin.clip_grad_by_norm
