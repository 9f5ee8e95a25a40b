"""What the documentation shows exists and runs: public names, the README's and the guide's code, notebooks, links."""

import doctest
import inspect
import json
import os
import re
from pathlib import Path

import pytest

import lightning_accum
from lightning_accum.fabric import Accumulator

ROOT = Path(__file__).parents[2]
SITE = ROOT / "notebooks" / "site" / "docs"
FOLDERS = ("", "notebooks", "notebooks/examples", "lightning_accum", "tests/promises")
PAGES = [*(ROOT / folder / "README.md" for folder in FOLDERS), ROOT / "CONTRIBUTING.md", *sorted(SITE.rglob("*.md"))]
PUBLIC = {**{name: getattr(lightning_accum, name) for name in lightning_accum.__all__}, "Accumulator": Accumulator}
ERRORS = {name for name, value in PUBLIC.items() if isinstance(value, type) and issubclass(value, Exception)}
"""And warnings: they are caught, not called."""
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in ERRORS])
def test_every_public_name_has_an_example_that_runs(name: str) -> None:
    documented = PUBLIC[name]
    assert inspect.getdoc(documented)
    found = doctest.DocTestFinder(recurse=False).find(documented, name, globs=vars(inspect.getmodule(documented)) | {})
    assert sum(len(test.examples) for test in found) > 0
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in found:
        assert runner.run(test).failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_docstring_says_what_it_is_and_which_errors_it_raises(name: str) -> None:
    documented = PUBLIC[name]
    text = inspect.getdoc(documented) or ""
    assert re.match(r"[A-Z][^\n]*(\n[^\n]+)*?\.(\n|$)", text), "begins with a sentence"
    if name not in ERRORS:
        assert "Args:\n" in text
        assert "Raises:\n" in text
        described = set(re.findall(r"^    (\w+): ", text, re.MULTILINE))
        assert {argument for argument in inspect.signature(documented).parameters if argument != "gone"} <= described


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_the_pages_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        found = Path(os.path.normpath(page.parent / path)) if path else page
        assert found.exists(), target
        if heading:
            headings = [re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-") for line in found.read_text().split("\n#")]
            assert any(title.startswith(heading) for title in headings), target
    for file in re.findall(r"`((?:tests|lightning_accum|notebooks)/[\w/]+\.\w+)", text):
        assert (ROOT / file).exists(), file


def test_the_version_is_one() -> None:
    places = {"pyproject.toml": r'^version = "(.*)"$', "CITATION.cff": r"^version: (.*)$", "CHANGELOG.md": r"^## ([\d.]+)"}
    found = {file: re.search(pattern, (ROOT / file).read_text(), re.MULTILINE) for file, pattern in places.items()}
    assert {file: match and match[1] for file, match in found.items()} == dict.fromkeys(places, lightning_accum.__version__)


def test_commits_are_checked_by_the_commands_of_ci() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert "- run: .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    for entry in re.findall(r"entry: (.*)", (ROOT / ".pre-commit-config.yaml").read_text()):
        assert entry.replace(" --force-exclude", "") in ci


def test_files_named_in_how_it_works_exist() -> None:
    package = ROOT / "lightning_accum"
    rows = re.findall(r"^\| (`.*?`|here) \| (.*) \|$", (package / "README.md").read_text(), re.MULTILINE)
    for folders, text in rows:
        named = set(re.findall(r"`(\w+\.py)`", text))
        for folder in re.findall(r"`(\w+)/`", folders) or ["."]:
            files = {path.name for path in (package / folder).glob("*.py")} - {"__init__.py", "__main__.py"}
            if named:
                assert named == files, folder
    known = {folder for folders, _ in rows for folder in re.findall(r"`(\w+)/`", folders)}
    assert known == {path.parent.name for path in package.glob("*/__init__.py")}


def test_the_index_of_promises_names_each_of_their_files() -> None:
    promises = ROOT / "tests" / "promises"
    named = re.findall(r"`(test_\w+\.py)`", (promises / "README.md").read_text())
    assert set(named) == {path.name for path in promises.glob("test_*.py")}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_show_what_they_do_and_nothing_of_a_machine(notebook: Path) -> None:
    content = json.loads(notebook.read_text())
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "not executed from top to bottom"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert [output for output in outputs if "image/png" in output.get("data", {})], "no figure"
    for output in outputs:
        shown = "".join(output.get("text", "")) + "".join(output.get("data", {}).get("text/plain", ""))
        assert not re.search(r"(?<![\w.])/(?:work|tmp|home|root|usr|Users)/", shown), shown
    assert any("assert " in "".join(cell["source"]) for cell in cells)
