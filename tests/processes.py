"""Ranks as forked processes, without a Trainer."""

import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

DEADLINE = 60


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_ranks(work: Callable[[int], None], world_size: int, deadline: float = DEADLINE) -> list[str]:
    """Run ``work`` with a rank in each of so many processes, and return what each ended with: "ended", or its error.

    A rank waits until all have ended, because the store is in the process of rank 0.
    """
    port = free_port()

    def run(rank: int) -> None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=min(deadline, DEADLINE) / 2))
        try:
            work(rank)
            said = "ended"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        Path(f"{rank}.part").write_text(said)
        os.replace(f"{rank}.part", f"{rank}.said")
        end = time.monotonic() + deadline
        while len(list(Path().glob("*.said"))) < world_size and time.monotonic() < end:
            time.sleep(0.02)
        os._exit(0)  # gloo's threads now and then abort an interpreter that ends

    for old in Path().glob("*.said"):
        old.unlink()
    children = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in range(world_size)]
    for child in children:
        child.start()
    end = time.monotonic() + deadline
    for child in children:
        child.join(max(0.0, end - time.monotonic()))
    late = [rank for rank, child in enumerate(children) if child.is_alive()]
    for rank in late:
        os.kill(children[rank].pid, signal.SIGKILL)
        children[rank].join()
    assert not late, f"ranks {late} had not ended after {deadline} s"
    return [Path(f"{rank}.said").read_text() for rank in range(world_size)]


def found_by_two_ranks(
    attempt: Callable[[Any], Any], asked: Mapping[str, Any], folder: Path, deadline: float
) -> Callable[[str], list[Any]]:
    """Attempt all that is asked in one pair of processes. Returns what gives a name's two findings; an error is its traceback."""

    def work(rank: int) -> None:
        os.environ.update(LOCAL_RANK=str(rank), WORLD_SIZE="2", NODE_RANK="0")
        for name, of in asked.items():
            try:
                found = attempt(of)
            except Exception:
                found = RuntimeError(traceback.format_exc())
            torch.save(found, folder / f"{name}.{rank}")

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        said = run_ranks(work, 2, deadline)

    def found_of(name: str) -> list[Any]:
        files = [folder / f"{name}.{rank}" for rank in range(2)]
        assert all(file.is_file() for file in files), f"{name}: the ranks ended with {said}"
        return [torch.load(file, weights_only=False) for file in files]

    return found_of
