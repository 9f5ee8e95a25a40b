"""Checkpoints of sharded modules on remote file systems: Lightning reads and writes them in local folders only."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from lightning_accum.errors import CheckpointPathError

LAST = "meta.pt"
"""What Lightning writes last into the folder of a checkpoint: one without it is none."""


class Remote:
    """A checkpoint on a remote file system, that ranks write to local folders of their nodes, and read from there.

    Such a file system cannot rename a folder at once. So its last file is copied last, and deleted first.

    Args:
        url: of the checkpoint, a file or a folder.
        local: a path that no node has, the same on all.
        is_rank_zero: this is the rank that names and deletes.
        is_first_of_node: this is the rank that copies what is in the local folder of its node.
        barrier: waits for all ranks.

    Raises:
        IsADirectoryError: there is a folder that is no checkpoint.
    """

    def __init__(self, url: str, local: Path, is_rank_zero: bool, is_first_of_node: bool, barrier: Callable[[], None]) -> None:
        self._files, self._path = url_to_fs(url)
        self._local = local
        self._is_rank_zero = is_rank_zero
        self._is_first_of_node = is_first_of_node
        self._barrier = barrier
        folder, _, name = self._path.rstrip("/").rpartition("/")
        name = name.replace("ckpt_", "ckpt-")  # as in ``whole.py``
        self._partial, self._replaced = (f"{folder}/.{name}.{kind}" for kind in ("partial", "replaced"))

    @contextmanager
    def written_whole(self) -> Iterator[Path]:
        """Yield the local path for all ranks to write to, and put what they have written in the place of the old checkpoint.

        The old one is there until the new one is on the remote file system, and again when a rank raises. When rank 0 dies between
        moving it aside and naming the new one, the next call puts it back.
        """
        self._begin()
        is_other = self._files.exists(self._path) and not (self._is_whole(self._path) or self._is_whole(self._replaced))
        if is_other and self._files.ls(self._path):
            raise CheckpointPathError(f"The checkpoint path exists, and is a folder that holds no checkpoint: {self._path}")
        self._barrier()  # all have looked
        if self._is_rank_zero:
            if self._is_whole(self._replaced) and not self._is_whole(self._path):
                self._move(self._replaced, self._path)
            self._delete(self._replaced)
            self._delete(self._partial)
        try:
            yield self._local
            self._barrier()  # all have written
            if self._is_first_of_node and self._local.exists():
                self._upload()
            self._barrier()
            self._files.invalidate_cache()  # others have written
        except BaseException:
            if self._is_rank_zero:
                with suppress(OSError):
                    self._delete(self._partial)
            raise
        finally:
            self._drop_local()
        if self._is_rank_zero and self._files.exists(self._partial):
            if self._files.exists(self._path):
                self._move(self._path, self._replaced)
            self._move(self._partial, self._path)
            self._delete(self._replaced)
        self._barrier()

    @contextmanager
    def read(self) -> Iterator[Path]:
        """Yield the local path, with a copy of the checkpoint."""
        self._begin()
        try:
            if self._is_first_of_node:
                self._files.get(self._path, str(self._local), recursive=self._files.isdir(self._path))
            self._barrier()
            yield self._local
            self._barrier()
        finally:
            self._drop_local()

    def _begin(self) -> None:
        self._files.invalidate_cache()
        self._local.parent.mkdir(parents=True, exist_ok=True)

    def _is_whole(self, path: str) -> bool:
        return bool(self._files.isfile(path) or self._files.isfile(f"{path}/{LAST}"))

    def _upload(self) -> None:
        if self._local.is_file():
            self._files.makedirs(self._partial.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(self._local), self._partial)
            return
        self._files.makedirs(self._partial, exist_ok=True)
        for name in sorted(os.listdir(self._local)):  # of all ranks of the node
            self._files.put_file(str(self._local / name), f"{self._partial}/{name}")

    def _move(self, path: str, target: str) -> None:
        self._delete(target)
        files = [path] if self._files.isfile(path) else sorted(self._files.find(path), key=lambda file: file.endswith(f"/{LAST}"))
        if files != [path]:
            self._files.makedirs(target, exist_ok=True)
        for file in files:
            self._files.cp_file(file, target + file[len(path) :])
        self._delete(path)

    def _delete(self, path: str) -> None:
        if self._files.isfile(f"{path}/{LAST}"):
            self._files.rm_file(f"{path}/{LAST}")
        if self._files.exists(path):
            self._files.rm(path, recursive=True)

    def _drop_local(self) -> None:
        if self._is_first_of_node:
            if self._local.is_dir():
                shutil.rmtree(self._local, ignore_errors=True)
            else:
                self._local.unlink(missing_ok=True)


def local_path(path: Any) -> Path | None:
    """A path as one of this machine; None where it is on a remote file system."""
    if "://" not in str(path):
        return Path(path)
    files, found = url_to_fs(str(path))
    return Path(found) if isinstance(files, LocalFileSystem) else None


def new_local_path() -> Path:
    """One that this node does not have."""
    return Path(tempfile.gettempdir()) / f"checkpoint-{os.urandom(8).hex()}"
