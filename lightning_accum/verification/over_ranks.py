"""Compares a window over real ranks with the full batch in one process: which rank differs, and in which parameters."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, start_processes

from lightning_accum.trainer.from_lightning import MisconfiguredError, Strategy, fabric, pl
from lightning_accum.trainer.model_parallel import ModelParallelAccumulationStrategy
from lightning_accum.user_warnings import listed
from lightning_accum.verification.examination import Break, Comparison, Diagnosis, Difference, differing, moved_differently
from lightning_accum.verification.step import Change, Step, StepRunner, Tensors

_OTHER_LOSSES = (
    "Return the loss as one process would. Look for what depends on the rank or the number of ranks: parameters and buffers made"
    " from other random numbers (seed_everything with one seed), factors and random numbers in training_step, and attributes."
)
_OTHER_GRADIENTS = "Look for factors of the number of ranks, for communication hooks, and for parameters that no group reduces."
_OTHER_STEPS = "Look for what depends on the rank or the number of ranks in configure_optimizers and the hooks around the step."


class OverRanks:
    """Runs a window over ranks, and compares it with the full batch in one process (``alone``)."""

    def __init__(self, runner: StepRunner, comparison: Comparison, alone: Diagnosis, ranks: int, strategy: str | Strategy) -> None:
        self.ranks = ranks
        self._full, self._tolerance = alone.full, alone.tolerance
        shares = [list(comparison.batches[rank::ranks]) for rank in range(ranks)]  # the ranks take turns
        self._steps = _steps(runner, shares, strategy, alone.change, self._full.gradients)
        differences = [Difference.between(step.gradient, self._full.gradient) for step in self._steps]
        self._worst = max(range(ranks), key=lambda rank: differences[rank].largest)
        self.gradient, self.loss = differences[self._worst], self._steps[self._worst].loss
        if self.gradient.largest <= self._tolerance:
            self.breaks = self._of_step()
        else:
            parts = [runner.accumulated(share, alone.change) for share in shares]
            self.breaks = self._of_losses(parts) or [self._of_gradients()]  # later differences follow from the first

    def _break(self, name: str, found: str, mend: str) -> Break:
        return Break(name, found, self.gradient.largest, None, mend)

    def _of_losses(self, parts: Sequence[Step]) -> list[Break]:
        """Losses of ranks that differ from the losses of the same rows in one process."""
        breaks = []
        for rank, (step, part) in enumerate(zip(self._steps, parts, strict=True)):
            own, alone = (torch.tensor(one.losses, dtype=torch.float64) for one in (step, part))
            if len(own) != len(alone):
                found = f"Rank {rank} has {len(own)} micro-batches with a loss; one process has {len(alone)} on the same rows."
            elif not torch.allclose(own, alone, rtol=16 * self._tolerance, atol=0.0, equal_nan=True):
                worst = int((own - alone).abs().argmax())
                times = f"{alone[worst]:.9g}: {own[worst] / alone[worst]:.6g} times."
                found = f"A micro-batch of rank {rank} has the loss {own[worst]:.9g}; in one process it is {times}"
            else:
                continue
            seen, expected = {**step.before, **step.buffers}, {**part.before, **part.buffers}
            if others := list(differing(seen, expected, self._tolerance)):
                found += f" {listed(others)} {'are' if len(others) > 1 else 'is'} not what one process has."
            breaks.append(self._break("loss of a rank", found, _OTHER_LOSSES))
        return breaks

    def _of_gradients(self) -> Break:
        """The losses are right, so the reduction is wrong."""
        off = listed([name for name, size in self.gradient.by_name.items() if not size <= self._tolerance])
        found = f"The losses are right, but on rank {self._worst} the reduced gradients of {off} differ from the full batch."
        return self._break("gradients of the ranks", found, _OTHER_GRADIENTS)

    def _of_step(self) -> list[Break]:
        """Steps of ranks that differ from the full batch's, though the gradients are equal."""
        moved = {rank: off for rank, step in enumerate(self._steps) if (off := moved_differently(step, self._full))}
        found = "Rank {} has the gradient of the full batch, but its step changes {} differently."
        return [
            self._break(f"optimizer step of rank {rank}", found.format(rank, listed(off)), _OTHER_STEPS)
            for rank, off in moved.items()
        ]


