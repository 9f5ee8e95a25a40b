"""Checks on the module itself whether its loss depends on padding, once for each kind of padding, before it is trimmed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accum.prove import ALL, Look, Measured, aliases, fit_of, keys_of
from lightning_accum.randomness import with_tensors
from lightning_accum.splitting.lengths import Lengths, kept_columns
from lightning_accum.splitting.rows import Layout
from lightning_accum.step import Trained
from lightning_accum.sync.base import GradientSync
from lightning_accum.trial import Step, Trial
from lightning_accum.verdict import CannotCheckError, UnsuitableRowsError
from lightning_accum.weighing.known import Known
from lightning_accum.weighing.terms import ONCE, Mode

_Kind: TypeAlias = tuple[tuple[str, ...], frozenset[tuple[str, int]]]
"""The tensors that the lengths are read from, and the dimensions that have their columns, as (path, number).

Another dimension may have the same size by chance, such as twenty classes and texts of twenty tokens: this is checked again.
"""
_NOT_TRIMMED = "Padding on the right of rows is not trimmed"


class Trimming:
    """Which padding may be trimmed. A check without an answer is repeated, less and less often.

    It never waits for other ranks, which may have nothing to check.
    """

    def __init__(self, trained: Trained, weight: Any, warn: Callable[[str], None]) -> None:
        self._trained, self._warn = trained, warn
        self._weigh = weight if callable(weight) else None if weight != "equal" else lambda batch: 1.0
        self._answers: dict[_Kind, bool] = {}
        self._seen: Counter[_Kind] = Counter()  # the number of batches with such padding before there was an answer

    def prove_again(self) -> None:
        """Check again where trimming was exact, since the loss may have changed."""
        self._answers = {kind: may for kind, may in self._answers.items() if not may}

    def trimmable(self, layout: Layout, lengths: Mapping[int, Lengths], step: Step) -> dict[int, Lengths]:
        """The lengths behind which the loss of ``step`` does not depend on padding."""
        sizes = {(path, at): size for path, tensor in layout.tensors.items() for at, size in enumerate(tensor.shape) if at}
        sizes |= {(path, at): size for path, tensor in layout.shared_tensors.items() for at, size in enumerate(tensor.shape)}
        kept = dict[int, Lengths]()
        for columns, own in lengths.items():
            kind = (own.read_from, frozenset(place for place, size in sizes.items() if size == columns))
            if kind not in self._answers:
                self._seen[kind] += 1
                if self._seen[kind].bit_count() == 1:
                    self._check(kind, _in_parts(own, [*lengths.values()], layout), step)
            if self._answers.get(kind, False):
                kept[columns] = own
        return kept

    def _check(self, kind: _Kind, tries: Iterator[Sequence[Any]], step: Step) -> None:
        """Compare rows with all of their padding with the same rows without, and note the first answer."""
        reason: CannotCheckError | None = None
        for batches in tries:
            try:
                seen = self._difference(batches, step)
            except CannotCheckError as error:
                reason = error
                if isinstance(error, UnsuitableRowsError):
                    continue
                break
            self._answers[kind] = seen is None
            if seen is not None:
                turned_off = "GradientAccumulation(trim_padding=False) turns this warning off."
                self._warn(f"{_NOT_TRIMMED}: the loss depends on it ({seen}). {turned_off}")
            return
        if self._seen[kind] == 1:
            found = f"whether the loss depends on it could not be checked ({reason})"
            self._warn(f"{_NOT_TRIMMED} so far: {found}. Later batches are tried.")

    def _difference(self, batches: Sequence[Any], step: Step) -> str | None:
        """The difference of weight or gradient between the first batch and the others, its parts, in words; None without one."""
        if held := self._trained.snapshotter.iterators():
            raise CannotCheckError(f"the module holds an iterator, {held[0]}, whose items cannot be put back")
        trial = Trial(self._trained, partial(_run_alone, self._trained.module, step), GradientSync(), largest=float)
        return trial.in_widest_type(lambda wide: _compare(wide, self._weigh, batches), partial(copy, batches[0]))


def _in_parts(own: Lengths, lengths: Sequence[Lengths], layout: Layout) -> Iterator[Sequence[Any]]:
    """Some rows with all of their padding, and the same rows without some of it, as one batch or as several."""
    shortest = [row for row in sorted(range(layout.size), key=own.of_rows.__getitem__)[:2] if own.of_rows[row] < own.columns]
    yield layout.take(shortest), layout.take(shortest, kept_columns(shortest, [own]))
    if all(max(each.of_rows) == each.columns for each in lengths):
        # a module may use the longest row as the number of columns: all kinds of padding at once, with rows that need all columns
        rows = sorted({each.of_rows.index(number) for each in lengths for number in (max(each.of_rows), min(each.of_rows))})
        yield layout.take(rows), *(layout.take([row], kept_columns([row], lengths)) for row in rows)


def _compare(trial: Trial, weigh: Callable[[Any], Any] | None, batches: Sequence[Any]) -> str | None:
    measured = list[Measured]()
    try:
        with trial.held():
            for batch in batches:
                measured.append(trial.measure(partial(copy, batch), Known(), ()))
    except CannotCheckError as error:
        if measured:
            return f"without it, {error}"
        raise UnsuitableRowsError(f"with it, {error}") from error
    if not all(math.isfinite(one.loss) for one in measured):
        raise CannotCheckError("its loss is not finite")
    names = aliases(measured)
    for one in measured:
        one.rename(names)
    look = Look(measured[0], measured[1:])
    modes: dict[int, Mode] = {ALL: weigh} if weigh is not None else {}
    if weigh is None:
        modes = {key: term.default_mode if term.words else ONCE for key, term in keys_of([look]).items()}
    fits = [fit_of([look], key, mode, trial.mode.eps) for key, mode in modes.items()]
    if any(fit.mode is None for fit in fits):
        worst = max(fits, key=lambda fit: fit.deviation.size).deviation
        seen = f"{worst.seen} differs by {worst.size:.2g} of its size"
        with_it, without = measured[0].loss, measured[-1].loss
        if len(batches) == 2 and not math.isclose(with_it, without, rel_tol=trial.tolerance):
            seen = f"its loss is {with_it:.9g} with it, {without:.9g} without"
        if trial.mode.eps >= torch.finfo(torch.float16).eps:
            raise CannotCheckError(f"{seen}, which may be rounding")
        return seen
    if not any(fit.deviation.has_evidence for fit in fits):
        raise CannotCheckError("these rows have no gradient")
    return None


def _run_alone(module: nn.Module, training_step: Callable[[Any], Any], batch: Any) -> Any:
    """Run a step with submodules in evaluation mode: dropout would draw numbers that depend on the shape."""
    for child in module.children():
        child.eval()
    with _Alone():  # type: ignore[no-untyped-call]
        return training_step(batch)


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """Raises an error instead of waiting for other ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("its forward waits for other ranks, which may have no padding to check")
        return func(*with_tensors(func, args), **(kwargs or {}))
