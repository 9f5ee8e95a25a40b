"""A window over real ranks against the full batch in one process: which rank is off, and by what factor."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_accum.trainer.from_lightning import ModelParallelStrategy, Strategy, TorchElasticEnvironment
from lightning_accum.trainer.model_parallel import ModelParallelAccumulationStrategy
from lightning_accum.user_warnings import listed
from lightning_accum.verification.examination import Comparison, Diagnosis, Difference, difference, elsewhere
from lightning_accum.verification.processes import RanksFailedError, run_on_ranks
from lightning_accum.verification.report import Break
from lightning_accum.verification.step import Change, Step, StepRecorder, StepRunner, Tensors

_Found = tuple[str, str, str]
"""The name of a break, what was seen, and what mends it."""


class OverRanks:
    """Runs a window over ranks, and compares it with the full batch, whose step it takes in one process (``alone``)."""

    def __init__(self, runner: StepRunner, comparison: Comparison, alone: Diagnosis, ranks: int, strategy: str | Strategy) -> None:
        self.ranks = ranks
        self._full, self._tolerance = alone.full, alone.tolerance
        shares = [list(comparison.batches[rank::ranks]) for rank in range(ranks)]  # the ranks take turns
        self._steps = _steps(runner, shares, strategy, alone.change, self._full.gradients)
        self._parts = [runner.accumulated(share, alone.change) for share in shares]
        differences = [Difference.between(step.gradient, self._full.gradient) for step in self._steps]
        worst = max(range(ranks), key=lambda rank: differences[rank].largest)
        self.gradient = differences[worst]
        self.loss = self._steps[worst].loss
        is_equal = self.gradient.largest <= self._tolerance
        stages = [self._of_step()] if is_equal else [self._of_losses(), self._of_gradients()]
        found = next(filter(None, map(list, stages)), [])  # what comes later follows from the first
        self.breaks = [Break(name, text, self.gradient.largest, None, mend) for name, text, mend in found]

    def _of_losses(self) -> Iterator[_Found]:
        """The losses of the same rows are others than in one process."""
        for rank, (step, part) in enumerate(zip(self._steps, self._parts, strict=True)):
            own, alone = (torch.tensor(one.losses, dtype=torch.float64) for one in (step, part))
            if len(own) != len(alone):
                found = f"Rank {rank} has {len(own)} micro-batches with a loss, and one process has {len(alone)} on the same rows."
            elif not torch.allclose(own, alone, rtol=16 * self._tolerance, atol=0.0, equal_nan=True):
                worst = int((own - alone).abs().argmax())
                found = f"A micro-batch of rank {rank} has the loss {own[worst]:.9g}, and in one process {alone[worst]:.9g}"
                found += f": {own[worst] / alone[worst]:.6g} times."
            else:
                continue
            seen, expected = {**step.before, **step.buffers}, {**part.before, **part.buffers}
            others = [name for name, tensor in expected.items() if difference(seen.get(name), tensor) > self._tolerance]
            yield (
                "loss of a rank",
                found + (f" {listed(others)} {'are' if len(others) > 1 else 'is'} not what one process has." if others else ""),
                "Return the loss as one process would. Look for what goes by the rank or the number of ranks: parameters and"
                " buffers that were made from other random numbers (seed_everything with one seed), factors in training_step,"
                " random numbers in it, and attributes.",
            )

    def _of_gradients(self) -> Iterator[_Found]:
        """The losses are right, so what becomes of their gradients is not."""
        full = self._full.gradient
        views = [Difference.between(step.gradient, full).by_name for step in self._steps]
        bad = [name for name in full if any(not view[name] <= self._tolerance for view in views)] or list(full)
        mend = "Look for what multiplies losses or gradients by the rank or the number of ranks, for communication hooks, and for"
        mend += " parameters that no group reduces."
        counts = self._counts(bad)
        if counts is None:
            found = f"The losses are right, but no multiples of the ranks' gradients add up to the reduced ones of {listed(bad)}."
            yield "gradients of the ranks", found, mend
        else:
            each = (
                f"on rank {rank} the rows of ranks 0 to {self.ranks - 1} count {', '.join(f'{c:.6g}' for c in count)}"
                for rank, count in enumerate(counts)
            )
            where = "" if len(bad) == len(full) else f" in {listed(bad)}, unlike in the others,"
            yield "weights of the ranks", f"The losses are right, but{where} {'; '.join(each)} times as much as they should.", mend

    def _counts(self, names: Sequence[str]) -> list[list[float]] | None:
        """For each rank, how often it counts the rows of every rank; None if its gradients are not a multiple of theirs."""
        limit = max(100 * self._tolerance, 1e-9)
        parts = torch.stack([_flat(part.gradient, names) for part in self._parts], 1)
        weights = _multiples(parts, _flat(self._full.gradient, names), limit)
        counts = [
            None if weights is None else _multiples(parts * weights, _flat(step.gradient, names), limit) for step in self._steps
        ]
        found = [count.where(count.abs() > limit, 0.0).tolist() for count in counts if count is not None]
        return found if len(found) == self.ranks else None

    def _of_step(self) -> Iterator[_Found]:
        """Does the step of each rank end where the full batch's did, from the same gradients?"""
        for rank, step in enumerate(self._steps):
            if off := elsewhere(step, self._full):
                yield (
                    f"optimizer step of rank {rank}",
                    f"Rank {rank} has the gradient of the full batch, but its step moves {listed(off)} differently.",
                    "Compare what configure_optimizers and the hooks around the step do on each rank: they may go by the rank or by"
                    " the number of ranks.",
                )


