"""The same tests with ``import pytorch_lightning as pl``: pytest on a copy of them with the other package's names.

python tests/second_package.py                             # all of them
python tests/second_package.py tests/engines/test_ddp.py -k spawn  # with pytest's arguments
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_IN_A_STRING = re.compile(r'(?<=["=])lightning\.')


def copied(source: Path, target: Path) -> None:
    """Copy a folder of tests, with the names of ``pytorch_lightning`` in its Python files."""
    for file in source.rglob("*"):
        if not file.is_file() or "__pycache__" in file.parts:
            continue
        there = target / file.relative_to(source)
        there.parent.mkdir(parents=True, exist_ok=True)
        content = file.read_bytes()
        there.write_bytes(of_second(content.decode()).encode() if file.suffix == ".py" else content)


NAMES_BOTH = "test_both_packages.py"  # it asks for both packages by name, and so it would contradict itself


def of_second(source: str) -> str:  # a test, with the names of ``pytorch_lightning``, also where they are strings
    return _IN_A_STRING.sub("pytorch_lightning.", of_names(source))


def of_names(source: str) -> str:  # the same, but for strings
    return source.replace("lightning.pytorch", "pytorch_lightning").replace("lightning.fabric", "lightning_fabric")


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Copy the tests to a directory, and run pytest there on the package as it is here."""
    copied(ROOT / "tests", directory / "tests")
    with (directory / "tests" / "conftest.py").open("a") as conftest:
        print("logging.getLogger('pytorch_lightning').addHandler(logging.StreamHandler())", file=conftest)  # as `lightning` does
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md"):
        (directory / name).write_text(of_names((ROOT / name).read_text(encoding="utf-8")), encoding="utf-8")
    project = (".ci", ".github", ".pre-commit-config.yaml", "CONTRIBUTING.md", "CITATION.cff", "LICENSE")
    for name in ("lightning_accum", "notebooks", *project):  # where tests look for them
        (directory / name).symlink_to(ROOT / name)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--ignore-glob=*{NAMES_BOTH}", *(arguments or ("tests",))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(command, cwd=directory, env={**environment, "PYTHONPATH": paths}, check=False, text=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(run(Path(temporary), *sys.argv[1:]).returncode)
