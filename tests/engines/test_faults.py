"""Ranks that raise, die or are told to end, in the middle of a window: all of them end, soon, and leave nothing half-written."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from processes import free_port
from sharded import DoublePrecision, ShardedScalar, fsdp2, needs_sharding_on_cpu, whole_parameters
from support import Scalar, ddp, loader, python_path, trainer, x
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_accum import (
    DDPAccumulationStrategy,
    FSDPAccumulationStrategy,
    GradientAccumulation,
    ModelParallelAccumulationStrategy,
)
from lightning_accum.failures import first_failure, note_failure

TIMEOUT = 20.0  # seconds that a collective waits
SOON = 10.0  # from a fault until all ranks know: they lose a connection, and do not wait for a time-out
DEADLINE = 120.0  # for the processes of a test

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="whether a process has ended is read from /proc")

# --- processes ----------------------------------------------------------------------------------------------------------


@dataclass
class End:
    """How the processes ended.

    Attributes:
        statuses: of those that were started here.
        said: what each of them wrote.
        notes: of the ranks, from :class:`Notes`; empty where a rank left none.
        fault: when it happened.
    """

    statuses: list[int]
    said: list[str]
    notes: list[dict[str, Any]]
    fault: float

    def all(self, name: str) -> Any:
        """What is the same in the notes of all ranks."""
        first, *others = [note[name] for note in self.notes]
        assert others == [first] * len(others), self.notes
        return first

    def was_soon(self) -> bool:
        """Whether all ranks came to their end soon after the fault."""
        return all(note["time"] - self.fault < SOON for note in self.notes if note)


class Notes(pl.Callback):
    """Files of a rank: its process, and what it ended with."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        Path(f"{trainer.global_rank}.pid").write_text(str(os.getpid()))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if not dist.is_initialized():  # a process that started the ranks, and is none
            return
        self.write(trainer, pl_module, ended_with=f"{type(exception).__name__}: {exception}".removesuffix(": "))
        if isinstance(exception, SIGTERMException) and not pl_module.has_ended:  # all ranks are here
            self.write(trainer, pl_module, ended_with="SIGTERMException", w=_parameter(pl_module))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.has_ended = True
        self.write(trainer, pl_module, ended_with="", w=_parameter(pl_module))

    def write(self, trainer: pl.Trainer, pl_module: pl.LightningModule, **more: Any) -> None:
        note = {"time": time.time(), "step": trainer.global_step, "batches": pl_module.seen, **more}
        Path(f"{trainer.global_rank}.json").write_text(json.dumps(note))


def _parameter(module: pl.LightningModule) -> float:
    (parameter,) = whole_parameters(module).values()
    return parameter.item()


