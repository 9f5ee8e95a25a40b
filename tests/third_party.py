"""Modules of other packages, unchanged: does a window of theirs take the step of one batch?

Each package has an environment of its own, in which ``third_party_modules/training.py`` trains its modules on a little data: whole,
in windows, split, and in Lightning's own windows. ``notebooks/third_party.md`` says how, and has the table.

    python tests/third_party.py chemprop gluonts --environment DIR --write

The exit code is 1 where a module is silently wrong: more than 1e-9 off without a warning or an error.
Where packages come from, and which torch, is pip's own configuration: PIP_CONSTRAINT can keep it from installing another torch.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "notebooks" / "third_party.md"
BASE = ["torch", "lightning", "pytorch-lightning", "torchmetrics", "numpy", "pandas", "scikit-learn", "scipy"]
WAYS = ("windows", "split")
LIMIT = 1e-9
SITE_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"

sys.path.insert(0, str(ROOT / "tests"))

from newest import Environment  # noqa: E402
from third_party_modules import Package, packages  # noqa: E402

PACKAGES = packages()
Row = dict[str, Any]


def prepare(directory: Path, package: Package) -> Path:
    """Make the package's environment, unless it is there, on top of one that all share. Returns its interpreter."""
    base, own = Environment(directory / "base", ()), Environment(directory / "env" / package.name, ())
    if not (directory / "base.done").exists():
        base.make(sys.executable)
        base.pip_install(*BASE)
        (directory / "base.done").touch()
    done = own.directory.with_name(f"{package.name}.done")
    if not done.exists():
        own.make(sys.executable)
        (Path(own.printed(SITE_PACKAGES)) / "base.pth").write_text(base.printed(SITE_PACKAGES))
        own.pip_install(*package.requirements)
        done.touch()
    return own.python


def examined(directory: Path, package: Package) -> list[Row]:
    """Install a package and train its modules, in a process of their own. A package that fails is one row that says so."""
    failed = {"package": package.name, "field": package.field, "imports": package.imports, "module": "", "version": ""}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        try:
            command = [prepare(directory, package), "-W", "ignore", "-m", "third_party_modules.training", package.name, out]
            subprocess.run(command, check=True, env=environment, timeout=1800)
        except subprocess.SubprocessError as error:
            return [{**failed, "failed": f"not trained: {type(error).__name__}"}]
        rows: list[Row] = json.loads(out.read_text())
    return rows


def is_silently_wrong(row: Row) -> bool:  # whether a way deviates, or is not a number, and nothing was said
    return any(not row["said"][way] and not row["deviations"][way] <= LIMIT for way in row.get("said", ()))


def table(rows: list[Row]) -> str:  # Markdown. Modules of a package of which the same is said share a row.
    titles = ["package", "modules", "in windows, split", "Lightning's own", "what this package said"]
    lines = ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((f"{row['package']} {row['version']} ({row['field']}), `{row['imports']}`", _said(row)), []).append(row)
    last = ""
    for (name, said), same in groups.items():
        own, split, lightning = (_largest(row.get("deviations", {}).get(way) for row in same) for way in (*WAYS, "lightning"))
        modules = [row["module"] + "".join(f", `{argument}=`" for argument in row.get("arguments", ())) for row in same]
        ours = ", ".join(filter(None, dict.fromkeys((own, split))))
        lines.append(f"| {'' if name == last else name} | {'; '.join(modules)} | {ours} | {lightning} | {said} |")
        last = name
    return "\n".join(lines)


def _largest(numbers: Iterable[float | None]) -> str:
    found = [number for number in numbers if number is not None]
    return f"{max(found):.0e}".replace("e-0", "e-") if any(found) else "0" * bool(found)


def _said(row: Row) -> str:
    if "failed" in row:
        return f"nothing: {row['failed']}"
    windows, split = (row["said"][way] for way in WAYS)
    parts = [windows or "exact"] if windows == split else [f"in windows {windows or 'exact'}", f"split {split or 'exact'}"]
    wrong = "**silently wrong**; " if is_silently_wrong(row) else ""
    return (wrong + "; ".join(parts)).replace("|", "\\|")


def write(rows: list[Row], versions: str) -> None:
    """The page with its table and what is below it made anew, and the number of packages above."""
    number, before = len({row["package"] for row in rows if "failed" not in row}), PAGE.read_text(encoding="utf-8")
    introduction = re.sub(r"^\d+ packages", f"{number} packages", before[: before.index("| package ")], flags=re.MULTILINE)
    measured = f"Measured on {datetime.date.today()} with {versions}, Python {platform.python_version()}."
    PAGE.write_text(f"{introduction}{table(rows)}\n\n{measured}\n", encoding="utf-8")


def main() -> int:  # read the command line, examine the packages, print the table
    parser = argparse.ArgumentParser(description="Train modules of other packages whole, in windows and split, and compare.")
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(PACKAGES)} (default: all)")
    parser.add_argument("--environment", type=Path, help="make the environments there and keep them; use those that are there")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    if unknown := set(options.packages) - set(PACKAGES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    directory = (options.environment or Path(tempfile.mkdtemp(prefix="third_party_"))).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    try:
        for name in options.packages or PACKAGES:
            found = examined(directory, PACKAGES[name])
            print("\n".join(table(found).splitlines()[2:]), flush=True)
            rows += found
        print(f"\n{table(rows)}")
        if options.write:
            _, torch, lightning, _ = Environment(directory / "base", ()).versions()
            write(rows, f"torch {torch}, lightning {lightning}")
    finally:
        if options.environment is None:
            shutil.rmtree(directory, ignore_errors=True)
    wrong = [f"{row['package']} {row['module']}" for row in rows if is_silently_wrong(row)]
    if wrong:
        print(f"Silently wrong: {'; '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
