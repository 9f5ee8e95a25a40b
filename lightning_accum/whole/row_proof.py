"""The proof of ``row_wise=``: the user's own step on a few rows, whole and with the submodules in micro-batches.

All gradients of both steps are compared, as in the check. So it detects rows that depend on each other, a hook that normalises
gradients, and an attribute that holds one micro-batch only. Parameters are also perturbed, since a last layer of zeros hides the
layers before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_accum.errors import RowWiseError
from lightning_accum.exact import rounding_of_gradients
from lightning_accum.prove import ALL, Deviation, Look, Measured, fit_of
from lightning_accum.randomness import RandomState
from lightning_accum.splitting.few_rows import FewRows
from lightning_accum.step import Trained
from lightning_accum.sync.base import GradientSync
from lightning_accum.trial import Trial
from lightning_accum.verdict import MOST_ROWS, CannotCheckError, UnsuitableRowsError
from lightning_accum.weighing.counts import count_samples
from lightning_accum.weighing.terms import ONCE
from lightning_accum.whole.forms import HINT
from lightning_accum.whole.row_wise import NoiseOfCall, RowWise

_PERTURBATION = 0.1  # relative perturbation of parameters


def prove_row_wise(
    trained: Trained,
    row_wise: RowWise,
    step: Callable[[Any], Any],
    batches: Sequence[Any],
    samples: Any,
    warn: Callable[[str], None],
    position: int = 0,
) -> None:
    """Raise, on all ranks, if the step in micro-batches differs. Called on all ranks at each loader batch, until it was proven.

    ``batches`` is the loader batch, or empty if this rank has none; ``samples`` are the loader's batch sizes, if known. ``step``
    runs the module on a batch without logs. ``position`` counts the loader batches of the window so far.
    """
    if trained.sync.is_waited_for_in_forward and position:
        return  # the engine holds its own gradients until the window ends
    row_wise.begin_proof()
    engine = trained.sync if trained.sync.is_waited_for_in_forward else GradientSync()
    trial = Trial(trained, step, engine, lambda value: trained.ranks.largest(value)[0])
    try:
        take, number = trial.together(lambda: _rows_of(trained, batches, samples))
        number = -int(trial.largest(-number))
        if number < 2:
            raise UnsuitableRowsError("the first batches have 1 row")
        kinds = _Proof(row_wise, take, number).run(trial)
    except CannotCheckError as error:
        if not (trial.largest(float(isinstance(error, UnsuitableRowsError))) and row_wise.proofs_left):
            row_wise.end_proofs(set(), None)
            warn(unproven(row_wise, str(error)))
    else:
        kind = "has a call that differs from the calls in the first batch (in its mode or its arguments)"
        row_wise.end_proofs(kinds, lambda name: warn(unproven(row_wise, f"{name!r} {kind}")))


def unproven(row_wise: RowWise, reason: str) -> str:
    """The warning that it could not be checked."""
    how = "Compare with the whole batch by verify(module, data), or pass check=False if you know that they agree."
    return f"row_wise={row_wise.names} could not be checked: {reason}. {how}"


def _rows_of(trained: Trained, batches: Sequence[Any], samples: Any) -> tuple[Callable[[Any], Any], int]:
    """A function from rows to a batch, and the number of rows; the whole batch if rows cannot be identified."""
    if held := trained.snapshotter.iterators():
        raise CannotCheckError(f"the module holds an iterator, {held[0]}, whose items cannot be put back")
    if not batches:
        return lambda rows: None, 0
    try:
        few = FewRows(batches[:1], samples)
    except CannotCheckError:
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(batches[0])):
            raise
        return lambda rows: copy(batches[0]), count_samples(batches[0]) or 2
    return few.take, few.of_batch


@dataclass
class _Proof:
    """Compares the step on some rows with and without micro-batches. Ranks take every step together."""

    row_wise: RowWise
    take: Callable[[Any], Any]  # returns a batch of some rows
    number: int  # the number of rows, on the rank with the fewest
    kinds: set[Hashable] = field(default_factory=set)  # the kinds of calls

    def run(self, trial: Trial) -> set[Hashable]:
        """Compare with perturbed and original parameters, and raise if a gradient differs. Returns the kinds of calls."""
        has_evidence = False
        for context in (perturbed(self.row_wise.module), nullcontext()):
            with context:
                has_evidence |= trial.in_widest_type(self._look, partial(self.take, range(min(MOST_ROWS, self.number))))
        if not trial.largest(float(has_evidence)):
            raise UnsuitableRowsError("the first rows have no gradient")
        return self.kinds

    def _look(self, trial: Trial) -> bool:
        """Returns whether there was something to compare."""
        size = self.row_wise.size
        with trial.held():
            for number in [few for few in (7, 6, 5, 3, 2) if few <= self.number]:  # memory may run out
                try:
                    found = self._compare(trial, self.row_wise.names, number)
                except CannotCheckError:
                    if number == 2:
                        raise
                    continue
                if self._is_wrong(trial, found):
                    self._refuse(trial, found, number)
                break
            of_training = min(self.number, size) if isinstance(size, int) and self.row_wise.largest is None else 0
            if of_training > number:  # few rows may hide a dependence on the batch size
                with suppress(CannotCheckError):
                    large = self._compare(trial, self.row_wise.names, of_training, -(-of_training // 2))
                    if self._is_wrong(trial, large):
                        self._refuse(trial, large, of_training)
            return found.has_evidence

    def _compare(self, trial: Trial, names: Sequence[str], number: int, size: int | None = None) -> Deviation:
        """The difference between the step in micro-batches and the step on all rows."""
        draws = _draws_of_rows(trial)
        whole = self._measure(trial, names, None, number, draws)
        try:
            part = self._measure(trial, names, size or min(2, number - 1), number, draws)
        except CannotCheckError as error:
            return Deviation(math.inf, True, str(error))
        norm = math.sqrt(sum(float(gradient.nan_to_num().square().sum()) for gradient in whole.gradient(ALL).values()))
        apart = abs(whole.loss - part.loss) / max(abs(whole.loss), abs(part.loss), norm, 1e-300)
        of_loss = Deviation(apart if norm and math.isfinite(apart) else 0.0, True, "the loss")
        return max(self._deviation(trial, whole, part), of_loss, key=lambda found: found.size)

    def _measure(self, trial: Trial, names: Sequence[str], size: int | None, number: int, draws: NoiseOfCall) -> Measured:
        row_wise = replace(self.row_wise, size=size, names=names, draws=draws, proofs_left=0)
        with ExitStack() as stack:

            def batch() -> Any:
                """Return the rows after everything is restored, including the module's calls."""
                stack.enter_context(row_wise.step(number))
                return self.take(range(number))

            found = trial.measure(batch, None, range(number), number)
            trial.together(row_wise.end_backward)
        self.kinds |= row_wise.kinds
        return found

    def _deviation(self, trial: Trial, whole: Measured, part: Measured) -> Deviation:
        return fit_of([Look(whole, [part])], ALL, ONCE, trial.mode.eps).deviation

    def _is_wrong(self, trial: Trial, found: Deviation) -> bool:
        """Whether the deviation exceeds rounding on any rank."""
        return trial.largest(found.size / rounding_of_gradients(trial.mode.eps)) > 1

    def _refuse(self, trial: Trial, found: Deviation, number: int) -> None:
        """Raise the error, unless the step has a different gradient each time."""
        names = self.row_wise.names
        if trial.largest(float(trial.mode.is_unlike)):
            raise CannotCheckError("training_step draws random numbers that differ from micro-batch to micro-batch")
        one, other = (self._measure(trial, names, None, number, _draws_of_rows(trial)) for _ in range(2))
        if self._is_wrong(trial, self._deviation(trial, one, other)):
            raise CannotCheckError("training_step has a different gradient for the same rows each time")
        name = next((name for name in names if self._is_wrong(trial, self._compare(trial, [name], number))), names[0])
        kind = type(self.row_wise.module.get_submodule(name)).__name__
        seen = found.seen if found.size == math.inf else f"relative error of {found.seen}: {found.size:.2g}"
        raise RowWiseError(
            f"row_wise={name!r}: with it ({kind}) in micro-batches the step of some rows is not the step of all together ({seen})."
            f" Its outputs or gradients for a row depend on other rows; or the loss reads an attribute or a hook, which holds one"
            f" micro-batch only: have {name!r} return this value, with one entry a row. {HINT}"
        )


def _draws_of_rows(trial: Trial) -> NoiseOfCall:
    """Gives the rows of each call in micro-batches the random numbers of the whole call."""
    states: dict[int, RandomState] = {}

    def drawing(call: int, rows: Sequence[int], total: int) -> AbstractContextManager[None]:
        states.setdefault(call, RandomState(trial.device)).restore()
        return trial.mode.of_call(call, rows, total)

    return drawing


@contextmanager
def perturbed(module: nn.Module) -> Iterator[None]:
    """Inside, each parameter is perturbed, since a last layer of zeros gives no gradient to the layers before it."""
    kept = []
    try:
        with torch.no_grad():
            for index, parameter in enumerate(module.parameters()):
                values = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
                if values.is_floating_point() and values.dtype.itemsize > 1 and values.numel() and not values.is_meta:
                    kept.append((values, values.to("cpu", copy=True)))
                    size = values.float().square().mean().sqrt()
                    way = (torch.arange(values.numel(), device=values.device) + index).float().sin().reshape(values.shape)
                    values.add_((_PERTURBATION * torch.where(size > 0, size, 1.0) * way).to(values.dtype))
        yield
    finally:
        with torch.no_grad():
            for values, before in kept:
                values.copy_(before)
