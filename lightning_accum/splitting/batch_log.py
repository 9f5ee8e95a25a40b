"""What a module logs while its batch runs in micro-batches, put together to what the whole batch would have logged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers import MinMaxMetric, Running
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_accum.user_warnings import warn
from lightning_accum.weighing.denominator import Denominator, UnreadableLossError
from lightning_accum.weighing.functions import OfMean, read_function

_FOLDS: dict[Callable[..., Any], Callable[[Tensor], Tensor]] = {
    torch.max: lambda values: values.amax(0),
    max: lambda values: values.amax(0),
    torch.min: lambda values: values.amin(0),
    min: lambda values: values.amin(0),
    torch.sum: lambda values: values.sum(0),
    sum: lambda values: values.sum(0),
}


@dataclass(slots=True)
class _OfMetric:
    """The metric that a logged value is of, and the name or index in what it computes; None where it is all of that."""

    metric: Metric
    path: Any = None


@dataclass(slots=True)
class _Entry:
    """One name, over the micro-batches; logged again in a micro-batch, it is another entry."""

    values: list[Tensor] = field(default_factory=list)
    weights: list[Denominator | None] = field(default_factory=list)
    of_means: list[OfMean | None] = field(default_factory=list)
    micro_batches: list[int] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    is_batch_size_given: bool = False
    is_sum: bool = False
    is_of_loss: bool = False
    seen: set[int] = field(default_factory=set)
    metric: Metric | None = None
    of_metric: _OfMetric | None = None


class BatchLog:
    """Collects what is logged in each micro-batch of a batch.

    A mean is weighted: a value with a graph by its own denominator, the loss without its graph by that of the loss, another by
    the ``batch_size`` that it was logged with, and by the weight of the loss where none was given. ``reduce_fx`` sum, min and max
    are applied as they are. A :class:`torchmetrics.Metric` that shows its value of the step shows that of the whole batch. A name
    that is logged several times in a step keeps its values apart: the first of each micro-batch make the first of the batch, and
    so on.

    Args:
        metrics: the metrics of the module.
        shown: what :attr:`shown` was after the batch before.
    """

    def __init__(self, metrics: Sequence[Metric] = (), shown: set[int] | None = None) -> None:
        self.shown = set() if shown is None else shown
        """The metrics, by their id, whose value of the step is shown: found out in the first batch, kept by the caller."""
        self._metrics = metrics
        self.registered: dict[str, Any] = {}
        """What the caller has made for new names, to be registered when they are shown."""
        self._entries: dict[tuple[str, int], _Entry] = {}
        self.micro_batch = 0
        """The micro-batch under way."""
        self._weights: Sequence[Denominator | None] = ()
        self._rows: Sequence[int] = ()
        self._of_means: Sequence[OfMean | None] = ()
        self._of_value: tuple[Denominator | None, bool, _OfMetric | None] = (None, False, None)
        self._of_mean: OfMean | None = None
        self._detached: Tensor | None = None
        self._may_be_loss: dict[int, list[tuple[Tensor, _Entry]]] = {}
        """Values without a graph, by micro-batch. They are kept until its loss is known: no other can have their memory."""
        self._caches_before = [vars(metric).get("_forward_cache") for metric in metrics]
        for metric in metrics:
            metric._forward_cache = None  # what is there at a log is of this batch
        of_batch = (metric for metric in metrics if id(metric) in self.shown or not metric.update_called)
        self._of_batch = {id(metric): _MetricOfBatch(metric) for metric in of_batch}

    # --- during a micro-batch ---------------------------------------------------------------------------------------

    def look_at(self, value: Any) -> None:
        """See a value before it is cut off from its graph: what it was divided by may be read there."""
        self._of_value, self._of_mean, self._detached = (None, False, None), None, None
        if not isinstance(value, Tensor):
            return
        for metric in self._metrics:  # `self.log("accuracy", self.accuracy(logits, target))`
            for path in _paths_to(value, vars(metric).get("_forward_cache")):
                self._of_value = (None, False, _OfMetric(metric, path))
                return
        if value.grad_fn is None:
            self._detached = value
            return
        with suppress(UnreadableLossError):
            reading, found = read_function(value)
            self._of_mean = None if found is None else found.of_mean(value)
            self._of_value = (reading.weight, reading.weight is None, None)

    def collect(self, key: str, value: Tensor | Metric, batch_size: int, is_batch_size_given: bool) -> None:
        """Take in one logged value."""
        number = 0
        while self.micro_batch in (entry := self._entries.setdefault((key, number), _Entry())).seen:
            number += 1
        entry.seen.add(self.micro_batch)
        entry.batch_sizes.append(batch_size)
        entry.is_batch_size_given |= is_batch_size_given
        weight, is_sum, entry.of_metric = self._of_value
        of_mean, self._of_value, self._of_mean = self._of_mean, (None, False, None), None
        if isinstance(value, Metric):
            entry.metric, entry.of_metric = value, _OfMetric(value)
            cached: Any = value._forward_cache
            if not isinstance(cached, Tensor):  # only updated: it has no value of the step
                return
            value = cached
        elif weight is None and is_batch_size_given:
            weight = batch_size
        entry.values.append(value)
        entry.weights.append(weight)
        entry.of_means.append(of_mean)
        entry.micro_batches.append(self.micro_batch)
        entry.is_sum |= is_sum
        if self._detached is not None:
            self._may_be_loss.setdefault(self.micro_batch, []).append((self._detached, entry))
            self._detached = None

    def note_loss(self, loss: Tensor | None, micro_batch: int) -> None:
        """The loss of a micro-batch is known: what was logged of it without its graph, ``loss.detach()``, is weighed as it is."""
        for value, entry in self._may_be_loss.pop(micro_batch, ()):
            if loss is not None and value.numel() == 1 and value.data_ptr() == loss.data_ptr() and entry.micro_batches:
                entry.weights[entry.micro_batches.index(micro_batch)] = None
                entry.is_of_loss = True

    def forget_micro_batch(self) -> None:
        """What was logged in the micro-batch under way is not to be shown."""
        for key, entry in list(self._entries.items()):
            if self.micro_batch not in entry.seen:
                continue
            entry.seen.discard(self.micro_batch)
            entry.batch_sizes.pop()
            if entry.micro_batches and entry.micro_batches[-1] == self.micro_batch:
                for column in (entry.values, entry.weights, entry.of_means, entry.micro_batches):
                    column.pop()
            if not entry.batch_sizes:
                del self._entries[key]

    # --- at the end of the batch ------------------------------------------------------------------------------------

    def weigh(
        self, weights: Sequence[Denominator | None], rows: Sequence[int], of_means: Sequence[OfMean | None] | None = None
    ) -> None:
        """All micro-batches have ended.

        Args:
            weights: what the loss of each was divided by; None for a sum, 0 without a loss.
            rows: the samples of each.
            of_means: what makes each loss of the mean that was weighed; None where they are that.
        """
        self._weights, self._rows = weights, rows
        self._of_means = of_means or [None] * len(weights)

    def merged(
        self, reduce_fx: Callable[[str], Callable[..., Any]], is_synced: Callable[[str], bool] = lambda key: False
    ) -> Iterable[tuple[str, Tensor | Metric, int]]:
        """What the whole batch logs.

        Args:
            reduce_fx: tells how the values of a name are reduced.
            is_synced: tells whether a name is reduced over several ranks.

        Yields:
            Name, value and the number of samples, in the order of logging. Those that are synced come last and sorted: which
            was logged first differs by rank where it depends on the micro-batch, and ranks pair their reductions by order.
        """
        entries = sorted(self._entries.items(), key=lambda item: (True, *item[0]) if is_synced(item[0][0]) else (False, "", 0))
        for (key, _), entry in entries:
            total = sum(entry.batch_sizes) if entry.is_batch_size_given else entry.batch_sizes[0]
            if entry.values:
                of_step = self._of_step(entry)
                folded = self._fold(entry, torch.mean if entry.metric else reduce_fx(key)) if of_step is None else of_step
                if entry.metric is None:
                    yield key, folded, total
                    continue
                entry.metric._forward_cache = folded  # type: ignore[assignment]  # torchmetrics types it as None
            assert entry.metric is not None
            yield key, entry.metric, total

    def close(self, is_shown: Callable[[str], bool]) -> None:
        """Give the metrics of the module back what they held before the batch.

        Args:
            is_shown: tells whether a name shows its value of the step.
        """
        for (key, _), entry in self._entries.items():
            if entry.of_metric is None:
                continue
            metric = entry.of_metric.metric
            is_of_step = bool(entry.values) and (entry.metric is None or is_shown(key))
            if (is_of_step or isinstance(metric, _COUNTS_UPDATES)) and id(metric) not in self.shown:
                self.shown.add(id(metric))
                if not _can_merge(metric):
                    warn(_CANNOT_MERGE.format(key, type(metric).__name__))
            if is_of_step and id(metric) in self._of_batch:
                self._of_batch[id(metric)].compute(self.micro_batch + 1)
        for of_batch in self._of_batch.values():
            of_batch.close()
        for metric, before in zip(self._metrics, self._caches_before, strict=True):
            if metric._forward_cache is None:
                metric._forward_cache = before

    def _of_step(self, entry: _Entry) -> Tensor | None:
        of_metric = entry.of_metric
        if of_metric is None or id(of_metric.metric) not in self._of_batch:
            return None
        value = self._of_batch[id(of_metric.metric)].value
        if value is not None and of_metric.path is not None:
            value = value.get(of_metric.path) if isinstance(value, Mapping) else value[of_metric.path]
        return value if isinstance(value, Tensor) else None

    def _fold(self, entry: _Entry, reduce_fx: Callable[..., Any]) -> Tensor:
        if len(entry.values) == 1:
            return entry.values[0]
        values = torch.stack([value.to(entry.values[0].device) for value in entry.values])
        if reduce_fx in _FOLDS:
            return _FOLDS[reduce_fx](values)
        of_means = [self._of_means[index] for index in entry.micro_batches] if entry.is_of_loss else entry.of_means
        if entry.is_sum or (entry.is_of_loss and any(self._weights[index] is None for index in entry.micro_batches)):
            return loss_of_parts(values, [None] * len(values), of_means)
        weights: list[Denominator] = []
        for own, index in zip(entry.weights, entry.micro_batches, strict=True):
            of_loss = self._weights[index]
            weights.append(own if own is not None else of_loss if of_loss is not None else self._rows[index])
        return loss_of_parts(values, weights, of_means)


def loss_of_parts(values: Tensor, weights: Sequence[Denominator | None], of_means: Sequence[OfMean | None]) -> Tensor:
    """What is a mean, a sum, or a function of one of these, of the whole of several parts.

    Args:
        values: those of the parts, along dimension 0.
        weights: of each; None for a sum.
        of_means: what makes each of a mean; None where it is one.
    """
    counts = [weight for weight in weights if weight is not None]
    counted = [of_mean for of_mean in of_means if of_mean is not None]
    are_sums = len(counts) < len(weights)
    if len(counted) < len(of_means) or len({of_mean.function for of_mean in counted}) > 1:
        return values.sum(0) if are_sums else weighted_mean(values, counts)
    means, constants = (
        torch.stack([torch.as_tensor(getattr(of_mean, name), device=values.device) for of_mean in counted])
        for name in ("mean", "constant")
    )
    if are_sums:
        return (counted[0].function(means.sum()) + constants.mean()).to(values.dtype)
    return (counted[0].function(weighted_mean(means, counts)) + weighted_mean(constants, counts)).to(values.dtype)


def weighted_mean(values: Tensor, weights: Sequence[Denominator]) -> Tensor:
    """The mean of ``values`` (along dimension 0), each with its weight; values without weight may be NaN.

    Example:
        >>> weighted_mean(torch.tensor([1.0, 4.0, float("nan")]), [1.0, 2.0, 0.0])
        tensor(3.)
    """
    for weight in weights:  # to where they are: from the host to a device nobody waits
        if isinstance(weight, Tensor) and weight.device.type != "cpu":
            values = values.to(weight.device)
    exact = torch.float32 if values.device.type == "mps" else torch.float64
    if any(isinstance(weight, Tensor) for weight in weights):
        n = torch.stack([torch.as_tensor(weight, device=values.device).detach().to(exact) for weight in weights])
    else:
        n = torch.tensor(weights, dtype=exact, device=values.device)
    n = n.reshape(-1, *[1] * (values.dim() - 1))
    n = torch.where(n.sum(0) == 0, torch.ones_like(n), n)
    parts = torch.where(n == 0, torch.zeros_like(n), values.to(exact) * n)
    return (parts.sum(0) / n.sum(0)).to(values.dtype if values.is_floating_point() else torch.get_default_dtype())


class _MetricOfBatch:
    """A metric that holds the batch alone until it is closed, and everything again from then on."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._before: dict[str, Any] | None = None
        self._updates_before = metric.update_count
        self._holds_batch_alone = not metric.update_called
        self.value: Any = None
        """Its value for the batch, on this rank; None where it cannot be told."""
        if metric.update_called and _can_merge(metric):
            self._before = {name: list(s) if isinstance(s, list) else s for name, s in metric.metric_state.items()}
            metric.reset()
            self._holds_batch_alone = True

    def compute(self, micro_batches: int) -> None:
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
        metric = self._metric
        if self._before is None:
            return
        for name, before in self._before.items():
            now = getattr(metric, name)
            setattr(metric, name, _MERGES[metric._reductions[name]](before, now) if metric.update_called else before)
        metric._update_count += self._updates_before
        metric._computed = None


def _concatenate(before: Any, now: Any) -> Any:
    return [*before, *now] if isinstance(before, list) else torch.cat((before, now))


# what a metric says of its states for the sake of several ranks holds for parts of a batch too
_MERGES: dict[Any, Callable[[Any, Any], Any]] = {
    dim_zero_sum: lambda before, now: before + now,
    dim_zero_max: torch.maximum,
    dim_zero_min: torch.minimum,
    dim_zero_cat: _concatenate,
}


_COUNTS_UPDATES = (Running, MinMaxMetric)  # the same samples in more updates are something else to them
_CANNOT_MERGE = (
    "{!r} shows a {}, and what that holds cannot be put together from parts: where GradientAccumulation splits a batch, each"
    " micro-batch is an update to it, and its value of the step a mean over them. Log the metric itself with on_step=False."
)


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


def _can_merge(metric: Metric) -> bool:
    """Whether what it holds can be put together from two parts."""
    states = {} if isinstance(metric, WrapperMetric) or metric.dist_sync_on_step else metric.metric_state
    return bool(states) and all(metric._reductions[name] in _MERGES for name in states)
