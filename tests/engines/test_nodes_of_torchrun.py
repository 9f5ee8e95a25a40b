"""Two nodes of one process each, started by torchrun as on two machines, here over the loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from processes import free_port
from sharded import needs_sharding_on_cpu
from support import python_path

DEADLINE = 90
SCRIPT = """
import os
import sys
from datetime import timedelta
from pathlib import Path

from sharded import ShardedScalar, whole_parameters
from support import trainer, x
import lightning_accum

# the rank of node 1 ends an epoch earlier
BATCHES = [[x(1), x(1, 2, 3), x(4), x(9, 8), x(6)], [x(5), x(7), x(2, 2)]]

if __name__ == "__main__":
    Path(f"node{os.environ['GROUP_RANK']}.pid").write_text(str(os.getpid()))
    module = ShardedScalar(by_rank=BATCHES)
    run = trainer(sys.argv[1], devices=1, num_nodes=2, accumulate_grad_batches=2)
    run.strategy._timeout = timedelta(seconds=60)
    run.fit(module)
    total = -whole_parameters(module)["layer.weight"].item()
    found = [run.node_rank, run.global_rank, run.world_size, run.global_step, total]
    Path(f"node{run.node_rank}.txt").write_text(" ".join(map(repr, found)))
"""
WINDOWS = [[1, 1, 2, 3, 5, 7], [4, 9, 8, 2, 2], [6]]


def start_node(node: int, port: int, strategy: str) -> subprocess.Popen:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--node_rank", str(node)]
    torchrun += ["--rdzv_backend", "static", "--master_addr", "127.0.0.1", "--master_port", str(port)]
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    with open(f"node{node}.log", "wb") as log:
        return subprocess.Popen([*torchrun, "script.py", strategy], env=environment, stdout=log, stderr=subprocess.STDOUT)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "strategy", ["accum_ddp", pytest.param("accum_model_parallel", marks=[needs_sharding_on_cpu, pytest.mark.slow])]
)
def test_two_nodes_equal_the_full_batch(strategy: str) -> None:
    Path("script.py").write_text(SCRIPT)
    port, deadline = free_port(), time.monotonic() + DEADLINE
    nodes = [start_node(node, port, strategy) for node in range(2)]
    try:
        while any(node.poll() is None for node in nodes) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for node in [node for node in range(2) if nodes[node].poll() is None]:
            with suppress(FileNotFoundError, ProcessLookupError):  # first what torchrun has started, which does not end with it
                os.kill(int(Path(f"node{node}.pid").read_text()), signal.SIGKILL)
            nodes[node].kill()
    logs = "\n".join(Path(f"node{node}.log").read_text() for node in range(2))
    assert [node.wait() for node in nodes] == [0, 0], logs
    for node in range(2):
        *numbers, total = Path(f"node{node}.txt").read_text().split()
        assert list(map(int, numbers)) == [node, node, 2, 3]
        assert float(total) == pytest.approx(sum(sum(window) / len(window) for window in WINDOWS), rel=1e-14)
