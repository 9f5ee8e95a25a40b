"""What micro-batches log, put together to what the whole batch would have logged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers import MinMaxMetric, Running
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_accum.errors import UnreadableLossError
from lightning_accum.micro_batch import Weighed, loss_of_parts
from lightning_accum.user_warnings import warn
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
_FOLDS: dict[str, Callable[[Tensor], Tensor]] = {"max": dim_zero_max, "min": dim_zero_min, "sum": dim_zero_sum}


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


class _Call(NamedTuple):
    """One call of ``log``: its value, None of a metric that was only updated, and how that is weighed; None as the loss is."""

    arguments: Arguments
    value: Tensor | None = None
    metric: Metric | None = None
    value_of: _ValueOfMetric | None = None
    weighed: Weighed | None = None
    is_loss: bool = False


_Key: TypeAlias = tuple[str, str, int]
"""The hook, the name, and how often that was logged before in the micro-batch."""


class BatchLog:
    """Collects what is logged in each micro-batch of a batch.

    A mean is weighted: a value with a graph by its own denominator, the loss without its graph by that of the loss, another by its
    ``batch_size``, and by the weight of the loss where none was given. ``reduce_fx`` sum, min and max are applied as they are. A
    metric that shows its value of the step shows that of the whole batch. Of a name that is logged several times in a step, the
    first of each micro-batch make the first of the batch, and so on.
    """

    def __init__(self, metrics: Sequence[Metric] = (), shown: set[int] | None = None) -> None:
        self.shown = set() if shown is None else shown
        """The ids of the metrics whose value of the step is shown: found out in the first batch, kept by the caller."""
        self.micro_batch = 0
        """The micro-batch that is running."""
        self.entries: dict[_Key, dict[int, _Call]] = {}
        """What was logged, by micro-batch."""
        self._micro_batches: Sequence[tuple[Weighed, int]] = ()
        self.may_be_loss: list[tuple[Tensor, dict[int, _Call]]] = []
        """Values without a graph. They are kept until the loss is known: no other tensor can have their memory."""
        self._metrics = metrics
        self._of_batch = {id(metric): _MetricOfBatch(metric, id(metric) in self.shown) for metric in metrics}

    def collect(self, hook: str, name: str, value: Tensor | Metric, arguments: Arguments) -> None:
        """Take in one call of ``log``."""
        number = 0
        while self.micro_batch in (calls := self.entries.setdefault((hook, name, number), {})):
            number += 1
        if isinstance(value, Metric):
            computed: Any = value._forward_cache
            shown = computed if isinstance(computed, Tensor) else None
            calls[self.micro_batch] = _Call(arguments, shown, value, _ValueOfMetric(value))
            return
        size, value_of = arguments.get("batch_size"), _metric_behind(value, self._metrics)
        weighed = None if size is None else Weighed(size)
        if value_of is None and value.grad_fn is None:
            self.may_be_loss.append((value, calls))
        elif value_of is None:
            with suppress(UnreadableLossError):
                weighed = Weighed(*weight_alone(value))
        logged = value.detach().clone()
        logged = logged.squeeze() if logged.numel() == 1 else logged
        calls[self.micro_batch] = _Call(arguments, logged, None, value_of, weighed)

    def note_loss(self, loss: Tensor | None) -> None:
        """The micro-batch has this loss: what was logged of it without its graph, ``loss.detach()``, is weighed as it is."""
        for value, calls in self.may_be_loss:
            if loss is not None and value.numel() == 1 and value.data_ptr() == loss.data_ptr():
                calls[self.micro_batch] = calls[self.micro_batch]._replace(is_loss=True)
        self.may_be_loss.clear()

    def forget_micro_batch(self) -> None:
        """What was logged in the micro-batch that is running is not to be shown."""
        for calls in self.entries.values():
            calls.pop(self.micro_batch, None)
        self.entries = {key: calls for key, calls in self.entries.items() if calls}

    def weigh(self, micro_batches: Sequence[tuple[Weighed, int]]) -> None:
        """Note what each micro-batch has brought into its window, and its samples."""
        self._micro_batches = micro_batches

    def merged(self, is_synced: Callable[[bool, Arguments], bool]) -> Iterable[Logged]:
        """What the whole batch logs, in the order of logging.

        Those that ``is_synced`` says are reduced over ranks, of whether it is a metric and of the arguments, come last and sorted:
        which was logged first differs by rank where it depends on the micro-batch, and ranks pair their reductions by order.
        """

        def order(item: tuple[_Key, dict[int, _Call]]) -> tuple[bool, str, int]:
            (hook, name, number), last = item[0], _last(item[1])
            return (True, f"{hook}.{name}", number) if is_synced(last.metric is not None, last.arguments) else (False, "", 0)

        for (hook, name, _), calls in sorted(self.entries.items(), key=order):
            last, arguments = _last(calls), _last(calls).arguments
            sizes = [call.arguments.get("batch_size") for call in calls.values()]
            if any(size is not None for size in sizes):
                arguments = {**arguments, "batch_size": sum(size for size in sizes if size is not None)}
            of_step: Tensor | None = None
            if any(call.value is not None for call in calls.values()):
                if last.value_of is not None and (of_batch := self._of_batch.get(id(last.value_of.metric))) is not None:
                    of_step = last.value_of.find(of_batch.value)
                of_step = self._fold(calls) if of_step is None else of_step
            if last.metric is not None and of_step is not None:
                last.metric._forward_cache = of_step  # type: ignore[assignment]  # its type is None there
            value = of_step if last.metric is None else last.metric
            assert value is not None
            yield Logged(hook, name, value, arguments)

    def close(self) -> None:
        """Give the metrics of the module back what they held before the batch."""
        for (hook, name, _), calls in self.entries.items():
            last = _last(calls)
            if last.value_of is None:
                continue
            metric, has_value = last.value_of.metric, any(call.value is not None for call in calls.values())
            is_of_step = has_value and (last.metric is None or last.arguments.get("on_step") is not False)
            if (is_of_step or isinstance(metric, _COUNTS_UPDATES)) and id(metric) not in self.shown:
                self.shown.add(id(metric))
                if not _can_merge(metric):
                    warn(_CANNOT_MERGE.format(f"{hook}.{name}", type(metric).__name__))
            if is_of_step and id(metric) in self._of_batch:
                self._of_batch[id(metric)].compute(self.micro_batch + 1)
        for of_batch in self._of_batch.values():
            of_batch.close()

    def _fold(self, calls: Mapping[int, _Call]) -> Tensor:
        last, found = _last(calls), {index: call.value for index, call in calls.items() if call.value is not None}
        device = next(iter(found.values())).device
        values = torch.stack([value.to(device) for value in found.values()])
        if len(found) == 1:
            return values[0]
        if last.metric is None and (fold := _FOLDS.get(name_of_reduction(last.arguments))) is not None:
            return fold(values)
        return loss_of_parts(values, [self._weighed(index, calls[index]) for index in found])

    def _weighed(self, index: int, call: _Call) -> Weighed:
        of_loss, rows = self._micro_batches[index]
        if call.is_loss:
            return of_loss
        return call.weighed or Weighed(rows if of_loss.weight is None else of_loss.weight)


def _last(calls: Mapping[int, _Call]) -> _Call:
    return [*calls.values()][-1]


def name_of_reduction(arguments: Arguments) -> str:
    """That of ``reduce_fx``, which is a name or a function."""
    reduce_fx = arguments.get("reduce_fx", "mean")
    return str(getattr(reduce_fx, "__name__", reduce_fx)).lower()


# --- metrics of torchmetrics, whose value of the step is that of the whole batch --------------------------------------


class _MetricOfBatch:
    """A metric that, if it is shown, holds the batch alone until it is closed, and everything again from then on."""

    def __init__(self, metric: Metric, is_shown: bool) -> None:
        self._metric, self._updates_before, self._cache_before = metric, metric.update_count, vars(metric).get("_forward_cache")
        metric._forward_cache = None  # what is there when something is logged is of this batch
        self._before: dict[str, Any] = {}
        self.value: Any = None
        """Its value for the batch, on this rank; None where it cannot be computed."""
        if is_shown and metric.update_called and _can_merge(metric):
            self._before = {name: list(s) if isinstance(s, list) else s for name, s in metric.metric_state.items()}
            metric.reset()
        self._holds_batch_alone = not metric.update_called

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
        if metric._forward_cache is None:
            metric._forward_cache = self._cache_before
        if not self._before:
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
        cached = vars(metric).get("_forward_cache")
        if cached is value:
            return _ValueOfMetric(metric)
        if isinstance(cached, Mapping):
            for name in (name for name, item in cached.items() if item is value):
                return _ValueOfMetric(metric, name)
        elif isinstance(cached, Tensor) and cached.dim() and value._base is not None and value.shape == cached.shape[1:]:
            # a metric of each class, and what ClasswiseWrapper shows of it
            index = (value.storage_offset() - cached.storage_offset()) // (cached.stride(0) or 1)
            if value._base is (cached if cached._base is None else cached._base) and 0 <= index < len(cached):
                return _ValueOfMetric(metric, index)
    return None
