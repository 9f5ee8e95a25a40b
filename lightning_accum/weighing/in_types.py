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
    """Look at rows in double precision if the module runs in it, else in single precision, else in its own type.

    Rounding hides breaks: 1 % of the gradient in single precision, several in half precision. Called on all ranks.

    Args:
        trial: runs the module in its own precision.
        look: says what was found by a trial, and more of it.
    """
    for dtype in dict.fromkeys((exact_dtype(trial.device), torch.float32)):
        found: tuple[Verdict, _T] | None = None
        with suppress(CannotCheckError):
            found = look(trial.widened(dtype))
        if trial.largest(float(found is None or found[0].deviation is None)) == 0:
            assert found is not None
            return found
    return look(trial)
