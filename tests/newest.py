"""Run the tests as the README says, in an environment of their own, with the newest releases that pip finds.

``python tests/newest.py`` makes a virtual environment in a temporary directory, installs the checkout with its ``[test]`` extra
there, without any constraint that the caller has, runs the tests and exits with pytest's code. Arguments that are not listed by
``--help`` go to pytest: ``python tests/newest.py tests/promises/test_losses.py -k RMSE``. On Linux torch brings several GB of CUDA
libraries; the environment variable ``TMPDIR`` moves the directory, and ``--environment DIR`` keeps it for the next time.

``python tests/newest.py --constraint .ci/constraints.txt`` does the same with the versions of CI.
"""

from __future__ import annotations

import sys
from pathlib import Path

from environments import ROOT, Environment, parsed, parser, run_tests


def main() -> int:
    """Read the command line, and run."""
    made = parser(__doc__)
    made.add_argument("--constraint", type=Path, help="a file of versions to keep to, as pip's option")
    options = parsed(made)
    constraint = [] if options.constraint is None else ["--constraint", str(options.constraint.resolve())]
    label = "newest releases" if options.constraint is None else f"`{options.constraint}`"

    def install(environment: Environment) -> None:
        environment.pip_install("--upgrade", "--upgrade-strategy", "eager", *constraint, "-e", f"{ROOT}[test]")

    return run_tests(options, label, install, [])


if __name__ == "__main__":
    sys.exit(main())
