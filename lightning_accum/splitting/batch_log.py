"""What a module logs while its batch runs in micro-batches, put together to what the whole batch would have logged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.wrappers import MinMaxMetric, Running

from lightning_accum.errors import UnreadableLossError
from lightning_accum.micro_batch import Weighed
from lightning_accum.splitting.metric_of_batch import MetricOfBatch, ValueOfMetric, can_merge, metric_behind
from lightning_accum.splitting.outputs import loss_of_parts
from lightning_accum.user_warnings import warn
from lightning_accum.weighing.functions import OfMean
from lightning_accum.weighing.terms import Denominator
from lightning_accum.weighing.weight import weight_alone

Arguments: TypeAlias = Mapping[str, Any]
"""Those of ``LightningModule.log`` after the value, by name."""

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
    value_of: ValueOfMetric | None = None


class BatchLog:
    """Collects what is logged in each micro-batch of a batch.

    A mean is weighted: a value with a graph by its own denominator, the loss without its graph by that of the loss, another by
    the ``batch_size`` that it was logged with, and by the weight of the loss where none was given. ``reduce_fx`` sum, min and max
    are applied as they are. A :class:`torchmetrics.Metric` that shows its value of the step shows that of the whole batch. A name
    that is logged several times in a step keeps its values separate: the first of each micro-batch make the first of the batch,
    and so on.

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
        self._of_batch = {id(metric): MetricOfBatch(metric) for metric in of_batch}

    # --- during a micro-batch ---------------------------------------------------------------------------------------

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
            entry.metric, entry.value_of = value, ValueOfMetric(value)
            computed: Any = value._forward_cache
            if isinstance(computed, Tensor):
                entry.values.append(_Value(self.micro_batch, computed))
            return
        weight, of_mean = None, None
        entry.value_of = metric_behind(value, self._metrics)
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

    # --- at the end of the batch ------------------------------------------------------------------------------------

    def weigh(self, micro_batches: Sequence[tuple[Weighed, int]]) -> None:
        """Note what each micro-batch has brought into its window, and its samples: all have ended."""
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
                if not can_merge(metric):
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
        of_losses = [self._micro_batches[logged.micro_batch] for logged in entry.values]
        pairs = list(zip(entry.values, of_losses, strict=True))
        of_means = [weighed.of_mean if entry.is_of_loss else logged.of_mean for logged, (weighed, _) in pairs]
        if entry.is_sum or (entry.is_of_loss and any(weighed.weight is None for weighed, _ in of_losses)):
            return loss_of_parts(values, [None] * len(values), of_means)
        weights: list[Denominator] = []
        for logged, (weighed, rows) in pairs:
            own = weighed.weight if logged.weight is None else logged.weight
            weights.append(rows if own is None else own)
        return loss_of_parts(values, weights, of_means)


def name_of_reduction(arguments: Arguments) -> str:
    """That of ``reduce_fx``, which is a name or a function."""
    reduce_fx = arguments.get("reduce_fx", "mean")
    return str(getattr(reduce_fx, "__name__", reduce_fx)).lower()
