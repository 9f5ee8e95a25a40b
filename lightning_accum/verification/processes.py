"""The processes that the ranks of a verification, or of the demo, run in: started here, or one beside each of torchrun's."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from lightning_accum.arguments import MisconfiguredError

MOST_SECONDS = 300.0
"""That the ranks of a step may take, all together."""
_GRACE = 5.0
"""Seconds that the others have to end by themselves, once a rank has failed."""


class RanksFailedError(MisconfiguredError):
    """There is nothing to compare: a rank failed before its optimizer step, or the ranks wait for each other."""


def check_processes(devices: int, accelerator: str) -> None:
    """Whether so many ranks can be started here.

    Raises:
        MisconfigurationException: they cannot.
    """
    if not hasattr(os, "fork"):
        raise MisconfiguredError(f"verify(devices={devices}) forks its ranks, which this system cannot.")
    if accelerator != "cpu" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise MisconfiguredError(
            f'verify(devices={devices}, accelerator="{accelerator}") forks its ranks, which a process that uses an accelerator'
            ' cannot: pass accelerator="cpu", and run it before anything is on a GPU.'
        )
    started = int(os.environ.get("WORLD_SIZE", devices)) if is_under_torchrun() else devices
    if started != devices:
        raise MisconfiguredError(f"verify(devices={devices}) runs under torchrun with {started} processes: pass as many.")


def is_under_torchrun() -> bool:
    """Whether this is one of several processes that torchrun has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def run_on_ranks(
    job: Callable[[Callable[[Any], None]], None], devices: int, seconds: float | None = None, method: str = "fork"
) -> Any:
    """Run a job on every rank, in a process of its own; one that is forked has what this one has.

    Args:
        job: gets a function that hands over its result, and ends the process.
        devices: ranks.
        seconds: that they may take, all together.
        method: of :mod:`multiprocessing`, that starts them.

    Returns:
        The result of the first rank that was started here.

    Raises:
        RanksFailedError: a rank failed, or handed over nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        environments: list[dict[str, str]] = [{}]
        if not is_under_torchrun():
            common = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(find_free_network_port()),
                "WORLD_SIZE": str(devices),
                "LOCAL_WORLD_SIZE": str(devices),
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "TORCHELASTIC_RUN_ID": "verify",
            }
            environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(devices)]
        context: Any = multiprocessing.get_context(method)
        paths = [Path(folder) / str(number) for number in range(len(environments))]
        jobs = zip(environments, paths, strict=True)
        processes: list[BaseProcess] = [context.Process(target=_run, args=(job, *each), daemon=True) for each in jobs]
        for process in processes:
            process.start()
        seconds = MOST_SECONDS if seconds is None else seconds
        try:
            _wait(processes, seconds)
            exit_codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        return _result(paths, exit_codes, seconds)


def _wait(processes: list[BaseProcess], seconds: float) -> None:
    """Until all have ended, or one has failed and the others had time to."""
    end = time.monotonic() + seconds
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + _GRACE)
        time.sleep(0.02)


def _result(paths: list[Path], exit_codes: list[int | None], seconds: float) -> Any:
    results = [pickle.loads(path.read_bytes()) if path.is_file() else None for path in paths]
    failures = [(number, result[1]) for number, result in enumerate(results) if result is not None and result[0] == "error"]
    codes = zip(results, exit_codes, strict=True)
    died = [f"rank {_rank(number)} with exit code {code}" for number, (result, code) in enumerate(codes) if code and result is None]
    # one that only lost its connection says less
    number, failure = min(failures, key=lambda failure: "onnection" in failure[1][1], default=(0, None))
    if failure is not None and not (died and "onnection" in failure[1]):
        kind, message, trace = failure
        raise RanksFailedError(f"On rank {_rank(number)} training failed, with {kind}: {message}") from RuntimeError(trace)
    if died:
        raise RanksFailedError(f"A process ended before its optimizer step: {', '.join(died)}. Did it run out of memory?")
    missing = [_rank(number) for number, result in enumerate(results) if result is None]
    if missing:
        raise RanksFailedError(
            f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} took no optimizer step within {seconds:g} seconds: the"
            " ranks wait for each other. Does a rank enter a collective that others do not, or return no loss?"
        )
    return results[0][1]  # type: ignore[index]


def _rank(number: int) -> int:
    return int(os.environ["RANK"]) if is_under_torchrun() else number


def _run(job: Callable[[Callable[[Any], None]], None], environment: dict[str, str], path: Path) -> None:
    """In the process of a rank."""
    os.environ.update(environment)

    def hand_over(kind: str, value: Any, status: int) -> None:
        partial = path.with_suffix(".part")
        partial.write_bytes(pickle.dumps((kind, value)))
        partial.rename(path)
        os._exit(status)  # nothing after the step is of interest, least of all the ends of epochs

    try:
        job(lambda result: hand_over("result", result, 0))
        raise RuntimeError("There was no optimizer step: training_step returned no loss, or the loss had no weight.")
    except BaseException as error:
        hand_over("error", (type(error).__name__, str(error), traceback.format_exc()), 1)
