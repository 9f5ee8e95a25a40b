"""Real processes over gloo, of which one fails: what the others say."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import DEADLINE, run_ranks
from torch.distributed import distributed_c10d

from lightning_accum.failures import Failure, RankFailedError, first_failure, note_failure, reraise_first_rank_error


def all_reduce() -> None:
    dist.all_reduce(torch.ones(4))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_wait_name_the_one_that_failed_and_its_error(world_size: int) -> None:
    def work(rank: int) -> None:
        with reraise_first_rank_error(rank):
            all_reduce()
            if rank == 1:
                time.sleep(0.3)  # the others wait in the next one
                raise ValueError("boom")
            all_reduce()

    said = run_ranks(work, world_size, leaves_at_once=(1,))
    assert said[1] == "ValueError: boom"
    for others in said[:1] + said[2:]:
        told = "RankFailedError: Rank 1 failed first, with ValueError: boom. This rank could not go on without it (RuntimeError: "
        assert others.startswith(told)
        assert "\n" not in others


def test_others_end_in_time_when_the_store_is_gone_with_rank_0() -> None:
    def work(rank: int) -> None:
        with reraise_first_rank_error(rank):
            if rank == 0:
                raise ValueError("boom")
            all_reduce()

    begin = time.monotonic()
    said = run_ranks(work, 2, leaves_at_once=(0,))
    assert said[0] == "ValueError: boom"
    assert said[1].startswith(("RankFailedError: Rank 0 failed first, with ValueError: boom", "RuntimeError: ", "Dist"))
    assert time.monotonic() - begin < DEADLINE / 2


def test_of_two_failures_at_once_one_is_first_on_all_ranks() -> None:
    def work(rank: int) -> None:
        with reraise_first_rank_error(rank):
            dist.barrier()
            raise ValueError(f"boom {rank}")

    for _ in range(3):
        said = run_ranks(work, 2)
        first = int(said[1] == "ValueError: boom 1")
        assert said[first] == f"ValueError: boom {first}"
        told = f"Rank {first} failed first, with ValueError: boom {first}. This rank could not go on without it"
        assert said[1 - first] == f"RankFailedError: {told} (ValueError: boom {1 - first})."


def test_note_that_comes_after_the_end_of_the_connection_is_waited_for() -> None:
    def work(rank: int) -> None:
        with reraise_first_rank_error(rank):
            if rank == 0:
                time.sleep(0.7)
                raise KeyError("late")
            raise RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:1")

    said = run_ranks(work, 2)
    assert said[0] == "KeyError: 'late'"
    assert said[1].startswith("RankFailedError: Rank 0 failed first, with KeyError: 'late'. ")


@pytest.mark.exhaustive
def test_error_of_communication_is_not_noted() -> None:
    def work(rank: int) -> None:
        error = dist.DistNetworkError("gone") if rank == 0 else RuntimeError("NCCL communicator was aborted")
        note_failure(error, rank)
        begin = time.monotonic()
        try:
            with reraise_first_rank_error(rank):
                raise error
        finally:
            assert first_failure() is None
            assert 1.5 < time.monotonic() - begin < 5

    assert run_ranks(work, 2) == ["DistNetworkError: gone", "RuntimeError: NCCL communicator was aborted"]


def test_failure_that_was_caught_on_all_ranks_is_not_told_in_the_next_run() -> None:
    def work(rank: int) -> None:
        try:
            with reraise_first_rank_error(rank):
                raise ValueError("refused on all ranks")
        except ValueError:
            dist.barrier()
        with reraise_first_rank_error(rank):
            if rank == 1:
                raise KeyError("boom")
            all_reduce()

    said = run_ranks(work, 2, leaves_at_once=(1,))
    assert said[0].startswith("RankFailedError: Rank 1 failed first, with KeyError: 'boom'. ")
    assert said[1] == "KeyError: 'boom'"


@pytest.mark.exhaustive
def test_store_whose_host_hangs_holds_nobody_up() -> None:
    def work(rank: int) -> None:
        dist.barrier()
        if rank == 0:
            Path("pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        time.sleep(1)
        begin = time.monotonic()
        try:
            with reraise_first_rank_error(rank):
                raise ValueError("boom")
        finally:
            assert time.monotonic() - begin < 10
            os.kill(int(Path("pid").read_text()), signal.SIGCONT)

    assert run_ranks(work, 2) == ["ended", "ValueError: boom"]


def test_without_a_process_group_errors_pass_unchanged_and_at_once_where_they_are_not_of_communication() -> None:
    error = ValueError("boom")
    begin = time.monotonic()
    with pytest.raises(ValueError, match="boom") as raised, reraise_first_rank_error(0):
        raise error
    assert raised.value is error
    assert error.__cause__ is None
    note_failure(error, 0)
    assert first_failure() is None
    assert time.monotonic() - begin < 1


def stores(kind: str, directory: Path) -> list[dist.Store]:
    """Two ranks' stores, which are one."""
    if kind == "hash":
        return [dist.HashStore()] * 2
    if kind == "file":
        return [dist.FileStore(str(directory / "store"), 2) for _ in range(2)]
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [dist.PrefixStore("prefix", store) for store in (server, dist.TCPStore("127.0.0.1", server.port))]


@pytest.mark.parametrize("kind", ["hash", "file", "tcp with a prefix"])
def test_first_to_note_wins_in_every_store(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = stores(kind, tmp_path)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: ours[0])
    with pytest.raises(KeyboardInterrupt), reraise_first_rank_error(0):  # a run of its own
        raise KeyboardInterrupt
    assert first_failure() is None
    note_failure(ValueError("é\n" + "long" * 1000), 0)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: ours[1])
    note_failure(KeyError("second"), 1)
    assert first_failure() == Failure(0, ("ValueError: é\n" + "long" * 1000)[:2000])


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), Stop(), RankFailedError("Rank 1 failed first")])
def test_what_is_no_error_of_this_rank_passes_and_is_not_noted(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    with pytest.raises(type(error)) as raised, reraise_first_rank_error(0, passing=(Stop,)):
        raise error
    assert raised.value is error
    assert first_failure() is None


def test_error_that_is_no_exception_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    store = dist.HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    with pytest.raises(CheckpointException), reraise_first_rank_error(2):
        raise CheckpointException("write", {})
    assert first_failure() is not None
    assert first_failure().rank == 2


def test_error_of_this_rank_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    own = ValueError("own\nwith details")

    def fail_second() -> None:
        with reraise_first_rank_error(0):
            note_failure(OSError("disk full."), 3)
            raise own

    with pytest.raises(RankFailedError) as raised:
        fail_second()
    told = "Rank 3 failed first, with OSError: disk full. This rank could not go on without it (ValueError: own)."
    assert str(raised.value) == told
    assert raised.value.__cause__ is own
