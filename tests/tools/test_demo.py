"""The command ``lightning-accum demo``: every mix of ranks, window and micro-batch ends where the full batch does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion


@pytest.mark.timeout(400)
@pytest.mark.parametrize("epochs", [pytest.param(1, marks=pytest.mark.exhaustive), pytest.param(3, marks=pytest.mark.slow)])
def test_every_mix_ends_at_the_full_batch_and_lightnings_own_accumulation_elsewhere(epochs: int, tmp_path: Path) -> None:
    arguments = ["demo", "--epochs", str(epochs), "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-m", "lightning_accum", *arguments], capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "loss_curves.png").read_bytes().startswith(b"\x89PNG")
    rows = [line for line in done.stdout.splitlines() if re.match("Lightning |lightning_accum ", line)]
    mixes = {row[16:32].strip() for row in rows if row.startswith("lightning_accum")}
    assert any("/" in mix for mix in mixes), "a split batch"
    for parallel in ("DDP", "FSDP2") if TorchVersion(torch.__version__) >= "2.9" else ("DDP",):  # which shards on a CPU
        assert {mix.split()[0] for mix in mixes if mix.endswith(parallel)} == {"2", "4"}
    for row in rows:
        assert row.endswith(f" {4 * epochs}, {4 * epochs}"), "three windows of 32 samples and a tail of 5"
        losses, parameters = map(float, row.split()[-4:-2])
        is_other = losses > 1e-5 and parameters > 0.01
        assert is_other if row.startswith("Lightning") else max(losses, parameters) < 1e-12
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.splitlines()[-1].startswith("this package: ")