def _multiples(columns: Tensor, target: Tensor, limit: float) -> Tensor | None:
    """By how much to multiply the columns so that they add up to the target, up to a relative error; None if they do not."""
    found = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
    return found if bool((target - columns @ found).norm() <= limit * target.norm()) else None


def _flat(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].to(torch.float64).flatten() for name in names])


def _steps(
    runner: StepRunner, shares: Sequence[Sequence[Any]], strategy: str | Strategy, change: Change, gradients: Sequence[Tensors]
) -> list[Step]:
    """The step of a window over ranks, of whose loader batches these are the ``shares``, as each rank saw it."""
    runner_there = replace(runner, state=None)  # type: ignore[arg-type]  # nothing is restored there
    parts = (runner_there, shares, strategy, change, gradients, torch.get_default_dtype())
    with runner.state.restored_afterwards():
        try:
            sent = pickle.dumps(parts)
        except Exception as error:  # whatever a class of the user's raises
            raise RanksFailedError(
                f"verify(devices={len(shares)}) sends the module, its batches and the strategy to fresh processes, but they"
                f" cannot be pickled: {error}. Define classes and functions at the top level of a file, and make what cannot be"
                " pickled in setup()."
            ) from error
    return run_on_ranks(partial(_run_rank, sent), len(shares))


def _run_rank(sent: bytes) -> Step:
    """In the process of a rank."""
    runner, shares, strategy, change, gradients, dtype = pickle.loads(sent)
    torch.set_default_dtype(dtype)
    ranks, batches = len(shares), shares[int(os.environ["RANK"])]
    trainer: dict[str, Any] = {"devices": ranks, "plugins": [TorchElasticEnvironment()]}
    if strategy == "accum_model_parallel":
        strategy = ModelParallelAccumulationStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    if isinstance(strategy, ModelParallelStrategy) and runner.trainer["precision"] == "64-true":  # Lightning has it in no other
        torch.set_default_dtype(torch.float64)
        runner.module.double()
        trainer["precision"] = "32-true"
        batches = [apply_to_collection(batch, Tensor, lambda t: t.double() if t.is_floating_point() else t) for batch in batches]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorder = StepRecorder(gradients=gradients, ranks=ranks)
        runner.fit(batches, change, recorder, [runner.policy_for(batches)], strategy=strategy, **trainer)
    return recorder.step
