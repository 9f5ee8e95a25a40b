"""Joins the logs of micro-batches to the logs of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, NamedTuple, TypeAlias

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers import MinMaxMetric, Running
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_accum.errors import UnreadableLossError
from lightning_accum.micro_batch import Output, Weighed, loss_of_parts
from lightning_accum.weighing.weight import weight_alone

Arguments: TypeAlias = Mapping[str, Any]  # the arguments of ``LightningModule.log`` after the value, by name

_MERGEABLE = (dim_zero_sum, dim_zero_max, dim_zero_min, dim_zero_cat)
"""Reductions of states over ranks that also hold for parts of a batch. A mean has no weights, so it does not."""
_COUNTS_UPDATES = (Running, MinMaxMetric)  # their value depends on the number of updates
_CANNOT_MERGE = (
    "{!r} shows a {}, whose state cannot be combined from parts: if GradientAccumulation splits a batch, each micro-batch updates "
    "it, and the value logged for the step is a mean over micro-batches. Log the metric itself with on_step=False."
)
_FOLDS: dict[str, Callable[[Tensor], Tensor]] = {"max": dim_zero_max, "min": dim_zero_min, "sum": dim_zero_sum}


class Call(NamedTuple):
    """A call of a metric."""

    metric: Metric
    state: Mapping[str, Any]  # the state of the metric after this micro-batch alone
    leaves: Sequence[Any]  # its returned values, without containers


class Logged(NamedTuple):
    """One call of ``log`` in a micro-batch."""

    value: Tensor | None  # the value of the step; None for a metric that was only updated
    arguments: Arguments
    weighed: Weighed | None = None
    """Its weight among micro-batches; None to use the weight of the loss, which is not known yet."""
    may_be_loss: Tensor | None = None  # the value itself, kept until the loss is known: no other tensor reuses its memory
    metric: Metric | None = None  # the metric, if the metric object was logged
    call: Call | None = None  # the call of a metric that returned the value
    leaf: int = 0  # the index of the value in the results of the call
    offset: int = 0  # its storage offset in that result: a metric of each class, and the values of ClasswiseWrapper


Key: TypeAlias = tuple[str, str, int]  # the hook, the name, and how often the name was logged before in the micro-batch


class BatchLog:
    """Collects the logs of a micro-batch, as ``output.logs`` of :class:`Output`; :func:`joined_logs` joins them."""

    def __init__(self) -> None:
        self._logged: dict[Key, Logged] = {}
        self._calls: dict[int, Call] = {}  # the last call of each metric
        self._returned: dict[int, tuple[Call, int]] = {}
        """The results of metrics, by their memory: the call and the index of the leaf."""

    def collect(self, hook: str, name: str, value: Tensor | Metric, arguments: Arguments) -> None:
        """Take in one call of ``log``."""
        number = 0
        while (key := (hook, name, number)) in self._logged:
            number += 1
        if isinstance(value, Metric):
            call = self._calls.get(id(value))
            leaves = [None] if call is None else call.leaves
            of_step = leaves[0] if len(leaves) == 1 and isinstance(leaves[0], Tensor) else None
            self._logged[key] = Logged(of_step, arguments, metric=value, call=call)
            return
        size, logged = arguments.get("batch_size"), value.detach().clone()
        own = Logged(logged.squeeze() if logged.numel() == 1 else logged, arguments, None if size is None else Weighed(size))
        if self._returned and (found := self._returned.get(value.untyped_storage().data_ptr())) is not None:
            call, leaf = found
            own = own._replace(call=call, leaf=leaf, offset=value.storage_offset() - call.leaves[leaf].storage_offset())
        elif value.grad_fn is None:
            own = own._replace(may_be_loss=value)
        else:
            with suppress(UnreadableLossError):
                own = own._replace(weighed=Weighed(*weight_alone(value)))
        self._logged[key] = own

    def note_call(self, metric: Metric, value: Any) -> None:
        """Note that a metric was called, and computed ``value`` for this micro-batch alone."""
        state = apply_to_collection(metric.metric_state, Tensor, Tensor.detach)
        leaves = tree_leaves(apply_to_collection(value, Tensor, Tensor.detach))
        self._calls[id(metric)] = call = Call(metric, state, leaves)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._returned[leaf.untyped_storage().data_ptr()] = call, index

    def take(self, loss: Tensor | None, weighed: Weighed, rows: int) -> Mapping[Key, Logged]:
        """The logs of the micro-batch that has run. A value logged without its graph, ``loss.detach()``, gets the loss's weight."""
        logged = self._logged
        for key, own in logged.items():
            without_size = Weighed(rows if weighed.weight is None else weighed.weight)
            value = own.may_be_loss
            if value is not None and loss is not None and value.numel() == 1 and value.data_ptr() == loss.data_ptr():
                logged[key] = own._replace(weighed=weighed, may_be_loss=None)
            elif own.weighed is None or value is not None:
                logged[key] = own._replace(weighed=own.weighed or without_size, may_be_loss=None)
        self._logged, self._calls, self._returned = {}, {}, {}
        return logged


