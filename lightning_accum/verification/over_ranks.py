"""Compares a window over real ranks with the full batch in one process: which rank differs, and in which parameters."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, start_processes

from lightning_accum.trainer.from_lightning import MisconfiguredError, Strategy, fabric, pl
from lightning_accum.trainer.model_parallel import ModelParallelAccumulationStrategy
from lightning_accum.user_warnings import listed
from lightning_accum.verification.examination import Break, Comparison, Diagnosis, Difference, differing, moved_differently
from lightning_accum.verification.step import Change, Step, StepRunner, Tensors

_MENDS = {
    "loss of a rank": "Return the loss as one process would. Look for what depends on the rank or the number of ranks: parameters"
    " and buffers initialised from different random numbers (call seed_everything with one seed on all ranks), factors in"
    " training_step, and attributes.",
    "gradients of the ranks": "Look for factors of the number of ranks, communication hooks, and parameters that no group reduces.",
    "optimizer step of a rank": "Look for what depends on the rank in configure_optimizers and the hooks around the step.",
}


class OverRanks:
    """Runs a window over ranks, and compares it with the full batch in one process (``alone``)."""

    def __init__(self, runner: StepRunner, comparison: Comparison, alone: Diagnosis, ranks: int, strategy: str | Strategy) -> None:
        self.ranks, full = ranks, alone.full
        shares = [list(comparison.batches[rank::ranks]) for rank in range(ranks)]  # the ranks take turns
        steps = _steps(runner, shares, strategy, alone.change, full.gradients)
        differences = [Difference.between(step.gradient, full.gradient) for step in steps]
        worst = max(range(ranks), key=lambda rank: differences[rank].largest)
        self.gradient, self.loss = differences[worst], steps[worst].loss
        if self.gradient.largest <= alone.tolerance:
            moved = {rank: names for rank, step in enumerate(steps) if (names := moved_differently(step, full))}
            differs = "Rank {} has the gradient of the full batch, but its step changes {} differently."
            found = [("optimizer step of a rank", differs.format(rank, listed(names))) for rank, names in moved.items()]
        else:
            parts = [runner.accumulated(share, alone.change) for share in shares]
            off = listed([name for name, size in self.gradient.by_name.items() if not size <= alone.tolerance])
            reduced = f"The losses are right, but on rank {worst} the reduced gradients of {off} differ from the full batch."
            found = [("loss of a rank", words) for words in _losses_in_words(steps, parts, alone.tolerance)]
            found = found or [("gradients of the ranks", reduced)]  # later differences follow from the first
        self.breaks = [Break(name, words, self.gradient.largest, None, _MENDS[name]) for name, words in found]


def _losses_in_words(steps: Sequence[Step], parts: Sequence[Step], tolerance: float) -> Iterator[str]:
    """The ranks whose losses differ from the losses of the same rows in one process, and their other parameters and buffers."""
    for rank, (step, part) in enumerate(zip(steps, parts, strict=True)):
        own, alone = (torch.tensor(one.losses, dtype=torch.float64) for one in (step, part))
        if own.shape == alone.shape and torch.allclose(own, alone, rtol=16 * tolerance, atol=0.0, equal_nan=True):
            continue
        shown = [listed([f"{loss:.9g}" for loss in one.losses]) or "none" for one in (step, part)]
        found = f"Losses of the micro-batches of rank {rank}: {shown[0]}; in one process: {shown[1]}."
        others = differing({**step.before, **step.buffers}, {**part.before, **part.buffers}, tolerance)
        yield found + (f" These differ as well: {listed(list(others))}." if others else "")


def _steps(
    runner: StepRunner, shares: Sequence[Sequence[Any]], strategy: str | Strategy, change: Change, gradients: Sequence[Tensors]
) -> list[Step]:
    """The step of a window over ranks, as recorded by each. ``shares`` are the loader batches of each rank."""
    assert runner.state is not None
    parts = (replace(runner, state=None), shares, strategy, change, gradients, torch.get_default_dtype())
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
    trainer: dict[str, Any] = {"devices": ranks, "plugins": [fabric.plugins.environments.LightningEnvironment()]}
    if strategy == "accum_model_parallel":
        strategy = ModelParallelAccumulationStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    if runner.trainer["precision"] == "64-true":  # as an argument, Lightning refuses it for sharded modules
        trainer |= {"precision": None, "plugins": [*trainer["plugins"], pl.plugins.DoublePrecision()]}
    step, callbacks = Step(given=gradients, ranks=ranks), [runner.policy_for(batches)]
    found: Step = runner.run(batches, change, step, callbacks, strategy=strategy, **trainer)
    return found


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
    port = str(fabric.plugins.environments.lightning.find_free_network_port())
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0", "WORLD_SIZE": str(devices)}
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
    torch.set_num_threads(max(1, torch.get_num_threads() // len(paths)))
    paths[index].write_bytes(pickle.dumps(job()))
    os._exit(0)  # gloo's threads sometimes abort an interpreter at exit
