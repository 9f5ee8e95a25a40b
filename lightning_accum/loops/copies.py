"""A copy of a module that has been in training."""

from __future__ import annotations

import lightning.pytorch as pl


def forget_training(copied: pl.LightningModule) -> None:
    """Drop what a deep copy remembers of the module that it was copied from.

    ``LightningModule.log`` keeps the names of metrics by their ``id`` (2.6.6, core/module.py), which are others in the copy.
    """
    copied._metric_attributes = None
