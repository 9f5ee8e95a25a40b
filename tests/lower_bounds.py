"""Run the tests on the oldest versions that pyproject.toml allows.

``python tests/lower_bounds.py`` makes a virtual environment in a temporary directory, installs each dependency, the demo's too,
at its lower bound, both of Lightning's packages among them, and this package as a wheel, runs the tests there and exits with
pytest's code. Arguments that are not listed by ``--help`` go to pytest:
``python tests/lower_bounds.py tests/promises/test_losses.py -k cross_entropy``. Tests that need a peer, such as transformers, skip
themselves where it is missing.

Where packages come from is pip's own configuration. The Linux wheels of torch bring several GB of CUDA libraries; an index with
CPU wheels saves them. The environment variable ``TMPDIR`` moves the directory, ``--environment DIR`` keeps it for the next time.
"""

from __future__ import annotations

import sys
from importlib.metadata import requires

from environments import ROOT, Environment, parsed, parser, run_tests
from packaging.requirements import Requirement

TEST_TOOLS = ["pytest>=8.3", "pytest-rerunfailures>=15", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "rich>=13.7"]


def lower_bounds() -> list[str]:
    """What the installed package requires, with its demo, each pinned to its lower bound: ``["torch==2.6", ...]``."""
    found = [Requirement(text) for text in requires("lightning-accum") or ()]
    wanted = [one for one in found if one.marker is None or one.marker.evaluate({"extra": "demo"})]
    return [f"{one.name}=={bound.version}" for one in wanted for bound in one.specifier if bound.operator == ">="]


def install(environment: Environment) -> None:
    """Each dependency at its lower bound, and this package as a wheel."""
    pinned = lower_bounds()
    second = [f"pytorch-{pin}" for pin in pinned if pin.startswith("lightning==")]  # which lightning requires in any version
    environment.pip_install(*pinned, *second, *TEST_TOOLS, "tensorboard>=2.18")
    environment.pip_install("--no-deps", "--force-reinstall", str(ROOT))


if __name__ == "__main__":
    # benchmarks need a newer torch
    sys.exit(run_tests(parsed(parser(__doc__)), "lower bounds", install, ["tests", "--doctest-ignore-import-errors"]))
