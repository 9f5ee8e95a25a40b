"""Whether what a module learns depends on padding: tried out on the module itself, before any is trimmed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accum.dispatch import with_tensors
from lightning_accum.exact import exact_dtype
from lightning_accum.prove import ALL, Look, Measured, aliases, fit_of, keys_of
from lightning_accum.splitting.memory import free, is_out_of_memory
from lightning_accum.splitting.proofs import Inconclusive, Verdict
from lightning_accum.sync import GradientSync
from lightning_accum.trial import Trial
from lightning_accum.undo import Undo
from lightning_accum.verdict import CannotCheckError
from lightning_accum.weighing.modes import ONCE, Mode
from lightning_accum.weighing.weight import Weigher


def difference_by_padding(
    padded: Any,
    *trimmed: Any,
    module: nn.Module,
    snapshotter: Undo,
    training_step: Callable[[Any], Any],
    weight: Any,
) -> Verdict:
    """Compare the weight and the gradient of the same rows with and without padding, as the check compares rows and their parts.

    Nothing of it lasts, and nothing in it waits for other ranks, which may have nothing to try.

    Returns:
        None where all is the same but for rounding, else what was seen.
    """
    if held := snapshotter.iterators():
        return Inconclusive(f"the module holds an iterator, {held[0]}, and what is drawn from it cannot be put back")
    alone = _Alone(module, training_step)
    weigh = weight if callable(weight) else None if weight != "equal" else lambda batch: 1.0
    take_snapshot = partial(snapshotter.take, watches_parameters=False)
    trial = Trial(module, alone.run, take_snapshot, GradientSync(), largest=float)
    for dtype in dict.fromkeys((exact_dtype(trial.device), torch.float32)):
        with suppress(CannotCheckError):
            verdict = _compare(trial.widened(dtype), alone, weigh, padded, trimmed)
            if not isinstance(verdict, Inconclusive):
                return verdict
    return _compare(trial, alone, weigh, padded, trimmed)  # some modules run in their own precision only


def _compare(trial: Trial, alone: _Alone, weigh: Callable[[Any], Any] | None, padded: Any, trimmed: Sequence[Any]) -> Verdict:
    weigher, measured = Weigher("auto"), list[Measured]()
    try:
        with trial.held():
            for batch in (padded, *trimmed):
                measured.append(trial.measure(partial(copy, batch), weigher, None, 0))
    except CannotCheckError as error:
        if alone.ran_out_of_memory:
            free(trial.device)
            return Inconclusive("memory ran out")
        return f"without it, {error}" if measured else Inconclusive(f"with it, {error}", needs_trimming=True)
    if not all(math.isfinite(one.loss) for one in measured):
        return Inconclusive("its loss is not finite")
    names = aliases(measured)
    for one in measured:
        one.rename(names)
    look = Look(measured[0], measured[1:])
    modes: dict[int, Mode] = {ALL: weigh} if weigh is not None else {}
    if weigh is None:
        modes = {key: weigher.mode_of(term) if term.words else ONCE for key, term in keys_of([look]).items()}
    fits = [fit_of([look], key, mode, trial.eps) for key, mode in modes.items()]
    if any(fit.mode is None for fit in fits):
        worst = max(fits, key=lambda fit: fit.deviation.size).deviation
        seen = f"{worst.seen} differs by {worst.size:.2g} of its size"
        with_it, without = measured[0].loss, measured[-1].loss
        if len(trimmed) == 1 and not math.isclose(with_it, without, rel_tol=trial.tolerance):
            seen = f"its loss is {with_it:.9g} with it, {without:.9g} without"
        return Inconclusive(f"{seen}, which may be rounding") if trial.eps >= torch.finfo(torch.float16).eps else seen
    return None if any(fit.deviation.has_evidence for fit in fits) else Inconclusive("these rows have no gradient")


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """Runs a step with submodules in evaluation mode, where dropout draws no numbers, which would differ by shape.

    It stops what would wait for other ranks, and notes whether memory ran out.
    """

    def __init__(self, module: nn.Module, training_step: Callable[[Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._module, self._training_step = module, training_step
        self.ran_out_of_memory = False

    def run(self, batch: Any) -> Any:
        """The output of the step."""
        self.ran_out_of_memory = False
        for child in self._module.children():
            child.eval()
        try:
            with self:
                return self._training_step(batch)
        except Exception as error:
            self.ran_out_of_memory = is_out_of_memory(error)
            raise

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("it waits for other ranks, which may have no padding to try")
        return func(*with_tensors(func, args), **(kwargs or {}))
