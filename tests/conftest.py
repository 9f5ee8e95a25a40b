"""Every test leaves no process behind, and starts from one thread and a quiet Lightning."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import pytest
import torch

torch.set_num_threads(1)
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.WARNING)


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    yield
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
