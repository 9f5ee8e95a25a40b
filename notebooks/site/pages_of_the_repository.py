"""Pages of the site that live elsewhere in the repository: nothing of it is copied into ``docs``.

MkDocs calls :func:`on_files` before it reads the navigation.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter
from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "third_party.md": "notebooks/third_party.md",
    "changelog.md": "CHANGELOG.md",
}
"""Pages of the site, and the files that they are."""
_LINK = re.compile(r"(!?\[[^\]]*\])\(((?![a-z]+://|#)[^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, the figures, the examples and the notebooks."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=_within_the_site((ROOT / source).read_text(encoding="utf-8"), source)))
    for figure in sorted((ROOT / "notebooks" / "figures").glob("*.png")):
        files.append(File.generated(config, f"figures/{figure.name}", content=figure.read_bytes()))
    files.append(File.generated(config, "examples.md", content=_examples()))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for name, content in _converted(notebook).items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def _within_the_site(text: str, source: str) -> str:
    """A page with its links to pages of the site as such, and its other relative ones as the paths they name."""
    places = {(ROOT / file).resolve(): page for page, file in PAGES.items()}

    def link(found: re.Match[str]) -> str:
        path, _, heading = found[2].partition("#")
        target = (ROOT / source).parent.joinpath(path).resolve()
        if target in places:
            return f"{found[1]}({places[target]}{'#' * bool(heading)}{heading})"
        if (Path(__file__).parent / "docs") in target.parents:
            page = target.relative_to(Path(__file__).parent / "docs").as_posix()
            return f"{found[1]}({page}{'#' * bool(heading)}{heading})"
        return f"`{target.relative_to(ROOT).as_posix()}`"

    return _LINK.sub(link, text)


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
