"""A metric of torchmetrics whose value of the step is that of a whole batch, though its parts are updates of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers.abstract import WrapperMetric

_MERGEABLE = (dim_zero_sum, dim_zero_max, dim_zero_min, dim_zero_cat)
"""How states are reduced over ranks, where that holds for parts of a batch too. A mean does not: it has no weights."""


class MetricOfBatch:
    """A metric that holds the batch alone until it is closed, and everything again from then on."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._before: dict[str, Any] | None = None
        self._updates_before = metric.update_count
        self._holds_batch_alone = not metric.update_called
        self.value: Any = None
        """Its value for the batch, on this rank; None where it cannot be computed."""
        if metric.update_called and can_merge(metric):
            self._before = {name: list(s) if isinstance(s, list) else s for name, s in metric.metric_state.items()}
            metric.reset()
            self._holds_batch_alone = True

    def compute(self, micro_batches: int) -> None:
        """Compute :attr:`value`, if there was at most one update in each of so many micro-batches."""
        updates = self._metric.update_count
        if not self._holds_batch_alone or not 0 < updates <= micro_batches:  # of more, a value of the step is not that of all
            return
        metric, to_sync = self._metric, self._metric._to_sync
        metric._to_sync = False  # as `forward` does: the value of a step is that of its rank
        try:
            self.value = metric.compute()
        finally:
            metric._to_sync, metric._computed = to_sync, None

    def close(self) -> None:
        """Give the metric back what it held before the batch."""
        metric = self._metric
        if self._before is None:
            return
        if metric.update_called:
            metric._reduce_states(self._before)  # merge_state refuses metrics that do not say whether an update reads the state
        else:
            for name, before in self._before.items():
                setattr(metric, name, before)
        metric._update_count += self._updates_before
        metric._computed = None


def can_merge(metric: Metric) -> bool:
    """Whether what a metric holds can be put together from two parts."""
    states = {} if isinstance(metric, WrapperMetric) or metric.dist_sync_on_step else metric.metric_state
    return bool(states) and all(metric._reductions[name] in _MERGEABLE for name in states)


class ValueOfMetric(NamedTuple):
    """The metric that a logged value is of, and the name or index in what it computes; None where it is all of that."""

    metric: Metric
    path: Any = None

    def find(self, computed: Any) -> Tensor | None:
        """This value in what the metric has computed."""
        if computed is not None and self.path is not None:
            computed = computed.get(self.path) if isinstance(computed, Mapping) else computed[self.path]
        return computed if isinstance(computed, Tensor) else None


def metric_behind(value: Tensor, metrics: Sequence[Metric]) -> ValueOfMetric | None:
    """The metric whose call returned ``value``, as in ``self.log("accuracy", self.accuracy(logits, target))``."""
    for metric in metrics:
        for path in _paths_to(value, vars(metric).get("_forward_cache")):
            return ValueOfMetric(metric, path)
    return None


def _paths_to(value: Tensor, cached: Any) -> list[Any]:
    if cached is value:
        return [None]
    if isinstance(cached, Mapping):
        return [name for name, item in cached.items() if item is value]
    if value._base is None or not isinstance(cached, Tensor) or value.shape != cached.shape[1:] or not cached.numel():
        return []
    # a metric of each class, and what ClasswiseWrapper shows of it
    index = (value.storage_offset() - cached.storage_offset()) // (cached.stride(0) or 1)
    is_row = value._base is (cached if cached._base is None else cached._base) and 0 <= index < len(cached)
    return [index] if is_row else []
