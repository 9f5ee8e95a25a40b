"""What the tests of faults that were found from outside share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from real_modules.table import Exact, Refused, Warned, happens
from support import Toy, classified, labelled, loader

from lightning_accum import GradientAccumulation
from lightning_accum.testing import EXACT, sgd


def open_until(issue: int, why: str, raises: type[BaseException] = AssertionError) -> pytest.MarkDecorator:
    """What is wrong today, and the issue that mends it."""
    return pytest.mark.xfail(strict=True, raises=raises, reason=f"issue {issue}: {why}")


def case(issue: int, why: str, *values: Any, raises: type[BaseException] = AssertionError) -> Any:
    """One case of a table that is open."""
    return pytest.param(*values, marks=open_until(issue, why, raises))


def exact_or_refused(
    module: Any,
    batches: Any,
    policy: Any = 2,
    *,
    optimizer: Any = sgd,
    limit: float = EXACT,
    may_warn: bool = False,
    **arguments: Any,
) -> None:
    """Assert that windows take the steps of their full batches, or that the package objects before the first step.

    Args:
        module, batches, policy, optimizer: as in ``compare_window_with_batch``.
        limit: of the relative error of what training changed.
        may_warn: whether a warning of the package is enough, where no deviation can be measured before the first step.
        arguments: of ``compare_window_with_batch``.
    """
    found = happens(module, batches, policy, [optimizer], limit, compares_losses=False, **arguments)
    is_exact = isinstance(found, Warned) and (may_warn or found.deviation <= limit)
    assert is_exact or isinstance(found, Exact | Refused), found


def split_exact_or_refused(
    module: Any, batches: Sequence[Any], size: int = 2, row_wise: str | None = None, **arguments: Any
) -> None:
    """:func:`exact_or_refused` for loader batches in micro-batches of ``size`` rows."""
    arguments |= {"windows": batches, "collate": lambda batch: batch}
    exact_or_refused(module, loader(batches), GradientAccumulation(micro_batch=size, row_wise=row_wise), **arguments)


def rows_of(*sizes: int, ignored: float = 0.0) -> list[list[Any]]:
    """The rows of loader batches of so many."""
    return [list(zip(*batch, strict=True)) for batch in labelled(*sizes, ignored=ignored)]


def scheduled(make: Callable[[Toy, torch.optim.Optimizer], Any], **how: Any) -> Toy:
    """A module with the scheduler that ``make`` gives its optimizer."""
    module = Toy(classified)
    optimizer = module.configure_optimizers()
    module.configure_optimizers = lambda: ([optimizer], [{"scheduler": make(module, optimizer), "interval": "step", **how}])
    return module
