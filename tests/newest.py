"""Run the tests in an environment of their own, with the newest releases that pip finds or on the oldest versions allowed.

``python tests/newest.py`` makes a virtual environment in a temporary directory, installs the checkout with its ``[test]`` extra
there, without any constraint that the caller has, runs the tests and exits with pytest's code. ``--constraint FILE`` does the same
with the versions of a file (``.ci/constraints.txt``: those of CI), ``--lower-bounds`` with each dependency, the demo's too, at the
lower bound that pyproject.toml has, both of Lightning's packages among them, and this package as a wheel. Arguments that it does
not know go to pytest: ``python tests/newest.py tests/promises/test_losses.py -k RMSE``.
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "notebooks" / "site" / "docs" / "how-it-works.md"
TABLE = re.compile("(?<=<!-- versions -->\n).*?(?=<!-- end of versions -->)", re.DOTALL)
TOOLS = [
    "pytest>=8.3",
    "pytest-rerunfailures>=15",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.8",
    "rich>=13.7",
    "tensorboard>=2.18",
]
OF_OTHERS = ("PYTHONPATH", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT", "PIP_REQUIREMENT", "PIP_NO_DEPS", "PIP_PRE", "PIP_ONLY_BINARY")
"""Variables that would change what is installed or imported. Where packages come from stays pip's own configuration."""
VERSIONS = """import platform, importlib.metadata as of
print(platform.python_version(), *map(of.version, ('torch', 'lightning', 'torchmetrics')))"""


@dataclass(frozen=True)
class Environment:  # a virtual environment in a directory; variables named in ``left_out`` do not reach into it
    directory: Path
    left_out: Sequence[str] = OF_OTHERS

    def make(self, python: str) -> None:  # make it with this Python, if it is not there
        if not self.python.exists():
            self.run(python, "-m", "venv", str(self.directory))

    @property
    def python(self) -> Path:  # its interpreter
        return self.directory / ("Scripts" if os.name == "nt" else "bin") / "python"

    def pip_install(self, *arguments: str) -> None:  # install into it
        self.run(str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)

    def printed(self, code: str) -> str:  # what Python prints there
        return self.run(str(self.python), "-c", code, capture_output=True).stdout.strip()

    def versions(self) -> list[str]:  # those of Python, torch, lightning and torchmetrics
        return self.printed(VERSIONS).split()

    def run(self, *command: str, check: bool = True, capture_output: bool = False) -> subprocess.CompletedProcess[str]:
        """Run something there, from the checkout."""
        environment = {name: value for name, value in os.environ.items() if name not in self.left_out}
        return subprocess.run(command, cwd=ROOT, env=environment, check=check, capture_output=capture_output, text=True)


def lower_bounds() -> list[str]:
    """What the installed package requires, with its demo, each pinned to its lower bound: ``["torch==2.6", ...]``."""
    found = [Requirement(text) for text in requires("lightning-accum") or ()]
    wanted = [one for one in found if one.marker is None or one.marker.evaluate({"extra": "demo"})]
    return [f"{one.name}=={bound.version}" for one in wanted for bound in one.specifier if bound.operator == ">="]


def install(environment: Environment, options: argparse.Namespace) -> None:  # the package, in the versions that were asked for
    if not options.lower_bounds:
        constraint = [] if options.constraint is None else ["--constraint", str(options.constraint.resolve())]
        environment.pip_install("--upgrade", "--upgrade-strategy", "eager", *constraint, "-e", f"{ROOT}[test]")
        return
    pinned = lower_bounds()
    second = [f"pytorch-{pin}" for pin in pinned if pin.startswith("lightning==")]  # which lightning requires in any version
    environment.pip_install(*pinned, *second, *TOOLS)
    environment.pip_install("--no-deps", "--force-reinstall", str(ROOT))


def counts(junit: Path) -> list[int]:  # how many tests passed, were skipped, and failed, errors outside of tests included
    suites = list(ElementTree.parse(junit).iter("testsuite")) if junit.exists() else []
    total, skipped, *failed = (
        sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "skipped", "failures", "errors")
    )
    return [total - skipped - sum(failed), skipped, sum(failed)]


def main() -> int:
    """Make an environment, have everything installed into it, run pytest there, and clean up. Returns pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="make the environment with this Python (default: the running one)")
    parser.add_argument("--environment", type=Path, metavar="DIR", help="make it there and keep it, or use the one that is there")
    parser.add_argument("--write", action="store_true", help="put the versions and the result into the site's table")
    parser.add_argument("--lower-bounds", action="store_true", help="install each dependency at its lower bound")
    parser.add_argument("--constraint", type=Path, help="a file of versions to keep to, as pip's option")
    options, arguments = parser.parse_known_args()
    if options.write and arguments:
        raise SystemExit(f"--write is for all of the tests, not for {arguments}")
    label = "lower bounds" if options.lower_bounds else f"`{options.constraint}`" if options.constraint else "newest releases"
    with tempfile.TemporaryDirectory(prefix="tests_of_lightning_accum_") as temporary:
        environment, junit = Environment(options.environment or Path(temporary) / "environment"), Path(temporary) / "results.xml"
        environment.make(options.python)
        install(environment, options)
        versions = environment.versions()
        print(*versions, flush=True)
        # benchmarks need a newer torch than the oldest
        asked = arguments or (["tests", "--doctest-ignore-import-errors"] if options.lower_bounds else [])
        # not "python -m pytest", which would put the checkout before the installed package
        code = environment.run(str(environment.python.with_name("pytest")), f"--junitxml={junit}", *asked, check=False).returncode
        row = f"| {label} | " + " | ".join(map(str, [*versions, datetime.date.today().isoformat(), *counts(junit)])) + " |"
    print(row)
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        header, line, *rows = TABLE.search(page)[0].splitlines()  # type: ignore[index]
        rows = sorted([row, *(one for one in rows if not one.startswith(f"| {label} |"))], reverse=True)
        PAGE.write_text(TABLE.sub("\n".join([header, line, *rows, ""]), page), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