def _running(pids: set[int]) -> list[int]:
    """Those of the processes that have not ended, and what is in a group that one of them leads."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid, fields = int(stat.parent.name), stat.read_text().rsplit(")", 1)[1].split()
            if fields[0] != "Z" and not pids.isdisjoint((pid, int(fields[2]))):
                found.append(pid)
    return found


def _watch(pids: Sequence[int], said: Sequence[Path], world_size: int, reap: Callable[[], list[int]]) -> End:
    """Wait for these processes and all that they started. After the deadline they are killed, and the test fails."""
    end = time.monotonic() + DEADLINE
    while True:
        late = _running({*pids, *(int(path.read_text() or 0) for path in Path().glob("[0-9].pid"))} - {0})
        if not late or time.monotonic() > end:
            break
        time.sleep(0.05)
    for pid in late:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    statuses, words = reap(), [path.read_text(errors="replace") for path in said]
    assert not late, f"{len(late)} processes had not ended after {DEADLINE} s:\n" + "\n".join(text[-3000:] for text in words)
    notes = [Path(f"{rank}.json") for rank in range(world_size)]
    fault = Path("fault")
    return End(
        statuses,
        words,
        [json.loads(note.read_text()) if note.exists() else {} for note in notes],
        float(fault.read_text()) if fault.exists() else 0.0,
    )


def _fork(works: Sequence[Callable[[], None]], world_size: int) -> End:
    for old in [*Path().glob("[0-9].*"), Path("fault")]:
        old.unlink(missing_ok=True)

    def run(index: int) -> None:
        os.setsid()
        sys.stdout = sys.stderr = stream = open(f"{index}.said", "w", buffering=1)  # noqa: SIM115
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        works[index]()

    processes = [multiprocessing.get_context("fork").Process(target=run, args=(index,)) for index in range(len(works))]
    for process in processes:
        process.start()

    def reap() -> list[int]:
        for process in processes:
            process.join()
        return [process.exitcode for process in processes]

    return _watch([process.pid for process in processes], [Path(f"{i}.said") for i in range(len(works))], world_size, reap)


def ranks(work: Callable[[], None], world_size: int = 2) -> End:
    """A process a rank, with the variables that torchrun sets: nothing is imported again, so this is quick."""
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    here |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))

    def run(rank: int) -> None:
        os.environ.update(here, RANK=str(rank), LOCAL_RANK=str(rank))
        work()

    return _fork([partial(run, rank) for rank in range(world_size)], world_size)


def forked_by_lightning(work: Callable[[], None]) -> End:
    """A process in which Lightning forks the ranks. These have no ``on_exception``."""

    def run() -> None:
        # Lightning forks none in a process that was itself forked from one that has looked for a GPU, as that of the tests may have
        torch.cuda._is_in_bad_fork = lambda: False
        work()

    return _fork([run], 2)


# --- what they train ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Something that happens to ranks.

    Attributes:
        what: "raises"; or the name of a signal that a rank sends to itself, or to "SIGTERM to all" of its processes; or it "waits"
            for SIGTERM.
        at: the batch or step, for each rank that it happens to.
        where: the hook of the module; "load" for its loader; "save" or "saved" for before or after it has written its part of a
            distributed checkpoint.
    """

    what: str
    at: dict[int, int]
    where: str = "training_step"

    def __call__(self, where: str, rank: int, index: int) -> None:
        if where != self.where or self.at.get(rank) != index:
            return
        Path("fault").write_text(str(time.time()))
        if self.what == "raises":
            raise ValueError(f"boom on rank {rank}")
        if self.what == "waits":
            _wait_for_sigterm(Path(f"{rank}.waits"))
        elif self.what == "SIGTERM to all":
            os.killpg(os.getpgrp(), signal.SIGTERM)
        else:
            os.kill(os.getpid(), signal.Signals[self.what])


def _wait_for_sigterm(file: Path) -> None:
    told, handler = [], signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *arguments: (told.append(1), handler(*arguments)))
    file.touch()
    end = time.monotonic() + DEADLINE
    while not told and time.monotonic() < end:
        time.sleep(0.01)
    signal.signal(signal.SIGTERM, handler)


class Batches(Dataset):
    def __init__(self, batches: Sequence[Any], rank: int, fault: Fault) -> None:
        self.batches, self.rank, self.fault = batches, rank, fault

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        self.fault("load", self.rank, index)
        return self.batches[index]


