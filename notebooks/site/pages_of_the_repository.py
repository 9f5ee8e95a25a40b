"""Pages of the site that live elsewhere in the repository: nothing of it is copied into ``docs``.

MkDocs calls :func:`on_files` before it reads the navigation, and :func:`on_page_markdown` with each page, whose links lead to files
of the repository.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter
from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "notebooks" / "site" / "docs"
PAGES = {
    "third_party.md": "notebooks/third_party.md",
    "changelog.md": "CHANGELOG.md",
}
"""Pages of the site, and the files that they are."""
_LINK = re.compile(r"(!?\[[^\]]*\])\(((?![a-z]+://|#)[^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, the figures, the examples and the notebooks."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_within_the_site(text, ROOT / source, page)))
    for figure in sorted((ROOT / "notebooks" / "figures").glob("*.png")):
        files.append(File.generated(config, f"figures/{figure.name}", content=figure.read_bytes()))
    files.append(File.generated(config, "examples.md", content=_examples()))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for name, content in _converted(notebook).items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The links of a page to files outside of ``docs``, as the pages of the site that they are."""
    source = DOCS / page.file.src_path
    return _within_the_site(markdown, source, page.file.src_path) if source.exists() else markdown


def _within_the_site(text: str, source: Path, page: str) -> str:
    """The text of a page, with links to other files of the repository as links to pages, or as the paths they name."""
    up = "../" * (len(PurePath(page).parts) - 1)

    def link(found: re.Match[str]) -> str:
        path, _, heading = found[2].partition("#")
        target = source.parent.joinpath(path).resolve()
        if DOCS in source.parents and (DOCS in target.parents or not path):
            return found[0]
        place = _place_of(target)
        return f"{found[1]}({up}{place}{f'#{heading}' * bool(heading)})" if place else f"`{target.relative_to(ROOT).as_posix()}`"

    return _LINK.sub(link, text)


def _place_of(target: Path) -> str | None:
    """The page of a file of the repository, or None."""
    path = target.relative_to(ROOT)
    if DOCS in target.parents:
        return target.relative_to(DOCS).as_posix()
    if path.parent.as_posix() == "notebooks/examples":
        return "examples.md" + f"#{path.name.replace('.', '').lower()}" * (path.name != "README.md")
    if path.suffix == ".ipynb":
        return f"notebooks/{path.stem}.md"
    if path.suffix == ".png":
        return f"figures/{path.name}"
    return next((page for page, file in PAGES.items() if file == path.as_posix()), None)


def _examples() -> str:
    """The scripts of ``notebooks/examples``, with what their README says of them."""
    folder = ROOT / "notebooks" / "examples"
    page = (folder / "README.md").read_text(encoding="utf-8")
    for script in sorted((*folder.glob("*.py"), *folder.glob("*.yaml"), *folder.glob("*.sbatch"))):
        language = {".py": "python", ".yaml": "yaml"}.get(script.suffix, "bash")
        page += f"\n## {script.name}\n\n```{language}\n{script.read_text(encoding='utf-8').strip()}\n```\n"
    return re.sub(r"\[([^\]]+)\]\(([\w.]+)\)", lambda found: f"[{found[1]}](#{found[2].replace('.', '').lower()})", page)


def _converted(notebook: Path) -> dict[str, str | bytes]:
    """A notebook as Markdown, and its figures, by their names."""
    exporter = MarkdownExporter(config=Config({"CoalesceStreamsPreprocessor": {"enabled": True}}))  # a cell's prints are one block
    body, resources = exporter.from_notebook_node(nbformat.read(notebook, as_version=4))
    body = re.sub(r"\]\((\w+)\.ipynb(#[^)]*)?\)", lambda found: f"]({found[1]}.md{found[2] or ''})", body)
    body = re.sub(r"\[([^\]]*)\]\(\w+\.py\)", r"\1", body).replace("](site/docs/", "](../")
    figures = {f"{notebook.stem}_{name}": content for name, content in resources["outputs"].items()}
    for name in resources["outputs"]:
        body = body.replace(f"({name})", f"({notebook.stem}_{name})")
    return {f"{notebook.stem}.md": body, **figures}
