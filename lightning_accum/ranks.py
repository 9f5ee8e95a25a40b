"""Communication between ranks besides gradients and weights: one small all-reduce a loader batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_accum.errors import UsageError
from lightning_accum.exact import exact_dtype

_left = 0  # joint actions so far, the same on all ranks
END: Any = object()  # returned instead of a batch at the end of a loader


class LoaderBatch(NamedTuple):
    """The loader batch of a rank, and the state of the loaders of all ranks."""

    batch: Any  # its own batch, its last batch again, or None
    is_last: bool  # no rank has a further batch
    is_shadow: bool  # it has run before, and has weight 0
    is_stopped: bool = False  # a rank ends training, so there is no batch


@dataclass(eq=False)
class Ranks:
    """The ranks of a training, and those among them whose gradients are averaged. ``rank`` counts all, like ``world_size``."""

    device: torch.device  # of this rank
    size: int = 1  # ranks whose gradients are averaged
    group: dist.ProcessGroup | None = None  # these ranks; None for all
    world_size: int = 1  # all ranks, tensor parallelism included
    rank: int = 0  # this one
    timeout: timedelta | None = None  # of their communication; None for torch's default
    same_rows: int = 1  # how many of these ranks have parts of the same rows

    def __post_init__(self) -> None:
        self._world: dist.ProcessGroup | None = None
        self._device = self.device
        if self.world_size > 1 and self.device.type != "cpu" and dist.is_gloo_available():
            # a group on the host, which needs the result: reading it from a device would wait for the device's queue
            self._world, self._device = dist.new_group(backend="gloo", timeout=self.timeout), torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the ranks whose gradients are averaged."""
        return self.size == 1 or dist.get_rank(self.group) == 0

    def close(self) -> None:
        """Destroy the group of these ranks, at the end of a fit."""
        if self._world is not None and dist.is_initialized():
            dist.destroy_process_group(self._world)

    def sum(self, number: float) -> float:
        """The sum over the ranks whose gradients are averaged. Called on all ranks."""
        if self.world_size == 1:
            return number
        value = torch.tensor([number], dtype=exact_dtype(self._device), device=self._device)
        dist.all_reduce(value, group=self._world)
        return float(value) * self.size / self.world_size  # tensor-parallel ranks have the same numbers

    def largest(self, *numbers: float) -> list[float]:
        """The maximum of each number over the ranks; inf is allowed. Called on all ranks."""
        if self.world_size == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=exact_dtype(self._device), device=self._device)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._world)
        return values.tolist()

    def broadcast(self, value: Any, source: int) -> Any:
        """The value of rank ``source``. Called on all ranks."""
        values = [value if self.rank == source else None]
        dist.broadcast_object_list(values, source, group=self._world, device=self._device)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks. Called on all of them."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self._world)
        return values

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Average dense gradients over the ranks, in place. Called on all ranks, with the same shapes and types."""
        for kind in dict.fromkeys((own.device, own.dtype) for own in gradients):
            alike = [own for own in gradients if (own.device, own.dtype) == kind]
            flat = torch.cat([own.reshape(-1) for own in alike]).div_(self.size)  # first, since a sum of float16 may overflow
            dist.all_reduce(flat, group=self.group)
            for own, mean in zip(alike, torch.split(flat, [own.numel() for own in alike]), strict=True):
                own.copy_(mean.view_as(own))


def of_all_ranks(
    loader: Iterable[Any], longest: int | None, ranks: Ranks, is_to_end: Callable[[], bool] = bool, may_end_early: bool = False
) -> Iterator[LoaderBatch]:
    """The batches of a loader, as many on every rank as the longest loader has. Used on all ranks.

    A rank without a batch gets its last one again, as a shadow batch, or the batch of another rank if it never had one. If lengths
    are known (``longest`` is the number of batches of the rank that has the most), no batch is drawn before it is needed, so that
    the state of the loader in a checkpoint matches the batches that were yielded, and the ranks speak to each other until each has
    had a batch, or always if all ``may_end_early``. Otherwise one batch is drawn ahead, and ranks exchange whether they have a
    batch, and whether one ``is_to_end``.
    """
    batches = chain.from_iterable((loader,))  # calls iter(loader) with the first batch
    last, drawn, may_lack = None, deque[Any](), True
    for number in count(1):
        while len(drawn) < (2 if longest is None else 1):
            drawn.append(draw(batches, kept([*drawn])))
        batch = drawn.popleft()
        is_there, own = batch is not END, None if batch is END else batch
        if longest is None or (may_lack and number <= longest):
            lacks_batch = own is None and last is None
            has_more = drawn[0] is not END if longest is None else number < longest
            source = 0 if own is None else ranks.rank + 1
            of_any = ranks.largest(is_there, has_more, is_to_end(), lacks_batch, source)
            is_there, has_more, is_stopped, is_lacked = map(bool, of_any[:4])
            if is_stopped:
                yield LoaderBatch(None, True, False, is_stopped)
            if is_lacked and of_any[4]:
                shared = ranks.broadcast(own, int(of_any[4]) - 1)
                last = shared if lacks_batch else last
            may_lack = may_end_early or (is_lacked and not of_any[4])
        elif number <= longest:
            is_there, has_more = is_there or ranks.world_size > 1, number < longest
        elif ranks.largest(is_there)[0]:
            raise UsageError(
                f"The loader has yielded more than the {longest} batches of its length, after which a window ended. Correct "
                "its __len__, or iterate over itertools.islice(loader, n)."
            )
        if not is_there:
            return
        last = last if own is None else own
        is_shadow = ranks.world_size > 1 and own is None and last is not None
        yield LoaderBatch(last if is_shadow else own, not has_more, is_shadow)


class LoaderBatches:
    """The batches of :func:`of_all_ranks`, of which some may be drawn ahead."""

    def __init__(self, batches: Iterator[LoaderBatch]) -> None:
        self._batches = batches
        self._last = LoaderBatch(None, is_last=False, is_shadow=False)
        self.drawn: deque[LoaderBatch] = deque()  # the batches after the last one yielded

    def __iter__(self) -> Iterator[LoaderBatch]:
        return self

    def __next__(self) -> LoaderBatch:
        self._last = self.drawn.popleft() if self.drawn else next(self._batches)
        return self._last

    def draw_ahead(self, number: float) -> Iterator[tuple[Any, bool]]:
        """Draw up to ``number`` batches after the last one yielded. Yields each with whether it is a shadow batch."""
        yield from [(one.batch, one.is_shadow) for one in self.drawn]
        last, before = (self.drawn or [self._last])[-1], kept([self._last, *self.drawn])
        while len(self.drawn) < number and not last.is_last:
            last = draw(self._batches, before)
            if last is END:
                return
            self.drawn.append(last)
            before += kept(last)
            yield last.batch, last.is_shadow


def kept(batches: list[Any]) -> list[tuple[Tensor, int, Tensor]]:
    """Each tensor, its version, and its values: a copy for a view, which shares its version counter."""
    leaves = [leaf for leaf in (tree_leaves(batches) if batches else ()) if isinstance(leaf, Tensor) and not leaf.is_inference()]
    return [(leaf, leaf._version, leaf if leaf._base is None else leaf.detach().clone()) for leaf in leaves]


def draw(batches: Iterator[Any], before: list[tuple[Tensor, int, Tensor]]) -> Any:
    """The next batch, while those ``before`` are still to run; or an error if drawing it has changed one of them."""
    following = next(batches, END)
    if any(leaf._version != version and (values is leaf or not torch.equal(leaf, values)) for leaf, version, values in before):
        raise UsageError(
            "The loader has written its next batch into the tensors of an earlier batch that has not run yet (batches are drawn "
            "ahead if the loader has no length, if terms are counted, or if the first ones have fewer than 8 rows). Yield new "
            "tensors for each batch."
        )
    return following


def have_all_left(has_failed: bool, patience: float) -> bool:
    """Leave a joint action of all ranks. False if this rank has failed, and another still waits after ``patience`` seconds."""
    global _left
    _left += 1
    with suppress(Exception):
        store, end = _store(), time.monotonic() + patience
        number = store.add(f"lightning_accum/left/{_left}", 1)
        while has_failed and number < dist.get_world_size():
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
            number = store.add(f"lightning_accum/left/{_left}", 0)
        if number == dist.get_world_size():  # so no rank reads the key before
            store.delete_key(f"lightning_accum/left/{_left - 1}")
    return True


def _store() -> Any:
    # private, but the public ProcessGroup.get_group_store of torch 2.13 is not in 2.6; the same in both
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
