"""What a module logs while its batch runs in micro-batches, put together to what the whole batch would have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers import MinMaxMetric, Running
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_accum.errors import UnreadableLossError
from lightning_accum.micro_batch import Weighed
from lightning_accum.splitting.outputs import loss_of_parts
from lightning_accum.user_warnings import warn
from lightning_accum.weighing.functions import OfMean
from lightning_accum.weighing.terms import Denominator
from lightning_accum.weighing.weight import weight_alone

Arguments: TypeAlias = Mapping[str, Any]
"""Those of ``LightningModule.log`` after the value, by name."""

_MERGEABLE = (dim_zero_sum, dim_zero_max, dim_zero_min, dim_zero_cat)
"""How states are reduced over ranks, where that holds for parts of a batch too. A mean does not: it has no weights."""
_COUNTS_UPDATES = (Running, MinMaxMetric)  # the same samples in more updates are something else to them
_CANNOT_MERGE = (
    "{!r} shows a {}, and what that holds cannot be put together from parts: where GradientAccumulation splits a batch, each"
    " micro-batch is an update to it, and its value of the step a mean over them. Log the metric itself with on_step=False."
)
_FOLDS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
    "sum": lambda values: values.sum(0),
}


class Logged(NamedTuple):
    """What the whole batch logs: one call of ``log`` in a hook."""

    hook: str
    name: str
    value: Tensor | Metric
    arguments: Arguments

    @property
    def key(self) -> str:
        """What Lightning stores it under."""
        return f"{self.hook}.{self.name}"


class _Value(NamedTuple):
    micro_batch: int
    value: Tensor
    weight: Denominator | None = None
    of_mean: OfMean | None = None


@dataclass(slots=True)
class _Entry:
    """The calls of ``log`` with one name in one hook, over the micro-batches."""

    arguments: Arguments = field(default_factory=dict)
    micro_batches: list[int] = field(default_factory=list)
    batch_sizes: dict[int, int] = field(default_factory=dict)
    """Those that were given, by micro-batch."""
    values: list[_Value] = field(default_factory=list)
    """None of a metric that was only updated."""
    is_sum: bool = False
    is_of_loss: bool = False
    metric: Metric | None = None
    value_of: _ValueOfMetric | None = None


class BatchLog:
    """Collects what is logged in each micro-batch of a batch.

    A mean is weighted: a value with a graph by its own denominator, the loss without its graph by that of the loss, another by its
    ``batch_size``, and by the weight of the loss where none was given. ``reduce_fx`` sum, min and max are applied as they are. A
    metric that shows its value of the step shows that of the whole batch. Of a name that is logged several times in a step, the
    first of each micro-batch make the first of the batch, and so on.

    Args:
        metrics: the metrics of the module.
        shown: what :attr:`shown` was after the batch before.
    """

    def __init__(self, metrics: Sequence[Metric] = (), shown: set[int] | None = None) -> None:
        self.shown = set() if shown is None else shown
        """The ids of the metrics whose value of the step is shown: found out in the first batch, kept by the caller."""
        self.micro_batch = 0
        """The micro-batch that is running."""
        self._metrics = metrics
        self.entries: dict[tuple[str, str, int], _Entry] = {}
        """What was logged: by the hook, the name, and how often that was logged before in the micro-batch."""
        self._micro_batches: Sequence[tuple[Weighed, int]] = ()
        self.may_be_loss: list[tuple[Tensor, _Entry]] = []
        """Values without a graph. They are kept until the loss is known: no other tensor can have their memory."""
        self._caches_before = [vars(metric).get("_forward_cache") for metric in metrics]
        for metric in metrics:
            metric._forward_cache = None  # what is there when something is logged is of this batch
        of_batch = (metric for metric in metrics if id(metric) in self.shown or not metric.update_called)
        self._of_batch = {id(metric): _MetricOfBatch(metric) for metric in of_batch}

    def collect(self, hook: str, name: str, value: Tensor | Metric, arguments: Arguments) -> None:
        """Take in one call of ``log``."""
        number = 0
        while self.micro_batch in (entry := self.entries.setdefault((hook, name, number), _Entry())).micro_batches:
            number += 1
        entry.micro_batches.append(self.micro_batch)
        entry.arguments, batch_size = arguments, arguments.get("batch_size")
        if batch_size is not None:
            entry.batch_sizes[self.micro_batch] = batch_size
        if isinstance(value, Metric):
            entry.metric, entry.value_of = value, _ValueOfMetric(value)
            computed: Any = value._forward_cache
            if isinstance(computed, Tensor):
                entry.values.append(_Value(self.micro_batch, computed))
            return
        weight, of_mean = None, None
        entry.value_of = _metric_behind(value, self._metrics)
        if entry.value_of is None and value.grad_fn is None:
            self.may_be_loss.append((value, entry))
        elif entry.value_of is None:
            with suppress(UnreadableLossError):
                weight, found = weight_alone(value)
                of_mean = None if found is None else found.of_mean(value)
                entry.is_sum |= weight is None
        logged = value.detach().clone()
        logged = logged.squeeze() if logged.numel() == 1 else logged
        entry.values.append(_Value(self.micro_batch, logged, batch_size if weight is None else weight, of_mean))

    def note_loss(self, loss: Tensor | None) -> None:
        """The micro-batch has this loss: what was logged of it without its graph, ``loss.detach()``, is weighed as it is."""
        for value, entry in self.may_be_loss:
            if loss is not None and value.numel() == 1 and value.data_ptr() == loss.data_ptr():
                entry.values[-1] = entry.values[-1]._replace(weight=None)
                entry.is_of_loss = True
        self.may_be_loss.clear()

    def forget_micro_batch(self) -> None:
        """What was logged in the micro-batch that is running is not to be shown."""
        for key, entry in list(self.entries.items()):
            entry.micro_batches = [index for index in entry.micro_batches if index != self.micro_batch]
            entry.values = [value for value in entry.values if value.micro_batch != self.micro_batch]
            entry.batch_sizes.pop(self.micro_batch, None)
            if not entry.micro_batches:
                del self.entries[key]

    def weigh(self, micro_batches: Sequence[tuple[Weighed, int]]) -> None:
        """Note what each micro-batch has brought into its window, and its samples."""
        self._micro_batches = micro_batches

    def merged(self, is_synced: Callable[[bool, Arguments], bool]) -> Iterable[Logged]:
        """What the whole batch logs.

        Args:
            is_synced: takes whether a metric is logged, and the arguments; returns whether it is reduced over several ranks.

        Yields:
            The calls, in the order of logging. Those that are synced come last and sorted: which was logged first differs by rank
            where it depends on the micro-batch, and ranks pair their reductions by order.
        """

        def order(item: tuple[tuple[str, str, int], _Entry]) -> tuple[bool, str, int]:
            (hook, name, number), entry = item
            return (True, f"{hook}.{name}", number) if is_synced(entry.metric is not None, entry.arguments) else (False, "", 0)

        for (hook, name, _), entry in sorted(self.entries.items(), key=order):
            arguments = entry.arguments
            if entry.batch_sizes:
                arguments = {**arguments, "batch_size": sum(entry.batch_sizes.values())}
            value: Tensor | Metric | None = entry.metric
            if entry.values:
                of_step = self._of_step(entry)
                value = self._fold(entry) if of_step is None else of_step
            if entry.metric is not None and isinstance(value, Tensor):
                entry.metric._forward_cache, value = value, entry.metric  # type: ignore[assignment]  # its type is None there
            assert value is not None
            yield Logged(hook, name, value, arguments)

    def close(self) -> None:
        """Give the metrics of the module back what they held before the batch."""
        for (hook, name, _), entry in self.entries.items():
            if entry.value_of is None:
                continue
            metric = entry.value_of.metric
            is_of_step = bool(entry.values) and (entry.metric is None or entry.arguments.get("on_step") is not False)
            if (is_of_step or isinstance(metric, _COUNTS_UPDATES)) and id(metric) not in self.shown:
                self.shown.add(id(metric))
                if not _can_merge(metric):
                    warn(_CANNOT_MERGE.format(f"{hook}.{name}", type(metric).__name__))
            if is_of_step and id(metric) in self._of_batch:
                self._of_batch[id(metric)].compute(self.micro_batch + 1)
        for of_batch in self._of_batch.values():
            of_batch.close()
        for metric, before in zip(self._metrics, self._caches_before, strict=True):
            if metric._forward_cache is None:
                metric._forward_cache = before

    def _of_step(self, entry: _Entry) -> Tensor | None:
        if entry.value_of is None or id(entry.value_of.metric) not in self._of_batch:
            return None
        return entry.value_of.find(self._of_batch[id(entry.value_of.metric)].value)

    def _fold(self, entry: _Entry) -> Tensor:
        if len(entry.values) == 1:
            return entry.values[0].value
        values = torch.stack([logged.value.to(entry.values[0].value.device) for logged in entry.values])
        if entry.metric is None and (fold := _FOLDS.get(name_of_reduction(entry.arguments))) is not None:
            return fold(values)
        weights: list[Denominator | None] = []
        of_means: list[OfMean | None] = []
        for logged in entry.values:
            weighed, rows = self._micro_batches[logged.micro_batch]
            own = weighed.weight if logged.weight is None else logged.weight
            is_sum = entry.is_sum or (entry.is_of_loss and weighed.weight is None)
            weights.append(None if is_sum else rows if own is None else own)
            of_means.append(weighed.of_mean if entry.is_of_loss else logged.of_mean)
        return loss_of_parts(values, weights, of_means)


def name_of_reduction(arguments: Arguments) -> str:
    """That of ``reduce_fx``, which is a name or a function."""
    reduce_fx = arguments.get("reduce_fx", "mean")
    return str(getattr(reduce_fx, "__name__", reduce_fx)).lower()


# --- metrics of torchmetrics, whose value of the step is that of the whole batch --------------------------------------


class _MetricOfBatch:
    """A metric that holds the batch alone until it is closed, and everything again from then on."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._before: dict[str, Any] | None = None
        self._updates_before = metric.update_count
        self._holds_batch_alone = not metric.update_called
        self.value: Any = None
        """Its value for the batch, on this rank; None where it cannot be computed."""
        if metric.update_called and _can_merge(metric):
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


def _can_merge(metric: Metric) -> bool:
    """Whether what a metric holds can be put together from two parts."""
    states = {} if isinstance(metric, WrapperMetric) or metric.dist_sync_on_step else metric.metric_state
    return bool(states) and all(metric._reductions[name] in _MERGEABLE for name in states)


class _ValueOfMetric(NamedTuple):
    """The metric that a logged value is of, and the name or index in what it computes; None where it is all of that."""

    metric: Metric
    path: Any = None

    def find(self, computed: Any) -> Tensor | None:
        """This value in what the metric has computed."""
        if computed is not None and self.path is not None:
            computed = computed.get(self.path) if isinstance(computed, Mapping) else computed[self.path]
        return computed if isinstance(computed, Tensor) else None


def _metric_behind(value: Tensor, metrics: Sequence[Metric]) -> _ValueOfMetric | None:
    """The metric whose call returned ``value``, as in ``self.log("accuracy", self.accuracy(logits, target))``."""
    for metric in metrics:
        for path in _paths_to(value, vars(metric).get("_forward_cache")):
            return _ValueOfMetric(metric, path)
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