def _steps(
    runner: StepRunner, shares: Sequence[Sequence[Any]], strategy: str | Strategy, change: Change, gradients: Sequence[Tensors]
) -> list[Step]:
    """The step of a window over ranks, as recorded by each. ``shares`` are the loader batches of each rank."""
    runner_there = replace(runner, state=None)  # type: ignore[arg-type]  # nothing is restored there
    parts = (runner_there, shares, strategy, change, gradients, torch.get_default_dtype())
    with runner.state.restored_afterwards():
        try:
            sent = pickle.dumps(parts)
        except Exception as error:  # classes of the user may raise anything
            raise RanksFailedError(
                f"verify(devices={len(shares)}) cannot pickle the module, its batches and the strategy for its processes: {error}. "
                "Define classes and functions at the top level of a file, and create other objects in setup()."
            ) from error
    return run_on_ranks(partial(_run_rank, sent), len(shares))


def _run_rank(sent: bytes) -> Step:
    runner, shares, strategy, change, gradients, dtype = pickle.loads(sent)
    torch.set_default_dtype(dtype)
    ranks, batches = len(shares), shares[int(os.environ["RANK"])]
    trainer: dict[str, Any] = {"devices": ranks, "plugins": [fabric.plugins.environments.TorchElasticEnvironment()]}
    if strategy == "accum_model_parallel":
        strategy = ModelParallelAccumulationStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    is_sharded = isinstance(strategy, pl.strategies.ModelParallelStrategy)
    if is_sharded and runner.trainer["precision"] == "64-true":  # Lightning supports only this precision
        torch.set_default_dtype(torch.float64)
        runner.module.double()
        trainer["precision"] = "32-true"
        batches = [apply_to_collection(batch, Tensor, lambda t: t.double() if t.is_floating_point() else t) for batch in batches]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = Step(given=gradients, ranks=ranks)
        runner.fit(batches, change, step, [runner.policy_for(batches)], strategy=strategy, **trainer)
    return step


# --- processes, of the demo too ---------------------------------------------------------------------------------------

MOST_SECONDS = 300.0  # time limit for all ranks of a step


class RanksFailedError(MisconfiguredError):
    """A rank could not start, failed before its optimizer step, or the ranks wait for each other."""


def run_on_ranks(job: Callable[[], Any], devices: int, seconds: float = MOST_SECONDS) -> list[Any]:
    """The results of a picklable job on all ranks, or a RanksFailedError after ``seconds``.

    Each runs in a fresh process, since a fork after torch has used its threads can hang.
    """
    method = "spawn"
    if sys.platform != "win32":  # a server imports the slow modules once, and the ranks are forked from it
        method = "forkserver"
        multiprocessing.set_forkserver_preload([pl.__name__, __name__, "lightning_accum.names"])
    port = fabric.plugins.environments.lightning.find_free_network_port()
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "verify"}
    environment |= {"WORLD_SIZE": str(devices), "LOCAL_WORLD_SIZE": str(devices), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    start: Any = start_processes  # it has no types
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(rank) for rank in range(devices)]
        try:
            start(_run, (job, environment, paths, seconds), devices, daemon=True, start_method=method)
        except ProcessException as error:  # with the traceback of the rank, or its exit code
            raise RanksFailedError(
                f"Training failed on rank {error.error_index}: {error}\nA rank without a traceback was killed, perhaps because "
                f"memory ran out; or the ranks waited for each other for {seconds:g} seconds, and standard error shows where. "
                'A script must call this below `if __name__ == "__main__":`.'
            ) from error
        return [pickle.loads(path.read_bytes()) for path in paths]


def _run(index: int, job: Callable[[], Any], environment: dict[str, str], paths: Sequence[Path], seconds: float) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True)
    os.environ.update(environment, RANK=str(index), LOCAL_RANK=str(index))
    torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ["LOCAL_WORLD_SIZE"])))

    paths[index].write_bytes(pickle.dumps(job()))
    os._exit(0)  # gloo's threads sometimes abort an interpreter at exit
