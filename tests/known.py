"""What the tests of faults that were found from outside share."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from real_modules.table import Exact, Refused, Warned, happens
from support import Toy, classified, error_of_updates, fit, joined, labelled, loader
from support import refused as refused
from support import said as said

from lightning_accum import GradientAccumulation
from lightning_accum.testing import EXACT, sgd


def open_until(issue: int, why: str, raises: type[BaseException] = AssertionError) -> pytest.MarkDecorator:
    """What is wrong today, and the issue that mends it."""
    return pytest.mark.xfail(strict=True, raises=raises, reason=f"issue {issue}: {why}")


def case(issue: int, why: str, *values: Any, raises: type[BaseException] = AssertionError) -> Any:
    """One case of a table that is open."""
    return pytest.param(*values, marks=open_until(issue, why, raises))


def outcome(module: Any, batches: Any, policy: Any = 2, *, optimizer: Any = sgd, limit: float = EXACT, **arguments: Any) -> str:
    """What windows come to: "exact", as their full batches; "refused" or "warned" before the first step; or what else happened.

    Args:
        module, batches, policy, optimizer: as in ``compare_window_with_batch``.
        limit: of the relative error of what training changed.
        arguments: of ``compare_window_with_batch``.
    """
    found = happens(module, batches, policy, [optimizer], limit, compares_losses=False, **arguments)
    if isinstance(found, Warned):
        return "exact" if found.deviation <= limit else "warned"
    return "refused" if isinstance(found, Refused) else "exact" if isinstance(found, Exact) else str(found)


def outcome_split(module: Any, batches: Sequence[Any], size: int = 2, row_wise: str | None = None, **arguments: Any) -> str:
    """:func:`outcome` of loader batches in micro-batches of ``size`` rows."""
    arguments |= {"windows": batches, "collate": lambda batch: batch}
    return outcome(module, loader(batches), GradientAccumulation(micro_batch=size, row_wise=row_wise), **arguments)


def rows_of(*sizes: int, ignored: float = 0.0) -> list[list[Any]]:  # the rows of loader batches of so many
    return [list(zip(*batch, strict=True)) for batch in labelled(*sizes, ignored=ignored)]


def off(loss: Any, batches: list[Any], window: int = 2, kind: type[Toy] = Toy, optimizer: str = "sgd", **policy: Any) -> float:
    """How far windows of these loader batches end from their full batches, in what training changes."""
    found, expected, start = (kind(loss, optimizer) for _ in range(3))
    fit(found, batches, GradientAccumulation(window, **policy))
    fit(expected, [joined(batches[at : at + window]) for at in range(0, len(batches), window)], GradientAccumulation(1))
    return error_of_updates(found, expected, start)


def scheduled(make: Callable[[Toy, torch.optim.Optimizer], Any], **how: Any) -> Toy:
    """A module with the scheduler that ``make`` gives its optimizer."""
    module = Toy(classified)
    optimizer = module.configure_optimizers()
    module.configure_optimizers = lambda: ([optimizer], [{"scheduler": make(module, optimizer), "interval": "step", **how}])
    return module
