"""Checkpoints of sharded modules under a URL: whole, or not at all, and gone on from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from sharded import ShardedLanguage, fsdp2, needs_sharding_on_cpu
from support import language_loss, loader, pad, relative_error, sentences, trainer
from torch import Tensor

from lightning_accum.checkpointing.remote import LAST, Remote, local_path


class Bucket(DirFileSystem):
    """A remote file system that is a folder, for all processes of a test. It may fail at one of its changes."""

    protocol = "bucket"
    cachable = False
    changes_left: int | None = None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(path=os.environ["BUCKET"], fs=LocalFileSystem(auto_mkdir=True), **kwargs)

    @classmethod
    def _change(cls) -> None:
        if cls.changes_left is not None:
            cls.changes_left -= 1
            if cls.changes_left < 0:
                raise KeyboardInterrupt  # as if the process had been killed here: nothing it does afterwards succeeds

    def put_file(self, *args: Any, **kwargs: Any) -> Any:
        self._change()
        return super().put_file(*args, **kwargs)

    def cp_file(self, *args: Any, **kwargs: Any) -> Any:
        self._change()
        return super().cp_file(*args, **kwargs)

    def rm_file(self, *args: Any, **kwargs: Any) -> Any:
        self._change()
        return super().rm_file(*args, **kwargs)

    def rm(self, *args: Any, **kwargs: Any) -> Any:
        self._change()
        return super().rm(*args, **kwargs)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("BUCKET", str(tmp_path / "bucket"))
    (tmp_path / "bucket").mkdir()
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    yield tmp_path / "bucket"
    Bucket.changes_left = None


def remote(tmp_path: Path, url: str = "bucket://runs/a.ckpt") -> Remote:
    return Remote(url, tmp_path / "local", True, True, lambda: None)


def write(tmp_path: Path, text: str, is_folder: bool) -> None:
    with remote(tmp_path).written_whole() as local:
        if is_folder:
            local.mkdir()
            for name in ("0.distcp", "1.distcp", LAST):
                (local / name).write_text(text)
        else:
            local.write_text(text)


def write_half(tmp_path: Path) -> None:
    with remote(tmp_path).written_whole() as local:
        local.write_text("half")
        raise ValueError("full disk")


def read(path: Path) -> str:
    """What a checkpoint holds; empty where it is none."""
    if path.is_file():
        return path.read_text()
    return "".join(sorted({file.read_text() for file in path.iterdir()})) if (path / LAST).is_file() else ""


IS_FOLDER = pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])


@IS_FOLDER
def test_new_checkpoint_takes_the_place_of_the_old_one(is_folder: bool, tmp_path: Path, bucket: Path) -> None:
    for text in ("old", "new"):
        write(tmp_path, text, is_folder)
        assert read(bucket / "runs" / "a.ckpt") == text
        assert os.listdir(bucket / "runs") == ["a.ckpt"]
    with remote(tmp_path).read() as local:
        assert read(local) == "new"
    assert os.listdir(tmp_path) == ["bucket"]


@IS_FOLDER
def test_a_rank_that_raises_leaves_the_old_checkpoint(is_folder: bool, tmp_path: Path, bucket: Path) -> None:
    write(tmp_path, "old", is_folder)
    with pytest.raises(ValueError, match="full disk"):
        write_half(tmp_path)
    assert read(bucket / "runs" / "a.ckpt") == "old"
    assert os.listdir(bucket / "runs") == ["a.ckpt"]


@IS_FOLDER
def test_wherever_rank_zero_dies_there_is_the_old_checkpoint_or_the_new_one(is_folder: bool, tmp_path: Path, bucket: Path) -> None:
    runs, ends, number = bucket / "runs", set(), 0
    while True:
        Bucket.changes_left = None
        if runs.exists():
            fsspec.filesystem("bucket").rm("runs", recursive=True)
        write(tmp_path, "old", is_folder)
        Bucket.changes_left = number
        try:
            write(tmp_path, "new", is_folder)
        except KeyboardInterrupt:
            found = {read(runs / name) for name in os.listdir(runs) if not name.endswith(".partial")} - {""}
            assert found <= {"old", "new"}
            assert found
            ends |= found
            at_path = read(runs / "a.ckpt") if (runs / "a.ckpt").exists() else ""
            Bucket.changes_left = None
            write(tmp_path, "next", is_folder)  # what is left is in nobody's way
            assert (read(runs / "a.ckpt"), os.listdir(runs)) == ("next", ["a.ckpt"]), at_path
        else:
            break
        number += 1
    assert number > 3
    assert ends == {"old", "new"}


def test_folder_that_is_no_checkpoint_is_left_alone(tmp_path: Path, bucket: Path) -> None:
    (bucket / "runs" / "a.ckpt").mkdir(parents=True)
    (bucket / "runs" / "a.ckpt" / "thesis.tex").write_text("years")
    with pytest.raises(IsADirectoryError, match="holds no checkpoint"):
        write(tmp_path, "new", is_folder=True)
    assert os.listdir(bucket / "runs" / "a.ckpt") == ["thesis.tex"]


def test_addresses_of_this_machine_are_paths(tmp_path: Path, bucket: Path) -> None:
    assert local_path("a.ckpt") == Path("a.ckpt")
    assert local_path(f"file://{tmp_path}/a.ckpt") == tmp_path / "a.ckpt"
    assert local_path("bucket://a.ckpt") is None
    assert local_path("memory://a.ckpt") is None


class Two(ShardedLanguage):
    def train_dataloader(self) -> Any:
        return loader([pad(sentences(8)[i : i + 2]) for i in range(0, 8, 2)])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return language_loss(self.net(batch["input_ids"]), batch["labels"])


class Saves(pl.Callback):
    """Twice under the same name."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint("bucket://runs/last.ckpt")


@pytest.mark.exhaustive
@needs_sharding_on_cpu
@pytest.mark.parametrize("is_distributed", [True, False], ids=["a folder", "one file"])
def test_training_goes_on_from_a_checkpoint_under_a_url(is_distributed: bool, bucket: Path) -> None:
    def run(epochs: int, **kwargs: Any) -> dict[str, Tensor]:
        strategy = fsdp2(save_distributed_checkpoint=is_distributed)
        of_run = trainer(strategy, devices=2, accumulate_grad_batches=2, max_epochs=epochs, callbacks=[Saves()])
        module = Two("adamw")
        if kwargs:
            torch.nn.init.zeros_(module.net.position)  # the checkpoint has it
        of_run.fit(module, **kwargs)
        return of_run.whole

    expected = run(3)
    fsspec.filesystem("bucket").rm("runs", recursive=True)
    run(2)
    assert os.listdir(bucket / "runs") == ["last.ckpt"]
    assert (bucket / "runs" / "last.ckpt").is_dir() == is_distributed
    assert not any(name.startswith("bucket:") for name in os.listdir())  # a folder of this name is what Lightning writes
    found = run(3, ckpt_path="bucket://runs/last.ckpt")
    assert relative_error(found.values(), expected.values()) == 0
