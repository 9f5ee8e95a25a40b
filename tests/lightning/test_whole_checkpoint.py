"""Whatever fails while a checkpoint is written, there is the old one or the new one, and no half."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import run_ranks

from lightning_accum.checkpointing import whole as whole_checkpoint
from lightning_accum.checkpointing.whole import atomic_checkpoint


class Barrier:
    """Counts how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def write_folder(path: Path, text: str) -> None:
    path.mkdir()
    (path / "shard").write_text(text)


def write_file(path: Path, text: str) -> None:
    path.write_text(text)


def read(path: Path) -> str:
    return (path / "shard").read_text() if path.is_dir() else path.read_text()


WRITERS = pytest.mark.parametrize("write", [write_folder, write_file])
OLD_WRITERS = pytest.mark.parametrize("write_old", [write_folder, write_file])


@WRITERS
def test_new_checkpoint_appears_when_it_is_whole(write, tmp_path: Path) -> None:
    path, barrier = tmp_path / "not" / "there" / "a.ckpt", Barrier()
    with atomic_checkpoint(path, True, barrier) as partial:
        write(partial, "new")
        assert partial.parent == path.parent
        assert barrier.calls == 1
        assert not path.exists()
    assert read(path) == "new"
    assert os.listdir(path.parent) == ["a.ckpt"]
    assert barrier.calls == 3


@WRITERS
@OLD_WRITERS
def test_old_checkpoint_is_replaced(write, write_old, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_old(path, "old")
    with atomic_checkpoint(path, True, Barrier()) as partial:
        write(partial, "new")
        assert read(path) == "old"
    assert read(path) == "new"
    assert os.listdir(tmp_path) == ["a.ckpt"]


@WRITERS
def test_link_is_replaced_and_what_it_points_to_stays(write, tmp_path: Path) -> None:
    write_folder(tmp_path / "epoch=1.ckpt", "epoch 1")
    path = tmp_path / "last.ckpt"
    path.symlink_to("epoch=1.ckpt")
    with atomic_checkpoint(path, True, Barrier()) as partial:
        write(partial, "new")
    assert (read(path), path.is_symlink()) == ("new", False)
    assert read(tmp_path / "epoch=1.ckpt") == "epoch 1"
    assert sorted(os.listdir(tmp_path)) == ["epoch=1.ckpt", "last.ckpt"]


@WRITERS
@OLD_WRITERS
def test_old_checkpoint_stays_when_the_body_raises(write, write_old, tmp_path: Path) -> None:
    path, barrier, error = tmp_path / "a.ckpt", Barrier(), KeyboardInterrupt()
    write_old(path, "old")

    def fail() -> None:
        with atomic_checkpoint(path, True, barrier) as partial:
            write(partial, "half")
            raise error

    with pytest.raises(KeyboardInterrupt) as raised:
        fail()
    assert raised.value is error
    assert read(path) == "old"
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert barrier.calls == 1  # the other ranks may be gone


def test_no_checkpoint_when_another_rank_does_not_come_to_the_barrier(tmp_path: Path) -> None:
    calls = []

    def barrier() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="Connection closed"), atomic_checkpoint(tmp_path / "a.ckpt", True, barrier) as partial:
        write_folder(partial, "half")
    assert os.listdir(tmp_path) == []


def test_other_ranks_name_and_delete_nothing(tmp_path: Path) -> None:
    path, barrier = tmp_path / "a.ckpt", Barrier()
    write_folder(path, "old")
    with atomic_checkpoint(path, False, barrier) as partial:
        write_folder(partial, "new")
    assert (read(path), read(partial), barrier.calls) == ("old", "new", 3)


def test_nothing_written_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path, barrier = tmp_path / "a.ckpt", Barrier()
    write_folder(path, "old")
    with atomic_checkpoint(path, True, barrier):
        pass
    assert (read(path), os.listdir(tmp_path), barrier.calls) == ("old", ["a.ckpt"], 3)


