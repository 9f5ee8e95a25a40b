"""A checkpoint that many ranks write is there whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_checkpoint(path: Path, is_rank_zero: bool, barrier: Callable[[], None]) -> Iterator[Path]:
    """Yield a hidden path beside ``path`` for all ranks to write to, and give it its name when all have written.

    What was at ``path`` stays whole until then, and is there still when a rank raises. When rank 0 dies between moving it aside and
    naming the new one, the next call puts it back. Where nothing was written, ``path`` is left alone.

    Args:
        path: the checkpoint, a file or a folder, on a filesystem that all ranks share.
        is_rank_zero: this is the rank that names and deletes.
        barrier: waits for all ranks. Called three times; never after the body has raised, when other ranks may be gone.

    Raises:
        OSError: on rank 0, what is left of an earlier crash cannot be deleted, or the checkpoint cannot be named.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "last.ckpt"
        >>> with atomic_checkpoint(path, is_rank_zero=True, barrier=lambda: None) as partial:
        ...     _ = partial.write_text("weights")
        ...     partial.name, path.exists()
        ('.last.ckpt.partial', False)
        >>> path.read_text(), partial.exists()
        ('weights', False)
    """
    # Lightning takes all with "ckpt_" in its name for what SLURM's jobs resume from (its _CheckpointConnector, read in 2.6)
    name = path.name.replace("ckpt_", "ckpt-")
    partial, replaced = path.with_name(f".{name}.partial"), path.with_name(f".{name}.replaced")
    if is_rank_zero:
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(replaced) and not os.path.lexists(path):
            os.replace(replaced, path)
        _delete(replaced)
        _delete(partial)
    barrier()
    try:
        yield partial
        barrier()
    except BaseException:
        if is_rank_zero:
            with suppress(OSError):  # other ranks may be writing still
                _delete(partial)
        raise
    if is_rank_zero and os.path.lexists(partial):
        _move(partial, path, replaced)
    barrier()
    if is_rank_zero:  # nobody has to wait for it; what cannot be deleted, the next checkpoint of this name tries to
        with suppress(OSError):
            _delete(replaced)


def _move(partial: Path, path: Path, replaced: Path) -> None:
    """Give the new checkpoint its name, at once if it and the old one are files, otherwise with the old one put aside."""
    if not os.path.lexists(path) or not (_is_folder(path) or _is_folder(partial)):
        os.replace(partial, path)
        return
    os.replace(path, replaced)
    try:
        os.replace(partial, path)
    except BaseException:
        os.replace(replaced, path)
        raise


def _delete(path: Path) -> None:
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_folder(path: Path) -> bool:
    """Whether it is a folder itself, and not a link to one, which Lightning's ``save_last="link"`` makes."""
    return path.is_dir() and not path.is_symlink()
