"""Losses of many fields, written for the tests: a table of what a window must do with each."""

from __future__ import annotations

from loss_table import (
    criteria,
    forecasting,
    idioms,
    language,
    libraries,
    metric_learning,
    multi_task,
    papers,
    reinforcement,
    segmentation,
    self_supervised,
    strange,
    vision,
)
from loss_table.rows import Loss

_MODULES = (
    criteria, vision, segmentation, metric_learning, self_supervised, language, reinforcement, forecasting, multi_task, idioms,
    libraries, strange, papers,
)  # fmt: skip
LOSSES: list[Loss] = [loss for module in _MODULES for loss in module.table]