@WRITERS
@OLD_WRITERS
def test_what_an_earlier_crash_left_is_not_mixed_in(write, write_old, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    with atomic_checkpoint(path, False, Barrier()) as partial:
        write_old(partial, "left over")
    with atomic_checkpoint(path, True, Barrier()) as again:
        assert again == partial
        assert not partial.exists()
        write(partial, "new")
    assert (read(path), os.listdir(tmp_path)) == ("new", ["a.ckpt"])


class Died(BaseException):
    pass


@pytest.mark.parametrize("last", range(3))
def test_at_every_move_the_old_or_the_new_checkpoint_is_whole(last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, moves, replace, delete = tmp_path / "a.ckpt", [], os.replace, whole_checkpoint._delete
    write_folder(path, "old")

    def move_until_dead(*arguments) -> None:
        if len(moves) == last:
            raise Died
        moves.append(arguments)
        replace(*arguments)

    def write() -> None:
        with atomic_checkpoint(path, True, Barrier()) as partial:
            write_folder(partial, "new")
            monkeypatch.setattr(os, "replace", move_until_dead)
            monkeypatch.setattr(whole_checkpoint, "_delete", lambda path: None)  # nor does a dead process delete

    if last < 2:
        with pytest.raises(Died):
            write()
    else:
        write()
    assert len(moves) == last
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(whole_checkpoint, "_delete", delete)
    assert {read(tmp_path / name) for name in os.listdir(tmp_path)} == {"old", "new"}
    with atomic_checkpoint(path, True, Barrier()):
        pass
    assert (read(path), os.listdir(tmp_path)) == ("new" if last == 2 else "old", ["a.ckpt"])


def test_old_checkpoint_is_put_back_when_the_new_one_cannot_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, replace = tmp_path / "a.ckpt", os.replace
    write_folder(path, "old")

    def refuse_the_new(source: Path, target: Path) -> None:
        if source.name.endswith(".partial"):
            raise OSError("no permission")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse_the_new)
    with pytest.raises(OSError, match="no permission"), atomic_checkpoint(path, True, Barrier()) as partial:
        write_folder(partial, "new")
    assert read(path) == "old"


def test_lightning_takes_no_partial_for_a_checkpoint(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

    for name in ("hpc_ckpt_2.ckpt", "last.ckpt"):
        with atomic_checkpoint(tmp_path / name, False, Barrier()) as partial:
            write_folder(partial, "half")
        assert partial.name.startswith(".")
    assert _CheckpointConnector._CheckpointConnector__max_ckpt_version_in_folder(tmp_path, "hpc_ckpt_") is None
    callback = ModelCheckpoint(dirpath=tmp_path)
    assert callback._find_last_checkpoints(None) == set()


# --- two processes ----------------------------------------------------------------------------------------------------


def state(rank: int) -> dict[str, torch.Tensor]:
    return {f"shard_{rank}": torch.arange(5.0) + 10 * rank, "shared": torch.ones(3)}


def test_two_ranks_load_what_they_saved() -> None:
    path = Path("a.ckpt").absolute()

    def work(rank: int) -> None:
        for _ in range(2):  # the second replaces the first
            with atomic_checkpoint(path, rank == 0, dist.barrier) as partial:
                dcp.save(state(rank), checkpoint_id=partial)
            assert path.is_dir()  # on no rank before it is there
            dist.barrier()
        loaded = {name: torch.zeros_like(value) for name, value in state(rank).items()}
        dcp.load(loaded, checkpoint_id=path)
        for name, value in state(rank).items():
            assert torch.equal(loaded[name], value)

    assert run_ranks(work, 2) == ["ended", "ended"]
    assert [name for name in os.listdir() if "a.ckpt" in name] == ["a.ckpt"]


class CannotBeSaved:
    def __reduce__(self) -> str:
        raise ValueError("disk full")


def test_rank_that_raises_inside_of_save_leaves_no_checkpoint() -> None:
    path = Path("a.ckpt").absolute()

    def work(rank: int) -> None:
        with atomic_checkpoint(path, rank == 0, dist.barrier) as partial:
            dcp.save({**state(rank), **({"object": CannotBeSaved()} if rank == 1 else {})}, checkpoint_id=partial)

    for said in run_ranks(work, 2):
        assert said.startswith("CheckpointException: ")
        assert "disk full" in said
    assert [name for name in os.listdir() if "a.ckpt" in name] == []


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("has_old", [True, False])
def test_rank_that_raises_in_the_middle_leaves_no_checkpoint(failing: int, has_old: bool) -> None:
    path = Path("a.ckpt").absolute()
    if has_old:
        write_folder(path, "old")

    def work(rank: int) -> None:
        with atomic_checkpoint(path, rank == 0, dist.barrier) as partial:
            dcp.save(state(rank), checkpoint_id=partial)
            if rank == failing:
                raise ValueError("disk full")

    said = run_ranks(work, 2, leaves_at_once=(failing,))
    assert said[failing] == "ValueError: disk full"
    assert said[1 - failing] != "ended"
    assert [name for name in os.listdir() if "a.ckpt" in name] == ["a.ckpt"] * has_old
    if has_old:
        assert read(path) == "old"