class Unsized(IterableDataset):
    """Batches that nobody knows the number of."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return (self.batches[index] for index in range(len(self.batches)))


class WithFaults:
    """Something happens in a hook."""

    seen = 0
    has_ended = False
    fault: Fault
    is_sized: bool
    options: dict[str, Any]
    """Of the loader."""

    def setup(self, stage: str) -> None:
        self.fault("setup", self.global_rank, 0)

    def configure_optimizers(self) -> Any:
        self.fault("configure_optimizers", self.global_rank, 0)
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        self.fault("training_step", self.global_rank, batch_idx)
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fault("on_before_optimizer_step", self.global_rank, self.global_step)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fault("validation_step", self.global_rank, batch_idx)
        self.log("val_loss", self.loss(batch))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.fault("on_save_checkpoint", self.global_rank, self.global_step)

    def train_dataloader(self) -> DataLoader:
        rank = self.trainer.global_rank
        batches = Batches(self.by_rank[rank % len(self.by_rank)], rank, self.fault)
        return DataLoader(batches if self.is_sized else Unsized(batches), batch_size=None, **self.options)

    def val_dataloader(self) -> DataLoader:
        return loader([x(1), x(2), x(3)])


class Faulty(WithFaults, Scalar):
    pass


class ShardedFaulty(WithFaults, ShardedScalar):
    pass


WINDOW = 4
BATCHES = [[x(i) for i in range(12)], [x(i, 3 * i) for i in range(12)]]


def parameter_after(windows: int, by_rank: Sequence[Sequence[Any]] = BATCHES) -> float:
    """The gradient of a window is the mean of all its numbers, of both ranks."""
    parts = [torch.cat([v for batches in by_rank for v in batches[i * WINDOW : (i + 1) * WINDOW]]) for i in range(windows)]
    return -sum(part.mean().item() for part in parts)


fsdp2_as_torchrun = partial(ModelParallelAccumulationStrategy, data_parallel_size=2, tensor_parallel_size=1)
STRATEGIES: dict[str, Callable[..., Any]] = {
    "ddp": DDPAccumulationStrategy,
    "fsdp1": FSDPAccumulationStrategy,
    "fsdp2": fsdp2_as_torchrun,
    "fsdp2, checkpoints in one file": partial(fsdp2_as_torchrun, save_distributed_checkpoint=False),
    "fsdp2, tensor parallel": partial(ModelParallelAccumulationStrategy, data_parallel_size=2, tensor_parallel_size=2),
    "ddp, forked": ddp,
    "fsdp2, forked": fsdp2,
}


def train(
    strategy: str,
    fault: Fault,
    by_rank: Sequence[Sequence[Any]] = BATCHES,
    is_sized: bool = True,
    options: dict[str, Any] | None = None,
    devices: int = 2,
    timeout: float = TIMEOUT,
    **kwargs: Any,
) -> None:
    torch.set_num_threads(1)
    module = (ShardedFaulty if "fsdp" in strategy else Faulty)(by_rank=by_rank)
    module.fault, module.is_sized, module.options = fault, is_sized, options or {}
    if strategy == "fsdp1":
        kwargs["plugins"] = [DoublePrecision()]
    kwargs["callbacks"] = [Notes(), *kwargs.get("callbacks", [])]
    kwargs = {"accumulate_grad_batches": WINDOW, "limit_val_batches": 0, **kwargs}
    trainer(STRATEGIES[strategy](timeout=timedelta(seconds=timeout)), devices=devices, **kwargs).fit(module)


def strategies(*names: str) -> Any:
    marks = [[needs_sharding_on_cpu] * ("fsdp" in name) + [pytest.mark.slow] * ("one file" in name) for name in names]
    return pytest.mark.parametrize("strategy", [pytest.param(n, marks=m) for n, m in zip(names, marks, strict=True)])


SCRIPT = """
import json
import sys

import test_faults

if __name__ == "__main__":
    strategy, what, at = sys.argv[1:]
    fault = test_faults.Fault(what, {int(rank): batch for rank, batch in json.loads(at).items()})
    test_faults.train(strategy, fault, timeout=60)  # the second rank's imports may come much later