# --- of several micro-batches -----------------------------------------------------------------------------------------


class Joined(NamedTuple):
    """One call of ``log`` for the whole batch."""

    hook: str
    name: str
    value: Tensor | Metric
    arguments: Arguments
    key: str  # Lightning stores it under this key


def joined_logs(outputs: Sequence[Output], warn: Callable[[str], None]) -> Iterator[Joined]:
    """The logs of the whole batch, in the order of logging.

    Means are weighted: a value with a graph by its own denominator, ``loss.detach()`` by the loss's weight, any other value by its
    ``batch_size``, or by the loss's weight without one. ``reduce_fx`` sum, min and max are applied unchanged. A
    metric that shows a value of the step shows the value of the whole batch. If a name is logged several times in a step, the first
    values of the micro-batches make the first value of the batch, and so on.
    """
    computed: dict[tuple[int, ...], Sequence[Any]] = {}
    for key in dict.fromkeys(key for output in outputs for key in output.logs):
        hook, name, _ = key
        logged: list[Logged] = [output.logs[key] for output in outputs if key in output.logs]
        last = logged[-1]
        sizes = [size for own in logged if (size := own.arguments.get("batch_size")) is not None]
        arguments = {**last.arguments, "batch_size": sum(sizes)} if sizes else last.arguments
        is_of_step = last.metric is None or last.arguments.get("on_step") is not False
        of_step = [own for own in logged if own.value is not None and is_of_step]
        metric = last.metric if last.call is None else last.call.metric
        if metric is not None and len(outputs) > 1 and not _can_merge(metric) and (of_step or isinstance(metric, _COUNTS_UPDATES)):
            warn(_CANNOT_MERGE.format(f"{hook}.{name}", type(metric).__name__))
        value = _joined(of_step, computed) if of_step else None
        if last.metric is not None and value is not None:
            last.metric._forward_cache = value  # type: ignore[assignment]  # its type is None there
        shown = value if last.metric is None else last.metric
        assert shown is not None
        yield Joined(hook, name, shown, arguments, f"{hook}.{name}")


def _joined(logged: Sequence[Logged], computed: dict[tuple[int, ...], Sequence[Any]]) -> Tensor:
    """The value of the step. ``computed`` caches the results of metrics for the batch, by their calls."""
    last, values = logged[-1], [own.value for own in logged if own.value is not None]
    if len(values) == 1:
        return values[0]
    calls = [own.call for own in logged if own.call is not None]
    if last.call is not None and len(calls) == len(logged) and _can_merge(last.call.metric):
        if (of_calls := tuple(map(id, calls))) not in computed:
            computed[of_calls] = _computed_for_batch(calls)
        leaf: Tensor = computed[of_calls][last.leaf]
        own: Tensor = last.call.leaves[last.leaf]
        if last.metric is not None:
            return leaf
        if leaf.shape == own.shape and values[-1].dim() == 0:
            return leaf.as_strided((), (), leaf.storage_offset() + last.offset)
    stacked = torch.stack([value.to(values[0].device) for value in values])
    reduce_fx = last.arguments.get("reduce_fx", "mean")
    fold = _FOLDS.get(str(getattr(reduce_fx, "__name__", reduce_fx)).lower())
    if last.metric is None and fold is not None:
        return fold(stacked)
    return loss_of_parts(stacked, [own.weighed for own in logged if own.weighed is not None])


@torch.no_grad()
def _computed_for_batch(calls: Sequence[Call]) -> Sequence[Any]:
    """The metric's result for all of these calls, on this rank. The metric does not change."""
    metric = copy(calls[-1].metric)
    vars(metric).update(calls[-1].state, _computed=None, _update_count=len(calls), _to_sync=False)
    for call in reversed(calls[:-1]):
        metric._reduce_states(dict(call.state))  # merge_state refuses metrics that do not say whether an update reads the state
    return tree_leaves(metric.compute())


def _can_merge(metric: Metric) -> bool:
    """Whether the state of a metric can be merged from parts."""
    states = {} if isinstance(metric, WrapperMetric) or metric.dist_sync_on_step else metric.metric_state
    return bool(states) and all(metric._reductions[name] in _MERGEABLE for name in states)
