"""The processes that the ranks of a verification, or of the demo, run in."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, start_processes

from lightning_accum.trainer.from_lightning import MisconfiguredError, fabric, pl

MOST_SECONDS = 300.0
"""The ranks of a step may take this long, all together."""


class RanksFailedError(MisconfiguredError):
    """There is nothing to compare: a rank could not start, failed before its optimizer step, or the ranks wait for each other."""


def run_on_ranks(job: Callable[[], Any], devices: int, seconds: float = MOST_SECONDS) -> list[Any]:
    """Run a job, which can be pickled, on every rank.

    Each is in a fresh process: one that was forked after torch has used its threads can hang.

    Returns:
        The result of each.

    Raises:
        RanksFailedError: a rank failed, or has not ended in so many seconds.
    """
    method = "spawn"
    if sys.platform != "win32":  # what takes seconds to import is imported once, by a server that the ranks are forked from
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
                f"Training failed on rank {error.error_index}: {error}\nA rank without a traceback was killed, as if memory runs"
                f" out; or the ranks waited for each other for {seconds:g} seconds, and standard error shows where: does a rank"
                " enter a collective that others do not, or return no loss? A script has to call this below"
                ' `if __name__ == "__main__":`, as the process of each rank imports it.'
            ) from error
        return [pickle.loads(path.read_bytes()) for path in paths]


def _run(index: int, job: Callable[[], Any], environment: dict[str, str], paths: Sequence[Path], seconds: float) -> None:
    """In the process of a rank."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    os.environ.update(environment, RANK=str(index), LOCAL_RANK=str(index))
    torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ["LOCAL_WORLD_SIZE"])))

    paths[index].write_bytes(pickle.dumps(job()))
    os._exit(0)  # gloo's threads now and then abort an interpreter that ends
