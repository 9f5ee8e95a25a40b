"""The wheel: it has what the package needs, its page on an index has no relative links, and what it installs runs."""

import email
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=200)
    (built,) = folder.glob("lightning_accum-*.whl")
    return built


@pytest.mark.exhaustive
def test_wheel_has_the_package_its_types_and_its_license(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in (ROOT / "lightning_accum").rglob("*") if path.suffix in (".py", ".typed")]
    assert {path.relative_to(ROOT).as_posix() for path in files} <= names
    assert any(name.endswith("/LICENSE") for name in names)
    assert not [name for name in names if not name.startswith("lightning_accum")]


@pytest.mark.exhaustive
def test_page_on_an_index_has_absolute_links_that_lead_to_files(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_string(archive.read(name).decode())
    page = metadata.get_payload()
    assert isinstance(page, str)
    assert page.startswith("# lightning_accum")
    assert metadata["Description-Content-Type"].startswith("text/markdown")
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    assert len(targets) > 10
    for target in targets:
        assert target.startswith("https://"), target
        of_project = re.search(r"\.invalid/lightning-accum/(raw|blob)/main/([^#]+)", target)
        if of_project is not None:
            assert (ROOT / of_project[2]).exists(), target
            assert (of_project[1] == "raw") == target.endswith(".png")


@pytest.mark.exhaustive
def test_installed_wheel_is_imported_and_its_command_runs(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    subprocess.run(
        [*PIP, "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True, timeout=100
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}

    def printed(*command: str) -> str:
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=100).stdout.strip()

    code = "import lightning_accum; lightning_accum.GradientAccumulation(8); print(lightning_accum.__file__)"
    assert Path(printed(sys.executable, "-c", code)) == target / "lightning_accum" / "__init__.py"
    assert printed(sys.executable, str(target / "bin" / "lightning-accum"), "--version") == "lightning-accum 0.1.0"
