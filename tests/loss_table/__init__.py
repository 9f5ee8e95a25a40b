"""Losses of many fields, written for the tests: a table of what a window must do with each.

Of losses that add up alike, from the mean or the sum down to what is not linear, the table has one: it stands for all of them.
"""

from loss_table import criteria, forecasting, idioms, language, libraries, metric_learning, papers, reinforcement, vision
from loss_table.rows import Loss

_TABLES = (
    criteria.table, vision.table, vision.segmentation, metric_learning.table, metric_learning.self_supervised, language.table,
    reinforcement.table, forecasting.table, reinforcement.multi_task, idioms.table, libraries.table, idioms.strange, papers.table,
)  # fmt: skip
LOSSES: list[Loss] = [loss for table in _TABLES for loss in table]
BY_NAME = {loss.name: loss for loss in LOSSES}
