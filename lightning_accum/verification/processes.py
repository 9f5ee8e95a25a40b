"""The processes that the ranks of a verification, or of the demo, run in: started here, or one beside each of torchrun's."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
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
"""The ranks of a step may take this long, all together."""
_GRACE = 5.0
"""Once a rank has failed, the others have these seconds to end by themselves."""

Job = Callable[[Callable[[Any], None]], None]
"""Gets a function that hands over its result and ends the process. It can be pickled."""


class RanksFailedError(MisconfiguredError):
    """There is nothing to compare: a rank could not start, failed before its optimizer step, or the ranks wait for each other."""


def is_under_torchrun() -> bool:
    """Whether this is one of several processes that torchrun has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def run_on_ranks(job: Job, devices: int, seconds: float = MOST_SECONDS) -> Any:
    """Run a job on every rank, each in a fresh process: one that was forked after torch has used its threads can hang.

    Args:
        job: what each rank runs.
        devices: the number of ranks.
        seconds: that they may take, all together.

    Returns:
        The result of the first rank that was started here.

    Raises:
        RanksFailedError: a rank failed, or handed over nothing.
    """
    # what takes seconds to import is imported once, by a server that the ranks are forked from; Windows has none
    context: Any = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
    if sys.platform != "win32":
        context.set_forkserver_preload([__name__, "lightning_accum.names"])
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
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(number) for number in range(len(environments))]
        jobs = zip(environments, paths, strict=True)
        processes: list[BaseProcess] = [context.Process(target=_run, args=(job, *each), daemon=True) for each in jobs]
        try:
            for process in processes:
                process.start()
            _wait(processes, seconds)
            exit_codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                if process.pid is not None:
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
    first = int(os.environ["RANK"]) if is_under_torchrun() else 0
    results = {first + n: pickle.loads(path.read_bytes()) if path.is_file() else None for n, path in enumerate(paths)}
    failures = [(rank, result[1]) for rank, result in results.items() if result is not None and result[0] == "error"]
    died = [f"rank {rank} (exit code {code})" for rank, code in enumerate(exit_codes, first) if code and results[rank] is None]
    # one that only lost its connection says less
    rank, failure = min(failures, key=lambda failure: "onnection" in failure[1][1], default=(0, None))
    if failure is not None and not (died and "onnection" in failure[1]):
        kind, message, trace = failure
        raise RanksFailedError(f"On rank {rank} training failed, with {kind}: {message}") from RuntimeError(trace)
    if died:
        raise RanksFailedError(
            f"A process ended before its optimizer step: {', '.join(died)}. Did it run out of memory? A script has to call this"
            ' below `if __name__ == "__main__":`, as the process of each rank imports it.'
        )
    missing = [str(rank) for rank, result in results.items() if result is None]
    if missing:
        raise RanksFailedError(
            f"Rank{'s' * (len(missing) > 1)} {', '.join(missing)} took no optimizer step within {seconds:g} seconds: the ranks wait"
            " for each other. Does a rank enter a collective that others do not, or return no loss?"
        )
    return next(iter(results.values()))[1]  # type: ignore[index]


def _run(job: Job, environment: dict[str, str], path: Path) -> None:
    """In the process of a rank."""
    os.environ.update(environment)
    torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ["LOCAL_WORLD_SIZE"])))

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
