"""Rows looked at in types of numbers in which rounding is no difference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from lightning_accum.exact import exact_dtype
from lightning_accum.weighing.trial import Trial
from lightning_accum.weighing.verdict import CannotCheckError, Verdict

_T = TypeVar("_T")


def look_in_types(trial: Trial, look: Callable[[Trial], tuple[Verdict, _T]]) -> tuple[Verdict, _T]:
    """Look at rows in single precision where a module has less, and at what does not add up in double precision too.

    In half precision a loss may be off by several percent, which is what some losses do not add up by. And in single precision too
    where most of it cancels, as of a model whose error is the rounding of its outputs. Called on all ranks.

    Args:
        trial: runs the module in its own precision.
        look: says what was found by a trial, and more of it.
    """
    found: tuple[Verdict, _T] | None = None
    with suppress(CannotCheckError):
        found = look(trial.widened(torch.float32))
    if found is None or trial.largest(float(found[0].deviation is None)):
        found = look(trial)
    if trial.largest(float(not found[0].adds_up)):
        with suppress(CannotCheckError):
            verdict, more = look(trial.widened(exact_dtype(trial.device)))
            if trial.largest(float(verdict.deviation is None or not verdict.adds_up)) == 0:
                return verdict, more
    return found
