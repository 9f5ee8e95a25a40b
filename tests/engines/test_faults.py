"""Ranks that raise, die or are told to end, in the middle of a window: all of them end, soon."""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections import UserList
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
from harness import Unsized, windows_of
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from processes import free_port
from sharded import DoublePrecision, ShardedScalar, fsdp2, needs_sharding_on_cpu, whole_parameters
from support import ddp, loader, trainer, x
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import DataLoader

from lightning_accum import DDPAccumulationStrategy, FSDPAccumulationStrategy, GradientAccumulation
from lightning_accum import ModelParallelAccumulationStrategy as FSDP2

SOON = 10.0  # from a fault until all ranks know: they lose a connection, and do not wait for a time-out
DEADLINE = 120.0  # for the processes of a test

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="whether a process has ended is read from /proc")


@dataclass
class End:
    statuses: list[int]  # of the processes that were started here
    said: str  # what they wrote
    notes: list[dict[str, Any]]  # of the ranks, from Notes; empty for a rank that left none

    def all(self, name: str) -> Any:  # what is the same in the notes of all ranks
        first, *others = [note[name] for note in self.notes]
        assert others == [first] * len(others), self.notes
        return first

    def assert_soon(self) -> None:  # all ranks came to their end soon after the fault
        fault = float(Path("fault").read_text())
        assert all(note["time"] - fault < SOON for note in self.notes if note), self


class Notes(pl.Callback):  # a file of each rank, with what it ended with
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


def _running(groups: Sequence[int]) -> list[int]:  # what has not ended of these groups of processes
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if fields[0] != "Z" and int(fields[2]) in groups:
                found.append(int(stat.parent.name))
    return found


def _fork(works: Sequence[Callable[[], None]], world_size: int) -> End:
    """Run each in a process that leads a group of its own, and wait for all that they start, which must end by the deadline."""

    def run(index: int) -> None:
        os.setsid()
        sys.stdout = sys.stderr = stream = open(f"{index}.said", "w", buffering=1)  # noqa: SIM115
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        works[index]()

    processes = [multiprocessing.get_context("fork").Process(target=run, args=(index,)) for index in range(len(works))]
    for process in processes:
        process.start()
    end, leaders = time.monotonic() + DEADLINE, [process.pid for process in processes]
    while (any(process.is_alive() for process in processes) or _running(leaders)) and time.monotonic() < end:
        time.sleep(0.05)
    late = _running(leaders)
    for pid in late:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.join()
    said = "\n".join(path.read_text(errors="replace") for path in sorted(Path().glob("[0-9].said")))
    assert not late, f"{len(late)} processes had not ended after {DEADLINE} s:\n{said[-6000:]}"
    notes = [Path(f"{rank}.json") for rank in range(world_size)]
    read = [json.loads(note.read_text()) if note.exists() else {} for note in notes]
    return End([process.exitcode for process in processes], said, read)


