"""How long a script needs to import Lightning and this package: the least processor time of some processes, in turn.

    python tests/benchmarks/imports.py                          # with each of Lightning's packages
    python tests/benchmarks/imports.py --beside ../other        # and as it is in another checkout

Python keeps what it compiled in a directory that is deleted afterwards; a first process of each kind fills it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = "GradientAccumulation, AccumulationStrategy, DDPAccumulationStrategy, verify"
SCRIPTS = {
    "import lightning.pytorch": "import lightning.pytorch",
    "import pytorch_lightning": "import pytorch_lightning",
    "and from lightning_accum": f"import lightning.pytorch\nfrom lightning_accum import {NAMES}",
    "and from lightning_accum.pytorch_lightning": (
        f"import pytorch_lightning\ntry:\n    from lightning_accum.pytorch_lightning import {NAMES}\n"
        f"except ModuleNotFoundError:\n    from lightning_accum import {NAMES}"  # in a checkout from before there was one
    ),
}


def seconds(script: str, checkout: Path, cache: str) -> float:
    """Of user and system time, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONPYCACHEPREFIX": cache, "PYTHONDONTWRITEBYTECODE": ""}
    measured = f"{script}\nimport os; print(sum(os.times()[:2]))"
    command = [sys.executable, "-W", "ignore", "-c", measured]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Print a line for each script and checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--processes", type=int, default=7)
    options = parser.parse_args()
    checkouts = [ROOT, *([options.beside.resolve()] if options.beside else [])]
    cases = [(name, checkout) for name in SCRIPTS for checkout in checkouts]
    least = dict.fromkeys(cases, float("inf"))
    with tempfile.TemporaryDirectory() as cache:
        for turn in range(options.processes + 1):
            for name, checkout in cases:
                found = seconds(SCRIPTS[name], checkout, cache)
                if turn:
                    least[name, checkout] = min(least[name, checkout], found)
    for name in SCRIPTS:
        print(f"{name:45}" + "".join(f"{least[name, checkout]:8.2f} s" for checkout in checkouts))


if __name__ == "__main__":
    main()
