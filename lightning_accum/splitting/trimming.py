"""Checks on the module itself whether its loss depends on padding, once for each kind of padding, before it is trimmed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
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
from lightning_accum.trial import Trial
from lightning_accum.verdict import CannotCheckError
from lightning_accum.weighing.known import Known
from lightning_accum.weighing.terms import ONCE, Mode


class NeedsTrimmingError(CannotCheckError):
    """The module cannot run rows that have more columns than the longest of them needs."""


Proof: TypeAlias = Callable[..., str | None]
"""Takes a few rows with all of their padding, and the same rows without some of it, as one batch or as several.

Returns None if the loss does not depend on padding, else the difference in words. Raises :class:`CannotCheckError` if neither can
be shown.
"""
_Known: TypeAlias = tuple[tuple[str, ...], frozenset[tuple[str, int]]]
"""The tensors that the lengths are read from, and the dimensions that have their columns, as (path, number).

Another dimension may have the same size by chance, such as twenty classes and texts of twenty tokens: this is checked again.
"""


class TrimmingCheck:
    """Which padding may be trimmed. A check without an answer is repeated, less and less often."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._answers: dict[_Known, bool] = {}
        self._seen: Counter[_Known] = Counter()  # the number of batches with such padding before there was an answer
        self._warn = warn

    def prove_again(self) -> None:
        """Check again where trimming was exact, since the loss may have changed."""
        self._answers = {known: may for known, may in self._answers.items() if not may}

    def trimmable(self, layout: Layout, lengths: dict[int, Lengths], proof: Proof) -> dict[int, Lengths]:
        """The lengths behind which the loss does not depend on padding."""
        sizes = {(path, at): size for path, tensor in layout.tensors.items() for at, size in enumerate(tensor.shape) if at}
        sizes.update(((path, at), size) for path, tensor in layout.shared_tensors.items() for at, size in enumerate(tensor.shape))
        kept = dict[int, Lengths]()
        for columns, own in lengths.items():
            known = (own.read_from, frozenset(at for at, size in sizes.items() if size == columns))
            if known not in self._answers:
                self._seen[known] += 1
                if self._seen[known].bit_count() == 1:
                    self._note(known, partial(_prove, own, [*lengths.values()], layout, proof))
            if self._answers.get(known, False):
                kept[columns] = own
        return kept

    def _note(self, known: _Known, prove: Callable[[], str | None]) -> None:
        where = "Padding on the right of rows is not trimmed"
        try:
            seen = prove()
        except CannotCheckError as error:
            if self._seen[known] == 1:
                self._warn(
                    f"{where} so far: whether the loss depends on it could not be checked ({error}). Later batches are tried."
                )
            return
        self._answers[known] = seen is None
        self._seen.pop(known)
        if seen is not None:
            self._warn(
                f"{where}: the loss depends on it ({seen}). GradientAccumulation(trim_padding=False) turns this warning off."
            )


def _prove(own: Lengths, lengths: Sequence[Lengths], layout: Layout, proof: Proof) -> str | None:
    rows = sorted(range(layout.size), key=own.of_rows.__getitem__)[:2]
    if not (columns := kept_columns(rows, [own])):
        rows = rows[:1]  # the second has no padding: the proof would be of the same batch twice
        columns = kept_columns(rows, [own])
    try:
        return proof(layout.take(rows), layout.take(rows, columns))
    except NeedsTrimmingError:
        if any(max(each.of_rows) < each.columns for each in lengths):
            raise
    # a module may use the longest row as the number of columns. So first check all kinds of padding at once, each with its shortest
    # row and a row without padding, so that all columns are needed; then each kind alone
    rows = sorted({each.of_rows.index(number) for each in lengths for number in (max(each.of_rows), min(each.of_rows))})
    return proof(layout.take(rows), *(layout.take([row], kept_columns([row], lengths)) for row in rows))


def difference_by_padding(
    padded: Any, *trimmed: Any, trained: Trained, training_step: Callable[[Any], Any], weight: Any
) -> str | None:
    """Compare the weight and the gradient of the same rows with and without padding, like the check of rows and their parts.

    It is a :data:`Proof`. All changes are undone. It never waits for other ranks, which may have nothing to check.
    """
    if held := trained.snapshotter.iterators():
        raise CannotCheckError(f"the module holds an iterator, {held[0]}, whose items cannot be put back")
    weigh = weight if callable(weight) else None if weight != "equal" else lambda batch: 1.0
    trial = Trial(trained, partial(_run_alone, trained.module, training_step), GradientSync(), largest=float)
    return trial.in_widest_type(lambda wide: _compare(wide, weigh, padded, trimmed), partial(copy, padded))


def _compare(trial: Trial, weigh: Callable[[Any], Any] | None, padded: Any, trimmed: Sequence[Any]) -> str | None:
    measured = list[Measured]()
    try:
        with trial.held():
            for batch in (padded, *trimmed):
                measured.append(trial.measure(partial(copy, batch), Known(), ()))
    except CannotCheckError as error:
        if measured:
            return f"without it, {error}"
        raise NeedsTrimmingError(f"with it, {error}") from error
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
        if len(trimmed) == 1 and not math.isclose(with_it, without, rel_tol=trial.tolerance):
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