def ranks(work: Callable[[], None], world_size: int = 2, nodes: int = 1) -> End:
    """A process a rank, with the variables that torchrun sets: nothing is imported again, so this is quick."""
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "test"}
    on_node = world_size // nodes
    here |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(on_node)}

    def run(rank: int) -> None:
        os.environ.update(here, RANK=str(rank), LOCAL_RANK=str(rank % on_node), GROUP_RANK=str(rank // on_node))
        work()

    return _fork([partial(run, rank) for rank in range(world_size)], world_size)


def forked_by_lightning(work: Callable[[], None]) -> End:
    """A process in which Lightning forks the ranks. These have no ``on_exception``."""

    def run() -> None:
        # Lightning forks none in a process that was itself forked from one that has looked for a GPU, as that of the tests may have
        torch.cuda._is_in_bad_fork = lambda: False
        work()

    return _fork([run], 2)


@dataclass(frozen=True)
class Fault:
    what: str  # "raises"; or a signal that a rank sends to itself, or "SIGTERM to all" of its processes, or "to parent"
    at: dict[int, int]  # the batch or step, for each rank that it happens to
    where: str = "training_step"  # the hook of the module; "load" for its loader

    def __call__(self, where: str, rank: int, index: int) -> None:
        if where != self.where or self.at.get(rank) != index:
            return
        Path(f"{os.getpid()}.fault").write_text(str(time.time()))
        os.replace(f"{os.getpid()}.fault", "fault")  # whole, also if this process is killed now
        if self.what == "raises":
            raise ValueError(f"boom on rank {rank}")
        if self.what == "SIGTERM to all":
            os.killpg(os.getpgrp(), signal.SIGTERM)
        elif self.what == "SIGTERM to parent":
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(1)
        else:
            os.kill(os.getpid(), signal.Signals[self.what])


class Batches(UserList):  # iterating goes through __getitem__, too
    def __init__(self, batches: Sequence[Any], rank: int, fault: Fault) -> None:
        super().__init__(batches)
        self.rank, self.fault = rank, fault

    def __getitem__(self, index: int) -> Any:
        self.fault("load", self.rank, index)
        return super().__getitem__(index)


class Faulty(ShardedScalar):  # ``is_sized``: its loader, which has these options, has a length
    def __init__(self, by_rank: Any, fault: Fault, is_sized: bool = True, options: dict[str, Any] | None = None) -> None:
        super().__init__(by_rank=by_rank)
        self.fault, self.is_sized, self.options = fault, is_sized, options or {}
        self.seen, self.has_ended = 0, False

    def setup(self, stage: str) -> None:
        self.fault("setup", self.global_rank, 0)

    def configure_optimizers(self) -> Any:
        self.fault("configure_optimizers", self.global_rank, 0)
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        self.fault("training_step", self.global_rank, batch_idx)
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.fault("optimizer_step", self.global_rank, self.global_step)
        super().optimizer_step(*args, **kwargs)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fault("validation_step", self.global_rank, batch_idx)

    def train_dataloader(self) -> DataLoader:
        rank = self.trainer.global_rank
        batches = Batches(self.by_rank[rank % len(self.by_rank)], rank, self.fault)
        return DataLoader(batches if self.is_sized else Unsized(batches), batch_size=None, **self.options)

    def val_dataloader(self) -> DataLoader:
        return loader([x(1), x(2), x(3)])


WINDOW = 4
BATCHES = [[x(i) for i in range(12)], [x(i, 3 * i) for i in range(12)]]
fsdp2_as_torchrun = partial(FSDP2, data_parallel_size=2)
STRATEGIES: dict[str, Callable[..., Any]] = {
    "ddp": DDPAccumulationStrategy,
    "fsdp1": FSDPAccumulationStrategy,
    "fsdp2": partial(fsdp2_as_torchrun, tensor_parallel_size=1),
    "fsdp2, tensor parallel": partial(fsdp2_as_torchrun, tensor_parallel_size=2),
    "ddp, forked": ddp,
    "fsdp2, forked": fsdp2,
}


def train(strategy: str, fault: Fault, by_rank: Any = BATCHES, loader: dict[str, Any] | None = None, **kwargs: Any) -> None:
    torch.set_num_threads(1)
    kwargs["callbacks"] = [Notes(), *kwargs.get("callbacks", [])]
    kwargs = {"devices": 2, "accumulate_grad_batches": WINDOW, "limit_val_batches": 0, **kwargs}
    kwargs["plugins"] = [DoublePrecision()] if strategy == "fsdp1" else None
    made = STRATEGIES[strategy](timeout=timedelta(seconds=20))  # that a collective waits
    trainer(made, **kwargs).fit(Faulty(by_rank, fault, **(loader or {})))


def strategies(*names: str) -> Any:
    cases = [pytest.param(name, marks=[needs_sharding_on_cpu] * ("fsdp" in name)) for name in names]
    return pytest.mark.parametrize("strategy", cases)


VALIDATING = {"limit_val_batches": 3, "num_sanity_val_steps": 0}
UNSIZED = {"loader": {"is_sized": False}}
WORKER = {"num_workers": 1, "multiprocessing_context": "fork"}


@pytest.mark.some_cases(1)
@strategies("ddp", "fsdp2")
def test_two_nodes_without_a_fault_equal_the_full_batch(strategy: str) -> None:
    by_rank = [BATCHES[0], BATCHES[1][:5]]
    end = ranks(partial(train, strategy, Fault("nothing", {}), by_rank, devices=1, num_nodes=2), nodes=2)
    assert (end.statuses, end.all("ended_with"), end.all("step")) == ([0, 0], "", 3)
    assert end.all("w") == pytest.approx(parameter_after(3, by_rank), rel=1e-14)


def assert_failed(end: End, rank: int) -> None:  # all ranks ended with an error, and that of the first is seen
    assert 0 not in end.statuses, end
    assert all(note["ended_with"] for note in end.notes), end
    assert f"boom on rank {rank}" in end.notes[rank]["ended_with"]
    assert f"ValueError: boom on rank {rank}" in end.said
    end.assert_soon()


RAISES: dict[str, tuple[Fault, dict[str, Any]]] = {
    "rank 0 in a window": (Fault("raises", {0: 6}), {}),
    "rank 1 in a window": (Fault("raises", {1: 6}), {}),
    "rank 1 in setup": (Fault("raises", {1: 0}, "setup"), {}),
    "rank 0 in configure_optimizers": (Fault("raises", {0: 0}, "configure_optimizers"), {}),
    "rank 1 in validation": (Fault("raises", {1: 1}, "validation_step"), {**VALIDATING, "val_check_interval": 6}),
    "rank 1 in its loader": (Fault("raises", {1: 6}, "load"), {}),
    "rank 1 in its loader of unknown length": (Fault("raises", {1: 6}, "load"), UNSIZED),
    "rank 1 in a worker, unknown length": (Fault("raises", {1: 6}, "load"), {"loader": {"options": WORKER, "is_sized": False}}),
}


@pytest.mark.some_cases(3, 9)
@strategies("ddp", "fsdp2", "fsdp1")
@pytest.mark.parametrize("case", RAISES)
def test_rank_that_raises_ends_all_and_its_error_is_seen(strategy: str, case: str) -> None:
    fault, kwargs = RAISES[case]
    end = ranks(partial(train, strategy, fault, **kwargs))
    assert_failed(end, next(iter(fault.at)))
    assert end.all("step") == (1 if list(fault.at.values()) == [6] or "validation" in case else 0)


@pytest.mark.some_cases(2, 1)
@strategies("ddp, forked", "fsdp2, forked")
@pytest.mark.parametrize("fault", [Fault("raises", {0: 2}), Fault("raises", {1: 2}), Fault("raises", {1: 0}, "setup")], ids=str)
def test_forked_rank_that_raises_ends_all(strategy: str, fault: Fault) -> None:
    end = forked_by_lightning(partial(train, strategy, fault))
    assert end.statuses == [1]
    # of rank 0's error its peer may know only that the connection ended, and be the first that Lightning sees ended
    if 1 in fault.at:
        assert "ValueError: boom on rank 1" in end.said


@pytest.mark.some_cases(1, 1)
@strategies("ddp", "fsdp2")
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_is_killed_ends_all(strategy: str, rank: int) -> None:
    end = ranks(partial(train, strategy, Fault("SIGKILL", {rank: 2})))
    assert (end.statuses[rank], end.statuses[1 - rank]) == (-signal.SIGKILL, 1)
    assert end.notes[1 - rank]["ended_with"]
    end.assert_soon()


def parameter_after(windows: int, by_rank: Sequence[Sequence[Any]] = BATCHES) -> float:
    """The gradient of a window is the mean of all its numbers, of both ranks."""
    return -sum(torch.stack(window).mean().item() for window in windows_of(by_rank, WINDOW)[:windows])


def assert_ended_together(end: End, windows: int, by_rank: Sequence[Sequence[Any]] = BATCHES) -> None:
    """All ranks have stepped for so many windows, and no rank has begun another."""
    assert end.all("ended_with") == "SIGTERMException", end
    assert end.all("step") == windows
    assert end.all("w") == pytest.approx(parameter_after(windows, by_rank), rel=1e-14)
    end.assert_soon()


def told(where: str = "training_step", **at: int) -> Fault:
    return Fault("SIGTERM", {int(rank.removeprefix("rank")): index for rank, index in at.items()}, where)


ALL_PROCESSES = Fault("SIGTERM to all", {0: 5, 1: 5})
# torchrun tells a rank's whole group of processes. A worker that dies as it hands a batch over may leave torch's DataLoader waiting
IGNORED = {**WORKER, "worker_init_fn": lambda worker: signal.signal(signal.SIGTERM, signal.SIG_IGN)}
SPLIT = {"callbacks": [GradientAccumulation(WINDOW, micro_batch=1)], "accumulate_grad_batches": 1}
ENDS: dict[str, tuple[Fault, int, dict[str, Any]]] = {
    "rank 0": (told(rank0=5), 2, {}),
    "rank 1": (told(rank1=5), 2, {}),
    "rank 1, unknown length": (told(rank1=5), 1, UNSIZED),
    "both ends of a window": (told(rank0=7, rank1=4), 2, {}),
    "the last window": (told(rank1=10), 3, {}),
    "after the weights were sent": (told("optimizer_step", rank0=1, rank1=1), 3, {}),  # step 0 is tried out, too
    "a rank that ran out": (told(rank1=6), 2, {"by_rank": [BATCHES[0], BATCHES[1][:5]]}),
    "rank 1 between micro-batches": (told(rank1=5), 2, SPLIT),
    "workers": (ALL_PROCESSES, 2, {"loader": {"options": IGNORED}}),
    "validation between windows": (told("validation_step", rank1=1), 2, {**VALIDATING, "val_check_interval": 4}),
    "validation in a window": (told("validation_step", rank1=1), 2, {**VALIDATING, "val_check_interval": 6}),
    "before validation in a window": (told(rank1=1), 1, {**VALIDATING, "val_check_interval": 2}),
    "the sanity check": (told("validation_step", rank1=0), 0, {"limit_val_batches": 3}),
}
"""Who is told when, after how many windows all end, and what else the training has."""


@pytest.mark.some_cases(5, 12)
@strategies("ddp", "fsdp2", "fsdp1")
@pytest.mark.parametrize("case", ENDS)
def test_sigterm_ends_all_ranks_after_the_window_or_before_the_next_batch_of_an_unsized_loader(strategy: str, case: str) -> None:
    fault, windows, kwargs = ENDS[case]
    end = ranks(partial(train, strategy, fault, **kwargs))
    if kwargs.get("loader", {}).get("is_sized") is False:
        windows, batches = divmod(end.all("batches"), WINDOW)
        assert (windows, batches) in ((1, 2), (2, 0))  # the batches of a window that is checked are drawn before it
    assert_ended_together(end, windows, kwargs.get("by_rank", BATCHES))
    assert end.statuses == [0, 0]


@needs_sharding_on_cpu
def test_sigterm_ends_all_ranks_beside_tensor_parallelism() -> None:
    end = ranks(
        partial(train, "fsdp2, tensor parallel", told(rank3=5), [*BATCHES[:1] * 2, *BATCHES[1:] * 2], devices=4), world_size=4
    )
    assert_ended_together(end, windows=1)
    assert end.all("batches") == 6


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("where", ["setup", "configure_optimizers"])
def test_sigterm_to_a_rank_before_training_ends_all(where: str) -> None:
    end = ranks(partial(train, "ddp", told(where, rank1=0)))
    assert end.statuses == [1, -signal.SIGTERM]
    end.assert_soon()


@pytest.mark.some_cases(1)
@strategies("ddp", "fsdp2")
def test_sigterm_that_no_window_is_left_for_ends_its_rank_after_the_training(strategy: str) -> None:
    end = ranks(partial(train, strategy, told("optimizer_step", rank1=2)))
    assert [note["ended_with"] for note in end.notes] == ["", "SIGTERMException"]
    assert (end.statuses, end.all("step")) == ([0, 0], 3)
    end.assert_soon()


@pytest.mark.some_cases(1, 2)
@strategies("ddp, forked", "fsdp2, forked")
@pytest.mark.parametrize(("what", "status"), [("SIGTERM to parent", -signal.SIGTERM), ("SIGTERM", 1)])
def test_sigterm_to_a_forked_rank_or_to_what_forked_it_ends_all(strategy: str, what: str, status: int) -> None:
    """If a rank ended with status 0, as Lightning has it, the process that forked it would wait for a result for ever."""
    assert forked_by_lightning(partial(train, strategy, Fault(what, {1: 5}))).statuses == [status]


@pytest.mark.some_cases(1)
@strategies("ddp", "fsdp2")
def test_sigterm_saves_a_checkpoint_if_one_is_asked_for(strategy: str) -> None:
    asked = ModelCheckpoint("checkpoints", "{step}", every_n_train_steps=100, save_on_exception=True)
    assert_ended_together(ranks(partial(train, strategy, told(rank1=5), callbacks=[asked], enable_checkpointing=True)), windows=2)
    (path,) = Path("checkpoints").iterdir()
    checkpoint = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=False)
    if path.is_dir():
        dcp_to_torch_save(path, "whole.pt")
        checkpoint |= torch.load("whole.pt", weights_only=False)
    (parameter,) = checkpoint["state_dict"].values()
    assert (checkpoint["global_step"], parameter.item()) == (2, pytest.approx(parameter_after(2), rel=1e-14))
