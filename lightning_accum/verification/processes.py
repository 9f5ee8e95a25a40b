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
from pathlib import Path
from typing import Any

import torch

from lightning_accum.arguments import MisconfiguredError
from lightning_accum.from_lightning import find_free_network_port, pl

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

    Returns:
        The result of the first rank that was started here.

    Raises:
        RanksFailedError: a rank failed, or handed over nothing in so many seconds.
    """
    # what takes seconds to import is imported once, by a server that the ranks are forked from; Windows has none
    context: Any = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
    if sys.platform != "win32":
        context.set_forkserver_preload([pl.__name__, __name__, "lightning_accum.names"])
    environments: dict[int, dict[str, str]] = {}
    if is_under_torchrun():
        environments[int(os.environ["RANK"])] = {}
    else:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
        common |= {"WORLD_SIZE": str(devices), "LOCAL_WORLD_SIZE": str(devices)}
        common |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "verify"}
        environments = {rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(devices)}
    with tempfile.TemporaryDirectory() as folder:
        paths = {rank: Path(folder) / str(rank) for rank in environments}
        processes = {r: context.Process(target=_run, args=(job, environments[r], paths[r]), daemon=True) for r in paths}
        end = time.monotonic() + seconds
        try:
            for process in processes.values():
                process.start()
            while any(process.is_alive() for process in processes.values()) and time.monotonic() < end:
                if any(process.exitcode for process in processes.values()):
                    end = min(end, time.monotonic() + _GRACE)
                time.sleep(0.02)
            exit_codes = {rank: process.exitcode for rank, process in processes.items()}
        finally:
            for process in processes.values():
                if process.pid is not None:
                    process.kill()
                    process.join()
        results = {rank: pickle.loads(path.read_bytes()) for rank, path in paths.items() if path.is_file()}
    _check(results, exit_codes, seconds)
    return results[min(results)][1]


def _check(results: dict[int, tuple[str, Any]], exit_codes: dict[int, int | None], seconds: float) -> None:
    """Raise what the rank says that failed first: one that only lost its connection says less."""
    failures = [(rank, value) for rank, (kind, value) in results.items() if kind == "error"]
    died = [f"rank {rank} (exit code {code})" for rank, code in exit_codes.items() if code and rank not in results]
    for rank, (kind, message, trace) in sorted(failures, key=lambda failure: "onnection" in failure[1][1]):
        if not (died and "onnection" in message):
            raise RanksFailedError(f"On rank {rank} training failed, with {kind}: {message}") from RuntimeError(trace)
    if died:
        raise RanksFailedError(
            f"A process ended before its optimizer step: {', '.join(died)}. Did it run out of memory? A script has to call this"
            ' below `if __name__ == "__main__":`, as the process of each rank imports it.'
        )
    missing = [str(rank) for rank in exit_codes if rank not in results]
    if missing:
        raise RanksFailedError(
            f"Rank{'s' * (len(missing) > 1)} {', '.join(missing)} took no optimizer step within {seconds:g} seconds: the ranks wait"
            " for each other. Does a rank enter a collective that others do not, or return no loss?"
        )


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
