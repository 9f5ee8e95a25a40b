"""Counted first: what the terms of a window's losses weigh, before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_accum.weighing.counted import TermValues
from lightning_accum.weighing.weight import checked

if TYPE_CHECKING:
    from lightning_accum.accumulation import Accumulation

Forward = Callable[[Any, int], "Tensor | None"]
"""Runs a micro-batch of a loader batch, which is so many after the one under way, and logs nothing."""


def count_loader_batch(accumulation: Accumulation, micro_batches: Iterable[Any], ahead: int, forward: Forward) -> None:
    """Run the micro-batches of a loader batch forward, without a backward, and count what the terms of their losses weigh.

    Random numbers are those of their real run, if everything is put back after the last of the window.
    """
    counted, weigher = accumulation.window.counted, accumulation.weigher
    assert counted is not None
    for micro_batch in micro_batches:
        values = TermValues()
        with values:
            loss = forward(_copy(micro_batch), ahead)
        if loss is None or not loss.requires_grad or loss.grad_fn is None:
            continue
        contribution = weigher(loss, micro_batch)
        terms = weigher.take_terms()
        counted.add(contribution.of_terms or {})
        counted.values.append(values.of(loss, terms))
        del loss


def count_batch(accumulation: Accumulation, batch: Any) -> None:
    """Count a loader batch by the weights that are listed."""
    counted, weights = accumulation.window.counted, accumulation.policy.weight
    assert counted is not None
    assert isinstance(weights, tuple)
    counted.add({place: checked(weight(batch), weight) for place, weight in enumerate(weights)})


def _copy(batch: Any) -> Any:
    """A step may write into its batch."""
    with suppress(Exception):
        return deepcopy(batch)
    return batch
