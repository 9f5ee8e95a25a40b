"""A training over gloo that has succeeded ends with status 0.

When the threads of torch's gloo let go of the last tensors that they have reduced, they need the Python interpreter. Where it ends
just then, they abort the process ("terminate called without an active exception", pytorch/pytorch#190489; read in torch 2.13): a
training that is done then looks like one that failed. Lightning ends process groups of NCCL only.
"""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_LONGEST_REST = 5.0  # seconds


@cache
def wait_for_gloo_threads() -> None:
    """Have the interpreter end only when nothing is left to do for gloo's threads in this process."""
    atexit.register(_let_gloo_rest)


def _let_gloo_rest() -> None:
    end, looks = time.monotonic() + _LONGEST_REST, 0
    while looks < 3 and time.monotonic() < end:
        time.sleep(0.005)  # the interpreter is theirs meanwhile, so one that sleeps has nothing to do
        looks = looks + 1 if _are_asleep() else 0


def _are_asleep() -> bool:
    """True where there are none, and where the system (other than Linux) does not show them."""
    for task in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it ended meanwhile
            name, _, rest = task.read_text().partition(" (")[2].rpartition(") ")
            if name.startswith("pt_gloo") and not rest.startswith("S"):
                return False
    return True
