"""What ``newest.py`` and ``lower_bounds.py`` share: an environment of their own, and the table of tested versions."""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "notebooks" / "site" / "docs" / "versions.md"
BEGIN, END = "<!-- versions -->", "<!-- end of versions -->"
COLUMNS = ["", "Python", "torch", "lightning", "torchmetrics", "tested on", "passed", "skipped", "failed"]
OF_OTHERS = ("PYTHONPATH", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT", "PIP_REQUIREMENT", "PIP_NO_DEPS", "PIP_PRE", "PIP_ONLY_BINARY")
"""Variables that would change what is installed or imported. Where packages come from stays pip's own configuration."""
VERSIONS = (
    "import platform, importlib.metadata as of\n"
    "print(platform.python_version(), *map(of.version, ('torch', 'lightning', 'torchmetrics')))"
)


@dataclass(frozen=True)
class Environment:
    """A virtual environment in a directory; variables named in ``left_out`` do not reach into it."""

    directory: Path
    left_out: Sequence[str] = OF_OTHERS

    def make(self, python: str) -> None:
        """Make it with this Python, if it is not there."""
        if not self.python.exists():
            self._run(python, "-m", "venv", str(self.directory))

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / ("Scripts" if os.name == "nt" else "bin") / "python"

    def pip_install(self, *arguments: str) -> None:
        """Install into it."""
        self._run(str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)

    def printed(self, code: str) -> str:
        """What Python prints there."""
        return self._run(str(self.python), "-c", code, capture_output=True).stdout.strip()

    def versions(self) -> list[str]:
        """Those of Python, torch, lightning and torchmetrics."""
        return self.printed(VERSIONS).split()

    def pytest(self, arguments: Sequence[str]) -> tuple[int, list[int]]:
        """Run pytest. Returns its exit code, and how many tests passed, were skipped and failed."""
        with tempfile.TemporaryDirectory() as results:
            file = Path(results) / "results.xml"
            # not "python -m pytest", which would put the checkout before the installed package
            command = [str(self.python.with_name("pytest")), f"--junitxml={file}", *arguments]
            code = self._run(*command, check=False).returncode
            return code, counts(file.read_text(encoding="utf-8")) if file.exists() else [0, 0, 0]

    def _run(self, *command: str, check: bool = True, capture_output: bool = False) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name not in self.left_out}
        return subprocess.run(command, cwd=ROOT, env=environment, check=check, capture_output=capture_output, text=True)


def counts(junit: str) -> list[int]:
    """How many tests passed, were skipped, and failed, errors outside of tests included."""
    suites = list(ElementTree.fromstring(junit).iter("testsuite"))
    total, skipped, failed, errors = (sum(int(s.get(key, 0)) for s in suites) for key in ("tests", "skipped", "failures", "errors"))
    return [total - skipped - failed - errors, skipped, failed + errors]


def with_row(page: str, label: str, cells: Sequence[object]) -> str:
    """The text of the page with the row ``label`` of its table as given, and the other rows as they were."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise SystemExit(f"{PAGE.name}: expected one {BEGIN} and one {END}")
    before, table, after = re.split(f"{BEGIN}|{END}", page)
    rows = [row for row in table.strip().splitlines()[2:] if not row.startswith(f"| {label} |")]
    rows.append(f"| {label} | " + " | ".join(map(str, cells)) + " |")
    header = ["| " + " | ".join(COLUMNS) + " |", "| " + " | ".join(["---"] * len(COLUMNS)) + " |"]
    return before + "\n".join([BEGIN, *header, *sorted(rows, reverse=True), END]) + after


def run_tests(options: argparse.Namespace, label: str, install: Callable[[Environment], None], arguments: Sequence[str]) -> int:
    """Make an environment, have everything installed into it, run pytest there, and clean up. Returns pytest's exit code."""
    if options.write and options.pytest_arguments:
        raise SystemExit(f"--write is for all of the tests, not for {options.pytest_arguments}")
    environment = Environment(options.environment or Path(tempfile.mkdtemp(prefix="tests_of_lightning_accum_")))
    try:
        environment.make(options.python)
        install(environment)
        versions = environment.versions()
        print(" ".join(f"{name} {version}" for name, version in zip(COLUMNS[1:5], versions, strict=True)), flush=True)
        code, found = environment.pytest(options.pytest_arguments or arguments)
    finally:
        if options.environment is None:
            shutil.rmtree(environment.directory, ignore_errors=True)
    cells = [*versions, datetime.date.today().isoformat(), *found]
    print(f"| {label} | " + " | ".join(map(str, cells)) + " |")
    if options.write:
        PAGE.write_text(with_row(PAGE.read_text(encoding="utf-8"), label, cells), encoding="utf-8")
    return code


def parser(description: str) -> argparse.ArgumentParser:
    """The options that both scripts have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--python", default=sys.executable, help="make the environment with this Python (default: the running one)")
    made.add_argument("--environment", type=Path, metavar="DIR", help="make it there and keep it, or use the one that is there")
    made.add_argument("--write", action="store_true", help="put the versions and the result into the site's table")
    return made


def parsed(of: argparse.ArgumentParser) -> argparse.Namespace:
    """The options. What is none is for pytest: ``pytest_arguments``."""
    options, options.pytest_arguments = of.parse_known_args()
    return options
