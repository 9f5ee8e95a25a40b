"""Runs a module on a few rows and restores it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from lightning_accum.errors import AccumulationError, RowWiseError, UsageError
from lightning_accum.exact import exact_dtype, rounding, rounding_of_gradients
from lightning_accum.prove import ALL, Measured, apart, sample
from lightning_accum.randomness import RandomState, dropout_switched_off, seed_everything
from lightning_accum.ranks import have_all_left
from lightning_accum.step import Trained
from lightning_accum.sync.base import GradientSync, gradients_set_aside
from lightning_accum.trial_mode import TrialMode, is_narrow, widened, widened_batch
from lightning_accum.undo import Snapshot
from lightning_accum.verdict import MOST_ROWS, CannotCheckError, UnsuitableRowsError
from lightning_accum.weighing.known import Known, Reading
from lightning_accum.weighing.safeguards import freeze_batch_norm, guard_against_zero
from lightning_accum.weighing.terms import Term, scale_terms

_T = TypeVar("_T")
Result: TypeAlias = "tuple[float, dict[int, Tensor]]"
"""A loss and its gradient."""
Step: TypeAlias = Callable[[Any], Any]
"""Runs a batch, and returns the output of ``training_step``."""

PATIENCE = 10.0  # seconds that a failed rank waits for the others to fail too, plus ten times its own time
_SAMPLED, _SAMPLED_OF_ALL = 2**14, 2**22
"""How many elements are compared in one gradient, spread over it, and about how many in all gradients together."""
_EPS, _EPS_OF_ROUNDED = torch.finfo(torch.float64).eps, 2.0**-30
"""Machine epsilon of double precision; and of a loss of values that were rounded to a narrower type, which may cancel."""
_MOST_BYTES = 2**32  # of a copy of the parameters in a wider type


@dataclass(eq=False)
class Trial:
    """Runs ``training_step`` on some rows, and restores everything.

    Dropout is off and BatchNorm in evaluation mode, so that other differences are found; random numbers belong to rows; nothing is
    compiled. Random state, buffers, attributes, metrics and parameters are restored. Ranks take every step together, since they may
    wait for each other in it. ``largest`` returns the largest of a number of each rank; ``dtype`` is the type to try the module in,
    if not its own.
    """

    trained: Trained
    training_step: Step
    backward: GradientSync
    largest: Callable[[float], float]
    dtype: torch.dtype | None = None
    _snapshot: Snapshot = field(init=False)  # the state in which each step begins

    def __post_init__(self) -> None:
        self.module = self.trained.module
        self._take_snapshot = partial(self.trained.snapshotter.take, watches_parameters=False)
        self._trained: list[nn.Parameter] = []
        self._end: RandomState | None = None  # after a step on the first rows
        self.draws_others = False  # some rows drew random numbers that do not belong to rows
        # gives rows their random numbers, and detects whether ranks wait for each other
        self.mode = TrialMode((), _EPS if self.dtype is None else _EPS_OF_ROUNDED)

    @property
    def device(self) -> torch.device:
        """Of the module."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    def widened(self, dtype: torch.dtype) -> Trial:
        """A trial of the module in a wider type. The values stay rounded to the module's own type.

        Raises CannotCheckError on all ranks if its own type is as wide, or the module is too large or cannot run in the wider type.
        """
        is_narrower = any(is_narrow(p, dtype) for p in self.module.parameters() if p.requires_grad)
        is_large = sum(parameter.numel() for parameter in self.module.parameters()) * dtype.itemsize > _MOST_BYTES
        if self.backward.is_waited_for_in_forward or not is_narrower or is_large:
            raise CannotCheckError(f"the module does not run in {dtype}")
        return replace(self, dtype=dtype)

    def in_widest_type(
        self, look: Callable[[Trial], _T], rows: Callable[[], Any] | None, is_answer: Callable[[_T], bool] = lambda _: True
    ) -> _T:
        """The result of ``look`` in double precision if the module runs in it, else in single precision, else in its own type.

        Rounding hides differences. The result in the module's own type always counts as an answer. It is the only one if ``rows``
        are given that have another loss or gradient in the wider type: code that asks for the type, or that keeps parameters in a
        list or an optimizer of its own, does not see the wider copies.
        """
        own: Result | None = None
        for dtype in dict.fromkeys((exact_dtype(self.device), torch.float32)):
            with suppress(CannotCheckError):
                wide = self.widened(dtype)
                if rows is not None:
                    own = self._result_alone(rows) if own is None else own
                    if self.largest(difference(own, wide._result_alone(rows))) > rounding_of_gradients(self.mode.eps):
                        continue
                if is_answer(found := look(wide)):
                    return found
        return look(self)

    def _result_alone(self, rows: Callable[[], Any]) -> Result:
        with self.held():
            self.restore()
            return self.result(rows)

    @property
    def tolerance(self) -> float:
        """The relative error that rounding in that type explains."""
        return rounding(self.mode.eps)

    def loss_of(self, batch: Callable[[], Any], seed: int = 0) -> float:
        """The loss of a batch, with other random numbers for each seed. Called on all ranks."""

        def run() -> float:
            self.restore()
            seed_everything(seed)
            return float(self.step(batch()).detach())

        return self.together(run)

    def differ(self, one: Callable[[], Any], other: Callable[[], Any]) -> bool:
        """Whether two batches have different losses on this rank, each run as if it were the first. Called on all ranks."""
        with self.held():
            first, second = self.loss_of(one), self.loss_of(other)
        return abs(first - second) > self.tolerance * max(abs(first), abs(second))

    def refuse_random(self, batch: Callable[[], Any]) -> None:
        """Raise, on all ranks, if a loss depends on random numbers that do not belong to rows, which may be the same by chance."""
        if self.largest(float(self.draws_others)):
            losses = [self.loss_of(batch, seed) for seed in range(4)]
            if self.largest(max(losses) - min(losses)) > self.tolerance * self.largest(max(map(abs, losses))):
                raise CannotCheckError("training_step draws different random numbers for each batch")

    def result(self, batch: Callable[[], Any], step: Step | None = None) -> Result:
        """The loss and gradient of a batch in the present state, by this step or by another. Called on all ranks."""

        def run() -> Result:
            loss = self.step(batch(), step)
            return float(loss.detach()), self.gradients(loss, 1.0)

        return self.together(run)

    def changed_attributes(self) -> list[str]:
        """The paths of attributes that the last step changed."""
        return self._snapshot.changed_attributes()

    def leave(self, rows: Sequence[int] | None = None, total: int = 0, has_parameters: bool = False) -> None:
        """Have the next step draw the same numbers, keeping what the last step left: buffers, attributes, perhaps parameters."""
        self._snapshot.random_state.restore()
        (self.mode.restart if has_parameters else self.mode.restore)(rows, total)

    def restore(self, rows: Sequence[int] | None = None, total: int = 0) -> None:
        """Restore the state of the first step for the next one; for ``rows`` see :meth:`NoiseOfRows.restart`."""
        self._snapshot.restore()
        if self.mode.seed:
            seed_everything(self.mode.seed)
        self.mode.restore(rows, total)

    def draw_anew(self, seed: int) -> None:
        """Have the next steps draw other numbers, also those that all rows share; with 0 those of training."""
        self.mode.seed, self._end = seed, None

    def keep_state(self, batch: Callable[[], Any]) -> None:
        """Have every step begin in the state that a step on this batch leaves. Called on all ranks."""
        loss = self.together(lambda: self.step(batch()))
        if self.backward.is_waited_for_in_forward:
            self.together(lambda: self.gradients(loss, 0.0))
        self._snapshot, self._end = self._take_snapshot(), None

    def step(self, batch: Any, instead: Step | None = None) -> Tensor:
        """The loss of a batch, by this step or by another ``instead``."""
        batch = batch if self.dtype is None else widened_batch(batch, self.dtype)
        with users_code(), self.mode:
            output = (instead or self.training_step)(batch)
        loss: Tensor | None = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise UnsuitableRowsError(f"training_step returns {loss} for some of the first rows")
        return loss

    # --- one run ----------------------------------------------------------------------------------------------------

    def measure(
        self, batch: Callable[[], Any], known: Known | None, rows: Sequence[int], total: int = 0, is_part: bool = False
    ) -> Measured:
        """Run the step on some rows, once, and measure each term of its loss; without ``known``, its gradient alone. On all ranks.

        ``rows`` are their indices among the ``total`` rows of the whole, to which random numbers belong; 0 if all draw the same. A
        part may have no loss; its backward starts with a factor, by which the gradients are divided: this detects hooks that clip.
        """
        scale = float(MOST_ROWS) if is_part else 1.0
        loss, reading = self.together(lambda: self._run(batch, known, rows, total, is_part))
        terms, function = reading.terms, None if reading.function is None else reading.function.function
        of_terms, value = {term.key: _on_host(term) for term in terms}, float(loss.detach())
        measured = Measured(value, of_terms, {}, function, batch, rows, total)
        if known is None:
            measured.gradients = {ALL: self.together(lambda: self.gradients(loss, 1.0))}
            return measured
        if self.backward.is_waited_for_in_forward:  # gradients are reduced over the ranks, each with its own factor
            self.together(lambda: self.gradients(loss, 0.0))
            names = [{term.key} for term in terms]

            def rerun(key: int, factor: float) -> dict[int, Tensor]:
                loss, reading = self.together(lambda: self._run(batch, known, rows, total))
                scale_terms(reading.terms, [float(key in (ALL, *own)) for own in names[: len(reading.terms)]])
                if reading.function is not None:
                    reading.function.leave_out(loss)
                is_there = key == ALL or any(key in own for own in names)
                return self.together(lambda: self.gradients(loss, factor * scale if is_there else 0.0, scale))

            measured.rerun, measured.names = rerun, names
            return measured
        if reading.function is not None:
            reading.function.leave_out(loss)
        measured.gradients = self.together(lambda: self._gradients_of_terms(loss, terms, scale))
        return measured

    def _gradients_of_terms(self, loss: Tensor, terms: Sequence[Term], scale: float) -> dict[int, dict[int, Tensor]]:
        factors: list[Any] = [1.0] * len(terms)
        scale_terms(terms if len(terms) > 1 else (), factors)
        found: dict[int, dict[int, Tensor]] = {}
        for place, term in enumerate(terms):
            factors[:] = [float(at == place) for at in range(len(terms))]
            found[term.key] = self.gradients(loss, scale, scale, keeps_graph=place < len(terms) - 1)
        return found

    def _run(
        self, batch: Callable[[], Any], known: Known | None, rows: Sequence[int], total: int, is_part: bool = False
    ) -> tuple[Tensor, Reading]:
        self.restore(rows if total else None, total)
        needs_loss = not is_part or self.backward.is_waited_for_in_forward
        try:
            loss = self.step(batch())
        except Exception as error:
            self.backward.forget_forward()
            if needs_loss or not isinstance(error, UnsuitableRowsError):
                raise
            return torch.zeros(()), Reading([])
        if self._end is None:
            self._end = RandomState(self.device)
            self.mode.draws_shared |= self._snapshot.random_state.has_drawn()
        self.draws_others |= self._end.has_drawn()
        if loss.numel() != 1:
            raise CannotCheckError("the loss of the first rows is not one number")
        if needs_loss and not loss.requires_grad:
            raise UnsuitableRowsError("the loss of the first rows needs no gradient")
        if loss.grad_fn is None or known is None:
            return loss, Reading([])
        reading = known.read(loss)
        guard_against_zero(reading.terms)
        return loss, reading

    def gradients(self, loss: Tensor, share: float, scale: float = 1.0, keeps_graph: bool = False) -> dict[int, Tensor]:
        """The gradients of ``share`` times a loss, divided by ``scale``, by parameter: some elements, in double precision."""
        trained = {index: own for index, own in enumerate(self._trained) if own.requires_grad}  # a step may freeze some
        if not trained:
            return {}
        with users_code(), self.mode:
            own = self.trained.differentiated(loss, share)
            gradients = self.backward.gradients_of(own, share, [*trained.values()], keeps_graph)
        most = min(_SAMPLED, max(64, _SAMPLED_OF_ALL // len(trained)))
        return {index: sample(own, most) / scale for index, own in zip(trained, gradients, strict=True) if own is not None}

    def together(self, function: Callable[[], _T]) -> _T:
        """Call a function on all ranks. If it fails on one, it fails on all.

        Raises:
            CannotCheckError: it failed. On all ranks.
            RowWiseError: it was refused. On all ranks.
            Exception: the error of this rank, if another rank waits for it in the function, or if this package is at fault.
        """
        problem: CannotCheckError | RowWiseError | None = None
        result: _T | None = None
        begun = time.monotonic()
        try:
            with users_code((AccumulationError, RuntimeError)):  # includes torch's out-of-memory errors
                result = function()
        except (CannotCheckError, RowWiseError) as error:
            problem = error
        if self.backward.is_waited_for_in_forward:
            patience = PATIENCE + 10 * (time.monotonic() - begun)
            if not have_all_left(problem is not None, patience):
                assert problem is not None
                waits = "Another rank runs its modules and waits for this one: begin with batches that have a loss on all ranks."
                raise problem.__cause__ or UsageError(f"{problem}. {waits}")
        if severity := self.largest(0.0 if problem is None else 1.0 + isinstance(problem, RowWiseError)):
            self.backward.reshard()  # a rank that failed has no gathered parameters, and others must not have them either
            kind = RowWiseError if severity > 1 else CannotCheckError
            try:
                raise problem if isinstance(problem, kind) else kind("another rank cannot run a few rows of its batch")
            finally:
                problem = None  # an error and a frame that hold each other keep the memory of what failed
        return cast("_T", result)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the module is set up for trials; afterwards it is restored."""
        with ExitStack() as stack:
            # parameters of sharded modules are managed by the engine
            of_fit = [] if self.backward.is_waited_for_in_forward else self.trained.parameters()
            of_module = {*self.module.parameters()}
            stack.enter_context(gradients_set_aside(of_fit))
            if (dtype := self.dtype) is not None:
                self.together(lambda: stack.enter_context(widened(self.module, dtype)))  # memory may run out
            parameters = [*self.module.parameters(), *(own for own in of_fit if own not in of_module)]
            self.backward.reshard()  # after a forward without a backward, gathered parameters remain in memory
            # FSDP sets the data of parameters by itself
            self.mode.watch(dict.fromkeys((*parameters, *of_fit)), may_be_set=not self.backward.is_waited_for_in_forward)
            self._trained = parameters
            stack.callback(self.mode.watch, ())  # keep no copies in a wider type
            stack.callback(self._trained.clear)
            stack.enter_context(dropout_switched_off(self.module))
            outer = self._take_snapshot()
            stack.callback(outer.restore)
            stack.callback(self.mode.restore)
            freeze_batch_norm(self.module)
            self._snapshot, self.draws_others = self._take_snapshot(), False
            self.draw_anew(0)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
        del self._snapshot


@contextmanager
def users_code(kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Errors of these kinds raised inside mean that a step cannot be tried; any other is a fault of this package."""
    try:
        yield
    except (CannotCheckError, RowWiseError):
        raise
    except kinds as error:
        raise CannotCheckError(f"training_step raises {type(error).__name__} on a few rows of the batch: {error}") from error


def difference(one: Result, other: Result) -> float:
    """The relative difference of two losses, or of their gradients if that is larger; 0 for losses that are not finite."""
    (loss, gradients), (other_loss, others) = one, other
    of_loss = abs(loss - other_loss) / max(abs(loss), abs(other_loss), 1e-300)
    return max(of_loss if math.isfinite(of_loss) else 0.0, apart(gradients, [others]) or 0.0)


def _on_host(term: Term) -> Term:
    """The term with shares as numbers, and without its graph."""
    numbers: dict[str, Any] = {name: float(getattr(term, name)) for name in ("losses", "total", "number", "kink")}
    return term._replace(**numbers, edges={}, divisions=(), shares=())
