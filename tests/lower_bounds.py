"""Run the tests on the oldest versions that pyproject.toml allows.

``python tests/lower_bounds.py`` makes a virtual environment in a temporary directory, installs each dependency, the demo's too,
at its lower bound and this package as a wheel, runs the tests there and exits with pytest's code. Arguments that are not listed
by ``--help`` go to pytest: ``python tests/lower_bounds.py tests/test_graph.py -k cross_entropy``. Tests that need a peer, such
as transformers, skip themselves where it is missing.

Where packages come from is pip's own configuration. The Linux wheels of torch bring several GB of CUDA libraries; an index with
CPU wheels saves them, and the environment variable ``TMPDIR`` moves the directory.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST_TOOLS = ["pytest>=8.3", "pytest-rerunfailures>=15", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "tensorboard>=2.18"]


def lower_bounds(pyproject: str, key: str) -> list[str]:
    """The dependencies in the list ``key``, each pinned to its lower bound: ``["torch==2.5", ...]``.

    A regular expression, since Python 3.10 has no tomllib; it refuses a dependency that it cannot read.
    """
    block = re.search(rf"^{key} = \[(.*?)\]$", pyproject, re.MULTILINE | re.DOTALL)
    dependencies = re.findall(r'"([^"]*)"', block[1]) if block else []
    bounds = [re.match(r"([\w.-]+)\s*>=\s*([\w.]+)", dependency) for dependency in dependencies]
    if not bounds or None in bounds:
        raise SystemExit(f"pyproject.toml: expected a lower bound for each of {key}, found {dependencies}")
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound]


def run_tests(python: str, directory: Path, pytest_arguments: list[str]) -> int:
    """Install everything into a virtual environment in ``directory`` and run pytest there. Returns its exit code."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pins = lower_bounds(pyproject, "dependencies") + lower_bounds(pyproject, "demo")
    print(f"{python}: {', '.join(pins)}", flush=True)
    subprocess.run([python, "-m", "venv", str(directory)], check=True)
    scripts = directory / ("Scripts" if os.name == "nt" else "bin")
    pip = [str(scripts / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *pins, *TEST_TOOLS], check=True)
    subprocess.run([*pip, "--no-deps", str(ROOT)], check=True)
    # not "python -m pytest", which would put the checkout before the installed package
    pytest = [str(scripts / "pytest"), "--doctest-ignore-import-errors"]  # benchmarks that need a newer torch
    arguments = pytest_arguments or ["tests", "-n", "2", "--dist", "loadfile"]
    return subprocess.run([*pytest, *arguments], cwd=ROOT, check=False).returncode


def main() -> int:
    """Read the command line, run, and clean up."""
    parser = argparse.ArgumentParser(description="Run the tests on the oldest versions that pyproject.toml allows.")
    parser.add_argument("--python", default=sys.executable, help="make the environment with this Python (default: the running one)")
    parser.add_argument("--keep", action="store_true", help="do not delete the environment")
    options, pytest_arguments = parser.parse_known_args()
    directory = Path(tempfile.mkdtemp(prefix="lower_bounds_"))
    try:
        return run_tests(options.python, directory, pytest_arguments)
    finally:
        if options.keep:
            print(f"The environment is kept in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