"""


def script(*launcher: str, strategy: str, fault: Fault, meanwhile: Callable[[int], None] = lambda pid: None) -> End:
    """A new interpreter, in which Lightning starts the second rank, or with torchrun in front both are started."""
    Path("script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "script.py", strategy, fault.what, json.dumps(fault.at)]
    with open("0.said", "w") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
    try:
        meanwhile(process.pid)
    finally:
        end = _watch([process.pid], [Path("0.said")], 2, lambda: [process.wait()])
    return end


VALIDATING = {"limit_val_batches": 3, "num_sanity_val_steps": 0}
WORKER = {"num_workers": 1, "multiprocessing_context": "fork"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")

# --- a rank raises ------------------------------------------------------------------------------------------------------

TOLD = "RankFailedError: Rank {0} failed first, with ValueError: boom on rank {0}. This rank could not go on without it ("
COMMUNICATION = ("RuntimeError: ", "Dist")


def assert_failed(end: End, rank: int) -> None:
    assert 0 not in end.statuses, end
    assert end.was_soon(), end
    for other, note in enumerate(end.notes):
        if other == rank:
            assert note["ended_with"] == f"ValueError: boom on rank {rank}"
        elif rank == 0:  # the store that the error is noted in may have gone with it
            assert note["ended_with"].startswith((TOLD.format(0), *COMMUNICATION)), end
        else:
            assert note["ended_with"].startswith(TOLD.format(rank)), end


@pytest.mark.some_cases(3)
@strategies("ddp", "fsdp1", "fsdp2")
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_raises_in_the_middle_of_a_window_ends_all_and_is_named(strategy: str, rank: int) -> None:
    end = ranks(partial(train, strategy, Fault("raises", {rank: 6})))
    assert_failed(end, rank)
    assert end.all("step") == 1


@pytest.mark.some_cases(1)
@strategies("ddp", "fsdp2")
@pytest.mark.parametrize(("where", "rank"), [("setup", 1), ("configure_optimizers", 0), ("configure_optimizers", 1)])
def test_rank_that_raises_before_training_ends_all_and_is_named(strategy: str, where: str, rank: int) -> None:
    assert_failed(ranks(partial(train, strategy, Fault("raises", {rank: 0}, where))), rank)


def test_forked_rank_that_raises_before_training_is_named() -> None:
    end = forked_by_lightning(partial(train, "ddp, forked", Fault("raises", {1: 0}, "setup")))
    assert end.statuses == [1]
    assert "ValueError: boom on rank 1" in end.said[0]


def test_all_other_ranks_name_the_one_that_raised() -> None:
    assert_failed(ranks(partial(train, "ddp", Fault("raises", {2: 2}), devices=3), world_size=3), 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "launcher", [(), pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["Lightning's own launcher", "torchrun"]
)
def test_script_whose_rank_raises_ends_and_names_it(launcher: tuple[str, ...]) -> None:
    end = script(*launcher, strategy="ddp", fault=Fault("raises", {1: 2}))
    assert_failed(end, 1)
    assert re.search(r"^\[rank0\]: .*" + re.escape(TOLD.format(1)), end.said[0], re.MULTILINE)
    assert re.search(r"^\[rank1\]: ValueError: boom on rank 1$", end.said[0], re.MULTILINE)


@pytest.mark.some_cases(3)
@strategies("ddp, forked", "fsdp2, forked")
@pytest.mark.parametrize("rank", [0, 1])
def test_forked_rank_that_raises_ends_all_and_is_named(strategy: str, rank: int) -> None:
    end = forked_by_lightning(partial(train, strategy, Fault("raises", {rank: 2})))
    assert end.statuses == [1]
    if rank == 1:  # of rank 0's error its peer may know only that the connection ended, and be the first that Lightning sees ended
        assert "ValueError: boom on rank 1" in end.said[0]


@pytest.mark.some_cases(1)
@strategies("ddp", "fsdp2")
def test_rank_that_raises_in_validation_ends_all_and_is_named(strategy: str) -> None:
    fault = Fault("raises", {1: 1}, "validation_step")
    assert_failed(ranks(partial(train, strategy, fault, **VALIDATING, val_check_interval=6)), 1)


@pytest.mark.some_cases(2)
@strategies("ddp", "fsdp2")
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_is_killed_ends_all(strategy: str, rank: int) -> None:
    end = ranks(partial(train, strategy, Fault("SIGKILL", {rank: 2})))
    assert (end.statuses[rank], end.statuses[1 - rank]) == (-signal.SIGKILL, 1)
    assert end.was_soon()
    assert end.notes[1 - rank]["ended_with"].startswith(COMMUNICATION)


@pytest.mark.slow
def test_rank_that_does_not_come_ends_all_within_the_time_out_of_the_process_group() -> None:
    class Sleeps(Fault):
        def __call__(self, where: str, rank: int, index: int) -> None:
            if where == "training_step" and self.at.get(rank) == index:
                Path("fault").write_text(str(time.time()))
                time.sleep(10)

    end = ranks(partial(train, "ddp", Sleeps("", {1: 2}), timeout=5.0))
    assert end.statuses == [1, 1]
    assert end.notes[0]["time"] - end.fault < 5 + SOON / 2
    assert all(note["ended_with"].startswith(COMMUNICATION) for note in end.notes), end


@pytest.mark.parametrize("message", ["Application timeout caused pair closure", "Timed out waiting 1800000ms for recv operation"])
def test_time_out_of_a_rank_that_waited_is_not_taken_for_the_first_failure(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    note_failure(RuntimeError(message), 0)
    assert first_failure() is None


# --- a loader raises ----------------------------------------------------------------------------------------------------


@pytest.mark.some_cases(2)
@strategies("ddp", "fsdp2")
@pytest.mark.parametrize("rank", [0, 1])
def test_loader_that_raises_on_one_rank_ends_all_and_is_named(strategy: str, rank: int) -> None:
    end = ranks(partial(train, strategy, Fault("raises", {rank: 6}, "load")))
    assert_failed(end, rank)
    assert end.all("step") == 1


@pytest.mark.some_cases(1)
@strategies("ddp", "fsdp1", "fsdp2")
@pytest.mark.parametrize("rank", [0, 1])
def test_loader_of_unknown_length_that_raises_is_named_by_all_ranks(strategy: str, rank: int) -> None:
    end = ranks(partial(train, strategy, Fault("raises", {rank: 6}, "load"), is_sized=False))
    assert (end.statuses, end.was_soon()) == ([1, 1], True)
    assert end.notes[rank]["ended_with"] == f"ValueError: boom on rank {rank}"
    told = f"RankFailedError: The loader of rank {rank} failed, with ValueError: boom on rank {rank}. No rank goes on without it."
    assert end.notes[1 - rank]["ended_with"] == told
    assert end.all("step") == 1


@pytest.mark.parametrize("is_sized", [True, False])
def test_worker_of_a_loader_that_raises_ends_all_and_is_named(is_sized: bool) -> None:
    end = ranks(partial(train, "ddp", Fault("raises", {1: 6}, "load"), is_sized=is_sized, options=WORKER))
    assert (end.statuses, end.was_soon()) == ([1, 1], True)
    for note in end.notes:
        assert "ValueError: Caught ValueError in DataLoader worker process 0" in note["ended_with"]
        assert "ValueError: boom on rank 1" in note["ended_with"]
    assert end.notes[0]["ended_with"].startswith("RankFailedError: ")


# --- SIGTERM ------------------------------------------------------------------------------------------------------------


def assert_ended_together(end: End, windows: int, by_rank: Sequence[Sequence[Any]] = BATCHES, rel: float = 1e-15) -> None:
    """All ranks have stepped for so many windows, and no rank has begun another."""
    assert end.all("ended_with") == "SIGTERMException", end
    assert end.all("step") == windows
    assert end.all("w") == pytest.approx(parameter_after(windows, by_rank), rel=rel)
    assert end.was_soon(), end


TOLD_RANKS = pytest.mark.parametrize("told", [(1,), (0,), (0, 1)], ids=["rank 1", "rank 0", "both ranks"])


@pytest.mark.some_cases(4)
@strategies("ddp", "fsdp1", "fsdp2")
@TOLD_RANKS
def test_sigterm_ends_all_ranks_after_the_window(strategy: str, told: tuple[int, ...]) -> None:
    end = ranks(partial(train, strategy, Fault("SIGTERM", dict.fromkeys(told, 5))))
    assert_ended_together(end, windows=2)
    assert end.statuses == [0, 0]
    assert end.all("batches") == 8


@pytest.mark.parametrize("where", ["setup", "configure_optimizers"])
def test_sigterm_to_a_rank_before_training_ends_all_and_is_named(where: str) -> None:
    end = ranks(partial(train, "ddp", Fault("SIGTERM", {1: 0}, where)))
    assert end.statuses == [1, 128 + signal.SIGTERM]
    assert end.was_soon()
    told = r"RankFailedError: Rank 1 failed first, with [\w.]*SIGTERMException: SIGTERM came before training began\. "
    assert re.match(told, end.notes[0]["ended_with"])


@pytest.mark.some_cases(4)
@strategies("ddp", "fsdp1", "fsdp2")
@TOLD_RANKS
def test_sigterm_ends_all_ranks_before_the_next_batch_of_loaders_of_unknown_length(strategy: str, told: tuple[int, ...]) -> None:
    end = ranks(partial(train, strategy, Fault("SIGTERM", dict.fromkeys(told, 5)), is_sized=False))
    assert_ended_together(end, windows=1)
    assert end.statuses == [0, 0]
    assert end.all("batches") == 6


@needs_sharding_on_cpu
def test_sigterm_ends_all_ranks_beside_tensor_parallelism() -> None:
    by_rank = [BATCHES[0], BATCHES[0], BATCHES[1], BATCHES[1]]
    end = ranks(partial(train, "fsdp2, tensor parallel", Fault("SIGTERM", {3: 5}), by_rank, devices=4), world_size=4)
    assert_ended_together(end, windows=1)
    assert end.all("batches") == 6


@pytest.mark.exhaustive
def test_script_of_lightnings_own_launcher_ends_by_sigterm() -> None:
    end = script(strategy="ddp", fault=Fault("SIGTERM", {1: 5}))
    assert_ended_together(end, windows=2)


@pytest.mark.exhaustive
@needs_sharding_on_cpu
def test_sigterm_to_torchrun_ends_all_ranks_after_the_window() -> None:
    def tell(pid: int) -> None:
        end = time.monotonic() + DEADLINE
        while len(list(Path().glob("[01].waits"))) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(pid, signal.SIGTERM)

    end = script(*TORCHRUN, strategy="fsdp2", fault=Fault("waits", {0: 5, 1: 6}), meanwhile=tell)
    assert_ended_together(end, windows=2)


@strategies("ddp, forked", "fsdp2, forked")
def test_sigterm_to_the_process_that_forked_the_ranks_ends_all(strategy: str) -> None:
    class Told(Fault):
        def __call__(self, where: str, rank: int, index: int) -> None:
            if where == "training_step" and self.at.get(rank) == index:
                os.kill(os.getppid(), signal.SIGTERM)
                time.sleep(1)

    end = forked_by_lightning(partial(train, strategy, Told("", {1: 5})))
    assert end.statuses == [-signal.SIGTERM]


@strategies("ddp, forked", "fsdp2, forked")
def test_sigterm_to_a_forked_rank_ends_the_process_that_forked_it_too(strategy: str) -> None:
    """With status 0, as Lightning has it, that process would wait for a result for ever."""
    end = forked_by_lightning(partial(train, strategy, Fault("SIGTERM", {1: 5})))
    assert end.statuses == [1]
    assert "exit code 143" in end.said[0]


@pytest.mark.some_cases(3)
@pytest.mark.parametrize(
    ("told", "windows"),
    [({0: 1, 1: 3}, 1), ({0: 3, 1: 2}, 1), ({0: 6, 1: 1}, 1), ({0: 7, 1: 4}, 2), ({1: 11}, 3)],
    ids=["two batches", "the last batch of the window", "the next window too late", "both ends of a window", "the last window"],
)
def test_first_sigterm_counts_whatever_batch_the_ranks_are_at(told: dict[int, int], windows: int) -> None:
    assert_ended_together(ranks(partial(train, "ddp", Fault("SIGTERM", told))), windows)


@pytest.mark.some_cases(2)
@strategies("ddp", "fsdp2")
@pytest.mark.parametrize("told", [(0,), (0, 1)], ids=["rank 0", "both ranks"])
def test_sigterm_after_the_weights_were_sent_ends_all_ranks_after_the_next_window(strategy: str, told: tuple[int, ...]) -> None:
    fault = Fault("SIGTERM", dict.fromkeys(told, 0), "on_before_optimizer_step")
    assert_ended_together(ranks(partial(train, strategy, fault)), windows=2)


@pytest.mark.some_cases(1)
@strategies("ddp", "fsdp2")
def test_sigterm_that_no_window_is_left_for_ends_its_rank_after_the_training(strategy: str) -> None:
    end = ranks(partial(train, strategy, Fault("SIGTERM", {1: 2}, "on_before_optimizer_step")))
    assert [note["ended_with"] for note in end.notes] == ["", "SIGTERMException"]
    assert (end.statuses, end.all("step"), end.was_soon()) == ([0, 0], 3, True)


@pytest.mark.some_cases(1)
@strategies("ddp", "fsdp2")
def test_sigterm_to_a_rank_that_ran_out_of_batches_ends_all_ranks_after_the_window(strategy: str) -> None:
    by_rank = [BATCHES[0], BATCHES[1][:5]]
    assert_ended_together(ranks(partial(train, strategy, Fault("SIGTERM", {1: 6}), by_rank)), 2, by_rank)


@pytest.mark.some_cases(2)
@strategies("ddp", "fsdp2")
@pytest.mark.parametrize("told", [0, 1])
def test_sigterm_between_micro_batches_ends_all_ranks_after_the_window(strategy: str, told: int) -> None:
    callbacks = [GradientAccumulation(WINDOW, micro_batch=1)]
    work = partial(train, strategy, Fault("SIGTERM", {told: 5}), callbacks=callbacks, accumulate_grad_batches=1)
    assert_ended_together(ranks(work), windows=2, rel=1e-14)  # the sums are of twice as many parts


def ignore_sigterm(worker: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@pytest.mark.parametrize("is_sized", [True, False])
def test_sigterm_to_the_workers_of_a_loader_too_ends_all_ranks_in_order(is_sized: bool) -> None:
    """Torchrun sends it to a rank's whole group of processes.

    Workers have to leave it alone: one that dies while it hands a batch over may leave torch's DataLoader waiting for ever.
    """
    fault = Fault("SIGTERM to all", {0: 5, 1: 5})
    end = ranks(partial(train, "ddp", fault, is_sized=is_sized, options={**WORKER, "worker_init_fn": ignore_sigterm}))
    assert_ended_together(end, windows=2 if is_sized else 1)


# --- SIGTERM and validation ---------------------------------------------------------------------------------------------


@pytest.mark.some_cases(4)
@strategies("ddp", "fsdp2")
@pytest.mark.parametrize("told", [(1,), (0, 1)], ids=["rank 1", "both ranks"])
@pytest.mark.parametrize("interval", [4, 6])
def test_sigterm_in_validation_ends_all_ranks_after_the_next_window(strategy: str, told: tuple[int, ...], interval: int) -> None:
    fault = Fault("SIGTERM", dict.fromkeys(told, 1), "validation_step")
    assert_ended_together(ranks(partial(train, strategy, fault, **VALIDATING, val_check_interval=interval)), windows=2)


@pytest.mark.some_cases(2)
@strategies("ddp", "fsdp2")
@pytest.mark.parametrize("interval", [2, 4])
def test_sigterm_before_a_validation_ends_all_ranks_after_the_window(strategy: str, interval: int) -> None:
    end = ranks(partial(train, strategy, Fault("SIGTERM", {1: 1}), **VALIDATING, val_check_interval=interval))
    assert_ended_together(end, windows=1)


@strategies("ddp", "fsdp2")
def test_sigterm_in_the_sanity_check_ends_all_ranks_after_the_first_window(strategy: str) -> None:
    fault = Fault("SIGTERM", {1: 0}, "validation_step")
    assert_ended_together(ranks(partial(train, strategy, fault, limit_val_batches=3)), windows=1)


# --- checkpoints --------------------------------------------------------------------------------------------------------


def load(path: Path) -> tuple[int, float]:
    """The optimizer steps and the parameter of a checkpoint."""
    checkpoint = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=False)
    if path.is_dir():
        dcp_to_torch_save(path, "whole.pt")
        checkpoint |= torch.load("whole.pt", weights_only=False)
    (parameter,) = checkpoint["state_dict"].values()
    return checkpoint["global_step"], parameter.item()


@pytest.mark.some_cases(4)
@strategies("ddp", "fsdp2", "fsdp2, checkpoints in one file")
@pytest.mark.parametrize(
    ("fault", "steps"),
    [
        (Fault("SIGTERM", {1: 6}), {1, 2}),
        (Fault("raises", {1: 6}), {1}),
        (Fault("SIGTERM", {1: 2}, "on_save_checkpoint"), {1, 2, 3}),
        (Fault("raises", {0: 2}, "on_save_checkpoint"), {1}),
        (Fault("raises", {1: 2}, "on_save_checkpoint"), {1}),
        (Fault("SIGKILL", {1: 2}, "on_save_checkpoint"), {1}),
    ],
    ids=lambda value: f"{value.what}, rank {next(iter(value.at))}, {value.where}" if isinstance(value, Fault) else "",
)
def test_every_checkpoint_that_is_there_is_whole(strategy: str, fault: Fault, steps: set[int]) -> None:
    every_step = ModelCheckpoint("checkpoints", "{step}", every_n_train_steps=1, save_top_k=-1)
    end = ranks(partial(train, strategy, fault, callbacks=[every_step], enable_checkpointing=True))
    assert end.was_soon()
    found = dict(load(path) for path in Path("checkpoints").glob("*.ckpt"))
    # of data-parallel ranks the first writes alone, and may have done so when another fails
    assert steps <= set(found) <= steps | ({2} if strategy == "ddp" else set())
    assert found == pytest.approx({step: parameter_after(step) for step in found}, rel=1e-15)


@strategies("ddp", "fsdp2")
def test_sigterm_saves_a_whole_checkpoint_where_one_is_asked_for(strategy: str) -> None:
    asked = ModelCheckpoint("checkpoints", "{step}", every_n_train_steps=100, save_on_exception=True)
    end = ranks(partial(train, strategy, Fault("SIGTERM", {1: 5}), callbacks=[asked], enable_checkpointing=True))
    assert_ended_together(end, windows=2)
    assert [load(path) for path in Path("checkpoints").iterdir()] == [(2, pytest.approx(parameter_after(2), rel=1e-15))]


class SavesEveryWindow(pl.Callback):
    """Under the same name."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready % WINDOW == 0:
            trainer.save_checkpoint("same.ckpt")


def save_with(fault: Fault) -> None:
    write = dcp.save

    def save(*arguments: Any, **kwargs: Any) -> Any:
        fault("save", dist.get_rank(), saved.append(1) or len(saved))
        result = write(*arguments, **kwargs)
        fault("saved", dist.get_rank(), len(saved))
        return result

    saved: list[int] = []
    dcp.save = save
    train("fsdp2", fault, callbacks=[SavesEveryWindow()])


@needs_sharding_on_cpu
@pytest.mark.parametrize(
    ("what", "where", "rank"),
    [
        ("raises", "save", 0),
        ("raises", "saved", 1),
        pytest.param("SIGKILL", "saved", 0, marks=pytest.mark.exhaustive),
        pytest.param("SIGKILL", "save", 1, marks=pytest.mark.slow),
    ],
)
def test_distributed_checkpoint_that_a_rank_fails_in_leaves_the_old_one(what: str, where: str, rank: int) -> None:
    end = ranks(partial(save_with, Fault(what, {rank: 1}, where)))
    assert 0 not in end.statuses
    assert not Path("same.ckpt").exists()
    end = ranks(partial(save_with, Fault(what, {rank: 2}, where)))
    assert 0 not in end.statuses
    assert end.was_soon()
    assert load(Path("same.ckpt")) == (1, pytest.approx(parameter_after(1), rel=1e-15))
    end = ranks(partial(save_with, Fault("", {})))
    assert end.statuses == [0, 0]
    assert load(Path("same.ckpt")) == (3, pytest.approx(parameter_after(3), rel=1e-15))
    assert [path.name for path in Path().glob("*same*")] == ["same.ckpt"]  # and nothing of those before
